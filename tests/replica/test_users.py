"""What people do to a replica's tables with delta-rs neither breaks ringsync nor is undone by it; no Spark."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, TableFeatures, write_deltalake
from deltalake.table import TableAlterer, TableMerger, TableOptimizer

from ringsync.replica import merge as merging
from ringsync.replica.changes import write_checkpoint
from ringsync.replica.errors import ReplicaWaitsError
from ringsync.replica.features import writer_features
from ringsync.replica.table import ReplicaTable
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base
from tests.replica.users import BASE_ROWS, EVERYTHING, Used, changed, lacks, theirs

Deed = Callable[[Used], Any]


def merge(used: Used) -> None:
    """All kinds of clauses."""
    names = used.delta.schema().to_arrow().names
    source = used.delta.to_pyarrow_table() if used.part == "changes" else used.images({3: "theirs", 900: "theirs"})
    merging = used.delta.merge(source, "t.token = s.token AND t.id = s.id", source_alias="s", target_alias="t")
    merging = merging.when_matched_update({"v": "'theirs'"}, predicate="s.id = 3")
    merging = merging.when_matched_update_all(predicate="s.id = 1")
    merging = merging.when_matched_delete(predicate="s.id = 2")
    merging = merging.when_not_matched_insert({name: f"s.{name}" for name in names}, predicate="s.id = 900")
    merging = merging.when_not_matched_insert_all()
    merging = merging.when_not_matched_by_source_update({"v": "'theirs'"}, predicate="t.id = 5")
    merging.when_not_matched_by_source_delete(predicate="t.id = 6").execute()
    changed(used, [1, 2, 3, 5, 6, 900])


def without_files(used: Used) -> None:
    """A file is lost, and they repair the log."""
    (Path(used.uri) / used.snapshot().files[0]["path"]).unlink()
    used.delta.repair()
    changed(used, EVERYTHING)


def overwrite(used: Used) -> None:
    write_deltalake(used.uri, pa.table(used.delta.scan().read_all()).slice(0, 1).combine_chunks(), mode="overwrite")
    changed(used, EVERYTHING)


def add_by_hand(used: Used) -> None:
    used.delta.create_write_transaction([], "append", used.delta.schema(), [])


def restore(used: Used) -> None:
    """To before the last pass, or the last bootstrap."""
    used.delta.restore(used.snapshot().version - 1)
    changed(used, EVERYTHING)


def restore_all(used: Used) -> None:
    """To before the last bootstrap."""
    used.delta.restore(0)
    changed(used, EVERYTHING)
    used.passes = state_of(used.root, used.version).applied


def update(used: Used) -> None:
    used.delta.update(updates={"v": "'theirs'"}, predicate="id = 3")
    changed(used, [3])


def delete(used: Used) -> None:
    used.delta.delete("id < 3")
    changed(used, [0, 1, 2])


def describe(used: Used) -> None:
    used.delta.alter.set_table_name("orders_of_shops")
    used.delta.alter.set_table_description("their table")
    used.delta.alter.set_column_metadata("v", {"comment": "their column"})


def set_properties(used: Used) -> None:
    properties = {
        "their.own": "value",
        "delta.enableChangeDataFeed": "true",
        "delta.checkpointInterval": "3",
        "delta.logRetentionDuration": "interval 9 days",
        "delta.deletedFileRetentionDuration": "interval 8 days",
        "delta.dataSkippingStatsColumns": "token,id",
    }
    used.delta.alter.set_table_properties(properties, raise_if_not_exists=False)


def choose_statistics(used: Used) -> None:
    used.delta.alter.set_table_properties({"delta.dataSkippingStatsColumns": "id"})
    used.delta.optimize.compact()


def without_statistics(used: Used) -> None:
    """Also in the checkpoints that ringsync writes."""
    used.delta.alter.set_table_properties(dict.fromkeys(NO_STATISTICS, "false"))
    write_checkpoint(used.store, f"replica/shop/orders/{used.part}", {})


NO_STATISTICS = ("delta.checkpoint.writeStatsAsJson", "delta.checkpoint.writeStatsAsStruct")


def constraint(used: Used) -> None:
    used.delta.alter.add_constraint({"small": "id < 5000"})
    used.delta.alter.drop_constraint("small")


STATISTICS: dict[str, Deed] = {
    "statistics of other columns": choose_statistics,
    "no statistics in checkpoints": without_statistics,
}
DEEDS: dict[str, Deed] = {
    "DeltaTable.compact_logs": lambda used: used.delta.compact_logs(0, used.delta.version()),
    "DeltaTable.cleanup_metadata": lambda used: (used.delta.create_checkpoint(), used.delta.cleanup_metadata()),
    "DeltaTable.create_checkpoint": lambda used: used.delta.create_checkpoint(),
    "DeltaTable.create_write_transaction": add_by_hand,
    "DeltaTable.delete": delete,
    "DeltaTable.generate": lambda used: used.delta.generate(),
    "DeltaTable.merge": merge,
    "DeltaTable.repair": without_files,
    "DeltaTable.restore": restore,
    "all of it restored": restore_all,
    "DeltaTable.update": update,
    "DeltaTable.vacuum": lambda used: used.delta.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True),
    "TableAlterer.drop_constraint": constraint,
    "TableAlterer.set_column_metadata": describe,
    "TableAlterer.set_table_properties": set_properties,
    "TableOptimizer.compact": lambda used: used.delta.optimize.compact(),
    "TableOptimizer.z_order": lambda used: used.delta.optimize.z_order(["id"]),
    "deltalake.write_deltalake": overwrite,
    **STATISTICS,
    "properties of a commit": lambda used: used.delta.update(
        updates={"v": "'theirs'"}, predicate="id = -5", commit_properties=CommitProperties({"who": "they"})
    ),
}
"""What may be done, and is kept, or repaired."""

REFUSED: dict[str, Deed] = {
    "TableAlterer.add_columns": lambda used: used.delta.alter.add_columns([Field("note", "string")]),
    "TableAlterer.add_constraint": lambda used: used.delta.alter.add_constraint({"small": "id < 5000"}),
    "appendOnly": lambda used: used.delta.alter.set_table_properties({"delta.appendOnly": "true"}),
    "transactions forgotten": lambda used: used.delta.alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 1 days"}
    ),
    "merged schema": lambda used: write_deltalake(
        used.uri,
        pa.table(used.delta.scan().read_all()).slice(0, 1).combine_chunks().append_column("note", pa.array(["x"])),
        mode="append",
        schema_mode="merge",
    ),
}
"""What ringsync cannot do with: the replica waits until it is taken back."""

READ_ONLY = {
    *("count", "deletion_vectors", "file_uris", "get_add_actions", "history", "is_deltatable", "load_as_version"),
    *("load_cdf", "metadata", "partitions", "protocol", "scan", "schema", "table_config", "table_uri"),
    *("to_pandas", "to_pyarrow_dataset", "to_pyarrow_table", "transaction_version", "update_incremental", "version"),
    *("alter", "optimize"),
}
COVERED = {
    "DeltaTable.create": "makes no table where one is",
    "TableAlterer.add_feature": "test_every_feature",
    "TableAlterer.drop_column_not_null": "no column is NOT NULL",
    "TableAlterer.set_table_description": "describe",
    "TableAlterer.set_table_name": "describe",
    **{f"TableMerger.{name}": "merge" for name in vars(TableMerger) if not name.startswith("_")},
    "deltalake.convert_to_deltalake": "for folders without a log",
}


NEEDED = {"TimestampNanos": ("TimestampWithoutTimezone", "TimestampNanos")}


def test_no_operation_of_delta_rs_is_left_out() -> None:
    """A new version of deltalake may do more."""
    public = {
        f"{cls.__name__}.{name}"
        for cls in (DeltaTable, TableAlterer, TableMerger, TableOptimizer)
        for name in vars(cls)
        if not name.startswith("_") and not (cls is DeltaTable and name in READ_ONLY)
    }
    functions = {
        f"deltalake.{name}"
        for name, function in vars(deltalake).items()
        if inspect.isfunction(function) and "delta" in name
    }
    assert public | functions == {name for name in {*DEEDS, *REFUSED, *COVERED} if "." in name}


@pytest.fixture(params=["base", "changes"])
def used(request: pytest.FixtureRequest, tmp_path: Path) -> Used:
    return Used(tmp_path, request.param).begin()


@pytest.mark.parametrize("deed", DEEDS)
def test_it_goes_on_and_what_is_theirs_stays(used: Used, deed: str) -> None:
    DEEDS[deed](used)
    given = theirs(used)
    used.go_on()
    assert not lacks(given, theirs(used))


@pytest.mark.parametrize("deed", ["DeltaTable.update", "TableOptimizer.z_order", *STATISTICS])
def test_merged_images_go_whatever_files_they_are_in(tmp_path: Path, deed: str) -> None:
    """If one stayed, it would hide a newer one that the base has, and the next merge would write it over that."""
    used = Used(tmp_path, "changes").begin()
    DEEDS[deed](used)
    for _ in range(2):
        used.merge()
        assert not used.snapshot().files
        used.add_pass()


def test_rows_are_about_known_without_statistics(used: Used) -> None:
    """Else a merge is always due, and a batch has one row."""
    without_statistics(used)
    assert used.delta.count() == 0, "delta-rs counts by statistics"
    rows = len(pa.table(used.delta.scan().read_all()))
    assert 0.8 * rows <= used.snapshot().rows <= 1.2 * rows
    used.merge()
    used.add_pass()
    assert not merging.due(state_of(used.root, used.version), NOW_MS, interval_s=1e9, rows_fraction=0.5)


@pytest.mark.parametrize("value", ["true", "TRUE"])
def test_commits_have_times_if_the_table_wants_them(used: Used, value: str) -> None:
    """Spark stores the value as it was written."""
    before = used.snapshot()
    features = {*writer_features(before.protocol), "inCommitTimestamp"}
    protocol = {"minReaderVersion": 1, **before.protocol, "minWriterVersion": 7, "writerFeatures": sorted(features)}
    configuration = {**before.configuration, "delta.enableInCommitTimestamps": value}
    metadata = {**before.metadata, "configuration": configuration}
    commit(used, {"protocol": protocol}, {"metaData": metadata}, inCommitTimestamp=NOW_MS)
    used.go_on()
    commits = sorted(Path(used.uri).glob("_delta_log/*.json"))[before.version + 1 :]
    times = [json.loads(log.read_text().splitlines()[0])["commitInfo"].get("inCommitTimestamp") for log in commits]
    assert len(times) > 2
    assert times == sorted(set(times))


def test_deletion_vectors_that_were_switched_off_stay_off(used: Used) -> None:
    """Also in the protocol: some readers refuse a table that may have them."""
    write_base(used.root, used.version, used.images(used.rows), from_pass=used.passes + 1, deletion_vectors=False)
    folder = Path(used.uri).parent / "base"
    log = sorted((folder / "_delta_log").glob("*.json"))[-1]
    dropped = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
    (log.parent / f"{int(log.stem) + 1:020}.json").write_text(json.dumps(dropped) + "\n")
    used.go_on()
    found = used.snapshot("base")
    assert "deletionVectors" not in found.protocol.get("readerFeatures", ())
    assert found.configuration["delta.enableDeletionVectors"] == "false"
    assert DeltaTable(folder).to_pyarrow_dataset().count_rows()


@pytest.mark.parametrize("value", [None, "False"])
def test_deletion_vectors_whose_feature_was_dropped_do_not_come_back(tmp_path: Path, value: str | None) -> None:
    """Delta then unsets the property; and it takes values in any case."""
    used = Used(tmp_path, "base").begin()
    before = used.snapshot()
    name = "delta.enableDeletionVectors"
    configuration = {key: one for key, one in before.configuration.items() if key != name}
    configuration |= {name: value} if value else {}
    dropped = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly", "invariants"]}
    commit(used, {"protocol": dropped}, {"metaData": {**before.metadata, "configuration": configuration}})
    used.bootstrap()
    found = used.snapshot()
    assert "deletionVectors" not in found.protocol.get("readerFeatures", ())
    assert found.configuration.get(name, "false").lower() == "false"


@pytest.mark.parametrize(("columns", "how"), [([["token"]], "FULL"), ([], None)])
def test_a_base_is_compacted_as_delta_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[list[str]], how: str | None
) -> None:
    """After CLUSTER BY NONE, Delta takes neither FULL nor ZORDER."""
    used, statements = Used(tmp_path, "base").begin(), []
    protocol = used.snapshot().protocol
    features = sorted({*protocol["writerFeatures"], "clustering", "domainMetadata"})
    domain = {"domain": "delta.clustering", "configuration": json.dumps({"clusteringColumns": columns})}
    commit(
        used, {"protocol": {**protocol, "writerFeatures": features}}, {"domainMetadata": {**domain, "removed": False}}
    )
    monkeypatch.setattr(merging, "_is_scattered", lambda base: True)
    monkeypatch.setattr(merging, "write_checkpoint", lambda *_, **__: None)
    spark: Any = SimpleNamespace(sql=statements.append)
    is_compacted = merging.tidy(spark, used.store, ReplicaTable(replica_uri(tmp_path, used.version), used.version), {})
    said = [one.split()[-1] for one in statements if one.startswith("OPTIMIZE")]
    assert (is_compacted, said) == (how is not None, [how] if how else [])


def commit(used: Used, *actions: Any, **info: Any) -> None:
    """Somebody's commit."""
    log = Path(used.uri) / "_delta_log" / f"{used.snapshot().version + 1:020}.json"
    lines = ({"commitInfo": {"operation": "theirs", **info}}, *actions)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("deed", REFUSED)
