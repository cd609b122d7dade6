"""Partition keys that a user types as CQL literals: ``'eu', 7``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ringsync.cql.codec.encode import encode, partition_key_bytes
from ringsync.cql.natives import NATIVES
from ringsync.cql.tokens import Token, Tokens
from ringsync.cql.types import CqlType, Native

_NANOSECONDS = 1_000_000_000


class PartitionKeyError(ValueError):
    """A partition key is not valid; the message says what is expected."""


def parse_partition_key(text: str, types: Sequence[CqlType]) -> bytes:
    """Read the values of a partition key.

    :param text: a literal for each column, with commas between them; ``0x…`` is a value of any type, as Cassandra
        serialises it
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


def _literal(tokens: Tokens) -> Token:
    token, sign = tokens.next, "-" if tokens.accept("-") else ""
    word = tokens.next
    if word.kind == "name" and word.value in ("nan", "infinity"):
        tokens.take()
        return Token("number", sign + word.text, sign + word.value, token.offset)
    if not sign and (word.kind in ("string", "uuid", "blob", "number") or word.value in ("true", "false")):
        return tokens.take()
    tokens.fail("a number, 'text', uuid, 0x… blob, true or false")


def _encoded(literal: Token, cql_type: CqlType) -> pa.Array:
    """Serialise a value: an array of one.

    :raises PartitionKeyError: the literal is no value of the type
    """
    try:
        if literal.kind == "blob":
            return pa.array([bytes.fromhex(literal.value[2:])], pa.binary())
        if not isinstance(cql_type, Native):
            raise ValueError("write it as Cassandra serialises it, 0x…")
        kinds, convert = _FORMS.get(cql_type.name, (("number",), str))
        if literal.kind not in kinds:
            raise ValueError(f"write {' or '.join(_CALLED[kind] for kind in kinds)}")
        arrow = NATIVES[cql_type.name].arrow
        return encode(cql_type, pa.array([convert(literal.value)]).cast(arrow))
    except (ValueError, pa.ArrowException) as error:
        raise PartitionKeyError(f"key: {literal.text} is not a value of type {cql_type}: {error}") from None


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
