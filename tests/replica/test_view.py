"""The live view against a model in plain Python, and rows whose fate can be told by hand."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from ringsync.cql.types import ListType, MapType, Native, SetType, UserType
from ringsync.images.live import shown_rows
from ringsync.images.schema import NO_LIVENESS, row_image_schema
from ringsync.replica.checksum import check_boundaries, partial_checksums, sum_up
from ringsync.replica.view import live, register_live_view
from ringsync.schema.table import Column, TableSchema
from tests.replica.bases import checksums_of, replica_uri, write_base
from tests.replica.view_model import Row, live_rows

pytestmark = pytest.mark.spark

INT, TEXT = Native("int"), Native("text")
TABLE = TableSchema(
    "shop",
    "things",
    "0" * 32,
    (
        Column("p", "partition_key", MapType(INT, TEXT, frozen=True)),
        Column("c", "clustering", INT),
        Column("s", "static", INT),
        Column("sm", "static", MapType(TEXT, INT)),
        Column("f", "regular", ListType(INT, frozen=True)),
        Column("i", "regular", INT),
        Column("l", "regular", ListType(INT)),
        Column("m", "regular", MapType(INT, TEXT)),
        Column("u", "regular", UserType("shop", "pair", ("a", "element"), (INT, TEXT))),
        Column("z", "regular", SetType(TEXT)),
    ),
)
NOW = 10
EXPIRIES = st.sampled_from([-1, 5, NOW, 15])
DIFFERENCES = st.sampled_from([-3, 0, 7])
RAW = st.sampled_from([None] * 9 + [b"\x01"])
ROW = st.fixed_dictionaries(
    {
        "writetime": st.just(1000),
        "expires_at": st.sampled_from([None, 5, NOW, 15]),
        "deleted_at": st.sampled_from([None] * 5 + [900]),
        "live": st.sampled_from([None, None, 800, 1000, NO_LIVENESS]),
    }
)
MERGE = st.none() | st.fixed_dictionaries(
    {"live_expires_at": st.sampled_from([None, 5, 15]), "unseen_at": st.sampled_from([None, None, 900])}
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "s": st.integers(0, 9),
    "sm": st.just([("a", 1), ("b", 2)]),
    "f": st.lists(st.integers(0, 3), max_size=2),
    "i": st.integers(0, 9),
    "l": st.lists(st.integers(0, 9), max_size=4),
    "m": st.lists(st.integers(0, 9), max_size=4, unique=True).map(lambda keys: [(k, f"v{k}") for k in sorted(keys)]),
    "u": st.tuples(st.sampled_from([None, 1]), st.sampled_from([None, "x"])).map(
        lambda fields: {"a": fields[0], "element": fields[1]}
    ),
    "z": st.lists(st.sampled_from("abcd"), max_size=4, unique=True).map(sorted),
}


@st.composite
def column_image(draw: st.DrawFn, column: Column) -> tuple[Any, Row]:
    """(value, entry of ``_x``), every way to write the times included."""
    raw = draw(RAW)
    value = None if raw is not None else draw(st.one_of(st.none(), VALUES[column.name], VALUES[column.name]))
    if not column.is_multicell:
        return value, {"d": draw(st.none() | DIFFERENCES), "e": draw(st.none() | EXPIRIES), "raw": raw}
    if draw(st.integers(0, 4)) == 0:
        return value, {"d": [], "e": [], "raw": raw}  # times unknown
    count = 2 if raw is not None else len(value or [])
    lists = [st.lists(one, min_size=count, max_size=count) for one in (DIFFERENCES, EXPIRIES)]
    # The number of elements of a raw value shows only in its lists of times, so they are always there.
    times = [draw(one if raw is not None else st.none() | one) for one in lists]
    return value, {"d": times[0], "e": times[1], "raw": raw}


@st.composite
def partitions(draw: st.DrawFn) -> list[Row]:
    """The images of one partition; its static columns are the same in each, as absolute times say."""
    statics = {c.name: draw(column_image(c)) for c in TABLE.of_kind("static")}
    images = []
    for clustering in draw(st.sampled_from([[None], [1], [1, 2], [1, 2, 3], [None, 1]])):
        image: Row = {"token": 0, "p": [(1, "k")], "c": clustering, "_row": draw(ROW), "_x": {}, "_merge": draw(MERGE)}
        if clustering is None:
            image["_row"] |= {"deleted_at": None}
        image["_x"] |= {"p": {"raw": None}, "c": {"raw": None}}
        for column in TABLE.value_columns:
            image[column.name], image["_x"][column.name] = (
                statics[column.name] if column.kind == "static" else draw(column_image(column))
            )
            if clustering is None and column.kind == "regular":
                image[column.name], image["_x"][column.name] = None, {"d": None, "e": None, "raw": None}
        if images:  # a static cell has the same times in every row of its partition
            image["_row"] |= {"expires_at": images[0]["_row"]["expires_at"]}
        images.append(image)
    return images


def many_partitions(count: int) -> list[Row]:
    """Hypothesis chooses the partitions; they all go into one DataFrame, since each query costs a second."""
    found: list[list[Row]] = []

    @settings(max_examples=count, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
    @given(partitions())
    def collect(images: list[Row]) -> None:
        found.append(images)

    collect()
    for number, images in enumerate(found):
        for image in images:
            image["token"] = number
    return [image for images in found for image in images]


def canonical(rows: list[Row]) -> list[str]:
    return sorted(repr(sorted((k, sorted(v.items()) if k == "_cells" else v) for k, v in row.items())) for row in rows)


def test_view_agrees_with_the_model(spark: SparkSession) -> None:
    images = many_partitions(120)
    data = pa.Table.from_pylist(images, schema=row_image_schema(TABLE))
    found = live(spark.createDataFrame(data), TABLE, NOW).toArrow()
    expected = live_rows(TABLE, images, NOW)
    assert found.column_names == ["token", *(c.name for c in TABLE.columns), "_cells"]
    assert 50 < len(expected) < len(images)
    assert canonical(found.to_pylist()) == canonical(expected)


def test_rows_read_without_spark_are_those_of_the_view(spark: SparkSession) -> None:
    """Also where a partition has lost all its rows and shows its static cells: rows alone cannot tell that."""
    images = pa.Table.from_pylist(many_partitions(40)[::-1], schema=row_image_schema(TABLE))
    boundaries = [*range(-1, 20), 2**62]
    shown = partial_checksums(shown_rows(images.to_batches(3), TABLE, NOW), TABLE, check_boundaries(boundaries))
    direct = sum_up(pa.Table.from_batches([shown]), check_boundaries(boundaries))
    assert direct == checksums_of(live(spark.createDataFrame(images), TABLE, NOW), TABLE, boundaries)
    assert sum(direct["rows"].to_pylist()) > 10


def test_a_user_view_shows_the_base_as_it_is_now(spark: SparkSession, tmp_path: Path) -> None:
    table = TableSchema("s", "t", "1" * 32, (Column("id", "partition_key", INT), Column("v", "regular", INT)))
    now = int(time.time())
    row = {"token": 1, "id": 1, "v": 1, "_row": {"writetime": 5, "expires_at": now - 1}}
    rows = [row, row | {"id": 2, "_row": {"writetime": 5, "expires_at": now + 3600}}]
    register = partial(register_live_view, spark, replica_uri(tmp_path, table), table, "t_live")
    data = pa.Table.from_pylist(rows, schema=row_image_schema(table))
    write_base(tmp_path, table, data)
    register()
    assert [r.asDict(recursive=True) for r in spark.table("t_live").collect()] == [
        {
            "token": 1,
            "id": 2,
            "v": 1,
            "_cells": {"id": None, "v": {"writetime": 5, "expires_at": now + 3600, "raw": None}},
        }
    ]
