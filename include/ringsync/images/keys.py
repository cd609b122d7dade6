"""Equality of row keys as in Cassandra: by the bytes of partition keys and the canonical values of clusterings.

There are two forms. In Arrow it is a key's digest: two keys have the same digest only if all canonical values
(:mod:`ringsync.changes.keys.canonical`) and raw bytes are the same. In Spark SQL it is an expression, because ``=``
there distinguishes the decimals 1.0 and 1.00, takes -0.0 for 0.0, and does not compare maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import fixed16_array
from ringsync.changes.keys.canonical import canonical_column, has_aliases
from ringsync.changes.keys.order import path_type
from ringsync.cql import types as cql
from ringsync.cql.natives import DECIMAL, FLOAT, NATIVES
from ringsync.images.digests import row_digests
from ringsync.images.schema import lake_names
from ringsync.schema.table import Column, TableSchema


def key_digests(rows: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """Compute a digest (16 bytes) of each row's token and key columns.

    :param rows: row images, or live rows; they need only ``token``, the key columns and their raw bytes (in ``_x`` or
        ``_cells``)
    """
    return _digests(rows, table, table.key_columns)


def partition_digests(rows: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """Compute a digest (16 bytes) of each row's token and partition key."""
    return _digests(rows, table, table.partition_key)


