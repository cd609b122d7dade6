"""Tests with SSTables that were made for them: window ends, many streams, partitions without rows."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import date
from typing import Any

import pytest

from ringsync.changes.reconcile.streams import MergedPart, Stream, merge_streams
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.sstables import SSTable, capacity_of, merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import TableSchema
from tests.formats.sstable.maker import TABLE_ID, int32, partition, row, sized, sstable, statistics, table_of, uvint

WITH_ID = f") WITH ID = {TABLE_ID[:8]}-{TABLE_ID[8:12]}-{TABLE_ID[12:16]}-{TABLE_ID[16:20]}-{TABLE_ID[20:]}"


def wide_table() -> TableSchema:
    return table_of(f"p int, c text, v text, PRIMARY KEY (p, c){WITH_ID}")


def wide_sstable(chance: random.Random, mean: float, number: int = 1, rows: int = 4000) -> SSTable:
    partitions = {}
    for key in range(6):
        lengths = [max(0, int(chance.gauss(mean, 15))) for _ in range(rows)]
        content = [row(b"\0" + sized(b"%080d" % at), [sized(b"x" * size)], 5) for at, size in enumerate(lengths)]
        partitions[int32(key)] = partition(int32(key), content)
    stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
    return open_sstable(sstable(partitions, stats, number), wide_table())


def test_a_batch_that_is_full_shortly_before_the_end_of_a_window_loses_nothing() -> None:
    size, rows = 2**19, 9000
    for longer in range(0, 40):
        # Two full batches of rows are about as long as the window: with some of these lengths less than a row is left.
        content = [
            row(b"\0" + sized(b"%080d" % at), [sized(b"x" * (40 + (at % 100 < longer)))], 5) for at in range(rows)
        ]
        stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
        made = open_sstable(sstable({int32(1): partition(int32(1), content)}, stats), wide_table())
        (part,) = made.parts(WHOLE_RING)
        batches = list(made.rows(part, capacity_of(size)))
        assert [loss for batch in batches for loss in batch.losses] == []
        assert sum(len(batch.rows) for batch in batches) == rows


def test_many_sstables_are_merged_in_large_steps() -> None:
    sstables = [wide_sstable(random.Random(number), 30, number, rows=1500) for number in range(12)]
    parts = [(one, part) for one in sstables for part in one.parts(WHOLE_RING)]
    lost: list[Loss] = []
    merged = list(merged_rows(parts, wide_table(), lost.append, memory_bytes=12 * 2**20))
    assert sum(len(part.rows) for part in merged) == 6 * 1500
    batches = sum(1 for one, part in parts for _ in one.rows(part, capacity_of(2**18)))
    assert len(merged) < batches / 3
    assert not lost


def pairs_table() -> TableSchema:
    return table_of(f"p int PRIMARY KEY, v int{WITH_ID}")


def pairs(partitions: dict[int, tuple[int | None, int | None]], number: int) -> SSTable:
    """Make an SSTable; each partition has a time of its deletion, and a time of its row."""
    content = {
        int32(key): partition(int32(key), [] if written is None else [row(b"", [int32(key)], written)], deleted)
        for key, (deleted, written) in partitions.items()
    }
    stats = statistics("Int32Type", [], [("v", "Int32Type")])
    return open_sstable(sstable(content, stats, number), pairs_table())


@pytest.mark.parametrize("seed", range(6))
def test_a_table_without_clustering_has_one_image_of_each_key(seed: int) -> None:
    chance = random.Random(seed)
    found: list[SSTable] = []
    for number in range(3):
        keys = chance.sample(range(60), 30)
        choices = [(None, 1_442_880_000_000_020), (1_442_880_000_000_010, None), (1_442_880_000_000_030, 5)]
        found.append(pairs({key: chance.choice(choices) for key in keys}, number))

    def cut(sstable: SSTable, size: int) -> Stream:
        batches = [batch.rows for part in sstable.parts(WHOLE_RING) for batch in sstable.rows(part)]
        slices = [batch.slice(at, size) for batch in batches for at in range(0, len(batch), size)]
        return Stream(-(2**63), lambda: iter(slices))

    def images(streams: list[Stream]) -> Counter[str]:
        parts: list[MergedPart] = list(merge_streams(streams, pairs_table()))
        rows: list[dict[str, Any]] = [
            one for part in parts for one in images_of_part(part, pairs_table(), "raw").to_pylist()
        ]
        keys = Counter(one["p"] for one in rows)
        assert max(keys.values()) == 1
        return Counter(map(repr, rows))

    whole = images([cut(one, 1000) for one in found])
    for size in (1, 2, 3):
        assert images([cut(one, size + number) for number, one in enumerate(found)]) == whole


@pytest.mark.parametrize("with_source", [True, False])
def test_rows_that_are_not_in_their_order_are_named_or_merged_right(with_source: bool) -> None:
    """No check of a file finds them. Whatever is read side by side: no row comes out twice, or too early."""
    refused = [_is_refused(random.Random(seed), with_source) for seed in range(25)]
    assert sum(refused) > 5


def _is_refused(chance: random.Random, with_source: bool) -> bool:
    stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])

    def made(number: int, swapped: bool) -> SSTable:
        partitions = {}
        for key in range(4):
            rows = [row(b"\0" + sized(b"%020d" % at), [sized(b"x" * 300)], number) for at in range(900)]
            if swapped and key == 2:
                one, other = (chance.randrange(len(rows)) for _ in range(2))
                rows[one], rows[other] = rows[other], rows[one]
            partitions[int32(key)] = partition(int32(key), rows)
        return open_sstable(sstable(partitions, stats, number, "/folder"), wide_table())

    sstables = [made(1, swapped=True), made(2, swapped=False), made(3, swapped=False)]
    parts = [(one, part) for one in sstables for part in one.parts(WHOLE_RING)]
    found: list[tuple[int, bytes | None]] = []
    problem = ""
    try:
        for merged in merged_rows(parts, wide_table(), lost_none, memory_bytes=2**20, with_source=with_source):
            rows = merged.rows
            found += [(int(rows.token[at]), rows.clustering.value(at)) for at in range(len(rows))]
    except SSTableError as error:
        problem = str(error)
    assert not problem or re.match(
        r"/folder/nb-1-big-Data.db: the row at [\d,]+ \(uncompressed\), of token -?\d+, is not in its order; "
        "the file is damaged or was cut off: take",
        problem,
    )
    assert bool(problem) == (len(found) < 4 * 900)
    assert len(set(found)) == len(found)
    assert found == sorted(found)
    return bool(problem)


def lost_none(loss: Loss) -> None:
    raise AssertionError(loss)


def losses(made: SSTable) -> list[Loss]:
    (part,) = made.parts(WHOLE_RING)
    plain = [loss for batch in made.plain_rows(part) for loss in batch.losses]
    assert plain == [loss for batch in made.rows(part) for loss in batch.losses]
    return plain


def test_a_partition_without_its_end_is_told() -> None:
    """The file may have been cut off behind any of its rows."""
    content = partition(int32(1), [row(b"\0" + sized(b"c"), [sized(b"x")], 5)])
    stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
    assert losses(open_sstable(sstable({int32(1): content}, stats), wide_table())) == []
    (lost,) = losses(open_sstable(sstable({int32(1): content[:-1]}, stats), wide_table()))
    assert (lost.position, lost.length) == (len(content) - 1, 1)
    assert "has no end" in lost.reason


@pytest.mark.parametrize("ttl", [1, 2**31 - 1, 2**31, 2**32 + 1, 2**63])
@pytest.mark.parametrize("of_row", [True, False])
def test_a_ttl_that_cassandra_cannot_have_written_is_a_loss(ttl: int, of_row: bool) -> None:
    times = uvint(ttl) + uvint(100)
    if of_row:
        flags, body = b"\x2c", uvint(0) + uvint(5) + times + b"\x1a" + sized(b"x")
    else:  # of the cell, which has the expiry before the TTL
        flags, body = b"\x24", uvint(0) + uvint(5) + b"\x0a" + uvint(100) + uvint(ttl) + sized(b"x")
    content = flags + b"\0" + sized(b"c") + uvint(len(body)) + body
    stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
    made = open_sstable(sstable({int32(1): partition(int32(1), [content])}, stats), wide_table())
    assert len(losses(made)) == (ttl >= 2**31)


@pytest.mark.parametrize(
    ("before", "stored", "now", "value"),
    [
        ("LongType", (7).to_bytes(8, "big"), "timestamp", 7_000),  # µs
        ("TimestampType", (7).to_bytes(8, "big"), "bigint", 7),
        ("LongType", (7).to_bytes(8, "big"), "time", 7),
        ("TimestampType", (7).to_bytes(8, "big"), "varint", None),  # more bytes than 7 needs: they are kept raw
        ("Int32Type", int32(-(2**31) + 7), "date", date(1970, 1, 8)),
        ("Int32Type", int32(7), "blob", int32(7)),
        ("UUIDType", bytes(16), "blob", bytes(16)),
        ("AsciiType", sized(b"a"), "text", "a"),
    ],
)
def test_a_column_that_was_dropped_and_added_with_another_type_is_read(
    before: str, stored: bytes, now: str, value: object
) -> None:
    """All that Cassandra allows (C: AlterTableStatement.AddColumns): an older SSTable still has the type of before."""
    stats = statistics("Int32Type", ["UTF8Type"], [("v", before)])
    content = partition(int32(1), [row(b"\0" + sized(b"c"), [stored], 5)])
    table = table_of(f"p int, c text, v {now}, PRIMARY KEY (p, c){WITH_ID}")
    made = open_sstable(sstable({int32(1): content}, stats), table)
    for with_source in (False, True):
        (part,) = merged_rows([(made, part) for part in made.parts(WHOLE_RING)], table, _fail, with_source=with_source)
        images = images_of_part(part, table, "raw")
        found = images.column(images.schema.get_field_index("v"))
        assert (found.cast("int64") if now in ("timestamp", "time") else found).to_pylist() == [value]


def _fail(loss: Loss) -> None:
    raise AssertionError(loss)


@pytest.mark.parametrize(("own", "table"), [("Int32Type", "blob"), ("LongType", "varint"), ("LongType", "time")])
def test_a_key_of_another_length_is_refused(own: str, table: str) -> None:
    """Columns of the key are never dropped: the reader lays them out by the table's type."""
    stats = statistics("Int32Type", [own], [("v", "UTF8Type")])
    with pytest.raises(SSTableError, match="has the clustering"):
        open_sstable(
            sstable({int32(1): partition(int32(1), [])}, stats),
            table_of(f"p int, c {table}, v text, PRIMARY KEY (p, c){WITH_ID}"),
        )
