"""Change rows of one table with typed columns: what a person, or a job that knows the table, wants to see.

Beside the table's own columns (names as in the replica) there are, each null where it does not apply:

==================  ========================================================================================
``_kind``           ``row``, ``static``, ``partition_deletion``, ``range_deletion``
``_token``          of the partition
``_write_time``     µs, the greatest timestamp inside
``_liveness``       of the row itself: timestamp (µs), ttl (s), expires_at (s)
``_deletion``       of the row, partition or range: timestamp (µs), local_deletion_time (s)
``_range``          of a range: for ``start`` and ``end`` the first clustering columns, how many of them count
                    (``columns``), and whether what begins with them belongs to the range (``inclusive``)
``_partition_key``  as Cassandra's bytes, and ``_clustering`` as in change rows: a key column is null where its
                    type in the lake cannot hold the value (an empty int, say)
``_digest``         of the content
``_file``           the segment, and ``_position`` the logical position behind the record in it
==================  ========================================================================================

Key columns are typed values. Any other column is a cell, null where the change does not touch it: ``value`` (null if
``deleted``), ``raw`` (its bytes, where the type cannot hold it), ``timestamp`` (µs), ``ttl`` and ``expires_at`` (s),
``deleted``. Of collections that are not frozen it is a struct of ``deletion`` (of what was there before; null: none)
and ``cells``, each with its ``path``: list entry (timeuuid), set element, map key. Of UDTs that are not frozen the
``path`` is the field's number and the value stays bytes, since each field has another type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.flat import by_column, flat, spread
from ringsync.changes.keys.order import path_type
from ringsync.changes.keys.parts import clustering_parts, composite_parts, only
from ringsync.changes.schema import DELETION, EXPIRING, KINDS, LIVENESS, RANGE_DELETION, TOMBSTONE
from ringsync.compiled.arrow import Places, integers, starts_of
from ringsync.cql.cells import cells_of
from ringsync.cql.codec.decode import decode
from ringsync.cql.counters import counter_totals
from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import arrow_type
from ringsync.schema.table import TableSchema

OWN_NAMES = (
    "_kind",
    "_token",
    "_write_time",
    "_liveness",
    "_deletion",
    "_range",
    "_partition_key",
    "_clustering",
    "_digest",
    "_file",
    "_position",
)


def typed_schema(table: TableSchema) -> pa.Schema:
    """The schema of :func:`typed_rows`."""
    names = _names(table)
    fields = [pa.field(names[column.name], arrow_type(column.type)) for column in table.key_columns]
    fields += [pa.field(names[column.name], _column_type(column)) for column in columns_of(table)]
    own = [pa.string(), pa.int64(), pa.int64(), LIVENESS, DELETION, _range_type(table)]
    own += [pa.binary(), pa.binary(), pa.binary(16)]
    return pa.schema([*fields, *map(pa.field, OWN_NAMES, [*own, pa.string(), pa.int64()])])


def typed_rows(rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Type the columns of change rows.

    :param rows: of ``CHANGE_ROWS``, all of this table
    """
    keys = cells_of(rows["partition_key"])
    parts = [keys] if len(table.partition_key) == 1 else composite_parts(keys, len(table.partition_key))
    arrays = [decode(column.type, cells).values for column, cells in zip(table.partition_key, parts, strict=True)]
    kinds = rows["kind"]
    is_range = pc.equal(kinds, RANGE_DELETION)
    start, values = _bound(rows["clustering"], table)
    end, _ = _bound(rows["range_end"], table)
    arrays += [pc.if_else(is_range, pa.scalar(None, array.type), array) for array in values]
    columns = columns_of(table)
    for column, cells in zip(columns, by_column(flat(rows["cells"]), len(columns)), strict=True):
        arrays.append(_column(rows, column, cells.cells, cells.row))
    limits = pa.StructArray.from_arrays([start, end], fields=list(_range_type(table)))
    arrays += [
        pa.array(KINDS).take(kinds),
        rows["token"],
        rows["write_time"],
        rows["liveness"],
        rows["deletion"],
        pc.if_else(is_range, limits, pa.scalar(None, limits.type)),
        rows["partition_key"],
        rows["clustering"],
        rows["digest"],
        rows["file"],
        rows["position"],
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=typed_schema(table))


def _names(table: TableSchema) -> dict[str, str]:
    names = [*(column.name for column in table.key_columns), *(column.name for column in columns_of(table))]
    return dict(zip(names, portable_names(names, OWN_NAMES), strict=True))


