"""``source.query``: the CQL that makes each change again, with its own timestamps.

Texts are put together a column at a time: first of cells, then of the assignments that they make, then of statements,
then of what a row needs of them. docs/messages.md says what CQL cannot say; :mod:`ringsync.changes.as_cql` says more
of it, because it remembers what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.cells import clustering_parts, composite_parts, numbers, only
from ringsync.changes.common_times import NO_CELL, ElementTimes, RowTimes, common_times, int64_array, integers
from ringsync.changes.cql_ranges import range_conditions
from ringsync.changes.flat_cells import UNKNOWN_TTL, flat
from ringsync.changes.images import change_rows_of
from ringsync.changes.query_cells import Assignments, LiveCells, assignments, deleted_names, live_cells
from ringsync.changes.schema import LIVENESS, PARTITION_DELETION, RANGE_DELETION, ROW
from ringsync.changes.texts import change_texts
from ringsync.cql.cells import Cells, cells_of, valid_mask
from ringsync.cql.identifiers import printable
from ringsync.cql.literals import CQL, message_literals
from ringsync.schema.row_image import NO_EXPIRY
from ringsync.schema.table import Column, TableSchema

Integers = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

_BEGIN, _END = "BEGIN UNLOGGED BATCH ", "; APPLY BATCH"

_LONGEST_TTL = 20 * 365 * 86400
"""s; more no statement may say (C: cql3/Attributes.MAX_TTL)."""


@dataclass(frozen=True)
class _Statements:
    """Some statements: the row of each, and the text; null: it cannot be said."""

    rows: Places
    texts: pa.Array


def queries(merged: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """A statement, or a batch of several, for each merged change row.

    Null for a row of which CQL can say nothing: all rows of tables of counters, whose statements add while a change
    has the total, rows with a key that has no literal, a deletion of list entries.

    :param merged: change rows (``CHANGE_ROWS``) of this table
    :returns: string
    """
    count = len(merged)
    if any(column.is_counter for column in table.columns):
        return pa.nulls(count, pa.string())
    kinds = numbers(merged["kind"])
    keys = _keys(merged, table, kinds)
    cells = live_cells(merged, table)
    found = [
        *_row_deletions(merged, table, kinds, keys.where),
        _range_deletions(merged, table, kinds),
        *_cell_deletions(merged, table, cells, keys.where),
        *_writes(merged, table, cells, keys),
    ]
    return _by_row(found, count)


def snapshot_queries(images: pa.RecordBatch, table: TableSchema, unknown_at_us: int) -> pa.Array:
    """The same for rows that were read: what writes them into an empty table.

    A row whose own liveness is not known gets that of most of its cells; if it has none, that of most of its
    partition's static ones. TTLs are what the times of writing and expiry make them. Static cells are in the query of
    the first row of their partition in this batch.

    :param images: row images of this table
    :param unknown_at_us: µs, when what has no known time was written at the latest: that is its timestamp
    :returns: string
    """
    rows = _with_liveness(change_rows_of(images, table, unknown_at_us=unknown_at_us), images)
    found = queries(rows, table)
    of_image = numbers(rows["position"])
    said = np.bincount(of_image, valid_mask(found), len(images))
    found = pc.if_else(pa.array(said[of_image] > 1), _unpacked(found), found)
    return _by_row([_Statements(of_image, found)], len(images))


def _with_liveness(rows: pa.RecordBatch, images: pa.RecordBatch) -> pa.RecordBatch:
    """Change rows of images with the liveness that those rows probably have whose own is not known."""
    ttl = rows["liveness"].field("ttl")
    unknown = valid_mask(rows["liveness"]) & valid_mask(ttl) & (integers(ttl) == UNKNOWN_TTL)
    of_cells, of_image = _times_of_most(rows), images["_row"].take(rows["position"])
    has_cells = of_cells.expiries != NO_CELL
    # What most cells of the image have is of static ones where the row has no others.
    writetime, expires_at = (pc.struct_field(of_image, name) for name in ("writetime", "expires_at"))
    guessed = unknown & (has_cells | valid_mask(writetime))
    timestamps = np.where(has_cells, of_cells.writetimes, integers(writetime))
    expiries = np.where(has_cells, of_cells.expiries, integers(pc.fill_null(expires_at, NO_EXPIRY)))
    expiring = expiries >= 0
    fields = [
        pa.array(timestamps),
        int64_array(np.zeros(len(rows), np.int64), expiring).cast(pa.int32()),
        int64_array(expiries, expiring),
    ]
    liveness = pa.StructArray.from_arrays(fields, fields=list(LIVENESS))
    found = pc.if_else(pa.array(guessed), liveness, rows["liveness"])
    return rows.set_column(rows.schema.get_field_index("liveness"), "liveness", found)


def _times_of_most(rows: pa.RecordBatch) -> RowTimes:
    """The times that most cells of each row have; cells of unknown times do not count."""
    cells = flat(rows["cells"])
    cells = cells.where(~cells.unknown)
    starts = np.concatenate([[0], np.cumsum(np.bincount(cells.row, minlength=len(rows)))]).astype(np.int32)
    nothing = np.empty((0, len(rows)), np.int64)
    return common_times(nothing, nothing, [ElementTimes(starts, cells.numbers("timestamp"), cells.expiries)], len(rows))


def _unpacked(found: pa.Array) -> pa.Array:
    """The statements of batches, so that they can go into another."""
    batch = pc.starts_with(found, _BEGIN)
    inner = pc.utf8_slice_codeunits(found, len(_BEGIN), -len(_END))
    return pc.if_else(batch, inner, found)


@dataclass(frozen=True)
class _Keys:
    """The keys of all rows: as conditions, and as values of an INSERT; null where there is no literal."""

    where: pa.Array
    values: pa.Array


def _keys(merged: pa.RecordBatch, table: TableSchema, kinds: Integers) -> _Keys:
    cells = cells_of(merged["partition_key"])
    parts = [cells] if len(table.partition_key) == 1 else composite_parts(cells, len(table.partition_key))
    texts = _literals(table.partition_key, parts)
    where, values = _conditions(table.partition_key, texts), _joined_columns(texts, ", ")
    rows = np.flatnonzero(kinds == ROW)
    if not table.clustering or not len(rows):
        return _Keys(where, values)
    _, parts, _ = clustering_parts(only(cells_of(merged["clustering"]), rows), len(table.clustering))
    texts = _literals(table.clustering, parts)
    place = pa.array(rows)
    own = pc.binary_join_element_wise(where.take(place), _conditions(table.clustering, texts), " AND ")
    own_values = pc.binary_join_element_wise(values.take(place), _joined_columns(texts, ", "), ", ")
    if len(rows) == len(merged):
        return _Keys(own, own_values)
    back = np.arange(len(merged))
    back[rows] = len(merged) + np.arange(len(rows))
    return _Keys(*(pa.concat_arrays(pair).take(pa.array(back)) for pair in ((where, own), (values, own_values))))


def _literals(columns: Sequence[Column], parts: Sequence[Cells]) -> list[pa.Array]:
    return [message_literals(column.type, cells) for column, cells in zip(columns, parts, strict=True)]


def _conditions(columns: Sequence[Column], texts: Sequence[pa.Array]) -> pa.Array:
    """``a = 1 AND b = 2``."""
    parts: list[pa.Array | str] = []
    for column, text in zip(columns, texts, strict=True):
        parts += [f"{' AND ' if parts else ''}{printable(column.name)} = ", text]
    return pc.binary_join_element_wise(*parts, "")


def _joined_columns(texts: Sequence[pa.Array], separator: str) -> pa.Array:
    return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, separator)


def _row_deletions(merged: pa.RecordBatch, table: TableSchema, kinds: Integers, where: pa.Array) -> list[_Statements]:
    """Of rows and partitions. What a static row says is the deletion of its partition, which has a row of its own."""
    there = valid_mask(merged["deletion"]) & ((kinds == ROW) | (kinds == PARTITION_DELETION))
    rows = np.flatnonzero(there)
    if not len(rows):
        return []
    times = merged["deletion"].field("timestamp").take(pa.array(rows)).cast(pa.string())
    own = where.take(pa.array(rows))
    begin = f"DELETE FROM {table.full_name} USING TIMESTAMP "
    return [_Statements(rows, pc.binary_join_element_wise(begin, times, " WHERE ", own, ""))]


def _range_deletions(merged: pa.RecordBatch, table: TableSchema, kinds: Integers) -> _Statements:
    """There are few of them, so each is an object."""
    ranges = np.flatnonzero(kinds == RANGE_DELETION)
    own = merged.take(pa.array(ranges))
    texts = change_texts(own, {table.table_id: table}, CQL) if len(ranges) else None
    rows, found = [], []
    for place, row in enumerate(ranges.tolist() if texts else ()):
        start, end = texts.clusterings[place], texts.range_ends[place]  # type: ignore[union-attr]
        key = texts.partition_keys[place]  # type: ignore[union-attr]
        if start is None or end is None or None in {*key, *start.values, *end.values}:
            continue
        pieces = range_conditions(table, start, end)
        partition = [f"{printable(c.name)} = {text}" for c, text in zip(table.partition_key, key, strict=True)]
        using = f"DELETE FROM {table.full_name} USING TIMESTAMP {own['deletion'][place]['timestamp'].as_py()} WHERE "
        found += [using + " AND ".join([*partition, *piece]) for piece in pieces]
        rows += [row] * len(pieces)
    return _Statements(np.array(rows, np.intp), pa.array(found, pa.string()))


def _cell_deletions(merged: pa.RecordBatch, table: TableSchema, cells: LiveCells, where: pa.Array) -> list[_Statements]:
    """One DELETE for what a row lost at one moment."""
    deleted = deleted_names(merged, table, cells.whole)
    if not len(deleted.rows):
        return []
    order = np.lexsort((deleted.times, deleted.rows))
    rows, times = deleted.rows[order], deleted.times[order]
    first = np.flatnonzero(np.diff(rows, prepend=-1).astype(bool) | np.diff(times, prepend=times[0]).astype(bool))
    names = _joined(deleted.names.take(pa.array(order)), first, ", ")
    using = pc.binary_join_element_wise(f" FROM {table.full_name} USING TIMESTAMP ", _texts(times[first]), "")
    own = where.take(pa.array(rows[first]))
    return [_Statements(rows[first], pc.binary_join_element_wise("DELETE ", names, using, " WHERE ", own, ""))]


def _writes(merged: pa.RecordBatch, table: TableSchema, cells: LiveCells, keys: _Keys) -> list[_Statements]:
    """INSERTs where the row itself was written, UPDATEs of what was written at other times."""
    units = assignments(cells)
    liveness = merged["liveness"]
    inserted = np.flatnonzero(valid_mask(liveness) & (numbers(merged["kind"]) == ROW))
    live = _Times.of_liveness(liveness, inserted)
    times = _Times(units.timestamps, units.ttls, units.expiries)
    place = np.full(len(merged), -1)
    place[inserted] = np.arange(len(inserted))
    own = place[units.rows]
    in_insert = (own >= 0) & units.are_whole
    in_insert[in_insert] = live.equal(own[in_insert], times, np.flatnonzero(in_insert))
    return [
        *_inserts(table, inserted, live, units, in_insert, own, keys),
        *_updates(table, times, units, ~in_insert, keys),
    ]


@dataclass(frozen=True)
class _Times:
    """Timestamps (µs), TTLs and expiries (s, -1: none)."""

    timestamps: Integers
    ttls: Integers
    expiries: Integers

    @staticmethod
    def of_liveness(liveness: pa.StructArray, rows: Places) -> _Times:
        chosen = liveness.take(pa.array(rows))
        return _Times(*(numbers(pc.fill_null(chosen.field(name), -1)) for name in ("timestamp", "ttl", "expires_at")))

    def equal(self, places: Places, others: _Times, their_places: Places) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(
            [
                mine[places] == theirs[their_places]
                for mine, theirs in (
                    (self.timestamps, others.timestamps),
                    (self.ttls, others.ttls),
                    (self.expiries, others.expiries),
                )
            ]
        )
        return found

    def take(self, places: Places) -> _Times:
        return _Times(self.timestamps[places], self.ttls[places], self.expiries[places])

    def using(self) -> pa.Array:
        """`` USING TIMESTAMP 1 AND TTL 2 /* expires_at 3 */``."""
        found = pc.binary_join_element_wise(" USING TIMESTAMP ", _texts(self.timestamps), "")
        expiring = self.expiries >= 0
        if not expiring.any():
            return found
        ttls = np.where(self.ttls > 0, self.ttls, self.expiries - self.timestamps // 1_000_000)
        ttls = _texts(np.clip(ttls, 1, _LONGEST_TTL))
        longer = pc.binary_join_element_wise(
            found, " AND TTL ", ttls, " /* expires_at ", _texts(self.expiries), " */", ""
        )
        return pc.if_else(pa.array(expiring), longer, found)


def _inserts(
    table: TableSchema,
    inserted: Places,
    live: _Times,
    units: Assignments,
    chosen: npt.NDArray[np.bool_],
    own: Places,
    keys: _Keys,
) -> list[_Statements]:
    if not len(inserted):
        return []
    names = ", ".join(printable(column.name) for column in table.key_columns)
    columns, values = _texts_after(units, np.flatnonzero(chosen), own, len(inserted))
    begin = f"INSERT INTO {table.full_name} ({names}"
    key = keys.values if len(inserted) == len(keys.values) else keys.values.take(pa.array(inserted))
    parts = [begin, columns, ") VALUES (", key, values, ")", live.using()]
    return [_Statements(inserted, pc.binary_join_element_wise(*parts, ""))]


def _texts_after(units: Assignments, chosen: Places, own: Places, count: int) -> tuple[pa.Array | str, pa.Array]:
    """For each INSERT ``, name, name`` and ``, value, value``."""
    order = chosen[np.argsort(own[chosen], kind="stable")]
    sizes = np.bincount(own[order], minlength=count)
    if len(order) and (sizes == sizes[0]).all():
        grid = order.reshape(count, sizes[0])
        columns = units.columns[grid]
        if (columns == columns[0]).all():
            # Mostly all INSERTs write the same columns: then there is nothing to put together by row.
            parts = [part for own_cells in grid.T for part in (", ", units.values.take(pa.array(own_cells)))]
            named = ", ".join(["", *units.names.take(pa.array(grid[0])).to_pylist()])
            return named, pc.binary_join_element_wise(*parts, "")
    found = []
    for texts in (units.names, units.values):
        parts = pc.binary_join_element_wise(", ", texts.take(pa.array(order)), "")
        found.append(pc.binary_join(pa.ListArray.from_arrays(_offsets(sizes), parts), ""))
    return found[0], found[1]


def _updates(
    table: TableSchema, times: _Times, units: Assignments, chosen: npt.NDArray[np.bool_], keys: _Keys
) -> list[_Statements]:
    """One UPDATE for what a row got at one moment; entries of lists may need others."""
    places = np.flatnonzero(chosen)
    if not len(places):
        return []
    sorted_by = [times.expiries, times.ttls, times.timestamps, units.turns, units.rows]
    order = places[np.lexsort([one[places] for one in sorted_by])]
    changed = [np.diff(one[order], prepend=one[order[0]]).astype(bool) for one in sorted_by]
    starts = np.logical_or.reduce(changed)
    starts[0] = True
    first = np.flatnonzero(starts)
    texts = _joined(units.assignments().take(pa.array(order)), first, ", ")
    rows = units.rows[order[first]]
    using, own = times.take(order[first]).using(), keys.where.take(pa.array(rows))
    parts = [f"UPDATE {table.full_name}", using, " SET ", texts, " WHERE ", own]
    return [_Statements(rows, pc.binary_join_element_wise(*parts, ""))]


def _by_row(statements: Sequence[_Statements], count: int) -> pa.Array:
    """The statements of each row as one: a batch if there are several."""
    rows = np.concatenate([one.rows for one in statements])
    texts = pa.concat_arrays([one.texts.cast(pa.string()) for one in statements])
    said = np.flatnonzero(valid_mask(texts))
    order = said[np.argsort(rows[said], kind="stable")]
    sizes = np.bincount(rows[order], minlength=count)
    if (sizes == 1).all():
        return texts.take(pa.array(order))
    whole = pc.binary_join(pa.ListArray.from_arrays(_offsets(sizes), texts.take(pa.array(order))), "; ")
    if (sizes > 1).any():
        batch = pc.binary_join_element_wise(_BEGIN, whole, _END, "")
        whole = pc.if_else(pa.array(sizes > 1), batch, whole)
    return pc.if_else(pa.array(sizes > 0), whole, pa.scalar(None, pa.string()))


def _joined(texts: pa.Array, first: Places, separator: str) -> pa.Array:
    """Runs of texts, each as one; runs begin at the places ``first``."""
    limits = np.append(first, len(texts)).astype(np.int32)
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(limits), texts), separator)


def _offsets(sizes: npt.NDArray[np.intp]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _texts(values: Integers) -> pa.Array:
    return pa.array(values).cast(pa.string())
