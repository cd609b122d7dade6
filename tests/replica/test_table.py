"""The base table: extreme values survive, one commit per write, other engines read it, mistakes are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.cql.natives import NATIVES
from ringsync.cql.types import ListType, MapType, Native, TupleType, UserType
from ringsync.images.digests import canonical
from ringsync.images.schema import row_image_schema
from ringsync.replica.base import check_same_schema
from ringsync.replica.changes import CLOCK_SKEW_US, write_checkpoint
from ringsync.replica.errors import ReplicaMismatchError
from ringsync.replica.folders import base_folder
from ringsync.replica.table import ReplicaTable, token_condition
from ringsync.schema.table import Column, ColumnKind, TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base

pytestmark = pytest.mark.spark

LONGS = [-(2**63), 2**63 - 1, 0]
EXTREMES: dict[str, list[Any]] = {
    "bigint": LONGS,
    "blob": [b"", b"\0\xff"],
    "boolean": [False, True],
    "counter": LONGS,
    "date": [-1_826_211_000, 1_826_211_000, -(2**31), 2**31 - 1],
    "double": [float("nan"), float("-inf"), 5e-324, -0.0, 0.0],
    "duration": [{"months": -(2**31), "days": 2**31 - 1, "nanoseconds": -(2**63)}],
    "float": [float("nan"), float("inf"), -0.0, 0.0],
    "int": [-(2**31), 2**31 - 1],
    "smallint": [-(2**15), 2**15 - 1],
    "time": [0, 86_399_999_999_999],
    "timestamp": LONGS,
    "tinyint": [-128, 127],
}
TEXTS = ["", "\0", "é\U0001f600", "-1E+1000"]
PAIR = UserType("shop", "pair", ("a", "select"), (Native("int"), ListType(Native("text"))), frozen=True)


def table(*columns: tuple[str, ColumnKind, Any], table_id: str = "1" * 32) -> TableSchema:
    return TableSchema("shop", "orders", table_id, tuple(Column(*column) for column in columns))


def simple(table_id: str = "1" * 32) -> TableSchema:
    return table(("id", "partition_key", Native("int")), ("v", "regular", Native("text")), table_id=table_id)


def typed(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Values of a type; dates and timestamps are given as numbers, since Python cannot hold them."""
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        return pa.array(values, pa.int32() if pa.types.is_date32(kind) else pa.int64()).view(kind)
    return pa.array(values, kind)


def images(schema: TableSchema, columns: dict[str, pa.Array]) -> pa.Table:
    """Row images with these columns and tokens 0, 1 …; whatever is not given is null."""
    count = len(next(iter(columns.values())))
    columns = {"token": pa.array(range(count), pa.int64()), **columns}
    wanted = row_image_schema(schema)
    return pa.table([columns.get(f.name, pa.nulls(count, f.type)) for f in wanted], schema=wanted)


def simple_images(count: int, value: str = "v") -> pa.Table:
    return images(simple(), {"id": pa.array(range(count), pa.int32()), "v": pa.array([value] * count)})


def test_extreme_values_survive(spark: SparkSession, tmp_path: Path) -> None:
    """Every native type, as a value and as a map key; nested nulls; emptiness; a long text."""
    columns: dict[str, pa.Array] = {"id": pa.array(range(8), pa.int32())}
    described: list[tuple[str, ColumnKind, Any]] = [("id", "partition_key", Native("int"))]
    for name, native in NATIVES.items():
        values = EXTREMES.get(name, TEXTS)
        described += [(f"v_{name}", "regular", Native(name))]
        columns[f"v_{name}"] = typed(native.arrow, [*(values * 8)[:7], None])
        described += [(f"m_{name}", "regular", MapType(Native(name), Native("int")))]
        keys = typed(native.arrow, values)
        entries = pa.MapArray.from_arrays([0, len(keys)], keys, pa.array(range(len(keys)), pa.int32()))
        columns[f"m_{name}"] = pa.concat_arrays([entries, pa.array([[]] * 3 + [None] * 4, entries.type)])
    nested = TupleType((PAIR, MapType(MapType(Native("int"), Native("int"), True), Native("double"), True)))
    described += [("nested", "regular", nested), ("long", "regular", Native("text"))]
    all_null = {"field_1": {"a": None, "select": None}, "field_2": []}
    inner = {"field_1": {"a": 1, "select": ["", None]}, "field_2": [{"key": [(1, None)], "value": -0.0}]}
    schema = table(*described)
    kind = row_image_schema(schema).field("nested").type
    columns["nested"] = pa.array([all_null, inner, {"field_1": None, "field_2": None}, *[None] * 5], kind)
    columns["long"] = pa.array(["x" * 1_000_000, *[""] * 7])
    written = images(schema, columns)

    store = tmp_path / "with space"
    write_base(store, schema, written)
    replica = ReplicaTable(replica_uri(store, schema), schema)
    found = replica.read_base(spark).orderBy("token").toArrow()

    assert found.num_rows == 8
    assert found.column_names == written.column_names
    for name in written.column_names:
        before, after = (canonical(one[name].combine_chunks()) for one in (written, found))
        assert before.to_pylist() == after.to_pylist(), name
    assert replica.read_base(spark).schema == from_arrow_schema(row_image_schema(schema))


