"""Forecasts against tables whose size is known, on a real node and by simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cassandra.concurrent import execute_concurrent_with_args
from hypothesis import given
from hypothesis import strategies as st

from ringsync.cluster.limits import Limiter, Limits
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, close_all
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, WHOLE_RING, TokenRange
from ringsync.sources.scan.forecast import (
    FAT_PLACES,
    PLACES,
    Forecast,
    Unknown,
    extrapolate,
    sample,
    sample_places,
    summarise,
)
from ringsync.sources.scan.pages import RETRY_DELAYS_S
from ringsync.sources.scan.scan import scan_query, scan_session
from servers.cassandra import CassandraNode
from tests.sources.clusters import settings_of

NOW = 1_800_000_000
WIDTH = 2**64 - 1
RING = [ReplicaRange(part, ("nowhere:1",)) for part in WHOLE_RING.unwrap()]

# Places


@given(st.lists(st.integers(MIN_TOKEN, MAX_TOKEN), min_size=2, max_size=40, unique=True), st.booleans())
def test_places_lie_inside_the_ranges_and_are_evenly_spread(bounds: list[int], contiguous: bool) -> None:
    bounds = sorted(bounds)
    ranges = [ReplicaRange(TokenRange(*pair), ()) for pair in pairwise(bounds)]
    ranges = ranges if contiguous else ranges[::2]
    total = sum(part.range.width for part in ranges)
    places = [part.range for part in sample_places(ranges[::-1], 16)]
    assert len(places) == min(16, total)
    assert places == sorted(places)
    assert all(place.start < place.end for place in places)
    assert all(one.end <= other.start for one, other in pairwise(places))
    if contiguous:
        assert (places[0].start, places[-1].end) == (bounds[0], bounds[-1])
        assert sum(place.width for place in places) == total
    offsets = [sum(max(0, min(part.range.end, place.start) - part.range.start) for part in ranges) for place in places]
    if total >= 16:
        assert offsets == [total * index // 16 for index in range(16)]


# Simulated tables


def forecast_of(partition_sizes: npt.NDArray[np.int64], page: int, seed: int) -> Forecast:
    """The forecast for a table with such partitions at random tokens, from pages of so many rows."""
    tokens = np.sort(np.random.default_rng(seed).integers(MIN_TOKEN, MAX_TOKEN, len(partition_sizes)))
    rows = np.repeat(tokens, partition_sizes)
    one_row = bool((partition_sizes == 1).all())
    samples = []
    for part in sample_places(RING, PLACES):
        first, end = np.searchsorted(rows, [part.range.start, part.range.end], side="right")
        mine = rows[first:end]
        for pages in range(1, FAT_PLACES + 1):
            read = mine[: pages * page]
            ended = len(mine) <= pages * page
            found = summarise(read, part.range, page, 10 * len(read), 3 * len(read), ended=ended, one_row=one_row)
            if ended or not found.cut_partition:
                break
        samples.append(found)
    return extrapolate(samples, WIDTH)


SHAPES: dict[str, Callable[[np.random.Generator], npt.NDArray[np.int64]]] = {
    "one row each": lambda rng: np.ones(50_000, np.int64),
    "1 to 20 rows": lambda rng: rng.integers(1, 21, 5_000),
    "long tail": lambda rng: np.ceil(rng.lognormal(1, 1, 10_000)).astype(np.int64),
    "larger than a page": lambda rng: np.full(500, 300),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_has_the_truth_about_as_often_as_it_says(shape: str) -> None:
    hits, means = 0, []
    for seed in range(60):
        sizes = SHAPES[shape](np.random.default_rng(1000 + seed))
        found, truth = forecast_of(sizes, 200, seed), int(sizes.sum())
        assert not found.exact
        assert not found.at_least
        assert found.rows_high is not None
        hits += found.rows_low <= truth <= found.rows_high
        means.append(found.rows / truth)
    assert hits >= 52
    assert np.mean(means) == pytest.approx(1, abs=0.06)


def test_more_rows_in_a_page_make_a_narrower_interval() -> None:
    sizes = np.ones(200_000, np.int64)
    few, many = forecast_of(sizes, 100, 1), forecast_of(sizes, 1600, 1)
    assert few.rows_high is not None
    assert many.rows_high is not None
    assert many.rows_high - many.rows_low < (few.rows_high - few.rows_low) / 2
    assert (few.bytes, few.cells) == (pytest.approx(10 * few.rows), pytest.approx(3 * few.rows))


def test_partitions_without_end_are_a_lower_bound() -> None:
    found = forecast_of(np.full(100, 100_000), 200, 1)
    assert found.at_least
    assert found.rows_high is None
    assert found.largest_partition == FAT_PLACES * 200
    assert found.sampled_rows <= found.rows <= 100 * 100_000
    assert forecast_of(np.array([100_000]), 200, 1).rows == FAT_PLACES * 200


def test_a_fat_partition_that_is_met_does_not_make_the_others_more() -> None:
    """Some of twenty fat partitions are met, and must not be taken for what the tokens between them hold."""
    sizes = np.concatenate([np.ones(2_000, np.int64), np.full(20, 5000)])
    found = [forecast_of(np.random.default_rng(seed).permutation(sizes), 50, seed) for seed in range(20)]
    assert any(each.at_least for each in found)
    assert all(each.rows <= sizes.sum() for each in found if each.at_least)


def test_report() -> None:
    found = forecast_of(np.ones(5000, np.int64), 100, 1)
    report = json.loads(json.dumps(found.as_report()))
    assert report["rows"] == found.rows
    assert report["bytes_per_row"] == 10


# A real node


@pytest.fixture
def settings(cassandra: CassandraNode) -> Iterator[ClusterSettings]:
    yield settings_of(cassandra)
    close_all()


def forecast(
    settings: ClusterSettings, session: Any, keyspace: str, table: str, permits: Limiter | None = None, **options: Any
) -> Forecast:
    schema = read_table(session, keyspace, table)
    query = scan_query(schema, times=True, element_times=True)
    found = sample(scan_session(settings, NOW), query, RING, settings, permits or Limiter(), **options)
    assert isinstance(found, Forecast)
    return found


def fill(session: Any, statement: str, rows: list[tuple[Any, ...]]) -> None:
    execute_concurrent_with_args(session, session.prepare(statement), rows, concurrency=200)


@pytest.mark.server
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_small_tables_are_seen_whole(session: Any, settings: ClusterSettings, keyspace: str, rows: int) -> None:
    session.execute(f"CREATE TABLE {keyspace}.small_{rows} (id int PRIMARY KEY, a text, b text)")
    fill(session, f"INSERT INTO {keyspace}.small_{rows} (id, a) VALUES (?, 'x')", [(i,) for i in range(rows)])
    found = forecast(settings, session, keyspace, f"small_{rows}")
    assert found.exact
    assert not found.at_least
    assert (found.rows, found.rows_low, found.rows_high, found.cells) == (rows, rows, rows, rows)
    assert (found.sampled_rows, found.sampled_part, found.largest_partition) == (rows, 1, min(rows, 1))


@pytest.mark.server
def test_a_large_table_and_a_fat_partition(session: Any, settings: ClusterSettings, keyspace: str) -> None:
    name = f"{keyspace}.large"
    session.execute(f"CREATE TABLE {name} (id int, c int, a text, b int, PRIMARY KEY (id, c))")
    fill(
        session,
        f"INSERT INTO {name} (id, c, a, b) VALUES (?, ?, ?, 1)",
        [(i, c, "x" * 20) for i in range(5000) for c in range(4)],
    )
    limiter = Limiter(Limits(rows_per_s=50_000))
    found = forecast(settings, session, keyspace, "large", place_rows=200, permits=limiter)
    assert not found.exact
    assert not found.at_least
    assert found.rows_high is not None
    assert found.rows_low <= 20_000 <= found.rows_high
    assert found.rows == pytest.approx(20_000, rel=0.15)
    assert found.cells == pytest.approx(2 * found.rows, abs=2)
    assert found.as_report()["bytes_per_row"] == pytest.approx(8 + 4 + 4 + 20 + 4 + 2 * 8 + 8 * 4, rel=0.2)
    assert found.largest_partition == 4
    assert found.sampled_rows <= 2 * PLACES * 200
    assert limiter.running == 0

    # The partition is put where a page is read: at the first token behind a place's beginning.
    beginnings = [part.range.start for part in sample_places(RING, PLACES)]
    tokens = {row.id: row[1] for row in session.execute(f"SELECT DISTINCT id, token(id) FROM {name}")}
    fat = min(tokens, key=lambda id: min(tokens[id] - at for at in beginnings if at < tokens[id]))
    fill(
        session, f"INSERT INTO {name} (id, c, a, b) VALUES (?, ?, 'x', 1)", [(fat, c) for c in range(FAT_PLACES * 200)]
    )
    fill(session, f"INSERT INTO {name} (id, c) VALUES (?, ?)", [(fat, c) for c in range(9000, 12_000)])
    found = forecast(settings, session, keyspace, "large", place_rows=200)
    assert found.at_least
    assert found.rows_high is None
    assert FAT_PLACES * 200 - 10 <= found.largest_partition <= (FAT_PLACES + 1) * 200
    assert found.rows_low <= 25_000 - 4
    assert found.rows == pytest.approx(20_000 + FAT_PLACES * 200, rel=0.15)
    everything = forecast(settings, session, keyspace, "large", place_rows=5000)
    assert everything.exact
    assert everything.rows == everything.rows_high == 25_000 - 4


@pytest.mark.server
def test_a_place_that_cannot_be_read_makes_it_unknown(session: Any, settings: ClusterSettings, keyspace: str) -> None:
    wanting = f"{keyspace}_wanting"
    session.execute(
        f"CREATE KEYSPACE {wanting} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}"
    )
    session.execute(f"CREATE TABLE {wanting}.t (id int PRIMARY KEY, a int)")
    limiter = Limiter()
    schema = read_table(session, wanting, "t")
    query = scan_query(schema, times=False, element_times=False)
    quorum = replace(settings, consistency_level="QUORUM")
    slept: list[float] = []
    found = sample(scan_session(quorum, None), query, RING, quorum, limiter, sleep=slept.append)
    session.execute(f"DROP KEYSPACE {wanting}")
    assert isinstance(found, Unknown)
    assert found.reason.startswith(f"token range ({MIN_TOKEN}, ")
    assert "Unavailable" in found.reason
    assert slept == list(RETRY_DELAYS_S), "one place is enough"
    assert limiter.running == 0
