"""The identity of a schema: two tables whose rows are read alike have one, and no others."""

from __future__ import annotations

from dataclasses import replace

from ringsync.cql.types import Native
from ringsync.schema.table import Column, DroppedColumn, TableSchema

TABLE = TableSchema(
    "shop",
    "t",
    "5" * 32,
    (Column("id", "partition_key", Native("int")), *(Column(one, "regular", Native("text")) for one in "vw")),
)
DIGEST = "164c034049a4173a15e236e12518202bed0d9580112cf7ceb0399be59475a1ae"


def dropped(name: str, at: int) -> DroppedColumn:
    return DroppedColumn(name, "regular", Native("text"), at)


def test_the_digests_that_replicas_and_bootstraps_keep_stay_what_they_are() -> None:
    assert TABLE.digest == DIGEST
    assert replace(TABLE, dropped=(dropped("u", 1), dropped("x", 2))).digest == DIGEST


def test_a_column_that_was_dropped_and_added_again_is_another_one() -> None:
    """What was written to the first one is gone, though name and type are the same."""
    found = {replace(TABLE, dropped=gone).digest for gone in ((), (dropped("v", 1),), (dropped("v", 2),))}
    found |= {replace(TABLE, dropped=(dropped("w", 1),)).digest, TABLE.only(["v"]).digest}
    assert len(found) == 5
    again = replace(TABLE, dropped=(dropped("v", 1),))
    assert replace(again, dropped=(dropped("u", 3), *again.dropped)).digest == again.digest
    assert again.only(["v"]).digest != TABLE.only(["v"]).digest
    assert again.only(["w"]).digest == TABLE.only(["w"]).digest, "who reads only others reads the same"