def comparable(rows: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Make clusterings, elements of sets and keys of maps of live rows canonical, so that copies of a row are equal.

    The spelling in a copy depends on the order in which writes arrived. All other values stay unchanged.

    :param rows: result of :func:`ringsync.images.live.live_rows`
    """
    names = lake_names(table)
    for column in table.columns:
        place = rows.schema.get_field_index(names[column.name])
        values = rows.column(place)
        if column.kind == "clustering":
            canonical = canonical_column(values, column.type)
        elif column.is_multicell and isinstance(column.type, cql.SetType | cql.MapType):
            canonical = _with_canonical_paths(values, column.type)
        else:
            continue
        if canonical is not values:
            rows = rows.set_column(place, rows.schema.field(place), canonical.cast(values.type))
    return rows


def _with_canonical_paths(values: pa.Array, cql_type: cql.SetType | cql.MapType) -> pa.Array:
    kind = path_type(cql_type)
    if not has_aliases(kind):
        return values
    # With nulls, offsets must not be a slice of another array.
    offsets, nulls = pa.array(values.offsets.to_numpy()), values.is_null()
    if pa.types.is_map(values.type):
        keys = canonical_column(values.keys, kind)
        return pa.MapArray.from_arrays(offsets, keys, values.items, mask=nulls)
    entries = values.values
    if isinstance(cql_type, cql.MapType):
        parts = [canonical_column(entries.field("key"), kind), entries.field("value")]
        return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, ["key", "value"]), mask=nulls)
    return pa.ListArray.from_arrays(offsets, canonical_column(entries, kind), mask=nulls)


def binary_digests(rows: pa.RecordBatch) -> pa.Array:
    """Compute the digest of all columns of each row, 16 bytes."""
    return fixed16_array(np.column_stack(row_digests(rows)).astype("<i8")).cast(pa.binary())


def _digests(rows: pa.RecordBatch, table: TableSchema, columns: Sequence[Column]) -> pa.Array:
    names = [lake_names(table)[column.name] for column in columns]
    more = rows["_cells" if "_cells" in rows.schema.names else "_x"]
    # Rows written by Spark may lack the struct around a missing value.
    raw = [pc.struct_field(more, [name, "raw"]) for name in names]
    values = [
        canonical_column(rows[name], column.type) if column.kind == "clustering" else rows[name]
        for column, name in zip(columns, names, strict=True)
    ]
    parts = [rows["token"], *values, *raw]
    return binary_digests(pa.record_batch(parts, names=[str(i) for i in range(len(parts))]))


def key_columns_sql(table: TableSchema, rows: str) -> list[str]:
    """Write Spark SQL expressions that are equal (``<=>``) in two row images only if these have the same key.

    :param rows: alias of the table
    """
    names = lake_names(table)
    expressions = [f"{rows}.token"]
    for column in table.key_columns:
        name = f"`{names[column.name]}`"
        expressions.append(_comparable(column.type, f"{rows}.{name}", as_clustering=column.kind == "clustering"))
        # For clusterings these bytes are canonical (decoded_clustering in changes/keys/canonical.py).
        expressions.append(f"{rows}._x.{name}.raw")
    return expressions


def same_key_sql(table: TableSchema, left: str, right: str) -> str:
    """Write the Spark SQL condition that two row images, given by their aliases, have the same key."""
    token, *rest = zip(key_columns_sql(table, left), key_columns_sql(table, right), strict=True)
    # No token is null, and Spark and Delta plan best with =.
    return " AND ".join([f"{token[0]} = {token[1]}", *(f"{a} <=> {b}" for a, b in rest)])


def _comparable(cql_type: cql.CqlType, value: str, *, as_clustering: bool, depth: int = 0) -> str:
    """Write an expression that Spark compares exactly: floats as text, maps as arrays of their entries.

    In clusterings, equal decimals have one text, however they are spelled.
    """
    if not _is_compared_otherwise(cql_type, as_clustering):
        return value
    entry = f"e{depth}"
    match cql_type:
        case cql.Native(name) if NATIVES[name].order == DECIMAL:
            return _decimal(value)
        case cql.MapType(key, item):
            parts = ((key, f"{entry}.key"), (item, f"{entry}.value"))
            members = ", ".join(_comparable(t, v, as_clustering=as_clustering, depth=depth + 1) for t, v in parts)
            entries = f"map_entries({value})" if pa.types.is_map(cql.arrow_type(cql_type)) else value
            return f"transform({entries}, {entry} -> struct({members}))"
        case cql.ListType(element) | cql.SetType(element) | cql.VectorType(element):
            inner = _comparable(element, entry, as_clustering=as_clustering, depth=depth + 1)
            return f"transform({value}, {entry} -> {inner})"
        case cql.TupleType(fields) | cql.UserType(field_types=fields):
            named = [f"{value}.`{field.name}`" for field in cql.arrow_type(cql_type)]
            members = ", ".join(
                _comparable(t, v, as_clustering=as_clustering, depth=depth) for t, v in zip(fields, named, strict=True)
            )
            return f"CASE WHEN {value} IS NOT NULL THEN struct({members}) END"
    return f"CAST({value} AS string)"


def _decimal(value: str) -> str:
    """Write one text for all BigDecimal.toString spellings of a number: sign, digits without outer zeros, exponent."""
    mantissa, power = f"split_part({value}, 'E', 1)", f"split_part({value}, 'E', 2)"
    digits = f"translate({mantissa}, '-.', '')"
    zeros = f"length({digits}) - length(trim(TRAILING '0' FROM {digits}))"
    scale = f"length(split_part({mantissa}, '.', 2))"
    exponent = f"CAST({zeros} - {scale} + CAST(coalesce(nullif({power}, ''), '0') AS bigint) AS string)"
    sign = f"CASE WHEN {value} LIKE '-%' THEN '-' ELSE '' END"
    return (
        f"CASE WHEN {digits} RLIKE '[1-9]' THEN concat({sign}, trim(BOTH '0' FROM {digits}), 'E', {exponent}) "
        f"WHEN {value} IS NOT NULL THEN '0' END"
    )


def _is_compared_otherwise(cql_type: cql.CqlType, as_clustering: bool) -> bool:
    if isinstance(cql_type, cql.Native):
        order = NATIVES[cql_type.name].order
        return order == FLOAT or (order == DECIMAL and as_clustering)
    return isinstance(cql_type, cql.MapType) or any(
        _is_compared_otherwise(inner, as_clustering) for inner in cql.types_inside(cql_type)
    )
