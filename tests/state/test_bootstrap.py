"""Bootstrap state and range ledger on a real node: who owns, what counts, what a lost answer does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from cassandra import WriteTimeout
from cassandra.query import SimpleStatement

from ringsync.ring.tokens import TokenRange
from ringsync.state.bootstrap import (
    CANCELLED,
    COMPLETED,
    SCANNING,
    Bootstrap,
    BootstrapState,
    CommittedRange,
    LostOwnershipError,
)
from ringsync.state.session import StateError, StateSession

pytestmark = pytest.mark.server

KEYSPACE = "t_state"


@pytest.fixture(scope="module")
def state(session: Any) -> Iterator[BootstrapState]:
    StateSession(session, KEYSPACE).create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    yield BootstrapState(session, KEYSPACE)
    session.execute(f"DROP KEYSPACE {KEYSPACE}")


def bootstrap(name: str, id: str = "one") -> Bootstrap:
    return Bootstrap("shop", name, id, SCANNING, "{}", "run-1", 1_800_000_000)


def done(start: int, end: int, attempt: int = 1) -> CommittedRange:
    return CommittedRange(TokenRange(start, end), attempt, 10, 20, 1, 1000, '{"files": []}')


def test_one_bootstrap_per_table(state: BootstrapState) -> None:
    assert state.find("shop", "a") is None
    assert state.begin(bootstrap("a"), None)
    assert state.find("shop", "a") == bootstrap("a")
    assert not state.begin(bootstrap("a", "two"), None)
    assert not state.begin(bootstrap("a", "two"), "another")
    assert state.begin(bootstrap("a", "two"), "one")
    with pytest.raises(LostOwnershipError):
        state.complete(bootstrap("a"))
    state.complete(bootstrap("a", "two"))
    state.complete(bootstrap("a", "two"))
    found = state.find("shop", "a")
    assert found is not None
    assert (found.id, found.state) == ("two", COMPLETED)


def test_what_is_being_published_cannot_be_cancelled_and_what_is_cancelled_is_not_published(
    state: BootstrapState,
) -> None:
    first, second = bootstrap("b"), bootstrap("b", "two")
    assert state.begin(first, None)
    state.publishing(first)
    state.publishing(first)
    assert not state.cancel(first)
    assert state.begin(second, "one")
    with pytest.raises(LostOwnershipError, match="cancelled or replaced"):
        state.publishing(first)
    assert not state.cancel(first)
    assert state.cancel(second)
    assert state.cancel(second)
    with pytest.raises(LostOwnershipError, match="cancelled or replaced"):
        state.publishing(second)
    assert state.find("shop", "b") == replace(second, state=CANCELLED)


def test_only_the_last_owner_commits(state: BootstrapState) -> None:
    first = state.take_over("ledger", "driver-1")
    assert (first.attempt, first.ranges()) == (1, ())
    first.commit(done(-5, 5))
    second = state.take_over("ledger", "driver-2")
    assert second.attempt == 2
    for late in (lambda: first.commit(done(5, 9)), first.check):
        with pytest.raises(LostOwnershipError, match="attempt 2"):
            late()
    second.commit(done(5, 7, 2))
    second.check()
    assert second.ranges() == (done(-5, 5), done(5, 7, 2))


def test_a_start_is_committed_once(state: BootstrapState) -> None:
    ledger = state.take_over("once", "driver")
    ledger.commit(done(0, 5))
    ledger.commit(done(0, 5))
    with pytest.raises(StateError, match="recorded already"):
        ledger.commit(done(0, 7))
    assert ledger.ranges() == (done(0, 5),)


def test_many_take_over_at_once(state: BootstrapState) -> None:
    with ThreadPoolExecutor(8) as pool:
        ledgers = list(pool.map(lambda i: state.take_over("crowd", f"driver-{i}"), range(8)))
    assert sorted(ledger.attempt for ledger in ledgers) == list(range(1, 9))
    owners = [ledger for ledger in ledgers if ledger.attempt == 8]
    owners[0].check()


def test_a_lost_answer_is_no_loss(state: BootstrapState, session: Any) -> None:
    """The write was done, but the coordinator said that it does not know: the same again finds it done."""

    class LosesAnswers:
        default_fetch_size = 5000

        def __init__(self) -> None:
            self.lost = 0

        def prepare(self, cql: str) -> Any:
            return session.prepare(cql)

        def execute(self, statement: Any, parameters: Any = None, **options: Any) -> Any:
            answer = session.execute(statement, parameters, **options)
            if isinstance(statement, SimpleStatement) and "UPDATE" in statement.query_string and self.lost % 2 == 0:
                self.lost += 1
                raise WriteTimeout("unknown", write_type=7)
            self.lost += 1
            return answer

    losing = BootstrapState(LosesAnswers(), KEYSPACE, sleep=lambda seconds: None)  # type: ignore[arg-type]
    ledger = losing.take_over("lost", "driver-1")
    assert ledger.attempt == 1
    ledger.commit(done(0, 5))
    assert [one.range for one in ledger.ranges()] == [TokenRange(0, 5)]


def test_heartbeat(state: BootstrapState) -> None:
    hearts = ["heart", "other"]
    for heart in hearts:
        state.take_over(heart, "driver")
    assert [state.alive(heart) for heart in hearts] == [None, None]
    state.beat(hearts, "run-7")
    assert [state.alive(heart) for heart in hearts] == ["run-7", "run-7"]
    state.rest(["heart"])
    assert [state.alive(heart) for heart in hearts] == [None, "run-7"]
