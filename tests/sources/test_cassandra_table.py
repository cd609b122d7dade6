"""The data source against a real cluster: every cell as the driver's own decoders read it, times included."""

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ringsync.cluster.schema import read_table
from ringsync.config import Config, load_config
from ringsync.cql.identifiers import printable
from ringsync.ring.splits import Split
from ringsync.sources.cassandra_table import CassandraTable, bounded
from ringsync.sources.scan.plan import ScanPlan, within
from ringsync.sources.scan.planning import make_scan_plan
from servers.cassandra import CassandraNode
from tests.oracle import Rows, differences, replica_rows, source_rows

pytestmark = [pytest.mark.server, pytest.mark.spark]

SCALARS = {
    "ascii": "'a~'",
    "bigint": "-9223372036854775808",
    "blob": "0x00ff",
    "boolean": "true",
    "date": "'1582-10-04'",
    "decimal": "-1.2300E-40",
    "double": "0.1",
    "duration": "-14mo3d12h30m5ns",
    "float": "1.5",
    "inet": "'2001:db8::1'",
    "int": "-2147483648",
    "smallint": "-32768",
    "text": "'grüß \U0001f600'",
    "time": "'23:59:59.999999999'",
    "timestamp": "'1911-03-04 05:06:07.089+0000'",
    "timeuuid": "fc6a1b22-0f2b-11ee-be56-0242ac120002",
    "tinyint": "-128",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "varint": "-170141183460469231731687303715884105729",
}

EVERYTHING = f"""
CREATE TABLE {{ks}}.everything (
  id int, part text, c1 timeuuid, c2 int,
  {", ".join(f"v_{name} {name}" for name in SCALARS)},
  s int static, s_map map<text, int> static,
  l list<text>, se set<int>, m map<text, frozen<list<int>>>, u address,
  fl frozen<list<int>>, fu frozen<address>, t tuple<int, text, frozen<set<int>>>, vec vector<float, 3>,
  deep frozen<map<text, frozen<list<frozen<map<int, frozen<address>>>>>>>, odd map<frozen<map<int, int>>, text>,
  "Spaced Name" text, "token" int,
  PRIMARY KEY ((id, part), c1, c2)
) WITH CLUSTERING ORDER BY (c1 DESC, c2 ASC)
"""
KEY = "fc6a1b22-0f2b-11ee-be56-0242ac120002"


@pytest.fixture(scope="module")
def config_file(cassandra: CassandraNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    node = cassandra.settings
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [node.address], "port": node.native_port, "page_size": 37},
        "store": {"url": "store"},
        "scan": {"min_splits": 3},
    }
    (folder / "ringsync.yaml").write_text(yaml.safe_dump(document))
    return folder / "ringsync.yaml"


@pytest.fixture(scope="module")
def config(config_file: Path) -> Config:
    return load_config(config_file)


@pytest.fixture(scope="module")
def everything(session: Any, keyspace: str) -> str:
    """A table with every type and every kind of cell."""
    session.execute(f"CREATE TYPE {keyspace}.address (street text, number int, tags frozen<set<text>>)")
    session.execute(EVERYTHING.format(ks=keyspace))
    table = f"{keyspace}.everything"
    columns, values = ", ".join(f"v_{name}" for name in SCALARS), ", ".join(SCALARS.values())
    for i in range(150):
        session.execute(
            f"INSERT INTO {table} (id, part, c1, c2, {columns}, l, se) VALUES ({i}, 'p', {KEY}, 1, {values}, "
            f"['a', 'b'], {{{i}, -1}}) USING TIMESTAMP {1_000_000 + i} AND TTL {5000 + 1000 * (i % 3)}"
        )
    for statement in (
        # Times that differ from cell to cell, and elements that differ inside a collection.
        f"UPDATE {table} USING TIMESTAMP 2000000 SET v_int = 5, l = l + ['c'], se = se + {{7}} WHERE <one>",
        f"UPDATE {table} USING TIMESTAMP 2000001 AND TTL 900 SET m = {{'x': [1, 2], 'y': []}} WHERE <one>",
        f"UPDATE {table} USING TIMESTAMP 2000002 SET m['z'] = [3], u.street = 'S', u.number = 3 WHERE <one>",
        f"UPDATE {table} USING TIMESTAMP 2000003 AND TTL 800 SET u.number = 4 WHERE <one>",
        f"DELETE v_text, m['x'] FROM {table} USING TIMESTAMP 2000004 WHERE <one>",
        f'INSERT INTO {table} (id, part, c1, c2, fl, fu, t, vec, deep, odd, "Spaced Name", "token") VALUES (1000, '
        f"'other', {KEY}, 0, [1, 2], {{street: 'x', tags: {{'b', 'a'}}}}, (1, null, {{3, 2}}), [0.5, 1, -2], "
        "{'k': [{1: {street: 's'}}, {}]}, {{1: 2}: 'mapped'}, 'q', 42)",
        # Static cells: of a partition with rows, and of one without.
        f"UPDATE {table} USING TTL 7000 SET s = 1, s_map = {{'a': 1}} WHERE id = 1 AND part = 'p'",
        f"UPDATE {table} USING TTL 60000 SET s_map['b'] = 2 WHERE id = 1 AND part = 'p'",
        f"UPDATE {table} SET s = 2 WHERE id = 2000 AND part = 'static only'",
        # A row of its key alone, and cells without a row.
        f"INSERT INTO {table} (id, part, c1, c2) VALUES (3000, '', {KEY}, 0)",
        f"UPDATE {table} SET v_blob = 0x, v_text = '', v_ascii = '' "
        f"WHERE id = 3001 AND part = 'p' AND c1 = {KEY} AND c2 = 0",
    ):
        session.execute(statement.replace("<one>", f"id = 1 AND part = 'p' AND c1 = {KEY} AND c2 = 1"))
    return table


