"""Values in the form of Cassandra's ``SELECT JSON``, except that NaN and infinities are strings with their names."""

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
    """Write a text as a JSON string with Cassandra's escapes; characters beyond ASCII are not escaped."""
    return '"' + _TO_ESCAPE.sub(lambda match: _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04X}", text) + '"'


def json_strings(texts: pa.Array) -> pa.Array:
    """Write each text of an array as :func:`json_string` does."""
    rows = np.flatnonzero(chosen(pc.match_substring_regex(texts, _TO_ESCAPE.pattern)))
    return replaced(
        joined('"', texts, '"'), rows, [json_string(text) for text in texts.take(pa.array(rows)).to_pylist()]
    )


def _keys(texts: pa.Array) -> pa.Array:
    """Make names of an object's members from keys of maps: strings stay, the JSON text of any other key is quoted."""
    return pc.if_else(pc.starts_with(texts, '"'), texts, json_strings(texts))


def json_field(name: str) -> str:
    """Write a UDT's field as a member of a JSON object; one with capitals gets quotes (C: UserType.toJSONString)."""
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
    """Write a value that the Arrow type cannot hold; an empty value becomes null."""
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
