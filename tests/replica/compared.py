"""A source and a replica that both stand still, compared as a verification compares them, in both of its ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from ringsync.images.differences import Difference
from ringsync.images.schema import row_image_schema
from ringsync.replica.compare import compare_in_spark, compare_rows, differing_ranges
from ringsync.replica.suspects import Judged, Round, judge_suspects, suspects
from ringsync.replica.table import token_condition
from ringsync.replica.view import live
from ringsync.schema.table import TableSchema
from ringsync.steps.replica.kept import get_suspects, put_suspects
from ringsync.storage.local import LocalStore
from tests.replica.bases import checksums_of


@dataclass(frozen=True)
class Compared:
    """The token ranges that differ, and what was found in them."""

    ranges: tuple[tuple[int, int], ...]
    rows: dict[str, int]
    kinds: dict[str, int]
    differences: list[Difference]


def compared_at_once(
    table: TableSchema, source: DataFrame, replica: DataFrame, edges: Sequence[int], now_s: int, **looks: Any
) -> Compared:
    """Compare row images; by Spark and in memory, which must find the same."""
    there, here = (live(side, table, now_s) for side in (source, replica))
    ranges = differing_ranges(*(checksums_of(side, table, edges) for side in (there, here)), edges)
    if not ranges:
        return Compared((), {}, {}, [])
    sides = [side.where(token_condition(ranges)) for side in (there, here)]
    with TemporaryDirectory() as folder:

        def keep(found: pa.RecordBatch) -> list[str]:
            return put_suspects(LocalStore(Path(folder)), "verify/", suspects(found, now_s))

        equal, number, files = compare_in_spark(*sides, table, keep)
        kept = get_suspects(LocalStore(Path(folder)), files)
    equal_too, others = compare_rows(*(side.toArrow().to_batches() for side in sides), table)
    found, again = (judged(table, some, source, replica, now_s, looks) for some in (kept, [suspects(others, now_s)]))
    assert (equal, number, found.outcomes, found.kinds) == (equal_too, len(others), again.outcomes, again.kinds)
    limit = looks.get("limit", 1000)
    if len(found.listed) < limit:
        assert sorted(found.listed, key=repr) == sorted(again.listed, key=repr)
    rows = found.outcomes + Counter(equal=equal)
    return Compared(ranges, dict(rows), dict(found.kinds), found.listed[:limit])


def judged(
    table: TableSchema, kept: list[pa.RecordBatch], source: DataFrame, replica: DataFrame, now_s: int, looks: Any
) -> Judged:
    """Judge suspects by looks at these sides."""
    there, here = (
        next(iter(side.toArrow().cast(row_image_schema(table)).combine_chunks().to_batches()))
        for side in (source, replica)
    )
    every = Judged()
    for found in kept:
        left = found if len(found) else None
        for _ in range(2):  # only a second look tells that a row which the source does not have was not just deleted
            if left is not None:
                one = judge_suspects(left, table, Round(lambda *_: here, lambda _: (there, now_s), **looks))
                every.outcomes += one.outcomes
                every.kinds += one.kinds
                every.listed += one.listed
                left = one.left
        assert left is None
    return every
