"""A replica whose files have many versions of its schema, as Spark reads, merges and repairs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ringsync.cql.types import ListType, MapType
from ringsync.images.live import shown_rows
from ringsync.images.schema import row_image_schema
from ringsync.replica.errors import ReplicaMismatchError, SchemaChangedError
from ringsync.replica.evolve import follow_schema
from ringsync.replica.lookup import images_between
from ringsync.replica.merge import merge_changes
from ringsync.replica.table import ReplicaTable
from ringsync.replica.view import register_live_view
from ringsync.schema.table import TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, checksums_of, replica_uri, state_of, write_base, write_pass
from tests.replica.test_evolve import ALL, GONE, INT, TEXT, MortalStore, V, follow, image, rows_of, table, user_type

pytestmark = pytest.mark.spark

NOW = NOW_MS // 1000


def history() -> list[TableSchema]:
    """ADD of columns, of a field (inside collections, too), DROP, ADD again, RENAME."""
    old = [("u", "regular", user_type("a")), ("l", "regular", ListType(user_type("a", frozen=True), True))]
    new = [("u", "regular", user_type("a", "b")), ("l", "regular", ListType(user_type("a", "b", frozen=True), True))]
    more = [("s", "static", TEXT), ("m", "regular", MapType(TEXT, INT)), ("n", "regular", INT)]
    return [
        table(V, *old),
        table(V, *old, *more),
        table(V, *new, *more),
        table(*new, *more, dropped=GONE),
        table(V, *new, *more, dropped=GONE),
        table(V, *new, *more, dropped=GONE, key="place"),
    ]


def written(version: TableSchema, number: int, row: int) -> dict[str, Any]:
    """An image of a row with all columns of a version."""
    part = {"a": number, "b": "b"} if number >= 2 else {"a": number}
    times = [0, -1] if number >= 2 else [1]
    values: dict[str, Any] = {"v": f"v{number}", "u": (part, times), "l": [part], "m": [("k", number)], "n": number}
    key = {column.name: row for column in version.key_columns}
    kept = {name: value for name, value in values.items() if name in {column.name for column in version.columns}}
    made = image(version, row, 9_000 + number, **key, **kept, s="s" if number else None)
    made["_x"]["l"] = {"d": None}
    return made


def in_lake(store: Path, version: TableSchema) -> list[Any]:
    """Rows with all cells, as delta-rs reads them."""
    images = images_between(state_of(store, version), version, *ALL)
    return sorted(map(repr, (row for batch in shown_rows(images, version, NOW) for row in batch.to_pylist())))


def in_spark(spark: SparkSession, store: Path, version: TableSchema) -> list[Any]:
    return sorted(map(repr, rows_in_spark(spark, store, version)))


def rows_in_spark(spark: SparkSession, store: Path, version: TableSchema) -> list[Any]:
    register_live_view(spark, replica_uri(store, version), version, "following")
    rows: list[Any] = spark.table("following").toArrow().to_pylist()
    return rows


def test_files_of_all_versions_are_read_merged_and_repaired(spark: SparkSession, tmp_path: Path) -> None:
    versions = history()
    first = versions[0]
    write_base(tmp_path, first, rows_of(first, *(written(first, 0, row) for row in range(12))))
    for number, version in enumerate(versions):
        follow(tmp_path, versions[: number + 1])
        # Rows of this version in the changes, while those of all earlier ones are in base and changes.
        images = [written(version, number, row) for row in (number, 11)]
        write_pass(tmp_path, version, rows_of(version, *images), number + 1)
        if number != 3:
            continue
        found = in_spark(spark, tmp_path, version)
        assert found == in_lake(tmp_path, version)
        seen = state_of(tmp_path, version)
        replica = ReplicaTable(replica_uri(tmp_path, version), version)
        result = merge_changes(
            spark, LocalStore(tmp_path), replica, seen, now_s=NOW, dead_kept_s=0, properties={"run_id": "r"}
        )
        assert (result.read, result.superseded, result.updated) == (8, 3, 5)
        assert in_lake(tmp_path, version) == found

    last = versions[-1]
    replica = ReplicaTable(replica_uri(tmp_path, last), last)
    values = {row["id"]: row for row in replica.read_images(spark).toArrow().to_pylist()}
    assert {row: values[row]["v"] for row in (0, 1, 2, 3, 4, 5, 11)} == {
        **dict.fromkeys((0, 1, 2, 3)),
        4: "v4",
        5: "v5",
        11: "v5",
    }
    assert (values[1]["u"], values[2]["u"], values[7]["n"]) == ({"a": 1, "b": None}, {"a": 2, "b": "b"}, None)
    assert values[2]["place"] == 2
    plain = DeltaTable(replica.base_uri).schema().to_arrow().names
    assert {"place", "v", "m", "s"} <= set(plain)
    assert "line" not in plain

    # A repair of some ranges, then a compaction of everything.
    fresh = rows_of(last, *(written(last, 5, row) for row in (6, 7)))
    replica.replace_ranges(spark.createDataFrame(fresh), [(5, 7)], properties={})
    found = in_spark(spark, tmp_path, last)
    assert found == in_lake(tmp_path, last)
    assert sum("v5" in row for row in found) == 4
    sums = checksums_of(spark.table("following"), last, [-1, 5, 20])
    spark.sql(f"OPTIMIZE {replica.sql_name} ZORDER BY (token)")
    assert in_lake(tmp_path, last) == found
    assert checksums_of(spark.table("following"), last, [-1, 5, 20]).equals(sums)


def test_readers_between_the_two_commits(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever knows the old or the new schema sees every row, also when only the changes have followed yet."""
    versions = history()[:3]
    old, new = versions[0], versions[2]
    write_base(tmp_path, old, rows_of(old, *(written(old, 0, row) for row in (1, 2))))
    write_pass(tmp_path, old, rows_of(old, written(old, 0, 3)), 1)
    before = in_spark(spark, tmp_path, old)
    with pytest.raises(KeyboardInterrupt):
        follow_schema(MortalStore(tmp_path, 1), new, lambda: versions, NOW_MS)
    for _ in range(2):
        assert in_spark(spark, tmp_path, old) == before
        found = rows_in_spark(spark, tmp_path, new)
        assert {row["id"]: (row["v"], row["n"], row["u"]) for row in found} == {
            row: ("v0", None, {"a": 0, "b": None}) for row in (1, 2, 3)
        }
        follow(tmp_path, versions)
    renamed = table(V, key="place")
    replica = ReplicaTable(replica_uri(tmp_path, renamed), renamed)
    with pytest.raises(ReplicaMismatchError, match="a key column was renamed"):
        replica.read_images(spark)
    rows = spark.createDataFrame(pa.Table.from_pylist([], row_image_schema(old)))
    with pytest.raises(SchemaChangedError):
        ReplicaTable(replica_uri(tmp_path, old), old).replace_ranges(rows, [(0, 1)], properties={})


def test_a_view_between_the_alter_and_the_rewriting_shows_no_other_columns_values(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It showed old values under the column that was added again, and one key under the name of the other."""
    first, last = table(V), table(V, dropped=GONE)
    write_base(tmp_path, first, rows_of(first, image(first, 1, id=1, line=1, v="old")))
    with pytest.raises(SchemaChangedError, match="column v was dropped and added again"):
        register_live_view(spark, replica_uri(tmp_path, last), last, "following")
    follow(tmp_path, [first, last])
    assert [row["v"] for row in rows_in_spark(spark, tmp_path, last)] == [None]
    crossed = replace(
        last, columns=tuple(replace(c, name={"id": "line", "line": "id"}.get(c.name, c.name)) for c in last.columns)
    )
    with pytest.raises(SchemaChangedError, match="key column was renamed"):
        register_live_view(spark, replica_uri(tmp_path, crossed), crossed, "following")
