"""Our own reading and writing of a Delta table's log, with Spark and delta-rs on the other side."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from ringsync.replica.base import replace_base
from ringsync.replica.changes import write_checkpoint
from ringsync.replica.delta_log import (
    ConcurrentCommitError,
    DeltaLogError,
    KnownSnapshots,
    log_from_checkpoint,
    read_snapshot,
)
from ringsync.replica.folders import base_folder
from ringsync.replica.table import ReplicaTable
from ringsync.storage import delta_options, open_store
from ringsync.storage.local import LocalStore
from servers.gcs import GcsEmulator
from tests.replica.bases import NOW_MS, replica_uri, write_base
from tests.replica.test_table import simple, simple_images

FOLDER = base_folder("shop", "orders")


def live_paths(store: Path) -> set[str]:
    return {file["path"] for file in read_snapshot(LocalStore(store), FOLDER).files}


def test_no_table(tmp_path: Path) -> None:
    assert read_snapshot(LocalStore(tmp_path), FOLDER).version == -1


def test_a_log_that_is_as_it_was_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, table = LocalStore(tmp_path), simple()
    write_base(tmp_path, table, simple_images(1))
    known: KnownSnapshots = {}
    before = read_snapshot(store, FOLDER, known)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", lambda *_: pytest.fail("the log was read again"))
        assert read_snapshot(store, FOLDER, known) == before
    write_base(tmp_path, table, simple_images(2))
    assert read_snapshot(store, FOLDER, known) == read_snapshot(store, FOLDER) != before


def test_a_transaction_is_taken_once_and_others_are_noticed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    before = read_snapshot(store, FOLDER)
    options = {"as_of_us": 1, "properties": {}, "now_ms": NOW_MS}
    assert replace_base(store, simple(), before, [], transaction="b-1", **options) == 0
    with pytest.raises(ConcurrentCommitError):
        replace_base(store, simple(), before, [], transaction="b-2", **options)
    again = read_snapshot(store, FOLDER)
    assert replace_base(store, simple(), again, [], transaction="b-1", **options) == 0
    assert read_snapshot(store, FOLDER).version == 0
    assert replace_base(store, simple(), again, [], transaction="b-2", **options) == 1


@pytest.mark.server
def test_a_checkpoint_in_a_bucket_stands_for_the_commits_before_it(tmp_path: Path) -> None:
    """delta-rs reads it there; the next one is made from it and the commits behind it."""
    with GcsEmulator() as emulator:
        where = {"url": f"{emulator.url}/lake", "gcs_endpoint": emulator.endpoint}
        store, options = open_store(**where), delta_options(**where)
        for number in range(4):
            before = read_snapshot(store, FOLDER)
            details = {"as_of_us": 1, "properties": {}, "now_ms": NOW_MS}
            replace_base(store, simple(), before, [], transaction=f"b-{number}", **details)
            whole = read_snapshot(store, FOLDER)
            if number % 2:
                write_checkpoint(store, FOLDER, options, forget_old_commits=True)
                assert [key[-25:] for key in log_from_checkpoint(store, FOLDER)] == [
                    f"{number:08}.checkpoint.parquet"[-25:],
                    f"{number:020}.json",
                ]
                for old in range(number):
                    store.delete(f"{FOLDER}/_delta_log/{old:020}.json")
            found = read_snapshot(store, FOLDER)
            assert (found.version, found.transactions) == (whole.version, whole.transactions)
            assert DeltaTable(store.uri(FOLDER), storage_options=options).version() == number


@pytest.mark.spark
def test_checkpoints_and_deletion_vectors_of_spark_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Repairs by Spark write checkpoints and deletion vectors; what we then see is what delta-rs sees."""
    write_base(tmp_path, simple(), simple_images(1000, "old"), rows_per_file=100)
    replica = ReplicaTable(replica_uri(tmp_path, simple()), simple())
    spark.sql(f"ALTER TABLE {replica.sql_name} SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    for number in range(2):
        fresh = spark.createDataFrame(simple_images(1000, "new")).where(f"token = {number * 50}")
        replica.replace_ranges(fresh, [(number * 50 - 1, number * 50)], properties={})
    assert list(Path(replica.base_uri).glob("_delta_log/*.checkpoint.parquet"))
    found = read_snapshot(LocalStore(tmp_path), FOLDER)
    assert found.version == 3
    assert live_paths(tmp_path) == set(DeltaTable(replica.base_uri).get_add_actions()["path"].to_pylist())
    assert any(file.get("deletionVector") for file in found.files)
    assert found.metadata["configuration"]["ringsync.table_id"] == "1" * 32
    assert write_base(tmp_path, simple(), simple_images(5, "last")) == 4
    assert replica.read_base(spark).where("v = 'last'").count() == replica.read_base(spark).count() == 5
    assert len(live_paths(tmp_path)) == 1
    spark.sql(f"VACUUM {replica.sql_name}")
    assert replica.read_base(spark).count() == 5


def test_checkpoints_of_delta_rs_are_read(tmp_path: Path) -> None:
    uri = tmp_path / FOLDER
    for number in range(3):
        write_deltalake(uri, simple_images(number + 1), mode="append")
    DeltaTable(uri).create_checkpoint()
    write_deltalake(uri, simple_images(9), mode="overwrite")
    assert read_snapshot(LocalStore(tmp_path), FOLDER).version == 3
    assert live_paths(tmp_path) == set(DeltaTable(uri).get_add_actions()["path"].to_pylist())


def test_a_gap_in_the_log_is_loud(tmp_path: Path) -> None:
    for _ in range(3):
        write_base(tmp_path, simple(), simple_images(2))
    (tmp_path / FOLDER / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(DeltaLogError, match="no version 1"):
        read_snapshot(LocalStore(tmp_path), FOLDER)
