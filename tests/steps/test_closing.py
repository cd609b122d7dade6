"""Closing follows progress: a backlog drains through its buckets, and who is not read is waited for one window more."""

from __future__ import annotations

from typing import Any

from ringsync.ring.ring import Host
from ringsync.status import STALE_AFTER_S
from ringsync.steps.close.closing import UNHEARD_MS, log_progress, progress

NOW = 1_790_000_000_000
HOUR = 3_600_000
PATIENCE = 300_000
A, B = (Host(name, f"10.0.0.{name}", 9042, "dc", "r", ()) for name in "12")


def status(*, clear_at_ms: int, at_ms: int = NOW, node: str = "1", **told: Any) -> dict[str, Any]:
    one = {"clear_at_ms": clear_at_ms, "is_read": True, "error": None, **told}
    return {"at_ms": at_ms, "error": told.get("error"), "nodes": {node: one}}


C = Host("3", "10.0.0.3", 9042, "dc", "r", ())
OTHERS = {"q1": status(clear_at_ms=NOW - 700), "q2": status(clear_at_ms=NOW - 900, node="2")}

NONE = {"clear_at_ms": 0}
"""Of a node that nobody tells of."""


def queue_of(host: Host) -> str:
    return f"q{host.id}"


def test_a_backlog_of_an_hour_is_waited_for_while_it_is_read() -> None:
    """By the clock everything older than nine minutes was closed, and went the late way."""
    statuses = {"q1": status(clear_at_ms=NOW - HOUR), "q2": status(clear_at_ms=NOW - 500, node="2")}
    found = progress((A, B), statuses, queue_of, NOW, PATIENCE, {})
    assert (found.staged_until, found.unread, found.since_ms) == (NOW - HOUR, {}, {})


def test_a_node_that_is_down_is_not_waited_for() -> None:
    down = Host("2", "10.0.0.2", 9042, "dc", "r", (), up=False)
    found = progress((A, down), {"q1": status(clear_at_ms=NOW - 700)}, queue_of, NOW, PATIENCE, {"2": 5})
    assert (found.staged_until, found.unread, found.since_ms) == (NOW - 700, {}, {"2": 5})
    reads = {"q1": status(clear_at_ms=NOW - 700), "q2": status(clear_at_ms=NOW - HOUR, node="2")}
    assert progress((A, down), reads, queue_of, NOW, PATIENCE, {"2": 5}).since_ms == {}, "its worker reads what it left"


def test_a_host_that_is_up_again_before_its_worker_holds_up_nobody() -> None:
    """It has logged nothing while it was down."""
    silent = status(clear_at_ms=NOW - HOUR - 500, at_ms=NOW - HOUR, node="3")
    found = progress((A, B, C), {**OTHERS, "q3": silent}, queue_of, NOW, PATIENCE, {"3": NOW - HOUR})
    assert (found.staged_until, found.unheard) == (NOW - 900, {"3"})


def test_while_nobody_reads_nothing_closes() -> None:
    """The backlog of an hour in which no worker ran was late, all of it."""
    silent = {f"q{n}": status(clear_at_ms=NOW - HOUR, at_ms=NOW - HOUR, node=n) for n in "123"}
    away = dict.fromkeys("123", NOW - HOUR)
    assert progress((A, B, C), silent, queue_of, NOW, PATIENCE, away).staged_until == NOW - HOUR
    one_reads = {**silent, "q1": OTHERS["q1"]}
    assert progress((A, B, C), one_reads, queue_of, NOW, PATIENCE, away).staged_until == NOW - PATIENCE


def test_the_clock_of_a_stage_that_is_ahead_keeps_nobody_away() -> None:
    ahead = {"q1": status(clear_at_ms=NOW + HOUR), "q3": status(clear_at_ms=NOW - 900, node="3")}
    assert progress((A, C), ahead, queue_of, NOW, PATIENCE, {"3": NOW - HOUR}).unread == {}


def test_a_node_that_is_not_read_is_waited_for_so_long_and_named() -> None:
    stale = NOW - int(STALE_AFTER_S * 1000) - 1000
    reasons = {
        "no worker": {},
        "no sign of life for": {"q2": status(clear_at_ms=NOW - HOUR, at_ms=stale, node="2")},
        "does not know it": {"q2": status(clear_at_ms=NOW, node="9")},
        "not mounted": {"q2": status(clear_at_ms=NOW - HOUR, node="2", is_read=False, error="not mounted")},
    }
    for told, of_other in reasons.items():
        statuses = {"q1": status(clear_at_ms=NOW - 700), **of_other}
        found = progress((A, B), statuses, queue_of, NOW, PATIENCE, {"2": NOW - PATIENCE})
        assert found.staged_until == NOW - PATIENCE
        assert list(found.unread) == ["10.0.0.2:9042"]
        assert told.removeprefix("no worker") in found.unread["10.0.0.2:9042"]
        # It is waited for, however old its backlog is: one failed cycle makes no hour of rows late.
        first = progress((A, B), statuses, queue_of, NOW, PATIENCE, {})
        assert first.since_ms == {"2": NOW}
        assert first.staged_until == min(
            NOW - 700, statuses.get("q2", {}).get("nodes", {}).get("2", NONE)["clear_at_ms"]
        )


