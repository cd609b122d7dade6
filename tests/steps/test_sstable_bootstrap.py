"""Bootstraps with mode ``sstable``: a table of a real node, from its SSTables, judged by what SELECT shows."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.cluster.control import put_limits
from ringsync.cluster.limits import Limits
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import connect
from ringsync.config import load_config
from ringsync.cql.identifiers import parse_table_patterns
from ringsync.ledger.snapshots import COPIES, FOLDER
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.state.bootstrap import BootstrapState
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap import drain as bootstrap_drain
from ringsync.steps.bootstrap import prepare as bootstrap_prepare
from ringsync.steps.bootstrap import scan as bootstrap_scan
from ringsync.steps.bootstrap import snapshot as sstable_snapshot
from ringsync.steps.bootstrap.cancel import cancel
from ringsync.steps.bootstrap.old_snapshots import ClearsAside, clear_old
from ringsync.steps.replica import verify as replica_verify
from ringsync.steps.tables import Outcome
from ringsync.streams.files import FileStream
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode
from servers.gcs import GcsEmulator
from tests.chaos.applications import started
from tests.chaos.bootstraps import change_conf, committed_rows, nodetool_of, prepare, write_conf
from tests.newest_model import NewestModel, newest_differences
from tests.oracle import differences, source_rows, synced_rows
from tests.stream_model import StreamModel

pytestmark = [pytest.mark.server, pytest.mark.spark]

STEPS = {
    "bootstrap_prepare": bootstrap_prepare,
    "sstable_snapshot": sstable_snapshot,
    "bootstrap_scan": bootstrap_scan,
    "bootstrap_drain": bootstrap_drain,
    "replica_verify": replica_verify,
}


class World:
    """A configuration, and the steps of a bootstrap in this process."""

    def __init__(self, folder: Path, node: CassandraNode, session: Any, **sstable: Any) -> None:
        self.node, self.session = node, session
        self.conf = write_conf(
            folder,
            [node],
            sstable={"nodetool": nodetool_of(node), "uploads": 2, **sstable},
            scan={"mode": "sstable", "file_size_mb": 1},
            verify={"ranges": 16},
        )

    @property
    def store(self) -> Any:
        return store_of(load_config(self.conf))

    @property
    def state(self) -> BootstrapState:
        config = load_config(self.conf)
        return BootstrapState(connect(cluster_settings(config)), config.state.keyspace)

    def step(self, name: str, table: str, run: str, **options: Any) -> tuple[Report, ExitCode]:
        """Run a step for one table."""
        config = load_config(self.conf)
        given = argparse.Namespace(
            **{"bootstrap_run": run, "queue": "default", "last": False, "repair": False, **options}
        )
        keyspace, _, short = table.partition(".")
        application = Application(name, str(self.conf), config, self.store, (keyspace, short), run, given)
        return STEPS[name].run(application)

    def cancel(self, table: str) -> None:
        """Cancel the bootstrap of one table."""
        keyspace, _, short = table.partition(".")
        [*cancel(load_config(self.conf), self.store, self.state, [(keyspace, short)], Outcome(alone=True))]

    def all_steps(self, table: str, run: str, **options: Any) -> Report:
        """All steps; gives the report of the scan."""
        prepare(self.conf, table, run, **options)
        self.step("sstable_snapshot", table, run)
        report, code = self.step("bootstrap_scan", table, run)
        assert code == ExitCode.OK, report
        assert self.step("bootstrap_drain", table, run)[1] == ExitCode.OK
        return report

    def judge(self, table: str, report: Report) -> int:
        """Replica and stream are what SELECT shows, cell by cell."""
        schema = read_table(self.session, *table.split("."))
        now = int(time.time())
        source = source_rows(self.session, schema, now)
        uris = [self.store.uri(folder(*table.split("."))) for folder in (base_folder, changes_folder)]
        assert differences(source, synced_rows(*uris, schema, now))[:5] == []
        messages = list(FileStream(self.store, report["stream"]["topic"]).read(report["stream"]["folder"]))
        assert {message["value"]["op"] for message in messages} <= {"r"}
        assert len(messages) == report["messages_published"] == report["rows"] - report["rows_hidden"]
        assert differences(source, StreamModel(schema, True).apply_all(messages).rows(now))[:5] == []
        assert newest_differences(source, NewestModel(schema).apply_all(messages).rows(now))[:5] == []
        return len(source)

    def snapshots(self) -> list[Path]:
        """Snapshots of ringsync on the node."""
        return list((self.node.folder / "data").glob("*/*/snapshots/ringsync_*"))

    def copies(self) -> list[str]:
        """Copies in the store."""
        found = [stat for folder in (FOLDER, COPIES) for stat in self.store.list(folder)]
        return [stat.key for stat in found if not stat.key.endswith("/bootstrap.json")]


@pytest.fixture
def world(cassandra: CassandraNode, session: Any, tmp_path: Path, spark: Any) -> Iterator[World]:
    found = World(tmp_path, cassandra, session)
    yield found
    assert found.snapshots() == []


@pytest.fixture(scope="module")
def troubled(cassandra: CassandraNode, session: Any, keyspace: str) -> str:
    """A table with all that a SELECT does not show, in three SSTables: deletions of all kinds, expired cells, static
    cells alone."""
    name = f"{keyspace}.troubled"
    session.execute(
        f"CREATE TABLE {name} (id int, seq int, v text, n int, tags set<text>, m map<text, int>, l list<int>, "
        "owner text static, PRIMARY KEY (id, seq)) WITH gc_grace_seconds = 864000"
    )
    run = session.execute
    run(f"CREATE INDEX ON {name} (n)")  # a snapshot has the index's SSTables, too
    for part in range(60):
        run(f"UPDATE {name} SET owner = 'o{part}' WHERE id = {part}")
        for seq in range(5):
            run(
                f"INSERT INTO {name} (id, seq, v, n, tags, m, l) VALUES ({part}, {seq}, 'v{part}', {seq}, "
                f"{{'a', 'b{seq}'}}, {{'k': {seq}}}, [1, {seq}])"
            )
    cassandra.nodetool("flush", *name.split("."))
    for part in range(0, 60, 3):
        run(f"DELETE FROM {name} WHERE id = {part} AND seq = 1")
        run(f"DELETE v, tags FROM {name} WHERE id = {part} AND seq = 2")
        run(f"DELETE FROM {name} WHERE id = {part} AND seq > 3")
        run(f"UPDATE {name} SET tags = tags - {{'a'}}, m['k2'] = 7, l = l + [9] WHERE id = {part} AND seq = 3")
    for part in range(0, 60, 10):
        run(f"DELETE FROM {name} WHERE id = {part}")
    cassandra.nodetool("flush", *name.split("."))
    for part in range(1, 60, 10):
        run(f"DELETE FROM {name} WHERE id = {part} AND seq >= 0")  # only static cells are left
        run(f"UPDATE {name} USING TTL 86400 SET v = 'later' WHERE id = {part + 1} AND seq = 0")
        run(f"UPDATE {name} USING TTL 1 SET v = 'gone' WHERE id = {part + 1} AND seq = 1")
        run(f"UPDATE {name} USING TTL 1 SET v = 'gone' WHERE id = {part + 1} AND seq = 70")
        run(f"INSERT INTO {name} (id, seq, n) VALUES ({part + 2}, 80, 1) USING TTL 1")
        run(f"UPDATE {name} USING TTL 1 SET owner = 'gone' WHERE id = {part + 3}")
        run(f"UPDATE {name} SET v = 'late' WHERE id = {part + 1000} AND seq = 1")  # no liveness
    time.sleep(2.1)
    return name


@pytest.mark.parametrize("read", ["upload", "in_place"])
def test_replica_and_stream_are_what_select_shows(
    world: World, troubled: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sstable_snapshot, "PIECE_BYTES", 1000)  # each file is copied in several pieces
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "read": read})
    report = world.all_steps(troubled, f"shown-{read}", splits=4)
    assert world.judge(troubled, report) > 200
    assert report["rows_hidden"] > 50
    assert world.copies() == []
    verified, code = world.step("replica_verify", troubled, f"shown-{read}")
    assert (code, verified["differences"]) == (ExitCode.OK, 0)


def test_copies_in_a_bucket_of_a_node_that_has_a_queue_of_its_own(
    world: World, troubled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sstable_snapshot, "PIECE_BYTES", 2000)
    with GcsEmulator() as bucket:
        queues = {"queue_of_node": {world.node.contact_point: "rack1"}}
        change_conf(world.conf, store={"url": bucket.url, "gcs_endpoint": bucket.endpoint}, sync=queues)
        prepare(world.conf, troubled, "bucket", splits=4)
        assert world.step("sstable_snapshot", troubled, "bucket")[0]["nodes"] == {}, "it is another queue's"
        assert len(world.step("sstable_snapshot", troubled, "bucket", queue="rack1")[0]["nodes"]) == 1
        assert len(world.copies()) > 10
        report, code = world.step("bootstrap_scan", troubled, "bucket")
        assert code == ExitCode.OK, report
        schema, now = read_table(world.session, *troubled.split(".")), int(time.time())
        source = source_rows(world.session, schema, now)
        messages = list(FileStream(world.store, report["stream"]["topic"]).read(report["stream"]["folder"]))
        assert len(source) > 200
        assert differences(source, StreamModel(schema, True).apply_all(messages).rows(now))[:5] == []
        assert world.step("bootstrap_drain", troubled, "bucket")[1] == ExitCode.OK
        assert world.copies() == []


def test_a_table_of_several_fails_alone(world: World, troubled: str) -> None:
    given = {**dict.fromkeys(("mode", "splits", "columns", "token_range", "where")), "last": True, "queue": "default"}
    flags = dict.fromkeys(("restart", "enable_cdc", "dry_run"), False)
    patterns = parse_table_patterns(f"{troubled}, {troubled}_not")
    for name in ("bootstrap_prepare", "sstable_snapshot", "bootstrap_scan", "bootstrap_drain"):
        run = "several.default" if name == "sstable_snapshot" else "several"
        options = argparse.Namespace(**given, **flags, bootstrap_run="several")
        config = load_config(world.conf)
        application = Application(name, str(world.conf), config, world.store, None, run, options, patterns)
        report, code = STEPS[name].run(application)
        world.store.put(f"reports/{name}/{run}.json", json.dumps(report, default=str).encode())
        assert code == (ExitCode.COMPLETED_WITH_ERRORS if name == "bootstrap_drain" else ExitCode.OK), report
    assert list(report["failed"]) == [f"{troubled}_not"]
    scan = json.loads(world.store.get("reports/bootstrap_scan/several.json"))["tables"][troubled]
    assert world.judge(troubled, scan) > 200
    assert world.copies() == []


def test_what_sstables_cannot_choose_is_refused(world: World, troubled: str) -> None:
    with pytest.raises(StepError, match="where is not possible with mode sstable"):
        prepare(world.conf, troubled, "where", where="id = 1")
    with pytest.raises(StepError, match="columns is not possible with mode sstable"):
        prepare(world.conf, troubled, "columns", columns=("n", "owner"))


@contextmanager
def writing(session: Any, table: str) -> Iterator[list[int]]:
    """Rows are inserted and deleted all the time; gives the numbers of the inserted ones."""
    over, numbers = threading.Event(), list[int]()

    def write() -> None:
        number = 0
        while not over.wait(0.01):
            session.execute(f"INSERT INTO {table} (id, seq, v) VALUES (5000, {number}, 'live')")
            numbers.append(number)
            if number % 3 == 0:
                session.execute(f"DELETE FROM {table} WHERE id = {number % 60} AND seq = 0")
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield numbers
    finally:
        over.set()
        thread.join()


def test_a_killed_scan_goes_on_while_others_write(
    world: World, session: Any, keyspace: str, cassandra: CassandraNode, tmp_path: Path
) -> None:
    table = f"{keyspace}.killed"
    session.execute(f"CREATE TABLE {table} (id int, seq int, v text, PRIMARY KEY (id, seq))")
    insert = session.prepare(f"INSERT INTO {table} (id, seq, v) VALUES (?, ?, ?)")
    for part in range(2_000):
        session.execute_async(insert, (part, part % 7, "x" * 20)).result()
    change_conf(world.conf, sstable={"nodetool": nodetool_of(cassandra), "read": "in_place"})
    change_conf(world.conf, scan={"mode": "sstable", "commit_interval_s": 0.2})
    bootstrap = prepare(world.conf, table, "killed", splits=30)
    put_limits(world.store, Limits(rows_per_s=300))
    with writing(session, table) as numbers:
        world.step("sstable_snapshot", table, "killed")
        (snapshot,) = world.snapshots()
        with started(tmp_path / "log", "bootstrap_scan", world.conf, table, "killed") as process:
            deadline = time.monotonic() + 240
            while committed_rows(world.conf, bootstrap) == 0:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            os.kill(process.pid, signal.SIGKILL)
        before = committed_rows(world.conf, bootstrap)
        assert 0 < before < 2_000
        assert world.snapshots() == [snapshot]
        put_limits(world.store, None)
        with pytest.raises(StepError, match=r"has a plan for .* with other parameters"):
            prepare(world.conf, table, "killed", mode="token_range")
        assert prepare(world.conf, table, "again", splits=3) == bootstrap
        world.step("sstable_snapshot", table, "again")
        report, code = world.step("bootstrap_scan", table, "again")
        assert (code, report["rows_of_runs_before"]) == (ExitCode.OK, before)
        assert report["rows_read"] == report["rows"] - before
        assert world.step("bootstrap_drain", table, "again")[1] == ExitCode.OK
    assert len(numbers) > 10
    assert 2_000 <= report["rows"] < 2_000 + len(numbers)
    messages = FileStream(world.store, report["stream"]["topic"]).read(report["stream"]["folder"])
    assert len(list(messages)) == report["messages_published"]


def test_cancelling_clears_the_snapshot(world: World, troubled: str) -> None:
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "read": "in_place"})
    prepare(world.conf, troubled, "cancelled")
    world.step("sstable_snapshot", troubled, "cancelled")
    assert (len(world.snapshots()), len(world.copies())) == (1, 3)  # when it was begun, the manifest, the outlines
    world.cancel(troubled)
    assert world.snapshots() == world.copies() == []


def test_a_snapshot_that_is_copied_stops_when_it_is_cancelled(
    world: World, troubled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sstable_snapshot, "PIECE_BYTES", 1000)
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "megabytes_per_s": 0.0005})  # for a minute
    bootstrap = prepare(world.conf, troubled, "stopped")
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(world.step, "sstable_snapshot", troubled, "stopped")
        deadline = time.monotonic() + 60
        while len(world.copies()) < 3:
            assert not copying.done(), copying.result()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert world.store.list("status/bootstrap/") != []
        world.cancel(troubled)
        cancelled_s = time.monotonic()
        with pytest.raises(StepError, match=rf"bootstrap {bootstrap} of {troubled} was cancelled: trigger .* removed"):
            copying.result(timeout=60)
    assert time.monotonic() - cancelled_s < 15
    assert world.snapshots() == world.copies() == []
    assert world.store.list("status/bootstrap/") == []
    assert world.state.alive(bootstrap) is None


@pytest.mark.parametrize("read", ["upload", "in_place"])
def test_a_snapshot_that_was_just_taken_when_it_is_cancelled_is_removed(
    world: World, troubled: str, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest comes right after the one that cancels has removed all that it has found."""
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "read": read})
    prepare(world.conf, troubled, f"late-{read}")
    put_manifest = sstable_snapshot.put_manifest

    def put_late(*arguments: Any) -> None:
        world.cancel(troubled)
        put_manifest(*arguments)

    monkeypatch.setattr(sstable_snapshot, "put_manifest", put_late)
    with pytest.raises(StepError, match=rf"of {troubled} was cancelled: trigger .* removed"):
        world.step("sstable_snapshot", troubled, f"late-{read}")
    assert world.snapshots() == world.copies() == []


