"""A log that cannot be read is named, tried again, and never wedges: neither itself nor what is beside it."""

from __future__ import annotations

import lzma
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.formats.commitlog.names import segment_id
from ringsync.formats.commitlog.segment import Wanted, read_descriptor
from ringsync.ledger.staging import Bucket, LogPart, put_commit
from ringsync.ring.ring import Host
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from ringsync.steps.stage.node_log import PATIENCE_MS, NodeLog
from ringsync.steps.stage.stage_task import Staged, StageTask, StageWork, check_counts, stage
from ringsync.steps.stage.staged_files import Windows
from ringsync.storage.local import LocalStore
from tests.commitlogs.fixtures import DATA
from tests.steps.node_logs import claimed, finished, read_node_log

UNREAD: Any = None
"""The configuration: nothing here reads it."""

FOLDER = DATA / "5.0-v7-plain"
HOST = Host("node-1", "10.0.0.1", 9042, "dc1", "r1", ())
TASK = StageTask(UNREAD, (), (), Windows(Bucket(1_790_000_040_000, 60_000), 0))
ALL = 10**9


def segments() -> dict[str, bytes]:
    """Real segments by name, the oldest first."""
    return {
        path.name.removesuffix(".xz"): lzma.decompress(path.read_bytes()) for path in sorted(FOLDER.glob("*.log.xz"))
    }


