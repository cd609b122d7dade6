"""Differences planted in the source behind the replica's back: each is found, named, and repaired."""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from delta.exceptions import ConcurrentAppendException
from pyspark import cloudpickle

from ringsync.changes.schema import ROW
from ringsync.cluster.cluster import read_hosts
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.cql.identifiers import parse_table_patterns
from ringsync.ledger.followed import end_following, keep_following
from ringsync.ledger.passes import LATE, digests_key
from ringsync.ledger.proofs import PROOFS, get_proof
from ringsync.ledger.staging import STAGED_ROWS, encode_rows, late_key
from ringsync.status import STOP_KEY, read_status
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.loop import put_status
from ringsync.steps.replica import caught_up, checksums, examine, verify
from ringsync.steps.replica.verify import again_after_conflicts
from ringsync.steps.sync_plan import SyncPlan, interval_at
from ringsync.storage.local import LocalStore
from ringsync.wiring import store_of
from tests.sync.evolving import in_background

pytestmark = [pytest.mark.server, pytest.mark.spark]

ROWS = 200


@pytest.fixture(scope="module")
def orders(session: Any, keyspace: str, bootstrap: Callable[[str, str], Report]) -> str:
    """A replicated table, all written long ago."""
    name = f"{keyspace}.orders"
    session.execute(
        f"CREATE TABLE {name} "
        "(id int, line int, s text STATIC, v text, n int, m map<text, int>, PRIMARY KEY (id, line))"
    )
    insert = session.prepare(
        f"INSERT INTO {name} (id, line, s, v, n, m) VALUES (?, ?, ?, ?, ?, ?) USING TIMESTAMP 1000 AND TTL 864000"
    )
    for i in range(ROWS):
        session.execute(insert, (i // 4, i % 4, f"s{i // 4}", f"v{i}", i, {"a": i, "b": -i}))
    # A SELECT shows them as a row without clustering.
    session.execute(f"UPDATE {name} USING TIMESTAMP 1000 SET s = 'alone' WHERE id = 700")
    bootstrap(name, "verify")
    return name


PLANTED = {
    (900, 1): "INSERT INTO {} (id, line, v) VALUES (900, 1, 'new') USING TIMESTAMP 1001",
    (3, 1): "DELETE FROM {} USING TIMESTAMP 1001 WHERE id = 3 AND line = 1",
    (4, 1): "UPDATE {} USING TIMESTAMP 1001 AND TTL 864000 SET v = 'other' WHERE id = 4 AND line = 1",
    (5, 1): "UPDATE {} USING TIMESTAMP 1001 AND TTL 864000 SET n = 21 WHERE id = 5 AND line = 1",
    (6, 1): "UPDATE {} USING TIMESTAMP 1000 AND TTL 990000 SET n = 25 WHERE id = 6 AND line = 1",
    (7, 1): "UPDATE {} USING TIMESTAMP 1001 AND TTL 864000 SET m['b'] = 7 WHERE id = 7 AND line = 1",
    (8, 2): "UPDATE {} USING TIMESTAMP 1001 SET s = 'other' WHERE id = 8",
}
"""What is done behind the replica's back, by the key of a row that must differ afterwards."""

FOUND = {
    (900, 1): {("missing", None, None)},
    (3, 1): {("extra", None, None)},
    (4, 1): {("value", "v", None), ("writetime", "v", None), ("ttl", "v", None)},
    (5, 1): {("writetime", "n", None), ("ttl", "n", None)},
    (6, 1): {("ttl", "n", None)},
    (7, 1): {("value", "m", "b"), ("writetime", "m", "b"), ("ttl", "m", "b")},
    (8, 2): {("value", "s", None), ("writetime", "s", None), ("ttl", "s", None)},
}
"""(kind, column, element) of what must be named."""


def test_nothing_differs(orders: str, step: Any, session: Any, lake: Path) -> None:
    """Also: rows written after the replica's moment were not compared, so a gap that was found later stays open."""
    before_ms = time.time() * 1000
    report, code = step("replica_verify", orders, "clean")
    (verified,) = LocalStore(lake).list(f"verified/{read_table(session, *orders.split('.')).table_id}")
    assert 0 < int(Path(verified.key).stem) < before_ms
    assert (report["differences"], report["ranges_differing"], code) == (0, 0, ExitCode.OK)
    assert report["rows"] == report["replica_rows"] == ROWS + 1
    assert report["cells"] == report["replica_cells"]


class DeadlyTask:
    """A comparison in memory that kills its worker, as Linux does if its rows do not fit."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, groups: Iterable[Any]) -> Iterable[Any]:
        os._exit(137)


WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "more rows than fit": {"ROWS_OF_A_TASK": ROWS},
    "larger rows than fit": {"BYTES_OF_A_SIDE": 1000},
    "workers die": {"RowsTask": DeadlyTask},
}
"""How rows are compared, and what of ``checksums`` is other then."""


def test_a_table_is_small_if_both_sides_are() -> None:
    """Of a replica that has lost nearly everything nobody may conclude that the source fits into memory."""

    def small(source: int, **seen: int) -> bool:
        state = SimpleNamespace(**{"base_rows": 10, "changed_rows": 0, "base_bytes": 5000, "changed_bytes": 0, **seen})
        return checksums.is_small(SimpleNamespace(seen=state), source)  # type: ignore[arg-type]

    most = checksums.ROWS_OF_A_TASK
    assert [small(most), small(most + 1)] == [True, False]
    assert not small(0, base_rows=most, changed_rows=1)
    assert not small(0, changed_bytes=checksums.CHANGES_OF_A_TASK)


@pytest.mark.parametrize("way", WAYS)
def test_planted_differences_are_found_and_named(
    way: str, orders: str, step: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fits into memory, or kills a worker there: then Spark compares, and finds the same."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers know no tests
    for name, other in WAYS[way].items():
        monkeypatch.setattr(checksums, name, other)
    for statement in PLANTED.values():
        session.execute(statement.format(orders))
    report, code = step("replica_verify", orders, f"found {way}".replace(" ", "-"))
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    check_found(report)


def test_planted_differences_are_repaired(orders: str, step: Any, session: Any, lake: Path) -> None:
    """A table of which something is published is repaired from all replicas."""
    table = read_table(session, *orders.split("."))
    LocalStore(lake).put(digests_key(table.table_id, LATE, 1, "x"), bytes(16))
    report, _ = step("replica_verify", orders, "found")
    check_found(report)
    repaired, code = step("replica_verify", orders, "repaired", repair=True)
    assert (repaired["differences"], code) == (0, ExitCode.OK)
    assert repaired["before_repair"]["differences"] == report["differences"]
    assert (report["consistency_level"], repaired["repair"]["consistency_level"]) == ("LOCAL_QUORUM", "ALL")


def check_found(report: Report) -> None:
    """All that was planted is named, and nothing else."""
    named: dict[tuple[int, int], set[tuple[Any, ...]]] = {}
    for one in report["listed"]:
        named.setdefault((one["key"]["id"], one["key"]["line"]), set()).add(
            (one["kind"], one["column"], one["element"])
        )
    assert {key: named.get(key) for key in FOUND} == FOUND
    # The static cell shows in all four rows of its partition; nothing else differs.
    assert named.keys() - FOUND.keys() == {(8, 0), (8, 1), (8, 3)}
    assert report["differences"] == sum(report["differences_by_kind"].values()) == len(report["listed"])


def test_a_repair_begins_anew_when_a_merge_was_faster() -> None:
    tries = [ConcurrentAppendException("a concurrent MERGE added data"), ConcurrentAppendException("again"), None]

    def repair() -> str:
        if (error := tries.pop(0)) is not None:
            raise error
        return "written"

    assert (again_after_conflicts(repair), tries) == ("written", [])
    tries += [ConcurrentAppendException("always")] * 9
    with pytest.raises(StepError, match="repair again when no merge runs"):
        again_after_conflicts(repair)
    assert len(tries) == 4


def test_what_was_written_after_the_bootstrap_is_no_difference(orders: str, step: Any, session: Any) -> None:
    session.execute(f"INSERT INTO {orders} (id, line, v) VALUES (10, 1, 'now')")
    report, code = step("replica_verify", orders, "changed")
    assert (report["differences"], code) == (0, ExitCode.OK)
    assert report["rows_of_differing_ranges"]["changed_after"] == 1


AHEAD_US = 4_000_000_000_000_000
"""A time of writing in the year 2096."""


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_run_of_what_is_due_ends_well_whatever_it_has_found(
    monkeypatch: pytest.MonkeyPatch, due: bool, is_equal: bool
) -> None:
    """If it fails, it could not do its work: the alarm dag-failed says so. Differences are told by the proofs."""
    noted: list[Any] = []
    monkeypatch.setattr(verify, "describe", lambda *_: {})
    monkeypatch.setattr(verify, "examined", lambda *given: given)
    monkeypatch.setattr(verify, "note_examined", lambda _, found: noted.append(found) or SimpleNamespace(proved_ms=0))
    options = SimpleNamespace(repair=False, due=due)
    application: Any = SimpleNamespace(store=None, options=options)
    sides: Any = SimpleNamespace(plan=SimpleNamespace(table=None), seen=SimpleNamespace(applied=1))
    found: Any = SimpleNamespace(is_equal=is_equal, rows_differing=5)
    examine: Any = None
    _, code = verify.conclude(application, examine, sides, found, time.time)
    assert (code, len(noted)) == (ExitCode.OK if due or is_equal else ExitCode.COMPLETED_WITH_ERRORS, 1)


@pytest.fixture
def followed(orders: str, session: Any, lake: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The table as if the sync followed it, and had staged and published all that there is. Gives the table's id."""
    monkeypatch.setattr(examine, "longest_sync_period_ms", lambda *_: 0)  # nobody writes its log's rows
    monkeypatch.setattr(caught_up, "pass_numbers", lambda *_: [])  # nobody takes the bootstrap's marks to the replica
    store, table_id = LocalStore(lake), read_table(session, *orders.split(".")).table_id
    hosts, over = read_hosts(session), threading.Event()
    plan = SyncPlan(interval_at(int(time.time() * 1000), 60_000), hosts, {}, ())
    plan_key = f"plans/sync/{plan.interval.start:013}.json"
    store.put(plan_key, plan.to_json().encode())
    told = {"table_id": table_id, "oldest_open_bucket_ms": None, "bootstrap": ""}

    def go_on() -> None:
        while not over.wait(0.2):
            now_ms = int(time.time() * 1000)
            nodes = {host.id: {"clear_at_ms": now_ms, "is_read": True} for host in hosts}
            put_status(store, "commitlog_stage", "default", {"at_ms": now_ms, "nodes": nodes})
            put_status(store, "bucket_close", "close", {"began_ms": now_ms, "tables": {orders: told}})

    version = keep_following(store, table_id)
    with in_background(go_on):
        yield table_id
        over.set()
    end_following(store, table_id, version)
    for key in (plan_key, "status/commitlog_stage/default.json", "status/bucket_close/close.json"):
        store.delete(key)


def test_of_a_table_that_is_followed_no_time_of_writing_excuses_anything(
    orders: str, followed: str, step: Any, session: Any, lake: Path
) -> None:
    """The sync has published everything: what differs now was written lately, or is dated ahead, and never came."""
    session.execute(f"INSERT INTO {orders} (id, line, v) VALUES (11, 1, 'now')")
    session.execute(f"UPDATE {orders} USING TIMESTAMP {AHEAD_US} SET n = 99 WHERE id = 12 AND line = 1")
    session.execute(f"INSERT INTO {orders} (id, line, n) VALUES (901, 1, 1) USING TIMESTAMP {AHEAD_US}")
    session.execute(f"INSERT INTO {orders} (id, line) VALUES (902, 1)")
    session.execute(f"DELETE FROM {orders} WHERE id = 13 AND line = 1")
    report, code = step("replica_verify", orders, "lost")
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    named = {(one["kind"], one["key"]["id"], one["column"]) for one in report["listed"]}
    assert named >= {
        ("value", 11, "v"),
        ("value", 12, "n"),
        ("missing", 901, None),
        ("missing", 902, None),
        ("extra", 13, None),
    }
    rows = report["rows_of_differing_ranges"]
    assert (rows["changed_after"], rows["not_judged"], rows["missing"], rows["extra"]) == (0, 0, 2, 1)
    assert not LocalStore(lake).list("verify/"), "nothing is left of the suspects"


def test_rows_that_wait_as_late_are_left_out(orders: str, followed: str, step: Any, lake: Path) -> None:
    """One of the differences of the test before waits; the others stay differences."""
    key, clustering = (901).to_bytes(4, "big"), b"\1\0\0\0" + b"\4\0\0\0" + (1).to_bytes(4, "big")
    waiting = {"partition_key": key, "clustering": clustering, "kind": ROW}
    file = late_key(followed, "waiting")
    LocalStore(lake).put(file, encode_rows(pa.RecordBatch.from_pylist([waiting], STAGED_ROWS)))
    report, code = step("replica_verify", orders, "late")
    LocalStore(lake).delete(file)
    rows = report["rows_of_differing_ranges"]
    assert (rows["late"], rows["missing"], code) == (1, 1, ExitCode.COMPLETED_WITH_ERRORS)


def test_nothing_is_a_difference_while_the_sync_is_stopped(orders: str, followed: str, step: Any, lake: Path) -> None:
    """What it has not brought may be on its way: it is not judged, and the replica is not called equal."""
    LocalStore(lake).put(STOP_KEY, b"{}")
    report, code = step("replica_verify", orders, "stopped")
    LocalStore(lake).delete(STOP_KEY)
    rows = report["rows_of_differing_ranges"]
    assert (report["differences"], code) == (0, ExitCode.COMPLETED_WITH_ERRORS)
    assert rows["not_judged"] >= 5
    assert f"{rows['not_judged']} rows could not be judged: the sync is stopped" in report["error"]
    repaired, code = step("replica_verify", orders, "mended", repair=True)
    assert (repaired["rows_of_differing_ranges"]["not_judged"], code) == (0, ExitCode.OK)


def test_what_is_due_is_proved_part_by_part(
    orders: str, followed: str, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that nobody follows are not due. Of a large one each run compares the ranges proved longest ago."""
    monkeypatch.setattr(verify, "SMALL_BYTES", 0)
    config = load_config(lake / "ringsync.yaml")
    store, proved = store_of(config), []
    for run in ("due-1", "due-2"):
        given = argparse.Namespace(repair=False, due=True)
        patterns = parse_table_patterns("*.*")
        application = Application(
            "replica_verify", str(lake / "ringsync.yaml"), config, store, None, run, given, patterns
        )
        before = get_proof(store, followed)
        report, code = verify.run(application)
        assert (list(report["tables"]), code) == ([orders], ExitCode.OK)
        of_table, proof = report["tables"][orders], get_proof(store, followed)
        assert before is not None
        assert proof is not None
        newer = {n for n in range(16) if proof.ranges_ms[n] > before.ranges_ms[n]}
        assert (len(newer), of_table["rows"]) == (3, of_table["replica_rows"])
        assert 0 < of_table["rows"] < ROWS
        proved.append(newer)
        store.put(f"proofs/{followed}.json", json.dumps({**asdict(proof), "part_ms": 0}).encode())  # a day has passed
    assert proved[0].isdisjoint(proved[1])
    told = read_status(store, PROOFS)
    assert told is not None
    assert told["proofs"][orders]["ranges_differing"] == 0


def test_no_replica_yet(step: Any, session: Any, keyspace: str) -> None:
    session.execute(f"CREATE TABLE {keyspace}.lonely (id int PRIMARY KEY)")
    with pytest.raises(StepError, match=r"there is no replica of .*lonely: trigger bootstrap_table first"):
        step("replica_verify", f"{keyspace}.lonely", "lonely")
