"""What the archive says of a node's room: whether the folder is the node's, and that it moves."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringsync.ledger.archive import WAITING
from ringsync.ledger.finished_segments import finished_segments
from ringsync.ledger.staging import StageCommit, commit_keys, put_commit
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.status import read_status
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.archive import commitlog_archive
from ringsync.steps.archive.commitlog_archive import Archiver
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ChecksumError
from tests.steps.test_archive import Nodes, Silent, archiver, config, fill, names
from tests.steps.test_stager_cdc_off import index_of


def told(watch: Archiver, name: str = "a") -> tuple[list[Kind], str]:
    """What is raised of a node while the sync is stopped, and why."""
    statuses = {"commitlog_archive/default": {"at_ms": 0, "nodes": watch.status()}}
    found = problems(statuses, {}, Expected.of_commit_logs(["default"], archives=True), True, 0.0)
    return [problem.kind for problem in found if "node" in problem.where], str(watch.status()[name]["error"])


@pytest.mark.parametrize("before", ["claimed", "claimed by another process", "never seen", "silent"])
def test_a_folder_without_segments_is_not_mounted(raw: Path, store: LocalStore, tmp_path: Path, before: str) -> None:
    """Every node has a segment there from its start. All was well: cdc_raw filled, and the sync was stopped."""
    nodes = Silent({"a": raw}) if before == "silent" else Nodes({"a": raw}, total="100MiB")
    settings = config(total_mb=100)
    settings.sync.cdc_raw = str(raw)
    watch = Archiver(settings, store, "default", nodes)
    if before.startswith("claimed"):
        fill(raw, 2)
        watch.cycle()
        assert told(watch) == ([], "None")
        shutil.move(raw, tmp_path / "volume")
        watch = watch if before == "claimed" else Archiver(settings, store, "default", nodes)
    raw.mkdir()
    for _ in range(2):
        watch.cycle()
        kinds, why = told(watch)
        assert (kinds, "is it the node's cdc_raw, mounted?" in why) == ([Kind.CDC_RAW_FULL], True)
        assert not watch.status()["a"]["empties"], "cdc must not be switched on"
    raw.rmdir()
    watch.cycle()
    assert told(watch)[0] == [Kind.CDC_RAW_FULL]
    fill(tmp_path / "volume", 2)
    shutil.move(tmp_path / "volume", raw)
    watch.cycle()
    assert told(watch) == ([], "None")


def test_a_folder_whose_segments_have_all_left_is_known_by_its_claim(raw: Path, store: LocalStore) -> None:
    """While cdc_raw is full, Cassandra links no new segment there."""
    files = fill(raw, 3)
    nodes = Nodes({"a": raw}, total="100MiB")
    archiver(store, nodes, policy="always").cycle()
    files[-1].unlink()
    index_of(files[-1]).unlink()
    watch = archiver(store, nodes)
    watch.cycle()
    assert (told(watch), watch.status()["a"]["empties"]) == (([], "None"), True)


def test_a_node_that_cannot_be_looked_at_hides_nothing_that_was_archived(
    raw: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run failed: ``archive_reprocess`` was not started by it, and nobody watched any node while it rested."""
    fill(raw, 5)
    settings = config(poll_interval_ms=10)
    settings.sync.run_s = 0.1
    monkeypatch.setattr(commitlog_archive, "_Cluster", lambda _: Nodes({"a": raw, "b": tmp_path / "nowhere"}))
    monkeypatch.setattr(commitlog_archive, "ClearsAside", lambda *_: SimpleNamespace(clear=lambda: None))
    given = (settings, store, None, "run", SimpleNamespace(queue="default"))
    report, code = commitlog_archive.run(Application("commitlog_archive", "conf", *given))  # type: ignore[arg-type]
    assert (code, report["segments"]) == (ExitCode.OK, 2)
    assert "nowhere" in (read_status(store, "commitlog_archive/default") or {})["nodes"]["b"]["error"]


@pytest.mark.parametrize("queue", ["default", "other"])
def test_an_archive_clears_away_what_its_queue_has_to(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    """Old snapshots of its own nodes; what uploads have left, one queue for all."""
    fill(raw, 1, megabytes=0)
    settings, of, cleared, tidied = config(poll_interval_ms=1), list[str](), list[str](), list[str]()
    settings.sync.run_s = 0.01

    def clears_aside(_: object, __: object, queue: str) -> SimpleNamespace:
        of.append(queue)
        return SimpleNamespace(clear=lambda: cleared.append(queue))

    monkeypatch.setattr(commitlog_archive, "_Cluster", lambda _: Nodes({"a": raw}))
    monkeypatch.setattr(commitlog_archive, "ClearsAside", clears_aside)
    monkeypatch.setattr(Archiver, "tidy_aside", lambda _: tidied.append(queue))
    given = (settings, store, None, "run", SimpleNamespace(queue=queue))
    commitlog_archive.run(Application("commitlog_archive", "conf", *given))  # type: ignore[arg-type]
    assert (of, set(cleared)) == ([queue], {queue})
    assert bool(tidied) == (queue == "default")


def test_a_turn_at_the_configured_speed_is_no_standstill(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 segments of 32 MB at 1 MB/s: nothing was said until the last had left, for over five minutes: critical."""
    fill(raw, 16, megabytes=0)
    clock = SimpleNamespace(now=0.0)
    watch = Archiver(config(policy="always", uploads=16), store, "default", Nodes({"a": raw}, total="100MiB"))
    lock = threading.Lock()

    def uploads(_: int) -> None:
        with lock:
            clock.now += 32.0

    monkeypatch.setattr(watch._pace, "wait", uploads)
    monkeypatch.setattr(commitlog_archive, "SAY_EVERY_S", 0.0)
    said = list[int]()
    watch.cycle(lambda: said.append(watch.status()["a"]["archived"]))
    assert clock.now == 512.0
    assert set(range(1, 17)) <= set(said)


@pytest.mark.parametrize("damage", [b"{", b"{}", b"[]", b'{"ranges": [[1', b'{"ranges": [7]}', b"\xff"])
@pytest.mark.parametrize("what", ["finished", "commit"])
def test_what_was_staged_is_damaged_and_all_is_archived(raw: Path, store: LocalStore, what: str, damage: bytes) -> None:
    """Nothing was archived, and no object was named."""
    fill(raw, 6, megabytes=0)
    put_commit(store, StageCommit("a", 1, (), {}, {1000: 1}, {}, ()))
    store.put("staging/finished/a.json" if what == "finished" else commit_keys(store, "a")[-1], damage)
    watch = archiver(store, Nodes({"a": raw}), policy="always")
    watch.cycle()
    assert told(watch) == ([], "None")
    assert len(names(store, WAITING)) == 6


def test_damage_of_what_was_staged_names_the_object(store: LocalStore) -> None:
    store.put("staging/finished/a.json", b'{"ranges": 7}')
    with pytest.raises(ChecksumError, match=r"staging/finished/a.json.* \(TypeError\): restore it"):
        finished_segments(store, "a")
