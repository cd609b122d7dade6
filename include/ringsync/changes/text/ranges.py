"""Range deletions as conditions of DELETE statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringsync.changes.text.values import Bound
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import some_literal
from ringsync.schema.table import Column, TableSchema

_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def range_conditions(table: TableSchema, start: Bound, end: Bound) -> list[list[str]]:
    """Write the conditions of DELETEs that together delete exactly the rows between two bounds.

    A bound has values of some of the first clustering columns. If both bounds have several values beyond those that
    they share, as in ``(2, 5) ≤ (a, b) < (4, 7)``, the range is split into ``a = 2 AND b >= 5``, ``a > 2 AND a < 4``
    and ``a = 4 AND b < 7``. This also holds if the columns' orders differ, in which case CQL cannot compare tuples.

    A DELETE without a condition would delete static columns, too. If the table has some, all rows of a partition are
    two ranges: values less than some value, and the rest.

    :param start: begin of the range in the order of the table: a descending column begins with greater values
    :returns: for each DELETE its conditions besides the partition key's; an empty list of conditions: the whole
        partition; no DELETE: CQL cannot express it, because the first clustering column's type has no literals
    """
    clustering = table.clustering
    if not start.values and not end.values:
        return _all_rows(clustering[0]) if table.of_kind("static") else [[]]
    shared = 0
    while shared < min(len(start.values), len(end.values)) and start.values[shared] == end.values[shared]:
        shared += 1
    if shared == len(start.values) == len(end.values):
        return [_equal(clustering, start.values)]
    return [
        *_side(clustering, start, shared, ">"),
        [*_equal(clustering, start.values[:shared]), *_middle(clustering, start, end, shared)],
        *_side(clustering, end, shared, "<"),
    ]


def _all_rows(column: Column) -> list[list[str]]:
    value = some_literal(column.type)
    return [] if value is None else [[f"{printable(column.name)} {sign} {value}"] for sign in ("<", ">=")]


def _side(clustering: Sequence[Column], bound: Bound, shared: int, sign: str) -> Iterator[list[str]]:
    """Write the ranges at one bound. Each equals it in one column fewer than the last, and compares the next column."""
    for length in range(len(bound.values), shared + 1, -1):
        is_last = length == len(bound.values)
        yield [
            *_equal(clustering, bound.values[: length - 1]),
            _compared(clustering[length - 1], sign, bound.values[length - 1], is_last and bound.inclusive),
        ]


def _middle(clustering: Sequence[Column], start: Bound, end: Bound, shared: int) -> Iterator[str]:
    for bound, sign in ((start, ">"), (end, "<")):
        if len(bound.values) > shared:
            inclusive = bound.inclusive and len(bound.values) == shared + 1
            yield _compared(clustering[shared], sign, bound.values[shared], inclusive)


def _equal(clustering: Sequence[Column], values: Sequence[str | None]) -> list[str]:
    return [f"{printable(column.name)} = {value}" for column, value in zip(clustering, values, strict=False)]


def _compared(column: Column, sign: str, value: str | None, inclusive: bool) -> str:
    sign += "=" * inclusive
    return f"{printable(column.name)} {_FLIPPED[sign] if column.descending else sign} {value}"
