"""The loop that stages logs, cycle by cycle, over a log of which a test knows all rows: only servers are missing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.generations import Clocks
from ringsync.config.sections import Scylla
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.gaps import Gaps
from ringsync.ledger.staging import commit_keys, get_commit, read_block
from ringsync.scylla import progress
from ringsync.scylla.generations import Generation, StreamRange
from ringsync.scylla.progress import Position, Rules
from ringsync.scylla.stream_ids import StreamId
from ringsync.sources.cdc_log import LogRead, grouped
from ringsync.steps import loop
from ringsync.steps.scylla import log_task, log_work, scylla_log_stage
from ringsync.steps.scylla.followed_logs import FollowedLogs, FollowedTable
from ringsync.steps.scylla.positions import read_positions
from ringsync.steps.scylla.scylla_log_stage import LogStager
from ringsync.storage.local import LocalStore
from tests.scylla.generations import streams_of
from tests.scylla.test_log_task import ONE, TTL_S, followed, log_row, moment
from tests.scylla_sim.arithmetic import id_of

NOW = 1_790_000_000_000
MINUTE = 60_000
RULES = Rules(30_000, 15_000, 10 * MINUTE, 60 * MINUTE, 0)
CELLS_TTL_S = 10 * 86_400
NAME, TABLE_ID = ONE.base.full_name, ONE.base.table_id


def generation(time_ms: int, streams: int = 2) -> Generation:
    return Generation(
        time_ms, tuple(StreamRange(end, (StreamId(id_of(end, time_ms % 2**38, end)),)) for end in range(streams))
    )


@dataclass
class Row:
    """A log row.

    :ivar time_ms: its write time, ms
    :ivar seen_ms: since when it can be read; ``arrived_ms``: when its coordinator got it; None: at its write time
    :ivar ttl_s: its TTL, s; 0: it stays for ever; None: that of the day, and it does not expire in the test
    :ivar group: number of its write among those of the ms; ``place``: its place there
    """

    stream: bytes
    time_ms: int
    ck: int
    seen_ms: int = 0
    arrived_ms: int | None = None
    ttl_s: int | None = None
    group: int = 0
    place: int = 0
    is_last: bool = True

    def is_there(self, now_ms: int) -> bool:
        arrived_ms = self.time_ms if self.arrived_ms is None else self.arrived_ms
        is_kept = not self.ttl_s or now_ms < arrived_ms + 1000 * self.ttl_s
        return is_kept and max(self.seen_ms, self.arrived_ms or 0) <= now_ms

    def in_log(self, now_ms: int) -> dict[str, Any]:
        row = log_row(self.time_ms, ck=self.ck, arrived_ms=self.arrived_ms, last=self.is_last)
        of = {"cdc$time": moment(self.time_ms, self.group), "cdc$batch_seq_no": self.place}
        row |= {"cdc$stream_id": self.stream} | of
        if self.ttl_s is None:
            return row
        left_s = self.ttl_s - (now_ms - (self.arrived_ms or self.time_ms)) // 1000 if self.ttl_s else None
        return row | {'TTL("cdc$operation")': left_s, "cdc$ttl": CELLS_TTL_S}


def _order(row: Row) -> tuple[bytes, int, int, int]:
    return row.stream, row.time_ms, row.group, row.place


@dataclass
class Cluster:
    """A table's log, and what can be known of it.

    :ivar ttl_s: the log's TTL; ``ahead_ms``: how far the cluster's clock is ahead of ours
    """

    generations: list[Generation]
    rows: list[Row] = field(default_factory=list)
    has_from_ms: int | None = 0
    now_ms: int = NOW
    failing: Callable[[int, int], bool] = lambda *_: False
    ends_ms: int | None = None
    log_id: str = ""
    rules_of: Rules = RULES
    ttl_s: int = TTL_S
    ahead_ms: int = 0
    begin_ms: int = NOW - 60 * MINUTE

    def read(self, log: Any, streams: Sequence[bytes], start_ms: int, end_ms: int, **_: Any) -> LogRead:
        if self.failing(start_ms, end_ms):
            raise ValueError("a replica is down")
        found = [row for row in self.rows if row.stream in streams and start_ms <= row.time_ms < end_ms]
        now_ms = self.now_ms + self.ahead_ms
        there = sorted((row for row in found if row.is_there(now_ms)), key=_order)
        return LogRead([ONE.page([row.in_log(now_ms) for row in there])], [self.now_ms / 1000], 0.0)

    # What the stager asks of FollowedLogs:
    @property
    def clocks(self) -> Clocks:
        return Clocks(self.ahead_ms, 0, 0, "")

    def look(self, plan: Any, positions: Mapping[str, Position], now_ms: int) -> list[FollowedTable]:
        if self.ends_ms is not None:
            is_done = positions[TABLE_ID].until_ms >= self.ends_ms
            return [] if is_done else [FollowedTable(TABLE_ID, NAME, None, ends_ms=self.ends_ms)]
        requests = {one.time_ms: grouped(one, None) for one in self.generations}
        log = replace(followed(), log_id=self.log_id, ttl_s=self.ttl_s or None)
        return [FollowedTable(TABLE_ID, NAME, log, tuple(self.generations), requests)]

    def rules(self, table: FollowedTable, ttls_s: Sequence[int]) -> Rules:
        return self.rules_of

    def begin(self, table: FollowedTable, now_ms: int) -> Position:
        known = [one.start_ms for one in table.described]
        begun = Position.begin(self.begin_ms, known, RULES.window_ms, self.begin_ms)
        return replace(begun, ttl_s=table.ttl_s, log_id=table.log_id, keys=table.keys)

    def begun_anew(self, table: FollowedTable, known: Position, begins_ms: int, searched_ms: int) -> Position:
        asked: Any = SimpleNamespace(_config=SimpleNamespace(scylla=SimpleNamespace(window_ms=RULES.window_ms)))
        return FollowedLogs.begun_anew(asked, table, known, begins_ms, searched_ms)

    def have_changed(self, tables: Sequence[FollowedTable]) -> set[str]:
        return set()

    def is_there(self, table_id: str) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        return {}


class Sync:
    """A stager that can be killed. Its Spark runs a task at a time."""

    def __init__(self, folder: Path, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.store, self.cluster = LocalStore(folder), cluster
        reader = SimpleNamespace(begin=partial(partial, cluster.read))
        clock = SimpleNamespace(time=lambda: cluster.now_ms / 1000)
        patch.setattr(log_task, "store_of", lambda _: self.store)
        patch.setattr(log_task, "cluster_settings", lambda _: None)
        patch.setattr(log_task, "ControlClient", lambda _: nullcontext())
        patch.setattr(log_task, "LogReader", SimpleNamespace(open=lambda *_: reader))
        patch.setattr(log_task, "time", clock)
        patch.setattr(scylla_log_stage, "time", clock)
        patch.setattr(scylla_log_stage, "FollowedLogs", lambda *_: cluster)
        patch.setattr(
            scylla_log_stage,
            "plan_of",
            lambda store, config, session, interval, before: SimpleNamespace(interval=interval),
        )
        if cluster.has_from_ms is not None:
            patch.setattr(Position, "expired", lambda _, since_ms, now_ms: (since_ms, cluster.has_from_ms))
        patch.setattr(loop, "time", clock)
        self.start()

    def start(self) -> None:
        """Begin with what is durable."""
        config: Any = SimpleNamespace(commitlog_processor_window_interval_ms=MINUTE, scylla=Scylla())
        nothing: Any = SimpleNamespace(put=lambda *_: 0, address=None)
        self.stager = LogStager(config, self.store, None, _Spark(), nothing, nothing)

    def run(self, minutes: float, *, step_ms: int = 15_000) -> None:
        """Let time pass, with a cycle in each step."""
        for _ in range(int(minutes * MINUTE / step_ms)):
            self.stager.cycle()
            self.cluster.now_ms += step_ms

    @property
    def position(self) -> Position:
        return read_positions(self.store)[1][TABLE_ID]

    def staged(self) -> Counter[int]:
        """How often each row is in a commit, by its ``ck``."""
        found: Counter[int] = Counter()
        for key in commit_keys(self.store, CDC_LOGS):
            for block in get_commit(self.store, key).blocks:
                rows = read_block(self.store, block.place)
                found.update(int.from_bytes(key[-4:], "big") for key in rows["clustering"].to_pylist())
        return found

    def gaps(self) -> set[tuple[int, int]]:
        return {(gap.since_ms, gap.found_ms) for gap in Gaps(self.store).look().values() if gap is not None}


class _Spark:
    defaultParallelism = 2

    def parallelize(self, works: list[Any], count: int) -> _Spark:
        self.works = [works[part::count] for part in range(count)]
        return self

    def mapPartitions(self, task: Callable[[Iterable[Any]], Iterator[Any]]) -> _Spark:
        self.found = [result for works in self.works for result in task(works)]
        return self

    def collect(self) -> list[Any]:
        return self.found


@pytest.fixture
def sync_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Sync]:
    return lambda cluster: Sync(tmp_path / "lake", cluster, monkeypatch)


def limited(patch: pytest.MonkeyPatch) -> None:
    """Let a task take few rows."""
    patch.setattr(log_task, "MOST_ROWS", 60)
    for module in (progress, log_work):
        patch.setattr(module, "WANTED_ROWS", 20)


def spread(one: Generation, start_ms: int, end_ms: int, count: int, first_ck: int = 0) -> list[Row]:
    """Rows of a generation, evenly over its streams and a time."""
    streams = streams_of(one)
    step_ms = (end_ms - start_ms) / count
    return [Row(streams[ck % len(streams)], int(start_ms + ck * step_ms), first_ck + ck) for ck in range(count)]


def test_what_the_log_has_forgotten_is_a_gap_even_if_the_window_behind_it_has_too_many_rows(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch)
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only])
    sync = sync_of(cluster)
    sync.run(1)
    until_ms = sync.position.until_ms
    cluster.now_ms += 300 * MINUTE
    cluster.has_from_ms = kept_ms = cluster.now_ms - 60 * MINUTE
    cluster.rows = spread(only, kept_ms, kept_ms + 60 * MINUTE, 2000)
    sync.start()
    sync.run(70)
    gaps = sorted(sync.gaps())
    assert gaps[0][0] <= until_ms
    assert max(behind for _, behind in gaps) == kept_ms
    assert all(one[1] >= other[0] for one, other in pairwise(gaps))
    assert sync.staged() == dict.fromkeys(range(2000), 1)


def test_what_may_have_expired_is_read_all_the_same(sync_of: Callable[[Cluster], Sync]) -> None:
    """Nobody knows when a TTL was changed: what is still there is not given up."""
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only], has_from_ms=NOW - 20 * MINUTE)
    cluster.rows = spread(only, NOW - 60 * MINUTE, NOW, 100)
    sync = sync_of(cluster)
    sync.run(20)
    assert sync.staged() == dict.fromkeys(range(100), 1)
    gaps = sorted(sync.gaps())
    assert (gaps[0][0], gaps[-1][1]) == (NOW - 60 * MINUTE, NOW - 20 * MINUTE)


def test_a_log_that_is_gone_ends_with_a_gap(sync_of: Callable[[Cluster], Sync]) -> None:
    """cdc was switched off, and the log dropped, while the sync stood."""
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only], rows=spread(only, NOW - 60 * MINUTE, NOW, 100))
    sync = sync_of(cluster)
    sync.run(3)
    cluster.now_ms += 60 * MINUTE
    cluster.ends_ms = ends_ms = cluster.now_ms
    sync.start()
    sync.run(1)
    # No sweep has looked for rows that came late since the begin.
    assert sync.gaps() == {(NOW - 60 * MINUTE, ends_ms)}
    assert (sync.position.until_ms, sync.position.ends_ms) == (ends_ms, ends_ms)
    assert not sync.stager.is_failing


def test_a_sweep_that_fails_holds_up_no_window(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old file is damaged; the table is written to, and all that is new goes on as before."""
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only], rows=spread(only, NOW - 60 * MINUTE, NOW + 60 * MINUTE, 1000))
    sync = sync_of(cluster)
    sync.run(3)
    reads = []
    damaged_ms = NOW - 30 * MINUTE

    def failing(start_ms: int, end_ms: int) -> bool:
        reads.append(is_bad := start_ms <= damaged_ms < end_ms)
        return is_bad

    cluster.failing = failing
    for _ in range(20):
        sync.run(1)
        assert cluster.now_ms - sync.position.until_ms < 75_000
        status = sync.stager.status()
        assert status["logs"][NAME]["failing_since_ms"] is None
    told = status["logs"][NAME]
    assert (told["error"], told["sweep_error"]) == (None, "ValueError: a replica is down")
    assert sync.position.near.next_ms is not None
    assert 5 < sum(reads) < 40
    cluster.failing = lambda *_: False
    sync.run(5)
    assert not sync.stager.is_failing


