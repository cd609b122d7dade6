"""The compiled Avro encoder: each row of an Arrow array becomes one Avro datum.

The Avro schema and the Arrow type together give a tree of nodes. Two sweeps visit this tree, one column at a time. The
first adds up the length of each row. The second writes each value to its final place, so that no byte is copied twice.
The first sweep keeps the length of each row so far, the second the address of its next byte. A special value marks rows
that are hidden under a null parent.

Avro's binary form: https://avro.apache.org/docs/1.12.0/specification/#binary-encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.avro import row_kernels as kernels
from ringsync.compiled.arrow import Integers, array_of, integers, valid_mask
from ringsync.compiled.memory import address
from ringsync.cql.codec.encode import bitmap_of, first_value
from ringsync.cql.natives import AvroSchema

NOT_NULLABLE = -1
HIDDEN_LENGTH = -1
HIDDEN_ADDRESS = 0
LENGTH_PREFIXED = -1

_FIXED_WIDTH: dict[str, pa.DataType] = {"boolean": pa.uint8(), "float": pa.float32(), "double": pa.float64()}
_LARGEST_BINARY = 2**31 - 1


def encode_rows(schema: AvroSchema, values: pa.Array) -> pa.Array:
    """Encode each row as one Avro datum, without a header.

    Allowed Arrow and Avro types: bool → boolean; integers, date32 → int, long; timestamp in any unit → long (µs, or ms
    rounded down if the logical type is timestamp-millis); float, double; text and binary → string, bytes, fixed;
    fixed-size binary → fixed; struct → record (fields by name, extra struct fields are ignored); list → array; map with
    text keys → map. ``["null", T]`` and ``[T, "null"]`` allow nulls.

    :param schema: Avro schema of a row, parsed or plain
    :param values: one row per element; a struct array for a record
    :returns: pa.binary(), or pa.large_binary() from 2 GiB on
    :raises ValueError: a null under a schema without null, a missing field, a number or a length that the Avro type
        cannot hold, or types that do not fit each other; the message names the field
    """
    node = _node(schema, values, "row", {})
    lengths = np.zeros(len(values), np.int64)
    _measure(node, lengths)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(max(int(offsets[-1]), 1), np.uint8)
    _write(node, offsets[:-1] + address(data))
    data = data[: offsets[-1]]
    kind, width = (pa.binary(), np.int32) if len(data) <= _LARGEST_BINARY else (pa.large_binary(), np.int64)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets.astype(width)), pa.py_buffer(data)])


@dataclass(frozen=True)
class _Values:
    """A node of the schema: the common part of all kinds.

    :ivar path: place in the schema, for messages
    :ivar null_branch: byte of the union's null branch, or NOT_NULLABLE
    :ivar array: values; the node keeps their memory alive for the kernels
    """

    path: str
    null_branch: int
    array: pa.Array


@dataclass(frozen=True)
class _Scalars(_Values):
    """Numbers or byte strings.

    :ivar kind: ``INTEGERS``: int64, written as zigzag varints; ``FIXED``: written exactly as in memory; ``BYTES``:
        large_binary
    :ivar size: bytes of each value; for BYTES also LENGTH_PREFIXED: written after their length
    """

    kind: int
    size: int


@dataclass(frozen=True)
class _Record(_Values):
    """A struct, written field by field."""

    fields: tuple[_Node, ...]


@dataclass(frozen=True)
class _Items(_Values):
    """A list or map: the count, the items, and an end mark.

    :ivar offsets: int64[rows + 1]: place of each row's first item in the parts
    :ivar parts: nodes of one item: the element, or key and value
    :ivar item_lengths: bytes of each item; the first sweep fills it for the second
    """

    offsets: Integers
    parts: tuple[_Node, ...]
    item_lengths: Integers


_Node = _Scalars | _Record | _Items


def _node(schema: AvroSchema, values: pa.Array, path: str, named: dict[str, AvroSchema]) -> _Node:
    """Make the node for these values. ``named`` collects the named types so far, for later references to them."""
    schema, null_branch = _without_null(schema, path)
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    attributes: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {"type": schema}
    kind = attributes["type"]
    if isinstance(kind, Mapping | list):  # {"type": {"type": "long", …}}
        return _node(kind, values, path, named)
    if "name" in attributes:
        named[attributes["name"]] = attributes
        named[f"{attributes.get('namespace', '')}.{attributes['name']}"] = attributes
    if pa.types.is_null(values.type):
        return _Scalars(path, null_branch, pa.nulls(len(values), pa.large_binary()), kernels.BYTES, LENGTH_PREFIXED)
    try:
        if kind == "record":
            return _record(attributes, values, path, null_branch, named)
        if kind in ("array", "map"):
            return _items(attributes, values, path, null_branch, named)
        return _scalar(attributes, values, path, null_branch)
    except pa.ArrowException as error:
        raise ValueError(f"Avro field {path}: Arrow type {values.type} as Avro {kind}: {error}") from error


def _without_null(schema: AvroSchema, path: str) -> tuple[AvroSchema, int]:
    """Split a nullable schema. Return the other branch, and the byte of the null branch."""
    if isinstance(schema, str | Mapping):
        return schema, NOT_NULLABLE
    if len(schema) != 2 or "null" not in schema:
        raise ValueError(f"Avro field {path}: the union {schema} is not null and one other type")
    null_index = list(schema).index("null")
    return schema[1 - null_index], 2 * null_index


def _scalar(attributes: Mapping[str, Any], values: pa.Array, path: str, null_branch: int) -> _Node:
    """Cast a column to the Arrow type that the kernels read for this Avro type."""
    kind = attributes["type"]
    if kind in ("int", "long"):
        return _Scalars(path, null_branch, _integers(attributes, values), kernels.INTEGERS, 8)
    if kind in ("string", "bytes", "fixed"):
        size = attributes["size"] if kind == "fixed" else LENGTH_PREFIXED
        return _Scalars(path, null_branch, values.cast(pa.large_binary()), kernels.BYTES, size)
    if kind in _FIXED_WIDTH:
        wanted = _FIXED_WIDTH[kind]
        return _Scalars(path, null_branch, values.cast(wanted), kernels.FIXED, wanted.bit_width // 8)
    raise ValueError(f"Avro field {path}: the Avro type {kind!r} cannot be written")


def _integers(attributes: Mapping[str, Any], values: pa.Array) -> pa.Array:
    if pa.types.is_date32(values.type):
        values = values.view(pa.int32())
    elif pa.types.is_timestamp(values.type):
        micros = values.cast(pa.timestamp("us", values.type.tz)).view(pa.int64())
        is_millis = attributes.get("logicalType") == "timestamp-millis"
        values = array_of(integers(micros) // 1000, valid_mask(micros)) if is_millis else micros
    return values.cast(pa.int32()).cast(pa.int64()) if attributes["type"] == "int" else values.cast(pa.int64())


def _record(
    attributes: Mapping[str, Any], values: pa.Array, path: str, null_branch: int, named: dict[str, AvroSchema]
) -> _Node:
    if not pa.types.is_struct(values.type):
        raise ValueError(f"Avro field {path}: a record needs a struct, not {values.type}")
    fields = []
    for field in attributes["fields"]:
        name = field["name"]
        if values.type.get_field_index(name) < 0:
            raise ValueError(f"Avro field {path}.{name}: the struct has no field of this name: {values.type}")
        fields.append(_node(field["type"], values.field(name), f"{path}.{name}", named))
    return _Record(path, null_branch, values, tuple(fields))


def _items(
    attributes: Mapping[str, Any], values: pa.Array, path: str, null_branch: int, named: dict[str, AvroSchema]
) -> _Node:
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    is_map = attributes["type"] == "map"
    if is_map != pa.types.is_map(values.type) or not hasattr(values, "offsets"):
        raise ValueError(f"Avro field {path}: Arrow type {values.type} does not fit an Avro {attributes['type']}")
    offsets = values.offsets.to_numpy().astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    if is_map:
        columns = [("string", values.keys, "[key]"), (attributes["values"], values.items, "[]")]
    else:
        columns = [(attributes["items"], values.values, "[]")]
    parts = tuple(_node(part, column[first:last], path + suffix, named) for part, column, suffix in columns)
    return _Items(path, null_branch, values, offsets - first, parts, np.full(last - first, HIDDEN_LENGTH))


def _measure(node: _Node, lengths: Integers) -> None:
    """Make the first sweep: add the node's length in each row to ``lengths``, except in rows with HIDDEN_LENGTH."""
    rows = (*bitmap_of(node.array), node.null_branch, len(lengths), address(lengths))
    match node:
        case _Scalars():
            bad_row = kernels.measure_values(*_values_of(node), *rows)
        case _Record():
            inner = np.empty(len(lengths), np.int64)
            bad_row = kernels.measure_record(*rows, address(inner))
            for field in node.fields if bad_row < 0 else ():
                _measure(field, inner)
            lengths += np.maximum(inner, 0, out=inner)
        case _Items(offsets=offsets, item_lengths=item_lengths):
            bad_row = kernels.reveal_items(address(offsets), *rows, address(item_lengths))
            for part in node.parts if bad_row < 0 else ():
                _measure(part, item_lengths)
            kernels.measure_items(address(offsets), *rows, address(item_lengths))
    if bad_row >= 0:
        problem = (
            "has another length than the schema's" if node.array[bad_row].is_valid else "is null, the schema has none"
        )
        raise ValueError(f"Avro field {node.path}: the value of entry {bad_row} {problem}")


def _values_of(node: _Scalars) -> tuple[int, int, int]:
    """Return the first arguments of the kernels: kind, address of the first number or offset, size."""
    return node.kind, first_value(node.array, 8 if node.kind == kernels.BYTES else node.size), node.size


def _write(node: _Node, cursors: Integers) -> None:
    """Make the second sweep: write each row's value at its cursor and move the cursor, except at HIDDEN_ADDRESS."""
    rows = (*bitmap_of(node.array), node.null_branch, len(cursors), address(cursors))
    match node:
        case _Scalars():
            data = node.array.buffers()[2] if node.kind == kernels.BYTES else None
            kernels.write_values(*_values_of(node), data.address if data else 0, *rows)
        case _Record():
            inner = np.empty(len(cursors), np.int64)
            kernels.write_record(*rows, address(inner))
            for field in node.fields:
                _write(field, inner)
            # Rows that have a record go on behind its fields.
            np.maximum(cursors, inner, out=cursors)
        case _Items(offsets=offsets, item_lengths=item_lengths):
            item_cursors = np.full(len(item_lengths), HIDDEN_ADDRESS)
            kernels.write_items(address(offsets), *rows, address(item_lengths), address(item_cursors))
            for part in node.parts:
                _write(part, item_cursors)
