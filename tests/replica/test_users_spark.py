"""What people do to a replica's tables in Spark neither breaks ringsync nor is undone by it.

If it is refused, the statements in the message are the remedy, as they stand there.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from delta.tables import DeltaTable as SparkDeltaTable
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ringsync.replica.changes import write_checkpoint
from ringsync.replica.errors import ReplicaMismatchError, ReplicaWaitsError
from ringsync.replica.merge import merge_changes, tidy
from ringsync.replica.table import ReplicaTable
from tests.replica.bases import NOW_MS, replica_uri, state_of
from tests.replica.users import EVERYTHING, Used, changed, lacks, theirs

pytestmark = pytest.mark.spark


def run(spark: SparkSession, used: Used, *statements: str) -> list[Any]:
    """Run statements; ``{t}`` is the table. The rows of the last one."""
    rows: list[Any] = []
    for statement in statements:
        rows = spark.sql(statement.replace("{t}", f"delta.`{used.uri}`")).collect()
    return rows


def replica_of(used: Used) -> ReplicaTable:
    return ReplicaTable(replica_uri(used.root, used.version), used.version)


def merge_all(spark: SparkSession, used: Used) -> None:
    """Merge the changes into the base, and tidy up: the base is rewritten, since much of it is marked deleted."""
    seen = state_of(used.root, used.version)
    how = {"now_s": NOW_MS // 1000, "dead_kept_s": 1000, "properties": {}}
    merge_changes(spark, used.store, replica_of(used), seen, **how)
    tidy(spark, used.store, replica_of(used), {})
    used.check()


def repair(spark: SparkSession, used: Used) -> None:
    """Replace all rows, as a repair does after a verification has found differences."""
    fresh = spark.createDataFrame(used.images(used.rows))
    everything = [(-(2**63), 2**63 - 1)]
    replica_of(used).replace_ranges(fresh, everything, properties={})
    replica_of(used).forget_changes(spark, everything, used.passes)
    used.wrong.clear()
    used.check()


def go_on(spark: SparkSession, used: Used) -> None:
    """All that ringsync does: a pass, a merge, a repair, an ALTER TABLE, a bootstrap; and what Spark sees then."""
    used.add_pass()
    used.check()
    merge_all(spark, used)
    used.add_pass()
    repair(spark, used)
    used.go_on()
    state = state_of(used.root, used.version)
    for seen in (replica_of(used).read_images(spark), replica_of(used).images_at(spark, state)):
        assert {row["id"]: row["v"] for row in seen.select("id", "v").collect()} == used.rows


@pytest.fixture(params=["base", "changes"])
def used(request: pytest.FixtureRequest, tmp_path: Path) -> Used:
    return Used(tmp_path, request.param).begin()


@pytest.mark.chaos
def test_all_that_is_honoured_at_once(spark: SparkSession, tmp_path: Path) -> None:
    """Commits have times that increase, rows have ids, the change feed is whole, properties and comments stay."""
    used, given, first = Used(tmp_path, "base").begin(), {}, {}
    for part in ("base", "changes"):
        used.part = part
        use_everything(spark, used)
        given[part], first[part] = theirs(used), used.delta.version() + 1
    go_on(spark, used)
    for part in ("base", "changes"):
        used.part = part
        write_checkpoint(used.store, f"replica/shop/orders/{part}", {}, forget_old_commits=True)
        used.check()
        assert not lacks(given[part], theirs(used))
        assert used.snapshot().rows == used.delta.count()
        times = [row["timestamp"] for row in run(spark, used, "DESCRIBE HISTORY {t}")]
        assert times == sorted(set(times), reverse=True)
        ids = run(spark, used, "SELECT _metadata.row_id AS id FROM {t}")
        assert len({row["id"] for row in ids} - {None}) == len(ids) > 0
        check_change_feed(spark, used, first[part])


def use_everything(spark: SparkSession, used: Used) -> None:
    """Switch on and set all that ringsync honours."""
    wanted = {
        "delta.enableInCommitTimestamps": "TRUE",  # kept as it is written
        "delta.enableRowTracking": "true",
        "delta.enableChangeDataFeed": "true",
        "delta.enableDeletionVectors": "true" if used.part == "changes" else "false",
        "delta.checkpoint.writeStatsAsJson": "false",
        "delta.checkpoint.writeStatsAsStruct": "true",
        "delta.checkpointInterval": "2",
        "delta.feature.allowColumnDefaults": "supported",
        "their.own": "value",
    }
    run(
        spark,
        used,
        f"ALTER TABLE {{t}} SET TBLPROPERTIES ({', '.join(f'{name!r} = {value!r}' for name, value in wanted.items())})",
        "ALTER TABLE {t} ALTER COLUMN v SET DEFAULT 'x'",
        "ALTER TABLE {t} ALTER COLUMN v COMMENT 'their column'",
        "ALTER TABLE {t} ALTER COLUMN _row.writetime COMMENT 'their field'",
        "ALTER TABLE {t} ALTER COLUMN v FIRST",
        "ALTER TABLE {t} CLUSTER BY (token)",
        "COMMENT ON TABLE {t} IS 'their table'",
    )


def check_change_feed(spark: SparkSession, used: Used, first: int) -> None:
    """What was added and removed in each version is what the numbers of rows say; delta-rs reads it, too."""
    read = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", first).load(used.uri)
    more: dict[int, int] = {}
    for row in read.select("_change_type", "_commit_version").collect():
        number = row["_commit_version"]
        more[number] = more.get(number, 0) + (1 if row["_change_type"] in ("insert", "update_postimage") else -1)
    assert more
    for number, rows in more.items():
        before, after = (DeltaTable(used.uri, version=version).count() for version in (number - 1, number))
        assert after - before == rows
    last = max(more)
    assert pa.table(used.delta.load_cdf(last, last)).num_rows


STATEMENTS: dict[str, tuple[str, ...]] = {
    "AddTableConstraint": ("ALTER TABLE {t} ADD CONSTRAINT small CHECK (token < 5000)",),
    "AlterTableClusterBy": ("ALTER TABLE {t} CLUSTER BY (id)",),
    "AlterTableDropFeature": ("ALTER TABLE {t} DROP FEATURE deletionVectors",),
    "AlterTableSyncIdentity": ("ALTER TABLE {t} ALTER COLUMN token SYNC IDENTITY",),
    "Clone": ("CREATE OR REPLACE TABLE {t} SHALLOW CLONE {t} VERSION AS OF {v}",),
    "Convert": ("CONVERT TO DELTA {t}",),
    "DropTableConstraint": (
        "ALTER TABLE {t} ADD CONSTRAINT small CHECK (token < 5000)",
        "ALTER TABLE {t} DROP CONSTRAINT small",
    ),
    "Generate": ("GENERATE symlink_format_manifest FOR TABLE {t}",),
    "OptimizeTable": ("OPTIMIZE {t}",),
    "OptimizeTable ZORDER": ("OPTIMIZE {t} ZORDER BY (id)",),
    "ReorgTable": ("DELETE FROM {t} WHERE id = -7", "REORG TABLE {t} APPLY (PURGE)"),
    "ReorgTable UNIFORM": ("REORG TABLE {t} APPLY (UPGRADE UNIFORM(ICEBERG_COMPAT_VERSION=2))",),
    "Restore": ("RESTORE TABLE {t} TO VERSION AS OF {v}",),
    "VacuumTable": ("VACUUM {t} LITE",),
    "VacuumTable RETAIN 0": (
        "SET spark.databricks.delta.retentionDurationCheck.enabled = false",
        "VACUUM {t} RETAIN 0 HOURS",
    ),
    "add a column": ("ALTER TABLE {t} ADD COLUMN note STRING",),
    "add a field": ("ALTER TABLE {t} ADD COLUMN _row.note STRING",),
    "alter a type": ("ALTER TABLE {t} ALTER COLUMN id TYPE BIGINT",),
    "append only": ("ALTER TABLE {t} SET TBLPROPERTIES ('delta.appendOnly' = 'true')",),
    "clustering and back": (
        "ALTER TABLE {t} CLUSTER BY (token)",
        "OPTIMIZE {t} FULL",
        "ALTER TABLE {t} CLUSTER BY NONE",
    ),
    "column mapping": ("ALTER TABLE {t} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",),
    "columns renamed": (
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
        "ALTER TABLE {t} RENAME COLUMN v TO their_name",
    ),
    "columns dropped": (
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
        "ALTER TABLE {t} DROP COLUMN v",
    ),
    "delete": ("DELETE FROM {t} WHERE id < 3",),
    "drop": ("DROP TABLE {t}",),
    "insert": ("INSERT INTO {t} SELECT * FROM {t}",),
    "merge": (
        "MERGE INTO {t} AS t USING (SELECT 3 AS id) AS s ON t.id = s.id WHEN MATCHED THEN UPDATE SET v = 'theirs' "
        "WHEN NOT MATCHED BY SOURCE AND t.id > 15 THEN DELETE",
    ),
    "not null": ("ALTER TABLE {t} ALTER COLUMN v SET NOT NULL",),
    "overwrite": ("INSERT OVERWRITE {t} SELECT * FROM {t} WHERE id = 1",),
    "replace columns": ("ALTER TABLE {t} REPLACE COLUMNS (token bigint, id int)",),
    "transactions forgotten": (
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.setTransactionRetentionDuration' = 'interval 1 hours')",
    ),
    "truncate": ("TRUNCATE TABLE {t}",),
    "type widening": ("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",),
    "update": ("UPDATE {t} SET v = 'theirs' WHERE id < 3",),
    "v2 checkpoints": ("ALTER TABLE {t} SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')",),
}
"""What one can say to a Delta table. Delta itself refuses some of it."""

COMMAND = (
    r"(Add|Alter|Analyze|Convert|Desc|Drop|Gen|Opt|Pass|Reorg|Show)[A-Za-z]*Context|(Clone|Restore|VacuumTable)Context"
)
READ_ONLY = {"DescribeDeltaDetail", "DescribeDeltaHistory", "PassThrough"}

METHODS = {
    *("delete", "update", "merge", "vacuum", "optimize", "generate", "convertToDelta", "clone", "cloneAtVersion"),
    *("cloneAtTimestamp", "restoreToVersion", "restoreToTimestamp", "upgradeTableProtocol", "addFeatureSupport"),
    *("dropFeatureSupport", "create", "createIfNotExists", "replace", "createOrReplace"),
    *("toDF", "alias", "history", "detail", "forPath", "forName", "isDeltaTable"),
}
"""Methods of ``delta.tables.DeltaTable``: each is one of the statements."""


def test_no_command_of_spark_is_left_out(cache: Path) -> None:
    """A new version of Delta may do more: commands of its own, by its grammar, and methods."""
    (jar,) = (cache / "jars" / "delta").glob("delta-spark_*.jar")
    rules = [Path(name).stem.partition("DeltaSqlBaseParser$")[2] for name in zipfile.ZipFile(jar).namelist()]
    commands = {rule.removesuffix("Context") for rule in rules if re.fullmatch(COMMAND, rule)}
    assert commands == {name.partition(" ")[0] for name in STATEMENTS if name[0].isupper()} | READ_ONLY
    assert {name for name in vars(SparkDeltaTable) if not name.startswith("_")} == METHODS


def remedied(spark: SparkSession, used: Used, version: int) -> bool:
    """Run what the message says, if ringsync refuses the table, until it does not; whether it did.

    :param version: the table's version before somebody did something
    """
    for number in range(3):
        try:
            state_of(used.root, used.version)
        except ReplicaWaitsError as error:
            told = str(error).partition("Run in Spark: ")[2]
        else:
            return number > 0
        statements, _, others = told.partition("; if Delta refuses this: ")
        try:
            run_remedy(spark, statements, version)
        except Exception:
            run_remedy(spark, others, version)
    raise AssertionError(told)


def run_remedy(spark: SparkSession, statements: str, version: int) -> None:
    for statement in statements.split("; "):
        spark.sql(re.sub("<the version before it.*>", str(version), statement)).collect()


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[None]:
    """The session's settings are as before."""
    yield
    for name in ("retentionDurationCheck.enabled", "restore.protocolDowngradeAllowed"):
        spark.conf.unset(f"spark.databricks.delta.{name}")


