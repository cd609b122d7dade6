"""Cassandra's expiry on Arrow batches: the cells of a row image that are alive at a moment.

Only this module has these rules. The user's view and the verification both use them (:mod:`ringsync.replica.view`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Mask, array_of, integers, valid_mask
from ringsync.cql.types import UserType
from ringsync.images.keys import partition_digests
from ringsync.images.schema import NO_LIVENESS, lake_names, row_image_schema
from ringsync.images.times import cell_times
from ringsync.schema.table import Column, TableSchema

TIMES = pa.list_(pa.int64())


@dataclass(frozen=True)
class LiveColumn:
    """A column of a batch at a moment.

    :ivar value: values without expired cells
    :ivar cell: entry of the column in ``_cells``, null where no cell is alive
    :ivar present: mask of rows that have a cell of the column, dead or alive
    :ivar alive: mask of rows where a cell of the column is alive
    """

    value: pa.Array
    cell: pa.Array
    present: Mask
    alive: Mask


def live_schema(table: TableSchema) -> pa.Schema:
    """Return the schema: ``token``, the columns, ``_cells``, and whether row and static cells are alive."""
    names = lake_names(table)
    images = row_image_schema(table)
    fields = [images.field("token"), *(images.field(names[column.name]) for column in table.columns)]
    fields.append(pa.field("_cells", pa.struct([pa.field(names[c.name], _cell_type(c)) for c in table.columns])))
    return pa.schema([*fields, pa.field("#alive", pa.bool_()), pa.field("#static", pa.bool_())])


def live_rows(batch: pa.RecordBatch, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Show every row image as of a moment, and mark the rows that are alive.

    :param batch: row images, also as Spark names their parts
    :param now_s: the moment, seconds since the epoch; a cell with ``expires_at <= now_s`` is dead (C: Cell.isLive)
    :returns: rows with :func:`live_schema`
    """
    batch = batch.cast(row_image_schema(table))
    names = lake_names(table)
    columns = {column.name: _live_column(batch, table, column, names[column.name], now_s) for column in table.columns}
    alive, static = _alive(batch, table, columns, now_s)
    cells = pa.StructArray.from_arrays(
        [columns[column.name].cell for column in table.columns], fields=list(live_schema(table).field("_cells").type)
    )
    values = [columns[column.name].value for column in table.columns]
    return pa.RecordBatch.from_arrays(
        [batch.column("token"), *values, cells, pa.array(alive), pa.array(static)], schema=live_schema(table)
    )


