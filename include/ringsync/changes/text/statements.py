"""Change rows of one table as CQL statements, each with its own timestamp, for messages and ``inspect``.

Texts are built one column at a time: first of cells (:mod:`ringsync.changes.text.assignments`), then of their
assignments, then of statements. :mod:`ringsync.images.queries` joins the statements of a row to one text,
:mod:`ringsync.changes.text.replay` prints each on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.flat import taken
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.changes.schema import NO_EXPIRY, PARTITION_DELETION, RANGE_DELETION, ROW
from ringsync.changes.text.assignments import Assignments, Deleted, Literals, Times, changes, joined_texts
from ringsync.changes.text.ranges import range_conditions
from ringsync.changes.text.values import change_texts
from ringsync.compiled.arrow import Integers, Places, list_of
from ringsync.cql.cells import Cells
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import CQL
from ringsync.cql.text.values import NULL
from ringsync.schema.table import Column, TableSchema

_LONGEST_TTL = 20 * 365 * 86400
"""s; the greatest TTL that a statement may have (C: cql3/Attributes.MAX_TTL)."""

_LATER = 2**62
"""A number greater than any turn."""


@dataclass(frozen=True)
class Statements:
    """Some statements: the row of each, and its text; null: CQL cannot express it."""

    rows: Places
    texts: pa.Array


@dataclass(frozen=True)
class Keys:
    """The keys of all rows as conditions, and as values of an INSERT; null if a value has no literal."""

    where: pa.Array
    values: pa.Array


def row_keys(merged: ChangeRows, table: TableSchema, literals: Literals) -> Keys:
    """Write the keys of rows; static rows and deletions have only the key of their partition."""
    texts = _texts_of(table.partition_key, partition_parts(merged.partition_key, table), literals)
    where, values = _conditions(table.partition_key, texts), pc.binary_join_element_wise(*texts, ", ")
    rows = np.flatnonzero(merged.kind == ROW)
    if not table.clustering or not len(rows):
        return Keys(where, values)
    _, parts, _ = clustering_parts(merged.clustering.take(rows), len(table.clustering))
    texts = _texts_of(table.clustering, parts, literals)
    place = pa.array(rows)
    row_where = pc.binary_join_element_wise(where.take(place), _conditions(table.clustering, texts), " AND ")
    row_values = pc.binary_join_element_wise(values.take(place), pc.binary_join_element_wise(*texts, ", "), ", ")
    if len(rows) == len(merged):
        return Keys(row_where, row_values)
    back = np.arange(len(merged))
    back[rows] = len(merged) + np.arange(len(rows))
    return Keys(*(pa.concat_arrays(pair).take(pa.array(back)) for pair in ((where, row_where), (values, row_values))))


def _texts_of(columns: Sequence[Column], parts: Sequence[Cells], literals: Literals) -> list[pa.Array]:
    return [literals(column.type, cells) for column, cells in zip(columns, parts, strict=True)]


def _conditions(columns: Sequence[Column], texts: Sequence[pa.Array]) -> pa.Array:
    """Write ``a = 1 AND b = 2``."""
    parts: list[pa.Array | str] = []
    for column, text in zip(columns, texts, strict=True):
        parts += [f"{' AND ' if parts else ''}{printable(column.name)} = ", text]
    return pc.binary_join_element_wise(*parts, "")


def deletions_of_rows(merged: ChangeRows, table: TableSchema, where: pa.Array) -> list[Statements]:
    """Write DELETEs of rows, partitions and ranges; none for a range that CQL cannot express.

    The deletion of a static row is its partition's, which is a change row of its own.
    """
    deletes_one = (merged.kind == ROW) | (merged.kind == PARTITION_DELETION)
    rows, ranges = np.flatnonzero(merged.deletion.there & deletes_one), np.flatnonzero(merged.kind == RANGE_DELETION)
    deletions = []
    if len(rows):
        using = _timestamps(table, merged.deletion.timestamp[rows])
        parts = [f"DELETE FROM {table.full_name}", using, " WHERE ", where.take(pa.array(rows))]
        deletions.append(Statements(rows, pc.binary_join_element_wise(*parts, "")))
    if len(ranges):
        deletions.append(_range_deletions(merged, table, ranges))
    return deletions


def _range_deletions(merged: ChangeRows, table: TableSchema, ranges: Places) -> Statements:
    """Write DELETEs of ranges. They are few, so each may be a Python object."""
    texts = change_texts(merged.take(ranges), {table.table_id: table}, CQL)
    using = _timestamps(table, merged.deletion.timestamp[ranges]).to_pylist()
    rows: list[int] = []
    deletes: list[str | None] = []
    for row, at, key, start, end in zip(
        ranges.tolist(), using, texts.partition_keys, texts.clusterings, texts.range_ends, strict=True
    ):
        if start is None or end is None or None in key or {None, NULL} & {*start.values, *end.values}:
            rows.append(row)
            deletes.append(None)
            continue
        pieces = range_conditions(table, start, end)
        partition = [f"{printable(c.name)} = {text}" for c, text in zip(table.partition_key, key, strict=True)]
        deletes += [f"DELETE FROM {table.full_name}{at} WHERE {' AND '.join([*partition, *piece])}" for piece in pieces]
        rows += [row] * len(pieces)
    return Statements(np.array(rows, np.intp), pa.array(deletes, pa.string()))


def cell_deletions(table: TableSchema, deleted: Deleted, where: pa.Array) -> list[Statements]:
    """Write one DELETE for everything that a row lost at one moment."""
    if not len(deleted.rows):
        return []
    order = np.lexsort((deleted.turns, deleted.rows))
    first = np.flatnonzero(changes(order, [deleted.rows, deleted.times]))
    names = joined_texts(deleted.names.take(pa.array(order)), first, ", ")
    rows, using = deleted.rows[order[first]], _timestamps(table, deleted.times[order[first]])
    parts = ["DELETE ", names, f" FROM {table.full_name}", using, " WHERE ", where.take(pa.array(rows))]
    return [Statements(rows, pc.binary_join_element_wise(*parts, ""))]


def writes(
    merged: ChangeRows,
    table: TableSchema,
    units: Assignments,
    keys: Keys,
    *,
    own_times_first: bool = False,
    now: int | None = None,
) -> list[Statements]:
    """Write INSERTs of rows that have a liveness, and UPDATEs of cells with other times.

    :param own_times_first: whether the UPDATE with the times of the row's liveness comes before all others
    :param now: time from which TTLs count, s since 1970; None: the time when they were written
    """
    liveness = merged.liveness
    inserted = np.flatnonzero(liveness.there & (merged.kind == ROW))
    ttls = np.where(liveness.expires_at == NO_EXPIRY, -1, liveness.ttl)
    live: Times = taken(Times(liveness.timestamp, ttls, liveness.expires_at), inserted)
    place = np.full(len(merged), -1)
    place[inserted] = np.arange(len(inserted))
    insert_of = place[units.rows]
    alike = insert_of >= 0
    for row_times, unit_times in zip(live.keys, units.times.keys, strict=True):
        alike[alike] = row_times[insert_of[alike]] == unit_times[alike]
    in_insert = alike & units.are_whole
    if own_times_first:
        units = replace(units, turns=np.where(alike, units.turns - _LATER, units.turns))
    return [
        *_inserts(table, inserted, _using(live, now), units, in_insert, insert_of, keys),
        *_updates(table, units, ~in_insert, keys, now),
    ]


def _using(times: Times, now: int | None) -> pa.Array:
    """Write `` USING TIMESTAMP 1 AND TTL 2 /* expires_at 3 */``."""
    using = pc.binary_join_element_wise(" USING TIMESTAMP ", _texts(times.timestamps), "")
    expiring = times.expiries >= 0
    if not expiring.any():
        return using
    ttls = np.where(times.ttls > 0, times.ttls, times.expiries - times.timestamps // 1_000_000)
    ttls = _texts(np.clip(ttls if now is None else times.expiries - now, 1, _LONGEST_TTL))
    ends = [" /* expires_at ", _texts(times.expiries), " */"]
    return pc.if_else(pa.array(expiring), pc.binary_join_element_wise(using, " AND TTL ", ttls, *ends, ""), using)


def _inserts(
    table: TableSchema,
    inserted: Places,
    using: pa.Array,
    units: Assignments,
    chosen: npt.NDArray[np.bool_],
    insert_of: Places,
    keys: Keys,
) -> list[Statements]:
    if not len(inserted):
        return []
    names = ", ".join(printable(column.name) for column in table.key_columns)
    columns, values = _texts_after(units, np.flatnonzero(chosen), insert_of, len(inserted))
    begin = f"INSERT INTO {table.full_name} ({names}"
    key = keys.values if len(inserted) == len(keys.values) else keys.values.take(pa.array(inserted))
    parts = [begin, columns, ") VALUES (", key, values, ")", using]
    return [Statements(inserted, pc.binary_join_element_wise(*parts, ""))]


def _texts_after(units: Assignments, chosen: Places, insert_of: Places, count: int) -> tuple[pa.Array | str, pa.Array]:
    """Write ``, name, name`` and ``, value, value`` for each INSERT."""
    order = chosen[np.argsort(insert_of[chosen], kind="stable")]
    sizes = np.bincount(insert_of[order], minlength=count)
    if len(order) and (sizes == sizes[0]).all():
        grid = order.reshape(count, sizes[0])
        columns = units.columns[grid]
        if (columns == columns[0]).all():
            # All INSERTs usually write the same columns: one list of names then serves all of them.
            parts = [part for cells in grid.T for part in (", ", units.values.take(pa.array(cells)))]
            named = ", ".join(["", *units.names.take(pa.array(grid[0])).to_pylist()])
            return named, pc.binary_join_element_wise(*parts, "")
    joined = []
    for texts in (units.names, units.values):
        parts = pc.binary_join_element_wise(", ", texts.take(pa.array(order)), "")
        joined.append(pc.binary_join(list_of(sizes, parts), ""))
    return joined[0], joined[1]


def _updates(
    table: TableSchema, units: Assignments, chosen: npt.NDArray[np.bool_], keys: Keys, now: int | None
) -> list[Statements]:
    """Write one UPDATE for everything that a row got at one moment; entries of lists may need more."""
    places = np.flatnonzero(chosen)
    if not len(places):
        return []
    sorted_by = [*units.times.keys, units.turns, units.rows]
    order = places[np.lexsort([key[places] for key in sorted_by])]
    first = np.flatnonzero(changes(order, sorted_by))
    texts = joined_texts(units.assignments().take(pa.array(order)), first, ", ")
    rows = units.rows[order[first]]
    using, where = _using(taken(units.times, order[first]), now), keys.where.take(pa.array(rows))
    parts = [f"UPDATE {table.full_name}", using, " SET ", texts, " WHERE ", where]
    return [Statements(rows, pc.binary_join_element_wise(*parts, ""))]


def _timestamps(table: TableSchema, times: Integers) -> pa.Array:
    """Write USING TIMESTAMP; statements for counters take none."""
    if table.has_counters:
        return pa.array([""]).take(pa.array(np.zeros(len(times), np.int64)))
    return pc.binary_join_element_wise(" USING TIMESTAMP ", _texts(times), "")


def _texts(values: Integers) -> pa.Array:
    return pa.array(values).cast(pa.string())
