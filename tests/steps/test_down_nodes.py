"""Since when a node is down, and for how long others keep hints for it, over plans and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringsync.cluster.cluster import DEFAULT_HINT_WINDOW_MS, hint_window_ms
from ringsync.ring.ring import Host
from ringsync.service.delays import Limits
from ringsync.service.expected import CLOSE, Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.steps.close import down_nodes
from ringsync.steps.close.down_nodes import DownNodes
from ringsync.steps.sync_plan import SyncPlan, interval_at

HOUR_MS = 3_600_000
HOSTS = [Host(name, f"10.0.0.{n}", 9042, "dc1", "r1", (n,)) for n, name in enumerate("ab")]


def plan(now_ms: int, up: bool, *, of_scylla: bool = False) -> SyncPlan:
    hosts = (HOSTS[0], replace(HOSTS[1], up=up))
    return SyncPlan(interval_at(now_ms, 60_000), hosts, {}, (), of_scylla=of_scylla)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that were asked; each keeps hints for two hours."""
    found: list[str] = []

    def read_settings(session: Any, host_id: str, names: Any) -> dict[str, str]:
        found.append(host_id)
        return {"max_hint_window": "2h"}

    monkeypatch.setattr(down_nodes, "read_settings", read_settings)
    return found


def told(nodes: DownNodes, now_ms: int) -> list[tuple[str, str]]:
    statuses = {CLOSE: {"at_ms": now_ms, **nodes.status()}}
    found = problems(statuses, {}, Expected.of_commit_logs(()), False, now_ms / 1000, limits=Limits())
    return [(problem.where, problem.text) for problem in found if problem.kind == Kind.NODE_PAST_HINTS]


def test_a_node_that_is_down_past_its_hints_is_named_until_it_is_up(asked: list[str]) -> None:
    nodes = DownNodes(None, 0)
    for minute in range(150):
        if minute == 60:  # a new run goes on counting
            nodes = DownNodes({"at_ms": 59 * 60_000, **nodes.status()}, 60 * 60_000)
        now_ms = minute * 60_000
        nodes.look(plan(now_ms, up=minute < 10), None, now_ms)
        found = told(nodes, now_ms)
        assert bool(found) == (minute > 130), minute
    ((where, text),) = found
    assert where == "node 10.0.0.1:9042"
    assert "has been down for 2:19:00, and hints are kept for 2:00:00" in text
    assert asked == ["a", "a"], "once in a run, and only once somebody is down"
    nodes.look(plan(151 * 60_000, up=True), None, 151 * 60_000)
    assert told(nodes, 151 * 60_000) == []


def test_scylla_is_not_asked(asked: list[str]) -> None:
    nodes = DownNodes(None, 0)
    nodes.look(plan(0, up=False, of_scylla=True), None, 0)
    assert asked == []
    assert nodes.status()["hint_window_ms"] == DEFAULT_HINT_WINDOW_MS


def test_a_clock_that_was_ahead_does_not_count() -> None:
    nodes = DownNodes(
        {
            "at_ms": 9 * HOUR_MS,
            "down_until_ms": 10 * HOUR_MS,
            "down": {"b": {"endpoint": "b", "since_ms": 9 * HOUR_MS}},
        },
        HOUR_MS,
    )
    nodes.look(plan(HOUR_MS, up=False, of_scylla=True), None, HOUR_MS)
    assert nodes.status()["down"]["b"]["since_ms"] == HOUR_MS


@pytest.mark.parametrize(("at_h", "until_h"), [(1, 100), (49, 2)])
def test_what_was_before_a_stop_does_not_count(at_h: int, until_h: int) -> None:
    """A node that was down two days ago, and restarts just now, was called down for two days. A loop that has restarted
    repeats what it said before, until its first cycle ends."""
    before = {
        "at_ms": at_h * HOUR_MS,
        "down_until_ms": until_h * HOUR_MS,
        "down": {"b": {"endpoint": "b", "since_ms": HOUR_MS}},
    }
    nodes = DownNodes(before, 49 * HOUR_MS)
    nodes.look(plan(49 * HOUR_MS, up=False, of_scylla=True), None, 49 * HOUR_MS)
    assert told(nodes, 49 * HOUR_MS) == []


@pytest.mark.parametrize("minutes", [6, 40])
def test_a_node_stays_down_over_runs_whose_cycles_are_long(asked: list[str], minutes: int) -> None:
    """With a backlog a cycle takes longer than a status counts; its sign of life repeats what it says meanwhile."""
    before = None
    for minute in range(0, 720, minutes):
        nodes = DownNodes(before, minute * 60_000)
        nodes.look(plan(minute * 60_000, up=False), None, minute * 60_000)
        before = {"at_ms": (minute + minutes) * 60_000, **nodes.status()}
        assert before["down"]["b"]["since_ms"] == 0
    assert told(nodes, 720 * 60_000)


@pytest.mark.parametrize(
    ("settings", "ms"),
    [
        ({"max_hint_window": "3h"}, 3 * HOUR_MS),
        ({"max_hint_window": "10800000ms"}, 3 * HOUR_MS),
        ({"max_hint_window_in_ms": "10800000"}, 3 * HOUR_MS),
        ({}, 0),
    ],
)
def test_the_setting_in_all_its_forms(settings: dict[str, str], ms: int) -> None:
    assert hint_window_ms(settings) == ms
