"""What cannot be read, or crashes, is one segment's or one node's trouble; and it is told until all is well again."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ringsync.formats.commitlog.segment import Wanted
from ringsync.ledger.staging import Bucket
from ringsync.state.session import RETRY_DELAYS_S, StateError
from ringsync.steps.close.closing import progress
from ringsync.steps.loop import AwayError, Patience
from ringsync.steps.stage import stage_task
from ringsync.steps.stage.node_log import PATIENCE_MS
from ringsync.steps.stage.stage_task import StageTask, StageWork, stage
from ringsync.steps.stage.staged_files import Windows
from ringsync.storage.local import LocalStore
from tests.bounded import as_long_as
from tests.steps.node_logs import finished
from tests.steps.test_stager import TABLES, UNREAD, WELL, Cluster, OneByOne, Sync


def test_a_page_that_cannot_be_read_is_an_error_of_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was killed by a signal, and with it the job that reads for all nodes."""
    broken = tmp_path / "CommitLog-7-1790000000000.log"
    broken.write_bytes(bytes(100))

    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(stage_task, "open", lambda path, _: io.BufferedReader(Failing(path)), raising=False)
    task = StageTask(UNREAD, (), (), Windows(Bucket(1_790_000_040_000, 60_000), 0))
    found = stage(StageWork("a", str(broken), Wanted(), 1), task, LocalStore(tmp_path / "lake"), None)
    assert found.unreadable == f"{broken} cannot be read: Input/output error"


SHRINKS = """
import os, sys
from ringsync.steps.stage import stage_task as at
from ringsync.steps.stage.stage_task import *
from ringsync.steps.stage.staged_files import Windows
from ringsync.ledger.staging import Bucket
from ringsync.storage.local import LocalStore
read = at.read_log
def shrinks(*given, **also):
    os.truncate(sys.argv[1], 4096)
    return read(*given, **also)
at.read_log = shrinks
task = StageTask(None, (), (), Windows(Bucket(1_790_000_040_000, 60_000), 0))
print(stage(StageWork("a", sys.argv[1], Wanted(), 1), task, LocalStore(sys.argv[2]), None).counts["records"])
"""


def test_a_file_that_shrinks_while_it_is_read_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a disk or mount that fails: its pages are there no more."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    command = [sys.executable, "-c", SHRINKS, str(sync.segment), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


class Crashing(OneByOne):
    """A Spark one of whose workers crashes over each segment of some folder; ``maxFailures`` is 1 in local mode.

    :ivar works: how many segments each job had
    """

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}/"
        self.works: list[int] = []
        self.is_dead = False

    def parallelize(self, items: Iterable[Any], pieces: int) -> OneByOne:
        works = [one for one in items if isinstance(one, StageWork)]
        self.works.append(len(works))
        self.crashes = self.is_dead or any(one.file.startswith(self.folder) for one in works)
        return super().parallelize(items, pieces)

    def collect(self) -> list[Any]:
        if self.crashes:
            raise RuntimeError("Job aborted: Python worker exited unexpectedly (crashed)")
        return super().collect()


def test_a_worker_that_crashes_over_one_node_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job reads for all nodes of a queue: nothing was staged, and no node was named."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    well = sync.add_well(monkeypatch)
    spark = sync.stager._context = Crashing(sync.segment.parent)
    sync.cycle_once()
    assert (well.exists(), sync.segment.exists()) == (False, True)
    assert "Python worker exited unexpectedly" in sync.told()[0]
    assert not sync.told(WELL)
    for number in range(40):
        another = well.with_name(well.name.replace(".log", f"{number}.log"))
        shutil.copy(sync.segment, another)
        another.with_name(another.name.replace(".log", "_cdc.idx")).write_text(finished(another.read_bytes()))
        sync.cycle_once()
        assert not another.exists()
        assert "Python worker exited unexpectedly" in sync.told()[0]
    assert spark.works.count(2) == 1, "nobody shares a job with who has crashed one"
    assert sum(spark.works) < 60, "it backs off"
    spark.folder = "/nowhere/"
    sync.cycle_once(60)
    assert (sync.told(), sync.segment.exists()) == ([], False)


