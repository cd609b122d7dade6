"""Values as CQL literals that give exactly the same bytes again.

What no literal says, an empty int for example, is a call: ``blobAsInt(0x)``; so is a text of several lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ringsync.cql.cells import Cells
from ringsync.cql.identifiers import printable
from ringsync.cql.native_texts import Texts, native_texts
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType
from ringsync.cql.value_texts import TextForm

_BREAKS = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")
"""What some reader takes for the end of a line: CQL has no escape for it."""
_DATE_EPOCH = 2**31
_LAST_TIMESTAMP_MS = 253402300799999
"""In the year 9999."""
_NAN = {"float": (np.uint32, 0x7FC00000), "double": (np.uint64, 0x7FF8000000000000)}
"""The bits that Java gives NaN; others are NaN, too."""


_SOME = {
    "ascii": "''",
    "blob": "0x",
    "boolean": "false",
    "duration": "0s",
    "inet": "'0.0.0.0'",
    "text": "''",
    "timeuuid": "00000000-0000-1000-8000-000000000000",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
"""All other native types take 0."""


def text_literal(text: str) -> str:
    """A text in single quotes."""
    return "'" + text.replace("'", "''") + "'"


def literal_from_bytes(name: str, raw: bytes) -> str:
    """A native type's value by a function that takes its bytes."""
    return f"blobAs{name.capitalize()}(0x{raw.hex()})"


def some_literal(cql_type: CqlType) -> str | None:
    """A literal of some value of this type; None: it has none."""
    match cql_type:
        case Native(name):
            return _SOME.get(name, "0")
        case ListType() | SetType() | MapType():
            return "[]" if isinstance(cql_type, ListType) else "{}"
        case VectorType(element, dimension):
            parts = [some_literal(element)] * dimension
        case TupleType(types) | UserType(field_types=types):
            parts = [some_literal(one) for one in types]
        case _:
            return None
    return None if None in parts else _sequence(cql_type, [part for part in parts if part is not None])


def _native(name: str, values: pa.Array, cells: Cells) -> Texts:
    match name:
        case "ascii" | "text":
            return [
                literal_from_bytes(name, text.encode()) if text and _BREAKS.search(text) else text_literal(text or "")
                for text in values.to_pylist()
            ]
        case "date":
            return [_date(text, day) for text, day in zip(native_texts(name, values), _days(values), strict=True)]
        case "timestamp":
            return [
                f"'{text}'" if 0 <= us // 1000 <= _LAST_TIMESTAMP_MS else str(us // 1000)
                for text, us in zip(native_texts(name, values), _integers(values), strict=True)
            ]
        case "duration":
            return [text or "0s" for text in native_texts(name, values)]
        case "time":
            return [f"'{text}'" for text in native_texts(name, values)]
    found = native_texts(name, values)
    if name == "inet":
        found = [f"'{text}'" for text in found]
    for row in _unusual(name, cells, values):
        found[row] = literal_from_bytes(name, cells.value(row) or b"")
    return found


def _unusual(name: str, cells: Cells, values: pa.Array) -> list[int]:
    """Rows whose text does not give the same bytes: IPv4 addresses in 16 bytes, NaN with other bits."""
    if name == "inet":
        return [row for row, text in enumerate(values.to_pylist()) if text and text.startswith("::ffff:")]
    if name in _NAN:
        kind, usual = _NAN[name]
        bits = np.frombuffer(values.buffers()[1], kind, len(values))
        rows = np.flatnonzero(np.isnan(bits.view(f"f{bits.itemsize}")) & (bits != usual) & (cells.lengths > 0))
        return [int(row) for row in rows]
    return []


def _integers(values: pa.Array) -> list[int]:
    return [int(value) for value in np.frombuffer(values.buffers()[1], np.int64, len(values))]


def _days(values: pa.Array) -> list[int]:
    return [int(day) for day in np.frombuffer(values.buffers()[1], np.int32, len(values))]


def _date(text: str | None, day: int) -> str:
    """Years of four digits as text, others as the number that the type really is."""
    return f"'{text}'" if text is not None and len(text) == 10 else str(day + _DATE_EPOCH)


def _misfit(cql_type: CqlType, raw: bytes) -> str | None:
    """Those that Cassandra takes as bytes; no function makes a collection, tuple or UDT of them."""
    return literal_from_bytes(cql_type.name, raw) if isinstance(cql_type, Native) else None


def _sequence(cql_type: CqlType, parts: Sequence[str]) -> str:
    match cql_type:
        case UserType(field_names=names):
            return "{" + ", ".join([f"{printable(n)}: {part}" for n, part in zip(names, parts, strict=True)]) + "}"
        case SetType():
            return "{" + ", ".join(parts) + "}"
        case TupleType():
            return "(" + ", ".join(parts) + ")"
    return "[" + ", ".join(parts) + "]"


def _mapping(keys: Sequence[str], values: Sequence[str]) -> str:
    return "{" + ", ".join([f"{key}: {value}" for key, value in zip(keys, values, strict=True)]) + "}"


CQL = TextForm(_native, _misfit, _sequence, _mapping)
"""Values as CQL literals."""
