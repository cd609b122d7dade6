"""Types as Cassandra's files name them: by Java classes, e.g. ``org.apache.cassandra.db.marshal.ListType(…)``.

C: db/marshal/TypeParser, and ``toString`` of the classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from ringsync.cql.types import (
    EMPTY,
    CqlType,
    CqlTypeError,
    CustomType,
    ListType,
    MapType,
    Native,
    SetType,
    TupleType,
    UserType,
    VectorType,
)

PACKAGE = "org.apache.cassandra.db.marshal."

_NATIVES = {
    "AsciiType": "ascii",
    "BooleanType": "boolean",
    "BytesType": "blob",
    "ByteType": "tinyint",
    "CounterColumnType": "counter",
    "DateType": "timestamp",
    "DecimalType": "decimal",
    "DoubleType": "double",
    "DurationType": "duration",
    "FloatType": "float",
    "InetAddressType": "inet",
    "Int32Type": "int",
    "IntegerType": "varint",
    "LongType": "bigint",
    "ShortType": "smallint",
    "SimpleDateType": "date",
    "TimestampType": "timestamp",
    "TimeType": "time",
    "TimeUUIDType": "timeuuid",
    "UTF8Type": "text",
    "UUIDType": "uuid",
}
_REFUSED = {
    "DynamicCompositeType": "its values name their own types, as only tables of Thrift have them",
    "ColumnToCollectionType": "it belongs to a table of Thrift",
}
_TOKEN = re.compile(r"\s*(?:(?P<word>[\w.$+-]+)|(?P<sign>[(),:]|=>))")
_DEEPEST = 64
_HIGHEST_DIMENSION = 1 << 16

Parsed = TypeVar("Parsed")


class OrderedType(NamedTuple):
    """The type of a clustering column, and whether it is in descending order."""

    type: CqlType
    descending: bool


def parse_marshal(text: str) -> CqlType:
    """Parse the type of a column, e.g. ``org.apache.cassandra.db.marshal.UTF8Type``. The package may be left out.

    Everything inside a collection, tuple, vector or user-defined type is frozen. A class that CQL has no name for is a
    :class:`CustomType`.

    :raises CqlTypeError: the text has a syntax error, or names a type of Thrift
    """
    return _parsed(text, lambda parser: parser.type(False, 0))


def parse_clustering(text: str) -> OrderedType:
    """Parse the type of a clustering column, which ``ReversedType(…)`` makes descending.

    :raises CqlTypeError: as :func:`parse_marshal`
    """

    def read(parser: _Parser) -> OrderedType:
        descending = parser.accept_class("ReversedType")
        if descending:
            parser.expect("(")
        found = parser.type(False, 0)
        if descending:
            parser.expect(")")
        return OrderedType(found, descending)

    return _parsed(text, read)


def parse_partition_key(text: str) -> tuple[CqlType, ...]:
    """Parse the type of a partition key: that of its only column, or a ``CompositeType(…)`` of several.

    :raises CqlTypeError: as :func:`parse_marshal`
    """

    def read(parser: _Parser) -> tuple[CqlType, ...]:
        if parser.accept_class("CompositeType"):
            return tuple(parser.listed(0))
        return (parser.type(False, 0),)

    return _parsed(text, read)


def _parsed(text: str, read: Callable[[_Parser], Parsed]) -> Parsed:
    parser = _Parser(text)
    found = read(parser)
    if parser.next:
        parser.fail("the end")
    return found


class _Parser:
    """A recursive descent parser of one type."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        place = 0
        end = len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None:
                raise CqlTypeError(f"type {_shown(text)}: character {place + 1} belongs to no type")
            self._tokens.append((match["word"] or match["sign"], match.end()))
            place = match.end()
        self._place = 0

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self._tokens[self._place][0] if self._place < len(self._tokens) else ""

    def take(self) -> str:
        token = self.next
        self._place += 1
        return token

    def accept_class(self, name: str) -> bool:
        """Take a class's name if it comes next; tell whether it did."""
        if self.next.removeprefix(PACKAGE) != name:
            return False
        self._place += 1
        return True

    def expect(self, sign: str) -> None:
        if self.next != sign:
            self.fail(repr(sign))
        self._place += 1

    def word(self, expected: str) -> str:
        if not self.next or self.next in ("(", ")", ",", ":", "=>"):
            self.fail(expected)
        return self.take()

    def fail(self, expected: str) -> NoReturn:
        start = self._tokens[self._place - 1][1] if self._place else 0
        raise CqlTypeError(
            f"type {_shown(self._text)}: expected {expected} at character {start + 1}, found {self.next or 'the end'}"
        )

    def type(self, frozen: bool, depth: int) -> CqlType:
        if depth > _DEEPEST:
            raise CqlTypeError(f"type {_shown(self._text)}: types lie within each other more than {_DEEPEST} deep")
        first = self._place
        name = self.word("the name of a class").removeprefix(PACKAGE)
        if name in _REFUSED:
            raise CqlTypeError(f"type {_shown(self._text)}: {name} is not supported: {_REFUSED[name]}")
        if name in _NATIVES and self.next != "(":
            return Native(_NATIVES[name])
        if name == "UserType":
            return self._user_type(frozen, depth)
        if name == "VectorType":
            return self._vector(depth)
        parts = self.listed(depth) if self.next == "(" else []
        return self._parametrised(name, parts, frozen) or CustomType(self._since(first))

    def _parametrised(self, name: str, parts: list[CqlType], frozen: bool) -> CqlType | None:
        """Return the type of a class with parameters; None: CQL has no name for it."""
        match name, parts:
            case "FrozenType", [inner]:
                return inner
            case "ListType", [element]:
                return ListType(element, frozen)
            case "SetType", [element]:
                return SetType(element, frozen)
            case "MapType", [key, value]:
                return MapType(key, value, frozen)
            case "TupleType", [_, *_]:
                return TupleType(tuple(parts))
            case "EmptyType", []:
                return EMPTY
            case (("ListType" | "SetType" | "MapType" | "TupleType" | "ReversedType"), _):
                raise CqlTypeError(f"type {_shown(self._text)}: {name} does not fit here with {len(parts)} parameters")
        return None

    def listed(self, depth: int) -> list[CqlType]:
        """Read types in brackets, all of them frozen."""
        self.expect("(")
        found = [self.type(True, depth + 1)]
        while self.next == ",":
            self.take()
            found.append(self.type(True, depth + 1))
        self.expect(")")
        return found

    def _vector(self, depth: int) -> VectorType:
        self.expect("(")
        element = self.type(True, depth + 1)
        self.expect(",")
        dimension = self.word("a vector's dimension")
        if not dimension.isdecimal() or not 0 < int(dimension) <= _HIGHEST_DIMENSION:
            raise CqlTypeError(f"type {_shown(self._text)}: {dimension!r} is not the dimension of a vector")
        self.expect(")")
        return VectorType(element, int(dimension))

    def _user_type(self, frozen: bool, depth: int) -> UserType:
        """Read ``(keyspace,name,field:type,…)``; name and fields are in hexadecimal digits."""
        self.expect("(")
        keyspace = self.word("a keyspace")
        self.expect(",")
        name = self._from_hex()
        names, types = [], []
        while self.next == ",":
            self.take()
            names.append(self._from_hex())
            self.expect(":")
            types.append(self.type(True, depth + 1))
        self.expect(")")
        return UserType(keyspace, name, tuple(names), tuple(types), frozen)

    def _from_hex(self) -> str:
        text = self.word("a name in hexadecimal digits")
        try:
            return bytes.fromhex(text).decode()
        except ValueError as error:
            raise CqlTypeError(f"type {_shown(self._text)}: {text!r} is not a name in hexadecimal digits") from error

    def _since(self, first: int) -> str:
        """Return the text from a token to before the next one, as CQL names a custom type: with its package."""
        text = "".join(token for token, _ in self._tokens[first : self._place])
        return text if "." in text.partition("(")[0] else PACKAGE + text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
