"""Writers of a replica that wake up late: others have changed its schema or its rows meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ringsync.replica import merge
from ringsync.replica.changes import StaleStateError, outdate_merges
from ringsync.replica.compare import repair
from ringsync.replica.errors import ReplicaWaitsError
from ringsync.replica.evolve import rewrite
from ringsync.replica.merge import MergeResult, merge_changes
from ringsync.replica.table import ReplicaTable
from ringsync.schema.table import TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_pass
from tests.replica.test_evolve import GONE, INT, V, begun, follow, image, rows_of, run_here, shown, table


def test_a_late_rewriting_writes_no_earlier_version(tmp_path: Path) -> None:
    """It lost the values of later columns."""
    first, second = table(V), table(V, key="place")
    third = table(V, ("b", "regular", INT), key="place")
    versions = [first, second, third]
    begun(tmp_path, first, image(first, 1, id=1, line=1, v="x"))
    store = LocalStore(tmp_path)
    follow(tmp_path, versions[:2])
    follow(tmp_path, versions)
    write_pass(tmp_path, third, rows_of(third, image(third, 1, 2_000, id=1, place=1, v="x", b=7)), 2)
    with pytest.raises(ReplicaWaitsError, match="later version"):
        rewrite(store, second, partial(tuple, versions), run_here, lambda: store, {}, NOW_MS)
    assert shown(tmp_path, third) == {1: {"id": 1, "place": 1, "v": "x", "b": 7}}
    before = state_of(tmp_path, third)
    assert rewrite(store, third, partial(tuple, versions), run_here, lambda: store, {}, NOW_MS)["files"] == 0
    assert state_of(tmp_path, third) == before, "it has this version already"


def merged(spark: SparkSession, store: Path, schema: TableSchema, state: Any, run: str) -> MergeResult:
    return merge_changes(
        spark,
        LocalStore(store),
        ReplicaTable(replica_uri(store, schema), schema),
        state,
        now_s=NOW_MS // 1000,
        dead_kept_s=10**9,
        properties={"run_id": run},
    )


@pytest.mark.spark
@pytest.mark.parametrize("checked", [False, True])
def test_a_late_merge_changes_nothing(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """It set rows back to what they were, also when it fell asleep just before the MERGE."""
    schema = table(V)
    row = partial(image, schema, 1, id=1, line=1)
    begun(tmp_path, schema, row(v="base"), newer=[row(2_000, v="pass 1")])
    asleep = state_of(tmp_path, schema)
    write_pass(tmp_path, schema, rows_of(schema, row(3_000, v="pass 2")), 2)
    rival = partial(merged, spark, tmp_path, schema, state_of(tmp_path, schema), "rival")
    if checked:
        monkeypatch.setattr(merge, "check_base", lambda *_, **__: (monkeypatch.undo(), rival()))
    else:
        assert rival().merged_pass == 2
    with pytest.raises(StaleStateError):
        merged(spark, tmp_path, schema, asleep, "late")
    assert {id: row["v"] for id, row in shown(tmp_path, schema).items()} == {1: "pass 2"}
    write_pass(tmp_path, schema, rows_of(schema, row(4_000, v="pass 3")), 3)
    assert merged(spark, tmp_path, schema, state_of(tmp_path, schema), "next").updated == 1
    assert {id: row["v"] for id, row in shown(tmp_path, schema).items()} == {1: "pass 3"}
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.spark
def test_a_merge_that_sleeps_while_rows_are_repaired(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It undid a repair that had been reported."""
    schema, store = table(V), LocalStore(tmp_path)
    begun(tmp_path, schema, image(schema, 1, id=1, line=1, v="a"), newer=[image(schema, 1, 2_000, id=1, line=1, v="b")])
    right = spark.createDataFrame(rows_of(schema, image(schema, 1, 2_000, id=1, line=1, v="right")))

    def repaired(*_: Any, **__: Any) -> None:
        replica = ReplicaTable(replica_uri(tmp_path, schema), schema)
        repair(replica, right, [(0, 10)], up_to_pass=1, properties={"run_id": "repair"})
        outdate_merges(store, schema, NOW_MS)

    monkeypatch.setattr(merge, "check_base", repaired)
    with pytest.raises(StaleStateError):
        merged(spark, tmp_path, schema, state_of(tmp_path, schema), "late")
    assert {id: row["v"] for id, row in shown(tmp_path, schema).items()} == {1: "right"}
    monkeypatch.undo()
    write_pass(tmp_path, schema, rows_of(schema, image(schema, 1, 4_000, id=1, line=1, v="newer")), 2)
    assert merged(spark, tmp_path, schema, state_of(tmp_path, schema), "next").updated == 1


@pytest.mark.spark
def test_a_merge_that_sleeps_while_the_base_is_written_again(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brought an old value back under the column that was added again."""
    first, last = table(V), table(V, dropped=GONE)
    begun(tmp_path, first, image(first, 1, id=1, line=1, v="old"), newer=[image(first, 1, 2_000, id=1, line=1, v="v")])
    monkeypatch.setattr(merge, "check_base", lambda *_, **__: follow(tmp_path, [first, last]))
    with pytest.raises(StaleStateError):
        merged(spark, tmp_path, first, state_of(tmp_path, first), "late")
    assert shown(tmp_path, last) == {1: {"id": 1, "line": 1, "v": None}}
