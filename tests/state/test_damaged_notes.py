"""Small objects that are made again hold up nobody when they are damaged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ringsync.config import Config
from ringsync.progress import Progress, read_progress
from ringsync.service import look as look_module
from ringsync.service.look import look
from ringsync.service.problem import Kind
from ringsync.state.processor_error import ErrorTable
from ringsync.storage.local import LocalStore
from tests.service.test_damaged_statuses import Airflow

CONFIG = Config.model_validate(
    {"server_name": "s", "cassandra": {"contact_points": ["a"]}, "store": {"url": "lake"}, "kafka": None}
)
DAMAGED = [b"", b"{", b"[]", b"7", b'"x"', b"null", b'{"since_ms": null}', b"X"]
"""The last: other bytes than were written."""


def damage(store: LocalStore, folder: Path, key: str, data: bytes) -> None:
    if data != b"X":
        store.put(key, data)
        return
    store.put(key, b'{"since_ms": 1, "rows": 1}')
    path = folder / key
    path.write_bytes(b"X" + path.read_bytes()[1:])


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_count_of_errors_does_not_hold_up_the_node(tmp_path: Path, data: bytes) -> None:
    store, now_s = LocalStore(tmp_path), 1_000_000.0
    table = object.__new__(ErrorTable)
    table._store, table._most_per_hour, table._clock = store, 10, lambda: now_s
    damage(store, tmp_path, "errors/written/n.json", data)
    assert table._allow("n", 4) == 4
    assert table._allow("n", 9) == 6, "it counts anew"


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_progress_is_none_yet(tmp_path: Path, data: bytes) -> None:
    store = LocalStore(tmp_path)
    damage(store, tmp_path, "progress/r.json", data)
    assert read_progress(store, "r") == Progress()


@pytest.mark.parametrize("data", [*DAMAGED[:5], b"{}", b"X"])
def test_a_damaged_note_of_the_database_hides_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(look_module, "client_of", lambda _: Airflow())
    store = LocalStore(tmp_path)
    damage(store, tmp_path, "state/database.json", data)
    store.put("status/scylla_log_stage/log.json", b'{"at_ms": 1, "logs": {"shop.t": {"error": "no quorum"}}}')
    seen = look(CONFIG, store, time.time())
    told = [problem for problem in seen.problems if problem.kind == Kind.STATUS_UNREADABLE]
    assert [problem.where for problem in told] == ["database"]
    assert "cdcservice start writes it anew" in told[0].text
    assert any(problem.kind == Kind.LOG_UNREADABLE for problem in seen.problems)
    assert not any(problem.where == "commitlog_stage/default" for problem in seen.problems), "it is ScyllaDB"
