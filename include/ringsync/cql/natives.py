"""The native CQL types, one record each, with all facts in which they differ.

A new type is an entry here, a kernel for behaviour that no other type has, and a line in docs/types.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

AvroSchema = str | Mapping[str, Any] | Sequence[Any]
"""An Avro schema as parsed JSON: a type name, a dict, or a list for a union."""

Codec = Literal[
    "ascii", "blob", "boolean", "date", "decimal", "duration", "fixed", "inet", "text", "timestamp", "uuid", "varint"
]
"""Conversion between bytes and Arrow: :mod:`ringsync.cql.codec.decode`, :mod:`ringsync.cql.codec.encode`; for result
pages, and faster: :mod:`ringsync.formats.page_columns`. ``fixed``: a number of ``width`` bytes."""

Text = Literal["bare", "blob", "date", "duration", "float", "inet", "quoted", "string", "time", "timestamp"]
"""Printed form of a value: :mod:`ringsync.cql.text.natives`. Arrow's text equals Cassandra's for ``bare`` (no quotes in
JSON), ``quoted`` and ``string`` (JSON escapes its special characters)."""

BYTES, SIGNED, UNSIGNED, BOOLEAN, FLOAT, VARINT, DECIMAL, UUID, TIMEUUID = range(9)
"""Order and equality of values (:mod:`ringsync.changes.keys.order_kernels`, ``canonical_kernels``)."""

DATE_EPOCH = 2**31
"""The unsigned number that stands for 1970-01-01 (org.apache.cassandra.serializers.SimpleDateSerializer)."""


_STRING = pa.string()


@dataclass(frozen=True)
class NativeType:
    """A native type.

    :ivar exact: Avro type in the mapping ``exact``; a record has no namespace yet
    :ivar classic: Avro type in the mapping ``classic``; None: the same
    :ivar arrow: Arrow type of the values, in row images and in the lake
    :ivar width: bytes of each value; 0: they differ
    :ivar has_prefix: whether vectors, commit logs and SSTables write the length before a value; they do so for some
        types whose values have one length (C: AbstractType.valueLengthIfFixed)
    :ivar misfit: phrase for messages about bytes of the right length that are no value; ``{length}`` is their number
    :ivar sample: any value, in a form that Arrow takes; ``literal``: any value, as a CQL literal
    """

    name: str
    codec: Codec
    text: Text
    exact: AvroSchema
    classic: AvroSchema | None = None
    arrow: pa.DataType = _STRING
    width: int = 0
    has_prefix: bool = True
    order: int = BYTES
    misfit: str = ""
    sample: object = 1
    literal: str = "0"

    @property
    def is_text(self) -> bool:
        """Whether values are text of users."""
        return self.codec in ("ascii", "text")


def _number(
    name: str,
    arrow: pa.DataType,
    text: Text,
    exact: AvroSchema,
    classic: AvroSchema | None = None,
    *,
    codec: Codec = "fixed",
    order: int = SIGNED,
    has_prefix: bool = False,
    misfit: str = "",
    sample: int = 1,
) -> NativeType:
    """Make a type whose values have the same length in Cassandra and in Arrow."""
    width = arrow.bit_width // 8
    return NativeType(name, codec, text, exact, classic, arrow, width, has_prefix, order, misfit, sample)


def _uuid(name: str, order: int, literal: str) -> NativeType:
    schema, sample = {"type": "string", "logicalType": "uuid"}, "50554d6e-29bb-11e5-b345-feff819cdc9f"
    return NativeType(
        name, "uuid", "quoted", schema, "bytes", width=16, has_prefix=False, order=order, sample=sample, literal=literal
    )


_BIG_DECIMAL = {"type": "bytes", "logicalType": "big-decimal"}
_DATE, _TIME = {"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "time-nanos"}
_TIMESTAMP = {"type": "long", "logicalType": "timestamp-millis"}
_DURATION = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("nanoseconds", pa.int64())])
_DURATION_FIELDS = [("months", "int"), ("days", "int"), ("nanoseconds", "long")]
_DURATION_RECORD = {
    "type": "record",
    "name": "duration",
    "fields": [{"name": name, "type": kind} for name, kind in _DURATION_FIELDS],
}

_ALL = (
    NativeType(
        "ascii",
        "ascii",
        "string",
        "string",
        misfit="an ascii value with bytes of 0x80 or above",
        sample="a",
        literal="''",
    ),
    _number("bigint", pa.int64(), "bare", "long"),
    NativeType("blob", "blob", "blob", "bytes", arrow=pa.binary(), sample=b"\x01", literal="0x"),
    NativeType(
        "boolean",
        "boolean",
        "bare",
        "boolean",
        arrow=pa.bool_(),
        width=1,
        has_prefix=False,
        order=BOOLEAN,
        misfit="a boolean that is neither 00 nor 01",
        sample=True,
        literal="false",
    ),
    # The original CDC design has Avro's int here. But counters have 64 bits, and a total that wraps is useless.
    _number("counter", pa.int64(), "bare", "long", has_prefix=True),
    _number("date", pa.date32(), "date", _DATE, "int", codec="date", order=UNSIGNED, has_prefix=True),
    NativeType(
        "decimal",
        "decimal",
        "bare",
        _BIG_DECIMAL,
        "double",
        order=DECIMAL,
        misfit="a decimal that is not a 4-byte scale and a number in its shortest form",
        sample="1.5",
    ),
    _number("double", pa.float64(), "float", "double", order=FLOAT),
    NativeType(
        "duration",
        "duration",
        "duration",
        _DURATION_RECORD,
        "bytes",
        arrow=_DURATION,
        misfit="a duration that is not three numbers in their shortest form, within the ranges CQL gives them",
        sample={"months": 1, "days": 2, "nanoseconds": 3},
        literal="0s",
    ),
    _number("float", pa.float32(), "float", "float", order=FLOAT),
    NativeType(
        "inet",
        "inet",
        "inet",
        "string",
        misfit="an inet of {length} bytes instead of 4 or 16",
        sample="::1",
        literal="'0.0.0.0'",
    ),
    _number("int", pa.int32(), "bare", "int"),
    _number("smallint", pa.int16(), "bare", "int", has_prefix=True),
    NativeType("text", "text", "string", "string", misfit="a text that is not valid UTF-8", sample="ä", literal="''"),
    _number("time", pa.int64(), "time", _TIME, "long", order=UNSIGNED, has_prefix=True),
    _number(
        "timestamp",
        pa.timestamp("us", "UTC"),
        "timestamp",
        _TIMESTAMP,
        "long",
        codec="timestamp",
        misfit="a timestamp beyond what 64 bits of microseconds reach",
        sample=1_000,
    ),
    _uuid("timeuuid", TIMEUUID, "00000000-0000-1000-8000-000000000000"),
    _number("tinyint", pa.int8(), "bare", "int", has_prefix=True),
    _uuid("uuid", UUID, "00000000-0000-0000-0000-000000000000"),
    NativeType(
        "varint",
        "varint",
        "bare",
        _BIG_DECIMAL,
        "long",
        order=VARINT,
        misfit="a varint that is not in its shortest form",
        sample="12345678901234567890123",
    ),
)
NATIVES: Mapping[str, NativeType] = {native.name: native for native in _ALL}
"""Native types by their CQL names; ``varchar`` is ``text``."""