def test_a_failure_is_past_once_what_waits_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is in doubt, maybe for ever: no commit came, and the node failed for the rest of the run."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    sync.cycle_once()
    damaged = sync.segment.with_name("CommitLog-7-1500000000000.log")
    damaged.write_bytes(bytes(100))
    damaged.with_name("CommitLog-7-1500000000000_cdc.idx").write_text("100\nCOMPLETED")
    spark = sync.stager._context = Crashing(sync.segment.parent)
    sync.cycle_once()
    assert sync.stager.is_failing
    spark.folder = "/nowhere/"
    log = sync.cycle(60)
    assert (log.failures, log.status()["is_read"], sync.stager.is_failing) == (0, True, False)
    assert "commit log version 0 is unknown" in sync.told()[0]


def test_a_spark_that_has_stopped_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes backed off, and cycles without work went well: the loop lived to the end of its run, and staged nothing."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    spark = sync.stager._context = Crashing(tmp_path)
    spark.is_dead = True
    patience = Patience(lambda: spark.is_dead)
    with pytest.raises(AwayError, match="Job aborted"):
        patience.tried(sync.cycle_once)


def test_a_spark_that_runs_nothing_is_no_nodes_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    spark = sync.stager._context = Crashing(tmp_path)
    spark.is_dead = True
    with pytest.raises(RuntimeError, match="Job aborted"):
        sync.cycle_once()


@pytest.mark.parametrize("bad", [1, 5])
def test_a_node_whose_damaged_segment_cannot_be_committed_fails_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Its doubt was forgotten before the commit: the next try was a first one, that took nothing, and all was well."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    folders = sync.add_bad(monkeypatch, bad)
    sync.add_errors(monkeypatch, lambda node: "" if node == "well" else "torn")
    tried: list[tuple[float, str]] = []
    refused = [True]

    def put(errors: Any, node: str) -> None:
        if refused and node != "well":
            tried.append((sync.now_s, node))
            sync.now_s += sum(RETRY_DELAYS_S)
            raise StateError("keyspace cdc could not be used in 9 attempts")

    monkeypatch.setattr(sync.stager, "_put_errors", put)

    def cycle() -> tuple[float, set[str]]:
        """How long it took, and which nodes are named then."""
        before_s = sync.now_s
        sync.cycle_once(0)
        took_s, now_ms = sync.now_s - before_s, int(sync.now_s * 1000)
        status = {"at_ms": now_ms, "nodes": sync.stager.status(), "error": None}
        unread = progress(sync.hosts, {"q": status}, lambda host: "q", now_ms, 300_000, {}).unread
        sync.now_s = max(sync.now_s, before_s + 1)
        return took_s, set(unread)

    begun = sync.now_s
    for _ in as_long_as(lambda: not tried):
        cycle()  # What looks damaged is read again for a minute.
    assert sync.now_s - begun >= PATIENCE_MS / 1000
    everybody = {host.endpoint for host in sync.hosts if host.id != "well"}
    begun, lengths = sync.now_s, []
    while sync.now_s < begun + 900:
        took_s, unread = cycle()
        assert unread == everybody
        lengths.append(took_s)
    assert sum(lengths) < 0.55 * 900
    assert {node for at, node in tried if at >= begun} == {host.id for host in sync.hosts} - {"well"}, "in turns"
    refused.clear()
    for _ in range(120 * bad):
        _, unread = cycle()
    assert unread == set()
    assert not any((folder / sync.segment.name).exists() for folder in folders.values())
    assert not any(one["error"] for one in sync.stager.status().values())


def test_all_records_of_a_commit_that_cannot_be_decoded_are_put_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond the limit makes one object for a commit."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    second = sync.segment.with_name("CommitLog-7-1700000000099.log")
    shutil.copy(sync.segment, second)
    second.with_name(second.name.replace(".log", "_cdc.idx")).write_text(finished(second.read_bytes()))
    sync.add_errors(monkeypatch)
    puts: list[int] = []

    def put(errors: Any, node: str) -> None:
        puts.append(errors.num_rows)

    monkeypatch.setattr(sync.stager, "_put_errors", put)
    log = sync.cycle()
    assert (puts, log.number) == ([2], 1)
