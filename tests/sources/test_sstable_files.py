"""How SSTables are divided over tasks: by the same tokens of all, and with little memory however many there are."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import SSTable, open_sstable
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, WHOLE_RING, TokenRange, intersection, union
from ringsync.schema.table import TableSchema
from ringsync.sources import sstable_files
from ringsync.sources.sstable_files import Opener, SSTableSplit, merged_split, outlined, split_groups, split_tables
from tests.formats.sstable.files import sources_of, table_of, unpacked

INDEXES = ("Index.db", "Partitions.db", "Rows.db")


@pytest.fixture(params=["5.0-nb", "5.0-da"])
def sstables(request: pytest.FixtureRequest) -> list[SSTable]:
    """The SSTables of the table of a real server that has most partitions."""
    folder = unpacked(request.param)
    names = {f"{one.parts[-4]}.{one.parts[-3][:-33]}" for one in folder.glob("*/*/snapshots/flushed")}
    found = [sources_of(request.param, name, "flushed") for name in sorted(names)]
    opened = [[open_sstable(source, table_of(source.descriptor)) for source in sources] for sources in found]
    return max(opened, key=lambda some: sum(len(one.partitions()) for one in some) if len(some) > 1 else 0)


@pytest.fixture(params=[None, 2_000, 10**9])
def remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Bytes of each SSTable of which one partition is remembered."""

    def partitions(sstable: SSTable) -> Partitions:
        return read_partitions(sstable.source, DataFile(sstable.source).length, step_bytes=request.param)

    monkeypatch.setattr(SSTable, "partitions", partitions)
    return request.param


def table(sstables: list[SSTable]) -> TableSchema:
    return table_of(sstables[0].source.descriptor)


def rows(splits: list[SSTableSplit], table: TableSchema) -> list[tuple[int, bytes]]:
    """Token and clustering of all rows that tasks read."""
    found = []
    opener = Opener(table)
    for split in splits:
        opened = merged_split(
            split, lambda _, one: opener.open(LocalSource(one)), table, lambda loss: pytest.fail(str(loss))
        )
        for part in opened:
            read = part.rows.to_arrow()
            some = list(zip(read["token"].to_pylist(), read["clustering"].to_pylist(), strict=True))
            assert all(token in split.tokens for token, _ in some)
            found += some
    return sorted(found, key=repr)


@pytest.mark.parametrize("least", [1, 5, 40])
def test_all_rows_are_read_once_however_little_is_remembered(
    sstables: list[SSTable], least: int, remembered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sstable_files, "_SAMPLES", 50)
    whole = rows(split_tables(sstables), table(sstables))
    assert len(whole) > 10
    splits = split_tables(sstables, least)
    assert not any(intersection([one.tokens], [other.tokens]) for one, other in combinations(splits, 2))
    assert rows(splits, table(sstables)) == whole
    if remembered is None and least > 1:
        assert len(splits) > 1


def test_each_sstable_is_read_for_its_tokens_only(sstables: list[SSTable], remembered: int | None) -> None:
    """As the SSTables of nodes are, of which each holds some ranges."""
    whole = rows(split_tables(sstables), table(sstables))
    tables, token = outlined(sstables), [whole[len(whole) * part // 4][0] for part in range(4)]
    every = (TokenRange(WHOLE_RING.start, token[1]), TokenRange(token[1], token[3]), TokenRange(token[3], MAX_TOKEN))
    groups = [(tables[:1], (every[0],)), (tables[1:], every[1:])]
    alone = [rows(split_tables([one]), table(sstables)) for one in sstables]
    expected = {one for one in alone[0] if one[0] in every[0]}
    expected |= {one for some in alone[1:] for one in some if one[0] not in every[0]}
    for ranges in (every, WHOLE_RING.unwrap()):
        for least, most in ((1, None), (3, None), (9, 2)):
            tasks = split_groups(groups, ranges, least, most)
            assert len(tasks) == min(least, most or least) or remembered == 10**9
            splits = [split for task in tasks for split in task]
            assert union(split.tokens for split in splits) == WHOLE_RING.unwrap()
            assert splits == sorted(splits, key=lambda split: split.tokens)
            assert len(splits) <= len(ranges) + len(tasks) - 1
            assert set(rows(splits, table(sstables))) == expected


def test_a_task_reads_many_ranges_and_what_is_empty_between_them(sstables: list[SSTable]) -> None:
    whole = rows(split_tables(sstables), table(sstables))
    ranges = [part for number, part in enumerate(TokenRange(MIN_TOKEN, MAX_TOKEN).split(100)) if number % 2]
    (task,) = split_groups([(outlined(sstables), tuple(ranges))], ranges)
    assert [split.tokens for split in task] == ranges
    assert rows(list(task), table(sstables)) == [one for one in whole if any(one[0] in part for part in ranges)]


def test_sstables_of_the_same_columns_share_what_describes_them(sstables: list[SSTable]) -> None:
    opener = Opener(table(sstables))
    opened = [opener.open(one.source) for one in sstables]
    assert [one.layout.descriptor for one in opened] == [one.source.descriptor for one in sstables]
    assert [one.layout.header for one in opened] == [one.layout.header for one in sstables]
    columns = {(one.layout.header.static, one.layout.header.regular) for one in opened}
    assert len({id(one.layout.tables) for one in opened}) == len(columns) < len(opened)


def test_each_index_is_read_once(sstables: list[SSTable], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver, a window at a time; no task reads any."""
    windows = Counter[str]()
    read_range = LocalSource.read_range

    def counted(self: LocalSource, component: str, start: int, length: int) -> bytes:
        windows[f"{self.descriptor.path(component)} {start}"] += 1
        return read_range(self, component, start, length)

    monkeypatch.setattr(LocalSource, "read_range", counted)
    read: list[str] = []
    monkeypatch.setattr(LocalSource, "read", lambda self, name: read.append(name) or self.read_range(name, 0, 2**30))
    splits = split_tables(sstables, 5)
    indexes = {name: count for name, count in windows.items() if any(one in name for one in INDEXES)}
    assert len(indexes) >= len(sstables)
    assert set(indexes.values()) == {1}
    windows.clear()
    assert rows(splits, table(sstables))
    assert not [name for name in windows if any(one in name for one in INDEXES)]
    assert set(read) == {"Statistics.db"}