def test_one_commit_that_says_what_it_is(spark: SparkSession, tmp_path: Path) -> None:
    replica = ReplicaTable(replica_uri(tmp_path, simple()), simple())
    assert replica.properties(spark) == {}
    first = write_base(tmp_path, simple(), simple_images(10), as_of_us=5, properties={"run_id": "r1"})
    again = write_base(tmp_path, simple(), simple_images(4), as_of_us=6, properties={"run_id": "r2"})
    assert (first, again) == (0, 1)
    properties = replica.properties(spark)
    assert (properties["run_id"], properties["as_of_us"]) == ("r2", "6")
    assert properties["table_id"] == "1" * 32
    assert properties["schema_digest"] == simple().digest
    assert replica.read_base(spark).count() == 4
    history = spark.sql(f"DESCRIBE HISTORY {replica.sql_name}").orderBy("version").collect()
    assert [row["operationMetrics"]["numOutputRows"] for row in history] == ["10", "4"]
    assert spark.read.format("delta").option("versionAsOf", 0).load(replica.base_uri).count() == 10


def test_features_and_statistics_are_plain(spark: SparkSession, tmp_path: Path) -> None:
    for vectors, features in ((True, ["deletionVectors"]), (False, None)):
        write_base(tmp_path / str(vectors), simple(), simple_images(10), deletion_vectors=vectors)
        replica = ReplicaTable(replica_uri(tmp_path / str(vectors), simple()), simple())
        log = (Path(replica.base_uri) / "_delta_log" / f"{0:020}.json").read_text()
        actions = [json.loads(line) for line in log.splitlines()]
        protocol = next(a["protocol"] for a in actions if "protocol" in a)
        assert protocol.get("readerFeatures") == features
        assert set(protocol.get("writerFeatures", [])) <= {"deletionVectors", "appendOnly", "invariants"}
        for added in (json.loads(a["add"]["stats"]) for a in actions if "add" in a):
            assert set(added["minValues"]) <= {"token"}
        replica.replace_ranges(spark.createDataFrame(simple_images(1)), [(-1, 4)], properties={})
        assert replica.read_base(spark).count() == 6


def test_rows_keep_their_order(spark: SparkSession, tmp_path: Path) -> None:
    write_base(tmp_path, simple(), simple_images(1000), rows_per_file=300)
    replica = ReplicaTable(replica_uri(tmp_path, simple()), simple())
    tokens = [file["min"]["token"] for file in pa.table(DeltaTable(replica.base_uri).get_add_actions()).to_pylist()]
    assert sorted(tokens) == [0, 300, 600, 900]
    found = pq.read_table(next(Path(replica.base_uri).glob("*.parquet")))["token"].to_pylist()
    assert found == sorted(found)
    plan = replica.read_base(spark).where("token > 299 AND token < 500")
    assert plan.count() == 200
    assert len(plan.inputFiles()) <= 4


def test_another_table_is_not_read_another_schema_replaces_it(spark: SparkSession, tmp_path: Path) -> None:
    write_base(tmp_path, simple(), simple_images(10))
    again = simple(table_id="2" * 32)
    with pytest.raises(ReplicaMismatchError, match=r"replica of table id 1111.*dropped and created again"):
        ReplicaTable(replica_uri(tmp_path, again), again).read_images(spark)
    wider = table(
        ("id", "partition_key", Native("int")), ("v", "regular", Native("text")), ("w", "regular", Native("int"))
    )
    more = images(wider, {"id": pa.array([1], pa.int32())})
    widened = ReplicaTable(replica_uri(tmp_path, wider), wider)
    with pytest.raises(ReplicaMismatchError, match=r"schema of .* changed"):
        check_same_schema(widened.base_uri, widened.properties(spark), wider)
    write_base(tmp_path, wider, more)
    check_same_schema(widened.base_uri, widened.properties(spark), wider)
    assert widened.read_base(spark).columns == ["token", "id", "v", "w", "_row", "_x", "_merge"]
    rows = spark.createDataFrame(simple_images(10))
    with pytest.raises(ReplicaMismatchError, match="no replica of"):
        ReplicaTable(str(tmp_path / "other"), simple()).replace_ranges(rows, [(0, 1)], properties={})


