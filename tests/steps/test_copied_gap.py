"""The gap of a table that is bootstrapped anew: no alarm from the ALTER on, and over when the copy is published."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.gaps import Gaps
from ringsync.ledger.left_tables import LeftTable, forget_left, note_left
from ringsync.ledger.passes import mark
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Schema
from ringsync.service.delays import Limits
from ringsync.service.health import told_by
from ringsync.service.problem import Kind
from ringsync.sources.scan.plan import Selection
from ringsync.state.bootstrap import CANCELLED, PUBLISHING, SCANNING
from ringsync.status import ABANDONED_AFTER_S, BOOTSTRAPS, read_statuses
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap import cancel as cancelling
from ringsync.steps.bootstrap import copied_gap, drain, prepare
from ringsync.steps.bootstrap.cancel import cancel
from ringsync.steps.bootstrap.copied_gap import note_before_copy, said_before_cdc
from ringsync.steps.tables import Outcome
from ringsync.storage.port import UnavailableError
from tests.steps.test_close import TABLE
from tests.steps.test_holes import World, come_back, lose_cdc, world  # noqa: F401

KEY = f"{BOOTSTRAPS}{TABLE.table_id}"
CONFIG: Any = SimpleNamespace(sync=SimpleNamespace(run_s=600.0))


@pytest.fixture
def away(world: World, monkeypatch: pytest.MonkeyPatch) -> World:  # noqa: F811
    """A table has no cdc for a while."""
    told = lambda _: SimpleNamespace(altered_ms={TABLE.table_id: world.altered_ms})  # noqa: E731
    monkeypatch.setattr(copied_gap, "read_node_tables", told)
    monkeypatch.setattr(copied_gap, "one_node", lambda session: session)
    world.plan(2)
    lose_cdc(world)
    world.plan(5)
    return world


def plan_of(selection: Selection = Selection()) -> Any:  # noqa: B008 (it is frozen)
    return SimpleNamespace(
        bootstrap=SimpleNamespace(id="b1", keyspace=TABLE.keyspace, table=TABLE.name),
        run="r1",
        scan=SimpleNamespace(table=TABLE, selection=selection),
    )


def drained(world: World, monkeypatch: pytest.MonkeyPatch, **part: Any) -> None:  # noqa: F811
    """The last step of the copy, but for its cut-over."""
    monkeypatch.setattr(drain, "cut_over", lambda *_: {})
    latest = SimpleNamespace(state=PUBLISHING)
    monkeypatch.setattr(drain, "check_not_cancelled", lambda *_: latest)
    state: Any = SimpleNamespace(find=lambda *_: latest, complete=lambda _: None)
    application: Any = SimpleNamespace(config=None, store=world.store)
    kafka: Any = SimpleNamespace(feed=lambda _: None)
    drain.drain_table(application, state, plan_of(Selection(**part)), kafka)


def begins(world: World) -> None:  # noqa: F811
    world.now_ms += 6000
    mark(world.store, TABLE.table_id, "begin", "b1", world.now_ms)
    prepare.say(world.store, plan_of(), "prepare")


def raised(world: World) -> int:  # noqa: F811
    return len(world.gaps(**read_statuses(world.store)))


def test_a_table_that_is_copied_anew_has_no_gap_at_any_moment(away: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was critical between ALTER and plan, and from the end of the copy until it was verified, or for ever."""
    with said_before_cdc(away.store, TABLE, "r1"):
        come_back(away)
        away.plan()  # another process looks
        assert (raised(away), len(Gaps(away.store).look())) == (0, 1)
        note_before_copy(away.store, CONFIG, None, TABLE)
        begins(away)
    away.plan(3)
    assert raised(away) == 0
    drained(away, monkeypatch)
    assert KEY not in read_statuses(away.store)
    away.plan(3)
    assert (raised(away), Gaps(away.store).look()) == (0, {})


