"""Rows of a replica are told apart as Cassandra does: clusterings by their type, partition keys by their bytes."""

from __future__ import annotations

import decimal
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ringsync.changes.keys.canonical import canonical_column
from ringsync.changes.reconcile.rows import merge
from ringsync.cql.types import CqlType, MapType, Native, SetType, TupleType, parse_type
from ringsync.images.keys import key_columns_sql, key_digests, partition_digests
from ringsync.images.live import shown_rows
from ringsync.images.schema import row_image_schema
from ringsync.images.to_changes import change_rows_of
from ringsync.replica.checksum import CHECKSUM_FIELDS, check_boundaries, partial_checksums, sum_up
from ringsync.replica.lookup import images_between, previous_images
from ringsync.replica.merge import merge_changes
from ringsync.replica.table import ReplicaTable
from ringsync.schema.table import Column, TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import replica_uri, state_of, write_base, write_pass
from tests.replica.compared import Compared, compared_at_once

DECIMAL, INT, TEXT = Native("decimal"), Native("int"), Native("text")
NOW = 1_000
EDGES = [-(2**63), 0, 2**63 - 1]
TABLE = TableSchema(
    "shop",
    "prices",
    "0" * 32,
    (
        Column("p", "partition_key", DECIMAL),
        Column("c", "clustering", DECIMAL),
        Column("t", "clustering", TupleType((parse_type("frozen<set<decimal>>", {}), TEXT))),
        Column("m", "regular", MapType(DECIMAL, INT)),
        Column("s", "regular", SetType(DECIMAL)),
        Column("v", "regular", INT),
    ),
)


def image(p: str, c: str, inner: str, element: str, v: int = 1, token: int = 7) -> dict[str, Any]:
    """A row with this spelling of its keys, and of an element and a key of its collections."""
    times = {"writetime": 900, "expires_at": None, "deleted_at": None, "live": 900}
    key = {"token": token, "p": p, "c": c, "t": {"field_1": [inner], "field_2": "x"}}
    return {**key, "m": [(element, 5)], "s": [element], "v": v, "_row": times}


def images(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=row_image_schema(TABLE))


SPELLINGS = [image("1.0", *rest) for rest in itertools.product(("2.0", "2", "2.00"), ("30", "3E+1"), ("4", "4.0"))]
OTHERS = [
    image("1.00", "2.0", "30", "4"),
    image("1.0", "2.01", "30", "4"),
    image("1.0", "-2.0", "30", "4"),
    image("1.0", "2.0", "3", "4"),
    image("1.0", "2.0", "30", "4", token=8),
]


def test_spellings_of_a_clustering_are_one_key() -> None:
    assert len(set(key_digests(images(*SPELLINGS), TABLE).to_pylist())) == 1
    assert len(set(key_digests(images(SPELLINGS[0], *OTHERS), TABLE).to_pylist())) == 1 + len(OTHERS)
    # Partitions 1.0 and 1.00 are two, with a token each.
    assert len(set(partition_digests(images(SPELLINGS[0], OTHERS[0]), TABLE).to_pylist())) == 2


def test_what_is_one_key_is_one_row_of_the_merge() -> None:
    every = images(*SPELLINGS, *OTHERS)
    merged = merge(change_rows_of(every, TABLE), TABLE)
    assert len(merged) == 1 + len(OTHERS)
    cells = merged.to_arrow()["cells"].to_pylist()
    assert [sorted(cell["column"] for cell in row) for row in cells] == [[0, 1, 2]] * len(cells)


def sums(*rows: dict[str, Any]) -> list[Any]:
    edges = check_boundaries(EDGES)
    found = sum_up(
        pa.Table.from_batches([partial_checksums(shown_rows([images(*rows)], TABLE, NOW), TABLE, edges)]), edges
    )
    return [found[name].to_pylist() for name in CHECKSUM_FIELDS]


