"""Objects that are not ours may lie anywhere in the bucket: whoever lists it passes them over, and lets them be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from ringsync.cluster.control import LimitsWatch
from ringsync.cluster.limits import Limits
from ringsync.ledger import alarms, archive, dropped_tables, error_tries, gaps, proofs, snapshots, staging
from ringsync.ledger.followed import followed_tables, keep_following
from ringsync.ledger.left_tables import LeftTable, left_tables, note_left
from ringsync.ledger.passes import pass_numbers
from ringsync.ledger.schema_changes import change_numbers
from ringsync.ledger.table_versions import CdcBegun, names_of_histories, names_of_versions
from ringsync.ledger.topic_owners import topic_owners
from ringsync.ledger.tries import list_tries
from ringsync.ledger.waiting_segments import waiting_keys
from ringsync.replica.delta_log import log_from_checkpoint
from ringsync.service import leave
from ringsync.status import look_at_statuses, read_statuses
from ringsync.steps.archive.commitlog_archive import Archiver
from ringsync.steps.bootstrap.leftovers import _unpublished_parts
from ringsync.steps.replica.caught_up import newest_plan, waiting_rows
from ringsync.steps.stage.claims import Place, known_nodes, put_place
from ringsync.steps.sync_plan import SyncPlan, plan_keys
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from tests.steps.test_archive import config
from tests.stray import StrayStore

ID = "1d3c5e005c9211f08de9f3bd2ad0d1ff"
SEGMENT = "CommitLog-7-1001.log"
ENTRY = {
    **{"node": "a", "name": SEGMENT, "index": "1\nCOMPLETED", "size": 1, "crc32c": 0, "began_ms": 0, "ended_ms": 9},
    "archived_ms": 9,
}
ALARM = alarms.Alarm("cdc-raw-full", "node a", "3 MB are free", True, 1, 1, raised_ms=86_400_000)
OBJECTS: dict[str, Any] = {
    f"cdc/a/{SEGMENT}": 1,
    f"cdc/a/{SEGMENT}.json": ENTRY,
    "cdc/a/CommitLog-7-1002.log": 1,
    "cdc/a/CommitLog-7-1002_cdc.idx": 1,
    f"cdc_archive/a/{SEGMENT}.json": ENTRY,
    f"staging/log/a/{1:012}.json": {},
    f"staging/rows/a/{1:012}-x.arrow": 1,
    f"sync/{ID}/passes/{1:012}.json": {},
    f"sync/{ID}/changes/{1:012}-x.arrow": 1,
    f"plans/sync/{1000:013}.json": json.loads(SyncPlan(staging.Bucket(1000, 1000), (), {}, ()).to_json()),
    "streams/s.shop.orders/tables/000001.json": {"table_id": ID, "behind": 0},
    f"streams/s.shop.orders/pass-{1:012}/manifest.json": {},
    f"streams/s.shop.orders/pass-{2:012}/part-0001.avro": 1,
    "schemas/shop.orders/000001.json": {},
    "schema_changes/000000000001.json": {},
    "errors/retry/r1.json": {"id": "r1", "at_ms": 1, "is_put": True, "rows": [], "files": []},
    "errors/taken/r2/x": 1,
    "status/commitlog_stage/default.json": {"at_ms": 1},
    f"status/bootstrap/{ID}.json": {
        **{"at_ms": 1, "table": "shop.orders", "table_id": ID, "bootstrap": "b", "run": "r"},
        **{"step": "scan", "fraction": 0.5},
    },
    f"cdc_enabling/{ID}.json": {},
    "archive/nodes/a.json": {"node": "a", "endpoint": "a:9042", "address": "a"},
    "replica/shop/orders/base/_delta_log/00000000000000000000.json": 1,
    "limits/runs/other.json": 1,
}


def counted(store: LocalStore) -> int:
    limits = LimitsWatch(store, SimpleNamespace(), "run", Limits())  # type: ignore[arg-type]
    limits._count()
    return limits._count()


def remembered(store: LocalStore) -> list[str]:
    return [node.node for node in Archiver(config(), store, "default", None)._remembered()]


def tables_cut_off(store: LocalStore) -> Any:
    """What ``leave`` switches off though it has no cdc: its switching on was cut off."""
    table = SimpleNamespace(keyspace="shop", name="orders", full_name="shop.orders", table_id=ID)
    follows = SimpleNamespace(sync=SimpleNamespace(follows=lambda _: True))
    with mock.patch.object(leave, "ask_one", return_value=((table,), set())):
        return leave.tables_with_cdc(None, store, follows)[0]  # type: ignore[arg-type]


LISTS: dict[str, Callable[[LocalStore], Any]] = {
    "archived": lambda store: [*archive.archived(store, "cdc/"), *archive.archived(store, "cdc_archive/")],
    "waiting": lambda store: (archive.is_waiting(store), waiting_keys(store)),
    "tidy": lambda store: archive.tidy(store, 0, lambda *_: True),
    "commits": lambda store: (staging.commit_keys(store), staging.commit_keys(store, "a")),
    "rows": staging.rows_keys,
    "late": lambda store: (staging.late_files(store), staging.late_files(store, ID)),
    "late rows": lambda store: waiting_rows(store, SimpleNamespace(table_id=ID, clustering=())).rows,  # type: ignore[arg-type]
    "passes": lambda store: pass_numbers(store, ID),
    "tries": lambda store: list_tries(store, ID),
    "plans": plan_keys,
    "newest plan": newest_plan,
    "proofs": proofs.proofs,
    "owners": lambda store: topic_owners(store, "s.shop.orders"),
    "folders": lambda store: FileStream(store, "s.shop.orders").folders(),
    "unpublished": lambda store: _unpublished_parts(store, "s.shop.orders", 3),
    "histories": lambda store: (names_of_histories(store), names_of_versions(store)),
    "schema changes": change_numbers,
    "retries": error_tries.read_tries,
    "followed": followed_tables,
    "begun": lambda store: (ID in CdcBegun(store), "notes.txt" in CdcBegun(store)),
    "gaps": lambda store: gaps.Gaps(store).look(),
    "verified": gaps._verified,
    "left": left_tables,
    "cut off": tables_cut_off,
    "unfinished": leave._unfinished,
    "dropped": lambda store: dropped_tables.dropped_of(store, "shop", "orders"),
    "snapshots": snapshots.bootstraps_with_snapshots,
    "alarms": lambda store: [*alarms.history(store, 0)],
    "old alarms": lambda store: alarms.forget_before(store, 86_400_000),
    "statuses": read_statuses,
    "looked at": look_at_statuses,
    "places": known_nodes,
    "watched": remembered,
    "delta log": lambda store: log_from_checkpoint(store, "replica/shop/orders/base"),
    "runs": counted,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = LocalStore(tmp_path)
    for key, content in OBJECTS.items():
        store.put(key, json.dumps(content).encode())
    late = pa.RecordBatch.from_pylist([{"partition_key": b"k", "clustering": b"", "kind": 0}])
    store.put(f"staging/late/{ID}/a-1.arrow", staging.encode_rows(late))
    proofs.note_examined(store, proofs.Examined(ID, "shop.orders", "b", 1, [0], (), (), 0, 9, "r", False, True))
    alarms.note(store, ALARM)
    put_place(store, "a", Place("/raw", "token"))
    keep_following(store, ID)
    CdcBegun(store).begins(ID, 0)
    gaps.note_gap(store, gaps.Gap("a", "a:9042", SEGMENT, 0, 9, {ID: "shop.orders"}, ()))
    gaps.note_verified(store, ID, 5)
    note_left(store, ID, LeftTable(5, has_cdc=True))
    dropped_tables.mark_dropped(store, "shop", "orders", ID, 7)
    store.put("snapshots/20260101T000000Z-0123abcd/begun.json", b"{}")
    return tmp_path


@pytest.mark.parametrize("name", LISTS)
def test_who_lists_passes_over_what_is_not_ours(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = LISTS[name](LocalStore(root))
    assert expected or name == "old alarms"
    said = capsys.readouterr().out
    store = StrayStore(root)
    assert LISTS[name](store) == expected
    assert store.removed == []
    assert name == "alarms" or capsys.readouterr().out == said


def test_hidden_files_are_no_objects(tmp_path: Path) -> None:
    """A file manager leaves them in each folder that somebody has looked at."""
    store = LocalStore(tmp_path)
    store.put("cdc/a/x", b"1")
    for folder in (".", "cdc", "cdc/a"):
        (tmp_path / folder / ".DS_Store").write_bytes(b"\0")
        (tmp_path / folder / "._x").write_bytes(b"\0")
    assert [stat.key for stat in store.list()] == ["cdc/a/x"]
    assert archive.tidy(store, 0, lambda *_: True) == (0, frozenset())


def test_a_copy_of_a_proof_proves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    seen = proofs.Examined(ID, "shop.orders", "b", 1, [0], [0], (), 1, 9, "r", False, True)
    proof = proofs.note_examined(store, seen)
    (tmp_path / "proofs" / f"{ID}.json~").write_text(json.dumps(asdict(replace(proof, differing=()))))
    assert proofs.proofs(store) == {ID: proof}
