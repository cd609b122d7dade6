"""Planted differences: each is found, named and mended; what is equal stays equal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from ringsync.cql.types import ListType, MapType, Native, SetType, UserType
from ringsync.images.differences import Difference
from ringsync.images.judgement import Copy
from ringsync.images.schema import row_image_schema
from ringsync.replica.compare import repair
from ringsync.replica.table import ReplicaTable
from ringsync.schema.table import Column, TableSchema
from tests.replica.bases import replica_uri, write_base
from tests.replica.compared import Compared, compared_at_once

pytestmark = pytest.mark.spark

INT, TEXT = Native("int"), Native("text")
TABLE = TableSchema(
    "shop",
    "orders",
    "3" * 32,
    (
        Column("id", "partition_key", INT),
        Column("at", "clustering", Native("double")),
        Column("a", "regular", INT),
        Column("b", "regular", INT),
        Column("day", "regular", Native("date")),
        Column("l", "regular", ListType(INT)),
        Column("m", "regular", MapType(TEXT, INT)),
        Column("notes", "regular", ListType(TEXT, frozen=True)),
        Column("price", "regular", Native("double")),
        Column("tags", "regular", SetType(TEXT)),
        Column("u", "regular", UserType("shop", "pair", ("a", "b"), (INT, TEXT))),
    ),
)
NOW, WRITTEN = 1000, 5_000_000
BOUNDARIES = [-(2**63), *range(0, 1000, 100), 2**63 - 1]
Row = dict[str, Any]


def image(number: int) -> Row:
    """The row image with this number: its token is ``10 * number``."""
    unknown: dict[str, Any] = {"d": None, "e": None, "raw": None}
    x: Row = {c.name: {"raw": None} if c.is_key else dict(unknown) for c in TABLE.columns}
    x["a"] |= {"d": 7, "e": 2000}
    x["m"] |= {"d": [0, 1], "e": [-1, 3000]}
    return {
        "token": 10 * number,
        "id": number,
        "at": -0.0 if number % 2 else 0.0,
        "a": number,
        "b": None,
        "day": None,
        "l": [1, 2, 3],
        "m": [("x", 1), ("y", 2)],
        "notes": None if number % 2 else [],
        "price": float("nan"),
        "tags": ["p", "q"],
        "u": {"a": None, "b": "z"},
        "_row": {"writetime": WRITTEN, "expires_at": None, "deleted_at": None, "live": None},
        "_x": x,
    }


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_pylist(rows, schema=row_image_schema(TABLE)))


def compared(spark: SparkSession, source: list[Row], replica: DataFrame, **looks: Any) -> Compared:
    return compared_at_once(TABLE, frame(spark, source), replica, BOUNDARIES, NOW, **looks)


def planted(source: list[Row]) -> tuple[list[Row], dict[tuple[Any, ...], tuple[str | None, str | None]]]:
    """(the replica's rows, what must be found: (kind, id, column, element) → (source, replica))."""
    rows = {row["id"]: copy.deepcopy(row) for row in source}
    del rows[3]
    rows[100] = image(100)
    rows[11]["a"] = 12
    rows[21]["_row"]["writetime"] += 1
    rows[31]["_x"]["a"]["e"] = 2001
    rows[32]["_x"]["m"]["e"] = [-1, -1]
    rows[33]["m"] = [("x", 1), ("y", 3)]
    rows[34]["m"], rows[34]["_x"]["m"] = [("x", 1)], {"d": [0], "e": [-1], "raw": None}
    rows[35]["_x"]["l"]["d"] = [0, -1, 0]
    rows[36]["tags"] = ["p", "r"]
    rows[37]["u"] = {"a": 5, "b": "z"}
    rows[38]["notes"] = None
    rows[39]["a"], rows[39]["b"] = None, 39
    rows[39]["_x"]["a"], rows[39]["_x"]["b"] = rows[39]["_x"]["b"], rows[39]["_x"]["a"]
    rows[40]["price"] = -0.0
    rows[41]["day"], rows[41]["_x"]["day"]["raw"] = None, b"\0\1"
    rows[42]["_x"]["l"] |= {"d": [], "e": []}
    w = WRITTEN
    expected: dict[tuple[Any, ...], tuple[str | None, str | None]] = {
        ("missing", 3, None, None): (None, None),
        ("extra", 100, None, None): (None, None),
        ("value", 11, "a", None): ("11", "12"),
        ("ttl", 31, "a", None): ("2000", "2001"),
        ("ttl", 32, "m", "y"): ("3000", "null"),
        ("value", 33, "m", "y"): ("2", "3"),
        ("value", 34, "m", "y"): ("2", None),
        ("writetime", 35, "l", "1"): (f"{w}", f"{w - 1}"),
        ("value", 36, "tags", "q"): ("q", None),
        ("value", 36, "tags", "r"): (None, "r"),
        ("value", 37, "u", "a"): (None, "5"),
        ("value", 38, "notes", None): ("[]", None),
        ("value", 39, "a", None): ("39", None),
        ("value", 39, "b", None): (None, "39"),
        ("value", 40, "price", None): ("nan", "-0.0"),
        ("value", 41, "day", None): (None, "0x0001"),
        ("writetime", 42, "l", None): (f"[{w}, {w}, {w}]", "null"),
        ("ttl", 42, "l", None): ("[null, null, null]", "null"),
    }
    names = {"a": [7], "m": [0, 1], "l": [0] * 3, "price": [0], "tags": [0, 0], "u": [0]}
    elements: dict[str, list[str | None]] = {
        "m": ["x", "y"],
        "l": ["0", "1", "2"],
        "tags": ["p", "q"],
        "u": ["b"],
    }
    for column, offsets in names.items():
        for element, offset in zip(elements.get(column, [None]), offsets, strict=True):
            expected["writetime", 21, column, element] = (str(w + offset), str(w + offset + 1))
    return list(rows.values()), expected


def by_place(differences: list[Difference]) -> dict[tuple[Any, ...], tuple[str | None, str | None]]:
    return {(d.kind, d.key["id"], d.column, d.element): (d.source, d.replica) for d in differences}


def test_planted_differences_are_named_and_repaired(spark: SparkSession, tmp_path: Path) -> None:
    source = [image(number) for number in range(60)]
    rows, expected = planted(source)
    write_base(tmp_path, TABLE, pa.Table.from_pylist(rows, schema=row_image_schema(TABLE)))
    replica = ReplicaTable(replica_uri(tmp_path, TABLE), TABLE)

    found = compared(spark, source, replica.read_base(spark))
    assert by_place(found.differences) == expected
    assert sum(found.kinds.values()) == len(expected)
    assert found.rows == {"equal": 35, "different": 14, "missing": 1, "extra": 1}

    before = replica.read_base(spark).count()
    result = repair(replica, frame(spark, source), found.ranges, up_to_pass=0, properties={"run_id": "r"})
    assert (before, result.version, replica.read_base(spark).count()) == (60, 1, 60)
    mended = compared(spark, source, replica.read_base(spark))
    assert (mended.ranges, mended.rows, mended.differences) == ((), {}, [])


def test_limits_and_changes_after_the_copy_are_counted(spark: SparkSession) -> None:
    """Of a replica that nobody keeps in step: what was written after it is no difference, unless it is dated ahead."""
    source = [image(number) for number in range(20)]
    replica = copy.deepcopy(source)
    for row in replica[:10]:
        row["a"] += 1
    for number, at in ((0, 20), (1, 1000)):
        source[number]["_x"]["a"]["d"] = at * WRITTEN
    source[19] = {**image(19), "_row": {**image(19)["_row"], "writetime": 20 * WRITTEN}}
    found = compared(spark, source, frame(spark, replica[:19]), limit=4, copy=Copy(10 * WRITTEN, 100 * WRITTEN))
    assert found.rows == {"equal": 9, "different": 9, "changed_after": 2}
    assert found.kinds == {"value": 9, "writetime": 1}
    assert len(found.differences) == 4


def test_a_row_that_is_there_twice_is_extra(spark: SparkSession) -> None:
    source = [image(number) for number in range(5)]
    found = compared(spark, source, frame(spark, [*source, image(2), image(2)]))
    assert found.rows == {"equal": 4, "extra": 2}
    assert [d.key for d in found.differences] == [{"id": 2, "at": "0.0"}] * 2


def test_keys_that_differ_only_in_the_sign_of_zero_are_two_keys(spark: SparkSession) -> None:
    plus, minus = image(2), image(2)
    minus["at"] = -0.0
    found = compared(spark, [plus, minus], frame(spark, [plus]))
    assert [(d.kind, d.key) for d in found.differences] == [("missing", {"id": 2, "at": "-0.0"})]
