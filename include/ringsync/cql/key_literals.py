"""Partition keys that a user types as CQL literals: ``'eu', 7``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ringsync.cql.codec.encode import encode, partition_key_bytes
from ringsync.cql.natives import NATIVES
from ringsync.cql.tokens import Token, Tokens
from ringsync.cql.types import CqlType, ListType, Native, VectorType, arrow_type

_NANOSECONDS = 1_000_000_000

Literal = Token | list["Literal"]
"""A literal, or those between brackets."""


class PartitionKeyError(ValueError):
    """A partition key is not valid; the message says what is expected."""


def parse_partition_key(text: str, types: Sequence[CqlType]) -> bytes:
    """Read the values of a partition key.

    :param text: a literal for each column, with commas between them; ``[…]`` is a vector or a list, and ``0x…`` a value
        of any type, as Cassandra serialises it
    :param types: types of the columns
    :returns: the key as Cassandra serialises it
    :raises PartitionKeyError: the text is no key of these types
    """
    tokens = Tokens(text, "key", PartitionKeyError)
    literals = tokens.listed(lambda: _literal(tokens))
    if tokens.next.kind != "end":
        tokens.fail("a comma, or the end")
    if len(literals) != len(types):
        listed = ", ".join(map(str, types))
        raise PartitionKeyError(f"key {text!r}: {len(literals)} values; the partition key has {len(types)}: {listed}")
    return bytes(partition_key_bytes([_encoded(*pair) for pair in zip(literals, types, strict=True)])[0].as_py())


def _literal(tokens: Tokens) -> Literal:
    if tokens.accept("["):
        items = tokens.listed(lambda: _literal(tokens))
        tokens.expect("]")
        return items
    token, sign = tokens.next, "-" if tokens.accept("-") else ""
    word = tokens.next
    if word.kind == "name" and word.value in ("nan", "infinity"):
        tokens.take()
        return Token("number", sign + word.text, sign + word.value, token.offset)
    if not sign and (word.kind in ("string", "uuid", "blob", "number") or word.value in ("true", "false")):
        return tokens.take()
    tokens.fail("a number, 'text', uuid, 0x… blob, true, false or […]")


def _encoded(literal: Literal, cql_type: CqlType) -> pa.Array:
    """Serialise a value: an array of one.

    :raises PartitionKeyError: the literal is no value of the type
    """
    try:
        if isinstance(literal, Token) and literal.kind == "blob":
            return pa.array([bytes.fromhex(literal.value[2:])], pa.binary())
        return encode(cql_type, pa.array([_value(literal, cql_type)], arrow_type(cql_type)))
    except (ValueError, pa.ArrowException) as error:
        shown = literal.text if isinstance(literal, Token) else "[…]"
        raise PartitionKeyError(f"key: {shown} is not a value of type {cql_type}: {error}") from None


def _value(literal: Literal, cql_type: CqlType) -> Any:
    """Convert a literal to what Arrow takes for a value of the type.

    :raises ValueError: it is none
    """
    match cql_type:
        case VectorType(element) | ListType(element) if isinstance(literal, list):
            if isinstance(cql_type, VectorType) and len(literal) != cql_type.dimension:
                raise ValueError(f"it has {len(literal)} elements")
            return [_value(item, element) for item in literal]
        case VectorType() | ListType():
            raise ValueError("write [value, value, …]")
        case Native(name) if isinstance(literal, Token):
            kinds, convert = _FORMS.get(name, (("number",), str))
            if literal.kind not in kinds:
                raise ValueError(f"write {' or '.join(_CALLED[kind] for kind in kinds)}")
            return pa.array([convert(literal.value)]).cast(NATIVES[name].arrow)[0]
        case Native():
            raise ValueError("write one value, without brackets")
    raise ValueError("write it as Cassandra serialises it, 0x…")


def _microseconds(text: str) -> int:
    """Read a timestamp; a number is milliseconds, and a text without a zone is UTC."""
    if text.lstrip("-").isdigit():
        return int(text) * 1000
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return int(pa.array([text]).cast(kind).cast(pa.int64())[0].as_py())
        except pa.ArrowInvalid:
            continue
    raise ValueError("write 'yyyy-mm-dd hh:mm:ss.fff+0000', or milliseconds since 1970")


def _time(text: str) -> int:
    """Read a time of day as nanoseconds."""
    if text.isdigit():
        return int(text)
    hours, minutes, seconds = text.split(":")
    whole, _, fraction = seconds.partition(".")
    return (int(hours) * 3600 + int(minutes) * 60 + int(whole)) * _NANOSECONDS + int(fraction[:9].ljust(9, "0"))


_CALLED = {"string": "'text'", "number": "a number", "uuid": "a uuid", "name": "true or false", "blob": "0x…"}
_FORMS: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "ascii": (("string",), str),
    "text": (("string",), str),
    "inet": (("string",), str),
    "date": (("string",), str),
    "uuid": (("uuid",), str),
    "timeuuid": (("uuid",), str),
    "boolean": (("name",), str),
    "timestamp": (("string", "number"), _microseconds),
    "time": (("string", "number"), _time),
    "blob": (("blob",), str),
}
"""Kinds of tokens that a type takes, and how their text is read; other types take numbers, as text."""
