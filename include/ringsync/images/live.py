"""Cassandra's expiry on Arrow batches: the cells of a row image that are alive at a moment.

Only this module has these rules; the user's view and the verification use them (:mod:`ringsync.replica.view`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Integers, Mask, array_of, integers, list_of, only, structs_of, valid_mask
from ringsync.cql.types import UserType
from ringsync.images.keys import partition_digests
from ringsync.images.schema import NO_LIVENESS, lake_names, row_image_schema
from ringsync.images.times import cell_times
from ringsync.schema.table import Column, TableSchema


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
    columns = [images.field(name) for name in ("token", *(names[column.name] for column in table.columns))]
    cells = pa.struct([(names[column.name], _cell_type(column)) for column in table.columns])
    return pa.schema([*columns, ("_cells", cells), ("#alive", pa.bool_()), ("#static", pa.bool_())])


def live_rows(batch: pa.RecordBatch, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Show all row images as of a moment, and mark the rows that are alive.

    :param batch: row images, also as Spark names their parts
    :param now_s: the moment; a cell with ``expires_at <= now_s`` is dead (C: Cell.isLive)
    :returns: rows with :func:`live_schema`
    """
    batch = batch.cast(row_image_schema(table))
    names, schema = lake_names(table), live_schema(table)
    columns = {column.name: _live_column(batch, table, column, names[column.name], now_s) for column in table.columns}
    alive, static = _alive(batch, table, columns, now_s)
    cells = structs_of(schema.field("_cells").type, [column.cell for column in columns.values()])
    values = [column.value for column in columns.values()]
    arrays = [batch["token"], *values, cells, pa.array(alive), pa.array(static)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def selected_rows(batch: pa.RecordBatch, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Do :func:`live_rows` for rows that a SELECT returned at this moment: all of them are alive."""
    return live_rows(batch, table, now_s).drop_columns(["#alive", "#static"])


def shown_rows(images: Iterable[pa.RecordBatch], table: TableSchema, now_s: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a SELECT shows of whole partitions, as :func:`ringsync.replica.view.live` does for a table.

    These are the live rows, and one row without clustering for each partition in which only static cells live.

    :param images: row images of whole partitions
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
    rows = rows.take(array_of(np.argsort(clustered, kind="stable")))
    partitions = partition_digests(rows, table)
    _, first_rows = np.unique(integers(partitions.dictionary_encode().indices), return_index=True)
    hidden = pc.is_in(partitions.take(array_of(first_rows)), value_set=alive.combine_chunks())
    rows = rows.take(array_of(first_rows).filter(pc.invert(hidden)))
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    cells = dict(zip([field.name for field in rows["_cells"].type], rows["_cells"].flatten(), strict=True))
    for column in table.clustering:
        for values in (columns, cells):
            values[names[column.name]] = pa.nulls(len(rows), values[names[column.name]].type)
    columns["_cells"] = structs_of(rows["_cells"].type, list(cells.values()))
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=rows.schema)


def _alive(batch: pa.RecordBatch, table: TableSchema, columns: dict[str, LiveColumn], now_s: int) -> tuple[Mask, Mask]:
    """Find the rows that a SELECT shows, and the rows with a live static cell.

    A row is alive while its own liveness or one of its regular cells is. A row of unknown liveness without any regular
    cell is alive, since a SELECT has shown it; if such a row's cells have expired, its liveness counts as expired, too,
    also after their column was dropped: ``_row`` still has the expiry, unless it may be that of static cells.
    A row without clustering, in a table with clustering columns, holds only the partition's static cells; whether a
    SELECT shows them depends on the partition's other rows.
    """
    nothing = np.zeros(batch.num_rows, np.bool_)
    regular = [columns[column.name] for column in table.of_kind("regular")]
    static = np.logical_or.reduce([nothing, *(columns[c.name].alive for c in table.of_kind("static"))])
    present = np.logical_or.reduce([nothing, *(column.present for column in regular)])
    has_static = np.logical_or.reduce([nothing, *(columns[c.name].present for c in table.of_kind("static"))])
    alive = np.logical_or.reduce([nothing, *(column.alive for column in regular)])
    names = ("writetime", "expires_at", "deleted_at", "live")
    written_at, row_expires_at, deleted_at, live = (pc.struct_field(batch.column("_row"), name) for name in names)
    expires_at, unseen_at = (pc.struct_field(batch.column("_merge"), name) for name in ("live_expires_at", "unseen_at"))
    known = valid_mask(live)
    deleted = valid_mask(deleted_at) & (integers(live) <= integers(deleted_at))
    alive |= known & (integers(live) != NO_LIVENESS) & ~deleted & ~_expired(expires_at, now_s)
    had_expired = valid_mask(written_at) & _expired(row_expires_at, now_s) & ~has_static
    alive |= ~known & ~present & ~valid_mask(unseen_at) & ~had_expired
    if table.clustering:
        alive &= columns[table.clustering[0].name].present
    return alive, static


def _live_column(batch: pa.RecordBatch, table: TableSchema, column: Column, name: str, now_s: int) -> LiveColumn:
    value, raw, kind = batch[name], pc.struct_field(batch["_x"], [name, "raw"]), _cell_type(column)
    present = valid_mask(value) | valid_mask(raw)
    if column.is_key:
        return LiveColumn(value, structs_of(kind, [raw], valid_mask(raw)), present, present)
    writetime, expires_at = cell_times(batch, table, column.name)
    if not column.is_multicell:
        alive = present & ~_expired(expires_at, now_s)
        return LiveColumn(only(value, alive), structs_of(kind, [writetime, expires_at, raw], alive), present, alive)
    known, dead = _counts(expires_at), _expired(expires_at.flatten(), now_s)
    left = (known == 0) | (np.bincount(np.repeat(np.arange(len(batch)), known), ~dead, len(batch)) > 0)
    if isinstance(column.type, UserType):
        present = np.logical_or.reduce([valid_mask(raw), *(valid_mask(field) for field in value.flatten())])
        value, writetime, expires_at = _live_fields(value, writetime, expires_at, known, dead)
    else:
        present = valid_mask(raw) | (_counts(value) > 0)
        value, writetime, expires_at = _live_elements(value, writetime, expires_at, known, dead)
    # A raw value cannot lose elements: it is alive as long as one element is.
    alive = np.where(valid_mask(raw), left, valid_mask(value))
    # Empty lists of times stand for unknown times.
    times = [only(lists, _counts(lists) > 0) for lists in (writetime, expires_at)]
    return LiveColumn(only(value, alive), structs_of(kind, [*times, raw], alive), present, alive)


def _live_elements(
    value: pa.Array, writetime: pa.Array, expires_at: pa.Array, known: Integers, dead: Mask
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Remove dead elements of a list, set or map, and their times.

    :param known: number of times of each row
    :param dead: whether each time is that of an expired element
    """
    counts, rows = _counts(value), np.arange(len(value))
    aligned = counts == known
    dead = dead & np.repeat(aligned, known)
    if not dead.any():
        return only(value, counts > 0), writetime, expires_at
    keep = np.ones(counts.sum(), np.bool_)
    keep[np.repeat(aligned, counts)] = ~dead[np.repeat(aligned, known)]
    remaining = np.bincount(np.repeat(rows, counts)[keep], minlength=len(rows))
    start, end = value.offsets[0].as_py(), value.offsets[-1].as_py()
    elements = value.values[start:end].filter(pa.array(keep))
    times_left = np.bincount(np.repeat(rows, known)[~dead], minlength=len(rows))
    times = [
        # If only writetimes or only expiries are known, there is nothing to align.
        list_of(times_left, lists.flatten().filter(pa.array(~dead)), valid_mask(lists))
        if _counts(lists).sum() == len(dead)
        else lists
        for lists in (writetime, expires_at)
    ]
    return list_of(remaining, elements, remaining > 0, value.type), *times


def _live_fields(
    value: pa.Array, writetime: pa.Array, expires_at: pa.Array, known: Integers, dead: Mask
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Set dead fields of a user-defined type, and their times, to null; the parameters are as above."""
    width, fields = value.type.num_fields, value.flatten()
    alive = np.array([valid_mask(field) for field in fields]).T
    aligned = (known == width) & valid_mask(value)
    shown = np.ones(len(dead), np.bool_)
    if aligned.any():
        of_aligned = np.repeat(aligned, known)
        alive[aligned] &= ~dead[of_aligned].reshape(-1, width)
        shown[of_aligned] = alive[aligned].ravel()
    has_field = np.logical_or.reduce(alive, axis=1)
    if shown.all():
        return only(value, has_field), writetime, expires_at
    members = [only(field, alive[:, i]) for i, field in enumerate(fields)]
    times = [_blanked_times(lists, shown) for lists in (writetime, expires_at)]
    return structs_of(value.type, members, has_field), *times


def _blanked_times(times: pa.Array, shown: Mask) -> pa.Array:
    """Set elements of lists of times to null where they are not shown."""
    counts, flat = _counts(times), times.flatten()
    if len(flat) != len(shown):
        return times
    return list_of(counts, array_of(integers(flat), valid_mask(flat) & shown), valid_mask(times))


def _expired(expires_at: pa.Array, now_s: int) -> Mask:
    return valid_mask(expires_at) & (integers(expires_at) <= now_s)


def _counts(lists: pa.Array) -> Integers:
    """Count the elements of each list or map; 0 for null."""
    return np.where(valid_mask(lists), np.diff(integers(lists.offsets)), 0)


def _cell_type(column: Column) -> pa.StructType:
    if column.is_key:
        return pa.struct([("raw", pa.binary())])
    times = pa.list_(pa.int64()) if column.is_multicell else pa.int64()
    return pa.struct([("writetime", times), ("expires_at", times), ("raw", pa.binary())])
