"""The oracle of the sync while tables are altered, dropped and created every two seconds, with Kafka and a registry.

Loops run in their default mode, replicas are merged and read meanwhile."""

from __future__ import annotations

import calendar
import json
import runpy
import statistics
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import pytest
import requests
from cassandra import ConsistencyLevel
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import AnalysisException

from ringsync.avro.mapping import without_logical_types
from ringsync.cluster.schema import read_table
from ringsync.ledger.table_versions import as_recorded
from ringsync.replica.errors import SchemaChangedError
from ringsync.replica.folders import base_folder, changes_folder, replica_folder
from ringsync.replica.view import register_live_view
from ringsync.schema.table import TableSchema
from ringsync.steps.application import ExitCode
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from servers.cluster import connected, three_nodes
from servers.kafka import BrokerSettings, KafkaBroker
from servers.registry import RegistryServer
from tests.chaos.applications import PROJECT
from tests.kafka_reading import Record, confluent_avro, kafka_messages, read_topic
from tests.ledger.histories import history_of
from tests.newest_model import NewestModel, newest_differences
from tests.oracle import differences, source_rows, synced_rows
from tests.stream_model import Message, StreamModel, of_the_last_table
from tests.sync import evolving
from tests.sync.evolving import ALTERED, BOOTSTRAPPED, CUT, STEADY, TRANSIENT, Evolving, in_background
from tests.sync.judge import stream_messages
from tests.sync.pipeline import LOOPS, Pipeline, pipeline, wait_until_drained, write_conf
from tests.sync.readers import Schemas, as_read, read, without_dropped_values
from tests.sync.scenario import bootstrap

pytestmark = [pytest.mark.chaos, pytest.mark.server, pytest.mark.spark]

ROUNDS = 4
RATE = 8.0
QUIET_S = 30.0
"""The steady table's lag is measured so long before the first change."""
DRAINED_S = 600


@dataclass(frozen=True)
class Run:
    """What was written, once all is quiet.

    :ivar session: reads at ALL
    :ivar altered_ms: when the schema changes began and ended
    """

    conf: Path
    session: Any
    store: ObjectStore
    broker: KafkaBroker
    registry: RegistryServer
    tables: Evolving
    altered_ms: tuple[float, float]

    def table(self, name: str) -> TableSchema:
        return as_recorded(self.store, read_table(self.session, *name.split(".")))

    def stream(self, name: str) -> FileStream:
        return FileStream(self.store, data_topic("test", self.table(name)))

    def dropped_us(self, name: str) -> dict[str, int]:
        """When columns were dropped that may be there again."""
        keyspace, table = name.split(".")
        rows = self.session.execute(
            f"SELECT column_name, dropped_time FROM system_schema.dropped_columns "
            f"WHERE keyspace_name = '{keyspace}' AND table_name = '{table}'"
        )
        return {
            row.column_name: calendar.timegm(row.dropped_time.timetuple()) * 1_000_000 + row.dropped_time.microsecond
            for row in rows
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path, spark: Any) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("changes")
    with ExitStack() as servers:
        nodes = servers.enter_context(three_nodes(folder / "nodes", cache, 101))
        broker = servers.enter_context(KafkaBroker(folder / "kafka", BrokerSettings().on_free_ports(), cache))
        registry = servers.enter_context(RegistryServer(folder / "registry", cache))
        conf = write_conf(
            folder,
            nodes,
            sync={"tables": evolving.MODES},
            kafka={"bootstrap_servers": [broker.bootstrap], "schema_registry_url": registry.url},
        )
        writing = servers.enter_context(connected(nodes, ConsistencyLevel.QUORUM))
        session = servers.enter_context(connected(nodes, ConsistencyLevel.ALL))
        tables, running = Evolving(writing), servers.enter_context(pipeline(conf, folder, cache))
        tables.create()
        altered_ms = altered_under_way(running, tables, partial(readers, spark, session, running.store))
        print(*tables.done, sep="\n")
        # A merge is due whenever a rename waits for it.
        wait_until_drained(running.store, DRAINED_S, lambda: (running.check(), merge(conf, *ALTERED)))
        print(f"{len(tables.done)} schema changes, {tables.written} writes, {tables.refused} refused")
        yield Run(conf, session, running.store, broker, registry, tables, altered_ms)


