"""Change rows of one table with typed columns, for people and for jobs that know the table.

These columns are added to the table's own, whose names are as in the replica. A column that does not apply is null:

==================  ========================================================================================
``_kind``           ``row``, ``static``, ``partition_deletion``, ``range_deletion``
``_token``          token of the partition
``_write_time``     greatest timestamp in the row, µs
``_liveness``       liveness of the row itself: timestamp (µs), ttl (s), expires_at (s)
``_deletion``       deletion of the row, partition or range: timestamp (µs), local_deletion_time (s)
``_range``          bounds of a range: ``start`` and ``end`` have the first clustering columns, the number of columns
                    that count (``columns``), and whether rows that begin with them belong to it (``inclusive``)
``_partition_key``  Cassandra's bytes; with ``_clustering`` it keeps key values that the type in the lake cannot
                    hold (an empty int, say): such a key column is null
``_clustering``     bytes as in change rows
``_digest``         digest of the content
``_file``           name of the segment; ``_position`` is the logical position after the record in it
==================  ========================================================================================

Key columns are typed values. Any other column is a cell, null if the change does not touch it: ``value`` (null if
``deleted``), ``raw`` (the bytes of a value that the type cannot hold), ``timestamp`` (µs), ``ttl`` and ``expires_at``
(s), ``deleted``. A collection that is not frozen is a struct of ``deletion`` (the deletion of its earlier content;
null: none) and ``cells``. Each of these has a ``path``: list entry (timeuuid), set element or map key. In a UDT that is
not frozen the ``path`` is the field's number, and the value stays bytes, because the fields differ in type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.flat import FlatCells, FlatDeletions, by_column
from ringsync.changes.keys.order import path_type
from ringsync.changes.keys.parts import are_inclusive, clustering_parts, partition_parts
from ringsync.changes.schema import DELETION, EXPIRING, KINDS, LIVENESS, RANGE_DELETION, TOMBSTONE
from ringsync.compiled.arrow import array_of, list_of, only, placed, structs_of
from ringsync.cql.cells import Cells, raw_values
from ringsync.cql.codec.decode import Decoded, decode
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
    """Return the schema of :func:`typed_rows`."""
    names = _names(table)
    fields = [pa.field(names[column.name], arrow_type(column.type)) for column in table.key_columns]
    fields += [pa.field(names[column.name], _column_type(column)) for column in columns_of(table)]
    types = [pa.string(), pa.int64(), pa.int64(), LIVENESS, DELETION, _range_type(table)]
    types += [pa.binary(), pa.binary(), pa.binary(16), pa.string(), pa.int64()]
    return pa.schema([*fields, *map(pa.field, OWN_NAMES, types)])


def typed_rows(rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Type the columns of change rows.

    :param rows: batch of ``CHANGE_ROWS``, all of this table
    """
    change_rows = ChangeRows.of(rows)
    parts = partition_parts(change_rows.partition_key, table)
    arrays = [decode(column.type, cells).values for column, cells in zip(table.partition_key, parts, strict=True)]
    kinds = rows["kind"]
    is_range = pc.equal(kinds, RANGE_DELETION)
    start, values = _bound(change_rows.clustering, table)
    end, _ = _bound(change_rows.range_end, table)
    arrays += [pc.if_else(is_range, pa.scalar(None, array.type), array) for array in values]
    columns = columns_of(table)
    parts_of = (by_column(of_all, len(columns)) for of_all in (change_rows.cells, change_rows.complex_deletions))
    for column, cells, deletions in zip(columns, *parts_of, strict=True):
        arrays.append(_column(column, cells, deletions, len(rows)))
    arrays += [
        pa.array(KINDS).take(kinds),
        *(rows[name] for name in ("token", "write_time", "liveness", "deletion")),
        structs_of(_range_type(table), [start, end], change_rows.kind == RANGE_DELETION),
        *(rows[name] for name in ("partition_key", "clustering", "digest", "file", "position")),
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


def _bound(cells: Cells, table: TableSchema) -> tuple[pa.StructArray, list[pa.Array]]:
    """Decode one side of ranges, or the clustering of rows. Return it as a struct, and its columns."""
    counts, parts, sizes = clustering_parts(cells, len(table.clustering))
    decoded = [decode(column.type, part).values for column, part in zip(table.clustering, parts, strict=True)]
    there = cells.lengths >= 0
    others = [array_of(counts.astype(np.int32), there), only(pa.array(are_inclusive(cells, sizes)), there)]
    return structs_of(_range_type(table).field("start").type, [*decoded, *others]), decoded


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


def _column(column: LoggedColumn, cells: FlatCells, deletions: FlatDeletions, count: int) -> pa.Array:
    """Make a column of ``count`` rows from its cells and complex deletions."""
    typed = _cells(column, cells)
    if not column.is_multicell:
        return placed(typed, cells.row, count)
    lists = list_of(np.bincount(cells.row, minlength=count), typed)
    times = [array_of(deletions.timestamp), array_of(deletions.local)]
    deleted = placed(structs_of(DELETION, times), deletions.row, count)
    touched = np.bincount(np.concatenate([cells.row, deletions.row]), minlength=count) > 0
    return structs_of(_column_type(column), [deleted, lists], touched)


def _cells(column: LoggedColumn, cells: FlatCells) -> pa.StructArray:
    if column.value_type is None:
        decoded = Decoded(raw_values(cells.value), None)
    elif column.is_counter:
        decoded = Decoded(counter_totals(raw_values(cells.value)), None)
    else:
        decoded = decode(column.value_type, cells.value)
    ends = cells.kind == EXPIRING
    arrays: Sequence[pa.Array] = [
        decoded.values,
        decoded.raw(cells.value),
        array_of(cells.timestamp),
        array_of(cells.ttl.astype(np.int32), ends),
        array_of(cells.local, ends),
        pa.array(cells.kind == TOMBSTONE),
    ]
    if column.is_multicell:
        arrays = [decode(path_type(column.type), cells.path).values, *arrays]
    return structs_of(_cell_type(column), arrays)