def test_checksums_do_not_depend_on_the_spelling_of_keys() -> None:
    first = sums(SPELLINGS[0])
    assert all(sums(row) == first for row in SPELLINGS)
    for row in (*OTHERS, image("1.0", "2.0", "30", "5"), image("1.0", "2.0", "30", "4", v=2)):
        assert sums(row) != first


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A replica whose base has the row as 2.0, and a later pass as 2.00, and two rows that only look like it."""
    write_base(tmp_path, TABLE, pa.Table.from_batches([images(image("1.0", "2.0", "30", "4"), *OTHERS[1:3])]))
    write_pass(tmp_path, TABLE, pa.Table.from_batches([images(image("1.0", "2", "3E+1", "4.0", v=2))]), 1)
    write_pass(tmp_path, TABLE, pa.Table.from_batches([images(image("1.0", "2.00", "30", "4.00", v=3))]), 2)
    return tmp_path


def test_a_row_is_found_under_any_spelling(store: Path) -> None:
    for row in SPELLINGS:
        found = previous_images(state_of(store, TABLE), TABLE, images(row))
        assert [(one["c"], one["v"]) for one in found.to_pylist()] == [("2.00", 3)]
    assert previous_images(state_of(store, TABLE), TABLE, images(OTHERS[3])).num_rows == 0
    every = [row for batch in images_between(state_of(store, TABLE), TABLE, 0, 100) for row in batch.to_pylist()]
    assert sorted((row["c"], row["v"]) for row in every) == [("-2.0", 1), ("2.00", 3), ("2.01", 1)]


@pytest.mark.spark
def test_spark_knows_one_row_by_all_its_spellings(spark: SparkSession, store: Path) -> None:
    replica = ReplicaTable(replica_uri(store, TABLE), TABLE)
    expected = [("-2.0", 1), ("2.00", 3), ("2.01", 1)]

    def rows() -> list[tuple[str, int]]:
        return sorted((row.c, row.v) for row in replica.read_images(spark).collect())

    assert rows() == expected
    result = merge_changes(
        spark, LocalStore(store), replica, state_of(store, TABLE), now_s=NOW, dead_kept_s=10, properties={}
    )
    assert (result.read, result.superseded, result.updated, result.inserted) == (2, 1, 1, 0)
    assert rows() == expected
    assert replica.read_base(spark).count() == 3


@pytest.mark.spark
def test_verification_passes_over_the_spelling_of_keys(spark: SparkSession) -> None:
    def compared(source: list[dict[str, Any]], replica: list[dict[str, Any]]) -> Compared:
        there, here = (spark.createDataFrame(pa.Table.from_batches([images(*rows)])) for rows in (source, replica))
        return compared_at_once(TABLE, there, here, EDGES, NOW)

    one, other = image("1.0", "2.0", "30", "4"), image("1.0", "2.00", "3E+1", "4.0")
    assert compared([one], [other]).ranges == ()
    found = compared([one, OTHERS[1]], [other, {**OTHERS[1], "v": 7}])
    assert found.rows == {"equal": 1, "different": 1}
    found = compared([one], [{**other, "v": 2}])
    assert [(d.kind, d.column, d.key["c"]) for d in found.differences] == [("value", "v", "2")]


@pytest.mark.spark
def test_spark_takes_those_decimals_for_one_that_are(spark: SparkSession) -> None:
    digits = [0, 1, 10, 100, 1000, 12, 120, 1200, 99, 10**20, 10**40 + 10]
    texts = {
        java_text(sign, number, scale)
        for sign in (0, 1)
        for number in digits
        for scale in (-(2**31), -22, -2, -1, 0, 1, 2, 3, 7, 22, 60, 2**31 - 1)
    }
    types: list[CqlType] = [DECIMAL, parse_type("frozen<map<decimal, double>>", {}), TABLE.clustering[1].type]
    columns = [Column("p", "partition_key", INT), *(Column(f"c{i}", "clustering", one) for i, one in enumerate(types))]
    table = TableSchema("shop", "numbers", "0" * 32, tuple(columns))
    rows = [
        {"token": 1, "p": 1, "c0": text, "c1": [(text, -0.0)], "c2": {"field_1": [text], "field_2": None}}
        for text in sorted(texts)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=row_image_schema(table))
    keys = key_columns_sql(table, "spelled")
    names = ", ".join(f"{key} AS k{i}" for i, key in enumerate(keys))
    spark.createDataFrame(pa.Table.from_batches([batch])).createOrReplaceTempView("spelled")
    lines = spark.sql(
        f"SELECT c0, CAST(struct({', '.join(f'k{i}' for i in range(len(keys)))}) AS string) AS k "
        f"FROM (SELECT *, {names} FROM spelled)"
    ).collect()
    by_spark = {line.c0: line.k for line in lines}
    canonical = dict(zip(batch["c0"].to_pylist(), canonical_column(batch["c0"], DECIMAL).to_pylist(), strict=True))
    assert len(set(canonical.values())) > 100
    pairs = {(canonical[text], by_spark[text]) for text in canonical}
    assert len(pairs) == len(set(canonical.values())) == len(set(by_spark.values()))


def java_text(sign: int, number: int, scale: int) -> str:
    """As BigDecimal.toString writes it, which Python's decimals do, too, as far as their exponents reach."""
    limits = decimal.Context(prec=100, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
    text = limits.create_decimal((sign if number else 0, tuple(map(int, str(number))), -scale))
    return limits.to_sci_string(text)
