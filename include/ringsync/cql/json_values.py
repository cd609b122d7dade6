"""Values as Cassandra's ``SELECT JSON`` prints them, except that NaN and infinities keep their names, as strings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa

from ringsync.cql.cells import Cells
from ringsync.cql.native_texts import Texts, native_texts, timestamp_texts
from ringsync.cql.natives import NATIVES
from ringsync.cql.types import CqlType, Native, UserType
from ringsync.cql.value_texts import NULL, TextForm

_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def json_string(text: str) -> str:
    """A text as a JSON string, as Cassandra escapes it; everything beyond ASCII stays as it is."""
    return '"' + _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04X}", text) + '"'


def json_key(text: str) -> str:
    """A map's key as the name of a JSON object's member: a string stays, of anything else the JSON text is quoted."""
    return text if text.startswith('"') else json_string(text)


def json_field(name: str) -> str:
    """A UDT's field as a JSON object's member: one with capitals is in quotes (C: UserType.toJSONString)."""
    return json_string(name if name == name.lower() else f'"{name}"')


def _native(name: str, values: pa.Array, _cells: Cells) -> Texts:
    texts = native_texts(name, values)
    match NATIVES[name].text:
        case "string":
            return [json_string(text or "") for text in texts]
        case "float":
            return [f'"{text}"' if text and text[-1] in "yN" else text for text in texts]
        case "bare":
            return texts
    return [f'"{text}"' for text in texts]


def _misfit(cql_type: CqlType, raw: bytes) -> str | None:
    """Empty values have no form of their own but null; the others are values that Arrow's types do not hold."""
    if not raw:
        return NULL
    match NATIVES[cql_type.name].codec if isinstance(cql_type, Native) else None:
        case "timestamp" if len(raw) == 8:
            return f'"{timestamp_texts(np.array([int.from_bytes(raw, "big", signed=True)]))[0]}"'
        case "boolean" if len(raw) == 1:
            return "true"
        case "varint":
            return str(int.from_bytes(raw, "big", signed=True))
        case "decimal" if len(raw) > 4:
            scale, unscaled = (int.from_bytes(part, "big", signed=True) for part in (raw[:4], raw[4:]))
            sign, digits, _ = Decimal(unscaled).as_tuple()
            return str(Decimal((sign, digits, -scale)))
    return None


def _sequence(cql_type: CqlType, parts: Sequence[str]) -> str:
    if isinstance(cql_type, UserType):
        names = map(json_field, cql_type.field_names)
        return "{" + ", ".join([f"{name}: {part}" for name, part in zip(names, parts, strict=True)]) + "}"
    return "[" + ", ".join(parts) + "]"


def _mapping(keys: Sequence[str], values: Sequence[str]) -> str:
    return "{" + ", ".join([f"{json_key(key)}: {value}" for key, value in zip(keys, values, strict=True)]) + "}"


JSON = TextForm(_native, _misfit, _sequence, _mapping)
"""Values as JSON."""
