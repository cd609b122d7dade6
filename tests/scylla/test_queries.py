"""How many requests the reading of a log takes, hour by hour: docs/scylla.md has these figures."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.control import ControlServer
from ringsync.cluster.generations import Streams
from ringsync.cluster.scylla import CdcOptions
from ringsync.config import Config
from ringsync.config.sections import Scylla
from ringsync.ring.ranks import RankedRing
from ringsync.ring.ring import Host
from ringsync.ring.tokens import TokenRange
from ringsync.scylla.generations import Generation, StreamRange
from ringsync.scylla.progress import Position, Rules
from ringsync.scylla.stream_ids import StreamId
from ringsync.service import table_checks
from ringsync.service.table_checks import check_cdc_logs, tell_load
from ringsync.sources.cdc_log import STREAMS_AT_ONCE, grouped
from ringsync.steps import loop
from ringsync.steps.application import Application
from ringsync.steps.scylla import scylla_log_stage
from ringsync.steps.scylla.followed_logs import LONGEST_ROUND_MS, FollowedTable
from ringsync.steps.scylla.log_task import TableResult
from ringsync.steps.scylla.log_work import affordable, plan_work
from ringsync.steps.scylla.scylla_log_stage import CYCLE_S
from ringsync.storage.local import LocalStore
from tests.scylla.generations import streams_of
from tests.scylla_sim.arithmetic import id_of

NOW = 1_790_000_000_000
HOUR = 3_600_000
RULES = Rules(30_000, 15_000, HOUR, 12_600_000, 43_200_000)


def generation(nodes: int, shards: int, vnodes: int) -> Generation:
    chance = random.Random(nodes)
    ends = sorted({chance.randrange(-(2**63), 2**63) for _ in range(nodes * vnodes)})
    ranges = [
        StreamRange(end, tuple(StreamId(id_of(before + 1, shard, index)) for shard in range(shards)))
        for index, (before, end) in enumerate(pairwise([ends[0] - 10**6, *ends]))
    ]
    return Generation(NOW - 10**9, tuple(ranges))


def followed(of: Generation) -> FollowedTable:
    log: Any = SimpleNamespace(ttl_s=None, log_id="")
    return FollowedTable("a" * 32, "shop.orders", log, (of,), {of.time_ms: grouped(of, None)})


def requests(table: FollowedTable, begin_ms: int, until_ms: int, rules: Rules, rows: int) -> tuple[Counter[str], int]:
    """The requests of each kind until a moment, by a reader that begins now; and when it had caught up."""
    position, now, caught_up = Position.begin(begin_ms, [table.generations[0].time_ms], 15_000), NOW, 0
    counts: Counter[str] = Counter()
    while now < until_ms:
        planned = plan_work(table, position, 0, now, rules)
        if planned.is_due:
            for work in planned.works:
                counts["window" if work.piece.kind == "window" else "sweep"] += 1
            read = Counter({"window_rows": rows, "near_rows": rows, "far_rows": rows})
            position = planned.taken(TableResult(read))
        caught_up = caught_up or (now if now - position.until_ms <= rules.confidence_ms + rules.window_ms else 0)
        now += 1000
    return counts, caught_up


def test_streams_share_requests_as_far_as_scylla_allows() -> None:
    small, large = generation(3, 8, 256), generation(4, 64, 16)
    assert [len(streams) for streams, _ in grouped(small, None)] == [96] * 64
    assert [len(streams) for streams, _ in grouped(large, None)] == [64] * 64
    huge = grouped(generation(1, 250, 2), None)
    assert [len(streams) for streams, _ in huge] == [100, 100, 50, 100, 100, 50]
    named = [stream for streams, _ in grouped(small, None) for stream in streams]
    assert named == streams_of(small)
    assert max(len(streams) for streams, _ in huge) <= STREAMS_AT_ONCE


def test_the_node_that_is_asked_has_all_streams_of_a_request() -> None:
    """Twelve nodes in three racks: neighbours on the ring lie on other nodes."""
    of, chance = generation(12, 8, 256), random.Random(1)
    owners = [chance.sample(range(12), 3) for _ in of.ranges]

    def host(node: int) -> Host:
        return Host(str(node), f"10.0.0.{node}", 9042, "dc1", f"r{node % 3}", (), is_local=node != 11)

    ends = [one.end for one in of.ranges]
    ranges = tuple(TokenRange(before, end) for before, end in pairwise([ends[-1], *ends]))
    snapshot: Any = SimpleNamespace(digest="")
    ring = RankedRing(snapshot, ranges, tuple(tuple(map(host, nodes)) for nodes in owners))
    local = {
        stream.data: {host(node).endpoint for node in nodes if node != 11}
        for one, nodes in zip(of.ranges, owners, strict=True)
        for stream in one.streams
    }
    found = grouped(of, ring)
    assert sorted(stream for streams, _ in found for stream in streams) == sorted(local)
    assert max(len(streams) for streams, _ in found) <= STREAMS_AT_ONCE
    assert len(found) <= 1.1 * len(grouped(of, None)), "requests are hardly more than without a ring"
    for streams, endpoints in found:
        assert endpoints
        assert all(set(endpoints) <= local[stream] for stream in streams)


@pytest.mark.parametrize("rows", [0, 100])
def test_an_hour_of_three_nodes(rows: int) -> None:
    """64 requests in 15 s; sweeps read the last hours again once in an hour."""
    counts, _ = requests(followed(generation(3, 8, 256)), NOW - 30_000, NOW + HOUR, RULES, rows)
    assert counts["window"] <= 64 * 245
    assert counts["sweep"] <= 64 * 12


def test_a_cold_start_takes_few_rounds() -> None:
    """A day that is behind: some rounds over all streams, not one for each window of a day."""
    table = followed(generation(3, 8, 256))
    counts, caught_up = requests(table, NOW - 24 * HOUR, NOW + 60_000, RULES, 100)
    assert NOW < caught_up <= NOW + 20_000
    assert counts["window"] <= 64 * 16


def test_a_hundred_nodes_are_not_asked_more_often_than_agreed() -> None:
    """25,600 token ranges with 64 streams each: windows are longer, so that it is 500 requests a second at most."""
    of = generation(100, 64, 4)
    scale = 256 // 4
    round_of_all = scale * len(grouped(of, None))
    assert round_of_all == 25_600
    rules = replace(RULES, window_ms=min(1000 * round_of_all // 500, LONGEST_ROUND_MS))
    assert rules.window_ms == 51_200
    counts, _ = requests(followed(of), NOW - 60_000, NOW + HOUR, rules, 100)
    assert counts["window"] * scale <= 500 * 3600 * 1.05
    assert counts["sweep"] * scale <= 12 * 25_600


def test_a_cycle_has_no_more_requests_than_it_has_time_for_and_leaves_out_no_table() -> None:
    """Two hundred tables of three nodes: 12,800 requests ask all of them once, 25.6 s at 500 a second."""
    table, most = followed(generation(3, 8, 256)), Scylla().queries_per_s * CYCLE_S
    position = Position.begin(NOW - 60_000, [table.generations[0].time_ms], 15_000)
    due = [plan_work(replace(table, table_id=f"{n:032x}"), position, 0, NOW, RULES) for n in range(200)]
    assert sum(len(one.works) for one in due) == 12_800
    read: Counter[str] = Counter()
    for number in range(200):
        chosen = affordable(due, most, number)
        assert sum(len(one.works) for one in chosen) <= most
        read.update(one.table.table_id for one in chosen)
    assert len(read) == 200
    assert max(read.values()) - min(read.values()) <= 1
    (huge,) = affordable([replace(due[0], works=due[0].works * 999)], most, 7)
    assert len(huge.works) > most, "one table is read in any case"


def test_start_says_what_a_cluster_of_this_size_needs() -> None:
    assert tell_load(0, 0, Scylla()) == []
    (enough,) = tell_load(64, 1, Scylla())
    assert enough == "64 requests ask the streams of 1 tables once: 0 s at scylla.queries_per_s (500)"
    (warned,) = tell_load(25_600, 1, Scylla())
    assert warned.startswith("warning: 25,600 requests ask the streams of 1 tables once: 51 s at scylla.queries_per_s")
    assert "set it to 1,707" in warned


def configured(**scylla: Any) -> Config:
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "/lake"}}
    return Config.model_validate({**document, "sync": {"exclude": ["shop.left"]}, "scylla": scylla})


def test_start_counts_the_requests_of_the_tables_that_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables with vnodes share their streams, which are read once; one with tablets has its own, or none yet."""
    names = [("shop", "orders"), ("shop", "items"), ("shop", "left"), ("tablets", "events"), ("tablets", "new")]
    rows = [SimpleNamespace(keyspace_name=keyspace, table_name=table) for keyspace, table in names]
    of_vnodes, of_events = Streams(), Streams(("tablets", "events"))
    generations = {(of_vnodes, 7): generation(3, 8, 256), (of_events, 9): generation(1, 250, 2)}
    times = {of_vnodes: [3, 7], of_events: [9]}
    read: list[Streams] = []
    monkeypatch.setattr(table_checks, "options_in", lambda _: CdcOptions(enabled=True))
    monkeypatch.setattr(table_checks, "check_readable", lambda *_: None)
    monkeypatch.setattr(table_checks, "has_tablets", lambda _, keyspace: keyspace == "tablets")
    monkeypatch.setattr(table_checks, "vnode_streams", lambda _: of_vnodes)
    monkeypatch.setattr(table_checks, "read_times", lambda _, streams: times.get(streams, []))
    monkeypatch.setattr(
        table_checks,
        "read_generation",
        lambda _, streams, time_ms: read.append(streams) or generations[streams, time_ms],
    )
    session = SimpleNamespace(execute=lambda _: rows)
    told = check_cdc_logs(session, configured(queries_per_s=8))
    assert read == [of_vnodes, of_events]
    asked = "134 requests ask the streams of 4 tables once: 17 s at scylla.queries_per_s (8)"
    assert [one for one in told if one.startswith(f"warning: {asked}, so changes come that much later")]
    assert f"{asked.replace('17', '1').replace('(8)', '(100)')}" in check_cdc_logs(
        session, configured(queries_per_s=100)
    )


class Served(Exception):
    """The loop has a server that gives permits."""


class Server(ControlServer):
    """A server that only says that it is made."""

    def __enter__(self) -> ControlServer:
        raise Served(self)


def test_the_loop_asks_as_often_as_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = SimpleNamespace(sparkContext=None)
    monkeypatch.setattr("ringsync.replica.session.spark_session", lambda *_: spark)
    for name in ("start_workers", "connect_patiently"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    for name, told in {"is_scylla": True, "create_state": None, "driver_host": "127.0.0.1"}.items():
        monkeypatch.setattr(scylla_log_stage, name, lambda *_, told=told: told)
    monkeypatch.setattr(scylla_log_stage, "ControlServer", Server)
    given: Any = (configured(queries_per_s=50), LocalStore(tmp_path), None, "run", SimpleNamespace())
    with pytest.raises(Served) as caught:
        scylla_log_stage.run(Application("scylla_log_stage", "conf", *given))
    assert caught.value.args[0].limiter._request_price == 1 / 50
