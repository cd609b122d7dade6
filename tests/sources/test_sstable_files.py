"""How SSTables are divided over tasks: by the same tokens of all, and with little memory however many there are."""

from __future__ import annotations

import gc
import weakref
from itertools import combinations

import pytest

from ringsync.formats.sstable.partitions import Partitions
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import SSTable, open_sstable
from ringsync.ring.tokens import WHOLE_RING, TokenRange, intersection
from ringsync.schema.table import TableSchema
from ringsync.sources import sstable_files
from ringsync.sources.sstable_files import SSTableSplit, merged_split, outlined, split_groups, split_tables
from tests.formats.sstable.files import sources_of, table_of, unpacked


@pytest.fixture(params=["5.0-nb", "5.0-da"])
def sstables(request: pytest.FixtureRequest) -> list[SSTable]:
    """The SSTables of the table of a real server that has most partitions."""
    folder = unpacked(request.param)
    names = {f"{one.parts[-4]}.{one.parts[-3][:-33]}" for one in folder.glob("*/*/snapshots/flushed")}
    found = [sources_of(request.param, name, "flushed") for name in sorted(names)]
    opened = [[open_sstable(source, table_of(source.descriptor)) for source in sources] for sources in found]
    return max(opened, key=lambda some: sum(len(one.partitions) for one in some) if len(some) > 1 else 0)


def table(sstables: list[SSTable]) -> TableSchema:
    return table_of(sstables[0].source.descriptor)


def rows(splits: list[SSTableSplit], table: TableSchema) -> list[tuple[int, bytes]]:
    """Token and clustering of all rows that tasks read."""
    found = []
    for split in splits:
        for part in merged_split(split, table, lambda _, one: LocalSource(one), lambda loss: pytest.fail(str(loss))):
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
    whole = rows(split_tables(sstables, [WHOLE_RING]), table(sstables))
    assert len(whole) > 10
    monkeypatch.setattr(sstable_files, "_SAMPLES", samples)
    splits = split_tables(sstables, [WHOLE_RING], least)
    assert not any(intersection([one.tokens], [other.tokens]) for one, other in combinations(splits, 2))
    assert rows(splits, table(sstables)) == whole
    if samples == 4096 and least > 1:
        assert len(splits) > 1


def test_an_sstable_in_several_groups_is_read_by_each_for_its_tokens(sstables: list[SSTable]) -> None:
    whole = rows(split_tables(sstables, [WHOLE_RING]), table(sstables))
    tables, middle = outlined(sstables), whole[len(whole) // 2][0]
    groups = [(tables, [TokenRange(middle, WHOLE_RING.end)]), (tables[::-1], [TokenRange(WHOLE_RING.start, middle)])]
    splits = split_groups(groups, 3)
    assert rows(splits, table(sstables)) == whole
    assert all(split.tokens.start >= middle or split.tokens.end <= middle for split in splits)


def test_indexes_are_forgotten(sstables: list[SSTable], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to 24 MB: those of thousands of SSTables do not fit into a driver."""
    read = SSTable.__dict__["partitions"].func
    indexes: list[weakref.ref[Partitions]] = []

    def watched(one: SSTable) -> Partitions:
        found = read(one)
        indexes.append(weakref.ref(found))
        return found

    monkeypatch.setattr(SSTable.__dict__["partitions"], "func", watched)
    tables = outlined([open_sstable(one.source, table(sstables)) for one in sstables])
    splits = split_groups([(tables, [WHOLE_RING])], 5)
    gc.collect()
    assert splits
    assert len(indexes) >= len(sstables)
    assert not any(one() for one in indexes)
    assert all(one.tokens.base is None and one.positions.base is None for one in tables)
