"""The archive of commit logs: room is made before Cassandra's limit, nothing is deleted early, and all comes back."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger import archive
from ringsync.ledger.archive import READ, WAITING, ArchiveError, archived
from ringsync.ledger.staging import StageCommit, commit_keys, get_commit, put_commit
from ringsync.ledger.table_versions import CdcBegun
from ringsync.steps.archive import archive_reprocess
from ringsync.steps.archive.archive_reprocess import Reprocessor
from ringsync.steps.archive.commitlog_archive import ArchivedNode, Archiver
from ringsync.steps.archive.raw_folder import look, total_space
from ringsync.steps.archive.upload_pace import UploadPace
from ringsync.steps.stage.claims import claim
from ringsync.steps.sync_plan import SyncPlan
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError
from tests.mortal_store import Killed, MortalStore
from tests.steps.test_stager import FOLDER, HOST, TABLES, Cluster, OneByOne, Sync
from tests.steps.test_stager_cdc_off import index_of, sync_segment

SEGMENTS = sorted(FOLDER.glob("*.log.xz"))
MB = 2**20


class Nodes:
    """A cluster whose nodes tell where their ``cdc_raw`` is, or that is away."""

    def __init__(self, folders: Mapping[str, Path], total: str = "8MiB") -> None:
        self.folders, self.total, self.is_away = folders, total, False

    def nodes(self) -> Iterator[tuple[ArchivedNode, dict[str, str]]]:
        if self.is_away:
            raise ConnectionError("no node answers")
        for host, folder in self.folders.items():
            told = {"cdc_enabled": "true", "cdc_raw_directory": str(folder), "cdc_total_space": self.total}
            yield ArchivedNode(host, f"{host}:9042", host), told


def config(**settings: Any) -> Any:
    given = {
        "policy": "pressure",
        "free_percent": 49.0,
        "free_mb": 0,
        "uploads": 2,
        "megabytes_per_s": None,
        **settings,
    }
    sync = SimpleNamespace(cdc_raw=None, queue_of=lambda address, host: "default")
    return SimpleNamespace(archive=SimpleNamespace(**given), sync=sync)


def fill(folder: Path, count: int, *, megabytes: int = 1) -> list[Path]:
    """Finished segments of a node, and the one that it writes to."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"CommitLog-7-{1000 + number}.log" for number in range(count + 1)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * megabytes * MB)
        index_of(file).write_text("100" if number == count else f"{file.stat().st_size}\nCOMPLETED")
    return files


def archiver(store: Any, nodes: Nodes, **settings: Any) -> Archiver:
    return Archiver(config(**settings), store, "default", nodes)


def names(store: Any, folder: str) -> list[str]:
    return [entry.name for entry in archived(store, folder)]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "cdc_raw"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "lake")


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
    assert (status["error"], status["archived"], status["waiting"], watch.is_failing) == (None, 2, 3, False)
    assert watch.counts == Counter(segments=2, bytes=status["archived"] * (MB + 17), removed=2)
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
    assert (asked, watch.is_failing) == ([], False)


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
    assert [file.exists() for file in files] == [False, True, True, True, True, True, True]
    assert "the disk is full" in str(watch.status()["a"]["error"])
    monkeypatch.setattr(store, "put", put)
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
    put_commit(store, StageCommit("a", 1, 5, (), {}, {1000: 5}, {}, ()))
    archiver(store, Nodes({"a": raw})).cycle()
    assert names(store, WAITING) == [file.name for file in files[1:3]]
    assert not files[0].exists()


def test_always_keeps_a_copy_of_all(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 3)
    put_commit(store, StageCommit("a", 1, 5, (), {}, {1000: 5}, {}, ()))
    archiver(store, Nodes({"a": raw}, total="100MiB"), policy="always").cycle()
    assert (names(store, READ), names(store, WAITING)) == ([files[0].name], [file.name for file in files[1:3]])
    assert [file.exists() for file in files] == [False, False, False, True]