def _range_type(table: TableSchema) -> pa.StructType:
    names = _names(table)
    fields = [pa.field(names[column.name], arrow_type(column.type)) for column in table.clustering]
    bound = pa.struct([*fields, pa.field("columns", pa.int32()), pa.field("inclusive", pa.bool_())])
    return pa.struct([pa.field("start", bound), pa.field("end", bound)])


def _bound(encoded: pa.Array, table: TableSchema) -> tuple[pa.StructArray, list[pa.Array]]:
    """One side of ranges, or the clustering of rows: as a struct, and its columns."""
    cells = cells_of(encoded)
    there = cells.lengths >= 0
    # What is null has nothing that could be read as a count.
    rows = np.flatnonzero(there)
    counts, parts, ends = clustering_parts(only(cells, rows), len(table.clustering))
    places = np.full(len(encoded), -1)
    places[rows] = np.arange(len(rows))
    take = pa.array(places, mask=~there)
    columns = [
        decode(column.type, part).values.take(take) for column, part in zip(table.clustering, parts, strict=True)
    ]
    last = only(cells, rows)
    inclusive = (ends == last.lengths) | (last.buffer[last.offsets + np.minimum(ends, last.lengths - 1)] > 0)
    more = [pa.array(counts.astype(np.int32)).take(take), pa.array(inclusive).take(take)]
    bound = pa.StructArray.from_arrays([*columns, *more], fields=list(_range_type(table).field("start").type))
    return bound, columns


def _cell_type(column: LoggedColumn) -> pa.StructType:
    value = column.value_type
    fields = [
        ("value", pa.binary() if value is None else arrow_type(value)),
        ("raw", pa.binary()),
        ("timestamp", pa.int64()),
        ("ttl", pa.int32()),
        ("expires_at", pa.int64()),
        ("deleted", pa.bool_()),
    ]
    path = path_type(column.type) if column.is_multicell else None
    return pa.struct(([("path", arrow_type(path))] if path else []) + fields)


def _column_type(column: LoggedColumn) -> pa.DataType:
    cell = _cell_type(column)
    return pa.struct([("deletion", DELETION), ("cells", pa.list_(cell))]) if column.is_multicell else cell


def _column(rows: pa.RecordBatch, column: LoggedColumn, cells: pa.StructArray, row_of_cell: Places) -> pa.Array:
    """A column of all rows, from its cells and the row of each."""
    typed = _cells(column, cells)
    count = len(rows)
    if not column.is_multicell:
        return spread(typed, row_of_cell, count)
    starts = starts_of(np.bincount(row_of_cell, minlength=count))
    lists = pa.ListArray.from_arrays(starts, typed, pa.list_(typed.type))
    deletions = _complex_deletions(rows["complex_deletions"], column, count)
    touched = pc.or_(pc.greater(pc.list_value_length(lists), 0), deletions.is_valid())
    found = pa.StructArray.from_arrays([deletions, lists], fields=list(_column_type(column)))
    return pc.if_else(touched, found, pa.scalar(None, found.type))


def _cells(column: LoggedColumn, cells: pa.StructArray) -> pa.StructArray:
    kinds, locals_ = integers(cells.field("kind")), cells.field("local_deletion_time")
    raw = cells.field("value")
    value_type = column.value_type
    misfits = None
    if value_type is None:
        values = raw
    elif column.is_counter:
        values = counter_totals(raw)
    else:
        decoded = decode(value_type, cells_of(raw))
        values, misfits = decoded.values, decoded.misfits
    kept = pa.nulls(len(cells), pa.binary()) if misfits is None else pc.if_else(pa.array(misfits), raw, None)
    arrays: Sequence[pa.Array] = [
        values,
        kept,
        cells.field("timestamp"),
        cells.field("ttl"),
        pc.if_else(pa.array(kinds == EXPIRING), locals_, None),
        pa.array(kinds == TOMBSTONE),
    ]
    path = path_type(column.type) if column.is_multicell else None
    if path is not None:
        arrays = [decode(path, cells_of(cells.field("path"))).values, *arrays]
    return pa.StructArray.from_arrays(arrays, fields=list(_cell_type(column)))


def _complex_deletions(lists: pa.ListArray, column: LoggedColumn, count: int) -> pa.StructArray:
    every = flat(lists)
    own = every.where(every.integers("column") == column.number)
    fields = [own.cells.field("timestamp"), own.cells.field("local_deletion_time")]
    return spread(pa.StructArray.from_arrays(fields, fields=list(DELETION)), own.row, count)