def test_a_snapshot_that_was_left_is_cleared_by_the_next_run(world: World, troubled: str) -> None:
    """A bootstrap that another has replaced, and one on which nobody has worked for long."""
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "read": "in_place"})
    prepare(world.conf, troubled, "left")
    world.step("sstable_snapshot", troubled, "left")
    (old,) = world.snapshots()
    prepare(world.conf, troubled, "instead", restart=True)
    world.step("sstable_snapshot", troubled, "instead")
    (new,) = world.snapshots()
    assert new != old
    config = load_config(world.conf)
    assert clear_old(config, world.store, world.state, queue="default") == 0
    change_conf(world.conf, sstable={"max_age_h": 1e-6})
    assert clear_old(load_config(world.conf), world.store, world.state, queue="other") == 0
    assert world.snapshots() == [new]
    ClearsAside(load_config(world.conf), world.store, "default").clear()  # as commitlog_archive does
    deadline = time.monotonic() + 15
    while world.snapshots():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert world.copies() == []
    with pytest.raises(StepError, match=r"has no snapshots|no snapshot was taken yet"):
        world.step("bootstrap_scan", troubled, "instead")
    world.cancel(troubled)


def test_a_node_without_a_snapshot_is_named(world: World, troubled: str) -> None:
    prepare(world.conf, troubled, "lacking")
    with pytest.raises(StepError, match="has no snapshots: run sstable_snapshot first"):
        world.step("bootstrap_scan", troubled, "lacking")
    world.step("sstable_snapshot", troubled, "lacking", queue="another")
    with pytest.raises(StepError, match=r"too few replicas .* node 127\.0\.0\.1:\d+ .*no snapshot was taken yet"):
        world.step("bootstrap_scan", troubled, "lacking")
    change_conf(world.conf, sstable={"nodetool": ["false"]})
    with pytest.raises(StepError, match=r"node 127\.0\.0\.1:\d+: false info failed with 1"):
        world.step("sstable_snapshot", troubled, "lacking")
    with pytest.raises(StepError, match=r"false info failed with 1"):
        world.step("bootstrap_scan", troubled, "lacking")
    change_conf(world.conf, sstable={"nodetool": ["true"]})
    with pytest.raises(StepError, match=r"true info prints no ID"):
        world.step("sstable_snapshot", troubled, "lacking")
    change_conf(world.conf, sstable={"free_space_factor": 1e15})
    with pytest.raises(StepError, match=r"make room, or set sstable.free_space_factor"):
        world.step("sstable_snapshot", troubled, "lacking")
    change_conf(world.conf, sstable={"free_space_factor": 1.0, "nodetool": nodetool_of(world.node)})
    assert world.step("sstable_snapshot", troubled, "lacking")[1] == ExitCode.OK
    assert world.step("bootstrap_scan", troubled, "lacking")[1] == ExitCode.OK
    assert world.step("bootstrap_drain", troubled, "lacking")[1] == ExitCode.OK


