"""Range deletions as conditions of DELETE statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringsync.changes.text.values import Bound
from ringsync.cql.identifiers import printable
from ringsync.cql.text.literals import some_literal
from ringsync.schema.table import Column, TableSchema

_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def range_conditions(table: TableSchema, start: Bound, end: Bound) -> list[list[str]]:
    """Conditions of DELETEs that together delete exactly what lies between two bounds.

    A bound has values of some of the first clustering columns. Where both have more than one beyond what they share,
    ``(2, 5) ≤ (a, b) < (4, 7)``, the range is what ``a = 2 AND b >= 5``, ``a > 2 AND a < 4`` and ``a = 4 AND b < 7``
    say: so it is also right where the columns' orders differ, in which tuples do not compare.

    All rows of a partition are two ranges where there are static columns, which no DELETE without a condition would
    leave: what is less than some value, and the rest.

    :param start: where it begins, in the order of the table: in a descending column with greater values
    :param end: where it ends
    :returns: for each DELETE the conditions beside the partition key's; none at all for the whole partition; no
        DELETE: it cannot be said, the first clustering column's type has no literals
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
    """What is equal to the bound in ever fewer of the columns that it does not share."""
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