@pytest.mark.chaos
@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement(spark: SparkSession, used: Used, name: str) -> None:
    """It is honoured, or found by verification, or refused with a remedy; a bootstrap always helps."""
    before = used.delta.version()
    with suppress(Exception):  # Delta refuses it
        for statement in STATEMENTS[name]:
            run(spark, used, statement.replace("{v}", str(before - 1)))
    changed(used, EVERYTHING)
    try:
        remedied(spark, used, before)
        used.passes = state_of(used.root, used.version).applied
    except ReplicaWaitsError:
        raise
    except ReplicaMismatchError:  # "Trigger bootstrap_table …"
        used.bootstrap()
    given = theirs(used)
    used.add_pass()
    if name == "insert":  # what is there twice is so after a pass, too, until it is repaired
        changed(used, EVERYTHING)
    merge_all(spark, used)
    repair(spark, used)
    used.go_on()
    assert not lacks(given, theirs(used))


def features_of(spark: SparkSession) -> list[str]:
    known: Any = spark._jvm.org.apache.spark.sql.delta.TableFeature.allSupportedFeaturesMap().values().iterator()  # type: ignore[union-attr]
    names: list[str] = []
    while known.hasNext():
        names.append(known.next().name())
    return sorted(names)


@pytest.mark.chaos
@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("part", ["base", "changes"])
def test_every_feature_of_spark(spark: SparkSession, tmp_path: Path, part: str) -> None:
    """Each is honoured, or refused with a remedy that works; those that Delta refuses itself are known."""
    impossible = set()
    for name in features_of(spark):
        used = Used(tmp_path / name, part)
        used.root.mkdir()
        used.begin()
        before = used.delta.version()
        try:
            run(spark, used, f"ALTER TABLE {{t}} SET TBLPROPERTIES ('delta.feature.{name}' = 'supported')")
        except Exception:
            impossible.add(name)
            continue
        remedied(spark, used, before)
        given = theirs(used)
        used.go_on()
        assert not lacks(given, theirs(used)), name
    assert impossible == {"adaptiveMetadata-preview", "catalogManaged", "clustering"}
