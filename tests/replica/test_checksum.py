"""The canonical form and the checksums: exact, the same under any order and partitioning."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ringsync.images.digests import canonical, row_digests
from ringsync.replica.checksum import CHECKSUM_FIELDS
from ringsync.replica.view import live
from tests.replica.bases import checksums_of
from tests.replica.test_compare import BOUNDARIES, NOW, TABLE, frame, image


def digests(*columns: pa.Array) -> list[tuple[int, int]]:
    batch = pa.record_batch(list(columns), names=[f"c{i}" for i in range(len(columns))])
    return list(zip(*(half.tolist() for half in row_digests(batch)), strict=True))


def test_nulls_are_marked_by_position() -> None:
    one, none = pa.array([1], pa.int32()), pa.array([None], pa.int32())
    assert len({*digests(one, none), *digests(none, one), *digests(none, none), *digests(one, one)}) == 4


def test_null_and_empty_differ_at_every_level() -> None:
    kind = pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int32()))]))
    values = pa.array([None, [], [None], [{"m": None}], [{"m": []}], [{"m": [("", None)]}]], kind)
    assert len(set(digests(values))) == len(values)
    assert digests(values)[2:] == digests(values[2:])


def test_floats_are_compared_by_bits_but_all_nans_are_one() -> None:
    other_nan = np.frombuffer(struct.pack("<2Q", 0x7FF8000000000001, 0xFFF0000000000001), np.float64)
    values = pa.array([np.nan, *other_nan, 0.0, -0.0, 1.0], pa.float64())
    found = digests(values)
    assert len(set(found[:3])) == 1
    assert len(set(found)) == 4
    nested = pa.array([[np.nan, None], [-0.0]], pa.list_(pa.float32()))
    assert canonical(nested).to_pylist() == [[0x7FC00000, None], [-(2**31)]]


@pytest.mark.spark
def test_order_and_partitioning_do_not_matter(spark: SparkSession) -> None:
    rows = [image(number) for number in range(60)]
    shuffled = frame(spark, rows[::-1]).repartition(5)
    first, second = (checksums_of(live(f, TABLE, NOW), TABLE, BOUNDARIES) for f in (frame(spark, rows), shuffled))
    assert first.equals(second)
    assert first.column_names == ["range", *CHECKSUM_FIELDS]
    assert first["rows"].to_pylist() == [1, *[10] * 5, 9, 0, 0, 0, 0]
    assert first["cells"][0].as_py() == 11


@pytest.mark.spark
def test_rows_outside_the_boundaries_do_not_count(spark: SparkSession) -> None:
    rows = live(frame(spark, [image(number) for number in range(60)]), TABLE, NOW)
    assert checksums_of(rows, TABLE, [100, 200, 300])["rows"].to_pylist() == [10, 10]
    with pytest.raises(ValueError, match="rising"):
        checksums_of(rows, TABLE, [5, 5])
