"""The archive of commit logs: room is made before Cassandra's limit, nothing is deleted early, and all comes back."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pytest

from ringsync.ledger import archive
from ringsync.ledger.archive import READ, WAITING, ArchivedSegment, archived
from ringsync.ledger.staging import StageCommit, put_commit
from ringsync.ring.ring import Host
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind, Problem
from ringsync.steps.archive import commitlog_archive
from ringsync.steps.archive.commitlog_archive import ArchivedNode, Archiver
from ringsync.steps.archive.raw_folder import look, total_space
from ringsync.steps.archive.upload_pace import UploadPace
from ringsync.steps.stage.claims import Place, claim, put_place
from ringsync.storage.local import LocalStore
from ringsync.storage.port import StorageError, UnavailableError
from tests.mortal_store import Killed, MortalStore
from tests.steps.test_stager import FOLDER
from tests.steps.test_stager_cdc_off import index_of

SEGMENTS = sorted(FOLDER.glob("*.log.xz"))
MB = 2**20


class Nodes:
    """A cluster whose nodes tell where their ``cdc_raw`` is, or that is away."""

    def __init__(self, folders: Mapping[str, Path], total: str = "8MiB") -> None:
        self.folders, self.total, self.is_away = folders, total, False

    def nodes(self, wants: Callable[[ArchivedNode], bool]) -> Iterator[tuple[ArchivedNode, dict[str, str]]]:
        if self.is_away:
            raise ConnectionError("no node answers")
        for host, folder in self.folders.items():
            told = {"cdc_enabled": "true", "cdc_raw_directory": str(folder), "cdc_total_space": self.total}
            node = ArchivedNode(host, f"{host}:9042", host)
            yield node, told if wants(node) else {}


class Silent(Nodes):
    """Its nodes cannot be asked, as those of another datacenter."""

    def nodes(self, wants: Callable[[ArchivedNode], bool]) -> Iterator[tuple[ArchivedNode, dict[str, str]]]:
        for node, _ in super().nodes(wants):
            yield node, {}


def config(**settings: Any) -> Any:
    given = {
        "policy": "pressure",
        "free_percent": 49.0,
        "free_mb": 0,
        "total_mb": 0,
        "uploads": 2,
        "megabytes_per_s": None,
        "retention_days": 30.0,
        **settings,
    }
    sync = SimpleNamespace(cdc_raw=None, queue_of=lambda address, host: "default", run_s=600.0)
    return SimpleNamespace(archive=SimpleNamespace(**given), sync=sync)


def plain_segment(identity: int, size: int, byte: int) -> bytes:
    """A segment of Cassandra 4 with one section, which has no records, and no zeros behind it."""

    def halves(number: int) -> tuple[int, int]:
        return number & 0xFFFFFFFF, number >> 32

    parameters = b"{}"
    head = struct.pack(">iqH", 7, identity, len(parameters)) + parameters
    checked = struct.pack(">iIIi", 7, *halves(identity), len(parameters)) + parameters
    head += struct.pack(">I", zlib.crc32(checked))
    marker = struct.pack(">II", size, zlib.crc32(struct.pack(">III", *halves(identity), len(head))))
    return (head + marker).ljust(size, bytes([byte]))


def fill(folder: Path, count: int, *, megabytes: int = 1) -> list[Path]:
    """Finished segments of a node, and the one that it writes to."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"CommitLog-7-{1000 + number}.log" for number in range(count + 1)]
    for number, file in enumerate(files):
        file.write_bytes(plain_segment(1000 + number, max(megabytes * MB, 100), number))
        index_of(file).write_text("100" if number == count else f"{file.stat().st_size}\nCOMPLETED")
    return files


def archiver(store: Any, nodes: Nodes, **settings: Any) -> Archiver:
    return Archiver(config(**settings), store, "default", nodes)


def failing(watch: Archiver) -> bool:
    """Whether a node cannot be looked at, or archived."""
    return any(node["error"] for node in watch.status().values())


def names(store: Any, folder: str) -> list[str]:
    return [entry.name for entry in archived(store, folder)]


