"""Where a partition's reading goes on: SELECTs without a server; what they give, tests/sources/test_scan.py says."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ringsync.cql.types import Native
from ringsync.images.from_pages import ResultColumn
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.partitions import (
    Partition,
    last_partition,
    partitions_cql,
    partitions_of,
    rest_of_partition,
)
from ringsync.sources.scan.where import parse_where

INT = Native("int")
TABLE = TableSchema(
    "ks",
    "t",
    "00" * 16,
    (
        Column("k", "partition_key", INT),
        Column("l", "partition_key", Native("text")),
        Column("a", "clustering", INT),
        Column("b", "clustering", INT, descending=True),
        Column("c", "clustering", INT),
        Column("s", "static", INT),
    ),
)
LAYOUT = (ResultColumn("token", None), *(ResultColumn("value", name) for name in "klabcs"))


def number(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


def page_of(rows: Sequence[Sequence[bytes | None]]) -> bytes:
    cells = (b"\xff" * 4 if cell is None else struct.pack(">i", len(cell)) + cell for row in rows for cell in row)
    return struct.pack(">i", len(rows)) + b"".join(cells)


READ = Partition(7, b"", (number(1), b"x"), (number(10), number(20), number(30)))
KEY = (number(1), b"x")


def rest(where: str | None = None, **choices: Sequence[int]) -> list[tuple[str, tuple[bytes, ...]]]:
    conditions = parse_where(where, TABLE) if where else ()
    serialized = {name: [number(value) for value in values] for name, values in choices.items()}
    found = rest_of_partition("SELECT", TABLE, conditions, serialized, READ)
    return [
        (request.cql.removeprefix('SELECT WHERE "k" = ? AND "l" = ? AND '), request.values[2:]) for request in found
    ]


def test_the_rest_of_a_partition() -> None:
    assert rest() == [
        ('"a" = ? AND "b" = ? AND "c" > ?', (number(10), number(20), number(30))),
        ('"a" = ? AND "b" < ?', (number(10), number(20))),
        ('"a" > ?', (number(10),)),
    ]


def test_a_whole_partition() -> None:
    [request] = rest_of_partition("SELECT", TABLE, parse_where("k > 0 AND b = 2", TABLE), {}, Partition(7, b"", KEY))
    assert request.cql == 'SELECT WHERE "k" = ? AND "l" = ? AND "b" = 2 ALLOW FILTERING'
    assert request.values == KEY
    assert request.thorough


def test_conditions_on_the_rest() -> None:
    end = " ALLOW FILTERING"
    assert [cql for cql, _ in rest("k = 1 AND a > 5 AND a <= 11 AND b < 25 AND b > 3")] == [
        '"a" = ? AND "b" = ? AND "c" > ?' + end,
        '"a" = ? AND "b" < ? AND "b" > 3' + end,
        '"a" > ? AND "a" <= 11 AND "b" < 25 AND "b" > 3' + end,
    ]
    assert [cql for cql, _ in rest("a = 10 AND c >= 3")] == [
        '"a" = ? AND "b" = ? AND "c" > ?' + end,
        '"a" = ? AND "b" < ? AND "c" >= 3' + end,
    ]


def test_choices_on_the_rest() -> None:
    assert rest("b IN (25, 20, 15, 10)", b=(25, 20, 15, 10))[1:] == [
        (
            '"a" = ? AND "b" IN ? ALLOW FILTERING',
            (number(10), number(2) + number(4) + number(15) + number(4) + number(10)),
        ),
        ('"a" > ? AND "b" IN (25, 20, 15, 10) ALLOW FILTERING', (number(10),)),
    ]
    assert len(rest("b IN (25, 20)", b=(25, 20))) == 2


def test_the_partitions_of_a_range() -> None:
    select = (
        'SELECT DISTINCT token("k", "l"), "k", "l" FROM "ks"."t" WHERE token("k", "l") > ? AND token("k", "l") <= ?'
    )
    assert partitions_cql(TABLE, ()) == select
    assert partitions_cql(TABLE, parse_where("a = 5", TABLE)) == select
    assert partitions_cql(TABLE, parse_where("l = 'x' AND a = 5", TABLE)) == f"{select} AND \"l\" = 'x' ALLOW FILTERING"
    minus_two = b"\xff" * 7 + b"\xfe"
    rows = [(minus_two, number(1), b"ab"), (minus_two, number(1), b"b"), (bytes(8), number(0), b"")]
    found = list(partitions_of(page_of(rows), TABLE))
    assert [(partition.token, partition.key, partition.values) for partition in found] == [
        (-2, b"\0\4\0\0\0\1\0\0\2ab\0", (number(1), b"ab")),
        (-2, b"\0\4\0\0\0\1\0\0\1b\0", (number(1), b"b")),
        (0, b"\0\4\0\0\0\0\0\0\0\0", (number(0), b"")),
    ]
    # Cassandra compares keys of equal tokens byte by byte, lengths included.
    assert sorted(found) == [found[1], found[0], found[2]]


def test_how_far_a_page_came() -> None:
    first = (bytes(8), *KEY, number(1), number(2), number(3), None)
    last = last_partition(
        page_of([first, (number(0) + number(9), *KEY, number(4), b"", number(6), None)]), LAYOUT, TABLE
    )
    assert (last.token, last.values, last.clustering) == (9, KEY, (number(4), b"", number(6)))
    static = last_partition(page_of([first, (bytes(8), *KEY, None, None, None, number(1))]), LAYOUT, TABLE)
    assert static.clustering is None
