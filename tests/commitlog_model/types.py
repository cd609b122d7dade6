"""CQL types and tables, as the model sees them: parsed from the type strings of ``system_schema``.

Nothing here uses the package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

UserTypes = Mapping[str, tuple[tuple[str, str], ...]]
"""The user-defined types of a keyspace: name → ((field, type string), …)."""

FIXED_LENGTHS = {
    "boolean": 1,
    "int": 4,
    "float": 4,
    "bigint": 8,
    "double": 8,
    "timestamp": 8,
    "uuid": 16,
    "timeuuid": 16,
    "empty": 0,
}
"""Bytes of the types whose values stand without a length (docs/formats.md, 2.6; C: AbstractType.valueLengthIfFixed)."""

_OTHER_NATIVE = """
ascii blob counter date decimal duration inet smallint text time tinyint varchar varint
"""
NATIVE = frozenset([*FIXED_LENGTHS, *_OTHER_NATIVE.split()])

_TOKEN = re.compile(r"""\s*('(?:[^']|'')*'|"(?:[^"]|"")*"|[^\s<>,'"]+|[<>,])""")


@dataclass(frozen=True)
class Type:
    """A CQL type.

    :param kind: the name of a native type, or ``list``, ``set``, ``map``, ``tuple``, ``vector``, ``udt``, ``custom``
    :param inner: the types of elements, of key and value, or of fields
    :param fields: the names of a UDT's fields
    :param frozen: one value, not a cell per element; tuples and vectors always are
    :param dimension: of a vector
    """

    kind: str
    inner: tuple[Type, ...] = ()
    fields: tuple[str, ...] = ()
    frozen: bool = False
    dimension: int = 0

    @property
    def is_complex(self) -> bool:
        """Whether a column of this type has a cell per element (non-frozen collection or UDT)."""
        return self.kind in ("list", "set", "map", "udt") and not self.frozen

    @property
    def fixed_length(self) -> int | None:
        """The bytes of every value but the empty one, if they are always the same."""
        if self.kind == "vector":
            element = self.inner[0].fixed_length
            return None if element is None else element * self.dimension
        return FIXED_LENGTHS.get(self.kind)


@dataclass(frozen=True)
class Table:
    """What a commit log does not say of a table (docs/formats.md, 2.5).

    :param id: the table's UUID as text
    :param partition_key: (name, type string) of each column
    :param clustering: (name, type string, descending) of each column
    :param static: name → type string
    :param regular: name → type string
    :param dropped: columns that there once were: name → (type string, time of the drop in µs)
    :param user_types: those of the keyspace
    """

    keyspace: str
    name: str
    id: str
    partition_key: tuple[tuple[str, str], ...]
    clustering: tuple[tuple[str, str, bool], ...]
    static: Mapping[str, str]
    regular: Mapping[str, str]
    dropped: Mapping[str, tuple[str, int]]
    user_types: UserTypes

    @cached_property
    def types(self) -> dict[str, Type]:
        """The type of each column; of a dropped one if there is no column of that name now."""
        texts = {name: text for name, (text, _) in self.dropped.items()}
        texts |= dict(self.partition_key) | {name: text for name, text, _ in self.clustering}
        texts |= dict(self.static) | dict(self.regular)
        return {name: parse_type(text, self.user_types) for name, text in texts.items()}

    @property
    def partition_types(self) -> list[tuple[str, Type]]:
        """Name and type of each column of the partition key."""
        return [(name, self.types[name]) for name, _ in self.partition_key]

    @property
    def clustering_types(self) -> list[tuple[str, Type]]:
        """Name and type of each clustering column."""
        return [(name, self.types[name]) for name, _, _ in self.clustering]


def parse_type(text: str, user_types: UserTypes) -> Type:
    """Parse a type string such as ``map<text, frozen<"Address">>``.

    :raises ValueError: it is no CQL type, or names a UDT that is not among ``user_types``
    """
    tokens = _TOKEN.findall(text)
    found = _parse(tokens, user_types)
    if tokens:
        raise ValueError(f"{text!r} is no CQL type: nothing is expected at {tokens[0]!r}")
    return found


def _parse(tokens: list[str], user_types: UserTypes) -> Type:
    if not tokens:
        raise ValueError("a CQL type ends too early")
    name = tokens.pop(0)
    if name == "frozen":
        (inner,) = _parameters(tokens, user_types)
        return Type(inner.kind, inner.inner, inner.fields, True, inner.dimension)
    if name == "vector":
        _expect(tokens, "<")
        element = _parse(tokens, user_types)
        _expect(tokens, ",")
        dimension = int(tokens.pop(0))
        _expect(tokens, ">")
        return Type("vector", (element,), (), True, dimension)
    if name in ("list", "set", "map", "tuple"):
        return Type(name, tuple(_parameters(tokens, user_types)), (), name == "tuple")
    if name.startswith("'"):
        return Type("custom")
    plain = name[1:-1].replace('""', '"') if name.startswith('"') else name
    if plain in user_types:
        fields = user_types[plain]
        inner_types = tuple(parse_type(text, user_types) for _, text in fields)
        return Type("udt", inner_types, tuple(field for field, _ in fields))
    if plain not in NATIVE:
        raise ValueError(f"{plain!r} is neither a native type nor among the user-defined types {sorted(user_types)}")
    return Type(plain)


def _parameters(tokens: list[str], user_types: UserTypes) -> list[Type]:
    _expect(tokens, "<")
    found = [_parse(tokens, user_types)]
    while tokens and tokens[0] == ",":
        tokens.pop(0)
        found.append(_parse(tokens, user_types))
    _expect(tokens, ">")
    return found


def _expect(tokens: list[str], token: str) -> None:
    if not tokens or tokens.pop(0) != token:
        raise ValueError(f"a CQL type lacks {token!r}")