def load(spark: SparkSession, config_file: Path, **options: str) -> DataFrame:
    spark.dataSource.register(CassandraTable)
    return spark.read.format("cassandra_table").option("config", str(config_file)).options(**options).load()


def plan_for(session: Any, config: Config, name: str, now: int | None = None, times: bool = True) -> ScanPlan:
    keyspace, table = name.split(".")
    return make_scan_plan(session, config, keyspace, table, now=now or int(time.time()), times=times)


def found_rows(frame: DataFrame, plan: ScanPlan, folder: Path) -> Rows:
    """The frame's rows in the oracle's form, which reads them from a Delta table."""
    write_deltalake(str(folder), frame.toArrow())
    return replica_rows(str(folder), plan.table)


def test_every_cell_with_its_times(
    spark: SparkSession, session: Any, everything: str, config: Config, config_file: Path, tmp_path: Path
) -> None:
    plan = plan_for(session, config, everything)
    frame = load(spark, config_file, plan=plan.to_json())
    assert frame.rdd.getNumPartitions() == len(plan.splits) == 3
    assert sum(len(split.ranges) for split in plan.splits) >= 3
    source = source_rows(session, plan.table, plan.now)
    assert len(source) == 154
    assert differences(source, found_rows(frame, plan, tmp_path)) == []


def test_a_later_moment_sees_what_is_then_left(
    spark: SparkSession, session: Any, everything: str, config: Config, config_file: Path, tmp_path: Path
) -> None:
    plan = plan_for(session, config, everything, now=int(time.time()) + 6500)
    source = source_rows(session, plan.table, plan.now)
    assert 50 < len(source) < 120
    assert differences(source, found_rows(load(spark, config_file, plan=plan.to_json()), plan, tmp_path)) == []


def test_partitions_are_contiguous_in_token_order(
    spark: SparkSession, session: Any, everything: str, config: Config, config_file: Path
) -> None:
    plan = plan_for(session, config, everything)
    frame = load(spark, config_file, plan=plan.to_json()).withColumn("task", F.spark_partition_id())
    bounds = frame.groupBy("task").agg(F.min("token").alias("low"), F.max("token").alias("high")).collect()
    for row in bounds:
        parts = plan.splits[row.task].ranges
        assert parts[0].range.start < row.low
        assert row.high <= parts[-1].range.end


def test_by_name_in_a_notebook(spark: SparkSession, everything: str, config_file: Path) -> None:
    assert load(spark, config_file, table=everything).count() == 154


def test_a_frame_keeps_its_moment(spark: SparkSession, everything: str, config_file: Path) -> None:
    frame = load(spark, config_file, table=everything).select(F.max("_row.expires_at"))
    first = frame.collect()
    time.sleep(1.1)
    assert frame.collect() == first


def test_without_times(spark: SparkSession, everything: str, config_file: Path) -> None:
    frame = load(spark, config_file, table=everything, times="false")
    assert frame.count() == 154
    assert frame.where("_row.writetime IS NOT NULL OR _row.expires_at IS NOT NULL").count() == 0