def altered_under_way(running: Pipeline, tables: Evolving, reading: Any) -> tuple[float, float]:
    """Write, copy, be quiet, then alter; everything else goes on meanwhile."""
    ended = threading.Event()
    for name in (*LOOPS, "schema_update"):
        running.start(name)
    with in_background(lambda: tables.write_on(ended, RATE)):
        try:
            for table in BOOTSTRAPPED:
                bootstrap(running.conf, table, table)
            time.sleep(QUIET_S)
            began = time.time()
            with in_background(lambda: tables.alter_on(ROUNDS)) as (altering,):
                while altering.is_alive():
                    running.check()
                    merge(running.conf, *ALTERED)
                    reading()
            time.sleep(10)
        finally:
            ended.set()
    return began * 1000, time.time() * 1000


def merge(conf: Path, *tables: str) -> None:
    """Merge replicas now. One that is just being altered may refuse; the next run has it."""
    for table in tables:
        code = application("replica_merge", conf, table)
        if code != ExitCode.OK:
            print(f"{table} is not merged: {code}", flush=True)


def application(name: str, conf: Path, table: str, *options: str) -> int:
    """Run an application in this process."""
    found = runpy.run_path(str(PROJECT / "spark_apps" / f"{name}.py"))
    return int(found["main"](["--conf", str(conf), "--table", table, "--run", f"{name}-{time.time_ns()}", *options]))


def readers(spark: Any, session: Any, store: ObjectStore) -> None:
    """Whoever reads a replica in between sees rows, by another engine and by the view."""
    for name in ALTERED:
        for folder in (base_folder, changes_folder):
            uri = store.uri(folder(*name.split(".")))
            if DeltaTable.is_deltatable(uri):
                QueryBuilder().register("images", DeltaTable(uri)).execute("SELECT * FROM images").read_all()
        table = as_recorded(store, read_table(session, *name.split(".")))
        if (rows := rows_of_view(spark, store, table)) is not None:
            assert rows > 5


def rows_of_view(spark: Any, store: ObjectStore, table: TableSchema) -> int | None:
    """The rows that the view shows; None: the table was altered since, and whoever reads is told so."""
    try:
        register_live_view(spark, store.uri(replica_folder(table.keyspace, table.name)), table, "evolving_rows")
        return int(spark.sql("SELECT count(*) FROM evolving_rows").collect()[0][0])
    except SchemaChangedError as error:
        print(f"not shown: {error}")
    except AnalysisException as error:
        if error.getErrorClass() != "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS":
            raise
    return None


def resolved(run: Run, name: str) -> list[Message]:
    """A table's messages as a consumer reads them who knows the last version only."""
    stream, table, dropped = run.stream(name), run.table(name), run.dropped_us(name)
    own = of_the_last_table(stream_messages(run.store, table))
    last = max(message["value"]["source"]["schema_version"] for message in own)
    return [without_dropped_values(one, table, dropped) for one in as_read(stream, own, Schemas.of(stream, last))]


@pytest.mark.parametrize("name", [*ALTERED, STEADY, TRANSIENT])
def test_the_stream_is_what_the_nodes_hold(run: Run, name: str) -> None:
    table, now, messages = run.table(name), int(time.time()), resolved(run, name)
    source = source_rows(run.session, table, now)
    wrong = differences(source, StreamModel(table, complete=True).apply_all(messages).rows(now))
    wrong += newest_differences(source, NewestModel(table).apply_all(messages).rows(now))
    assert not wrong, (len(wrong), wrong[:8])
    assert len(source) > 5


@pytest.mark.parametrize("name", ALTERED)
def test_the_replica_is_what_the_nodes_hold(run: Run, name: str) -> None:
    table, now = run.table(name), int(time.time())
    uris = [run.store.uri(folder(table.keyspace, table.name)) for folder in (base_folder, changes_folder)]
    wrong = differences(source_rows(run.session, table, now), synced_rows(*uris, table, now))
    assert not wrong, (len(wrong), wrong[:8])
    assert application("replica_verify", run.conf, name) == ExitCode.OK


