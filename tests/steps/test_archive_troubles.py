"""While the archive works: folders that show old pages, uploads that fail, a store or a cluster that is away."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.archive import READ, WAITING, archived
from ringsync.ledger.gaps import get_unread
from ringsync.status import read_status
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.archive import commitlog_archive
from ringsync.steps.archive.archive_reprocess import Reprocessor
from ringsync.steps.archive.commitlog_archive import ArchivedNode, Archiver
from ringsync.steps.stage.claims import claim
from ringsync.steps.stage.node_log import NodeLog
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError
from tests.steps.node_logs import finished
from tests.steps.test_archive import Nodes, Silent, archiver, config, failing, fill, names
from tests.steps.test_archive_reprocess import Reprocessed
from tests.steps.test_lost_segments import begin_anew, later
from tests.steps.test_stager import HOST, NOW_S, TABLES, Cluster, Sync, written
from tests.steps.test_stager_cdc_off import copy, index_of, sync_segment


@pytest.fixture
def of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reprocessed:
    return Reprocessed(tmp_path, monkeypatch)


def markers(raw: bytes) -> list[int]:
    """Places of the sync markers of a plain segment, with that of zeros behind the last section."""
    (length,) = struct.unpack_from(">H", raw, 12)
    places = [14 + length + 4]
    while (end := struct.unpack_from(">i", raw, places[-1])[0]) > places[-1]:
        places.append(end)
    return places


def spoil(segment: Path, how: str) -> None:
    """Have the index tell where a segment ends, and the last section that holds something be missing."""
    raw = segment.read_bytes()
    *_, cut, end = markers(raw)
    index_of(segment).write_text(f"{end}\nCOMPLETED")
    spoiled = {"whole": raw, "zeros": raw[:cut] + bytes(len(raw) - cut), "shorter": raw[:cut]}
    segment.write_bytes(spoiled[how])


@pytest.mark.parametrize("how", ["whole", "zeros", "shorter"])
def test_old_pages_of_a_segment_are_not_taken_for_it(
    of_node: Reprocessed, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted once they were archived, and nobody missed its end."""
    segment = of_node.sync.segment
    whole = segment.read_bytes()
    spoil(segment, how)
    watch = Archiver(config(policy="always"), of_node.store, "default", Nodes({HOST.id: of_node.raw}))
    watch.cycle()
    if how != "whole":
        assert (segment.exists(), names(of_node.store, WAITING)) == (True, [])
        assert "it was cut off or overwritten" in str(watch.status()[HOST.id]["error"])
        segment.write_bytes(whole)
        watch.cycle()
    assert (segment.exists(), failing(watch), names(of_node.store, WAITING)) == (False, False, [segment.name])
    assert of_node.read()["rows"] == 241