def test_counters(
    spark: SparkSession, session: Any, keyspace: str, config: Config, config_file: Path, tmp_path: Path
) -> None:
    session.execute(f"CREATE TABLE {keyspace}.hits (page text PRIMARY KEY, n counter, other counter)")
    for i in range(20):
        session.execute(f"UPDATE {keyspace}.hits SET n = n + {i}, other = other - 1 WHERE page = 'page {i % 7}'")
    plan = plan_for(session, config, f"{keyspace}.hits")
    source = source_rows(session, plan.table, plan.now)
    assert len(source) == 7
    assert differences(source, found_rows(load(spark, config_file, plan=plan.to_json()), plan, tmp_path)) == []


def test_an_empty_table(spark: SparkSession, session: Any, keyspace: str, config_file: Path) -> None:
    session.execute(f'CREATE TABLE {keyspace}."Empty" (id int PRIMARY KEY, v text)')
    assert load(spark, config_file, table=f'{keyspace}."Empty"').collect() == []


def test_values_that_no_type_of_the_lake_holds(
    spark: SparkSession, session: Any, keyspace: str, config: Config, config_file: Path
) -> None:
    name = f"{keyspace}.strange"
    session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, empty int, far timestamp)")
    session.execute(f"INSERT INTO {name} (id, empty) VALUES (4711, blobAsInt(0x)) USING TIMESTAMP 5")
    session.execute(f"INSERT INTO {name} (id, far) VALUES (4712, 9223372036854775807) USING TIMESTAMP 6")
    with pytest.raises(PySparkException, match=r"replica\.unrepresentable_values"):
        load(spark, config_file, table=name).collect()
    keeping = config.model_copy(
        update={"replica": config.replica.model_copy(update={"unrepresentable_values": "raw"})},
    )
    frame = load(spark, config_file, plan=plan_for(session, keeping, name).to_json())
    first, second = frame.orderBy("id").select("empty", "far", "_x.empty.raw", "_x.far.raw", "_row.writetime").collect()
    assert tuple(first) == (None, None, b"", None, 5)
    assert tuple(second) == (None, None, None, (2**63 - 1).to_bytes(8, "big"), 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "{ks}.everythin"}, "did you mean {ks}.everything"),
        ({"tabel": "x.y"}, "has no option tabel; did you mean table"),
        ({}, "needs the option table"),
        ({"table": "orders"}, "write keyspace.table"),
        ({"table": "{ks}.everything", "times": "yes"}, "option times of cassandra_table is true or false"),
        ({"plan": "[]"}, "not a scan plan"),
    ],
)
def test_wrong_options(
    spark: SparkSession, keyspace: str, everything: str, config_file: Path, options: dict[str, str], message: str
) -> None:
    filled = {name: value.format(ks=printable(keyspace)) for name, value in options.items()}
    with pytest.raises(PySparkException) as caught:
        load(spark, config_file, **filled)
    assert message.format(ks=printable(keyspace)) in str(caught.value)


def test_pages_become_batches_of_bounded_size() -> None:
    page = pa.record_batch({"n": pa.array(range(3000)), "text": pa.array(["x" * 10] * 3000)})
    sizes = [batch.num_rows for batch in bounded([page] * 8)]
    assert sizes == [9000, 9000, 6000]
    wide = pa.record_batch({"text": pa.array(["x" * 2**20] * 30)})
    assert [batch.num_rows for batch in bounded([wide] * 5)] == [60, 60, 30]
    assert list(bounded([])) == []
    assert pa.Table.from_batches(bounded([page] * 8)) == pa.Table.from_batches([page] * 8)


def test_a_part_of_the_ring(
    spark: SparkSession, session: Any, everything: str, config: Config, config_file: Path
) -> None:
    plan = plan_for(session, config, everything)
    ranges = [(-(2**63), -(2**62)), (0, 2**61), (2**61, 2**62)]
    found = load(spark, config_file, plan=within(plan, ranges).to_json()).select("token").collect()
    whole = load(spark, config_file, plan=plan.to_json()).select("token").collect()
    expected = [row.token for row in whole if any(start < row.token <= end for start, end in ranges)]
    assert 0 < len(expected) < len(whole)
    assert sorted(row.token for row in found) == sorted(expected)
    assert within(plan, [(-(2**63), 2**63 - 1)]).splits == tuple(Split(split.ranges) for split in plan.splits)
    assert load(spark, config_file, plan=within(plan, []).to_json()).count() == 0


def test_a_plan_survives_json(session: Any, everything: str, config: Config) -> None:
    plan = plan_for(session, config, everything)
    again = ScanPlan.from_json(plan.to_json())
    assert again == plan
    assert again.table.digest == read_table(session, *everything.split(".")).digest
