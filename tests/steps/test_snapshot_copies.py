"""Copies of snapshots: how many pieces are in memory, what is copied again, and how all are removed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.formats.sstable.names import Descriptor
from ringsync.ledger import snapshots
from ringsync.ledger.snapshots import (
    COPIES,
    FOLDER,
    NodeSnapshot,
    StoredSSTable,
    bootstraps_with_snapshots,
    copied,
    put_failure,
    put_manifest,
    remove_snapshots,
    void_snapshot,
)
from ringsync.steps.archive.upload_pace import UploadPace
from ringsync.steps.bootstrap import snapshot as sstable_snapshot
from ringsync.steps.bootstrap.space import Space
from ringsync.steps.tables import Outcome, each
from ringsync.storage.local import LocalStore
from ringsync.storage.port import Stat

BOOTSTRAP = "20261125T101500Z-0000000a"
PIECE, PIECES, TABLES, UPLOADS = 1000, 6, 10, 4
ID = "0" * 32
HOST: Any = SimpleNamespace(id="id-1", endpoint="10.0.0.1:9042")
WANTED: Any = SimpleNamespace(check=lambda: None, sleep=time.sleep)


class Counting(LocalStore):
    """A store that counts what is asked of it, and how much of that at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls, self.now, self.most = Counter[str](), Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def _counted(self, name: str, *given: Any, **options: Any) -> Any:
        with self._lock:
            self.calls[name] += 1
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        try:
            time.sleep(0.001)
            return getattr(super(), name)(*given, **options)
        finally:
            with self._lock:
                self.now[name] -= 1

    def put(self, key: str, data: bytes, **options: Any) -> Stat:
        found: Stat = self._counted("put", key, data, **options)
        return found

    def get(self, key: str) -> bytes:
        found: bytes = self._counted("get", key)
        return found

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        found: list[Stat] = self._counted("list", prefix, start)
        self.calls[f"listed {prefix}"] += len(found)
        return found

    def delete(self, key: str) -> None:
        self._counted("delete", key)


def sstable(folder: Path, table: str, number: str = "1") -> StoredSSTable:
    """An SSTable of some pieces, and of statistics."""
    descriptor = Descriptor("nb", number, "big", str(folder / f"{table}-{ID}"), "k", table, ID)
    sizes = {"Data.db": PIECE * PIECES, "Statistics.db": 10}
    Path(descriptor.folder).mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        Path(descriptor.path(name)).write_bytes(b"x" * size)
    return StoredSSTable(descriptor, sizes)


@pytest.fixture
def this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sstable_snapshot, "PIECE_BYTES", PIECE)
    with ThreadPoolExecutor(UPLOADS) as uploads:
        settings = SimpleNamespace(sstable=SimpleNamespace(uploads=UPLOADS))
        yield SimpleNamespace(
            store=Counting(tmp_path / "lake"), config=settings, pace=UploadPace(None), space=Space(), uploads=uploads
        )