@pytest.mark.parametrize("lost", ["manifest", "statistics", "schema", "file that the scan needs"])
def test_an_incomplete_snapshot_is_taken_again(world: World, troubled: str, lost: str) -> None:
    change_conf(world.conf, sstable={"nodetool": nodetool_of(world.node), "read": "in_place"})
    prepare(world.conf, troubled, f"incomplete-{lost[:4]}")
    world.step("sstable_snapshot", troubled, f"incomplete-{lost[:4]}")
    (folder,) = world.snapshots()
    names = {file.name for file in folder.iterdir()}
    if lost == "file that the scan needs":  # somebody has removed it since
        min(folder.glob("*-Data.db")).unlink()
    else:  # the step was killed before it put its manifest
        for stat in world.store.list(FOLDER):
            if not stat.key.endswith(("/bootstrap.json", "/begun.json")):
                world.store.delete(stat.key)
        pattern = {"manifest": "manifest.json", "schema": "schema.cql", "statistics": "*-Statistics.db"}[lost]
        min(folder.glob(pattern)).unlink()
    world.step("sstable_snapshot", troubled, f"incomplete-{lost[:4]}")
    assert {file.name for file in folder.iterdir()} == names
    report, code = world.step("bootstrap_scan", troubled, f"incomplete-{lost[:4]}")
    assert code == ExitCode.OK
    assert world.step("bootstrap_drain", troubled, f"incomplete-{lost[:4]}")[1] == ExitCode.OK
    assert world.judge(troubled, report) > 200


