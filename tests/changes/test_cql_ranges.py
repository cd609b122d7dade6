"""Tests of ranges as conditions: they select exactly the rows between the bounds in the table's order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.changes.text.ranges import range_conditions
from ringsync.changes.text.values import Bound
from ringsync.cql.natives import NATIVES
from ringsync.cql.text.literals import some_literal
from ringsync.cql.types import Native, UserType, parse_type
from ringsync.schema.table import Column, TableSchema

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
    """Return a bound's place: before or after all rows that begin with its values."""
    values, inclusive = bound
    return place(values, descending), -1 if inclusive == is_start else 1


def is_before(bound: tuple[tuple[int, ...], int], row: tuple[int, ...]) -> bool:
    values, side = bound
    beginning = row[: len(values)]
    return values < beginning or (values == beginning and side < 0)


@pytest.mark.parametrize("static", [(), (Column("s", "static", Native("int")),)])
@given(BOUNDS, BOUNDS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_conditions_choose_what_lies_between_the_bounds(
    static: tuple[Column, ...],
    start: tuple[tuple[int, ...], bool],
    end: tuple[tuple[int, ...], bool],
    descending: list[bool],
) -> None:
    columns = [Column(name, "clustering", Native("int"), down) for name, down in zip("abc", descending, strict=True)]
    first, last = bound_place(start, descending, True), bound_place(end, descending, False)
    rows = list(itertools.product(VALUES, repeat=3))
    inside = {
        row for row in rows if is_before(first, place(row, descending)) and not is_before(last, place(row, descending))
    }
    if not inside:
        return  # Cassandra writes no empty range
    table = TableSchema("ks", "t", "0" * 32, (Column("k", "partition_key", Native("int")), *columns, *static))
    bounds = [Bound(tuple(map(str, values)), inclusive) for values, inclusive in (start, end)]
    pieces = range_conditions(table, *bounds)
    assert pieces != [[]] or not static
    chosen = {row for row in rows for piece in pieces if all(holds(condition, row) for condition in piece)}
    assert chosen == inside


def holds(condition: str, row: tuple[int, ...]) -> bool:
    name, sign, value = condition.split()
    return SIGNS[sign](row["abc".index(name)], int(value))


@pytest.mark.server
def test_all_rows_of_a_partition_go_but_not_its_static_cells(session: Any, keyspace: str) -> None:
    """Whatever the type of the first clustering column."""
    natives = sorted(set(NATIVES) - {"counter", "duration"})
    types = [*natives, *(f"frozen<{one}>" for one in ("list<int>", "set<uuid>", "map<text, int>", "pair"))]
    types += ["tuple<inet, pair>", "vector<float, 3>"]
    session.execute(f'CREATE TYPE {keyspace}.pair ("First" timeuuid, second boolean)')
    pair = UserType(keyspace, "pair", ("First", "second"), (Native("timeuuid"), Native("boolean")), True)
    for number, name in enumerate(types):
        session.execute(
            f"CREATE TABLE {keyspace}.t{number} (k int, c {name}, d int, s int STATIC, PRIMARY KEY (k, c, d))"
        )
        columns = [Column("k", "partition_key", Native("int")), Column("s", "static", Native("int"))]
        columns += [
            Column("c", "clustering", parse_type(name, {"pair": pair})),
            Column("d", "clustering", Native("int")),
        ]
        table = TableSchema(keyspace, f"t{number}", "0" * 32, tuple(columns))
        literal = some_literal(columns[2].type)
        session.execute(f"INSERT INTO {table.full_name} (k, c, d, s) VALUES (1, {literal}, 2, 3)")
        everything = Bound((), True)
        for piece in range_conditions(table, everything, everything):
            session.execute(f"DELETE FROM {table.full_name} WHERE k = 1 AND {' AND '.join(piece)}")
        assert session.execute(f"SELECT c, s FROM {table.full_name}").all() == [(None, 3)], name
