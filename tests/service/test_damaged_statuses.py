"""A status object that is damaged or of another version hides nothing but itself, from whoever reads statuses."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.airflow_client import DagHealth
from ringsync.config import Config
from ringsync.metrics import exposition
from ringsync.ring.ring import Host
from ringsync.service import look as look_module
from ringsync.service import status_command
from ringsync.service.expected import Expected
from ringsync.service.look import look
from ringsync.service.problem import Kind
from ringsync.service.published import wait_until_published
from ringsync.service.show import status_lines
from ringsync.service.workers import stage_reports, told_before
from ringsync.status import NODES, read_status, read_statuses
from ringsync.steps.close.closing import log_progress, progress
from ringsync.steps.loop import SignOfLife
from ringsync.storage.local import LocalStore
from ringsync.storage.port import NotFoundError, ObjectStore, Stat
from tests.test_metrics import NODE, TABLE

AT_MS = 1_800_000_000_000
NOW_S = AT_MS / 1000 + 1
CONFIG = Config.model_validate(
    {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "/lake"}, "kafka": None}
)
HOST = Host("n1", "10.0.0.1", 9042, "dc1", "r1", (0,), True)
LOG = {"until_ms": AT_MS, "behind_ms": 5, "waiting": 0, "waiting_from_ms": None, "error": None, "table_id": "a"}
ARCHIVED = {"endpoint": "10.0.0.1:9042", "total_bytes": 4 << 30, "free_bytes": 3 << 30, "waiting": 0, "archived": 0}
BEHIND = {"behind_ms": {"replica": 400_000, "kafka": 400_000}}
STATUSES: dict[str, dict[str, Any]] = {
    "commitlog_stage/default": {
        "nodes": {"n1": {**NODE, "clear_at_ms": AT_MS, "is_read": True, "refused": None}},
        "error": None,
    },
    "bucket_close/close": {
        **{
            "tables": {"shop.orders": {**TABLE, "published_pass": 7, "topic": "s.shop.orders", **BEHIND}},
            "error": None,
        },
        **{"began_ms": AT_MS, "unread": {"10.0.0.1:9042": "no worker"}, "unread_since_ms": {"n1": AT_MS}},
        **{"left_out": {"shop.new": "a type"}, "others_failed": {"ab": "no quorum"}, "commits_broken": {"k": "crc"}},
        **{"rows_homeless": {"cd": 5}, "homeless_since_ms": {"cd": 0}, "datacenters_left_out": {"dc2": ["b:9042"]}},
        "busy": {"since_ms": AT_MS, "with": "shop.orders"},
    },
    NODES: {
        "down": {"n2": {"endpoint": "10.0.0.2:9042", "since_ms": 0, "is_cut_off": False}},
        **{"down_until_ms": AT_MS + 60_000, "hint_window_ms": 10_800_000},
    },
    "out_of_sequence/queue": {
        **{"waiting": 5, "oldest_ms": AT_MS, "error": None, "published": 0, "duplicates": 0},
        **{"files_broken": 2, "broken": {"f": "crc"}},
    },
    "schema_update/schema": {"changes": 4, "problems": ["no quorum"], "disagreement_since_ms": AT_MS},
    "alarms/alarms": {"raised": 0, "problems": []},
    "commitlog_archive/default": {"nodes": {"n1": {**ARCHIVED, "error": "no store"}}, "problems": []},
    "archive_reprocess/archive": {"waiting": 1, "unreadable": ["a/b"], "problems": ["cdc/a is damaged"]},
    "scylla_log_stage/log": {
        **{"logs": {"shop.orders": LOG}, "clear_at_ms": AT_MS, "clock_skew_ms": 3, "generations": 2, "rows": 1},
        **{"errors": 1, "empty_generations_ms": [AT_MS]},
    },
    "replica_verify/proofs": {
        "proofs": {
            "shop.orders": {
                **{"proved_ms": AT_MS, "overdue_ms": AT_MS, "ranges": 256, "ranges_differing": 2, "rows_differing": 7},
                **{"found_ms": AT_MS, "run": "r"},
            }
        }
    },
    "bootstrap/ab": {"table": "shop.x", "bootstrap": "b1", "step": "scan", "fraction": 0.5, "run": "r"},
}


class Memory:
    """An object store in memory: what is read hundreds of times is here soon."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes, **_: Any) -> None:
        self._objects[key] = data

    say = put

    def get(self, key: str) -> bytes:
        if key not in self._objects:
            raise NotFoundError(key)
        return self._objects[key]

    def stat(self, key: str) -> Stat | None:
        return Stat(key, 1, 0, "1") if key in self._objects else None

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        return [Stat(key, 1, 0, "1") for key in sorted(self._objects) if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def uri(self, key: str) -> str:
        return key


class Airflow:
    """Airflow in which all DAGs are on, and none has run."""

    def health(self, dags: Sequence[str], since: Any, *, all_tasks: bool) -> dict[str, DagHealth]:
        return dict.fromkeys(dags, DagHealth(False, None, None))


def paths(document: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def changed(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The document without a field (value: KeyError), or with another value there."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


def put_all(store: ObjectStore) -> None:
    for loop, status in STATUSES.items():
        store.put(f"status/{loop}.json", json.dumps({"at_ms": AT_MS, **status}).encode())


def read_by_all(store: ObjectStore) -> look_module.Look:
    """What every reader of statuses does; none of them may fail."""
    seen = look(CONFIG, store, NOW_S)
    list(status_lines(seen.statuses, seen.dags, NOW_S))
    exposition(read_statuses(store))
    wait_until_published(store, CONFIG.sync, AT_MS, 0.0, clock=lambda: NOW_S, sleep=lambda _: None)
    for expected in (Expected.of_commit_logs(("default",)), Expected.of_cdc_logs(())):
        stage_reports(seen.statuses, expected, {})
        told_before(seen.statuses, expected)
    staged = read_status(store, "commitlog_stage/default")
    progress([HOST], {"default": staged} if staged else {}, lambda _: "default", AT_MS, 1000, {})
    log_progress(read_status(store, "scylla_log_stage/log"), AT_MS, 1000, {})
    SignOfLife(store, "bucket_close", "close", lambda: None, {"tables": {}, "error": None})
    return seen


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    made: Any = Memory()
    put_all(made)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("loop", STATUSES)
def test_any_field_may_be_missing_or_of_another_type(store: ObjectStore, loop: str) -> None:
    others = {problem.text for problem in read_by_all(store).problems if problem.owner != loop}
    others = {text for text in others if "unreadable" not in text}
    for path in paths({"at_ms": AT_MS, **STATUSES[loop]}):
        for value in (KeyError, None, [], {}, "x", 7, True, {"a": {"b": None}}, [None], 10**15, 10**400):
            document = changed({"at_ms": AT_MS, **STATUSES[loop]}, path, value)
            store.say(f"status/{loop}.json", json.dumps(document).encode())
            seen = read_by_all(store)
            told = {problem.text for problem in seen.problems}
            # A loop that tells of another moment may be silent; all others are heard.
            assert not {text for text in others if text not in told and loop not in text}, (path, value)
            unreadable = [problem for problem in seen.problems if problem.kind == Kind.STATUS_UNREADABLE]
            assert (loop not in seen.statuses) == (len(unreadable) == 1), (path, value)


def test_who_was_down_by_an_old_plan_is_not_told_of(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_all(store)
    assert "down" in look(CONFIG, store, NOW_S).statuses[NODES]
    later_s = STATUSES[NODES]["down_until_ms"] / 1000 + 1
    assert "down" not in look(CONFIG, store, later_s).statuses[NODES]
    for now_s in (NOW_S, later_s):
        monkeypatch.setattr(status_command, "load_config", lambda _: CONFIG)
        monkeypatch.setattr(status_command, "store_of", lambda _: store)
        monkeypatch.setattr(status_command, "raised_now", lambda _: [])
        monkeypatch.setattr(status_command, "time", SimpleNamespace(time=lambda now_s=now_s: now_s))
        status_command.status(argparse.Namespace(conf="", prometheus=True), None)  # type: ignore[arg-type]
        assert ("ringsync_node_down" in capsys.readouterr().out) == (now_s == NOW_S)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"7", b"null", b'"x"', b"[]", b"{}", b'{"at_ms": null}', b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_status_is_named(store: ObjectStore, data: bytes) -> None:
    """Also a stray object, which no loop writes again."""
    before = read_by_all(store)
    for loop in ("bucket_close/close", "stray/loop"):
        store.put(f"status/{loop}.json", data)
    store.put("status/.DS_Store", data or b"x")
    seen = read_by_all(store)
    unreadable = [problem for problem in seen.problems if problem.kind == Kind.STATUS_UNREADABLE]
    assert [problem.where for problem in unreadable] == ["bucket_close/close", "stray/loop"]
    assert "status/stray/loop.json" in unreadable[1].text
    hidden = {problem.text for problem in before.problems} - {problem.text for problem in seen.problems}
    assert hidden == {problem.text for problem in before.problems if problem.owner == "bucket_close/close"}
    store.delete("status/stray/loop.json")
    put_all(store)
    assert read_by_all(store).problems == before.problems


def test_bytes_that_are_not_those_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    store = LocalStore(tmp_path)
    put_all(store)
    path = tmp_path / "status" / "commitlog_stage" / "default.json"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    seen = read_by_all(store)
    assert [problem.where for problem in seen.problems if problem.kind == Kind.STATUS_UNREADABLE] == [
        "commitlog_stage/default"
    ]
    assert not any(problem.kind == Kind.LOOP_SILENT and "stage" in problem.where for problem in seen.problems)