def test_prepare_itself_notes_the_gap_before_it_begins(away: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever notes it later does not know that the copy began after it."""
    with said_before_cdc(away.store, TABLE, "r1"):
        come_back(away)
        note_before_copy(away.store, CONFIG, None, TABLE)
        begins(away)
    away.plan()
    assert len(Gaps(away.store).look()) == 1
    drained(away, monkeypatch)
    away.plan(3)
    assert Gaps(away.store).look() == {}


@pytest.mark.parametrize("why", ["lost again meanwhile", "a part", "a condition", "configuration", "marks are gone"])
def test_what_the_copy_may_lack_stays_a_gap(away: World, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "configuration":
        forget_left(away.store, TABLE.table_id)
        note_left(away.store, TABLE.table_id, LeftTable(away.now_ms, has_cdc=True))
    come_back(away)
    note_before_copy(away.store, CONFIG, None, TABLE)
    if why != "marks are gone":
        begins(away)
    if why == "lost again meanwhile":
        away.plan()
        lose_cdc(away)
        away.plan(2)
        come_back(away)
        away.plan()
        assert len(Gaps(away.store).look()) == 2
    parts: dict[str, Any] = {"a part": {"token_range": TokenRange(0, 5)}, "a condition": {"where": "id = 1"}}
    drained(away, monkeypatch, **parts.get(why, {}))
    assert raised(away) == 1


def test_a_preparation_that_fails_hides_no_gap(away: World) -> None:
    with suppress(ValueError), said_before_cdc(away.store, TABLE, "r1"):
        come_back(away)
        away.plan()
        raise ValueError
    assert (raised(away), KEY in read_statuses(away.store)) == (1, False)


@pytest.mark.parametrize("name", ["orders", "Orders"])
@pytest.mark.parametrize("known", [True, False])
def test_a_preparation_that_was_killed_is_cancelled(
    away: World, name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its alarm is bootstrap-abandoned, which says so: there was nothing to cancel, and the alarm stayed. The table may
    have been dropped. One that was begun a moment ago lives."""
    table = replace(TABLE, name=name)
    killed = said_before_cdc(away.store, table, "r1")
    killed.__enter__()
    assert KEY in read_statuses(away.store)
    state: Any = SimpleNamespace(find=lambda *name: None, session=None)
    monkeypatch.setattr(cancelling, "read_tables", lambda _: Schema((table,) if known else ()))
    for lives in (True, False):
        with pytest.raises(StepError, match="has no unfinished bootstrap"):
            [*cancel(CONFIG, away.store, state, [(TABLE.keyspace, name)], Outcome(alone=True))]
        assert (KEY in read_statuses(away.store)) is lives
        monkeypatch.setattr(copied_gap, "time", SimpleNamespace(time=lambda: time.time() + ABANDONED_AFTER_S + 1))


def test_a_killed_preparation_is_cancelled_with_the_bootstrap_of_the_table_before(
    away: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table was created again: only the older bootstrap was ended, and again with each --cancel."""
    killed = said_before_cdc(away.store, TABLE, "r1")
    killed.__enter__()
    assert KEY in read_statuses(away.store)
    monkeypatch.setattr(copied_gap, "time", SimpleNamespace(time=lambda: time.time() + ABANDONED_AFTER_S + 1))
    monkeypatch.setattr(cancelling, "clear_finished", lambda *_: None)
    cancelled(away, monkeypatch, "b0", "r0", "older")
    assert KEY not in read_statuses(away.store)


def cancelled(world: World, monkeypatch: pytest.MonkeyPatch, bootstrap: str, run: str, table_id: str) -> None:  # noqa: F811
    """``--cancel`` ends a bootstrap."""
    specification = json.dumps({"table_id": table_id})
    latest: Any = SimpleNamespace(id=bootstrap, run=run, state=CANCELLED, specification=specification)
    done: Any = {"cancel": lambda *_, gone: True, "take_over": lambda *_: None, "session": None}
    state: Any = SimpleNamespace(find=lambda *name: latest, **done)
    known: Any = SimpleNamespace(by_id=lambda: {table_id: None}, unreadable=())
    monkeypatch.setattr(cancelling, "read_tables", lambda _: known)
    names = [(TABLE.keyspace, TABLE.name)]
    assert [*cancel(CONFIG, world.store, state, names, Outcome(alone=True))] == [(names[0], latest)]


@pytest.mark.parametrize(
    ("said", "stays"),
    [("older", False), ("itself", False), ("in preparation", False), ("damaged", False), ("later", True)],
)
def test_whatever_was_said_of_what_is_cancelled_goes(
    away: World, monkeypatch: pytest.MonkeyPatch, said: str, stays: bool
) -> None:
    """What an earlier bootstrap had said stayed for ever, since only the word of the latest was removed."""
    monkeypatch.setattr(cancelling, "clear_finished", lambda *_: None)
    if said == "in preparation":
        said_before_cdc(away.store, TABLE, "r1").__enter__()
    else:
        prepare.say(away.store, plan_of(), "prepare")
    if said == "damaged":
        away.store.put(f"status/{KEY}.json", b"{")
    bootstrap, run = {"older": ("b2", "r2"), "later": ("b0", "r0")}.get(said, ("b1", "r1"))
    cancelled(away, monkeypatch, bootstrap, run, TABLE.table_id)
    assert (away.store.stat(f"status/{KEY}.json") is not None) is stays


def test_what_another_run_says_while_an_abandoned_bootstrap_is_cancelled_stays(
    away: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.say(away.store, plan_of(), "scan")
    aged = SimpleNamespace(time=lambda: time.time() + ABANDONED_AFTER_S + 1)
    with monkeypatch.context() as later:
        later.setattr(copied_gap, "time", aged)
        assert copied_gap.abandoned_bootstraps(away.store, [TABLE.full_name]) == {TABLE.full_name: [KEY]}
    prepare.say(away.store, plan_of(), "scan")
    copied_gap.forget_abandoned(away.store, [KEY])
    assert KEY in read_statuses(away.store)
    monkeypatch.setattr(copied_gap, "time", aged)
    copied_gap.forget_abandoned(away.store, [KEY])
    assert KEY not in read_statuses(away.store)


def test_whatever_ends_a_preparation_once_the_stream_waits_it_is_told(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error while leftovers were removed took away what was said: stream, replica and Kafka stood still, untold."""
    latest: Any = SimpleNamespace(id="b1", state=SCANNING)
    plan: Any = SimpleNamespace(**vars(plan_of()), topic="t")

    def begun(*given: Any) -> int:
        return mark(world.store, TABLE.table_id, "begin", "b1", 5, check=given[-1])

    monkeypatch.setattr(prepare, "begin_pass", begun)
    monkeypatch.setattr(prepare, "remove_leftovers", lambda *_: (_ for _ in ()).throw(UnavailableError("away")))
    with pytest.raises(UnavailableError):
        prepare.begin_stream(world.store, plan, latest, lambda: None)
    (problem,) = told_by(KEY, read_statuses(world.store)[KEY], Limits(), time.time() + ABANDONED_AFTER_S + 1)
    assert problem.kind == Kind.BOOTSTRAP_ABANDONED


def test_a_preparation_that_fails_since_another_run_has_begun_leaves_what_that_says(away: World) -> None:
    with suppress(ValueError), said_before_cdc(away.store, TABLE, "r1"):
        prepare.say(away.store, plan_of(), "scan")
        raise ValueError
    assert read_statuses(away.store)[KEY]["bootstrap"] == "b1"


def test_the_status_of_an_unfinished_bootstrap_stays(away: World) -> None:
    prepare.say(away.store, plan_of(), "scan", 0.5)
    with pytest.raises(ValueError), said_before_cdc(away.store, TABLE, "r2"):
        raise ValueError
    assert read_statuses(away.store)[KEY]["bootstrap"] == "b1"
