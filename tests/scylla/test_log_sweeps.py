"""What sweeps owe, in the default configuration: rows that come late are staged, or a gap is told.

The rows of the model expire by their own TTL, and become readable when they arrive.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.generations import Clocks
from ringsync.config.sections import Scylla
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.staging import commit_keys, decode_rows, get_commit, read_block
from ringsync.scylla.progress import Position, Rules
from ringsync.steps import loop
from ringsync.steps.scylla import scylla_log_stage
from ringsync.steps.scylla.followed_logs import FollowedLogs, FollowedTable, NotYetError
from tests.bounded import as_long_as
from tests.scylla.generations import streams_of
from tests.scylla.test_log_stager import CELLS_TTL_S, MINUTE, NAME, NOW, TABLE_ID, Cluster, Row, Sync, generation
from tests.scylla.test_log_task import HOUR, TTL_S

ONLY = generation(NOW - 400 * HOUR, 1)
(STREAM,) = streams_of(ONLY)


class Log(Cluster):
    """A log of one stream that is read by the rules of the default configuration.

    :ivar settings: what differs from it
    """

    settings: Scylla = Scylla()

    def rules(self, table: FollowedTable, ttls_s: Sequence[int]) -> Rules:
        config = SimpleNamespace(scylla=self.settings, sync=SimpleNamespace(digest_retention_h=4.0))
        asked: Any = SimpleNamespace(_config=config, _requests={}, clocks=Clocks(0, 0, 0, ""))
        return FollowedLogs.rules(asked, table, ttls_s)

    def add(self, count: int, arrived_ms: Callable[[int], int], late_ms: int, ttl_s: int | None = None) -> None:
        """Let rows arrive late."""
        for number in range(count):
            at_ms, ck = arrived_ms(number), len(self.rows)
            self.rows.append(Row(STREAM, at_ms - late_ms, ck, at_ms, at_ms, self.ttl_s if ttl_s is None else ttl_s))


@pytest.fixture
def sync_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Log], Sync]:
    return lambda log: Sync(tmp_path / "lake", log, monkeypatch)


def log_of(**more: Any) -> Log:
    return Log([ONLY], has_from_ms=None, **more)


def staged(sync: Sync) -> Counter[int]:
    """How often each row was staged, by its ``ck``: also as a late one."""
    found = sync.staged()
    for key in commit_keys(sync.store, CDC_LOGS):
        for late in get_commit(sync.store, key).late:
            found.update(
                int.from_bytes(one[-4:], "big") for one in decode_rows(sync.store.get(late))["clustering"].to_pylist()
            )
    return found


def is_told(sync: Sync, row: Row) -> bool:
    """Whether a gap has the row, by its write time or its arrival."""
    assert row.arrived_ms is not None
    times = (row.time_ms, row.arrived_ms)
    return any(since - MINUTE <= at <= until + MINUTE for since, until in sync.gaps() for at in times)


def lost(sync: Sync, log: Log) -> list[Row]:
    found = staged(sync)
    return [row for row in log.rows if row.ck not in found and not is_told(sync, row)]


@pytest.mark.parametrize(("hours", "has_stopped"), [(1, True), (12, True), (3, False)])
def test_a_slot_that_was_half_read_is_compared_after_a_stop(
    sync_of: Callable[[Log], Sync], hours: int, has_stopped: bool
) -> None:
    sync = sync_of(log := log_of())
    sync.run(120, step_ms=MINUTE)
    base_ms = log.now_ms
    log.add(360, lambda number: base_ms - 19 * MINUTE + number * 5_000, MINUTE)
    sync.run(8.5)
    assert sync.position.until_ms % (5 * MINUTE), "a slot is half read"
    if has_stopped:
        log.now_ms += hours * HOUR
        sync.start()
    else:
        log.failing = lambda *_: True
        sync.run(60 * hours, step_ms=MINUTE)
        log.failing = lambda *_: False
    sync.run(240, step_ms=30_000)
    sync.run(20 * 60, step_ms=5 * MINUTE)
    assert staged(sync).keys() == {row.ck for row in log.rows}
    assert not sync.gaps()


@pytest.mark.parametrize("ttl_s", [1800, TTL_S])
def test_near_sweeps_are_as_frequent_as_the_ttl_demands(sync_of: Callable[[Log], Sync], ttl_s: int) -> None:
    sync = sync_of(log := log_of(ttl_s=ttl_s, begin_ms=NOW - 5 * MINUTE))
    log.add(180, lambda number: NOW + 25 * MINUTE + number * 2 * MINUTE, 5 * MINUTE)
    sync.run(9 * 60, step_ms=30_000)
    assert staged(sync).keys() == {row.ck for row in log.rows}
    assert not sync.gaps()


def test_what_has_expired_before_a_near_sweep_could_see_it_is_a_gap(sync_of: Callable[[Log], Sync]) -> None:
    """After a stop a little shorter than the TTL."""
    sync = sync_of(log := log_of())
    sync.run(14 * 60, step_ms=MINUTE)
    base_ms = log.now_ms
    log.add(60, lambda number: base_ms + number * MINUTE, 5 * MINUTE)
    sync.run(60, step_ms=MINUTE)
    log.now_ms += 23 * HOUR + 48 * MINUTE
    sync.start()
    sync.run(30 * 60, step_ms=5 * MINUTE)
    assert len(staged(sync)) < 60
    assert sync.gaps()
    assert not lost(sync, log)


def test_what_has_expired_while_near_sweeps_failed_is_a_gap(sync_of: Callable[[Log], Sync]) -> None:
    """An old file is damaged, and mended 30 hours later; windows go on meanwhile."""
    sync = sync_of(log := log_of())
    sync.run(3 * 60, step_ms=5 * MINUTE)
    base_ms = log.now_ms
    log.add(30, lambda number: base_ms + number * 20 * MINUTE, 20 * MINUTE)
    log.failing = lambda start_ms, end_ms: start_ms <= base_ms - 20 * MINUTE < end_ms and start_ms > NOW - 100 * HOUR
    sync.run(30 * 60, step_ms=5 * MINUTE)
    log.failing = lambda *_: False
    sync.run(10 * 60, step_ms=5 * MINUTE)
    assert len(staged(sync)) < 30
    assert not lost(sync, log)


@pytest.mark.parametrize("near_h", [1, 6])
def test_a_row_that_is_not_late_is_staged_once(sync_of: Callable[[Log], Sync], near_h: int) -> None:
    """However seldom near sweeps are to be: far ones would take what those have not seen several times."""
    log = log_of()
    log.settings = Scylla(near_sweep_ms=near_h * HOUR)
    sync = sync_of(log)
    log.add(24 * 12, lambda number: NOW + number * 5 * MINUTE, 0)
    sync.run(50 * 60, step_ms=5 * MINUTE)
    assert staged(sync) == dict.fromkeys(range(len(log.rows)), 1)


@pytest.mark.parametrize(
    "ttls_h", [(48,), (12,), (0,), (36, 48), (36, 24), (0, 24), (48, 36, 24)], ids=lambda ttls: "-".join(map(str, ttls))
)
def test_old_timestamps_are_found_whatever_the_ttl_was_when_they_came(
    sync_of: Callable[[Log], Sync], ttls_h: tuple[int, ...]
) -> None:
    """But for those that were logged without a TTL: nothing says when they came."""
    sync = sync_of(log := log_of())
    sync.run(120, step_ms=10 * MINUTE)
    for ttl_h in (24, *ttls_h):
        log.ttl_s = ttl_h * 3600
        sync.run(1, step_ms=MINUTE)
        log.add(1, lambda _: log.now_ms, 5 * HOUR)
        sync.run(10, step_ms=MINUTE)
    sync.run(40 * 60, step_ms=10 * MINUTE)
    assert staged(sync).keys() == {row.ck for row in log.rows if row.ttl_s}


@pytest.mark.parametrize("ttl_h", [12, 18, 48])
def test_cells_expire_by_the_ttl_that_their_log_row_had(sync_of: Callable[[Log], Sync], ttl_h: int) -> None:
    """The TTL of a log is altered while the sync is behind."""
    sync = sync_of(log := log_of())
    sync.run(60, step_ms=MINUTE)
    base_ms = log.now_ms
    log.add(80, lambda number: base_ms + number * 5 * MINUTE, 0)
    log.ttl_s = ttl_h * 3600
    log.add(4, lambda number: base_ms + (80 + number) * 5 * MINUTE, 0)
    log.now_ms += 80 * 5 * MINUTE
    sync.start()
    sync.run(60, step_ms=MINUTE)
    found = Counter[int]()
    for key in commit_keys(sync.store, CDC_LOGS):
        commit = get_commit(sync.store, key)
        batches = [read_block(sync.store, block.place) for block in commit.blocks]
        batches += [decode_rows(sync.store.get(late)) for late in commit.late]
        rows = (row for batch in batches for row in batch.to_pylist())
        found.update(row["cells"][0]["local_deletion_time"] - CELLS_TTL_S - row["write_time"] // 10**6 for row in rows)
    assert found.keys() == {0}


@pytest.mark.parametrize("ahead_s", [-600, 600])
def test_sweeps_go_by_the_clock_of_the_cluster(sync_of: Callable[[Log], Sync], ahead_s: int) -> None:
    sync = sync_of(log := log_of(ahead_ms=1000 * ahead_s))
    sync.run(10 * 60, step_ms=10 * MINUTE)
    base_ms = log.now_ms + log.ahead_ms
    log.add(6 * 60 * 3, lambda number: base_ms + number * 10_000, 5 * HOUR)
    sync.run(4 * 60, step_ms=20_000)
    sync.run(40 * 60, step_ms=10 * MINUTE)
    assert staged(sync).keys() == {row.ck for row in log.rows}
    assert not sync.gaps()


@pytest.mark.parametrize("is_again", [True, False], ids=["again", "dropped"])
def test_what_a_lost_log_had_of_late_rows_is_in_the_gap(sync_of: Callable[[Log], Sync], is_again: bool) -> None:
    sync = sync_of(log := log_of(log_id="aa" * 16))
    sync.run(180, step_ms=MINUTE)
    base_ms = log.now_ms
    log.add(60, lambda number: base_ms + number * 50_000, 5 * MINUTE)
    sync.run(50)
    if is_again:
        log.log_id = "bb" * 16
        for row in log.rows:
            row.ttl_s = 1
    else:
        log.ends_ms = log.now_ms + 5_000
    sync.run(180, step_ms=30_000)
    assert len(staged(sync)) < 60
    assert not lost(sync, log)


def test_a_log_that_begins_within_a_slot_is_read_once(sync_of: Callable[[Log], Sync]) -> None:
    """As with tablets: nothing is older than the switch of cdc."""
    log = log_of(begin_ms=NOW - 57 * MINUTE)
    sync = sync_of(log)
    log.add(360, lambda number: log.begin_ms + number * 10_000, 0)
    late_ms = NOW - 20 * MINUTE
    log.rows.append(Row(STREAM, log.begin_ms + 5, 360, late_ms, late_ms, log.ttl_s))
    sync.run(20 * 60, step_ms=5 * MINUTE)
    found = staged(sync)
    assert found.keys() == set(range(361))
    assert {found[ck] for ck in range(100, 360)} == {1}


def test_a_ttl_that_was_seen_while_nothing_could_be_read_counts(sync_of: Callable[[Log], Sync]) -> None:
    sync = sync_of(log := log_of())
    sync.run(120, step_ms=MINUTE)
    base_ms, log.failing, log.ttl_s = log.now_ms, lambda *_: True, 3600
    log.add(12, lambda number: base_ms + MINUTE + number * 5 * MINUTE, 0)
    sync.run(120, step_ms=MINUTE)
    log.ttl_s = TTL_S
    sync.run(10, step_ms=MINUTE)
    log.failing = lambda *_: False
    sync.run(20 * 60, step_ms=5 * MINUTE)
    assert not lost(sync, log)
    assert sync.gaps()


def test_a_smaller_ttl_is_no_gap_while_all_goes_on(sync_of: Callable[[Log], Sync]) -> None:
    sync = sync_of(log := log_of())
    sync.run(11 * 60, step_ms=5 * MINUTE)
    log.ttl_s = 6 * 3600
    sync.run(12 * 60, step_ms=5 * MINUTE)
    assert not sync.gaps()


class Switched(Log):
    """A table whose cdc is switched on and off; the log stays. When it is off, the real code says what is left."""

    is_on = True
    unwatched_since_ms: int | None = None
    seen_ms: int | None = None

    def look(self, plan: Any, positions: Mapping[str, Position], now_ms: int) -> list[FollowedTable]:
        (one,) = super().look(plan, positions, now_ms)
        asked: Any = self.__dict__.setdefault("asked", SimpleNamespace(_left_ms={}, _requests={}, _back_ms={}))
        asked.clocks, asked._seen_ms = Clocks(0, 0, 0, ""), self.seen_ms
        self.seen_ms = now_ms
        asked._unwatched_since_ms, asked._may_have_had_cdc = self.unwatched_since_ms, lambda _: True
        asked._schema = SimpleNamespace(tables={TABLE_ID: SimpleNamespace(table_id=TABLE_ID)})
        asked._table = lambda table_id, there, ends_ms: replace(one, ends_ms=ends_ms)
        if self.is_on:
            asked._left_ms.clear()
            comes_back_ms = FollowedLogs._comes_back(asked, TABLE_ID, positions, now_ms)
            return [replace(one, begins_ms=comes_back_ms)]
        left = (FollowedLogs._left(asked, table_id, position, now_ms) for table_id, position in positions.items())
        return [found for found in left if found is not None]


def switched() -> Switched:
    return Switched([ONLY], has_from_ms=None)


def test_late_rows_are_found_after_cdc_was_switched_off(sync_of: Callable[[Log], Sync]) -> None:
    sync = sync_of(log := switched())
    sync.run(180, step_ms=MINUTE)
    base_ms = log.now_ms
    log.add(60, lambda number: base_ms + number * 50_000, 5 * MINUTE)
    sync.run(50)
    log.is_on = False
    sync.run(24 * 60, step_ms=5 * MINUTE)
    assert staged(sync).keys() == set(range(60))
    assert not sync.gaps()
    assert sync.position.has_ended
    assert sync.stager.status()["logs"] == {}


def test_what_was_written_while_nothing_could_be_read_is_read_although_cdc_is_off_again(
    sync_of: Callable[[Log], Sync],
) -> None:
    """Over many runs, as they are by default."""
    sync = sync_of(log := switched())
    sync.run(60, step_ms=MINUTE)
    log.is_on = False
    sync.run(30 * 60, step_ms=10 * MINUTE)
    assert sync.position.has_ended
    log.is_on, log.failing = True, lambda *_: True
    log.add(60, lambda number: log.now_ms + number * MINUTE, 0)
    sync.run(60, step_ms=MINUTE)
    log.is_on = False
    for _ in range(4):
        sync.run(10, step_ms=MINUTE)
        log.asked._left_ms.clear()  # type: ignore[attr-defined]
        sync.start()
    log.failing = lambda *_: False
    sync.run(20 * 60, step_ms=10 * MINUTE)
    assert staged(sync).keys() == set(range(60))


def test_a_table_that_has_left_and_cannot_be_read_is_given_up_with_a_gap(sync_of: Callable[[Log], Sync]) -> None:
    sync = sync_of(log := switched())
    sync.run(60, step_ms=MINUTE)
    until_ms, log.failing, log.is_on = sync.position.until_ms, lambda *_: True, False
    for _ in range(12):
        sync.run(10, step_ms=MINUTE)
        status = sync.stager.status()
        loop.put_status(sync.store, "scylla_log_stage", scylla_log_stage.STATUS, status | {"error": None})
        log.asked._left_ms.clear()  # type: ignore[attr-defined]
        sync.start()
    ((first_ms, last_ms),) = sync.gaps()
    assert first_ms <= until_ms
    assert last_ms == sync.position.ends_ms
    assert sync.position.has_ended
    assert sync.stager.status()["logs"] == {}


def test_a_group_that_waits_in_a_log_that_has_ended_is_told(sync_of: Callable[[Log], Sync]) -> None:
    """The command ``wait`` waits for it."""
    sync = sync_of(log := switched())
    sync.run(60, step_ms=MINUTE)
    log.is_on = False
    log.rows = [Row(STREAM, log.now_ms + 1000, 1, 0, log.now_ms + 1000, TTL_S, 1, 0, is_last=False)]
    for _ in as_long_as(lambda: not (sync.position.waiting and sync.position.until_ms == sync.position.ends_ms)):
        sync.run(0.5, step_ms=15_000)
    assert sync.stager.status()["logs"][NAME]["waiting"] == 1
    sync.run(10, step_ms=MINUTE)
    assert (sync.stager.status()["logs"], staged(sync)) == ({}, {1: 1})


def test_the_status_says_why_nothing_is_read(sync_of: Callable[[Log], Sync], monkeypatch: pytest.MonkeyPatch) -> None:
    sync = sync_of(log := log_of())
    sync.run(1)
    watched_ms = sync.stager.status()["watched_ms"]

    def look(*_: Any) -> list[FollowedTable]:
        raise NotYetError("nodes disagree")

    with monkeypatch.context() as patch:
        patch.setattr(log, "look", look)
        sync.run(0.5)
        assert sync.stager.waits is None, "nodes often disagree for a moment"
        sync.run(2)
        assert sync.stager.waits == "nodes disagree"
        assert sync.stager.status()["watched_ms"] == watched_ms
    sync.run(1)
    assert sync.stager.waits is None


@pytest.mark.parametrize("ttl_s", [TTL_S, 6 * 3600])
def test_a_log_without_ttl_gets_one(sync_of: Callable[[Log], Sync], ttl_s: int) -> None:
    """Nothing older has expired, though no far sweep was ever made."""
    sync = sync_of(log := log_of(ttl_s=0))
    log.add(60 * 6, lambda number: NOW + number * 10 * MINUTE, 0)
    sync.run(60 * 60, step_ms=10 * MINUTE)
    log.ttl_s = ttl_s
    sync.run(60, step_ms=MINUTE)
    assert not sync.gaps()
    assert staged(sync) == dict.fromkeys(range(360), 1)


def test_a_clock_that_was_wrong_for_a_while_hides_nothing(sync_of: Callable[[Log], Sync]) -> None:
    sync = sync_of(log := log_of())
    sync.run(20 * 60, step_ms=5 * MINUTE)
    log.begin_ms, log.ahead_ms = log.now_ms, 4 * HOUR
    sync.run(2)
    log.ahead_ms = 0
    base_ms = log.now_ms
    log.add(60, lambda number: base_ms + (5 + number * 10) * MINUTE, 20 * MINUTE)
    log.add(60, lambda number: base_ms + (5 + number * 10) * MINUTE, 5 * HOUR)
    sync.run(30 * 60, step_ms=10 * MINUTE)
    assert not lost(sync, log)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 40))])
def test_whatever_happens_each_row_is_staged_or_told(sync_of: Callable[[Log], Sync], seed: int) -> None:
    """Rows come late by seconds to days, in halves; generations change, requests fail, and the loop is killed or stands
    still, mostly for less than the TTL."""
    chance = random.Random(seed)
    log = log_of(ttl_s=chance.choice((6, 12, 24, 48)) * 3600)
    following = generation(NOW + chance.randrange(5, 40) * HOUR, chance.choice((1, 2, 3)))
    end_ms, at_ms = NOW + 70 * HOUR, NOW + 10 * MINUTE
    while at_ms < end_ms:
        lateness = (0, 5 * MINUTE, 2 * HOUR, 3 * HOUR, 40 * HOUR)
        written_ms = at_ms - chance.randrange(chance.choice(lateness) + 1)
        if at_ms >= following.time_ms > written_ms:  # Scylla refuses it
            written_ms = at_ms
        stream = chance.choice(streams_of(following if at_ms >= following.time_ms else ONLY))
        seen_ms, is_half = at_ms + chance.choice((0, 0, 0, 5_000, 25_000)), chance.random() < 0.1
        ck = len(log.rows)
        log.rows.append(Row(stream, written_ms, ck, seen_ms, at_ms, log.ttl_s, ck, 0, not is_half))
        if is_half and chance.random() < 0.7:
            seen_ms += chance.choice((0, 60_000, 200_000))
            log.rows.append(Row(stream, written_ms, ck + 1, seen_ms, at_ms, log.ttl_s, ck, 1))
        at_ms += chance.randrange(1, 12) * MINUTE
    sync, most = sync_of(log), chance.choice((0.0, 0.6, 0.95))
    while log.now_ms < end_ms + 60 * HOUR:
        if len(log.generations) == 1 and log.now_ms > following.time_ms - MINUTE:
            log.generations.append(following)
        broken_ms = log.now_ms - chance.randrange(50) * HOUR
        is_bad = chance.random() < 0.1
        log.failing = lambda start, end, bad=is_bad, one=broken_ms: bad and start <= one < end
        sync.run(chance.choice((10, 60)), step_ms=chance.choice((60_000, 300_000, 600_000)))
        if chance.random() < 0.05:
            sync.start()
        if most and log.now_ms < end_ms and chance.random() < 0.03:
            log.now_ms += int(chance.uniform(0.2, most) * log.ttl_s * 1000)
            sync.start()
    assert not lost(sync, log)
    assert most or not sync.gaps(), "nothing has expired"
