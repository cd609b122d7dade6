"""Arrow values encoded to the bytes that Cassandra would write, one column at a time.

This is the inverse of :mod:`ringsync.cql.codec.decode`. The parts of nested values are encoded first, each to a binary
array. Then one kernel lays them out with counts and lengths. The formats are those of the native protocol v5
(docs/formats.md, 2.6; Cassandra: serializers/*, marshal/AbstractType).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.compiled.arrow import Integers, bitmap, integers, valid_mask
from ringsync.compiled.memory import address
from ringsync.cql import types as cql
from ringsync.cql.codec import encode_kernels as kernels
from ringsync.cql.codec import text_parse
from ringsync.cql.natives import DATE_EPOCH, NATIVES, Codec, NativeType

LARGEST_BINARY = 2**31 - 1
LONGEST_DURATION = 27
OFFSET_BYTES = 8
"""Bytes of an offset of a large_binary array."""
LONGEST_KEY_COMPONENT = 2**16 - 1


class _Unencodable(ValueError):
    """An error: the CQL type cannot hold a value. ``row`` is its row at the current level of nesting."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def encode(cql_type: cql.CqlType, values: pa.Array) -> pa.Array:
    """Serialise values; null stays null, and null inside a collection, tuple or UDT becomes length −1.

    :param values: array of the type's Arrow type (types.arrow_type), or of one that casts to it without loss; slices,
        large offsets, and maps as lists of (key, value) are allowed
    :returns: pa.binary()
    :raises ValueError: the CQL type cannot hold a value (the message names value and row), or the result is larger than
        2 GiB
    """
    try:
        encoded = _encode(cql_type, values)
    except _Unencodable as error:
        raise ValueError(f"{cql_type}, row {error.row}: {error}") from None
    except pa.ArrowException as error:
        raise ValueError(f"{cql_type}: Arrow type {values.type} does not fit: {error}") from error
    return _narrow(encoded, str(cql_type))


def partition_key_bytes(columns: Sequence[pa.Array]) -> pa.Array:
    """Serialise the partition keys of a table from its encoded partition key columns.

    :param columns: results of :func:`encode`, in the order of the partition key
    :returns: pa.binary(): one column → its bytes; several → for each its length as uint16, its bytes, a zero byte
    :raises ValueError: a value is null, or one of several columns has a value of more than 65,535 bytes
    """
    parts = [column.cast(pa.large_binary()) for column in columns]
    for part in parts:
        for row in _null_rows(part):
            raise ValueError(f"partition key, row {row}: a value is null")
    if len(parts) == 1:
        return _narrow(parts[0], "partition key")
    for part in parts:
        for row in np.flatnonzero(_lengths(part) > LONGEST_KEY_COMPONENT).tolist():
            raise ValueError(f"partition key, row {row}: a value is longer than {LONGEST_KEY_COMPONENT} bytes")
    keys = _compose(parts, np.arange(len(parts[0]) + 1), parts[0], kernels.KEY_COMPONENT, counted=False)
    return _narrow(keys, "partition key")


def frozen_values(parts: Sequence[pa.Array], counts: Integers, *, counted: bool) -> pa.Array:
    """Build frozen collections or user-defined types from serialised parts.

    :param parts: binary arrays with a value per item: element of a list or set; key, value of a map; each field
    :param counts: number of items of each value; a user-defined type is one item
    :param counted: whether the number of items is written: True for collections
    :returns: pa.binary(), as long as ``counts``
    """
    items = np.concatenate([[0], np.cumsum(counts)])
    large = [part.cast(pa.large_binary()) for part in parts]
    all_there = pa.nulls(len(counts)).is_null()
    return _narrow(_compose(large, items, all_there, kernels.INT_LENGTH, counted=counted), "frozen values")


def _narrow(encoded: pa.Array, what: str) -> pa.Array:
    if len(encoded) and int(offsets_of(encoded)[-1]) > LARGEST_BINARY:
        raise ValueError(f"{what}: {len(encoded)} values take more than 2 GiB; encode fewer rows at once")
    return encoded.cast(pa.binary())