def test_a_new_run_knows_since_when_a_table_has_failed(sync_of: Callable[[Cluster], Sync]) -> None:
    """Else it would hold up the closing of all others for five minutes in each run."""
    only = generation(NOW - 100 * MINUTE)
    sync = sync_of(cluster := Cluster([only], failing=lambda *_: True))
    sync.run(6)
    loop.put_status(sync.store, "scylla_log_stage", scylla_log_stage.STATUS, sync.stager.status() | {"error": None})
    cluster.now_ms += 90_000  # Spark starts
    sync.start()
    sync.run(1)
    assert sync.stager.status()["logs"][NAME]["failing_since_ms"] == NOW
    assert sync.stager.status()["clear_at_ms"] > NOW
    cluster.failing = lambda *_: False
    sync.run(2)
    assert sync.stager.status()["logs"][NAME]["failing_since_ms"] is None


def test_a_generation_that_gets_its_streams_late_does_not_stand_still(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stepped over, and has many times the rows that a task can take."""
    limited(monkeypatch)
    first, middle, last = (generation(NOW - minutes * MINUTE) for minutes in (100, 50, 20))
    cluster = Cluster([first, generation(middle.time_ms, 0), last])
    cluster.rows = [
        *spread(first, NOW - 60 * MINUTE, middle.time_ms, 100),
        *spread(middle, middle.time_ms, last.time_ms, 2000, 100),
        *spread(last, last.time_ms, NOW, 300, 2100),
    ]
    sync = sync_of(cluster)
    sync.run(20)
    assert set(sync.staged()) == {*range(100), *range(2100, 2400)}
    gaps = sorted(sync.gaps())
    assert (gaps[0][0], gaps[-1][1]) == (middle.time_ms, last.time_ms)
    assert all(one[1] == other[0] for one, other in pairwise(gaps))
    cluster.generations[1] = middle
    sync.run(60)
    assert set(sync.staged()) == {*range(2400)}
    assert not sync.stager.is_failing


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_all_rows_are_staged(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rows come late, bursts are larger than a task, requests fail, streams of a generation come late, and the loop is
    killed between any two cycles."""
    chance = random.Random(seed)
    limited(monkeypatch)
    times = sorted(NOW - chance.randrange(90) * MINUTE for _ in range(chance.randrange(1, 4)))
    generations = [generation(time_ms) for time_ms in dict.fromkeys([NOW - 100 * MINUTE, *times])]
    cluster = Cluster(list(generations))
    for one, following in zip(generations, [*generations[1:], None], strict=True):
        start_ms, end_ms = max(one.time_ms, NOW - 60 * MINUTE), following.time_ms if following else NOW + 60 * MINUTE
        while start_ms < end_ms:
            length_ms, count = chance.choice(((MINUTE, 4), (10 * MINUTE, 20), (5_000, 200), (3, 90)))
            rows = spread(one, start_ms, min(end_ms, start_ms + length_ms), count, len(cluster.rows))
            for row in rows:
                late_ms = chance.choice((0, 0, 0, 0, 60_000, 20 * MINUTE)) if chance.random() < 0.2 else 0
                row.seen_ms = row.time_ms + late_ms
            cluster.rows += rows
            start_ms += chance.choice((1, 20)) * MINUTE
    if len(generations) > 2:
        cluster.generations[1] = generation(generations[1].time_ms, 0)
    sync = sync_of(cluster)
    for _ in range(160):
        broken = range(chance.randrange(NOW - 60 * MINUTE, NOW + 60 * MINUTE), NOW + 10**9)
        is_bad = chance.random() < 0.1
        cluster.failing = lambda start_ms, end_ms, bad=is_bad, one=broken: bad and start_ms <= one[0] < end_ms
        sync.run(1, step_ms=chance.choice((5_000, 15_000, 60_000)))
        if chance.random() < 0.1:
            sync.start()
        if chance.random() < 0.05:
            cluster.generations = list(generations)
    cluster.failing, cluster.generations = (lambda *_: False), generations
    sync.run(60)
    assert sync.position.until_ms > NOW + 100 * MINUTE
    assert not sync.position.again
    assert set(sync.staged()) == {row.ck for row in cluster.rows}


def test_what_only_a_far_sweep_can_find_may_have_expired_before_it_looks(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync stands for less than the TTL, but for longer than the TTL less the time between two far sweeps."""
    hour = 60 * MINUTE
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only], has_from_ms=None, rules_of=replace(RULES, far_ms=12 * hour))
    sync = sync_of(cluster)
    sync.run(60, step_ms=5 * MINUTE)
    began_ms = sync.position.far.began_ms
    for stop_ms, has_gap in ((11 * hour, False), (20 * hour, True)):
        cluster.now_ms += stop_ms
        before_ms = sync.position.far.began_ms
        sync.start()
        sync.run(20, step_ms=MINUTE)
        assert sync.position.far.before_ms == before_ms
        assert sync.position.far.next_ms is None
        assert bool(sync.gaps()) == has_gap
        sync.run(8 * 60, step_ms=30 * MINUTE)
    ((since_ms, until_ms),) = sync.gaps()
    assert since_ms == before_ms - 60_000
    assert since_ms < until_ms < cluster.now_ms - 1000 * TTL_S
    assert began_ms < before_ms


def test_a_log_that_was_dropped_and_made_again_is_a_gap(
    sync_of: Callable[[Cluster], Sync], monkeypatch: pytest.MonkeyPatch
) -> None:
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only])
    sync = sync_of(cluster)
    cluster.log_id = "aa" * 16
    sync.run(2)
    assert sync.position.log_id == "aa" * 16
    cluster.now_ms = made_ms = cluster.now_ms + 60 * MINUTE
    cluster.log_id = "bb" * 16
    cluster.rows = spread(only, made_ms - 5 * MINUTE, made_ms, 20)
    sync.start()
    sync.run(5)
    assert sync.gaps() == {(NOW - 60 * MINUTE, made_ms)}
    assert sync.staged() == dict.fromkeys(range(20), 1)


def test_a_gap_is_judged_when_the_reading_is_over(sync_of: Callable[[Cluster], Sync]) -> None:
    """Rows expire while a request waits."""
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only], has_from_ms=NOW - 61 * MINUTE)
    sync = sync_of(cluster)

    def slow(*_: int) -> bool:
        cluster.has_from_ms = NOW - 50 * MINUTE
        return False

    cluster.failing = slow
    sync.run(3)
    gaps = sorted(sync.gaps())
    assert (gaps[0][0], gaps[-1][1]) == (NOW - 60 * MINUTE, NOW - 50 * MINUTE)


def test_a_sweep_that_fails_slowly_is_tried_seldom(sync_of: Callable[[Cluster], Sync]) -> None:
    only = generation(NOW - 100 * MINUTE)
    cluster = Cluster([only])
    sync = sync_of(cluster)
    sync.run(3)
    tries = []

    def failing(start_ms: int, _: int) -> bool:
        is_bad = start_ms < NOW - 40 * MINUTE
        if is_bad:
            tries.append(cluster.now_ms)
            cluster.now_ms += 65_000  # there are two streams in a request for each of two tasks
        return is_bad

    cluster.failing = failing
    sync.run(120)
    assert len(tries) >= 2
    assert all(other - one >= 500_000 for one, other in pairwise(tries[::2]))


def test_a_table_that_is_dropped_is_no_trouble_any_more(sync_of: Callable[[Cluster], Sync]) -> None:
    sync = sync_of(cluster := Cluster([generation(NOW - 100 * MINUTE)]))
    sync.run(1)
    cluster.failing = lambda *_: True
    sync.run(1)
    assert sync.stager.is_failing
    cluster.ends_ms = 0  # it is not looked at any more
    sync.run(1)
    assert not sync.stager.is_failing