def test_the_oldest_finished_segments_leave_until_there_is_room(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 5)
    contents = [file.read_bytes() for file in files]
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    # 6 MB of 8 are used, 4 may be: two leave.
    assert [file.exists() for file in files] == [False, False, True, True, True, True]
    assert [index_of(file).exists() for file in files[:2]] == [False, False]
    assert names(store, WAITING) == [file.name for file in files[:2]]
    for file, content in zip(files[:2], contents, strict=False):
        assert store.get(f"cdc/a/{file.name}") == content
        assert store.get(f"cdc/a/{index_of(file).name}") == f"{MB}\nCOMPLETED".encode()
    status = watch.status()["a"]
    assert (status["error"], status["archived"], status["waiting"], failing(watch)) == (None, 2, 3, False)
    assert status["empties"]
    assert watch.counts == Counter(segments=2, bytes=status["archived"] * (MB + 17), removed=2, unread=2)
    watch.cycle()
    assert len(names(store, WAITING)) == 2, "there is room"


def test_while_there_is_room_neither_cluster_nor_store_is_asked(raw: Path, store: LocalStore) -> None:
    fill(raw, 2)
    nodes = Nodes({"a": raw})
    watch = archiver(store, nodes)
    watch.cycle()
    asked: list[str] = []
    for name in ("put", "get", "list", "stat", "delete"):
        setattr(store, name, lambda *given, name=name, **_: asked.append(name))
    nodes.is_away = True
    for _ in range(5):
        watch.cycle()
    assert (asked, failing(watch)) == ([], False)


def test_the_folder_of_a_cluster_that_is_away_is_watched(raw: Path, store: LocalStore) -> None:
    """Of a new process, too: the sync is stopped or broken, and Cassandra is busy with a full folder."""
    fill(raw, 1)
    nodes = Nodes({"a": raw})
    archiver(store, nodes).cycle()
    nodes.is_away = True
    fill(raw, 6)
    watch = archiver(store, nodes)
    watch.cycle()
    assert len(names(store, WAITING)) == 3
    assert watch.status()["a"]["total_bytes"] == 8 * MB


