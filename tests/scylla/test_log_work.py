"""What a cycle reads of a log, and what it remembers: empty generations, incomplete groups, too many rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from ringsync.scylla.generations import Generation, StreamRange
from ringsync.scylla.progress import OVERLAP_MS, SLOT_MS, Again, Position, Rules, Sweep, Waiting
from ringsync.scylla.stream_ids import StreamId
from ringsync.sources.cdc_log import grouped
from ringsync.steps.scylla.followed_logs import FollowedTable
from ringsync.steps.scylla.log_task import TableResult
from ringsync.steps.scylla.log_work import PATIENCE_MS, plan_work
from tests.scylla.generations import streams_of
from tests.scylla_sim.arithmetic import id_of

NOW = 1_790_000_000_000
RULES = Rules(30_000, 15_000, 10**9, 10**6, 0)
LOG: Any = SimpleNamespace(ttl_s=None, log_id="")


def generation(time_ms: int, streams: int = 2) -> Generation:
    ranges = tuple(StreamRange(end, (StreamId(id_of(end, time_ms % 2**38, end)),)) for end in range(streams))
    return Generation(time_ms, ranges)


def table(*generations: Generation) -> FollowedTable:
    requests = {one.time_ms: grouped(one, None) for one in generations}
    return FollowedTable("a" * 32, "shop.orders", LOG, generations, requests)


def at(until_ms: int, *known: int) -> Position:
    return Position.begin(until_ms, known, 10**7)


def test_the_present_generation_is_waited_for_while_it_has_no_streams() -> None:
    first, empty = generation(NOW - 10**6), generation(NOW - 60_000, 0)
    planned = plan_work(table(first, empty), at(NOW - 100_000, first.time_ms), 0, NOW, RULES)
    assert planned.end_ms == empty.time_ms
    assert planned.unread(NOW, TableResult()) == []
    after = planned.taken(TableResult())
    assert after.until_ms == empty.time_ms
    assert not plan_work(table(first, empty), after, 0, NOW, RULES).is_due
    assert after.known == (first.time_ms,)
    filled = generation(empty.time_ms)
    assert plan_work(table(first, filled), after, 0, NOW, RULES).end_ms == NOW - 30_000


def test_one_that_never_got_streams_is_a_gap() -> None:
    first, empty, last = generation(NOW - 10**6), generation(NOW - 400_000, 0), generation(NOW - 300_000)
    planned = plan_work(table(first, empty, last), at(NOW - 500_000, first.time_ms), 0, NOW, RULES)
    assert planned.end_ms == NOW - 30_000
    assert planned.unread(NOW, TableResult()) == [(empty.time_ms, last.time_ms)]
    pieces = {(work.piece.generation_ms, work.piece.start_ms, work.piece.end_ms) for work in planned.works}
    assert pieces == {
        (first.time_ms, NOW - 500_000, empty.time_ms + OVERLAP_MS),
        (last.time_ms, last.time_ms, NOW - 30_000),
    }


def test_groups_wait_until_they_are_complete_or_patience_ends() -> None:
    only = generation(NOW - 10**6)
    stream, *_ = streams_of(only)
    moment = UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9")
    group = Waiting(only.time_ms, stream.hex(), moment.hex, NOW, NOW - 60_000)
    planned = plan_work(table(only), at(NOW - 100_000, only.time_ms), 0, NOW, RULES)
    waits = planned.taken(TableResult(waiting=[group]))
    assert waits.waiting == (group,)
    later = NOW + 60_000
    again = plan_work(table(only), waits, 0, later, RULES)
    (asked,) = [work for work in again.works if work.only is not None]
    assert (asked.streams, asked.only, asked.patient) == ((stream,), moment.bytes, True)
    assert (asked.piece.start_ms, asked.piece.end_ms) == (1_584_969_040_910, 1_584_969_040_911)
    # It is found incomplete once more, and remembers since when it waits.
    still = again.taken(TableResult(waiting=[replace(group, since_ms=later)]))
    assert still.waiting == (group,)
    assert again.taken(TableResult()).waiting == ()
    last = plan_work(table(only), still, 0, NOW + PATIENCE_MS, RULES)
    assert [work.patient for work in last.works if work.only is not None] == [False]


def test_a_window_with_too_many_rows_is_read_in_parts() -> None:
    only = generation(NOW - 10**9)
    position, windows = at(NOW - 10**8, only.time_ms), []
    begin_ms = position.until_ms
    for _ in range(20):
        planned = plan_work(table(only), position, 0, NOW, RULES)
        assert planned.end_ms is not None
        windows.append(planned.end_ms - position.until_ms)
        position = planned.taken(TableResult(too_many={"window"}))
        assert position.until_ms == begin_ms
    assert windows[0] == 10**7
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == 1
    (one,) = [plan_work(table(only), position, 0, NOW, RULES)]
    assert one.taken(TableResult(Counter(window_rows=10**6))).window_ms == 1
    assert one.taken(TableResult(Counter(window_rows=10))).window_ms == 2


def test_a_sweep_with_too_many_rows_holds_up_no_window() -> None:
    """Its steps get shorter than a slot, whose sums are then compared once all of its parts are read."""
    only = generation(NOW - 10**9)
    rules = replace(RULES, near_ms=60_000)
    position = replace(at(NOW - 3 * SLOT_MS, only.time_ms), window_ms=2 * SLOT_MS)
    position = plan_work(table(only), position, 0, NOW, replace(rules, near_ms=10**9)).taken(TableResult())
    begin = position.begin_ms
    position = replace(position, slots=((begin, 5, 6, 7),), near=replace(position.near, window_ms=SLOT_MS))
    read = []
    for step in range(100):
        planned = plan_work(table(only), position, 0, NOW + step * 15_000, rules)
        (*pieces,) = dict.fromkeys(work.piece for work in planned.works if work.piece.kind == "near")
        if not pieces or pieces[0].start_ms >= begin + SLOT_MS:
            break
        if pieces[0].end_ms - pieces[0].start_ms > 10_000:
            until_ms = position.until_ms
            position = planned.taken(TableResult(Counter(near_rows=10**7), too_many={"near"}))
            assert position.until_ms == (planned.end_ms or until_ms)
        else:
            read.append((pieces[0].start_ms, pieces[0].end_ms))
            sums = {begin: (5, 6, 7)} if len(read) == 3 else {}
            position = planned.taken(TableResult(Counter(near_rows=10**6), sums={"near": sums}))
    assert read[0][0] == begin
    assert read[-1][1] == begin + SLOT_MS
    assert all(one[1] == other[0] for one, other in pairwise(read))
    assert begin not in [start for start, _ in position.again]
    assert (begin, 5, 6, 7) in position.slots


def test_a_failed_window_keeps_all_of_a_position() -> None:
    only = generation(NOW - 10**9)
    position = replace(at(NOW - 10**6, only.time_ms), again=(Again(NOW - 10**6, NOW - 10**6 + SLOT_MS, NOW - 10**6),))
    planned = plan_work(table(only), position, 0, NOW, RULES)
    assert planned.taken(TableResult(failures={"window": "x"})) == planned.position
    missed = planned.taken(TableResult(too_many={"again"}))
    assert (missed.again, missed.again_ms, missed.until_ms) == (position.again, SLOT_MS // 8, planned.end_ms)


def test_a_group_that_waits_may_expire() -> None:
    """Its arrival counts: one that a far sweep has found may have a write time of long ago."""
    only = generation(NOW - 10**9)
    waiting = (
        Waiting(only.time_ms, "00" * 16, UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9").hex, NOW, NOW - 3_000_000),
    )
    position = replace(at(NOW - 60_000, only.time_ms), ttl_s=3600, waiting=waiting)
    for now_ms, gaps in ((NOW, []), (NOW + 700_000, [(NOW - 3_000_000, NOW - 2_900_000)])):
        assert plan_work(table(only), position, 0, now_ms, RULES).unread(now_ms, TableResult()) == gaps


def test_what_is_read_again_may_have_expired() -> None:
    """Of a generation whose streams came late, all of it; of a slot with late rows, what has come late."""
    only = generation(NOW - 10**9)
    part = Again(NOW - 5_000_000, NOW - 4_000_000, NOW - 5_000_000)
    for since_ms, gaps in (
        (part.start_ms, [(part.start_ms, part.start_ms + SLOT_MS)]),
        (NOW - 3_700_000, [(NOW - 3_700_000, NOW - 3_600_000)]),
        (NOW - 3_000_000, []),
    ):
        position = replace(at(NOW - 60_000, only.time_ms), ttl_s=3600, again=(replace(part, since_ms=since_ms),))
        planned = plan_work(table(only), position, 0, NOW, RULES)
        assert planned.unread(NOW, TableResult()) == gaps
        assert planned.unread(NOW, TableResult(failures={"again": "x"})) == []


def test_a_gap_is_told_once_it_is_passed() -> None:
    """A window that fails is read again: until then nothing is told, neither of it nor of a sweep beside it."""
    only = generation(NOW - 10**9)
    position = replace(at(NOW - 10**6, only.time_ms), ttl_s=3600, window_ms=10**5)
    far = Sweep(NOW - 1000, NOW - 10**8, position.until_ms - 1, 10**6)
    planned = plan_work(table(only), replace(position, far=far), 0, NOW, RULES)
    late = NOW - 10**8 - 60_000, NOW - 3_600_000
    assert planned.unread(NOW, TableResult()) == [late]
    assert planned.unread(NOW, TableResult(failures={"window": "x"})) == []
    assert planned.unread(NOW, TableResult(too_many={"window"})) == []
    assert planned.unread(NOW, TableResult(failures={"far": "x"})) == []
    resting = plan_work(table(only), replace(position, far=far), 0, NOW, RULES, resting=["far"])
    assert resting.unread(NOW, TableResult()) == []
    assert resting.taken(TableResult()).far == far
    going_on = plan_work(table(only), replace(position, far=replace(far, window_ms=0)), 0, NOW, RULES)
    assert going_on.unread(NOW, TableResult()) == []
    expired = plan_work(table(only), position, 0, NOW + 3_600_000, RULES)
    assert expired.unread(NOW + 3_600_000, TableResult()) == [(position.until_ms, expired.end_ms)]
