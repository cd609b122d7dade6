"""The CQL type system: what a type string of ``system_schema.columns`` means, and which Arrow type holds its values.

The Arrow type of a CQL type is also its type in the lake, so every choice here is one that Spark, Delta and
other engines can read. docs/types.md explains the table to users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from ringsync.cql.identifiers import portable_names

DURATION_ARROW = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("nanoseconds", pa.int64())])

NATIVE_ARROW: dict[str, pa.DataType] = {
    "ascii": pa.string(),
    "bigint": pa.int64(),
    "blob": pa.binary(),
    "boolean": pa.bool_(),
    "counter": pa.int64(),
    "date": pa.date32(),
    "decimal": pa.string(),
    "double": pa.float64(),
    "duration": DURATION_ARROW,
    "float": pa.float32(),
    "inet": pa.string(),
    "int": pa.int32(),
    "smallint": pa.int16(),
    "text": pa.string(),
    "time": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timeuuid": pa.string(),
    "tinyint": pa.int8(),
    "uuid": pa.string(),
    "varint": pa.string(),
}

FIXED_LENGTH: dict[str, int] = {
    "bigint": 8,
    "boolean": 1,
    "counter": 8,
    "date": 4,
    "double": 8,
    "float": 4,
    "int": 4,
    "smallint": 2,
    "time": 8,
    "timestamp": 8,
    "timeuuid": 16,
    "tinyint": 1,
    "uuid": 16,
}
"""Bytes of a serialised value, for native types whose values all have the same length in the native protocol."""

VECTOR_FIXED_LENGTH: dict[str, int] = {
    "bigint": 8,
    "boolean": 1,
    "double": 8,
    "float": 4,
    "int": 4,
    "timestamp": 8,
    "timeuuid": 16,
    "uuid": 16,
}
"""Bytes of an element inside a vector without a length prefix (C: AbstractType.valueLengthIfFixed).

date, time, smallint and tinyint are *not* of fixed length in Cassandra's sense: a vector prefixes each with its length.
"""


class CqlTypeError(ValueError):
    """A type string that cannot be understood: the message quotes it and says where it stops making sense."""


class UnknownTypeError(CqlTypeError):
    """A name that is neither a native type nor one of the user-defined types."""


@dataclass(frozen=True)
class Native:
    """A built-in scalar type, by its CQL name (``varchar`` is ``text``)."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ListType:
    """``list<element>``."""

    element: CqlType
    frozen: bool = False

    def __str__(self) -> str:
        return _frozen(self.frozen, f"list<{self.element}>")


@dataclass(frozen=True)
class SetType:
    """``set<element>``."""

    element: CqlType
    frozen: bool = False

    def __str__(self) -> str:
        return _frozen(self.frozen, f"set<{self.element}>")


@dataclass(frozen=True)
class MapType:
    """``map<key, value>``."""

    key: CqlType
    value: CqlType
    frozen: bool = False

    def __str__(self) -> str:
        return _frozen(self.frozen, f"map<{self.key}, {self.value}>")


@dataclass(frozen=True)
class TupleType:
    """``tuple<…>``: always frozen."""

    fields: tuple[CqlType, ...]

    def __str__(self) -> str:
        return f"frozen<tuple<{', '.join(map(str, self.fields))}>>"


@dataclass(frozen=True)
class UserType:
    """A user-defined type with its fields as they are in the schema now."""

    keyspace: str
    name: str
    field_names: tuple[str, ...]
    field_types: tuple[CqlType, ...]
    frozen: bool = False

    def __str__(self) -> str:
        plain = self.name if re.fullmatch(r"[a-z][a-z0-9_]*", self.name) else '"' + self.name.replace('"', '""') + '"'
        return _frozen(self.frozen, plain)


@dataclass(frozen=True)
class VectorType:
    """``vector<element, dimension>``: always frozen; Cassandra 5.0."""

    element: CqlType
    dimension: int

    def __str__(self) -> str:
        return f"vector<{self.element}, {self.dimension}>"


@dataclass(frozen=True)
class CustomType:
    """A type known only by its Java class name (``'org.apache.…'``): its values stay bytes."""

    class_name: str

    def __str__(self) -> str:
        return f"'{self.class_name}'"


EMPTY = CustomType("org.apache.cassandra.db.marshal.EmptyType")
"""What Cassandra prints as ``empty``, although no statement may say so; the value of some COMPACT STORAGE tables."""

CqlType = Native | ListType | SetType | MapType | TupleType | UserType | VectorType | CustomType


def is_multicell(cql_type: CqlType) -> bool:
    """Whether Cassandra stores each element as a cell of its own, with its own writetime and TTL."""
    return isinstance(cql_type, ListType | SetType | MapType | UserType) and not cql_type.frozen


