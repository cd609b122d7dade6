"""How SSTables are divided over tasks: by the same tokens of all, and with little memory however many there are."""

from __future__ import annotations

import gc
import weakref
from itertools import combinations

import pytest

from ringsync.formats.sstable.partitions import Partitions
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import SSTable, open_sstable
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, WHOLE_RING, TokenRange, intersection, union
from ringsync.schema.table import TableSchema
from ringsync.sources import sstable_files
from ringsync.sources.sstable_files import Opener, SSTableSplit, merged_split, outlined, split_groups, split_tables
from tests.formats.sstable.files import sources_of, table_of, unpacked


@pytest.fixture(params=["5.0-nb", "5.0-da"])
def sstables(request: pytest.FixtureRequest) -> list[SSTable]:
    """The SSTables of the table of a real server that has most partitions."""
    folder = unpacked(request.param)
    names = {f"{one.parts[-4]}.{one.parts[-3][:-33]}" for one in folder.glob("*/*/snapshots/flushed")}
    found = [sources_of(request.param, name, "flushed") for name in sorted(names)]
    opened = [[open_sstable(source, table_of(source.descriptor)) for source in sources] for sources in found]
    return max(opened, key=lambda some: sum(len(one.partitions()) for one in some) if len(some) > 1 else 0)


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


@pytest.mark.parametrize("samples", [1, 3, 4096])
@pytest.mark.parametrize("least", [1, 5, 40])
def test_all_rows_are_read_once_however_little_is_remembered(
    sstables: list[SSTable], samples: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(split_tables(sstables), table(sstables))
    assert len(whole) > 10
    monkeypatch.setattr(sstable_files, "_SAMPLES", samples)
    splits = split_tables(sstables, least)
    assert not any(intersection([one.tokens], [other.tokens]) for one, other in combinations(splits, 2))
    assert rows(splits, table(sstables)) == whole
    if samples == 4096 and least > 1:
        assert len(splits) > 1


def test_each_sstable_is_read_for_its_tokens_only(sstables: list[SSTable]) -> None:
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
            assert len(tasks) == min(least, most or least)
            splits = [split for task in tasks for split in task]
            assert union(split.tokens for split in splits) == WHOLE_RING.unwrap()
            assert splits == sorted(splits, key=lambda split: split.tokens)
            assert len(splits) <= len(ranges) + len(tasks) - 1
            assert set(rows(splits, table(sstables))) == expected


def test_a_task_reads_many_ranges_and_what_is_empty_between_them(sstables: list[SSTable]) -> None:
    whole = rows(split_tables(sstables), table(sstables))
    ranges = [part for number, part in enumerate(TokenRange(MIN_TOKEN, MAX_TOKEN).split(4000)) if number % 2]
    (task,) = split_groups([(outlined(sstables), tuple(ranges))], ranges)
    assert [split.tokens for split in task] == ranges
    assert not all(split.parts for split in task)
    assert rows(list(task), table(sstables)) == [one for one in whole if any(one[0] in part for part in ranges)]


def test_of_many_sstables_little_is_remembered_of_each(
    sstables: list[SSTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sstable_files, "_ALL_SAMPLES", 4 * len(sstables))
    tables = outlined(sstables)
    assert max(len(one.tokens) for one in tables) < 8 <= max(len(one.partitions()) for one in sstables)
    opener = Opener(table(sstables))
    opened = [opener.open(one.source) for one in sstables]
    assert [one.layout.descriptor for one in opened] == [one.source.descriptor for one in sstables]
    assert [one.layout.header for one in opened] == [one.statistics.header for one in sstables]
    columns = {(one.statistics.header.static, one.statistics.header.regular) for one in opened}
    assert len({id(one.layout.tables) for one in opened}) == len(columns) < len(opened)


def test_indexes_are_forgotten(sstables: list[SSTable], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to 24 MB: those of thousands of SSTables do not fit into a driver."""
    read = SSTable.partitions
    indexes: list[weakref.ref[Partitions]] = []

    def watched(one: SSTable) -> Partitions:
        found = read(one)
        indexes.append(weakref.ref(found))
        return found

    monkeypatch.setattr(SSTable, "partitions", watched)
    opened = [open_sstable(one.source, table(sstables)) for one in sstables]
    tables = outlined(opened)
    splits = split_groups([(tables, WHOLE_RING.unwrap())], WHOLE_RING.unwrap(), 5)
    parts = [part for one in opened for part in one.parts(WHOLE_RING)]
    gc.collect()
    assert splits
    assert parts
    assert len(indexes) >= 3 * len(sstables)
    assert not any(one() for one in indexes)
    assert all(one.tokens.base is None and one.positions.base is None for one in tables)
