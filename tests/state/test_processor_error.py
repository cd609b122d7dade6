"""Undecodable records in a real table and a real store: once each, with their bytes, wherever these are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringsync.formats.commitlog.reader import UNDECODED
from ringsync.state.processor_error import LARGEST_INLINE, ErrorTable
from ringsync.state.session import StateSession
from ringsync.storage.local import LocalStore

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def keyspace(session: Any) -> Iterator[str]:
    StateSession(session, "t_errors").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
    yield "t_errors"
    session.execute("DROP KEYSPACE t_errors")


def errors(*raws: bytes | None) -> pa.RecordBatch:
    rows = [
        {"position": 100 * number, "length": len(raw or b""), "reason": f"reason {number % 2}", "raw": raw}
        | {"table_id": bytes(16) if number % 2 else None, "file": "CommitLog-7-1.log"}
        for number, raw in enumerate(raws, 1)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=UNDECODED.append(pa.field("file", pa.string())))


def test_a_record_is_one_row_however_often_it_is_put(keyspace: str, session: Any, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    kept = ErrorTable(session, keyspace, store)
    large = b"\x07" * (LARGEST_INLINE + 1)
    for _ in range(2):
        kept.put(errors(b"small", b"", large, None), "node-1")
    kept.put(errors(b"small"), "node-2")
    rows = session.execute(
        "SELECT * FROM t_errors.processor_error WHERE node = 'node-1' AND file = 'CommitLog-7-1.log'"
    )
    found = [(row.position, row.length, row.reason, row.table_id, row.raw, row.raw_object) for row in rows]
    key = "errors/node-1/CommitLog-7-1.log/300"
    assert found == [
        (100, 5, "reason 1", bytes(16), b"small", None),
        (200, 0, "reason 0", None, b"", None),
        (300, len(large), "reason 1", bytes(16), None, key),
        (400, 0, "reason 0", None, None, None),
    ]
    assert store.get(key) == large
    assert kept.counts() == {("node-1", "reason 1"): 2, ("node-1", "reason 0"): 2, ("node-2", "reason 1"): 1}