class Node:
    """A ``cdc_raw`` whose files tests write, and the log of it; staging is real, its tasks run here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cdc_raw"
        self.folder.mkdir()
        self.store = LocalStore(folder / "lake")
        self.log = read_node_log(self.store, HOST, self.folder, 0)
        self.now_ms = int(time.time() * 1000)

    def put(self, name: str, content: bytes | None, index: str | None) -> None:
        if content is not None:
            (self.folder / name).write_bytes(content)
        if index is not None:
            (self.folder / name.replace(".log", "_cdc.idx")).write_text(index)

    def cycle(self, seconds: float = 1.0) -> list[Staged]:
        """What the loop does in a cycle; gives back what was committed."""
        self.now_ms += int(seconds * 1000)
        staged = [stage(work, TASK, self.store, None) for work in self.log.new_work(self.now_ms, ALL, claimed)]
        taken = [one for one in staged if self.log.accepts(one, self.now_ms)]
        if taken:
            self.log.take(put_commit(self.store, self.log.commit_of(taken)))
        self.log.look_back(self.now_ms)
        self.log.remove_finished()
        return taken

    @property
    def error(self) -> str:
        return str(self.log.status()["error"] or "")

    def read_again(self) -> NodeLog:
        """What a loop that begins now knows."""
        return read_node_log(self.store, HOST, self.folder, self.now_ms)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_read_that_brings_nothing_is_no_commit_and_a_later_good_one_wins(node: Node) -> None:
    """A mounted folder may show an index that is newer than its segment."""
    name, raw = next(iter(segments().items()))
    size = read_descriptor(raw, name).size
    synced = struct.unpack_from(">i", raw, size)[0]
    stale = raw[:size] + bytes(len(raw) - size)
    node.put(name, stale, str(synced))
    assert [one.part.end for one in node.cycle()] == [size], "the descriptor is there"
    for _ in range(3):
        assert node.cycle() == []
    assert "nothing can be read behind position" in node.error
    assert node.read_again().number == 1
    before_ms = node.log.clear_at_ms
    node.put(name, raw, None)
    (good,) = node.cycle(60)
    assert (good.part.start, good.part.end, good.counts["damages"]) == (size, synced, 0)
    assert good.counts["records"] > 0
    assert node.error == ""
    assert node.log.clear_at_ms > before_ms
    node.put(name, None, finished(raw))
    (rest,) = node.cycle()
    assert rest.part.finished
    assert node.read_again().finished.keys() == {rest.part.segment_id}
    node.cycle()
    assert list(node.folder.iterdir()) == []


def test_what_looks_damaged_is_read_again_before_it_is_believed(node: Node) -> None:
    name, raw = next(iter(segments().items()))
    size = read_descriptor(raw, name).size
    node.put(name, raw[: size + 8] + b"\xff" * 64 + raw[size + 72 :], finished(raw))
    assert node.cycle() == []
    assert name in node.error
    tries = sum(len(node.log.new_work(node.now_ms + wait, ALL, claimed)) for wait in range(0, 2000, 100))
    assert tries == 0, "no cycle is used up by it"
    node.cycle(10)
    (taken,) = node.cycle(PATIENCE_MS / 1000)
    assert taken.damage
    assert taken.part.finished


def test_a_segment_that_cannot_be_read_at_all_keeps_no_other_waiting(node: Node) -> None:
    (first, broken), (second, raw), *_ = segments().items()
    node.put(first, b"\0" * len(broken), f"{len(broken)}\nCOMPLETED")
    node.put(second, raw, finished(raw))
    assert [one.part.segment for one in node.cycle()] == [second]
    assert first in node.error
    cleared = node.log.clear_at_ms
    for _ in range(4):
        node.cycle(PATIENCE_MS / 2000)
    assert (node.folder / first).exists(), "it is not removed"
    assert first in node.error
    assert node.log.clear_at_ms > cleared, "closing waits for it no longer"


def test_an_index_without_its_segment_is_named(node: Node) -> None:
    (first, raw), (second, _), *_ = segments().items()
    node.put(second, None, "100")
    node.put(first, raw, finished(raw))
    assert [one.part.segment for one in node.cycle()] == [first]
    assert "is there without its segment" in node.error
    assert second in node.error


@pytest.mark.parametrize("what", ["missing", "no folder", "empty", "a file", "unknown"])
def test_a_folder_that_shows_nothing_is_no_idle_node(node: Node, what: str) -> None:
    if what == "missing":
        node.log.folder = node.folder / "elsewhere"
    elif what == "no folder":
        node.folder.rmdir()
    elif what == "a file":
        node.folder.rmdir()
        node.folder.write_bytes(b"")
    elif what == "unknown":
        node.log.folder = None
    assert node.cycle() == []
    assert not node.log.status()["is_read"]
    assert "cdc_raw" in node.error
    assert node.log.clear_at_ms == 0


def test_progress_is_told_while_a_node_is_never_wholly_read(node: Node) -> None:
    """A stage that is always some seconds behind: what it has staged is told, as of then."""
    for identity in range(1, 8):
        node.put(f"CommitLog-7-{identity}.log", b"x" * 100, "100\nCOMPLETED")
        node.now_ms += 2000
        work = node.log.new_work(node.now_ms, ALL, claimed)
        staged = [Staged(one, part_of(one), node.now_ms, {}) for one in work][:1] if identity > 2 else []
        if staged:
            node.log.take(node.log.commit_of(staged))
        node.log.look_back(node.now_ms)
    # Five of seven are staged; the fifth was there four seconds ago.
    assert node.now_ms - node.log.clear_at_ms == 4000


def part_of(work: StageWork) -> LogPart:
    name = Path(work.file).name
    identity = segment_id(name)
    assert identity is not None
    return LogPart(name, identity, 0, 100, True)


def test_what_the_schema_does_not_have_is_told(tmp_path: Path) -> None:
    """ALTER TABLE ADD while a stage runs: its records are no errors before the schema was read again."""
    (name, raw), *_ = segments().items()
    (tmp_path / name).write_bytes(raw)
    tables = tuple(parse_schema((FOLDER / "schema.cql").read_text(), "schema.cql").by_id().values())
    older = tuple(
        replace(table, columns=tuple(one for one in table.columns if one is not table.value_columns[-1]))
        if table.value_columns
        else table
        for table in tables
    )

    def staged(known: tuple[TableSchema, ...], gone: frozenset[str] = frozenset()) -> Staged:
        task = replace(TASK, logged=known, gone=gone)
        return stage(StageWork("n1", str(tmp_path / name), Wanted(), 1), task, LocalStore(tmp_path / "lake"), None)

    whole = staged(tables)
    assert not whole.has_unknown
    assert staged(older).has_unknown
    assert staged(older).unknown_columns
    # A batch may have rows of a table that was dropped, and of one that was not.
    lacking = ((one, staged(tuple(table for table in tables if table is not one))) for one in tables)
    dropped, without = next(found for found in lacking if found[1].has_unknown)
    assert without.unknown_tables == {dropped.table_id}
    recalled = staged(tables, frozenset({dropped.table_id}))
    assert recalled.counts["rows"] == whole.counts["rows"]
    assert recalled.counts["errors"] == recalled.counts["of_unknown_tables"] == 0
    assert recalled.counts["of_dropped_tables"] > 0
    check_counts(recalled, "n1")


def test_what_a_worker_may_not_do_is_told_while_the_log_is_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment is removed only when it is finished: that it cannot be shall be known before."""
    refused = ["nothing can be deleted"]
    monkeypatch.setattr("ringsync.steps.stage.node_log.what_is_refused", lambda folder: refused[0] if folder else None)
    (name, content), *_ = segments().items()
    node.put(name, content, "4711")
    node.cycle()
    assert (node.error, node.log.status()["is_read"]) == ("nothing can be deleted", True)
    refused[0] = ""
    node.cycle()
    assert node.error == ""
