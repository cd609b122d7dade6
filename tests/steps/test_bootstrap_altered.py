"""A table is altered between its copy and the end of its bootstrap: what was copied is finished, not copied anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringsync.state.bootstrap import COMPLETED, BootstrapState
from ringsync.steps.application import ExitCode, StepError
from ringsync.steps.bootstrap import publish as bootstrap_publish

pytestmark = [pytest.mark.server, pytest.mark.spark]

ROWS = 100


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def table(session: Any, keyspace: str, request: pytest.FixtureRequest) -> str:
    name = f"{keyspace}.t{abs(hash(request.node.name))}"
    session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int, old text)")
    insert = session.prepare(f"INSERT INTO {name} (id, v, old) VALUES (?, ?, 'x') USING TIMESTAMP 1000")
    for number in range(ROWS):
        session.execute(insert, (number, number * 7))
    return name


CHANGES, FOLLOWS = ("ADD new int", "DROP old"), ("cleared", "another")
KILLED_AT = ("", "replace_base", "begin_changes", "publish_passes")


def cases() -> Iterator[Any]:
    """All combinations. In every other one of them, which are quick enough, any two conditions meet."""
    for case in itertools.product(CHANGES, KILLED_AT, FOLLOWS):
        places = CHANGES.index(case[0]) + KILLED_AT.index(case[1]) + FOLLOWS.index(case[2])
        yield pytest.param(*case, marks=[pytest.mark.chaos] if places % 2 else [])


@pytest.mark.parametrize(("change", "killed_at", "follow"), [*cases()])
def test_what_is_copied_is_drained(
    table: str,
    change: str,
    killed_at: str,
    follow: str,
    step: Callable[..., Any],
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the scan was killed between two of the writes that publish."""
    run = f"{change}-{killed_at}-{follow}".replace(" ", "-")
    again = run if follow == "cleared" else f"{run}-again"
    first = step("bootstrap_prepare", table, run)[0]["bootstrap"]
    with monkeypatch.context() as patch:
        if killed_at:

            def kill(*_: Any, **__: Any) -> None:
                raise Killed

            patch.setattr(bootstrap_publish, killed_at, kill)
            with pytest.raises(Killed):
                step("bootstrap_scan", table, run)
        else:
            assert step("bootstrap_scan", table, run)[1] == ExitCode.OK
    session.execute(f"ALTER TABLE {table} {change}")
    session.execute(f"INSERT INTO {table} (id, v) VALUES (1, 1) USING TIMESTAMP 1001")
    if not killed_at:  # then the replica is there, and follows the table
        step("replica_verify", table, f"{run}-between")
    prepared, code = step("bootstrap_prepare", table, again)
    assert (prepared["continues"], prepared["bootstrap"], code) == (first, first, ExitCode.OK)
    scan, code = step("bootstrap_scan", table, again)
    assert (scan["rows_read"], scan["rows"], code) == (0, ROWS, ExitCode.OK)
    assert step("bootstrap_drain", table, again)[1] == ExitCode.OK
    latest = BootstrapState(session, "cdc").find(*table.split("."))
    assert latest is not None
    assert (latest.id, latest.state) == (first, COMPLETED)
    verified, code = step("replica_verify", table, again, repair=True)
    assert (verified["rows"], verified["differences"], code) == (ROWS, 0, ExitCode.OK)
    assert verified["before_repair"]["differences_by_kind"].keys() <= {"value", "writetime"}, "row 1, written since"


def test_what_is_not_copied_is_copied_anew(table: str, step: Callable[..., Any], session: Any) -> None:
    first = step("bootstrap_prepare", table, "early")[0]["bootstrap"]
    session.execute(f"ALTER TABLE {table} ADD new int")
    with pytest.raises(StepError, match="changed since the bootstrap was planned: trigger bootstrap_table again"):
        step("bootstrap_scan", table, "early")
    prepared, _ = step("bootstrap_prepare", table, "late")
    assert prepared["continues"] is None
    assert prepared["bootstrap"] != first
    assert step("bootstrap_scan", table, "late")[0]["rows_read"] == ROWS