def test_nothing_is_deleted_that_is_not_durable(raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fill(raw, 6)
    watch = archiver(store, Nodes({"a": raw}))
    put = store.put

    def refuse(key: str, data: bytes, **given: Any) -> Any:
        if key.endswith(files[1].name) or key.endswith(f"{files[2].name}.json"):
            raise UnavailableError(f"{key}: the disk is full")
        return put(key, data, **given)

    monkeypatch.setattr(store, "put", refuse)
    watch.cycle()
    # Those behind them make room instead.
    assert [file.exists() for file in files] == [False, True, True, False, False, True, True]
    assert "the disk is full" in str(watch.status()["a"]["error"])
    monkeypatch.setattr(store, "put", put)
    fill(raw, 6)
    watch.cycle()
    assert [file.exists() for file in files] == [False, False, False, True, True, True, True]
    assert watch.status()["a"]["error"] is None


@pytest.mark.parametrize("lives", range(12))
def test_killed_anywhere_it_goes_on(raw: Path, tmp_path: Path, lives: int) -> None:
    files = fill(raw, 3)
    contents = {file.name: file.read_bytes() for file in files}
    mortal = MortalStore(tmp_path / "lake")
    claim(mortal, "a", raw, anew=True)
    watch = archiver(mortal, Nodes({"a": raw}), policy="always", uploads=1)
    mortal.left = lives
    with suppress(Killed):
        watch.cycle()
    mortal.left = 10**6
    whole = {entry.name for entry in archived(mortal, WAITING)}
    assert all((raw / name).exists() or name in whole for name in contents)
    archiver(mortal, Nodes({"a": raw}), policy="always").cycle()
    assert names(mortal, WAITING) == [file.name for file in files[:3]]
    assert all(mortal.get(f"cdc/a/{name}") == contents[name] for name in names(mortal, WAITING))
    assert [file for file in raw.iterdir() if file.suffix in (".log", ".idx")] == [files[3], index_of(files[3])]


def test_what_the_stage_has_committed_needs_no_copy(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 6)
    put_commit(store, StageCommit("a", 1, (), {}, {1000: 5}, {}, ()))
    archiver(store, Nodes({"a": raw})).cycle()
    assert names(store, WAITING) == [file.name for file in files[1:3]]
    assert not files[0].exists()


def test_always_keeps_a_copy_of_all(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 3)
    put_commit(store, StageCommit("a", 1, (), {}, {1000: 5}, {}, ()))
    archiver(store, Nodes({"a": raw}, total="100MiB"), policy="always").cycle()
    assert (names(store, READ), names(store, WAITING)) == ([files[0].name], [file.name for file in files[1:3]])
    assert [file.exists() for file in files] == [False, False, False, True]


def test_a_backlog_that_takes_longer_than_a_run_is_left_to_the_next_one(raw: Path, store: LocalStore) -> None:
    """Else the run would be stopped as one that hangs, amid its uploads."""
    files = fill(raw, 30)
    watch, turns = archiver(store, Nodes({"a": raw}, total="100MiB"), policy="always"), list[int]()
    watch.cycle(lambda: turns.append(1), lambda: bool(turns))
    done = len(names(store, WAITING))
    assert 0 < done < len(files)
    watch.cycle()
    assert len(names(store, WAITING)) == len(files) - 1, "the last one is still written to"


def test_a_run_may_end_amid_a_turn_of_many_nodes(tmp_path: Path, store: LocalStore) -> None:
    """A turn of many nodes took longer than a run may, and the next run began with the same nodes again."""
    roomy, crowded = tmp_path / "roomy", tmp_path / "crowded"
    fill(roomy, 3)
    waiting = {file.name for file in fill(crowded, 40)}
    watch = archiver(store, Nodes({"a": roomy, "b": crowded}, total="100MiB"), policy="always")
    watch.cycle(lambda: None, lambda: bool(names(store, WAITING)))
    assert [entry.node for entry in archived(store, WAITING)] == ["b", "b"]
    assert set(names(store, WAITING)) <= waiting
    assert watch.status()["a"]["waiting"] == 3, "it was looked at all the same"
    watch.cycle()
    assert len(list(roomy.glob("*.log"))) == len(list(crowded.glob("*.log"))) == 1


def test_off_leaves_all(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 7)
    watch = archiver(store, Nodes({"a": raw}), policy="off")
    watch.cycle()
    assert all(file.exists() for file in files)
    assert not failing(watch)


def test_a_segment_that_cassandra_links_again_goes_again(raw: Path, store: LocalStore) -> None:
    """After a crash it comes with another index; its bytes are the same."""
    files = fill(raw, 6)
    content = files[0].read_bytes()
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    files[0].write_bytes(content)
    index_of(files[0]).write_text("77\nCOMPLETED")
    watch.cycle()
    assert not files[0].exists()
    files[1].write_bytes(b"another")
    index_of(files[1]).write_text("7\nCOMPLETED")
    fill(raw, 0)
    watch.cycle()


def test_other_bytes_under_a_name_are_an_error(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 6)
    store.put(f"cdc/a/{files[0].name}", b"of another cluster")
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    assert files[0].exists()
    assert "another cluster" in str(watch.status()["a"]["error"])
    with pytest.raises(StorageError, match="has other bytes"):
        archive.archive_segment(store, "a", files[0], "1\nCOMPLETED", 0, 0)


@pytest.mark.parametrize("segments", [6, 1])
def test_a_folder_of_another_node_is_not_archived(raw: Path, store: LocalStore, segments: int) -> None:
    """Said at once: while there was room it counted as a folder that is emptied, and tables got cdc."""
    files = fill(raw, segments)
    claim(store, "b", raw, anew=True)
    watch = archiver(store, Nodes({"a": raw, "b": raw}))
    watch.cycle()
    assert all(file.exists() for file in files)
    assert "claim the same folder" in str(watch.status()["a"]["error"])
    assert not watch.status()["a"]["empties"]


def test_segments_that_cannot_be_archived_keep_no_others_from_making_room(raw: Path, store: LocalStore) -> None:
    """The same ones were tried in each cycle, since they are the oldest."""
    files = fill(raw, 7)
    for file in files[:4]:
        store.put(f"cdc/a/{file.name}", b"of another cluster")
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    assert [file.exists() for file in files] == [True, True, True, True, False, False, False, True]
    assert "a segment cannot be archived" in str(watch.status()["a"]["error"])


def test_who_claims_a_folder_is_known_while_the_cluster_is_away(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 6)
    for node in "ab":
        claim(store, node, raw, anew=True)
    nodes = Nodes({"a": raw, "b": raw})
    archiver(store, nodes).cycle()
    nodes.is_away = True
    archiver(store, nodes).cycle()
    assert all(file.exists() for file in files)


def test_one_node_s_trouble_is_its_own(raw: Path, store: LocalStore, tmp_path: Path) -> None:
    files = fill(raw, 6)
    watch = archiver(store, Nodes({"gone": tmp_path / "nowhere", "a": raw}))
    watch.cycle()
    assert not files[0].exists()
    status = watch.status()
    assert "nowhere" in str(status["gone"]["error"])
    assert status["a"]["error"] is None


def test_a_folder_that_only_has_open_segments_is_named(raw: Path, store: LocalStore) -> None:
    (file,) = fill(raw, 0, megabytes=7)
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    assert file.exists()
    assert "has not finished the segments" in str(watch.status()["a"]["error"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cdc_total_space": "4096MiB"}, 4096 * MB),
        ({"cdc_total_space": "2GiB"}, 2048 * MB),
        ({"cdc_total_space_in_mb": "64"}, 64 * MB),
    ],
)
def test_the_total_space(tmp_path: Path, settings: dict[str, str], expected: int) -> None:
    assert total_space(settings, tmp_path) == expected
    assert 0 < total_space({"cdc_total_space": "0MiB"}, tmp_path) <= 4096 * MB


def test_the_room_that_a_full_disk_leaves(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(raw, 2)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5, total=10**12))
    assert look(raw, 10**12).free == 5


