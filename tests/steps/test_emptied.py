"""Cdc is only switched on where ``cdc_raw`` is emptied: where it is not, Cassandra refuses writes some day."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.session import ClusterSettings
from ringsync.config import Config
from ringsync.ring.ring import Host
from ringsync.status import LEFT_KEY, STOP_KEY
from ringsync.steps.bootstrap import emptied
from ringsync.steps.bootstrap.emptied import why_not_emptied
from ringsync.storage.local import LocalStore

NOW_S = 1_790_845_200.0
HOSTS = [
    Host(name, f"10.0.0.{number}", 9042, datacenter, "r1", (number,))
    for number, (name, datacenter) in enumerate((("a", "dc1"), ("b", "dc1"), ("c", "dc2")), 1)
]
WELL = {"endpoint": "…", "empties": True, "error": None}


def config(policy: str = "pressure", **sync: Any) -> Config:
    queues = {"queue_of_node": {"10.0.0.2": "rack-2", "10.0.0.3": "rack-2"}}
    return Config.model_validate(
        {
            **{"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "/lake"}},
            **{"archive": {"policy": policy}, "sync": {**queues, **sync}},
        }
    )


class Said:
    """What the loops have said."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)

    def say(self, loop: str, age_s: float = 5.0, error: str | None = None, **nodes: Any) -> None:
        status = {"at_ms": int((NOW_S - age_s) * 1000), "error": error, "nodes": nodes}
        self.store.put(f"status/{loop}.json", json.dumps(status).encode())

    def why(self, config: Config, hosts: list[Host] = HOSTS, deaf: str = "") -> str:
        return why_not_emptied(config, self.store, hosts, lambda host: host.id not in deaf, NOW_S)


@pytest.fixture
def said(tmp_path: Path) -> Said:
    return Said(tmp_path)


def test_on_a_new_cluster_it_says_what_to_run(said: Said) -> None:
    why = said.why(config())
    assert why.startswith(
        "nobody empties cdc_raw of 10.0.0.1:9042 (queue default: its workers have said nothing in the last five "
        "minutes), 10.0.0.2:9042 (queue rack-2: "
    )
    assert "Cassandra refuses writes to tables with cdc: run cdcservice start" in why


@pytest.mark.parametrize("loop", ["commitlog_stage", "commitlog_archive"])
def test_the_word_of_stage_or_archive_is_enough(said: Said, loop: str) -> None:
    said.say(f"{loop}/default", a=WELL)
    said.say(f"{loop}/rack-2", b=WELL, c=WELL)
    assert said.why(config()) == ""


@pytest.mark.parametrize(
    ("policy", "loop", "stopped"),
    [
        ("always", "commitlog_stage", False),  # then the stage deletes nothing
        ("off", "commitlog_archive", False),
        ("off", "commitlog_stage", True),
        ("pressure", "commitlog_stage", True),
    ],
)
def test_who_will_not_delete_counts_for_nothing(said: Said, policy: str, loop: str, stopped: bool) -> None:
    said.say(f"{loop}/default", a=WELL)
    if stopped:
        said.store.put(STOP_KEY, b"{}")
    assert "10.0.0.1:9042" in said.why(config(policy), HOSTS[:1])


@pytest.mark.parametrize(
    ("age_s", "node", "reason"),
    [
        (301, WELL, "its workers have said nothing in the last five minutes"),
        (5, None, "commitlog_stage does not know the node yet"),
        (5, {"empties": False, "error": "nothing can be deleted in /raw"}, "nothing can be deleted in /raw"),
        (5, {"empties": False, "error": None}, "it has not claimed the folder yet"),
        (5, {"is_read": True, "error": None}, "it has not claimed the folder yet"),
    ],
)
def test_each_node_needs_a_fresh_word_of_its_own(said: Said, age_s: float, node: Any, reason: str) -> None:
    said.say("commitlog_stage/default", a=WELL)
    said.say("commitlog_stage/rack-2", age_s, c=WELL, **({"b": node} if node else {}))
    why = said.why(config(), HOSTS[:2])
    assert "10.0.0.1" not in why
    assert f"10.0.0.2:9042 (queue rack-2: {reason}" in why.replace("commitlog_stage: ", "")


def test_a_loop_that_fails_empties_nothing(said: Said) -> None:
    """What it has said of its nodes is older: their last state is kept while its cycles fail."""
    said.say("commitlog_stage/default", error="OSError: the store is full", a=WELL)
    assert "(queue default: commitlog_stage: OSError: the store is full)" in said.why(config(), HOSTS[:1])


def test_a_loop_that_hangs_empties_nothing(said: Said) -> None:
    busy = {"since_ms": (NOW_S - 301) * 1000}
    status = {"at_ms": NOW_S * 1000, "busy": busy, "nodes": {"a": WELL}}
    said.store.put("status/commitlog_archive/default.json", json.dumps(status).encode())
    assert "its workers have said nothing" in said.why(config(), HOSTS[:1])


def test_whoever_has_left_gets_no_table_with_cdc(said: Said) -> None:
    """The archive's last run goes on for minutes, and says that it empties the nodes; then nobody does."""
    said.say("commitlog_archive/default", a=WELL)
    said.store.put(LEFT_KEY, b"{}")
    assert "10.0.0.1:9042 (cdcservice leave has been run)" in said.why(config(), HOSTS[:1])


def test_a_damaged_status_is_no_word(said: Said) -> None:
    for damaged in (b"{", b"[]", b'{"at_ms": null, "nodes": {}}', b'{"nodes": {}}', b'{"at_ms": 1e99}'):
        said.store.put("status/commitlog_stage/default.json", damaged)
        assert "10.0.0.1:9042" in said.why(config(), HOSTS[:1]), damaged


def test_nodes_of_datacenters_that_are_not_read_must_capture_nothing(said: Said) -> None:
    """Nobody empties their ``cdc_raw``, and their writes fail as others do."""
    only = config(datacenters=["dc1"])
    said.say("commitlog_stage/default", a=WELL)
    said.say("commitlog_stage/rack-2", b=WELL)
    assert said.why(only, deaf="c") == ""
    assert "10.0.0.3:9042 (sync.datacenters leaves out dc2: set cdc_enabled: false on its nodes)" in said.why(only)
    # A node of a datacenter that is read, which captures nothing, fills nothing either.
    assert said.why(config(), [HOSTS[0], replace(HOSTS[2], datacenter="dc1")], deaf="c") == ""


def test_a_datacenter_is_asked_by_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node had one, with connections to all nodes of its datacenter, until the process ended."""
    opened, closed = list[str](), list[str]()

    def connect(settings: ClusterSettings) -> Any:
        name = settings.local_datacenter or ""
        opened.append(name)
        return SimpleNamespace(cluster=SimpleNamespace(shutdown=lambda: closed.append(name)))

    monkeypatch.setattr(emptied, "connect", connect)
    monkeypatch.setattr(
        emptied, "read_settings", lambda session, host, names: {"cdc_enabled": str(host == "7").lower()}
    )
    hosts = [Host(str(n), f"10.0.0.{n}", 9042, f"dc{n % 2}", "r1", (n,)) for n in range(10)]
    with emptied.asked_nodes(config()) as captures:
        assert [captures(host) for host in hosts] == [n == 7 for n in range(10)]
        assert (opened, closed) == (["dc0", "dc1"], [])
    assert sorted(closed) == ["dc0", "dc1"]
