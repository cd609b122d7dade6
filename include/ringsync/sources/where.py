"""Conditions on key columns, as users write them: ``region = 'eu' AND day >= '2024-01-01'``.

What is written is taken apart, compared with the table, and written anew: nothing else reaches CQL. Which conditions
go together a server says when the statement is prepared (the same on 4.1 and 5.0). With token ranges it takes ``=``,
``<``, ``<=``, ``>``, ``>=`` and ``IN`` on any key column, but of each only one ``=`` or ``IN``, or two opposite bounds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ringsync.cql.identifiers import printable, quote
from ringsync.schema.table import Column, TableSchema

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<uuid>[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})
    | (?P<blob>0[xX](?:[0-9a-fA-F]{2})*)
    | (?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    | (?P<string>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<word>[A-Za-z][A-Za-z0-9_]*)
    | (?P<sign><=|>=|=|<|>|\(|\)|,)
    )\s*""",
    re.VERBOSE,
)
_COMPARISONS = ("=", "<", "<=", ">", ">=")

_ORDERED_AS_INTEGERS = ("tinyint", "smallint", "int", "bigint", "timestamp", "time")
_ORDERED_AS_BYTES = ("ascii", "text", "varchar", "blob", "date", "boolean")


class WhereError(ValueError):
    """A condition cannot be understood, or does not fit the table; the message says where and why."""


@dataclass(frozen=True)
class Condition:
    """One comparison of a key column.

    :ivar column: its CQL name
    :ivar operator: ``=``, ``<``, ``<=``, ``>``, ``>=`` or ``IN``
    :ivar literals: as CQL; several with ``IN`` only
    """

    column: str
    operator: str
    literals: tuple[str, ...]

    @property
    def cql(self) -> str:
        """The condition as CQL."""
        values = ", ".join(self.literals)
        return f"{quote(self.column)} {self.operator} " + (f"({values})" if self.operator == "IN" else values)


def parse_where(text: str, table: TableSchema) -> tuple[Condition, ...]:
    """Read conditions that are joined by AND.

    :param text: ``column = value``, also with ``<``, ``<=``, ``>``, ``>=`` and ``IN (value, …)``; names as in CQL,
        values are numbers, 'texts' (dates, times and addresses, too), uuids, 0x… blobs, true or false
    :raises WhereError: when it is anything else, or a column is not part of the table's key
    """
    tokens = _Tokens(text)
    conditions = [_condition(tokens, table)]
    while not tokens.at_end:
        tokens.word("AND")
        conditions.append(_condition(tokens, table))
    return tuple(conditions)


def all_of(conditions: Iterable[str]) -> str:
    """CQL conditions joined."""
    return " AND ".join(conditions)


def names_partitions(conditions: Iterable[Condition], table: TableSchema) -> bool:
    """Whether the conditions name each partition with all of its key, some with IN.

    Cassandra gives the rows of these partitions in the order of their keys' values, not of their tokens.
    """
    key = {column.name for column in table.partition_key}
    exact = [c for c in conditions if c.column in key and c.operator in ("=", "IN")]
    return {c.column for c in exact} == key and any(c.operator == "IN" for c in exact)


def behind(values: Iterable[bytes], value: bytes, column: Column) -> list[bytes]:
    """Those of the values that come behind one of them in the column's clustering order.

    :param values: as Cassandra serialises them
    :param column: of a type that ``IN`` is allowed for
    """

    def place(serialized: bytes) -> tuple[int, bytes]:
        if str(column.type) in _ORDERED_AS_INTEGERS:
            return int.from_bytes(serialized, "big", signed=True), b""
        return 0, serialized

    return [v for v in values if (place(v) < place(value) if column.descending else place(v) > place(value))]


def _condition(tokens: _Tokens, table: TableSchema) -> Condition:
    column = _key_column(tokens.name(), table)
    kind, operator = tokens.next("=, <, <=, >, >= or IN")
    if kind == "word" and operator.upper() == "IN":
        return Condition(column.name, "IN", tuple(_choices(tokens, column, table)))
    if kind != "sign" or operator not in _COMPARISONS:
        raise tokens.unexpected("=, <, <=, >, >= or IN")
    return Condition(column.name, operator, (tokens.literal(),))


def _choices(tokens: _Tokens, column: Column, table: TableSchema) -> Iterator[str]:
    # To go on inside a partition, those of the values have to be found that are still to come.
    if column.kind == "clustering" and str(column.type) not in _ORDERED_AS_INTEGERS + _ORDERED_AS_BYTES:
        raise WhereError(
            f"where: IN is not possible with clustering columns of type {column.type}, as {printable(column.name)} of "
            f"{table.full_name} is; use =, < or >"
        )
    tokens.sign("(")
    yield tokens.literal()
    while tokens.sign(",", ")") == ",":
        yield tokens.literal()


def _key_column(name: str, table: TableSchema) -> Column:
    keys = {column.name: column for column in table.key_columns}
    if name in keys:
        return keys[name]
    shown = ", ".join(printable(key) for key in keys)
    if any(column.name == name for column in table.columns):
        raise WhereError(
            f"where: {printable(name)} is not a key column of {table.full_name}; conditions are possible on {shown}"
        )
    near = difflib.get_close_matches(name, keys, n=1)
    hint = f"did you mean {printable(near[0])}?" if near else f"conditions are possible on {shown}"
    raise WhereError(f"where: {table.full_name} has no column {printable(name)}; {hint}")


class _Tokens:
    """The words, values and signs of a condition, one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = self._end = 0

    @property
    def at_end(self) -> bool:
        return self._end == len(self._text)

    def next(self, wanted: str) -> tuple[str, str]:
        """Kind and text of the next one.

        :param wanted: what is possible here, for the message
        """
        self._start = self._end
        found = _TOKEN.match(self._text, self._start)
        if not found or not found.lastgroup:
            raise self.unexpected(wanted)
        self._end = found.end()
        return found.lastgroup, found[found.lastgroup]

    def word(self, wanted: str) -> None:
        kind, text = self.next(wanted)
        if kind != "word" or text.upper() != wanted:
            raise self.unexpected(wanted)

    def sign(self, *wanted: str) -> str:
        kind, text = self.next(" or ".join(wanted))
        if kind != "sign" or text not in wanted:
            raise self.unexpected(" or ".join(wanted))
        return text

    def name(self) -> str:
        kind, text = self.next("a column")
        if kind == "word":
            return text.lower()
        if kind == "quoted":
            return text[1:-1].replace('""', '"')
        raise self.unexpected("a column")

    def literal(self) -> str:
        wanted = "a number, 'text', uuid, 0x… blob, true or false"
        kind, text = self.next(wanted)
        if kind == "string":
            return "'" + text[1:-1].replace("''", "'").replace("'", "''") + "'"
        if kind in ("uuid", "blob", "number") or (kind == "word" and text.lower() in ("true", "false")):
            return text.lower()
        raise self.unexpected(wanted)

    def unexpected(self, wanted: str) -> WhereError:
        rest = self._text[self._start :].strip()
        shown = "the end" if not rest else repr(rest if len(rest) <= 30 else rest[:30] + "…")
        return WhereError(f"where: expected {wanted} at character {self._start + 1}, found {shown}: {self._text!r}")