def _encode(cql_type: cql.CqlType, values: pa.Array) -> pa.Array:
    """Encode like :func:`encode`, to large_binary. Raise _Unencodable with the row in ``values``."""
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.large_binary())
    match cql_type:
        case cql.Native(name):
            native = NATIVES[name]
            return _CODECS[native.codec](native, values)
        case cql.CustomType():
            return values.cast(pa.large_binary())
        case cql.ListType(element) | cql.SetType(element):
            elements, items = _items(values)
            return _compose(_parts([element], [elements], items), items, values, kernels.INT_LENGTH, counted=True)
        case cql.MapType(key, value):
            entries, items = _items(values)
            parts = _parts([key, value], entries.flatten(), items)
            return _compose(parts, items, values, kernels.INT_LENGTH, counted=True)
        case cql.TupleType(fields) | cql.UserType(field_types=fields):
            if not pa.types.is_struct(values.type) or values.type.num_fields != len(fields):
                raise ValueError(f"{cql_type} has {len(fields)} fields, its Arrow type is {values.type}")
            items = np.arange(len(values) + 1)
            parts = _parts(fields, values.flatten(), items)
            return _compose(parts, items, values, kernels.INT_LENGTH, counted=False)
        case cql.VectorType():
            return _vector(cql_type, values)


def _parts(types: Sequence[cql.CqlType], columns: Sequence[pa.Array], items: Integers) -> list[pa.Array]:
    """Encode the parts of nested values. An error names the row of the whole value."""
    try:
        return [_encode(cql_type, column) for cql_type, column in zip(types, columns, strict=True)]
    except _Unencodable as error:
        raise _Unencodable(_row_of(error.row, items), str(error)) from None


def _row_of(item: int, items: Integers) -> int:
    """Return the row that holds this item."""
    return int(np.searchsorted(items, item, side="right")) - 1


def _items(values: pa.Array) -> tuple[pa.Array, Integers]:
    """Return the items of a list or map array without those of null rows, and each row's first: int64[rows + 1]."""
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    elif pa.types.is_map(values.type):
        values = values.cast(pa.list_(pa.struct([values.type.key_field, values.type.item_field])))
    lengths = np.where(valid_mask(values), np.diff(integers(values.offsets)), 0)
    return values.flatten(), np.concatenate([[0], np.cumsum(lengths)])


def _vector(cql_type: cql.VectorType, values: pa.Array) -> pa.Array:
    elements, items = _items(values)
    for row in np.flatnonzero(np.diff(items) != cql_type.dimension):
        if values[row].is_valid:
            count = int(items[row + 1] - items[row])
            raise _Unencodable(int(row), f"a vector of {count} elements, its type has {cql_type.dimension}")
    for element in _null_rows(elements):
        raise _Unencodable(_row_of(element, items), "a vector cannot hold null")
    parts = _parts([cql_type.element], [elements], items)
    width = cql.stored_length(cql_type.element)
    if width <= 0:
        return _compose(parts, items, values, kernels.VINT_LENGTH, counted=False)
    return _binary(values, items * width, np.frombuffer(parts[0].buffers()[2] or b"", np.uint8))


def _compose(parts: Sequence[pa.Array], items: Integers, rows: pa.Array, framing: int, *, counted: bool) -> pa.Array:
    """Lay out the parts of each row's items. Null rows in ``rows`` get no bytes.

    :param parts: large_binary arrays, each with one value per item
    :param items: int64[rows + 1]: place of each row's first item in the parts
    """
    description = np.array(
        [[*bitmap_of(part), first_value(part, OFFSET_BYTES), _address(part.buffers()[2])] for part in parts], np.int64
    ).reshape(len(parts), kernels.PART_FIELDS)
    offsets = np.empty(len(rows) + 1, np.int64)
    arguments = (address(description), len(parts), framing, int(counted), address(items), *bitmap_of(rows), len(rows))
    kernels.measure_composites(*arguments, address(offsets))
    data = np.empty(offsets[-1], np.uint8)
    kernels.write_composites(*arguments, address(data))
    return _binary(rows, offsets, data)


def _same(_native: NativeType, values: pa.Array) -> pa.Array:
    return values.cast(pa.large_binary())


def _fixed(native: NativeType, values: pa.Array) -> pa.Array:
    """Encode numbers of one length, high byte first."""
    values, width = values.cast(native.arrow), native.width
    if native.codec == "boolean":
        values = values.cast(pa.uint8())
    numbers = numbers_of(values, np.dtype(f"i{width}"))
    if native.codec == "date":
        numbers = numbers ^ np.int32(-DATE_EPOCH)
    elif native.codec == "timestamp":
        numbers = _milliseconds(values, numbers)
    offsets = np.arange(len(values) + 1) * width
    return _binary(values, offsets, numbers.astype(f">i{width}").view(np.uint8))


