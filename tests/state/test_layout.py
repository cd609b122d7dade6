"""State of another version is taken over where that is safe, and refused with what to do where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.layout import LAYOUT, LayoutError, check_layout
from ringsync.ledger.staging import commit_keys
from ringsync.ring.ring import Host
from ringsync.storage.local import LocalStore
from tests.steps.node_logs import read_node_log

HOST = Host("node-1", "10.0.0.1", 9042, "dc1", "r1", ())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def put_old_commit(store: LocalStore, segment: int, start: int, **changed: Any) -> None:
    """A commit as layout 1 had it (at 98f0773)."""
    document = {
        **{"node": "node-1", "segment": f"CommitLog-7-{segment}.log", "segment_id": segment, "start": start},
        **{"end": start + 100, "finished": False, "read_at_ms": 5, "counts": {"rows": 1}, "files": [], **changed},
    }
    store.put(f"staging/log/node-1/{segment:019}-{start:010}.json", json.dumps(document).encode())


def test_an_empty_store_gets_the_present_layout(store: LocalStore) -> None:
    check_layout(store)
    check_layout(store)
    assert json.loads(store.get("state/layout.json")) == {"layout": LAYOUT}


def test_a_layout_of_the_future_is_refused(store: LocalStore) -> None:
    store.put("state/layout.json", b'{"layout": 99}')
    with pytest.raises(LayoutError, match="has layout 99, but this version of ringsync knows only 3"):
        check_layout(store)


def test_layout_2_is_taken_over_and_then_refused_by_what_knows_only_that(store: LocalStore) -> None:
    """It would not find the versions of tables, and would give their columns other ids."""
    store.put("state/layout.json", b'{"layout": 2}')
    store.put("plans/sync/0000000000000.json", b"{}")  # It names versions by other numbers.
    check_layout(store)
    assert store.list("plans/") == []
    assert json.loads(store.get("state/layout.json")) == {"layout": 3}


def test_how_far_logs_were_read_is_taken_over(store: LocalStore) -> None:
    put_old_commit(store, 1, 0, finished=True)
    put_old_commit(store, 2, 0)
    put_old_commit(store, 2, 100)
    store.put("plans/sync/0000000000000.json", b"{}")
    check_layout(store)
    log = read_node_log(store, HOST, None, 0)
    assert (log.number, log.ends, 1 in log.folded, 2 in log.folded) == (1, {2: 200}, True, False)
    assert len(commit_keys(store)) == 1
    assert store.list("plans/") == []


def test_rows_that_wait_are_refused_and_stay(store: LocalStore) -> None:
    file = {"key": "staging/rows/t/b/f.arrow", "table_id": "t", "bucket": "b", "rows": 7, "ring": "", "sums": []}
    put_old_commit(store, 2, 0, files=[file])
    with pytest.raises(LayoutError, match=r"7 rows .* start that version once more"):
        check_layout(store)
    assert [stat.key for stat in store.list()] == [f"staging/log/node-1/{2:019}-{0:010}.json"]


def test_late_rows_that_wait_are_refused_and_stay(store: LocalStore) -> None:
    put_old_commit(store, 2, 0, finished=True)
    store.put(f"staging/late/{'5' * 32}/a.arrow", b"rows")
    with pytest.raises(LayoutError, match="1 files of late rows"):
        check_layout(store)