def test_no_more_pieces_are_in_memory_than_are_uploaded_at_once(
    this: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tables of a run together; and who waits for the speed limit has read none yet."""
    events: dict[int, list[str]] = {}

    def note(event: str) -> None:
        events.setdefault(threading.get_ident(), []).append(event)

    class Pace(UploadPace):
        def wait(self, size: int, sleep: Any = None) -> None:
            note("wait")

    opened = Path.open

    def noted(path: Path, *given: Any, **options: Any) -> Any:
        note("read")
        return opened(path, *given, **options)

    this.pace = Pace(None)
    found = {("k", f"t{number}"): sstable(tmp_path, f"t{number}") for number in range(TABLES)}
    monkeypatch.setattr(Path, "open", noted)

    def copy(name: tuple[str, str]) -> Any:
        sstable_snapshot._copy(this, BOOTSTRAP, HOST, [found[name]], WANTED)
        return {}, 0

    outcome = Outcome()
    each("run", found, copy, outcome)
    assert not outcome.failures
    assert this.store.calls["put"] == TABLES * (PIECES + 1)
    assert 1 < this.store.most["put"] <= UPLOADS
    assert len(events) <= UPLOADS
    for of_thread in events.values():
        assert of_thread == ["wait", "read"] * (len(of_thread) // 2)


def test_what_is_there_is_neither_read_nor_copied_again(this: Any, tmp_path: Path) -> None:
    """But of small files, as Statistics.db, which Cassandra writes anew, e.g. when it marks an SSTable as repaired."""
    found = sstable(tmp_path, "t")
    sstable_snapshot._copy(this, BOOTSTRAP, HOST, [found], WANTED)
    before = this.store.calls["put"]
    Path(found.descriptor.path("Statistics.db")).write_bytes(b"y" * 10)
    (gone, *_) = [stat.key for stat in this.store.list(COPIES) if "Data.db" in stat.key]
    this.store.delete(gone)
    sstable_snapshot._copy(this, BOOTSTRAP, HOST, [found], WANTED)
    assert this.store.calls["put"] == before + 2
    contents = {stat.key.rpartition("/")[0][-6:]: this.store.get(stat.key) for stat in this.store.list(COPIES)}
    assert contents == {"ata.db": b"x" * PIECE, "ics.db": b"y" * 10}


def test_a_damaged_copy_stays_for_its_readers_and_is_copied_again(this: Any, tmp_path: Path) -> None:
    """A piece may be damaged whose size, and whose checksum as the store tells it, are right."""
    store, sstables = this.store, [sstable(tmp_path, "t"), sstable(tmp_path, "t", "2")]
    sstable_snapshot._copy(this, BOOTSTRAP, HOST, sstables, WANTED)
    there = [copied(BOOTSTRAP, HOST.id, one, PIECE) for one in sstables]
    put_manifest(store, BOOTSTRAP, NodeSnapshot(HOST.id, store.url, 1, tuple(there)))
    file = there[0].descriptor.path("Data.db")
    key = snapshots.piece_key(file, PIECE)
    store.put(key, b"?" * PIECE)
    keys = [stat.key for stat in store.list(COPIES)]
    void_snapshot(store, BOOTSTRAP, HOST.id, there[0], f"the snapshot of a node is damaged: {file}, 1,000 bytes at 1")
    assert [stat.key for stat in store.list(COPIES)] == keys

    def stop() -> None:
        if len(store.list(COPIES)) > len(keys) - PIECES:
            raise OSError("cut off")

    before = store.calls["put"]
    with pytest.raises(OSError, match="cut off"):
        sstable_snapshot._copy(this, BOOTSTRAP, HOST, sstables, SimpleNamespace(check=stop, sleep=time.sleep))
    put_failure(store, BOOTSTRAP, HOST.id, "cut off")
    sstable_snapshot._copy(this, BOOTSTRAP, HOST, sstables, WANTED)
    assert [stat.key for stat in store.list(COPIES)] == keys
    assert store.get(key) == b"x" * PIECE
    assert store.calls["put"] <= before + PIECES + 2  # a failure's note, and the small file


def test_copies_are_removed_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_DELETED_UNSEEN", 50)
    store, pieces = Counting(tmp_path), 200
    snapshots.say_begun(store, BOOTSTRAP, 1)
    for number in range(pieces):
        store.put(f"{COPIES}{BOOTSTRAP}/id-1/k/t-{ID}/nb-1-big-Data.db/{number:015d}", b"x")
    store.put(f"{FOLDER}{BOOTSTRAP}/id-1.json", b"{}")
    store.calls.clear()
    assert bootstraps_with_snapshots(store) == [BOOTSTRAP]
    assert store.calls[f"listed {FOLDER}"] == 2  # no piece: each queue's archive looks for old ones all the time
    remove_snapshots(store, BOOTSTRAP, wholly=False)
    assert store.calls["delete"] == pieces + 2
    assert store.calls["get"] < 10
    assert 4 < store.most["delete"] <= 10
    assert store.list(COPIES) == store.list(FOLDER) == []