def test_off_leaves_all(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 7)
    watch = archiver(store, Nodes({"a": raw}), policy="off")
    watch.cycle()
    assert all(file.exists() for file in files)
    assert not watch.is_failing


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
    with pytest.raises(ArchiveError, match="has other bytes"):
        archive.archive_segment(store, "a", files[0], "1\nCOMPLETED", 0, 0)


def test_a_folder_of_another_node_is_not_archived(raw: Path, store: LocalStore) -> None:
    files = fill(raw, 6)
    claim(store, "b", raw, anew=True)
    watch = archiver(store, Nodes({"a": raw, "b": raw}))
    watch.cycle()
    assert all(file.exists() for file in files)
    assert "claim the same folder" in str(watch.status()["a"]["error"])


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


def test_uploads_keep_to_their_pace() -> None:
    now = [0.0]
    pace = UploadPace(10.0, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    for _ in range(5):
        pace.wait(20)
    assert now[0] == 8.0
    UploadPace(None).wait(10**12)


class Reprocessed:
    """A node's real segment that was archived, and what reading it gives."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.sync = Sync(folder, Cluster(TABLES, TABLES), patch)
        self.store, self.raw = self.sync.store, self.sync.segment.parent
        patch.setattr(archive_reprocess, "read_tables", lambda session: SimpleNamespace(by_id=lambda: {}))
        patch.setattr(archive_reprocess, "plan_of", lambda *given: SyncPlan(given[3], (HOST,), {}, ()))
        patch.setattr(archive_reprocess, "time", SimpleNamespace(time=lambda: self.sync.now_s))
        ring = self.sync.stager._ring_of
        patch.setattr(Reprocessor, "_ring_of", lambda _, keyspace: ring(keyspace))
        self.sync.stager._windows()
        for table in TABLES:
            CdcBegun(self.store).begins(table.table_id)

    def archive(self) -> None:
        nodes = Nodes({HOST.id: self.raw})
        watch = Archiver(config(policy="always"), self.store, "default", nodes)
        watch.cycle()
        assert not watch.is_failing

    def reprocessor(self) -> Reprocessor:
        configuration: Any = self.sync.stager._config
        configuration.sync.digest_retention_h = 4.0
        application: Any = SimpleNamespace(config=configuration, store=self.store)
        return Reprocessor(application, None, OneByOne(), lambda errors, node: self.sync.count(errors, node))

    def read(self) -> Counter[str]:
        found = self.reprocessor()
        found.read(list(archived(self.store, WAITING)))
        assert found.left == []
        return found.counts


@pytest.fixture
def of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reprocessed:
    return Reprocessed(tmp_path, monkeypatch)


def outcomes(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in ("read", "read_again") and count}


def test_an_archived_segment_gives_what_the_stage_would_have_read(
    of_node: Reprocessed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_node.archive()
    assert not of_node.sync.segment.exists()
    counts = of_node.read()
    staged = Sync(tmp_path / "staged", Cluster(TABLES, TABLES), monkeypatch).cycle().counts
    assert outcomes(counts) == outcomes(staged)
    assert counts["staged"] > 0
    (key,) = commit_keys(of_node.store, HOST.id)
    assert get_commit(of_node.store, key).blocks
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    assert entry.last_us is not None
    assert entry.first_us <= entry.last_us
    assert names(of_node.store, WAITING) == []
    assert of_node.read() == Counter()
    # Cassandra links it again after a crash: it is finished.
    of_node.sync.segment.write_bytes(lzma.decompress(SEGMENTS[0].read_bytes()))
    sync_segment(of_node.sync.segment)
    assert of_node.sync.cycle().counts["rows"] == 0
    assert not of_node.sync.segment.exists()


def test_what_the_stage_has_read_of_it_is_not_read_again(of_node: Reprocessed) -> None:
    raw = of_node.sync.segment.read_bytes()
    index_of(of_node.sync.segment).write_text("400000")
    first = of_node.sync.cycle().counts["rows"]
    assert first > 0
    index_of(of_node.sync.segment).write_text(f"{len(raw)}\nCOMPLETED")
    of_node.archive()
    rest = of_node.read()["rows"]
    of_node.sync.cycle()
    whole = 0
    for key in commit_keys(of_node.store, HOST.id):
        whole += get_commit(of_node.store, key).counts["rows"]
    assert rest > 0
    assert whole == first + rest == 241


def test_a_stage_that_is_faster_wins(of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node.archive()
    real, others = archive_reprocess.put_commit, []

    def late(store: Any, commit: StageCommit) -> StageCommit:
        if not others:
            others.append(put_commit(store, StageCommit(HOST.id, 1, 5, (), {7: 9}, {}, {}, ())))
        return real(store, commit)

    monkeypatch.setattr(archive_reprocess, "put_commit", late)
    counts = of_node.read()
    assert counts["rows"] == 241
    first, second = (get_commit(of_node.store, key) for key in commit_keys(of_node.store, HOST.id))
    assert (first.number, second.number, second.ends) == (1, 2, {7: 9})
    assert {stat.key for stat in of_node.store.list("staging/rows/")} == set(second.files), "no file is left over"


@pytest.mark.parametrize("lives", range(1, 40, 3))
def test_a_reading_that_is_killed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
    of_node = Reprocessed(tmp_path, monkeypatch)
    of_node.archive()
    mortal = MortalStore(tmp_path / "lake")
    of_node.store = mortal
    monkeypatch.setattr(mortal, "left", lives)
    with suppress(Killed, AssertionError):
        of_node.read()
    mortal.left = 10**6
    of_node.read()
    rows = sum(get_commit(mortal, key).counts["rows"] for key in commit_keys(mortal, HOST.id))
    assert (rows, names(mortal, WAITING), len(names(mortal, READ))) == (241, [], 1)


def test_a_damaged_segment_is_named_and_holds_up_no_other(of_node: Reprocessed) -> None:
    of_node.archive()
    key = f"cdc/{HOST.id}/{of_node.sync.segment.name}"
    whole = of_node.store.get(key)
    of_node.store.put(key, whole[:-9])
    found = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    assert "has other bytes than were archived" in found.left[0]
    assert names(of_node.store, WAITING) == [of_node.sync.segment.name]
    of_node.store.put(key, whole)
    assert of_node.read()["rows"] == 241


def test_reading_again_gives_late_rows_of_the_time_that_is_known(of_node: Reprocessed) -> None:
    of_node.archive()
    of_node.read()
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    found = of_node.reprocessor()
    found.read_again([entry])
    assert found.counts["rows"] == found.counts["late"] + found.counts["too_old"] + found.counts["repeated"]
    assert len(commit_keys(of_node.store, HOST.id)) == 1, "the node's commits stay"
    assert found.counts["late"] > 100
    assert len(of_node.store.list("staging/late/")) > 0
    # What was published of older writes is not known any more.
    assert entry.last_us is not None
    of_node.sync.now_s = entry.last_us / 1e6 + 5 * 3600
    found = of_node.reprocessor()
    found.read_again([entry])
    assert (found.counts["late"], found.counts["read_again"]) == (0, 1)
    assert found.counts["too_old"] == found.counts["rows"] - found.counts["not_cdc"] == 241


def test_which_segments_have_writes_of_an_interval(of_node: Reprocessed) -> None:
    of_node.archive()
    (waiting,) = archived(of_node.store, WAITING)
    assert waiting.touches(0, 2**62)
    assert not waiting.touches(waiting.ended_ms + 1, 2**62)
    of_node.read()
    (entry,) = archived(of_node.store, READ)
    assert entry.first_us is not None
    assert entry.last_us is not None
    first_ms, last_ms = entry.first_us // 1000, entry.last_us // 1000
    assert [entry.touches(*times) for times in ((0, first_ms), (0, first_ms + 1), (last_ms, 2**62))] == [
        False,
        True,
        True,
    ]
    assert not entry.touches(last_ms + 1, 2**62)