def test_it_waits_and_says_what_to_do(used: Used, deed: str) -> None:
    """Taken back by delta-rs here; the statements in the messages are tried in test_users_spark.py."""
    before = used.snapshot().version
    REFUSED[deed](used)
    for act in (lambda: state_of(used.root, used.version), used.add_pass, used.alter):
        with pytest.raises(ReplicaWaitsError, match=rf"{used.part}.* in Spark: .*TABLE delta\.`file:///"):
            act()
    assert used.delta.version() == before + 1, "ringsync has written to it"
    used.delta.restore(before, protocol_downgrade_allowed=True)
    used.go_on()


@pytest.mark.parametrize("feature", [name for name in dir(TableFeatures) if not name.startswith("_")])
def test_every_feature(used: Used, feature: str) -> None:
    """Each is honoured in all that ringsync does, or refused."""
    features = [getattr(TableFeatures, name) for name in NEEDED.get(feature, (feature,))]
    used.delta.alter.add_feature(features, allow_protocol_versions_increase=True)
    if feature in {"IcebergCompatV1", "TimestampNanos", "V2Checkpoint"}:
        with pytest.raises(ReplicaWaitsError, match=rf"(?i)has .*the feature {feature}.* DROP FEATURE `{feature}`"):
            state_of(used.root, used.version)
        return
    given = theirs(used)
    used.go_on()
    write_checkpoint(used.store, f"replica/shop/orders/{used.part}", {}, forget_old_commits=True)
    used.check()
    assert not lacks(given, theirs(used))
    assert used.delta.count() >= min(BASE_ROWS, 3)