def test_what_was_truncated_is_found_by_verify(run: Run) -> None:
    """No log has a TRUNCATE. What was written after it is in the stream as ever."""
    table, now = run.table(CUT), int(time.time())
    source = source_rows(run.session, table, now)
    newest = NewestModel(table).apply_all(resolved(run, CUT)).rows(now)
    assert not newest_differences(source, {key: row for key, row in newest.items() if key in source})
    assert application("replica_verify", run.conf, CUT, "--repair") == ExitCode.OK
    uris = [run.store.uri(folder(table.keyspace, table.name)) for folder in (base_folder, changes_folder)]
    assert not differences(source, synced_rows(*uris, table, now))


@pytest.mark.parametrize("name", [*ALTERED, TRANSIENT])
def test_each_message_is_read_with_the_first_schema_and_with_the_last(run: Run, name: str) -> None:
    stream = run.stream(name)
    messages = stream_messages(run.store, run.table(name))
    versions = {message["value"]["source"]["schema_version"] for message in messages}
    for version in (min(versions), max(versions)):
        for own, seen in zip(messages, as_read(stream, messages, Schemas.of(stream, version)), strict=True):
            assert seen["key"]["id"] == own["key"]["id"]
            assert seen["value"]["source"] == own["value"]["source"]
    if name in ALTERED:
        assert len(versions) > 2 * ROUNDS
        assert max(versions) == len(history_of(run.store, *name.split(".")))


@pytest.mark.parametrize("name", [*ALTERED, STEADY, TRANSIENT])
def test_kafka_has_the_same_and_the_registry_its_schemas(run: Run, name: str) -> None:
    stream, decode = run.stream(name), confluent_avro(run.registry.url)
    wanted = {one["value"]["source"]["event_id"]: one for one in stream_messages(run.store, run.table(name))}
    records = until_all_are_there(run.broker.bootstrap, stream.topic, wanted.keys())
    found = kafka_messages(records, decode, decode)
    assert found.keys() == wanted.keys()
    assert all(repr(found[event_id]) == repr(message) for event_id, message in wanted.items())
    subject = f"{run.registry.url}/subjects/{stream.topic}-value/versions"
    for version in ("1", "latest"):
        text = requests.get(f"{subject}/{version}", timeout=10).json()["schema"]
        reader = fastavro.parse_schema(without_logical_types(json.loads(text)))
        for record in records:
            writer = Schemas.of(stream, int(record.headers["schema_version"])).value
            assert read(record.value[5:], writer, reader)["source"]["event_id"] == record.event_id


def until_all_are_there(bootstrap: str, topic: str, wanted: Collection[str]) -> list[Record]:
    """Read a topic until it has these events."""
    deadline = time.monotonic() + 120
    while True:
        records = read_topic(bootstrap, topic)
        if {record.event_id for record in records} >= set(wanted):
            return records
        assert time.monotonic() < deadline, (len(records), len(wanted))
        time.sleep(1)


def test_the_changes_are_told_in_order(run: Run) -> None:
    """Each version of the altered tables is told by a schema change that names it or a later one."""
    told = FileStream(run.store, "test")
    changes = [message["value"] for folder in told.folders() for message in told.read(folder)]
    ddl = "\n".join(change["ddl"] for change in changes)
    for number in range(ROUNDS):
        assert f"extra_{number} text" in ddl
        assert f"seq_{number}" in ddl
    told_of = [change["source"]["tables"] or {} for change in changes]
    for name in ALTERED:
        versions = [one[name] for one in told_of if name in one]
        assert versions == sorted(versions)
        assert versions[-1] == len(history_of(run.store, *name.split(".")))


def test_other_tables_do_not_wait(run: Run) -> None:
    """How long the steady table's messages take, before and while the others are altered: measured, not judged."""
    began, ended = run.altered_ms
    values = [one["value"] for one in stream_messages(run.store, run.table(STEADY)) if one["value"]["op"] != "r"]
    for phase, start, end in (("before", began - QUIET_S * 1000, began), ("altered", began, ended)):
        lags = sorted(one["ts_ms"] - one["source"]["ts_ms"] for one in values if start <= one["source"]["ts_ms"] < end)
        assert lags
        at_95 = lags[len(lags) * 95 // 100]
        print(f"{phase}: {len(lags)} messages, ms: median {statistics.median(lags)}, 95% {at_95}, greatest {lags[-1]}")