def numbers_of(values: pa.Array, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers of an Arrow array without a copy. Those of null rows are undefined."""
    if not len(values):
        return np.empty(0, kind)
    return np.frombuffer(values.buffers()[1], kind, values.offset + len(values))[values.offset :]


def _milliseconds(values: pa.Array, micros: Integers) -> Integers:
    milliseconds = micros // 1000
    for row in np.flatnonzero(milliseconds * 1000 != micros):
        if values[row].is_valid:
            raise _Unencodable(int(row), f"{micros[row]} µs since 1970 is not a whole number of milliseconds")
    return milliseconds


def _durations(native: NativeType, values: pa.Array) -> pa.Array:
    """Encode durations. Refuse those that lack a number, which the Arrow type allows."""
    columns = [column.cast(field.type) for column, field in zip(values.flatten(), native.arrow, strict=True)]
    for column in columns:
        for row in np.flatnonzero(valid_mask(values) & ~valid_mask(column)):
            raise _Unencodable(int(row), f"the duration {values[row].as_py()} lacks a number")
    offsets = np.empty(len(values) + 1, np.int64)
    data = np.empty(len(values) * LONGEST_DURATION, np.uint8)
    numbers = [first_value(column, column.type.bit_width // 8) for column in columns]
    kernels.write_durations(*numbers, *bitmap_of(values), len(values), address(offsets), address(data))
    return _binary(values, offsets, data[: offsets[-1]])


def _parsed(native: NativeType, values: pa.Array) -> pa.Array:
    """Encode decimal, varint, inet, uuid and timeuuid from their texts."""
    texts = values.cast(pa.large_binary())
    rows, lengths = len(texts), _lengths(texts)
    offsets = np.empty(rows + 1, np.int64)
    source = (first_value(texts, OFFSET_BYTES), _address(texts.buffers()[2]), *bitmap_of(texts), rows)
    if native.codec in ("decimal", "varint"):
        longest = int(lengths.max(initial=0))
        limbs = np.empty(longest // text_parse.DIGITS_PER_LIMB_STEP + 2, np.int64)
        data = np.empty(int(lengths.sum()) // 2 + 6 * rows, np.uint8)
        bad_row = text_parse.parse_numbers(
            *source, int(native.codec == "decimal"), address(limbs), address(offsets), address(data)
        )
    else:
        parse = text_parse.parse_inets if native.codec == "inet" else text_parse.parse_uuids
        data = np.empty(16 * rows, np.uint8)
        bad_row = parse(*source, address(offsets), address(data))
    if bad_row >= 0:
        raise _Unencodable(bad_row, f"{texts[bad_row].as_py().decode(errors='replace')!r} is not a {native.name}")
    return _binary(texts, offsets, data[: offsets[-1]])


_CODECS: dict[Codec, Callable[[NativeType, pa.Array], pa.Array]] = {
    **dict.fromkeys(("ascii", "blob", "text"), _same),
    **dict.fromkeys(("boolean", "date", "fixed", "timestamp"), _fixed),
    **dict.fromkeys(("decimal", "inet", "uuid", "varint"), _parsed),
    "duration": _durations,
}


def _binary(rows: pa.Array, offsets: Integers, data: npt.NDArray[np.uint8]) -> pa.Array:
    """Make a large_binary array with the nulls of ``rows``."""
    nulls = bitmap(valid_mask(rows)) if rows.null_count else None
    return pa.Array.from_buffers(pa.large_binary(), len(rows), [nulls, pa.py_buffer(offsets), pa.py_buffer(data)])


def bitmap_of(array: pa.Array) -> tuple[int, int]:
    """Return the address of the validity bitmap (0: nothing is null), and the bit of the first row."""
    return (_address(array.buffers()[0]) if array.null_count else 0), array.offset


def _null_rows(array: pa.Array) -> list[int]:
    return np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist() if array.null_count else []


def offsets_of(binary: pa.Array) -> Integers:
    """Return the offsets of a binary or large_binary array as int64[rows + 1]."""
    if not len(binary):
        return np.zeros(1, np.int64)
    kind = np.int64 if pa.types.is_large_binary(binary.type) else np.int32
    offsets = np.frombuffer(binary.buffers()[1], kind, binary.offset + len(binary) + 1)[binary.offset :]
    return offsets.astype(np.int64, copy=False)


def _lengths(binary: pa.Array) -> Integers:
    return np.diff(offsets_of(binary))


def first_value(array: pa.Array, width: int) -> int:
    """Return the address of the first row's value, or offset, of ``width`` bytes."""
    return _address(array.buffers()[1]) + int(array.offset) * width


def _address(buffer: pa.Buffer | None) -> int:
    return int(buffer.address) if buffer else 0
