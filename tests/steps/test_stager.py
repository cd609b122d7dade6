"""A table that the schema lacks is waited for before it is taken for dropped: maybe a node does not know of it yet."""

from __future__ import annotations

import lzma
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from cassandra.cluster import NoHostAvailable

from ringsync.changes.columns import logged_tables
from ringsync.cluster.schema import SYSTEM_KEYSPACES
from ringsync.config.sections import Store
from ringsync.formats.commitlog.reader import read_log
from ringsync.formats.commitlog.segment import Wanted
from ringsync.ledger.staging import Bucket, encode_rows
from ringsync.ledger.table_versions import CdcBegun, version_of
from ringsync.ring.ring import Host, Replication
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, TableSchema, UnreadableTable
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.state.session import RETRY_DELAYS_S, StateError
from ringsync.status import STALE_AFTER_S
from ringsync.steps import absent_tables
from ringsync.steps.application import ExitCode
from ringsync.steps.stage import commitlog_stage, schemas, stage_task
from ringsync.steps.stage.commitlog_stage import Stager
from ringsync.steps.stage.node_log import PATIENCE_MS, NodeLog
from ringsync.steps.stage.stage_task import Staged, StageTask, StageWork, stage
from ringsync.steps.stage.staged_files import StagedTable, Windows
from ringsync.steps.sync_plan import FormerHost, SyncPlan, SyncTable, interval_at
from ringsync.storage.local import LocalStore
from tests.commitlogs.fixtures import DATA
from tests.steps.node_logs import finished

UNREAD: Any = None
"""The configuration: nothing here reads it."""

FOLDER = DATA / "5.0-v7-plain"
TABLES = tuple(parse_schema((FOLDER / "schema.cql").read_text(), "schema.cql").by_id().values())
HOST = Host("a", "127.0.0.1", 9042, "dc", "r1", (0,))
WELL = Host("b", "127.0.0.2", 9042, "dc", "r1", (100,))
NOW_S = 1_790_000_000.0


class OneByOne:
    """Spark's context, whose tasks are done here and now."""

    defaultParallelism = 1

    def parallelize(self, items: Iterable[Any], pieces: int) -> OneByOne:
        self.items = items
        return self

    def mapPartitions(self, task: Callable[[Iterator[Any]], Iterable[Any]]) -> OneByOne:
        self.found = task(iter(self.items))
        return self

    def collect(self) -> list[Any]:
        return list(self.found)


class Cluster:
    """What nodes say of the schema: the one that is asked may be behind.

    :ivar known: tables of the schema as it is read
    :ivar there: tables that there are
    :ivar others: schema version of another node, which is ``up`` or not
    :ivar without_cdc: tables that have no cdc
    :ivar altered_s: when all tables were altered last
    :ivar can_be_asked: whether the nodes of the queue can be asked themselves
    """

    def __init__(self, known: tuple[TableSchema, ...], there: tuple[TableSchema, ...]) -> None:
        self.known, self.there, self.version, self.others = known, there, 1, 1
        self.up = self.can_be_asked = True
        self.without_cdc: tuple[TableSchema, ...] = ()
        self.altered_s = NOW_S - 1
        hosts = [SimpleNamespace(host_id=host, is_up=self.up, address="", broadcast_address="") for host in ("a", "b")]
        other = SimpleNamespace(host_id="c", is_up=True, address="10.0.0.9", broadcast_address="10.0.0.9")
        self.other = other
        self.cluster = SimpleNamespace(metadata=SimpleNamespace(all_hosts=lambda: [*hosts, other]))

    def get_pool_state(self) -> dict[Any, Any]:
        return {}

    def execute(self, query: str, parameters: Any = None, host: Any = None) -> Any:
        if host is not None and not self.can_be_asked:
            raise NoHostAvailable("not connected", {})
        if "system.local" in query:
            local = SimpleNamespace(schema_version=self.version, broadcast_address="10.0.0.1")
            return SimpleNamespace(one=lambda: local)
        if "system.peers" in query:
            self.other.is_up = self.up
            return [SimpleNamespace(schema_version=self.others, peer="10.0.0.9")]
        if "views" in query or "gossip" in query:
            return []
        written = int(self.altered_s * 1e6)
        return [
            SimpleNamespace(id=UUID(table.table_id), cdc=table not in self.without_cdc, altered_us=written)
            for table in self.there
        ]

    def alter(self, moment_s: float, without_cdc: tuple[TableSchema, ...]) -> None:
        self.without_cdc, self.altered_s = without_cdc, moment_s
        self.version = self.others = self.version + 1


