"""Naming differences: rows that differ always have a named difference, equal ones never."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from ringsync.images.differences import row_differences
from tests.replica.test_view import NOW, TABLE, partitions
from tests.replica.view_model import Row, live_rows

MAPS = ("p", "sm", "m")


def canonical(row: Row) -> Row:
    """Maps as lists of key and value."""
    entries = {name: row[name] and [{"key": k, "value": v} for k, v in row[name]] for name in MAPS}
    return {**row, **entries}


def by_clustering(rows: list[Row]) -> dict[Any, Row]:
    return {row["c"]: canonical(row) for row in rows}


@settings(max_examples=80, deadline=None)
@given(partitions(), partitions())
def test_rows_differ_if_and_only_if_a_difference_is_named(first: list[Row], second: list[Row]) -> None:
    sides = [by_clustering(live_rows(TABLE, images, now)) for images, now in ((first, 4), (first, NOW), (second, NOW))]
    for one in sides:
        for other in sides:
            for clustering in one.keys() & other.keys():
                source, replica = one[clustering], other[clustering]
                found = list(row_differences(TABLE, source, replica))
                assert bool(found) == (source != replica)
                assert all(d.key == {"p": [[1, "k"]], "c": clustering} and d.column for d in found)


def test_a_row_on_one_side_only() -> None:
    row: Row = {"p": [], "c": 1, "_cells": {"p": None, "c": {"raw": b"\x01\xff"}}}
    assert [(d.kind, d.key) for d in row_differences(TABLE, row, None)] == [("missing", {"p": [], "c": "0x01ff"})]
    assert [d.kind for d in row_differences(TABLE, None, row)] == ["extra"]