def test_a_disk_that_others_have_filled_is_told_as_such(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, 2)
    disk = SimpleNamespace(free=3 * MB, total=10**12)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    watch = archiver(store, Nodes({"a": raw}, total="4096MiB"))

    def told() -> list[Problem]:
        watch.cycle()
        statuses = {"commitlog_archive/default": {"at_ms": 0, "nodes": watch.status()}}
        found = problems(statuses, {}, Expected.of_commit_logs(["default"], archives=True), False, 0.0)
        return [problem for problem in found if problem.owner == "commitlog_archive/default"]

    (problem,) = told()
    assert (problem.kind, problem.is_critical) == (Kind.DISK_FULL, True)
    assert "3 of 4,096 MB are free" in problem.text
    assert "the disk is full: the folder itself has 1 MB, the rest others have used" in problem.text
    assert "Cassandra has not finished" not in problem.text
    disk.free = 1900 * MB
    (problem,) = told()
    assert problem.kind == Kind.ARCHIVE_FAILING, "there is time"
    disk.free = 10**11
    assert told() == []


def test_nodes_take_turns(tmp_path: Path, store: LocalStore) -> None:
    """A node with a long backlog held up its neighbour, whose room was scarce."""
    folders = {"a": tmp_path / "a", "b": tmp_path / "b"}
    fill(folders["a"], 30, megabytes=0)
    for file in fill(folders["b"], 7):
        file.touch()
    watch = archiver(store, Nodes(folders, total="9MiB"), policy="always")
    order: list[str] = []
    put = store.put
    store.put = lambda key, *given, **named: order.append(key) or put(key, *given, **named)  # type: ignore[method-assign]
    watch.cycle()
    turns = [key.split("/")[1] for key in order if key.startswith("cdc/") and key.endswith(".log")]
    assert "b" in turns[:4], "in the first turn"
    assert turns.count("a") == 30


def test_what_is_kept_no_longer(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 3)
    put_commit(store, StageCommit("a", 1, (), {}, {1000: 5, 1001: 5, 999: 5}, {}, ()))
    day_s = 86_400
    for file, days in ((files[0], 40), (files[1], 20)):
        os.utime(file, (time.time() - days * day_s,) * 2)
    watch = archiver(store, Nodes({"a": raw}), policy="always")
    watch.cycle()
    store.put("cdc/a/CommitLog-7-999.log", b"of an upload that was killed; the stage has read the segment since")
    store.put("cdc/a/CommitLog-7-998.log", b"of one that may go on")
    store.put("status/archive_reprocess/archive.json", b"{}")
    watch.tidy()
    assert names(store, READ) == [files[1].name]
    assert [stat.key for stat in store.list("cdc_archive/")] == [
        f"cdc_archive/a/{name}" for name in (files[1].name, f"{files[1].name}.json", index_of(files[1]).name)
    ]
    assert store.stat("cdc/a/CommitLog-7-999.log") is not None, "it may be uploaded just now"
    watch.tidy()
    left = {stat.key for stat in store.list(WAITING)}
    assert "cdc/a/CommitLog-7-998.log" in left
    assert "cdc/a/CommitLog-7-999.log" not in left
    assert store.stat("status/archive_reprocess/archive.json") is not None, "segments wait"
    for key in left:
        store.delete(key)
    watch.tidy()
    assert store.stat("status/archive_reprocess/archive.json") is None


