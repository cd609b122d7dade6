"""Conditions on key columns, as users write them: ``region = 'eu' AND day >= '2024-01-01'``.

The conditions are parsed, compared with the table, and written again: no other text reaches CQL. When the statement is
prepared, the server checks which conditions go together (the same on 4.1 and 5.0). With token ranges it accepts ``=``,
``<``, ``<=``, ``>``, ``>=`` and ``IN`` on any key column, but only one ``=`` or ``IN`` or two opposite bounds on each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringsync.changes.keys.order import value_keys
from ringsync.cql.cells import cells_of_values
from ringsync.cql.identifiers import printable, quote
from ringsync.cql.natives import BOOLEAN, BYTES, NATIVES, SIGNED, UNSIGNED
from ringsync.cql.tokens import Tokens
from ringsync.cql.types import Native
from ringsync.schema.table import Column, TableSchema

_COMPARISONS = ("=", "<", "<=", ">", ">=")
_LISTED_ORDERS = (BYTES, SIGNED, UNSIGNED, BOOLEAN)
"""Types whose values ``IN`` may list in clustering columns."""


class WhereError(ValueError):
    """A condition is not valid or does not fit the table; the message says where and why."""


@dataclass(frozen=True)
class Condition:
    """A comparison of a key column.

    :ivar operator: ``=``, ``<``, ``<=``, ``>``, ``>=`` or ``IN``
    :ivar literals: CQL literals; several only with ``IN``
    """

    column: str
    operator: str
    literals: tuple[str, ...]

    @property
    def cql(self) -> str:
        """Condition as CQL."""
        values = ", ".join(self.literals)
        return f"{quote(self.column)} {self.operator} " + (f"({values})" if self.operator == "IN" else values)


def parse_where(text: str, table: TableSchema) -> tuple[Condition, ...]:
    """Read conditions that are joined by AND.

    :param text: ``column = value``, also with ``<``, ``<=``, ``>``, ``>=`` and ``IN (value, …)``; names as in CQL,
        values are numbers, 'texts' (dates, times and addresses, too), uuids, 0x… blobs, true or false
    :raises WhereError: the text is not valid, or a column is not part of the table's key
    """
    tokens = Tokens(text, "where", WhereError)
    conditions = [_condition(tokens, table)]
    while tokens.next.kind != "end":
        tokens.expect("and")
        conditions.append(_condition(tokens, table))
    return tuple(conditions)


def all_of(conditions: Iterable[str]) -> str:
    """Join CQL conditions with AND."""
    return " AND ".join(conditions)


def names_partitions(conditions: Iterable[Condition], table: TableSchema) -> bool:
    """Tell whether the conditions name partitions by their whole keys, some with IN.

    Cassandra returns the rows of such partitions in the order of their keys' values, not of their tokens.
    """
    key = {column.name for column in table.partition_key}
    exact = [c for c in conditions if c.column in key and c.operator in ("=", "IN")]
    return {c.column for c in exact} == key and any(c.operator == "IN" for c in exact)


def behind(values: Sequence[bytes], value: bytes, column: Column) -> list[bytes]:
    """Return the values that come after one of them in the column's clustering order.

    :param values: values as Cassandra serialises them
    :param value: value after which the others come, serialised
    """
    keys = value_keys(cells_of_values([value, *values]), column.type)
    here, *places = (keys.value(row) or b"" for row in range(len(keys)))
    further = [place < here if column.descending else place > here for place in places]
    return [value for value, is_behind in zip(values, further, strict=True) if is_behind]


def _condition(tokens: Tokens, table: TableSchema) -> Condition:
    column = _key_column(tokens.name("a column"), table)
    if tokens.accept("in"):
        return Condition(column.name, "IN", tuple(_choices(tokens, column, table)))
    if tokens.next.text not in _COMPARISONS:
        tokens.fail("=, <, <=, >, >= or IN")
    return Condition(column.name, tokens.take().text, (_literal(tokens),))


def _choices(tokens: Tokens, column: Column, table: TableSchema) -> Iterator[str]:
    listed = isinstance(column.type, Native) and NATIVES[column.type.name].order in _LISTED_ORDERS
    if column.kind == "clustering" and not listed:
        raise WhereError(
            f"where: IN is not possible with clustering columns of type {column.type}, as {printable(column.name)} of "
            f"{table.full_name} is; use =, < or >"
        )
    tokens.expect("(")
    yield _literal(tokens)
    while tokens.accept(","):
        yield _literal(tokens)
    if not tokens.accept(")"):
        tokens.fail(", or )")


def _literal(tokens: Tokens) -> str:
    token = tokens.next
    if token.kind == "string":
        return "'" + tokens.take().value.replace("'", "''") + "'"
    if token.kind in ("uuid", "blob", "number") or (token.kind == "name" and token.value in ("true", "false")):
        return tokens.take().text.lower()
    tokens.fail("a number, 'text', uuid, 0x… blob, true or false")


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
