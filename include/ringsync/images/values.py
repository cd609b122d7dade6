"""The rows that a SELECT shows at a moment, without their times: what most readers of a table want."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import columns_of
from ringsync.changes.common_times import NO_CELL
from ringsync.changes.grid import cell_grid
from ringsync.changes.keys.canonical import decoded_clustering
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.changes.plain import is_plain
from ringsync.changes.reconcile.plain import OrderedRows, ShownRows
from ringsync.changes.reconcile.streams import MergedPart
from ringsync.changes.schema import NO_EXPIRY, ROW
from ringsync.cql.codec.decode import decode, misfit_reason
from ringsync.images.from_streams import images_of_part
from ringsync.images.live import shown_rows
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.images.times import UnrepresentableValueError, refuse_misfits
from ringsync.schema.table import TableSchema

_SAMPLE, _SHOWN_BYTES = 4096, 64
_REMEDY = "ask for the rows with their times, which keep such values as bytes"


def values_schema(table: TableSchema) -> pa.Schema:
    """Return the schema: the columns of the table, by their names and types in the lake."""
    images, names = row_image_schema(table), lake_names(table)
    return pa.schema([images.field(names[column.name]) for column in table.columns])


def shown_values(parts: Iterable[MergedPart], table: TableSchema, now_s: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a SELECT shows: those whose liveness, or one of whose cells, is alive.

    :param parts: all parts of a merge of whole partitions
    :param now_s: the moment, s since the epoch
    :returns: batches with :func:`values_schema`
    :raises UnrepresentableValueError: a column's type in the lake cannot hold a value
    """
    if is_plain(table):
        yield from (_plain_values(part, table, now_s) for part in parts)
        return
    schema = values_schema(table)
    for rows in shown_rows((images_of_part(part, table, "raw") for part in parts), table, now_s):
        _refuse_raw(rows, table)
        yield rows.select(schema.names).cast(schema)


def _refuse_raw(rows: pa.RecordBatch, table: TableSchema) -> None:
    """:raises UnrepresentableValueError: a column's type in the lake cannot hold a value that is shown"""
    for column in table.columns:
        raw = pc.struct_field(rows["_cells"], [lake_names(table)[column.name], "raw"])
        if raw.null_count < len(raw):
            value = pc.drop_null(raw)[0].as_py()
            raise UnrepresentableValueError(
                f"table {table.full_name}, column {column.name}: 0x{value[:_SHOWN_BYTES].hex()} is "
                f"{misfit_reason(column.type, value)}, which the column's type in the lake cannot hold; {_REMEDY}"
            )


def repeating_columns(rows: pa.RecordBatch) -> list[str]:
    """Name the columns that a Parquet file should have a dictionary of. For others it costs time, and space, too.

    :param rows: the first rows of the file
    """
    sample = rows.slice(0, _SAMPLE)
    flat = [field.name for field in rows.schema if not pa.types.is_nested(field.type)]
    return [name for name in flat if 4 * pc.count_distinct(sample[name]).as_py() <= len(sample)]


def _plain_values(part: MergedPart, table: TableSchema, now_s: int) -> pa.RecordBatch:
    """Return the shown rows of a table in which each column has one cell."""
    rows = part.found.shown(now_s) if isinstance(part.found, OrderedRows) else _shown_rows(part.found, table, now_s)
    clusterings = clustering_parts(rows.clustering, len(table.clustering))[1]
    raws = [*partition_parts(rows.partition_key, table), *clusterings, *rows.values]
    columns = (*table.key_columns, *table.value_columns)
    cells = {column.name: raw for column, raw in zip(columns, raws, strict=True)}
    decoded = {column.name: decode(column.type, cells[column.name]) for column in columns}
    for key in table.clustering:
        decoded[key.name], cells[key.name] = decoded_clustering(decoded[key.name], cells[key.name], key.type)

    def key_of(row: int) -> str:
        keys = (f"{key.name} 0x{(cells[key.name].value(row) or b'').hex()}" for key in table.key_columns)
        return ", ".join(keys)

    refuse_misfits(table, decoded, cells, key_of, _REMEDY)
    arrays = [decoded[column.name].values for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=values_schema(table))


def _shown_rows(rows: ChangeRows, table: TableSchema, now_s: int) -> ShownRows:
    """Do the same as :meth:`OrderedRows.shown` for change rows."""
    rows = rows.where(rows.kind == ROW)
    grid = cell_grid(rows.cells, columns_of(table), len(rows), np.arange(len(rows)))
    until = rows.liveness.expires_at
    is_shown = rows.liveness.there & ((until == NO_EXPIRY) | (until > now_s))
    has_cell = (grid.expiries == NO_EXPIRY) | (grid.expiries > max(now_s, NO_CELL))
    shown = np.flatnonzero(is_shown | has_cell.any(axis=0))
    values = [cells.without(~alive).take(shown) for cells, alive in zip(grid.values, has_cell, strict=True)]
    return ShownRows(rows.partition_key.take(shown), rows.clustering.take(shown), values)