def test_a_damaged_entry_keeps_no_other_for_ever(store: LocalStore) -> None:
    for node in ("a", "b"):
        entry = ArchivedSegment(node, "CommitLog-7-1000.log", "1\nCOMPLETED", 1, 0, 0, 1000, 1000)
        archive._put_all(store, READ, replace(entry, crc32c=google_crc32c.value(b"x")), b"x")
    store.put("cdc_archive/a/CommitLog-7-0999.log.json", b"{damaged")
    assert archive.tidy(store, 10**13, lambda *_: False)[0] == 2
    assert [stat.key for stat in store.list(READ)] == ["cdc_archive/a/CommitLog-7-0999.log.json"]


def test_a_removal_that_was_killed_goes_on(tmp_path: Path) -> None:
    entry = ArchivedSegment("a", "CommitLog-7-1000.log", "1\nCOMPLETED", 1, google_crc32c.value(b"x"), 0, 1000, 1000)
    for survived in range(4):
        store = MortalStore(tmp_path / str(survived))
        archive._put_all(store, READ, entry, b"x")
        store.left = survived
        with suppress(Killed):
            archive.tidy(store, 10**13, lambda *_: False)
        store.left = 10
        archive.tidy(store, 10**13, lambda *_: False)
        assert store.list(READ) == []


def test_a_silent_node_whose_claim_is_gone_gets_no_other(raw: Path, store: LocalStore) -> None:
    """By now the folder may be another node's, whose segments would be archived as of the silent one."""
    fill(raw, 3)
    put_place(store, "a", Place(str(raw), "token"))
    watch = archiver(store, Silent({"a": raw}), policy="always", total_mb=8)
    watch.cycle()
    assert names(store, WAITING) == []
    assert "has no claim of the node" in str(watch.status()["a"]["error"])
    assert not list(raw.glob("ringsync-claim*"))


def test_how_large_a_silent_nodes_folder_may_get_is_told(raw: Path, store: LocalStore) -> None:
    """It counted as Cassandra's default, and nothing was archived."""
    fill(raw, 7)
    nodes = Silent({"a": raw})
    for total_mb, archived_names in ((0, 0), (8, 4)):
        settings = config(total_mb=total_mb)
        settings.sync.cdc_raw = str(raw)
        watch = Archiver(settings, store, "default", nodes)
        watch.cycle()
        assert len(names(store, WAITING)) == archived_names
        assert ("archive.total_mb" in str(watch.status()["a"]["error"])) == (not total_mb)


def test_uploads_keep_to_their_pace() -> None:
    now = [0.0]
    pace = UploadPace(10.0, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    for _ in range(5):
        pace.wait(20)
    assert now[0] == 8.0
    UploadPace(None).wait(10**12)


def test_nodes_that_are_not_to_be_read_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker reaches their folders: they were named as a problem for ever, though nobody wants them read."""
    hosts = [Host(name, f"10.0.0.{n}", 9042, name, "r1", (n,)) for n, name in enumerate(("dc1", "dc2"))]
    monkeypatch.setattr(commitlog_archive, "connect", lambda settings: None)
    monkeypatch.setattr(commitlog_archive, "cluster_settings", lambda settings: None)
    monkeypatch.setattr(commitlog_archive, "read_hosts", lambda session: hosts)
    monkeypatch.setattr(commitlog_archive, "read_settings", lambda *_: {})

    def watched(*datacenters: str) -> list[str]:
        settings: Any = SimpleNamespace(sync=SimpleNamespace(datacenters=datacenters))
        return [node.node for node, _ in commitlog_archive._Cluster(settings).nodes(lambda node: True)]

    assert (watched("dc1"), watched()) == (["dc1"], ["dc1", "dc2"])