class Sync:
    """A stager of one node, whose log is one real segment; time passes when it is told to."""

    def __init__(self, folder: Path, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.now_s = NOW_S
        self.store = LocalStore(folder / "lake")
        raw = folder / "cdc_raw"
        raw.mkdir(parents=True)
        source = next(iter(sorted(FOLDER.glob("*.log.xz"))))
        self.segment = raw / source.name.removesuffix(".xz")
        self.segment.write_bytes(lzma.decompress(source.read_bytes()))
        index, synced = self.segment.name.replace(".log", "_cdc.idx"), finished(self.segment.read_bytes())
        self.segment.with_name(index).write_text(synced)
        # The segment that the node writes to: nothing of it is synced.
        (raw / "CommitLog-7-1999999999999.log").write_bytes(b"")
        sync = SimpleNamespace(
            **{"cdc_raw": str(raw), "keystore": None, "queue_of": lambda address, host: "default"},
            **{"bucket_by_of": lambda name: "arrival", "follows": lambda name: True},
        )
        config = SimpleNamespace(
            sync=sync,
            archive=SimpleNamespace(policy="pressure"),
            commitlog_processor_window_interval_ms=60_000,
            store=Store(url=self.store.url),
        )
        versions = [version_of(self.store, table) for table in TABLES]
        followed = tuple(SyncTable(version, "t", True) for version in versions)
        for version in versions:
            CdcBegun(self.store).begins(version.table_id, int(NOW_S * 1000) - 1000)
        rings = {table.keyspace: Replication("SimpleStrategy", (("", 2),)) for table in TABLES}
        self.hosts: tuple[Host, ...] = (HOST,)
        self.former: tuple[FormerHost, ...] = ()

        def plan_of(store: Any, config: Any, session: Any, interval: Any, before: Any) -> SyncPlan:
            return SyncPlan(interval, self.hosts, rings, followed, former=self.former)

        patch.setattr(commitlog_stage, "plan_of", plan_of)
        patch.setattr(commitlog_stage, "read_settings", lambda *_: {"cdc_enabled": "true"})
        self.unreadable: tuple[UnreadableTable, ...] = ()
        patch.setattr(schemas, "read_tables", lambda session: Schema(cluster.known, self.unreadable))
        clock = SimpleNamespace(time=lambda: self.now_s, monotonic=lambda: self.now_s)
        patch.setattr(commitlog_stage, "time", clock)
        patch.setattr(absent_tables, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        options = SimpleNamespace(queue="default")
        application: Any = SimpleNamespace(config=config, store=self.store, options=options)
        self.errors = 0
        self.stager = Stager(application, cluster, OneByOne(), lambda errors, node: self.count(errors, node))

    def count(self, errors: Any, node: str) -> int:
        """Where records that cannot be decoded are kept."""
        self.errors += errors.num_rows
        return 0

    def never_followed(self, table: TableSchema) -> None:
        """Have a table be one that was recorded, and not followed."""
        self.store.delete(f"cdc_begun/{table.table_id}.json")

    def cycle_once(self, seconds: float = 1) -> None:
        self.now_s += seconds
        self.stager.cycle()

    def cycle(self, seconds: float = 1) -> NodeLog:
        self.cycle_once(seconds)
        return self.stager._logs[HOST.id]

    def answer(self, patch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
        """Have each node say where its log is."""
        self.stager._config.sync.cdc_raw = None
        told = {host: {"cdc_enabled": "true", "cdc_raw_directory": str(folder)} for host, folder in folders.items()}
        patch.setattr(commitlog_stage, "read_settings", lambda _, host, __: told[host])

    def add_well(self, patch: pytest.MonkeyPatch) -> Path:
        """Have another node in the queue, whose log is the same; where its segment is."""
        well = self.segment.parent.with_name("cdc_raw_well")
        shutil.copytree(self.segment.parent, well)
        folders = {HOST.id: self.segment.parent, WELL.id: well}
        self.hosts = (HOST, WELL)
        self.answer(patch, folders)
        return well / self.segment.name

    def add_bad(self, patch: pytest.MonkeyPatch, bad: int) -> dict[str, Path]:
        """Have ``bad`` nodes, and last the node ``well``, whose logs are the same; where they are, by node."""
        raw, folders = self.segment.parent, {}
        for number in range(bad + 1):
            host = replace(HOST, id=f"bad-{number}" if number else "well", address=f"127.0.0.{number + 1}")
            folders[host.id] = shutil.copytree(raw, raw.with_name(f"cdc_raw_{number}"))
            self.hosts = (host, *self.hosts) if number else (host,)
        self.answer(patch, folders)
        return folders

    def add_errors(self, patch: pytest.MonkeyPatch, damage: Callable[[str], str] = lambda node: "") -> None:
        """Have a record that cannot be decoded in every segment.

        :param damage: what cannot be read of the segment of a node; empty: nothing
        """
        row = {"position": 1, "length": 1, "reason": "x", "file": "f"}
        errors, stage_all = encode_rows(pa.RecordBatch.from_pylist([row], stage_task.ERROR_ROWS)), self.stager._stage

        def staged(*given: Any) -> list[Staged]:
            found = stage_all(*given)
            return [replace(one, errors=errors, error_count=1, damage=damage(one.work.node)) for one in found]

        patch.setattr(self.stager, "_stage", staged)

    def told(self, host: Host = HOST) -> list[str]:
        """What ``cdcservice status`` says is wrong with a node."""
        of_loop = {"commitlog_stage/default": {"at_ms": int(self.now_s * 1000), "nodes": self.stager.status()}}
        found = problems(of_loop, {}, Expected.of_commit_logs(["default"]), False, self.now_s)
        return [one.text for one in found if f"node {host.endpoint}:" in one.text]


def written() -> TableSchema:
    """The table of which the segment has most rows."""
    path = next(iter(sorted(FOLDER.glob("*.log.xz"))))
    found = read_log(lzma.decompress(path.read_bytes()), path.name.removesuffix(".xz"), logged_tables(TABLES))
    rows = Counter(table_id.hex() for batch in found.batches for table_id in batch.rows["table_id"].to_pylist())
    of_ours = [table for table in TABLES if table.keyspace not in SYSTEM_KEYSPACES]
    return max(of_ours, key=lambda table: rows[table.table_id])


def without(table: TableSchema) -> tuple[TableSchema, ...]:
    return tuple(one for one in TABLES if one is not table)


def test_a_table_that_a_node_does_not_know_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for dropped: its rows were counted, and their segment was removed."""
    cluster = Cluster(without(written()), TABLES)
    cluster.others = 2  # nodes differ: what was read is not taken for the last word
    sync = Sync(tmp_path, cluster, monkeypatch)
    sync.never_followed(written())
    for _ in range(3):
        log = sync.cycle()
    assert sync.segment.exists()
    assert (log.number, sync.errors) == (0, 0)
    assert "the schema does not have the table of a record" in log.status()["error"]
    cluster.known, cluster.version = TABLES, 2
    log = sync.cycle(10)
    assert (log.counts["of_dropped_tables"], sync.errors, log.status()["error"]) == (0, 0, None)
    assert log.counts["rows"] == log.counts["staged"] + log.counts["repeated"] + log.counts["not_cdc"] > 0
    assert not sync.segment.exists()


def test_rows_of_a_followed_table_that_was_dropped_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables of a log waited for a minute after each DROP TABLE; with a DROP every minute, for ever."""
    everything = Sync(tmp_path / "all", Cluster(TABLES, TABLES), monkeypatch).cycle().counts
    log = (sync := Sync(tmp_path / "dropped", Cluster(without(written()), without(written())), monkeypatch)).cycle()
    assert (log.number, sync.errors, log.status()["error"]) == (1, 0, None)
    assert log.counts == everything
    assert not sync.segment.exists()


def test_a_dropped_table_whose_version_is_damaged_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node waits until the version is mended. All others stopped, too."""
    sync = Sync(tmp_path, Cluster(without(written()), without(written())), monkeypatch)
    key = f"schemas/{written().full_name}/000001.json"
    whole = sync.store.get(key)
    sync.store.put(key, whole[:-9])
    for seconds in (1, PATIENCE_MS / 1000, 10):
        log = sync.cycle(seconds)
        assert (log.number, sync.errors, sync.segment.exists()) == (0, 0, True)
    assert written().table_id in capsys.readouterr().out
    sync.store.put(key, whole)
    assert sync.cycle(120).counts["staged"] > 0
    assert sync.errors == 0


def test_a_table_that_was_dropped_is_counted_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Sync(tmp_path, Cluster(without(written()), without(written())), monkeypatch)
    sync.never_followed(written())
    log = sync.cycle()
    assert log.number == 0
    log = sync.cycle(PATIENCE_MS / 1000)
    assert log.counts["of_dropped_tables"] > 0
    assert log.counts["staged"] > 0
    assert sync.errors == 0
    assert not sync.segment.exists()


def test_two_readings_that_follow_each_other_do_not_tell_that_a_table_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cycle took more than a minute: so long ago its question was asked, and not its answer read."""
    sync = Sync(tmp_path, Cluster(without(written()), without(written())), monkeypatch)
    sync.never_followed(written())
    real = sync.stager._stage

    def slow(*arguments: Any) -> Any:
        sync.now_s += 70
        return real(*arguments)

    monkeypatch.setattr(sync.stager, "_stage", slow)
    sync.cycle()
    monkeypatch.setattr(sync.stager, "_stage", real)
    log = sync.cycle()
    assert (log.number, sync.segment.exists()) == (0, True)
    assert sync.cycle(PATIENCE_MS / 1000).counts["of_dropped_tables"] > 0


def test_who_stages_the_same_again_replaces_no_file_of_who_did_so_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have committed meanwhile, and somebody may read its late rows."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    wanted = Wanted(until=None)
    work = StageWork("a", str(sync.segment), wanted, 1)
    in_time, late = Windows(interval_at(int(NOW_S * 1000), 60_000), 0), Windows(Bucket(0, 60_000), 2**62)
    for windows in (in_time, late):
        kept = tuple(StagedTable(version_of(sync.store, table), False, None) for table in TABLES)
        task = StageTask(UNREAD, TABLES, kept, windows)
        first, second = (stage(work, task, sync.store, None) for _ in range(2))
        assert first.counts["staged" if windows is in_time else "late"] > 0
        assert not set(first.files) & set(second.files)
        assert all(sync.store.stat(key) for key in (*first.files, *second.files))


def break_commit(sync: Sync, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    key = "staging/log/a/000000000007.json"
    sync.store.put(key, b'{"node": "a", "num')
    return lambda: sync.store.delete(key)


def break_errors(sync: Sync, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A record cannot be decoded, and ``cdc.processor_error`` has no quorum for the node."""
    broken, count = [True], sync.count

    def put(errors: Any, node: str) -> None:
        if broken and node == HOST.id:
            raise RuntimeError("cannot achieve consistency level QUORUM")
        return count(errors, node)

    sync.add_errors(patch)
    patch.setattr(sync, "count", put)
    return broken.clear


def break_counts(sync: Sync, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    broken, stage_all = [True], sync.stager._stage

    def staged(*given: Any) -> list[Any]:
        found = stage_all(*given)
        wrong = [one for one in found if broken and one.work.node == HOST.id]
        return [replace(one, counts={**one.counts, "rows": 10**6}) if one in wrong else one for one in found]

    patch.setattr(sync.stager, "_stage", staged)
    return broken.clear


def break_decoding(sync: Sync, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nobody has foreseen it."""
    broken, read = [True], stage_task.read_log
    folder = str(sync.segment.parent) + "/"

    def failing(work: StageWork, *given: Any) -> Any:
        patch.setattr(stage_task, "read_log", fail if broken and work.file.startswith(folder) else read)
        return stage(work, *given)

    def fail(*_: Any, **__: Any) -> Any:
        raise IndexError("out of bounds")

    patch.setattr(stage_task, "stage", failing)
    return broken.clear


@pytest.mark.parametrize(
    ("break_", "named"),
    [
        (break_commit, "staging/log/a/000000000007.json"),
        (break_errors, "cannot achieve consistency level QUORUM"),
        (break_counts, "1000000 rows decoded"),
        (break_decoding, "out of bounds"),
    ],
)
def test_what_is_wrong_with_a_node_is_its_own_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_: Callable[..., Callable[[], None]], named: str
) -> None:
    """Every node of the queue waited for it, and after some cycles the loop ended."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    well = sync.add_well(monkeypatch)
    mend = break_(sync, monkeypatch)
    cycles, tried = 40, []
    stage_all = sync.stager._stage
    monkeypatch.setattr(sync.stager, "_stage", lambda *given: tried.append(given) or stage_all(*given))
    for _ in range(cycles):
        log = sync.cycle()
    assert (well.exists(), sync.segment.exists()) == (False, True)
    assert not sync.told(WELL)
    assert named in sync.told()[0]
    assert len(tried) < cycles / 4, "it backs off"
    assert log.number == 0
    assert {key for stat in sync.store.list("staging/rows/a/") if (key := stat.key)} == set()
    mend()
    sync.cycle(60)
    log = sync.cycle()
    assert (sync.told(), sync.segment.exists()) == ([], False)
    assert log.counts["rows"] == log.counts["staged"] + log.counts["repeated"] + log.counts["not_cdc"] > 0


def test_a_worker_that_may_not_delete_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first segment that it could not remove was the last that it read."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    well = sync.add_well(monkeypatch)
    unlink, refused = Path.unlink, [True]

    def denied(path: Path, missing_ok: bool = False) -> None:
        if refused and path.parent == sync.segment.parent:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", denied)
    sync.cycle()
    another = sync.segment.with_name(sync.segment.name.replace(".log", "9.log"))
    another.write_bytes(sync.segment.read_bytes())
    (index := another.with_name(another.name.replace(".log", "_cdc.idx"))).write_text(finished(another.read_bytes()))
    for _ in range(3):
        log = sync.cycle()
    assert (log.number, len(log.finished)) == (2, 2), "what can be read is read"
    assert (log.status()["is_read"], log.clear_at_ms) == (True, int(sync.now_s * 1000))
    (told,) = sync.told()
    assert "cannot be deleted" in told
    assert str(sync.segment) in told
    assert (well.exists(), sync.told(WELL)) == (False, [])
    refused.clear()
    sync.cycle()
    assert sync.told() == []
    assert not sync.segment.exists()
    assert not another.exists()
    assert not index.exists()


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_nodes_whose_tries_take_long_do_not_starve_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Each had half a minute of every cycle: the pauses of whoever waits for a quorum of ``processor_error``."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    folders = sync.add_bad(monkeypatch, bad)
    sync.add_errors(monkeypatch)
    tried: list[str] = []

    def put(errors: Any, node: str) -> None:
        if node != "well":
            tried.append(node)
            sync.now_s += sum(RETRY_DELAYS_S)
            raise StateError("keyspace cdc could not be used in 9 attempts")

    monkeypatch.setattr(sync.stager, "_put_errors", put)
    sync.cycle_once()  # Nobody knows yet who fails.
    assert set(tried) == set(folders) - {"well"}
    lengths, begun = [], sync.now_s
    while sync.now_s < begun + 600:
        before_s = sync.now_s
        sync.cycle_once(0)
        lengths.append(sync.now_s - before_s)
        sync.now_s = max(sync.now_s, before_s + 1)
    assert max(lengths) < STALE_AFTER_S, "one at a time"
    assert sum(lengths) < 0.55 * 600
    assert len(set(tried[-bad:])) == bad, "in turns"
    log = sync.stager._logs["well"]
    assert (log.number, log.status()["error"]) == (1, None)


def test_a_run_whose_last_cycle_failed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with exit code 0 where each of its cycles had failed."""
    sync = Sync(tmp_path, Cluster(TABLES, TABLES), monkeypatch)
    options = SimpleNamespace(queue="default")
    config = SimpleNamespace(
        sync=SimpleNamespace(stage_cores=1, run_s=0.0, poll_interval_ms=0, max_errors_per_hour=1),
        state=SimpleNamespace(keyspace="cdc"),
    )
    application: Any = SimpleNamespace(config=config, store=sync.store, options=options, run="r", outdated=lambda: bool)
    of_java = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    spark = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=of_java))
    monkeypatch.setattr("ringsync.replica.session.spark_session", lambda *_, **__: spark)
    for name in ("start_workers", "cluster_settings", "connect_patiently", "create_state", "ErrorTable"):
        monkeypatch.setattr(commitlog_stage, name, lambda *_: SimpleNamespace(put=None))
    monkeypatch.setattr(commitlog_stage, "Stager", lambda *_: sync.stager)
    assert not commitlog_stage.run(application)[1]
    monkeypatch.setattr(sync.stager, "cycle", lambda: sync.store.get("nothing"))
    report, code = commitlog_stage.run(application)
    assert (code, "nothing" in report["error"]) == (ExitCode.COMPLETED_WITH_ERRORS, True)
