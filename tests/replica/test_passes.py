"""Passes over a base, against a dictionary: lookups and Spark see the newest image of each key, merged or not."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ringsync.cql.types import MapType, Native, TupleType
from ringsync.images.schema import NO_LIVENESS, row_image_schema
from ringsync.replica.lookup import _first_batch, images_between, previous_images
from ringsync.replica.merge import dead_for_good, due, merge_changes, tidy
from ringsync.replica.table import ReplicaTable
from ringsync.replica.view import register_live_view
from ringsync.schema.table import Column, TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base, write_pass

INT, DOUBLE = Native("int"), Native("double")
TABLE = TableSchema(
    "shop",
    "orders",
    "4" * 32,
    (
        Column("p", "partition_key", DOUBLE),
        Column("C", "clustering", TupleType((DOUBLE, INT))),
        Column("m", "clustering", MapType(INT, DOUBLE, frozen=True)),
        Column("s", "static", INT),
        Column("v", "regular", INT),
    ),
)
PARTITIONS = [0.0, -0.0, float("nan"), 1.5, None]
"""None: only raw bytes show this key."""
NOW, GRACE = 1_000_000, 1000

Row = dict[str, Any]
Model = dict[str, Row]


def key(row: Row) -> str:
    raw = [row["_x"][name]["raw"] for name in ("p", "C", "m")]
    return repr((row["token"], row["p"], row["C"], row["m"], raw))


def image(rng: random.Random, value: int, *, dead_at: int | None = None) -> Row:
    number = rng.randrange(len(PARTITIONS))
    clustering: list[Any] = [{"field_1": rng.choice([0.0, -0.0, None]), "field_2": rng.choice([1, None])}]
    clustering.append([(1, rng.choice([0.0, -0.0]))] if rng.random() < 0.7 else [])
    if rng.random() < 0.1:
        clustering = [None, None]
    raw: Row = {name: {"raw": None} for name in ("p", "C", "m")}
    raw["p"] = {"raw": b"" if PARTITIONS[number] is None else None}
    cell = {"d": None, "e": None, "raw": None}
    dead = dead_at is not None
    merge: Row = {
        "live_expires_at": None,
        "deletion_local": dead_at,
        "unseen_at": None,
        "tombstones": [],
        "entries": [],
    }
    return {
        "token": number // 2,
        "p": PARTITIONS[number],
        "C": clustering[0],
        "m": clustering[1],
        "s": None if dead else number,
        "v": None if dead or clustering[0] is None else value,
        "_row": {
            "writetime": value,
            "expires_at": None,
            "deleted_at": value if dead else None,
            "live": NO_LIVENESS if dead else None,
        },
        "_x": {**raw, "s": cell, "v": cell},
        "_merge": merge if dead else None,
    }


def batch(rows: Iterable[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=row_image_schema(TABLE))


def some_images(rng: random.Random, count: int, value: int, **options: Any) -> Model:
    return {key(row): row for row in (image(rng, value, **options) for _ in range(count))}


def table_of(rows: Model) -> pa.Table:
    return pa.Table.from_batches([batch(rows.values())]).sort_by("token")


def shown(rows: pa.Table | pa.RecordBatch) -> list[str]:
    """Rows in an order of their own, exactly; also as Spark and Parquet nest them."""
    assert rows.column_names == row_image_schema(TABLE).names
    return sorted(map(repr, rows.cast(row_image_schema(TABLE)).to_pylist()))


def expected(rows: Iterable[Row]) -> list[str]:
    return shown(batch(rows))


def look_up(store: Path, model: Model, rng: random.Random) -> None:
    """Some keys, of which not all are there, and one whole partition; compare with the model."""
    asked = list(some_images(rng, 4, 0).values())
    tokens = {rng.randrange(3)} if rng.random() < 0.5 else set()
    found = previous_images(state_of(store, TABLE), TABLE, batch(asked), pa.array(sorted(tokens), pa.int64()))
    assert found["token"].to_pylist() == sorted(found["token"].to_pylist())
    assert len(set(shown(found))) == found.num_rows
    by_key = {key(row): repr(row) for row in found.cast(row_image_schema(TABLE)).to_pylist()}
    newest = {key(row): repr(row) for row in batch(model.values()).to_pylist()}
    assert by_key.items() <= newest.items()
    wanted = {key(row) for row in asked} | {k for k, row in model.items() if row["token"] in tokens}
    assert wanted & newest.keys() <= by_key.keys()
    for partition in {partition_of(row) for row in asked}:
        there = {k for k, row in model.items() if partition_of(row) == partition}
        assert {k for k in there if model[k]["C"] is None} <= by_key.keys()
        others = {k for k in there if model[k]["C"] is not None}
        assert not others or others & by_key.keys(), "nothing shows the static cells"
        assert len((others & by_key.keys()) - wanted) <= 1


def look_through(store: Path, model: Model, rng: random.Random) -> None:
    """All rows of two token ranges."""
    between = rng.randrange(-1, 3)
    for start, end in ((-(2**63), between), (between, 2**63 - 1)):
        found = pa.Table.from_batches(images_between(state_of(store, TABLE), TABLE, start, end))
        assert shown(found) == expected(row for row in model.values() if start < row["token"] <= end)


def partition_of(row: Row) -> str:
    return repr((row["p"], row["_x"]["p"]["raw"]))


def test_lookup_without_changes_and_without_rows(tmp_path: Path) -> None:
    rng = random.Random(3)
    base = some_images(rng, 40, 1)
    write_base(tmp_path, TABLE, table_of(base), rows_per_file=7)
    for _ in range(20):
        look_up(tmp_path, base, rng)
        look_through(tmp_path, base, rng)
    nothing = previous_images(state_of(tmp_path, TABLE), TABLE, batch([]))
    assert (nothing.num_rows, nothing.schema) == (0, row_image_schema(TABLE))


def test_rows_that_do_not_fit_into_a_batch_are_not_passed_over() -> None:
    rows = table_of(some_images(random.Random(1), 3, 1)).combine_chunks()
    assert _first_batch(rows, TABLE).num_rows == rows.num_rows
    with pytest.raises(ValueError, match=rf"{TABLE.full_name}: 6 rows .* more than 2 GiB"):
        _first_batch(pa.concat_tables([rows, rows]), TABLE)


def test_what_is_dead_for_good() -> None:
    names = ("old", "young", "unknown", "cell", "static", "alive")
    rows = {name: image(random.Random(8), 5, dead_at=50) | {"C": {"field_1": 0.0, "field_2": 1}} for name in names}
    rows["young"]["_merge"]["deletion_local"] = 101
    rows["unknown"]["_merge"]["deletion_local"] = None
    tombstone = {"column": "v", "path": None, "timestamp": 7, "local_deletion_time": 101}
    rows["cell"]["_merge"]["tombstones"] = [tombstone | {"local_deletion_time": 99}, tombstone]
    rows["static"] |= {"s": 4, "C": None, "m": None}
    rows["old"]["s"] = 4
    rows["alive"]["v"] = 4
    dead = dead_for_good(batch(rows.values()), TABLE, dead_since_s=100, now_s=200)
    assert dict(zip(rows, dead.tolist(), strict=True)) == dict.fromkeys(rows, False) | {"old": True}
    rows["cell"]["_merge"]["tombstones"].pop()
    expiring = rows["alive"]
    expiring["_row"]["expires_at"] = 100
    expiring["_row"]["deleted_at"] = None
    late = {**expiring, "_row": {**expiring["_row"], "expires_at": 101}}
    assert dead_for_good(batch([rows["cell"], expiring, late]), TABLE, 100, 200).tolist() == [True, True, False]


@pytest.mark.spark
def test_passes_and_merges(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(1)
    model = some_images(rng, 40, 1)
    write_base(tmp_path, TABLE, table_of(model), rows_per_file=20)
    replica = ReplicaTable(replica_uri(tmp_path, TABLE), TABLE)
    images = 0
    for number in range(1, 5):
        fresh = some_images(rng, 12, number + 1)
        fresh |= some_images(rng, 6, number + 1, dead_at=NOW - 2 * GRACE * (number % 2))
        write_pass(tmp_path, TABLE, table_of(fresh), number)
        model |= fresh
        images += len(fresh)
        look_up(tmp_path, model, rng)
        look_through(tmp_path, model, rng)
    seen = state_of(tmp_path, TABLE)
    assert shown(replica.images_at(spark, seen).toArrow()) == expected(model.values())

    fifth = some_images(rng, 10, 6)
    write_pass(tmp_path, TABLE, table_of(fifth), 5)  # while the merge runs
    grace = {"now_s": NOW, "dead_kept_s": GRACE, "properties": {"run_id": "m"}}
    result = merge_changes(spark, LocalStore(tmp_path), replica, seen, **grace)
    gone = {k for k, row in model.items() if row["_merge"] and row["_merge"]["deletion_local"] < NOW - GRACE}
    assert gone
    assert (result.read, result.merged_pass) == (images, 4)
    assert result.read == result.updated + result.inserted + result.deleted + result.never_there + result.superseded
    assert result.deleted + result.never_there == len(gone)
    model = {k: row for k, row in model.items() if k not in gone} | fifth
    for _ in range(10):
        look_up(tmp_path, model, rng)
        look_through(tmp_path, model, rng)
    # Killed before it had deleted them, and started again.
    seen = replace(seen, base_version=state_of(tmp_path, TABLE).base_version)
    again = merge_changes(spark, LocalStore(tmp_path), replica, seen, **grace)
    assert (again.read, again.inserted, again.deleted) == (result.read, 0, 0)
    assert state_of(tmp_path, TABLE).changed_rows == len(fifth)
    assert tidy(spark, LocalStore(tmp_path), replica, {})
    assert shown(replica.read_images(spark).toArrow()) == expected(model.values())
    write_pass(tmp_path, TABLE, table_of(fifth), 6)
    for _ in range(5):
        look_up(tmp_path, model, rng)


@pytest.mark.spark
def test_the_view_and_a_repair_see_changes(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(5)
    old, new = some_images(rng, 20, 1), some_images(rng, 8, 2)
    write_base(tmp_path, TABLE, table_of(old))
    write_pass(tmp_path, TABLE, table_of(new), 1)
    replica = ReplicaTable(replica_uri(tmp_path, TABLE), TABLE)
    register_live_view(spark, replica.uri, TABLE, "orders_live")
    rows = {k: row for k, row in (old | new).items() if row["C"] is not None}
    with_rows = {partition_of(row) for row in rows.values()}
    rows |= {k: row for k, row in (old | new).items() if partition_of(row) not in with_rows}
    shown_rows = spark.table("orders_live").select("token", "p", "C", "m", "s", "v").toArrow()
    wanted = batch(rows.values()).select(shown_rows.column_names)
    assert sorted(map(repr, shown_rows.to_pylist())) == sorted(map(repr, wanted.to_pylist()))
    # What a repair has put into the base is not hidden by older changes; newer ones stay.
    later = some_images(rng, 3, 3)
    write_pass(tmp_path, TABLE, table_of(later), 2)
    mended = {k: row for k, row in old.items() if row["token"] == 0}
    replica.replace_ranges(spark.createDataFrame(table_of(mended)), [(-1, 0)], properties={})
    replica.forget_changes(spark, [(-1, 0)], 1)
    rest = {k: row for k, row in (old | new).items() if row["token"] != 0}
    assert shown(replica.read_images(spark).toArrow()) == expected((rest | mended | later).values())


def test_when_a_merge_is_due(tmp_path: Path) -> None:
    rng = random.Random(2)
    base, fresh = some_images(rng, 30, 1), some_images(rng, 3, 2)
    write_base(tmp_path, TABLE, table_of(base))
    assert not due(state_of(tmp_path, TABLE), NOW_MS * 2, interval_s=1, rows_fraction=0.01)
    write_pass(tmp_path, TABLE, table_of(fresh), 1)
    state = state_of(tmp_path, TABLE)
    assert due(state, NOW_MS, interval_s=60, rows_fraction=0.01)
    assert not due(state, NOW_MS + 59_000, interval_s=60, rows_fraction=0.5)
    assert due(state, NOW_MS + 60_000, interval_s=60, rows_fraction=0.5)