def test_the_others_agree_without_a_node_that_was_not_read_for_two_minutes() -> None:
    """A host that is patched for an hour made all rows of its ranges wait until their buckets closed."""
    for since_ms, unheard in (({}, set()), ({"3": NOW - UNHEARD_MS + 1}, set()), ({"3": NOW - UNHEARD_MS}, {"3"})):
        found = progress((A, B, C), OTHERS, queue_of, NOW, PATIENCE, since_ms)
        assert found.unheard == unheard
        assert "10.0.0.3:9042" in found.unread


def test_closing_goes_on_without_a_node_that_had_no_backlog_when_it_was_lost() -> None:
    """Its buckets stayed open a window longer, which was an alarm of each table for as long as the host was patched."""
    lost_ms = NOW - UNHEARD_MS
    for clear_at_ms, staged_until in ((lost_ms - 500, NOW - 900), (lost_ms - UNHEARD_MS - 1, lost_ms - UNHEARD_MS - 1)):
        silent = status(clear_at_ms=clear_at_ms, at_ms=lost_ms, node="3")
        found = progress((A, B, C), {**OTHERS, "q3": silent}, queue_of, NOW, PATIENCE, {"3": lost_ms})
        assert (found.unheard, found.staged_until) == ({"3"}, staged_until)
    waited_for = progress((A, B, C), OTHERS, queue_of, NOW, PATIENCE, {"3": lost_ms})
    assert waited_for.staged_until == 0, "nobody knows what it has"


def test_where_most_are_not_read_all_are_waited_for() -> None:
    """Airflow or the store was away: the first worker that is back must not publish what only its nodes have."""
    for statuses, away in (({"q1": OTHERS["q1"]}, ("2", "3")), ({}, ("1", "2", "3"))):
        assert progress((A, B, C), statuses, queue_of, NOW, PATIENCE, dict.fromkeys(away, NOW - HOUR)).unheard == set()
    assert progress((A, C), {"q1": OTHERS["q1"]}, queue_of, NOW, PATIENCE, {"3": NOW - HOUR}).unheard == set()


def test_a_worker_that_comes_back_is_heard_once_it_has_nearly_caught_up() -> None:
    """It stopped the closing of all buckets until it had read the day that it was away (K9)."""
    behind = {**OTHERS, "q3": status(clear_at_ms=NOW - HOUR, node="3")}
    found = progress((A, B, C), behind, queue_of, NOW, PATIENCE, {"3": NOW - HOUR})
    assert (found.staged_until, found.unheard, found.since_ms) == (NOW - 900, {"3"}, {"3": NOW - HOUR})
    assert "from far behind the others'" in found.unread["10.0.0.3:9042"]
    near = {**OTHERS, "q3": status(clear_at_ms=NOW - UNHEARD_MS, node="3")}
    found = progress((A, B, C), near, queue_of, NOW, PATIENCE, {"3": NOW - HOUR})
    assert (found.staged_until, found.unheard, found.since_ms) == (NOW - UNHEARD_MS, set(), {})
    # It was away for less than a window: what it has is not late yet, so closing waits for it, and agreement does not.
    found = progress((A, B, C), behind, queue_of, NOW, PATIENCE, {"3": NOW - PATIENCE + 1})
    assert (found.staged_until, found.unheard) == (NOW - HOUR, {"3"})


def test_a_worker_that_was_away_for_a_moment_is_waited_for() -> None:
    """However old its backlog is: after an outage of all, one begins some seconds later than the others."""
    behind = {**OTHERS, "q3": status(clear_at_ms=NOW - HOUR, node="3")}
    found = progress((A, B, C), behind, queue_of, NOW, PATIENCE, {"3": NOW - UNHEARD_MS + 1})
    assert (found.staged_until, found.unheard, found.since_ms) == (NOW - HOUR, set(), {})
    together = {f"q{n}": status(clear_at_ms=NOW - HOUR - 1000 * int(n), node=n) for n in "123"}
    found = progress((A, B, C), together, queue_of, NOW, PATIENCE, {"3": NOW - HOUR})
    assert (found.staged_until, found.unread) == (NOW - HOUR - 3000, {})


def test_without_nodes_the_clock_counts() -> None:
    assert progress((), {}, queue_of, NOW, PATIENCE, {}).staged_until == NOW


def test_logs_that_are_tables_are_waited_for_as_nodes_are() -> None:
    """Of a Scylla one loop reads all logs."""
    found = log_progress(status(clear_at_ms=NOW) | {"clear_at_ms": NOW - HOUR}, NOW, PATIENCE, {"cdc_logs": 5})
    assert (found.staged_until, found.unread, found.since_ms) == (NOW - HOUR, {}, {})
    first = log_progress(None, NOW, PATIENCE, {})
    assert (first.staged_until, first.since_ms) == (0, {"cdc_logs": NOW})
    assert "no sign of life" in first.unread["the CDC logs"]
    later = log_progress(None, NOW + PATIENCE, PATIENCE, first.since_ms)
    assert later.staged_until == NOW
    failing = log_progress({"at_ms": NOW, "error": "gone", "clear_at_ms": NOW - 9}, NOW, PATIENCE, {})
    assert (failing.staged_until, failing.unread) == (NOW - 9, {"the CDC logs": "they are not read: gone"})
