"""The whole comparison of some tables, with replicas on disk; only Spark and the source are the test's."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ringsync.config import load_config
from ringsync.images.to_changes import image_keys
from ringsync.replica.compare import Comparison
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.splits import ReplicaRange, SizeEstimate, Split, plan_splits
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.sources.lookup.read import RowsRead
from ringsync.sources.scan.plan import ScanPlan, Selection, parted
from ringsync.steps.application import Application
from ringsync.steps.replica import checksums, looks
from ringsync.steps.replica.checksums import Sides, runs_of
from ringsync.steps.replica.examine import Examine, boundaries
from ringsync.wiring import store_of
from tests.replica.bases import state_of
from tests.replica.test_suspects import AHEAD, TABLE, Case, batch, image

HOST = Host("h1", "10.0.0.1", 9042, "dc1", "r1", (0,))
RING = RingSnapshot((HOST,), Replication("SimpleStrategy", (("", 1),)))

EDGES = [-(2**63), *(edge * 2**56 for edge in range(-127, 128)), 2**63 - 1]
"""Bounds of 256 token ranges."""
ALL = TokenRange(EDGES[0], EDGES[-1])


class Context:
    """Does what Spark's would, here."""

    defaultParallelism = 2

    def getConf(self) -> Any:
        return {}

    def parallelize(self, groups: Sequence[Any], count: int) -> Any:
        def of(task: Callable[[Iterable[Any]], Any]) -> list[Any]:
            return [result for group in groups for result in task(iter([group])) or ()]

        return SimpleNamespace(
            mapPartitions=lambda task: SimpleNamespace(collect=partial(of, task)), foreachPartition=of
        )


