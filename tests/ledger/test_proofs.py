"""What is proved of a replica, over many runs that each compare a part, and what the status tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.ledger.dropped_tables import mark_dropped
from ringsync.ledger.followed import end_following, followed_tables, keep_following
from ringsync.ledger.proofs import PROOFS, Examined, due_ranges, get_proof, note_examined, proofs, tell_proofs
from ringsync.ring.tokens import WHOLE_RING
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind, Problem
from ringsync.service.show import status_lines
from ringsync.status import read_status
from ringsync.storage.local import LocalStore

ID, DAY_MS, NOON = "3" * 32, 86_400_000, 1_900_000_000_000
COUNT, DAYS = 16, 7.0


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path)
    keep_following(found, ID)
    return found


def examined(at_ms: int, **more: Any) -> Examined:
    whole = Examined(ID, "shop.orders", "b1", COUNT, range(COUNT), (), (), 0, at_ms, "run-1", False, True)
    return replace(whole, **more)


def test_a_proof_is_as_old_as_its_oldest_range(store: LocalStore) -> None:
    first = note_examined(store, examined(NOON, chosen=range(8)))
    assert (first.proved_ms, first.ranges_ms[7], first.ranges_ms[8]) == (0, NOON, 0)
    second = note_examined(store, examined(NOON + 1, chosen=range(4, COUNT), unjudged=[5], differing=[6]))
    assert second.ranges_ms[4:8] == (NOON + 1, NOON, NOON, NOON + 1)
    assert (second.proved_ms, second.differing) == (NOON, (6,))
    assert get_proof(store, ID) == second
    again = note_examined(store, examined(NOON + 2))
    assert (again.proved_ms, again.differing) == (NOON + 2, ())


def test_a_difference_stays_until_its_range_is_found_equal(store: LocalStore) -> None:
    note_examined(store, examined(NOON, differing=[3, 9], rows_differing=5))
    assert note_examined(store, examined(NOON + 1, chosen=range(3))).differing == (3, 9)
    assert note_examined(store, examined(NOON + 2, chosen=[3], unjudged=[3])).differing == (3, 9)
    after = note_examined(store, examined(NOON + 3, chosen=[3]))
    assert (after.differing, after.rows_differing, after.found_ms) == ((9,), 5, NOON)


def test_nothing_is_proved_of_another_base_and_little_of_other_ranges(store: LocalStore) -> None:
    note_examined(store, examined(NOON))
    other = note_examined(store, examined(NOON + 1, count=4, chosen=[2]))
    assert other.ranges_ms == (NOON, NOON, NOON + 1, NOON)
    anew = note_examined(store, examined(NOON + 2, base="b2", chosen=[1]))
    assert (anew.ranges_ms[:3], anew.since_ms) == ((0, NOON + 2, 0), NOON + 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=40, max_size=60), st.integers(1, 300))
def test_each_range_is_due_within_its_days(gaps: list[float], count: int) -> None:
    """Whenever the runs are, at most a day apart."""
    store, now_ms = _Memory(), NOON
    last = dict.fromkeys(range(count), NOON)
    for days in gaps:
        now_ms += int(days * DAY_MS)
        chosen = due_ranges(store.proof, "b1", count, DAYS, now_ms)
        assert len(chosen) <= count * max(days, 1) / DAYS + 1
        for number in chosen:
            assert now_ms - last[number] <= (DAYS + 1) * DAY_MS
            last[number] = now_ms
        store.note(examined(now_ms, count=count, chosen=chosen, is_part=True))
    assert all(now_ms - at_ms <= (DAYS + 1) * DAY_MS for at_ms in last.values())


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 63), max_size=30), st.sets(st.integers(0, 63), max_size=30))
def test_ranges_that_cannot_be_proved_hold_up_no_others(unjudged: set[int], differing: set[int]) -> None:
    """They are compared again and again, beside the share that is due, and cost no more than that."""
    store = _Memory()
    for day in range(1, 17):
        now_ms = NOON + day * DAY_MS
        chosen = {*due_ranges(store.proof, "b1", 64, DAYS, now_ms)}
        assert len(chosen) <= 2 * (64 / DAYS + 1)
        wrong = {"unjudged": unjudged & chosen, "differing": differing & chosen}
        store.note(examined(now_ms, count=64, chosen=chosen, is_part=True, **wrong))
    for number in range(64):
        if number not in unjudged | differing:
            assert now_ms - store.proof.ranges_ms[number] <= (DAYS + 1) * DAY_MS
        else:
            assert store.proof.ranges_ms[number] == 0
            assert now_ms - store.proof.compared_ms[number] <= DAYS * DAY_MS
    assert {*store.proof.differing} == differing


@given(st.integers(1, 40), st.integers(1, 40), st.sets(st.integers(0, 39)), st.data())
def test_other_ranges_keep_what_is_known_of_their_tokens(
    old: int, new: int, wrong: set[int], data: st.DataObject
) -> None:
    """A difference stays until its tokens are found equal, and no proof becomes newer."""
    store, wrong = _Memory(), {number for number in wrong if number < old}
    store.note(examined(NOON, count=old, chosen=range(old), differing=wrong))
    due = due_ranges(store.proof, "b1", new, DAYS, NOON + DAY_MS)
    share = -(-new // int(DAYS))
    chosen = data.draw(st.sets(st.integers(0, new - 1)))
    store.note(examined(NOON + DAY_MS, count=new, chosen=chosen))
    edges = [[part.start for part in WHOLE_RING.split(count)] + [2**63 - 1] for count in (old, new)]
    unproved = set()
    for number in range(new):
        touched = {i for i in range(old) if edges[0][i] < edges[1][number + 1] and edges[0][i + 1] > edges[1][number]}
        assert (number in store.proof.differing) == bool(touched & wrong and number not in chosen)
        assert store.proof.ranges_ms[number] == (NOON + DAY_MS if number in chosen else 0 if touched & wrong else NOON)
        unproved |= {number} if touched & wrong else set()
    assert len(unproved & {*due}) == min(len(unproved), share)


class _Memory:
    """A proof without a store."""

    proof: Any = None

    def note(self, found: Examined) -> None:
        from ringsync.ledger.proofs import _added

        self.proof = _added(self.proof, found)


def told(store: LocalStore, now_ms: int, days: float | None = DAYS) -> list[Problem]:
    tell_proofs(store, days, now_ms)
    status = read_status(store, PROOFS)
    assert status is not None
    nothing = Expected((), (), (), (), (), (), "")
    seen = problems({PROOFS: status}, {}, nothing, False, now_ms / 1000)
    return [one for one in seen if one.kind in (Kind.REPLICA_DIFFERS, Kind.PROOF_OVERDUE)]


def test_differences_are_a_problem_until_a_repair(store: LocalStore) -> None:
    note_examined(store, examined(NOON, differing=[3], rows_differing=5))
    (problem,) = told(store, NOON + DAY_MS)
    assert (problem.kind, problem.where) == (Kind.REPLICA_DIFFERS, "shop.orders")
    assert "5 rows" in problem.text
    assert "cdcservice verify --repair --table shop.orders" in problem.text
    note_examined(store, examined(NOON + DAY_MS, chosen=[3]))
    assert told(store, NOON + DAY_MS) == []


def test_of_a_table_that_was_left_out_since_nothing_is_expected(store: LocalStore) -> None:
    """Its proof was overdue after nine days, and the alarm blamed the DAG, which compares what is followed."""
    note_examined(store, examined(NOON, differing=[3]))
    assert len(told(store, NOON + 10 * DAY_MS)) == 2
    assert end_following(store, ID, followed_tables(store)[ID])
    assert told(store, NOON + 10 * DAY_MS) == []


def test_a_copy_that_nobody_follows_may_differ(store: LocalStore) -> None:
    note_examined(store, examined(NOON, differing=[3], is_followed=False))
    assert told(store, NOON + 99 * DAY_MS) == []


def test_a_proof_that_is_too_old_is_a_problem(store: LocalStore) -> None:
    note_examined(store, examined(NOON, chosen=range(8)))
    assert told(store, NOON + 9 * DAY_MS) == []
    (problem,) = told(store, NOON + 9 * DAY_MS + 1000)
    assert (problem.kind, "never" in problem.text) == (Kind.PROOF_OVERDUE, True)
    assert told(store, NOON + 99 * DAY_MS, days=None) == [], "nobody verifies by itself"
    note_examined(store, examined(NOON + 9 * DAY_MS))
    assert told(store, NOON + 10 * DAY_MS) == []


def test_the_status_shows_each_proof_and_forgets_tables_that_are_gone(store: LocalStore) -> None:
    note_examined(store, examined(NOON))
    note_examined(store, examined(NOON, table_id="4" * 32, table="shop.gone", differing=[1]))
    store.put(f"proofs/{'5' * 32}.json", b"{")
    mark_dropped(store, "shop", "gone", "4" * 32, NOON)
    assert told(store, NOON + DAY_MS) == []
    status = read_status(store, PROOFS)
    assert status is not None
    lines = [*status_lines({PROOFS: status}, {}, NOON / 1000 + 3600)]
    assert any(line.split()[:2] == ["shop.orders", "1"] or "shop.orders" in line for line in lines)
    assert not any("sign of life" in line for line in lines), "it is no loop"
    assert proofs(store).keys() == {ID}