def test_what_stays_cut_off_is_archived_and_told_as_damage(
    of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = of_node.sync.segment
    spoil(segment, "shorter")
    content = segment.read_bytes()
    watch = Archiver(config(policy="always"), of_node.store, "default", Nodes({HOST.id: of_node.raw}))
    watch.cycle()
    assert segment.exists()
    monkeypatch.setattr(commitlog_archive, "OLD_PAGES_S", 0.0)
    watch.cycle()
    assert (segment.exists(), failing(watch)) == (False, False)
    counts = of_node.read()
    assert (counts["damages"], of_node.sync.errors) == (1, 1)
    assert of_node.store.get(f"cdc_damaged/{HOST.id}/{segment.name}") == content


def crashed(segment: Path, sections: int | None = None) -> None:
    """Have the node of a segment have crashed: its index has the size of the file, and records that were never synced
    follow under a marker of zeros.

    :param sections: number of sections before; None: all
    """
    raw = bytearray(segment.read_bytes())
    places = markers(bytes(raw))
    end = places[-1 if sections is None else sections]
    raw[end:] = bytes(len(raw) - end)
    raw[end + 100 : end + 105] = b"never"
    segment.write_bytes(raw)
    index_of(segment).write_text(f"{len(raw)}\nCOMPLETED")


def watching(of_node: Reprocessed) -> Archiver:
    return Archiver(config(policy="always"), of_node.store, "default", Nodes({HOST.id: of_node.raw}))


def test_what_a_crashed_node_had_not_synced_is_no_damage_in_the_archive(
    of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an old page, too: it is read again for a minute before the original goes."""
    segment, watch = of_node.sync.segment, watching(of_node)
    crashed(segment)
    watch.cycle()
    assert (segment.exists(), names(of_node.store, WAITING)) == (True, [])
    assert "its node crashed" in str(watch.status()[HOST.id]["error"])
    monkeypatch.setattr(commitlog_archive, "OLD_PAGES_S", 0.0)
    watch.cycle()
    assert (segment.exists(), failing(watch)) == (False, False)
    counts = of_node.read()
    assert (counts["rows"], counts["damages"], of_node.sync.errors) == (241, 0, 0)


def test_what_the_stage_saw_synced_before_a_crash_is_missed_in_the_archive(
    of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is lost. It was passed over, as if the node had never synced it."""
    segment, watch = of_node.sync.segment, watching(of_node)
    places = markers(segment.read_bytes())
    index_of(segment).write_text(str(places[60]))
    assert of_node.sync.cycle().counts["rows"] > 0
    # The index tells of more that cannot be read yet; another segment makes the commit that keeps it in mind.
    index_of(segment).write_text(str(places[66]))
    monkeypatch.setattr(NodeLog, "accepts", lambda _, staged, *__: staged.part.segment != segment.name)
    copy(segment, 1)
    of_node.sync.cycle()
    crashed(segment, 63)
    content = segment.read_bytes()
    monkeypatch.setattr(commitlog_archive, "OLD_PAGES_S", 0.0)
    for _ in range(2):
        watch.cycle()
    assert not segment.exists()
    counts = of_node.read()
    assert (counts["damages"], of_node.sync.errors) == (1, 1)
    assert of_node.store.get(f"cdc_damaged/{HOST.id}/{segment.name}") == content


def failing_once(store: LocalStore, name: str) -> Callable[..., Any]:
    """Have the first upload of a segment fail."""
    real, failed = store.put, list[str]()

    def put(key: str, *given: Any, **named: Any) -> Any:
        if key.endswith(name) and not failed:
            failed.append(key)
            raise UnavailableError("503 slow down")
        return real(key, *given, **named)

    return put


def test_a_segment_that_is_archived_behind_later_ones_began_before_its_own_writes(
    of_node: Reprocessed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seemed to begin with the end of a later one. So a table that has lost cdc in between lost its rows."""
    first = of_node.sync.segment
    second = first.with_name("CommitLog-7-1800000000000.log")
    shutil.copy(first, second)
    sync_segment(second)
    for file, hours in ((first, 3), (second, 1)):
        os.utime(file, (NOW_S - hours * 3600, NOW_S - hours * 3600))
    store: Any = of_node.store
    monkeypatch.setattr(store, "put", failing_once(store, first.name))
    watch = Archiver(config(policy="always"), store, "default", Nodes({HOST.id: of_node.raw}))
    for _ in range(2):
        watch.cycle()
    assert (first.exists(), second.exists()) == (False, False)
    of_node.without_cdc = frozenset((written().table_id,))
    of_node.altered_ms = int((NOW_S - 2 * 3600) * 1000)
    (entry,) = (one for one in archived(store, WAITING) if one.name == first.name)
    assert entry.began_ms <= entry.ended_ms
    found = of_node.reprocessor()
    found.read([entry])
    assert (found.counts["rows"], found.counts["staged"], found.counts["not_cdc"]) == (241, 241, 0)


def test_what_vanishes_while_only_the_archive_works_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is away, and Cassandra (cdc_block_writes: false) removes the oldest. The stage knew of others only."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    index_of(sync.segment).write_text("0")
    sync.cycle()
    sync_segment(sync.segment)
    watch = Archiver(config(policy="always"), sync.store, "default", Nodes({HOST.id: sync.segment.parent}))
    watch.cycle()
    assert (sync.segment.exists(), get_unread(sync.store, HOST.id)) == (False, {})
    more = [sync.segment.with_name(f"CommitLog-7-18000000000{number:02}.log") for number in range(3)]
    for file in more:
        file.write_bytes(b"x" * 1000)
        sync_segment(file)
    with monkeypatch.context() as away:
        away.setattr(sync.store, "put", lambda *_, **__: (_ for _ in ()).throw(UnavailableError("the store is away")))
        watch.cycle()
    for file in more:
        file.unlink()
        index_of(file).unlink()
    watch.cycle()
    assert sorted(get_unread(sync.store, HOST.id).values()) == [file.name for file in more]
    begin_anew(sync)
    assert "was removed from its cdc_raw before it was read" in str(later(sync))
    assert len(sync.store.list(f"gaps/{HOST.id}/")) == len(more)


def test_what_waits_in_a_folder_of_another_node_is_not_missed_later(raw: Path, store: LocalStore) -> None:
    """Two nodes name one folder, as packaged ones do, until each has a queue of its own. The segments of the other one
    were gaps then."""
    files = fill(raw, 3)
    claim(store, "b", raw, anew=True)
    both = archiver(store, Nodes({"a": raw, "b": raw}, total="100MiB"))
    both.cycle()
    assert (get_unread(store, "a"), get_unread(store, "b")) == ({}, {})
    (raw / "ringsync-claim.a").unlink()
    archiver(store, Nodes({"b": raw}, total="100MiB")).cycle()
    assert sorted(get_unread(store, "b").values()) == [file.name for file in files]


def test_a_folder_of_another_store_is_named_while_there_is_room(raw: Path, store: LocalStore, tmp_path: Path) -> None:
    fill(raw, 1)
    claim(LocalStore(tmp_path / "other"), "a", raw, anew=True)
    watch = archiver(store, Nodes({"a": raw}))
    watch.cycle()
    assert "made for another object store" in str(watch.status()["a"]["error"])


def test_a_node_that_has_left_the_ring_is_forgotten(raw: Path, store: LocalStore, tmp_path: Path) -> None:
    """Each run remembered it, and told of its folder, which is gone, until the cluster had answered: critical."""
    fill(raw, 1)
    fill(tmp_path / "b", 1)
    archiver(store, Nodes({"a": raw, "b": tmp_path / "b"})).cycle()
    shutil.rmtree(tmp_path / "b")
    archiver(store, Nodes({"a": raw})).cycle()
    assert [stat.key for stat in store.list("archive/nodes/")] == ["archive/nodes/a.json"]


def test_nodes_that_cannot_be_looked_up_are_a_problem_though_others_are_watched(raw: Path, store: LocalStore) -> None:
    """A new node is not watched then, and its cdc_raw may fill."""
    fill(raw, 1)
    nodes = Nodes({"a": raw})
    archiver(store, nodes).cycle()
    nodes.is_away = True
    watch = archiver(store, nodes)
    watch.cycle()
    assert watch.problems == ["new nodes are not watched: no node answers"]
    assert not failing(watch)


def test_a_node_that_captures_nothing_needs_no_folder(raw: Path, store: LocalStore) -> None:
    """Cassandra makes none then, though cassandra.yaml names one: that was critical, for ever."""

    class WithoutCdc(Nodes):
        def nodes(self, wants: Any) -> Iterator[tuple[ArchivedNode, dict[str, str]]]:
            for node, settings in super().nodes(wants):
                yield node, {**settings, "cdc_enabled": "false"}

    watch = archiver(store, WithoutCdc({"a": raw}))
    watch.cycle()
    assert (watch.status()["a"]["error"], failing(watch)) == (None, False)


def test_how_large_a_folder_may_get_is_in_the_status_whoever_has_said_it(raw: Path, store: LocalStore) -> None:
    """Without a limit there, any trouble counts as a folder that is full."""
    fill(raw, 1)
    settings = config(total_mb=8)
    settings.sync.cdc_raw = str(raw)
    watch = Archiver(settings, store, "default", Silent({"a": raw}))
    watch.cycle()
    assert watch.status()["a"]["total_bytes"] == 8 * 2**20


def test_a_folder_in_which_nothing_can_be_deleted_is_named_before_there_is_no_room(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, 1)
    watch = archiver(store, Nodes({"a": raw}, total="100MiB"))
    monkeypatch.setattr(commitlog_archive, "what_is_refused", lambda folder: f"nothing can be deleted in {folder}")
    watch.cycle()
    told = watch.status()["a"]
    assert (told["error"], told["empties"]) == (f"nothing can be deleted in {raw}", False)
    monkeypatch.undo()
    watch.cycle()
    told = watch.status()["a"]
    assert (told["error"], told["empties"]) == (None, True)


class Away(LocalStore):
    """A store that is away for some requests."""

    def __init__(self, root: Path, requests: int) -> None:
        super().__init__(root)
        self.left = requests

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in ("put", "say", "get", "get_range", "stat", "list", "delete"):
            return method

        def asked(*given: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left >= 0:
                raise UnavailableError("gs://bucket: the service does not serve")
            return method(*given, **named)

        return asked


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 8, 13, 10**9])
def test_a_store_that_is_away_at_the_start_is_waited_for(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """The archive ended at once with exit code 3, and Airflow began again, back to back."""
    files, store = fill(raw, 5), Away(tmp_path / "lake", requests)
    settings = config(poll_interval_ms=10)
    settings.sync.run_s = 1.0
    monkeypatch.setattr(commitlog_archive, "_Cluster", lambda config: Nodes({"a": raw}))
    monkeypatch.setattr(commitlog_archive, "ClearsAside", lambda *_: SimpleNamespace(clear=lambda: None))
    monkeypatch.setattr(commitlog_archive, "ASK_EVERY_S", 0.1)
    given = (settings, store, None, "run", SimpleNamespace(queue="default"))
    report, code = commitlog_archive.run(Application("commitlog_archive", "conf", *given))  # type: ignore[arg-type]
    assert code == ExitCode.OK
    if requests < 10**9:
        assert (report["nodes"]["a"]["error"], report["segments"]) == (None, 2)
    else:
        assert [file.exists() for file in files] == [True] * 6
        assert "nobody watches cdc_raw: gs://bucket: the service does not serve" in report["problems"][0]


def test_an_archive_whose_uploads_take_long_shows_that_it_lives(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said nothing until its turn was over: a critical alarm, though it worked."""
    fill(raw, 5)
    settings, seen, put = config(poll_interval_ms=10), list[Any](), store.put
    settings.sync.run_s = 0.1
    monkeypatch.setattr(commitlog_archive, "_Cluster", lambda config: Nodes({"a": raw}))
    monkeypatch.setattr(commitlog_archive, "ClearsAside", lambda *_: SimpleNamespace(clear=lambda: None))
    monkeypatch.setattr("ringsync.steps.loop.SAY_EVERY_S", 0.5)  # the end takes less

    def slow(key: str, data: bytes, **given: Any) -> Any:
        begun, end = time.time() * 1000, time.time() + (5 if key.startswith("cdc/") and not seen else 0)
        while time.time() < end and not seen:
            status = read_status(store, "commitlog_archive/default")
            seen.extend([status] if status and status["at_ms"] > begun else [])
        return put(key, data, **given)

    monkeypatch.setattr(store, "put", slow)
    given = (settings, store, None, "run", SimpleNamespace(queue="default"))
    commitlog_archive.run(Application("commitlog_archive", "conf", *given))  # type: ignore[arg-type]
    assert seen[0]["busy"]["since_ms"] <= seen[0]["at_ms"]
    assert "busy" not in (read_status(store, "commitlog_archive/default") or {"busy": 0})


def test_tidying_up_keeps_nobody_from_looking(raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of segments may have to go, each with three requests."""
    files, ended, begun = fill(raw, 6), threading.Event(), threading.Event()

    def tidy(*_: Any) -> tuple[int, frozenset[str]]:
        begun.set()
        assert ended.wait(60)
        return 7, frozenset()

    monkeypatch.setattr(commitlog_archive, "tidy", tidy)
    watch = archiver(store, Nodes({"a": raw}))
    watch.tidy_aside()
    assert begun.wait(60)
    watch.cycle()
    watch.tidy_aside()
    assert not files[0].exists()
    ended.set()
    while watch.counts["forgotten"] == 0:
        time.sleep(0.01)
    watch.tidy_aside()
    assert watch.counts["forgotten"] == 7


class Hanging(Nodes):
    """A cluster whose contact points take connections, and say nothing."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__(folders)
        self.answers = threading.Event()

    def nodes(self, wants: Callable[[ArchivedNode], bool]) -> Iterator[tuple[ArchivedNode, dict[str, str]]]:
        assert self.answers.wait(60)
        return super().nodes(wants)


def test_a_cluster_that_does_not_answer_keeps_nobody_from_looking(
    raw: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw, 1)
    archiver(store, Nodes({"a": raw})).cycle()
    files, silent = fill(raw, 6), Hanging({"a": raw})
    monkeypatch.setattr(commitlog_archive, "ANSWER_S", 0.01)
    watch = archiver(store, silent)
    watch.cycle()
    assert not files[0].exists()
    silent.answers.set()


@pytest.mark.parametrize("staged", [0, 400_000, 10**9])
def test_an_interval_reads_a_waiting_segment_whole(of_node: Reprocessed, staged: int) -> None:
    """Of what the stage had read before, nothing was read again, though the report named the segment."""
    segment, settings = of_node.sync.segment, of_node.sync.stager._config
    size = segment.stat().st_size
    if staged:
        index_of(segment).write_text(f"{staged}" if staged < size else finished(segment.read_bytes()))
        settings.archive = config(policy="always").archive
        of_node.sync.cycle()
    index_of(segment).write_text(finished(segment.read_bytes()))
    of_node.archive()
    again = list(archived(of_node.store, READ))
    found = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    behind = found.counts["rows"]
    found.read_again([*again, *found.read_in_part])
    assert (len(again), len(found.read_in_part)) == (int(staged > size), int(0 < staged < size))
    assert found.counts["rows"] == 241 + (behind if 0 < staged < size else 0)


def test_reading_again_puts_no_error_that_was_dealt_with(of_node: Reprocessed) -> None:
    """Discarded and solved records came back with a backfill of any interval."""
    of_node.archive()
    of_node.tables = tuple(table for table in TABLES if table.table_id != written().table_id)
    for stat in of_node.store.list("schemas/"):
        if written().table_id in stat.key or f"/{written().full_name}/" in stat.key:
            of_node.store.delete(stat.key)
    found: Reprocessor = of_node.reprocessor()
    found.read(list(archived(of_node.store, WAITING)))
    errors = of_node.sync.errors
    assert errors > 10
    again = of_node.reprocessor()
    again.read_again(list(archived(of_node.store, READ)))
    assert (again.counts["read_again"], again.counts["errors"]) == (1, found.counts["errors"])
    assert of_node.sync.errors == errors