def test_another_engine_reads_the_base_with_deletions(spark: SparkSession, tmp_path: Path) -> None:
    """delta-rs applies the deletion vectors that a repair leaves; the next bootstrap removes these files, too."""
    write_base(tmp_path, simple(), simple_images(1000, "old"))
    replica = ReplicaTable(replica_uri(tmp_path, simple()), simple())
    fresh = spark.createDataFrame(simple_images(20, "new")).where("token > 9 AND token < 15")
    replica.replace_ranges(fresh, [(9, 19)], properties={})
    assert list(Path(replica.base_uri).glob("deletion_vector*"))
    grouped = "SELECT v, count(*) AS n, min(token) AS lo, max(token) AS hi FROM base GROUP BY v ORDER BY v"
    found = QueryBuilder().register("base", DeltaTable(replica.base_uri)).execute(grouped)
    rows = pa.table(found.read_all()).to_pylist()
    assert rows == [{"v": "new", "n": 5, "lo": 10, "hi": 14}, {"v": "old", "n": 990, "lo": 0, "hi": 999}]
    assert write_base(tmp_path, simple(), simple_images(7, "again")) == 2
    assert [row.v for row in replica.read_base(spark).collect()] == ["again"] * 7
    found = QueryBuilder().register("base", DeltaTable(replica.base_uri)).execute(grouped)
    assert pa.table(found.read_all()).to_pylist() == [{"v": "again", "n": 7, "lo": 0, "hi": 6}]


def test_what_was_deleted_before_a_base_was_read_or_repaired_is_not_known(spark: SparkSession, tmp_path: Path) -> None:
    def known_from_us() -> int:
        return state_of(tmp_path, simple()).deletions_known_from_us - CLOCK_SKEW_US

    write_base(tmp_path, simple(), simple_images(10))
    assert known_from_us() == NOW_MS * 1000, "when it was read is all that it says"
    write_base(tmp_path, simple(), simple_images(10), properties={"deletions_from_us": "7"})
    assert known_from_us() == 7
    rows = spark.createDataFrame(simple_images(5))
    for _ in range(2):
        began_us = int(time.time() * 1_000_000)
        ReplicaTable(replica_uri(tmp_path, simple()), simple()).replace_ranges(rows, [(-1, 4)], properties={})
        assert began_us <= known_from_us() <= time.time() * 1_000_000


def test_an_unknown_liveness_is_older_than_the_end_of_the_last_repairs_reading(
    spark: SparkSession, tmp_path: Path
) -> None:
    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        time.sleep(2)  # the source may be read for hours, and rows written meanwhile are shown, too

    def read_until_us() -> int:
        return state_of(tmp_path, simple()).live_known_from_us - CLOCK_SKEW_US

    write_base(tmp_path, simple(), simple_images(10), properties={"read_until_us": "7"})
    assert read_until_us() == 7
    rows = spark.createDataFrame(simple_images(5))
    began_us = int(time.time() * 1_000_000)
    replica = ReplicaTable(replica_uri(tmp_path, simple()), simple())
    replica.replace_ranges(rows.mapInArrow(slowly, rows.schema), [(-1, 4)], properties={})
    assert began_us + 2_000_000 <= read_until_us() <= time.time() * 1_000_000
    write_checkpoint(LocalStore(tmp_path), base_folder(*simple().full_name.split(".")), {})
    assert began_us + 2_000_000 <= read_until_us() <= time.time() * 1_000_000, "read from the checkpoint"


def test_token_condition_takes_the_ends_of_the_ring(spark: SparkSession) -> None:
    ring = token_condition([(-(2**63), 2**63 - 1)])
    tokens = spark.createDataFrame([(-(2**63),), (-(2**63) + 1,), (2**63 - 1,), (None,)], "token bigint")
    assert tokens.where(ring).count() == 3, "the last range has rows without a token, too"
    assert tokens.where(token_condition([(0, 2**63 - 2)])).count() == 0
    many = token_condition([(2 * i, 2 * i + 1) for i in range(500)])
    assert spark.range(10_000).selectExpr("id AS token").where(many).count() == 500
    assert token_condition([(5, 7), (0, 5), (1, 3), (9, 10)]) == token_condition([(0, 7), (9, 10)])
    with pytest.raises(ValueError, match="start < end"):
        token_condition([(5, 5)])
