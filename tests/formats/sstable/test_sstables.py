"""Tests of merged token ranges: together they are the whole table, and what is lost is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import Part, SSTable, merged_rows, open_sstable
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.schema.table import TableSchema
from tests.formats.sstable.files import sources, sources_of, table_of

NAMES = ("4.1-nb", "5.0-oa", "5.0-da")
Rows = Counter[tuple[object, ...]]


def content(sstables: Sequence[SSTable], table: TableSchema, wanted: TokenRange, lost: list[Loss]) -> Rows:
    """Return what is in a token range: key, kind, clustering, range end and digest of each merged row."""
    found: Rows = Counter()
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(wanted)]
    for part in merged_rows(parts, table, lost.append):
        for row in part.rows.to_arrow().to_pylist():
            names = ("token", "partition_key", "kind", "clustering", "range_end", "write_time", "digest")
            found[tuple(row[name] for name in names)] += 1
            assert row["token"] in wanted
    return found


def tables_of(name: str) -> set[str]:
    return {f"{source.descriptor.keyspace}.{source.descriptor.table}" for source in sources(name)}


@pytest.mark.parametrize("name", NAMES)
def test_ranges_are_the_whole(name: str) -> None:
    compared = 0
    for full_name in sorted(tables_of(name)):
        found = sources_of(name, full_name, "flushed")
        if not found:
            continue
        table = table_of(found[0].descriptor)
        sstables = [open_sstable(source, table) for source in found]
        lost: list[Loss] = []
        whole = content(sstables, table, WHOLE_RING, lost)
        cut = [content(sstables, table, part, lost) for part in TokenRange(7, 7).split(5)]
        assert sum(cut, Counter()) == whole
        assert not lost
        compared += len(whole)
    assert compared > 1000


def largest(name: str) -> tuple[LocalSource, SSTable, Partitions]:
    """The SSTable that has most partitions, and where all of these are."""

    def every(source: LocalSource) -> Partitions:
        return read_partitions(source, DataFile(source).length, step_bytes=1)

    source = max(sources(name), key=lambda one: len(every(one)))
    return source, open_sstable(source, table_of(source.descriptor)), every(source)


@pytest.mark.parametrize("name", NAMES)
def test_ranges_are_found_by_some_of_the_partitions(name: str) -> None:
    source, exact, every = largest(name)
    table = table_of(source.descriptor)
    coarse = open_sstable(source, table)
    some = read_partitions(source, every.length, step_bytes=every.length // 20)
    exact.__dict__["partitions"], coarse.__dict__["partitions"] = lambda: every, lambda: some
    assert len(every) > 500
    assert len(some) <= 21
    for part in TokenRange(5, 5).split(50):
        lost: list[Loss] = []
        assert content([coarse], table, part, lost) == content([exact], table, part, lost)
        assert not lost


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plain", [False, True])
def test_only_the_ranges_that_count_are_read(name: str, plain: bool) -> None:
    """As of a node that has not cleaned up what it has given away: one part, and what lies between them is left."""
    for source in sources_of(name, "files.narrow", "compacted"):
        table = table_of(source.descriptor)
        opened = open_sstable(source, table)
        whole = read_partitions(source, DataFile(source).length, step_bytes=1)
        only = tuple(
            TokenRange(low - 1, high)
            for low, high in zip(whole.lowest[5:-9:7].tolist(), whole.highest[9::7].tolist(), strict=False)
        )
        part = Part(TokenRange(only[0].start, only[-1].end), 0, whole.length, only)
        merged = merged_rows([(opened, part)], table, _fail, with_source=not plain)
        rows = [token for some in merged for token in some.rows.token.tolist()]
        read = (batch for one in opened.parts(WHOLE_RING) for batch in opened.rows(one))
        every = [token for batch in read for token in batch.rows["token"].to_pylist()]
        assert rows == [token for token in every if any(token in one for one in only)]
        assert 0 < len(rows) < len(every)


def _fail(loss: Loss) -> None:
    raise AssertionError(loss)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("end", ["first", "last"])
def test_an_index_that_lies_is_found_out(plain: bool, end: str) -> None:
    source, sstable, true = largest("5.0-oa")
    table = table_of(source.descriptor)
    number = len(true) // 2
    wanted = TokenRange(int(true.lowest[number]) - 1, int(true.lowest[number + 3]))
    first, last = int(true.positions[number]), int(true.positions[number + 4])
    later, before = int(true.positions[number + 1]), int(true.positions[number + 3])
    part = Part(wanted, later, last) if end == "first" else Part(wanted, first, before)
    with pytest.raises(SSTableError, match="by the index"):
        list(merged_rows([(sstable, part)], table, _fail, with_source=not plain))


@dataclass(frozen=True)
class Damaged:
    """A source whose Data.db has one other byte."""

    whole: LocalSource
    place: int

    @property
    def descriptor(self):  # type: ignore[no-untyped-def]
        return self.whole.descriptor

    def read(self, component: str) -> bytes | None:
        return self.whole.read(component)

    def size(self, component: str) -> int | None:
        return self.whole.size(component)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        content = bytearray(self.whole.read_range(component, start, length))
        if component == "Data.db" and start <= self.place < start + len(content):
            content[self.place - start] ^= 0x10
        return bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_partitions_of_a_damaged_chunk_are_lost(name: str) -> None:
    partial = 0
    for source in sources(name):
        if not source.descriptor.folder.endswith("/compacted"):
            continue
        size = source.size("Data.db") or 0
        table = table_of(source.descriptor)
        whole = content([open_sstable(source, table)], table, WHOLE_RING, [])
        damaged = open_sstable(Damaged(source, size // 2), table)
        lost: list[Loss] = []
        left = content([damaged], table, WHOLE_RING, lost)
        assert lost, source.descriptor
        assert all("Data.db" in loss.file and loss.length > 0 for loss in lost)
        # A range that is cut at the loss has another end.
        rows = {key: count for key, count in left.items() if key[2] != 3}
        assert not Counter(rows) - whole
        partial += 0 < len(left) < len(whole)
    assert partial