def test_pieces_of_a_copy_that_are_gone_are_copied_again(world: World, troubled: str) -> None:
    prepare(world.conf, troubled, "pieces")
    world.step("sstable_snapshot", troubled, "pieces")
    key = next(key for key in world.copies() if "-Data.db/" in key)
    world.store.delete(key)
    world.step("sstable_snapshot", troubled, "pieces")
    assert key in world.copies()
    report, code = world.step("bootstrap_scan", troubled, "pieces")
    assert code == ExitCode.OK
    assert world.step("bootstrap_drain", troubled, "pieces")[1] == ExitCode.OK
    assert world.judge(troubled, report) > 200


def test_copies_for_which_there_is_no_room_are_refused(
    world: World, troubled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(world.conf, troubled, "room")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**40 if _is_node(_, world) else 1000))
        with pytest.raises(StepError, match=r"GiB are needed for copies of SSTables of node .* make room"):
            world.step("sstable_snapshot", troubled, "room")
    assert world.snapshots() == []  # a snapshot that is not copied only costs space
    world.step("sstable_snapshot", troubled, "room")
    world.cancel(troubled)


def _is_node(path: Path, world: World) -> bool:
    return Path(path).is_relative_to(world.node.folder)


def test_damage_costs_the_snapshot_of_its_node_and_the_rest_is_kept(world: World, troubled: str) -> None:
    bootstrap = prepare(world.conf, troubled, "damaged", splits=8)
    world.step("sstable_snapshot", troubled, "damaged")
    key = max((stat for stat in world.store.list(COPIES) if "-Data.db/" in stat.key), key=lambda stat: stat.size).key
    whole = world.store.get(key)
    middle = len(whole) // 2
    world.store.put(key, whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    file = key.rpartition("/")[0]
    with pytest.raises(StepError, match=rf"too few replicas .*{file}.* \(uncompressed\) cannot be read.*run the boot"):
        world.step("bootstrap_scan", troubled, "damaged")
    assert prepare(world.conf, troubled, "mended") == bootstrap
    committed = committed_rows(world.conf, bootstrap)
    world.step("sstable_snapshot", troubled, "mended")  # copies what was damaged, and nothing else
    assert world.store.get(key) == whole
    report, code = world.step("bootstrap_scan", troubled, "mended")
    assert (code, report["rows_of_runs_before"]) == (ExitCode.OK, committed)
    assert world.step("bootstrap_drain", troubled, "mended")[1] == ExitCode.OK
    assert world.judge(troubled, report) > 200
