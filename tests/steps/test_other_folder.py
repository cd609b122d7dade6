"""Two workers that read each other's node: each folder has one claim, but the rows give it away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.compiled.arrow import integers
from ringsync.ledger.staging import Bucket
from ringsync.ring.ranks import ranked
from ringsync.steps.stage.claims import not_its_own
from ringsync.steps.stage.node_log import NodeLog
from ringsync.steps.stage.staged_files import Destination, StagedFiles, StagedTable, Windows
from ringsync.storage.local import LocalStore
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import TABLE, VERSION
from tests.steps.test_late_pass import ring

BUCKET = Bucket(1_790_000_000_000 // 60_000 * 60_000, 60_000)
WRITES = [Write(number, 1, "x", BUCKET.start * 1000) for number in range(2000)]


def counts(folder: Path, reads: str, is_of: str) -> Counter[str]:
    """What a worker counts that reads the log of one node as that of another. Each row is on three of five nodes."""
    snapshot = ranked(ring(True, True, True, True, True))
    rows = change_rows(WRITES, TABLE)
    numbers = snapshot.numbers_of(integers(rows["token"])).tolist()
    has = [number for number, at in enumerate(numbers) if is_of in {host.id for host in snapshot.hosts[at]}]
    table = StagedTable(VERSION, False, snapshot)
    files = StagedFiles([table], Windows(BUCKET, 0), LocalStore(folder), Destination(reads, 1, "x"))
    files.add(rows.take(has).select(CHANGE_ROWS.names))
    return Counter(files.finish())


def test_a_log_of_another_node_is_noticed_by_its_rows(tmp_path: Path) -> None:
    other = counts(tmp_path, "n0", "n3")
    assert other["rows"] == other["staged"] > 1000
    told = not_its_own(Path("/raw"), other)
    assert told is not None
    assert "/raw" in told
    assert "sync.queue_of_node" in told


@pytest.mark.parametrize("node", ["n0", "n4"])
def test_a_node_s_own_log_is_its_own(tmp_path: Path, node: str) -> None:
    own = counts(tmp_path, node, node)
    assert own["staged"] > 1000
    assert own["foreign"] == 0
    assert not_its_own(Path("/raw"), own) is None
    assert not_its_own(Path("/raw"), own + Counter(foreign=own["staged"] // 3)) is None, "token ranges have moved"
    assert counts(tmp_path, "gone", node)["foreign"] == 0, "a node that has left replicates nothing"


def test_the_status_of_a_node_tells_it() -> None:
    log = NodeLog("n0", "n0:9042", Path("/raw"))
    log.counts.update(staged=1000, foreign=400)
    assert log.status()["error"] is None
    log.counts.update(foreign=300)
    status = log.status()
    assert status["error"] == not_its_own(log.folder, log.counts)
    assert "700 of 1,000 rows in /raw" in status["error"]
    log.error = "the folder cannot be read"
    assert log.status()["error"] == log.error, "what stops all else is told first"
