"""Ranges as conditions: they choose exactly the rows that lie between the bounds in the table's order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ringsync.changes.cql_ranges import range_conditions
from ringsync.changes.texts import Bound
from ringsync.cql.types import Native
from ringsync.schema.table import Column

VALUES = range(4)
SIGNS: dict[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BOUNDS = st.builds(
    lambda values, inclusive: (tuple(values), inclusive), st.lists(st.sampled_from(VALUES), max_size=3), st.booleans()
)


def place(values: tuple[int, ...], descending: list[bool]) -> tuple[int, ...]:
    return tuple(-value if down else value for value, down in zip(values, descending, strict=False))


def bound_place(
    bound: tuple[tuple[int, ...], bool], descending: list[bool], is_start: bool
) -> tuple[tuple[int, ...], int]:
    """Where a bound lies: before or behind all rows that begin with its values."""
    values, inclusive = bound
    return place(values, descending), -1 if inclusive == is_start else 1


def is_before(bound: tuple[tuple[int, ...], int], row: tuple[int, ...]) -> bool:
    values, side = bound
    beginning = row[: len(values)]
    return values < beginning or (values == beginning and side < 0)


@given(BOUNDS, BOUNDS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_conditions_choose_what_lies_between_the_bounds(
    start: tuple[tuple[int, ...], bool], end: tuple[tuple[int, ...], bool], descending: list[bool]
) -> None:
    columns = [Column(name, "clustering", Native("int"), down) for name, down in zip("abc", descending, strict=True)]
    first, last = bound_place(start, descending, True), bound_place(end, descending, False)
    rows = list(itertools.product(VALUES, repeat=3))
    inside = {
        row for row in rows if is_before(first, place(row, descending)) and not is_before(last, place(row, descending))
    }
    if not inside:
        return  # Cassandra writes no range that holds nothing
    pieces = range_conditions(
        columns, *(Bound(tuple(map(str, values)), inclusive) for values, inclusive in (start, end))
    )
    chosen = {row for row in rows for piece in pieces if all(holds(condition, row) for condition in piece)}
    assert chosen == inside


def holds(condition: str, row: tuple[int, ...]) -> bool:
    name, sign, value = condition.split()
    return SIGNS[sign](row["abc".index(name)], int(value))
