"""When two rows are the same row: key columns equal to the byte, as Cassandra's are.

Two forms. In Arrow a key's digest: two keys have the same one only if all values and raw bytes are the same. In Spark's
SQL an expression, because ``=`` there takes -0.0 for 0.0 and does not compare maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.types import arrow_type
from ringsync.replica.digests import row_digests
from ringsync.schema.row_image import lake_names
from ringsync.schema.table import Column, TableSchema


def key_digests(rows: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """A digest (16 bytes) of each row's token and key columns.

    :param rows: row images, or live rows; only ``token``, the key columns and their raw bytes (in ``_x`` or
        ``_cells``) need be there
    """
    return _digests(rows, table, table.key_columns)


def partition_digests(rows: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """The same of token and partition key."""
    return _digests(rows, table, table.partition_key)


def binary_digests(rows: pa.RecordBatch) -> pa.Array:
    """The digests of all columns of each row as 16 bytes each."""
    both = np.column_stack(row_digests(rows)).astype("<i8").tobytes()
    return pa.Array.from_buffers(pa.binary(16), rows.num_rows, [None, pa.py_buffer(both)]).cast(pa.binary())


def _digests(rows: pa.RecordBatch, table: TableSchema, columns: Sequence[Column]) -> pa.Array:
    names = [lake_names(table)[column.name] for column in columns]
    more = rows["_cells" if "_cells" in rows.schema.names else "_x"]
    # Rows that Spark has written may lack the struct around a value that is not there.
    raw = [pc.struct_field(more, [name, "raw"]) for name in names]
    parts = [rows["token"], *(rows[name] for name in names), *raw]
    return binary_digests(pa.record_batch(parts, names=[str(i) for i in range(len(parts))]))


def key_columns_sql(table: TableSchema, rows: str) -> list[str]:
    """Spark SQL: expressions that are equal (``<=>``) in two row images only if these have the same key.

    :param rows: the table's alias
    """
    names = lake_names(table)
    found = [f"{rows}.token"]
    for column in table.key_columns:
        name = f"`{names[column.name]}`"
        found.append(_comparable(arrow_type(column.type), f"{rows}.{name}"))
        found.append(f"{rows}._x.{name}.raw")
    return found


def same_key_sql(table: TableSchema, one: str, other: str) -> str:
    """Spark SQL: whether two row images, by their aliases, have the same key."""
    token, *rest = zip(key_columns_sql(table, one), key_columns_sql(table, other), strict=True)
    # No token is null; Spark and Delta plan with = best.
    return " AND ".join([f"{token[0]} = {token[1]}", *(f"{left} <=> {right}" for left, right in rest)])


def _comparable(kind: pa.DataType, value: str, depth: int = 0) -> str:
    """A value as something that Spark compares exactly: floats as text, maps as arrays of their entries."""
    if pa.types.is_floating(kind):
        return f"CAST({value} AS string)"
    if not _has_float_or_map(kind):
        return value
    entry = f"e{depth}"
    if pa.types.is_map(kind):
        key, item = (_comparable(t, f"{entry}.{n}", depth + 1) for t, n in _entry_types(kind))
        return f"transform(map_entries({value}), {entry} -> struct({key}, {item}))"
    if pa.types.is_list(kind):
        return f"transform({value}, {entry} -> {_comparable(kind.value_type, entry, depth + 1)})"
    fields: Iterable[pa.Field] = kind
    members = ", ".join(_comparable(field.type, f"{value}.`{field.name}`", depth) for field in fields)
    return f"CASE WHEN {value} IS NOT NULL THEN struct({members}) END"


def _has_float_or_map(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_float_or_map(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_float_or_map(field.type) for field in kind)
    return bool(pa.types.is_map(kind) or pa.types.is_floating(kind))


def _entry_types(kind: pa.MapType) -> Iterable[tuple[pa.DataType, str]]:
    return (kind.key_type, "key"), (kind.item_type, "value")
