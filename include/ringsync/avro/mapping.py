"""The mappings from CQL types to Avro types, and the conversion of row images to the shape that the Avro writer needs.

There are two mappings. ``exact`` loses nothing: decimal and varint keep all digits, UDTs and tuples are records,
collections may hold nulls. ``classic`` is the lossy table of the original CDC design: decimal is a double, varint a
long, and frozen values are Cassandra's bytes. docs/types.md shows both beside the lake's types.
"""

from __future__ import annotations

from collections.abc import Mapping as AnyMapping
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.avro.rows import encode_rows
from ringsync.cql import types as cql
from ringsync.cql.codec.encode import encode
from ringsync.cql.identifiers import portable_names
from ringsync.cql.natives import NATIVES, AvroSchema

Mapping = Literal["exact", "classic"]
AvroRecord = dict[str, Any]

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
"""Names that no record may have in any namespace (Avro specification, "Names")."""

_BIG_DECIMAL: AvroSchema = {
    "type": "record",
    "name": "BigDecimal",
    "fields": [{"name": "unscaled", "type": "bytes"}, {"name": "scale", "type": "int"}],
}
"""The content of a value of the logical type big-decimal (Java: Conversions.BigDecimalConversion)."""


class AvroMappingError(ValueError):
    """An error: the chosen mapping cannot express a value. The message names the value and says what to do."""


def avro_type(cql_type: cql.CqlType, mapping: Mapping, path: str) -> AvroSchema:
    """Return the Avro type of a CQL type, not nullable at the top.

    Records get the namespace ``path``, which grows by a name at each level (a field's name, or ``element``, ``key``,
    ``value``), so that no two records of a schema share a full name.

    :param path: full name of the place that uses the type, e.g. ``server.shop.orders.value.address``
    """
    if _is_opaque(cql_type, mapping):
        return "bytes"
    match cql_type:
        case cql.Native(name):
            schema = _native_type(name, mapping)
            if isinstance(schema, AnyMapping) and schema["type"] == "record":
                return record(schema["name"], path, schema["fields"])
            return schema
        case cql.ListType(element) | cql.SetType(element) | cql.VectorType(element):
            items = avro_type(element, mapping, f"{path}.element")
            return {"type": "array", "items": _in_collection(cql_type, items)}
        case cql.MapType(key, value):
            values = _in_collection(cql_type, avro_type(value, mapping, f"{path}.value"))
            if _is_text(key):
                return {"type": "map", "values": values}
            keys = {"name": "key", "type": avro_type(key, mapping, f"{path}.key")}
            return {"type": "array", "items": record("entry", path, [keys, {"name": "value", "type": values}])}
        case cql.TupleType(fields):
            names = [cql.tuple_field_name(i) for i in range(len(fields))]
            return record("tuple", path, _nullable_fields(names, names, fields, mapping, path))
        case cql.UserType(name=name, field_names=cql_names, field_types=types):
            inner = _nullable_fields(portable_names(cql_names), cql_names, types, mapping, path)
            return record(portable_names([name], reserved=_PRIMITIVES)[0], path, inner)
    raise AssertionError(f"no Avro type for {cql_type!r}")


def record(name: str, namespace: str, fields: Sequence[AvroSchema]) -> dict[str, Any]:
    """Make an Avro record."""
    return {"type": "record", "name": name, "namespace": namespace, "fields": list(fields)}


def nullable_field(name: str, cql_name: str, avro: AvroSchema, aliases: Sequence[str] = ()) -> dict[str, Any]:
    """Make a record field that may be null, and is null in data of older writers without it.

    If Avro does not allow the CQL name, the attribute ``cql`` has it.

    :param aliases: names of the field in data of older writers
    """
    attributes: dict[str, Any] = {} if name == cql_name else {"cql": cql_name}
    if aliases:
        attributes["aliases"] = list(aliases)
    return {"name": name, "type": ["null", avro], "default": None, **attributes}


def avro_values(cql_type: cql.CqlType, mapping: Mapping, values: pa.Array) -> pa.Array:
    """Convert a column of row images to the form that :func:`ringsync.avro.rows.encode_rows` takes.

    :param values: array of ``arrow_type(cql_type)``
    :returns: array that fits ``["null", avro_type(cql_type, mapping, …)]``; nulls stay null
    :raises AvroMappingError: classic only: a varint is no long, or a decimal is no finite double
    """
    if _is_opaque(cql_type, mapping):
        return values if isinstance(cql_type, cql.CustomType) else encode(cql_type, values)
    match cql_type:
        case cql.Native(name):
            return _native_values(name, mapping, values)
        case cql.ListType(element) | cql.SetType(element) | cql.VectorType(element):
            offsets, first, last = _offsets(values)
            items = avro_values(element, mapping, values.values[first:last])
            return pa.ListArray.from_arrays(offsets, items, mask=values.is_null())
        case cql.MapType(key, value):
            offsets, first, last = _offsets(values)
            keys, items = _map_parts(values)
            keys = avro_values(key, mapping, keys[first:last])
            items = avro_values(value, mapping, items[first:last])
            if _is_text(key):
                return pa.MapArray.from_arrays(offsets, keys, items, mask=values.is_null())
            entries = pa.StructArray.from_arrays([keys, items], names=["key", "value"])
            return pa.ListArray.from_arrays(offsets, entries, mask=values.is_null())
        case cql.TupleType(types) | cql.UserType(field_types=types):
            names = [field.name for field in values.type]
            fields = [avro_values(kind, mapping, values.field(i)) for i, kind in enumerate(types)]
            return pa.StructArray.from_arrays(fields, names=names, mask=values.is_null())
    raise AssertionError(f"no Avro values for {cql_type!r}")


