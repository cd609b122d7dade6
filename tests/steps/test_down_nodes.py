"""Since when a node is down, and for how long others keep hints for it, plan after plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from cassandra.cluster import NoHostAvailable

from ringsync.cluster.cluster import DEFAULT_HINT_WINDOW_MS, HINT_WINDOW, setting_ms
from ringsync.cluster.gossip import Heard
from ringsync.ring.ring import Host
from ringsync.service.delays import Limits
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.status import NODES, known_now
from ringsync.steps import down_nodes
from ringsync.steps.down_nodes import down_since, read_hint_window, status_of
from ringsync.steps.sync_plan import interval_at

HOUR_MS, MINUTE_MS = 3_600_000, 60_000
HOSTS = [Host(name, f"10.0.0.{n}", 9042, "dc1", "r1", (n,)) for n, name in enumerate("ab")]


def told(down: Mapping[str, int], now_ms: int, window_ms: int = 2 * HOUR_MS) -> list[tuple[str, str]]:
    hosts = [replace(host, up=host.id not in down) for host in HOSTS]
    told = {NODES: {"at_ms": now_ms, **status_of(hosts, down, interval_at(now_ms, MINUTE_MS), window_ms)}}
    statuses = known_now(told, now_ms / 1000)
    found = problems(statuses, {}, Expected.of_commit_logs(()), False, now_ms / 1000, limits=Limits())
    return [(problem.where, problem.text) for problem in found if problem.kind == Kind.NODE_PAST_HINTS]


def test_a_node_that_is_down_past_its_hints_is_named_until_it_is_up() -> None:
    down: dict[str, int] = {}
    for minute in range(150):
        interval = interval_at(minute * MINUTE_MS, MINUTE_MS)
        hosts = (HOSTS[0], replace(HOSTS[1], up=minute < 10))
        down = down_since(hosts, {"10.0.0.0"}, {}, down, interval)
        found = told(down, interval.start)
        assert bool(found) == (minute > 130), minute
    ((where, text),) = found
    assert where == "node 10.0.0.1:9042"
    assert "has been down for 2:19:00, and hints are kept for 2:00:00" in text
    assert down_since(HOSTS, {"10.0.0.1"}, {}, down, interval_at(151 * MINUTE_MS, MINUTE_MS)) == {}


def test_a_node_is_down_since_the_first_look_without_news_of_it() -> None:
    heard = {"a": Heard(1, 9, 10 * MINUTE_MS), "b": Heard(1, 7, 2 * MINUTE_MS, 3 * MINUTE_MS)}
    at = interval_at(10 * MINUTE_MS, MINUTE_MS)
    assert down_since(HOSTS, {"10.0.0.0"}, heard, {}, at) == {"b": 3 * MINUTE_MS}


def test_a_node_to_which_the_driver_is_connected_is_alive_whatever_another_has_heard() -> None:
    """What one node has heard of others may be old for hours: by gossip alone, live nodes were down."""
    heard = {"a": Heard(1, 9, 10 * MINUTE_MS), "b": Heard(1, 7, 2 * MINUTE_MS, 3 * MINUTE_MS)}
    at = interval_at(10 * MINUTE_MS, MINUTE_MS)
    assert down_since(HOSTS, {"10.0.0.0", "10.0.0.1"}, heard, {"b": 0}, at) == {}


def test_a_node_whose_clients_are_cut_off_gets_its_hints() -> None:
    """nodetool disablebinary: the driver has lost it, and the other nodes write to it."""
    hosts = (HOSTS[0], replace(HOSTS[1], up=False))
    heard = {name: Heard(1, 9, 10 * MINUTE_MS) for name in "ab"}
    assert down_since(hosts, {"10.0.0.0"}, heard, {"b": 0}, interval_at(10 * MINUTE_MS, MINUTE_MS)) == {}


@pytest.mark.parametrize("minutes", [1, 30])
def test_one_look_without_news_makes_nobody_dead(minutes: int) -> None:
    """However long it is after the last one."""
    length = minutes * MINUTE_MS
    heard = {"a": Heard(1, 9, 10 * length), "b": Heard(1, 7, 9 * length, 10 * length)}
    for behind in (0, 1):
        assert down_since(HOSTS, (), heard, {}, interval_at((10 + behind) * length, length)) == {}
    heard["b"] = Heard(1, 7, length, 10 * length)
    assert down_since(HOSTS, (), heard, {}, interval_at(10 * length, length)) == {}


def test_a_clock_that_was_ahead_does_not_count() -> None:
    hosts = (HOSTS[0], replace(HOSTS[1], up=False))
    assert down_since(hosts, (), {}, {"b": 9 * HOUR_MS}, interval_at(HOUR_MS, MINUTE_MS)) == {"b": HOUR_MS}


class Session:
    """Nodes that keep hints for two hours, if they answer."""

    asked = 0

    def execute_async(self, query: str, names: Any, host: Any) -> Any:
        self.asked += 1
        assert host is None, "whoever is alive"
        raise NoHostAvailable("all are away", {})


def test_whoever_is_alive_is_asked_for_the_window() -> None:
    """The first live node of the ring was: if it is in another datacenter, the driver cannot ask it, and the default
    counted, too short or too long."""
    session = Session()
    assert read_hint_window(session, of_scylla=True) == session.asked == 0
    assert read_hint_window(session, of_scylla=False) == 0
    assert session.asked == 1
    unknown = status_of(HOSTS, {}, interval_at(0, MINUTE_MS), 0)
    assert unknown["hint_window_ms"] == DEFAULT_HINT_WINDOW_MS


def test_a_plan_says_who_is_down_for_some_minutes() -> None:
    down = {"b": 0}
    at = interval_at(3 * HOUR_MS, MINUTE_MS)
    status = {NODES: {"at_ms": 0, **status_of(HOSTS, down, at, 1)}}
    end_s = (at.end + down_nodes.FRESH_MS) / 1000
    assert known_now(status, end_s) == status
    assert "down" not in known_now(status, end_s + 1)[NODES]


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
    assert setting_ms(settings, HINT_WINDOW) == ms