def arrow_type(cql_type: CqlType) -> pa.DataType:
    """The Arrow type that holds the values of a CQL type, in row images and in the lake.

    decimal and varint are text, because no lake type holds every scale and every number of digits;
    time is nanoseconds of the day (int64); a map whose key contains a map becomes a list of (key, value),
    since Spark forbids such keys; tuple fields are called ``field_1`` ….
    """
    match cql_type:
        case Native(name):
            return NATIVE_ARROW[name]
        case ListType(element) | SetType(element) | VectorType(element):
            return pa.list_(arrow_type(element))
        case MapType(key, value) if _contains_map(key):
            return pa.list_(pa.struct([("key", arrow_type(key)), ("value", arrow_type(value))]))
        case MapType(key, value):
            return pa.map_(arrow_type(key), arrow_type(value))
        case TupleType(fields):
            return pa.struct([(tuple_field_name(i), arrow_type(field)) for i, field in enumerate(fields)])
        case UserType():
            return pa.struct(
                [
                    (name, arrow_type(field))
                    for name, field in zip(portable_names(cql_type.field_names), cql_type.field_types, strict=True)
                ]
            )
        case CustomType():
            return pa.binary()


def tuple_field_name(index: int) -> str:
    """Name of the tuple field with this zero-based index."""
    return f"field_{index + 1}"


def parse_type(
    text: str, user_types: Mapping[str, UserType], frozen: bool = False, unknown: CqlType | None = None
) -> CqlType:
    """Parse a type as ``system_schema`` prints it, e.g. ``map<text, frozen<list<int>>>``.

    :param text: the type string
    :param user_types: the keyspace's user-defined types by unquoted name (any frozenness)
    :param frozen: whether the whole type stands inside a ``frozen<…>``
    :param unknown: stands for every type name that is not known; None: such a name is an error
    :raises UnknownTypeError: for an unknown type name
    :raises CqlTypeError: for a syntax error
    """
    parser = _Parser(text, user_types, unknown)
    parsed = parser.type(frozen)
    if parser.rest:
        raise CqlTypeError(f"CQL type {text!r}: {parser.rest[0]!r} is left over")
    return parsed


class _Parser:
    """Recursive descent over the tokens of one type string."""

    def __init__(self, text: str, user_types: Mapping[str, UserType], unknown: CqlType | None) -> None:
        self.text = text
        self.user_types = user_types
        self.unknown = unknown
        self.rest = list(_tokens(text))

    def take(self, expected: str | None = None) -> str:
        found = self.rest.pop(0) if self.rest else "its end"
        if found == "its end" or (expected and found != expected):
            raise CqlTypeError(f"CQL type {self.text!r}: found {found}, expected {expected or 'a type'}")
        return found

    def type(self, frozen: bool) -> CqlType:
        word = self.take()
        if word.startswith("'"):
            return CustomType(word[1:-1])
        if word.startswith('"'):
            return self.user_type(word[1:-1].replace('""', '"'), frozen)
        name = word.lower()
        if self.rest[:1] == ["<"]:
            return self.parametrised(name, frozen)
        if name in NATIVE_ARROW or name == "varchar":
            return Native("text" if name == "varchar" else name)
        return self.user_type(name, frozen)

    def user_type(self, name: str, frozen: bool) -> CqlType:
        if name in self.user_types:
            return replace(self.user_types[name], frozen=frozen)
        if name == "empty":
            return EMPTY
        if self.unknown is not None:
            return self.unknown
        raise UnknownTypeError(f"CQL type {self.text!r}: unknown type {name!r}")

    def parametrised(self, name: str, frozen: bool) -> CqlType:
        if name == "vector":
            return self.vector()
        parts = self.arguments(frozen or name in ("frozen", "tuple"))
        match name, parts:
            case "frozen", [inner]:
                return inner
            case "list", [element]:
                return ListType(element, frozen)
            case "set", [element]:
                return SetType(element, frozen)
            case "map", [key, value]:
                return MapType(key, value, frozen)
            case "tuple", _:
                return TupleType(tuple(parts))
        raise CqlTypeError(f"CQL type {self.text!r}: {name!r} does not take {len(parts)} parameters")

    def arguments(self, frozen: bool) -> list[CqlType]:
        self.take("<")
        found = [self.type(frozen)]
        while self.rest[:1] == [","]:
            self.take(",")
            found.append(self.type(frozen))
        self.take(">")
        return found

    def vector(self) -> VectorType:
        self.take("<")
        element = self.type(frozen=True)
        self.take(",")
        dimension = self.take()
        if not dimension.isdigit():
            raise CqlTypeError(f"CQL type {self.text!r}: {dimension!r} is not a vector's dimension")
        self.take(">")
        return VectorType(element, int(dimension))


def _tokens(text: str) -> Iterator[str]:
    position = 0
    pattern = re.compile(r"""\s*([<>,]|"(?:[^"]|"")*"|'[^']*'|\w+)""")
    while text[position:].strip():
        found = pattern.match(text, position)
        if not found:
            raise CqlTypeError(f"CQL type {text!r}: cannot read {text[position:]!r}")
        yield found.group(1)
        position = found.end()


def _frozen(frozen: bool, text: str) -> str:
    return f"frozen<{text}>" if frozen else text


def _contains_map(cql_type: CqlType) -> bool:
    match cql_type:
        case MapType():
            return True
        case ListType(element) | SetType(element) | VectorType(element):
            return _contains_map(element)
        case TupleType(fields):
            return any(map(_contains_map, fields))
        case UserType():
            return any(map(_contains_map, cql_type.field_types))
    return False