class Examined:
    """A replica, and a source whose rows may change between two looks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, replica: list[Any], source: list[Any]) -> None:
        self.case, self.source, self.later = Case(folder, replica), source, source
        self.monkeypatch, self.scans = monkeypatch, 0
        conf = folder / "ringsync.yaml"
        document = {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "."}}
        conf.write_text(yaml.safe_dump({**document, "verify": {"ranges": 4, "wait_s": 0}}))
        config = load_config(conf)
        self.application = Application(
            *("replica_verify", str(conf), config, store_of(config), None, "r", argparse.Namespace())
        )
        self.edges = boundaries(config)

    def __call__(self, chosen: tuple[int, ...] | None = None, **more: Any) -> Comparison:
        def scan(config: Any, plan: ScanPlan, split: Split, permits: Any) -> Iterator[pa.RecordBatch]:
            self.scans += 1
            for part in split.ranges:
                rows = [one for one in self.source if part.range.start < one["token"] <= part.range.end]
                yield batch(rows)

        def lookup(session: Any, table: Any, keys: pa.RecordBatch, *rest: Any, **more: Any) -> RowsRead:
            known = set(keys["partition_key"].to_pylist())
            there = batch(self.later)
            mask = [key in known for key in image_keys(there, TABLE)[0].to_pylist()] if self.later else []
            return RowsRead(there.filter(pa.array(mask, pa.bool_())), np.zeros(0, np.int64), ())

        self.monkeypatch.setattr(checksums, "read_split", scan)
        self.monkeypatch.setattr(looks, "read_rows", lookup)
        self.monkeypatch.setattr(looks, "scan_session", lambda *_: None)
        self.monkeypatch.setattr(looks, "at_permitted", lambda _session, _table, level, _hosts, ask: ask(level))
        splits = [
            Split((ReplicaRange(TokenRange(start, end), ("10.0.0.1",)),))
            for start, end in zip(self.edges, self.edges[1:], strict=False)
        ]
        plan = ScanPlan(TABLE, Selection(), 1000, True, True, "LOCAL_QUORUM", "raw", "", tuple(splits))
        sides = Sides(plan, replace(state_of(self.case.folder, TABLE), as_of_us=6), True, chosen)
        shared: Any = SimpleNamespace(session=None, ring=lambda keyspace: RING)
        spark: Any = SimpleNamespace(sparkContext=Context())
        with Examine(self.application, shared, lambda: spark, lambda: 1000.0) as examine:
            (found,) = examine([replace(sides, **more)])
        assert isinstance(found, Comparison), found
        assert self.application.store.list("verify/") == []
        return found


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Examined]:
    monkeypatch.setattr(looks, "why_behind", lambda *_: "")
    return partial(Examined, tmp_path, monkeypatch)


def many(count: int, **row: Any) -> list[Any]:
    """Rows all over the ring."""
    width = 2**64 // count
    return [{**image(n, **row), "token": -(2**63) + width // 2 + n * width} for n in range(count)]


def test_equal_sides_are_read_once(examined: Callable[..., Examined]) -> None:
    table = examined(many(40), many(40))
    found = table()
    assert (found.is_equal, found.source_rows, found.differing_ranges, found.rows["equal"]) == (True, 40, (), 0)
    assert table.scans == 4


def test_a_large_source_is_read_in_pieces_also_in_a_run_for_many_tables(examined: Callable[..., Examined]) -> None:
    """The plan of a table among many has one split: the source of a table of a TiB was one piece of 148 GiB."""
    table = examined([], [])
    edges = EDGES
    ring = (
        ReplicaRange(TokenRange(edges[0], edges[100] + 7), ("a",)),
        ReplicaRange(TokenRange(edges[100] + 7, edges[-1]), ("b",)),
    )
    plan = ScanPlan(TABLE, Selection(), 1000, True, True, "LOCAL_QUORUM", "raw", "", (Split(ring),))
    seen = replace(state_of(table.case.folder, TABLE), base_rows=10**10, base_bytes=2**40)
    found = [piece for _, piece in checksums.pieces(0, Sides(plan, seen, True, tuple(range(90, 127))), edges, 2)]
    sides = Counter(piece.side for piece in found)
    assert sides == {"source": 37, "replica": 37}
    parts = sorted(part.range for piece in found if isinstance(piece.part, Split) for part in piece.part.ranges)
    assert (parts[0].start, parts[-1].end) == (edges[90], edges[127])
    assert all(one.end == other.start for one, other in itertools.pairwise(parts))


@pytest.mark.parametrize("size", ["base_rows", "changed_bytes"])
def test_a_part_of_the_ranges_is_cut_by_its_own_size(examined: Callable[..., Examined], size: str) -> None:
    """The daily verification has a seventh of the ranges: once the share was not counted, once it was taken twice."""
    plan = ScanPlan(TABLE, Selection(), 1000, True, True, "ONE", "raw", "", (Split((ReplicaRange(ALL, ("a",)),)),))
    nothing: dict[str, Any] = {"base_rows": 0, "base_bytes": 0, "changed_rows": 0, "changed_bytes": 0}
    most = {"base_rows": checksums.ROWS_OF_A_TASK, "changed_bytes": checksums.CHANGES_OF_A_TASK}[size]
    seen = replace(state_of(examined([], []).case.folder, TABLE), **nothing | {size: 80 * most})
    sides = Sides(plan, seen, True, tuple(range(64)))
    assert Counter(piece.side for _, piece in checksums.pieces(0, sides, EDGES, 1)) == {"source": 20, "replica": 20}
    if size == "base_rows":
        spark = MagicMock()
        spark.sparkContext.defaultParallelism = 1
        read: Any = SimpleNamespace(
            _spark=lambda: spark, _edges=EDGES, _application=SimpleNamespace(config_path="ringsync.yaml")
        )
        ranges = runs_of(range(0, 64, 2), EDGES)
        Examine.source_images(read, sides, 20 * most, tuple(ranges), "ONE")
        option = spark.read.format.return_value.option.return_value.option
        assert len(ScanPlan.from_json(option.call_args.args[1]).splits) == 10


def test_tasks_of_a_comparison_that_start_together_ask_different_nodes() -> None:
    """They had the order of the tokens: all read from the same few nodes, which changed around the ring."""
    cut = WHOLE_RING.split(12)
    hosts = tuple(Host(str(n), f"10.0.0.{n}", 9042, "dc", f"r{n % 3}", (cut[n].end,)) for n in range(12))
    ring = RingSnapshot(hosts, Replication("NetworkTopologyStrategy", (("dc", 3),)))
    size = {"split_size_bytes": 2**28, "minimum": 1, "maximum": 10_000}
    splits = plan_splits(ring, SizeEstimate(10**7, 96 * 2**28), datacenter="dc", **size)
    plan = ScanPlan(TABLE, Selection(), 1000, True, True, "LOCAL_QUORUM", "raw", "", splits)
    parts = checksums.parts_of(range(len(EDGES) - 1), 9_600_000, 0, 8)
    tasks = parted(plan, [runs_of(part, EDGES) for part in parts]).splits
    assert len(tasks) > len(splits)
    asked = [len({split.endpoint for split in tasks[at : at + 8]}) for at in range(len(tasks) - 8)]
    assert sum(asked) / len(asked) > 6
    assert all(len(split.ranges) > 1 for split in tasks if split.ranges[0].range.width > 1), (
        "a task reads two at a time"
    )


def test_differences_are_counted_and_their_ranges_named(examined: Callable[..., Examined]) -> None:
    source = many(40)
    source[3], source[39] = {**source[3], "v": 9}, {**source[39], "_row": {**source[39]["_row"], "writetime": AHEAD}}
    table = examined(many(40), source)
    found = table()
    assert (found.rows["different"], found.rows["equal"], found.is_equal) == (2, 18, False)
    assert found.differences_by_kind == {"value": 1, "writetime": 1}
    assert [one.key["id"] for one in found.differences] == [3, 39] or len(found.differences) == 2
    assert found.wrong == {0, 3}
    assert found.wrong_ranges == ((table.edges[0], table.edges[1]), (table.edges[3], table.edges[4]))


def test_what_comes_between_the_looks_is_equal(examined: Callable[..., Examined]) -> None:
    source = many(40)
    source[3] = {**source[3], "v": 9, "_row": {**source[3]["_row"], "writetime": 77}}
    table = examined(many(40), source)
    table.later = many(40)
    table.later[3] = {**source[3], "v": 10, "_row": {**source[3]["_row"], "writetime": 99}}
    ended = looks.judge_all

    def meanwhile(*arguments: Any) -> None:
        table.case.take(source[3])
        ended(*arguments)

    table.monkeypatch.setattr(looks, "judge_all", meanwhile)
    found = table()
    assert (found.is_equal, found.rows["equal"], len(found.differing_ranges)) == (True, 10, 1)


def test_while_the_replica_is_behind_nothing_is_judged(examined: Callable[..., Examined]) -> None:
    source = many(40, v=2, at=9)
    table = examined(many(40), source)
    table.monkeypatch.setattr(looks, "why_behind", lambda *_: "the sync is slow")
    found = table()
    assert (found.rows["not_judged"], found.rows_differing, found.is_equal) == (40, 0, False)
    assert found.why_not_judged == "the sync is slow"
    assert found.wrong_ranges[0] == (table.edges[0], table.edges[1])


def test_a_copy_that_nobody_follows_is_judged_at_once(examined: Callable[..., Examined]) -> None:
    source = [*many(40, v=2, at=9)[:20], *many(40, v=2, at=AHEAD)[20:]]
    table = examined(many(40), source)
    table.monkeypatch.setattr(looks, "why_behind", lambda *_: "nobody brings it")
    found = table(is_followed=False)
    assert (found.rows["changed_after"], found.rows["different"]) == (20, 20)


def test_only_the_chosen_ranges_are_read(examined: Callable[..., Examined]) -> None:
    source = many(40)
    source[3], source[39] = {**source[3], "v": 9}, {**source[39], "v": 9}
    table = examined(many(40), source)
    found = table(chosen=(1, 3))
    assert (found.source_rows, found.replica_rows, found.wrong) == (20, 20, {3})


@pytest.mark.parametrize("chosen", [(), (0,), (0, 1, 2, 3), (0, 2), (1, 2)])
def test_neighbours_are_read_together(chosen: tuple[int, ...]) -> None:
    runs = runs_of(chosen, [0, 10, 20, 30, 40])
    assert [n for start, end in runs for n in range(start // 10, end // 10)] == list(chosen)
    assert len(runs) == sum(n - 1 not in chosen for n in chosen)
