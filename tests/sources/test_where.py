"""Conditions on key columns: what is understood, what is refused, and what becomes of it."""

from __future__ import annotations

import pytest

from ringsync.cql.types import Native
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.where import Condition, WhereError, behind, names_partitions, parse_where

TABLE = TableSchema(
    "shop",
    "orders",
    "00" * 16,
    (
        Column("region", "partition_key", Native("text")),
        Column("Day", "partition_key", Native("date")),
        Column("seq", "clustering", Native("int"), descending=True),
        Column("price", "clustering", Native("decimal")),
        Column("id", "clustering", Native("uuid")),
        Column("note", "static", Native("text")),
        Column("v", "regular", Native("int")),
    ),
)


@pytest.mark.parametrize(
    ("text", "cql"),
    [
        ("region = 'eu'", "\"region\" = 'eu'"),
        (" REGION='it''s; DROP TABLE x'", "\"region\" = 'it''s; DROP TABLE x'"),
        ("\"Day\" >= '2024-01-01' and seq < -5", '"Day" >= \'2024-01-01\' AND "seq" < -5'),
        ("seq IN (1,2 , 3)", '"seq" IN (1, 2, 3)'),
        ("price > 1.5E3 AND price<=2e+4", '"price" > 1.5e3 AND "price" <= 2e+4'),
        ("id=123E4567-e89b-12d3-a456-426614174000", '"id" = 123e4567-e89b-12d3-a456-426614174000'),
        ("seq = 0xAB\n", '"seq" = 0xab'),
        ("seq=TRUE", '"seq" = true'),
    ],
)
def test_conditions_are_written_anew(text: str, cql: str) -> None:
    assert " AND ".join(condition.cql for condition in parse_where(text, TABLE)) == cql


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column at character 1, found the end"),
        ("seq", "expected =, <, .*, found the end"),
        ("seq 1", "expected =, <.* at character 5, found '1'"),
        ("seq = ", "expected a number.*found the end"),
        ("seq = 1; DROP TABLE shop.orders", "expected AND at character 8, found '; DROP"),
        ("seq = 1 OR seq = 2", "expected AND at character 9, found 'OR"),
        ("seq = 1 -- x", "expected AND.*found '-- x'"),
        ("seq = 1 /* x */", "expected AND"),
        ("seq = 1 ALLOW FILTERING", "expected AND.*ALLOW"),
        ("seq = 12abc", "expected AND.*abc"),
        ("seq != 1", "expected =, <"),
        ("seq = 'open", "expected a number"),
        ("seq = now()", "expected a number.*now"),
        ("seq = seq", "expected a number"),
        ("seq IN ()", "expected a number"),
        ("seq IN 1", r"expected \( at"),
        ("seq IN (1 2)", r"expected , or \) at"),
        ("token(region) > 5", r'has no column "token"'),
        ("(seq) = (1)", "expected a column"),
        ("day = '2024-01-01'", 'no column day; did you mean "Day"'),
        ("regoin = 'eu'", "shop.orders has no column regoin; did you mean region"),
        ("xyz = 1", 'no column xyz; conditions are possible on region, "Day", seq, price, id'),
        ("v = 1", "v is not a key column of shop.orders; conditions are possible on region"),
        ("note = 'x'", "note is not a key column"),
        ("price IN (1.0)", "IN is not possible with clustering columns of type decimal"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(WhereError, match=message):
        parse_where(text, TABLE)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("region = 'eu' AND \"Day\" IN ('2024-01-01')", True),
        ("region IN ('eu') AND \"Day\" = '2024-01-01' AND seq > 1", True),
        ("region = 'eu' AND \"Day\" = '2024-01-01'", False),
        ("region IN ('eu')", False),
        ("region IN ('eu') AND \"Day\" > '2024-01-01'", False),
    ],
)
def test_whether_partitions_are_named(text: str, named: bool) -> None:
    assert names_partitions(parse_where(text, TABLE), TABLE) == named


def test_values_that_are_still_to_come() -> None:
    numbers = [number.to_bytes(4, "big", signed=True) for number in (-2, -1, 0, 3)]
    assert behind(numbers, numbers[1], Column("c", "clustering", Native("int"))) == numbers[2:]
    assert behind(numbers, numbers[1], Column("c", "clustering", Native("int"), descending=True)) == numbers[:1]
    assert behind([b"b", b"a", b"ab", b""], b"a", Column("c", "clustering", Native("text"))) == [b"b", b"ab"]
    assert behind([b"a"], b"a", Column("c", "clustering", Native("text"))) == []


def test_a_condition_of_odd_names() -> None:
    assert Condition('a"b', "IN", ("1", "2")).cql == '"a""b" IN (1, 2)'
