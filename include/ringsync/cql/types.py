"""The CQL type system: the types in ``system_schema.columns``, and the Arrow type of each.

The Arrow type of a CQL type is also its type in the lake, so Spark, Delta and other engines must be able to read it.
docs/types.md explains the types to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from ringsync.cql.identifiers import portable_names, printable
from ringsync.cql.natives import NATIVES
from ringsync.cql.tokens import Token, Tokens

VARIABLE = -1
"""Length that means: the values of this type differ in length."""
_CUSTOM_LENGTH = {"EmptyType": 0, "LexicalUUIDType": 16, "LegacyTimeUUIDType": 16}


class CqlTypeError(ValueError):
    """An error: a type string cannot be read. The message quotes it and says where the problem is."""


class UnknownTypeError(CqlTypeError):
    """An error: a name is neither a native type nor one of the user-defined types."""


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
    """A user-defined type with its fields in the current schema."""

    keyspace: str
    name: str
    field_names: tuple[str, ...]
    field_types: tuple[CqlType, ...]
    frozen: bool = False

    def __str__(self) -> str:
        return _frozen(self.frozen, printable(self.name))


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


COUNTER = Native("counter")
EMPTY = CustomType("org.apache.cassandra.db.marshal.EmptyType")
"""The type of values in some COMPACT STORAGE tables. Cassandra prints it as ``empty``, but takes it in no statement."""

CqlType = Native | ListType | SetType | MapType | TupleType | UserType | VectorType | CustomType


def is_multicell(cql_type: CqlType) -> bool:
    """Tell whether Cassandra stores each element as a cell of its own, with its own writetime and TTL."""
    return isinstance(cql_type, ListType | SetType | MapType | UserType) and not cql_type.frozen


def types_inside(cql_type: CqlType) -> tuple[CqlType, ...]:
    """Return the types inside a type: of its element, of its key and value, or of its fields."""
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            return (element,)
        case MapType(key, value):
            return (key, value)
        case TupleType(fields) | UserType(field_types=fields):
            return fields
        case Native() | CustomType():
            return ()


def stored_length(cql_type: CqlType) -> int:
    """Return the bytes of each value in a vector, commit log or SSTable (C: AbstractType.valueLengthIfFixed).

    :returns: number of bytes; :data:`VARIABLE`: each value follows its length
    """
    match cql_type:
        case Native(name):
            return VARIABLE if NATIVES[name].has_prefix else NATIVES[name].width
        case VectorType(element, dimension):
            inner = stored_length(element)
            return inner * dimension if inner >= 0 else VARIABLE
        case CustomType(class_name):
            return _CUSTOM_LENGTH.get(class_name.rpartition(".")[2], VARIABLE)
    return VARIABLE


def arrow_type(cql_type: CqlType) -> pa.DataType:
    """Return the Arrow type of a CQL type's values, in row images and in the lake.

    decimal and varint are text, because no lake type holds all scales and all numbers of digits. time is nanoseconds of
    the day (int64). A map whose key contains a map becomes a list of (key, value), because Spark forbids such keys.
    Tuple fields are called ``field_1`` ….
    """
    match cql_type:
        case Native(name):
            return NATIVES[name].arrow
        case ListType(element) | SetType(element) | VectorType(element):
            return pa.list_(arrow_type(element))
        case MapType(key, value) if _contains_map(key):
            return pa.list_(pa.struct([("key", arrow_type(key)), ("value", arrow_type(value))]))
        case MapType(key, value):
            return pa.map_(arrow_type(key), arrow_type(value))
        case TupleType(fields):
            return pa.struct([(tuple_field_name(i), arrow_type(field)) for i, field in enumerate(fields)])
        case UserType(field_names=names, field_types=fields):
            return pa.struct(list(zip(portable_names(names), map(arrow_type, fields), strict=True)))
        case CustomType():
            return pa.binary()


def tuple_field_name(index: int) -> str:
    """Return the name of the tuple field with this zero-based index."""
    return f"field_{index + 1}"


def parse_type(text: str, user_types: Mapping[str, UserType], unknown: CqlType | None = None) -> CqlType:
    """Parse a type string of ``system_schema``, e.g. ``map<text, frozen<list<int>>>``.

    :param user_types: user-defined types of the keyspace by unquoted name, frozen or not
    :param unknown: replacement for unknown type names; None: such a name is an error
    :raises UnknownTypeError: a type name is unknown
    :raises CqlTypeError: the text has a syntax error
    """
    if text in NATIVES:  # a shortcut: most types are native, and a cluster has many columns
        return Native(text)
    parser = _Parser(text, user_types, unknown)
    parsed = parser.type(frozen=False)
    if parser.tokens.next.kind != "end":
        parser.tokens.fail("the end")
    return parsed


class _Parser:
    """A recursive descent parser of one type string."""

    def __init__(self, text: str, user_types: Mapping[str, UserType], unknown: CqlType | None) -> None:
        self.tokens = Tokens(text, "CQL type", CqlTypeError)
        self.user_types = user_types
        self.unknown = unknown

    def type(self, frozen: bool) -> CqlType:
        if self.tokens.next.kind == "string":
            return CustomType(self.tokens.take().value)
        start = self.tokens.next
        name = self.tokens.name("a type")
        if start.kind == "name" and self.tokens.accept("<"):
            parsed = self.vector() if name == "vector" else self.parametrised(start, frozen)
            self.tokens.expect(">")
            return parsed
        if start.kind == "name" and (name in NATIVES or name == "varchar"):
            return Native("text" if name == "varchar" else name)
        if name in self.user_types:
            return replace(self.user_types[name], frozen=frozen)
        if name == "empty":
            return EMPTY
        if self.unknown is not None:
            return self.unknown
        raise UnknownTypeError(f"CQL type {self.tokens.text!r}: unknown type {name!r}")

    def parametrised(self, start: Token, frozen: bool) -> CqlType:
        inside_frozen = frozen or start.value in ("frozen", "tuple")
        parts = self.tokens.listed(lambda: self.type(inside_frozen))
        match start.value, parts:
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
        self.tokens.error(f"{start.value!r} does not take {len(parts)} parameters", start)

    def vector(self) -> VectorType:
        element = self.type(frozen=True)
        self.tokens.expect(",")
        if not self.tokens.next.text.isdecimal():
            self.tokens.fail("a vector's dimension")
        return VectorType(element, int(self.tokens.take().text))


def _frozen(frozen: bool, text: str) -> str:
    return f"frozen<{text}>" if frozen else text


def _contains_map(cql_type: CqlType) -> bool:
    return isinstance(cql_type, MapType) or any(map(_contains_map, types_inside(cql_type)))
