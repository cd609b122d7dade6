"""The model on the committed SSTables of real servers: merged, they are what SELECT said."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.commitlog_model.mutation import Change
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.selected import differences
from tests.commitlog_model.test_fixtures import server_row
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstables.fixtures import FIXTURES, TAGS


def reader(data: Path):
    """Read files beside a Data.db."""

    def read(component: str) -> bytes | None:
        path = data.with_name(data.name.replace("Data.db", component))
        return path.read_bytes() if path.exists() else None

    return read


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_merged_is_what_the_server_selects(name: str, tag: str, tmp_path: Path) -> None:
    fixture = FIXTURES[name]
    selected = fixture.selected
    changes: dict[Path, list[Change]] = defaultdict(list)
    for data in fixture.unpacked(tmp_path).glob(f"*/*/snapshots/{tag}/*-Data.db"):
        table = table_beside(data.parent, data.parts[-4].rpartition("-")[2])
        tokens = []
        for partition in read_sstable(reader(data), table, fixture.sstable_version):
            changes[data.parent] += partition.changes
            tokens += [(change["token"], partition.key) for change in partition.changes[:1]]
        assert tokens == sorted(tokens)
    found = []
    compared = 0
    for folder, its_changes in changes.items():
        table = table_beside(folder, folder.parts[-3].rpartition("-")[2])
        expected = selected["keyspaces"][table.keyspace][table.name]
        merged = rows(replay(its_changes), table, selected["moment"])
        found += differences(table, merged, [server_row(table, row) for row in expected])
        compared += len(expected)
    assert found == []
    everything = [rows for tables in selected["keyspaces"].values() for rows in tables.values()]
    assert compared == sum(map(len, everything)) > 2000
