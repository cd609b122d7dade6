"""Digests of rows, equal only for equal rows, whichever engine returned them.

A row's digest is MurmurHash3 x64 128 of its canonical bytes: every column in the order of the schema, nulls marked at
their place. The bytes are Avro's (:mod:`ringsync.avro.rows`) for a schema derived from the Arrow schema.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro.rows import encode_rows
from ringsync.compiled.arrow import Integers
from ringsync.cql.murmur3 import murmur3_128


def row_digests(rows: pa.RecordBatch) -> tuple[Integers, Integers]:
    """Compute the 128-bit digest of every row, over all its columns: (low halves, high halves)."""
    canonical_rows = canonical(pa.StructArray.from_arrays(rows.columns, fields=list(rows.schema)))
    low, high = murmur3_128(encode_rows(canonical_schema(canonical_rows.type), canonical_rows))
    return low, high


def canonical(array: pa.Array) -> pa.Array:
    """Convert values to types in which equal values have the same bits.

    Dates and timestamps become integers; floats their bits, with one NaN for all and -0.0 apart from 0.0; maps
    become lists of key and value.
    """
    kind = array.type
    if pa.types.is_date32(kind):
        return array.view(pa.int32())
    if pa.types.is_timestamp(kind):
        return array.view(pa.int64())
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_nan(array), pa.scalar(np.nan, kind), array).view(
            pa.int64() if kind == pa.float64() else pa.int32()
        )
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([canonical(array.keys), canonical(array.items)], names=["key", "value"])
        return _list(array, entries)
    if pa.types.is_list(kind):
        return _list(array, canonical(array.values))
    if pa.types.is_struct(kind) and kind.num_fields:
        columns = [canonical(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(columns, names=[f.name for f in kind], mask=array.is_null())
    return array


def _list(array: pa.Array, values: pa.Array) -> pa.Array:
    """Replace the values of a list array and keep its nulls."""
    offsets = pa.array(array.offsets.to_numpy())
    return pa.ListArray.from_arrays(offsets, values, mask=array.is_null())


def canonical_schema(kind: pa.DataType, path: str = "row") -> Any:
    """Return the Avro schema of values of a canonical Arrow type; everything is nullable."""
    if pa.types.is_struct(kind):
        fields = [{"name": f.name, "type": canonical_schema(f.type, f"{path}.{f.name}")} for f in kind]
        return ["null", {"type": "record", "name": path, "fields": fields}]
    if pa.types.is_list(kind):
        return ["null", {"type": "array", "items": canonical_schema(kind.value_type, f"{path}.item")}]
    if pa.types.is_boolean(kind):
        return ["null", "boolean"]
    return ["null", "long" if pa.types.is_integer(kind) else "bytes"]