def selected_rows(batch: pa.RecordBatch, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Do :func:`live_rows` for rows that a SELECT returned at this moment: all of them are alive."""
    return live_rows(batch, table, now_s).drop_columns(["#alive", "#static"])


def shown_rows(images: Iterable[pa.RecordBatch], table: TableSchema, now_s: int) -> Iterator[pa.RecordBatch]:
    """Give the rows that a SELECT shows of whole partitions, as :func:`ringsync.replica.view.live` does of a table.

    These are the live rows, and one row without clustering of each partition where only static cells live.

    :param images: row images of whole partitions
    :param now_s: the moment, seconds since the epoch
    :returns: rows with :func:`live_schema` without the marks
    """
    alive: list[pa.Array] = []
    dead: list[pa.RecordBatch] = []
    for batch in images:
        rows = live_rows(batch, table, now_s)
        shown = rows.filter(rows.column("#alive")).drop_columns(["#alive", "#static"])
        if table.clustering and table.of_kind("static"):
            alive.append(pc.unique(partition_digests(shown, table)))
            static_left = pc.and_(rows.column("#static"), pc.invert(rows.column("#alive")))
            dead.append(rows.filter(static_left).drop_columns(["#alive", "#static"]))
        yield shown
    if any(batch.num_rows for batch in dead):
        yield _without_clustering(pa.Table.from_batches(dead), pa.chunked_array(alive), table)


def _without_clustering(dead: pa.Table, alive: pa.ChunkedArray, table: TableSchema) -> pa.RecordBatch:
    """Make one row with the static cells of each partition without live rows.

    :param dead: rows that are not alive, but have live static cells
    :param alive: digests of partitions that have a live row
    """
    (rows,) = dead.combine_chunks().to_batches()
    names = lake_names(table)
    first = names[table.clustering[0].name]
    # An image without clustering comes first: all others repeat its static cells.
    clustered = valid_mask(rows[first]) | valid_mask(pc.struct_field(rows["_cells"], [first, "raw"]))
    rows = rows.take(pa.array(np.argsort(clustered, kind="stable")))
    partitions = partition_digests(rows, table)
    _, ones = np.unique(partitions.dictionary_encode().indices.to_numpy(), return_index=True)
    hidden = pc.is_in(partitions.take(pa.array(ones)), value_set=alive.combine_chunks())
    rows = rows.take(pa.array(ones).filter(pc.invert(hidden)))
    cells = rows["_cells"]
    for column in table.clustering:
        place = rows.schema.get_field_index(names[column.name])
        rows = rows.set_column(place, rows.schema.field(place), pa.nulls(rows.num_rows, rows.schema.field(place).type))
    parts = [
        pa.nulls(rows.num_rows, cells.type[i].type) if column.kind == "clustering" else cells.field(i)
        for i, column in enumerate(table.columns)
    ]
    place = rows.schema.get_field_index("_cells")
    return rows.set_column(place, rows.schema.field(place), pa.StructArray.from_arrays(parts, fields=list(cells.type)))


def _alive(batch: pa.RecordBatch, table: TableSchema, columns: dict[str, LiveColumn], now_s: int) -> tuple[Mask, Mask]:
    """Find the rows that a SELECT shows, and the rows with a live static cell.

    A row is alive while its own liveness or one of its regular cells is. If its liveness is unknown, a row without any
    regular cell is alive, since a SELECT has shown it. If such a row's cells have expired, its liveness counts as
    expired, too: a SELECT could not tell. A row without clustering, in a table that has clustering columns, holds only
    the partition's static cells; whether a SELECT shows them depends on the partition's other rows.
    """
    nothing = np.zeros(batch.num_rows, np.bool_)
    regular = [columns[column.name] for column in table.of_kind("regular")]
    static = np.logical_or.reduce([nothing, *(columns[c.name].alive for c in table.of_kind("static"))])
    present = np.logical_or.reduce([nothing, *(column.present for column in regular)])
    alive = np.logical_or.reduce([nothing, *(column.alive for column in regular)])
    deleted_at, live = (pc.struct_field(batch.column("_row"), name) for name in ("deleted_at", "live"))
    expires_at, unseen_at = (pc.struct_field(batch.column("_merge"), name) for name in ("live_expires_at", "unseen_at"))
    known = valid_mask(live)
    deleted = valid_mask(deleted_at) & (integers(live) <= integers(deleted_at))
    alive |= known & (integers(live) != NO_LIVENESS) & ~deleted & ~_expired(expires_at, now_s)
    alive |= ~known & ~present & ~valid_mask(unseen_at)
    if table.clustering:
        alive &= columns[table.clustering[0].name].present
    return alive, static


def _live_column(batch: pa.RecordBatch, table: TableSchema, column: Column, name: str, now_s: int) -> LiveColumn:
    value, raw = batch.column(name), pc.struct_field(batch.column("_x"), [name, "raw"])
    present = valid_mask(value) | valid_mask(raw)
    if column.is_key:
        cell = _struct([raw], _cell_type(column), valid_mask(raw))
        return LiveColumn(value, cell, present, present)
    writetime, expires_at = cell_times(batch, table, column.name)
    if isinstance(column.type, UserType) and column.is_multicell:
        present = np.logical_or.reduce([valid_mask(raw), *(valid_mask(field) for field in value.flatten())])
    elif column.is_multicell:
        present = valid_mask(raw) | (_counts(value) > 0)
    if not column.is_multicell:
        alive = present & ~_expired(expires_at, now_s)
        cell = _struct([writetime, expires_at, raw], _cell_type(column), alive)
        return LiveColumn(_only(value, alive), cell, present, alive)
    if isinstance(column.type, UserType):
        value, writetime, expires_at, left = _live_fields(value, writetime, expires_at, now_s)
    else:
        value, writetime, expires_at, left = _live_elements(value, writetime, expires_at, now_s)
    # A raw value cannot lose elements: it is alive as long as one element is.
    alive = np.where(valid_mask(raw), left, valid_mask(value))
    cell = _struct([_unless_unknown(writetime), _unless_unknown(expires_at), raw], _cell_type(column), alive)
    return LiveColumn(_only(value, alive), cell, present, alive)


def _live_elements(
    value: pa.Array, writetime: pa.Array, expires_at: pa.Array, now_s: int
) -> tuple[pa.Array, pa.Array, pa.Array, Mask]:
    """Remove expired elements of a list, set or map, and their times; mark the rows where an element is left."""
    counts, known = _counts(value), _counts(expires_at)
    dead = _expired(expires_at.flatten(), now_s)
    left = (known == 0) | (np.bincount(np.repeat(np.arange(len(value)), known), ~dead, len(value)) > 0)
    aligned = counts == known
    if not (dead & np.repeat(aligned, known)).any():
        return _only(value, counts > 0), writetime, expires_at, left
    keep = np.ones(counts.sum(), np.bool_)
    keep[np.repeat(aligned, counts)] = ~dead[np.repeat(aligned, known)]
    kept_times = np.where(np.repeat(aligned, known), ~dead, True)
    remaining = np.bincount(np.repeat(np.arange(len(value)), counts), keep, len(value)).astype(np.int64)
    start, end = value.offsets[0].as_py(), value.offsets[-1].as_py()
    if pa.types.is_map(value.type):
        keys, items = (part[start:end].filter(pa.array(keep)) for part in (value.keys, value.items))
        filtered = pa.MapArray.from_arrays(_offsets(remaining), keys, items, type=value.type)
    else:
        values = value.values[start:end].filter(pa.array(keep))
        filtered = pa.ListArray.from_arrays(_offsets(remaining), values, type=value.type)
    times = [_filtered_times(times, kept_times) for times in (writetime, expires_at)]
    return _only(filtered, remaining > 0), *times, left


def _live_fields(
    value: pa.Array, writetime: pa.Array, expires_at: pa.Array, now_s: int
) -> tuple[pa.Array, pa.Array, pa.Array, Mask]:
    """Set expired fields of a user-defined type, and their times, to null; mark the rows where a field is left."""
    width, rows = value.type.num_fields, len(value)
    known = _counts(expires_at)
    dead = _expired(expires_at.flatten(), now_s)
    left = (known == 0) | (np.bincount(np.repeat(np.arange(rows), known), ~dead, rows) > 0)
    fields = value.flatten()
    is_set = np.array([valid_mask(field) for field in fields]).T
    expired = np.zeros((rows, width), np.bool_)
    aligned = (known == width) & valid_mask(value)
    expired[aligned] = dead[np.repeat(aligned, known)].reshape(-1, width)
    alive = is_set & ~expired
    if not (aligned[:, np.newaxis] & ~alive).any():
        return _only(value, np.logical_or.reduce(alive, axis=1)), writetime, expires_at, left
    members = [_only(field, alive[:, i]) for i, field in enumerate(fields)]
    filtered = pa.StructArray.from_arrays(members, fields=list(value.type))
    shown = np.ones(int(known.sum()), np.bool_)
    shown[np.repeat(aligned, known)] = alive[aligned].ravel()
    times = [_blanked_times(times, shown) for times in (writetime, expires_at)]
    return _only(filtered, np.logical_or.reduce(alive, axis=1)), *times, left


def _filtered_times(times: pa.Array, keep: Mask) -> pa.Array:
    """Keep only these elements of lists of times."""
    counts = _counts(times)
    if counts.sum() != len(keep):
        return times  # only writetimes or only expiries are known: nothing to align
    remaining = np.bincount(np.repeat(np.arange(len(times)), counts), keep, len(times)).astype(np.int64)
    filtered = pa.ListArray.from_arrays(_offsets(remaining), times.flatten().filter(pa.array(keep)), type=times.type)
    return _only(filtered, valid_mask(times))


def _blanked_times(times: pa.Array, shown: Mask) -> pa.Array:
    """Set elements of lists of times to null where they are not shown."""
    counts = _counts(times)
    if counts.sum() != len(shown):
        return times
    flat = times.flatten()
    blanked = array_of(integers(flat), valid_mask(flat) & shown)
    return _only(pa.ListArray.from_arrays(_offsets(counts), blanked, type=times.type), valid_mask(times))


def _expired(expires_at: pa.Array, now_s: int) -> Mask:
    return valid_mask(expires_at) & (integers(expires_at) <= now_s)


def _only(array: pa.Array, keep: Mask) -> pa.Array:
    """Set an array to null outside the mask."""
    if not (valid_mask(array) & ~keep).any():
        return array
    return array.take(pa.array(np.arange(len(array)), mask=~keep))


def _unless_unknown(times: pa.Array) -> pa.Array:
    """Set empty lists of times, which mean unknown, to null."""
    return _only(times, _counts(times) > 0)


def _counts(lists: pa.Array) -> npt.NDArray[np.int64]:
    """Count the elements of each list or map; 0 for null."""
    counts = np.diff(integers(lists.offsets))
    counts[~valid_mask(lists)] = 0
    return counts


def _offsets(counts: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(np.concatenate([np.zeros(1, np.int32), np.cumsum(counts)]).astype(np.int32))


def _struct(parts: Sequence[pa.Array], kind: pa.StructType, there: Mask) -> pa.Array:
    return pa.StructArray.from_arrays(list(parts), fields=list(kind), mask=pa.array(~there))


def _cell_type(column: Column) -> pa.StructType:
    raw = pa.field("raw", pa.binary())
    if column.is_key:
        return pa.struct([raw])
    times = TIMES if column.is_multicell else pa.int64()
    return pa.struct([pa.field("writetime", times), pa.field("expires_at", times), raw])
