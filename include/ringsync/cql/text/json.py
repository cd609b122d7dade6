"""Values as Cassandra's ``SELECT JSON`` prints them, except that NaN and infinities keep their names, as strings."""

from __future__ import annotations

import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.cql.cells import Cells
from ringsync.cql.natives import NATIVES
from ringsync.cql.text.natives import chosen, joined, native_texts, replaced, timestamp_texts
from ringsync.cql.text.values import NULL, TextForm
from ringsync.cql.types import CqlType, MapType, Native, UserType

_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def json_string(text: str) -> str:
    """A text as a JSON string, as Cassandra escapes it; everything beyond ASCII stays as it is."""
    return '"' + _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04X}", text) + '"'


def json_strings(texts: pa.Array) -> pa.Array:
    """The same of each text."""
    rows = np.flatnonzero(chosen(pc.match_substring_regex(texts, _TO_ESCAPE.pattern)))
    return replaced(
        joined('"', texts, '"'), rows, [json_string(text) for text in texts.take(pa.array(rows)).to_pylist()]
    )


def _keys(texts: pa.Array) -> pa.Array:
    """Maps' keys as the names of an object's members: a string stays, of anything else the JSON text is quoted."""
    return pc.if_else(pc.starts_with(texts, '"'), texts, json_strings(texts))


def json_field(name: str) -> str:
    """A UDT's field as a JSON object's member: one with capitals is in quotes (C: UserType.toJSONString)."""
    return json_string(name if name == name.lower() else f'"{name}"')


def _native(name: str, values: pa.Array, _cells: Cells) -> pa.Array:
    texts = native_texts(name, values)
    match NATIVES[name].text:
        case "string":
            return json_strings(texts)
        case "float":
            return pc.if_else(pc.match_substring_regex(texts, "[yN]$"), joined('"', texts, '"'), texts)
        case "bare":
            return texts
    return joined('"', texts, '"')


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


def _brackets(cql_type: CqlType) -> tuple[str, str]:
    return ("{", "}") if isinstance(cql_type, UserType | MapType) else ("[", "]")


JSON = TextForm(_native, _misfit, _brackets, json_field, _keys)
"""Values as JSON."""