def without_logical_types(schema: AvroSchema) -> AvroSchema:
    """Remove the logical types from a schema, so that a reader returns plain numbers."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, AnyMapping):
        inner = ("type", "items", "values")
        plain: dict[str, Any] = {
            name: without_logical_types(value) if name in inner else value
            for name, value in schema.items()
            if name != "logicalType"
        }
        if "fields" in schema:
            plain["fields"] = [without_logical_types(field) for field in schema["fields"]]
        return plain
    return [without_logical_types(branch) for branch in schema]


def _is_opaque(cql_type: cql.CqlType, mapping: Mapping) -> bool:
    """Tell whether values stay Cassandra's bytes in this mapping."""
    if isinstance(cql_type, cql.CustomType):
        return True
    if mapping == "exact" or isinstance(cql_type, cql.Native | cql.VectorType):
        return False
    return isinstance(cql_type, cql.TupleType) or cql_type.frozen


def _is_text(cql_type: cql.CqlType) -> bool:
    return isinstance(cql_type, cql.Native) and NATIVES[cql_type.name].is_text


def _in_collection(collection: cql.CqlType, inner: AvroSchema) -> AvroSchema:
    """Return the type of an element. Only frozen collections can hold nulls; multi-cell ones and vectors cannot."""
    frozen = isinstance(collection, cql.ListType | cql.SetType | cql.MapType) and collection.frozen
    return ["null", inner] if frozen else inner


def _nullable_fields(
    names: Sequence[str], cql_names: Sequence[str], types: Sequence[cql.CqlType], mapping: Mapping, path: str
) -> list[AvroSchema]:
    return [
        nullable_field(name, cql_name, avro_type(kind, mapping, f"{path}.{name}"))
        for name, cql_name, kind in zip(names, cql_names, types, strict=True)
    ]


def _native_type(name: str, mapping: Mapping) -> AvroSchema:
    native = NATIVES[name]
    return native.classic or native.exact if mapping == "classic" else native.exact


def _native_values(name: str, mapping: Mapping, values: pa.Array) -> pa.Array:
    """Convert values whose Arrow type differs in shape from their Avro type."""
    arrow = NATIVES[name].arrow
    match _native_type(name, mapping):
        case {"logicalType": "big-decimal"}:
            return _big_decimals(name, values)
        case "bytes" if arrow != pa.binary():
            return encode(cql.Native(name), values)
        case "double" if arrow == pa.string():
            return _doubles(values)
        case "long" if arrow == pa.string():
            return _longs(values)
        case "long" if pa.types.is_timestamp(arrow):
            return values.cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    return values


def _big_decimals(name: str, values: pa.Array) -> pa.Array:
    unscaled, scale = pc.fill_null(encode(cql.Native(name), values), bytes(4)), np.zeros(len(values), np.int32)
    if NATIVES[name].codec == "decimal":  # the first four bytes are the scale
        heads = pc.binary_slice(unscaled, 0, 4).cast(pa.binary(4))
        scale = np.frombuffer(heads.buffers()[1], ">i4", len(heads)).astype(np.int32)
        unscaled = pc.binary_slice(unscaled, 4, 2**31 - 1)  # pyarrow 26.0 fails without a stop
    encoded = encode_rows(_BIG_DECIMAL, pa.StructArray.from_arrays([unscaled, pa.array(scale)], ["unscaled", "scale"]))
    return pc.if_else(values.is_valid(), encoded, pa.scalar(None, encoded.type))


def _doubles(values: pa.Array) -> pa.Array:
    doubles = values.cast(pa.float64())
    outside = pc.invert(pc.is_finite(doubles))
    if pc.any(outside).as_py():
        _refuse(values.filter(outside)[0].as_py(), "decimal", "a finite double")
    return doubles


def _longs(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid:
        texts = values.drop_null().to_pylist()
        _refuse(next(text for text in texts if not -(2**63) <= Decimal(text) < 2**63), "varint", "a long of 64 bits")


def _refuse(text: str, cql_name: str, avro: str) -> None:
    shown = text if len(text) <= 60 else f"{text[:57]}… ({len(text)} characters)"
    raise AvroMappingError(
        f"the {cql_name} {shown} is not {avro}, as the mapping 'classic' wants: use the mapping 'exact'"
    )


def _offsets(values: pa.Array) -> tuple[pa.Array, int, int]:
    """Return a list or map array's offsets, counted from its first item, and the range of its items in its child."""
    offsets = values.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    return pa.array(offsets - first), first, last


def _map_parts(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return keys and values of a map array, or of the list of entries that replaces a map."""
    if pa.types.is_map(values.type):
        return values.keys, values.items
    return values.values.field("key"), values.values.field("value")
