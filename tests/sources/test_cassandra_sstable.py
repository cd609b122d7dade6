"""The data source ``cassandra_sstable`` on what real servers wrote."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.images.live import shown_rows
from ringsync.ring.tokens import WHOLE_RING
from ringsync.sources.cassandra_sstable import CassandraSSTable
from ringsync.sources.sstable_files import choose_table, files_in_folder, files_in_store, split_tables
from ringsync.storage import open_store
from tests.formats.sstable.files import sources_of, table_of, unpacked

pytestmark = pytest.mark.spark

NAME = "5.0-da"


@pytest.fixture(scope="module")
def table_name() -> str:
    """A table with the most SSTables."""
    names = {f"{folder.parts[-4]}.{folder.parts[-3][:-33]}" for folder in unpacked(NAME).glob("*/*/snapshots/flushed")}
    return max(sorted(names), key=lambda name: sum(s.size("Data.db") or 0 for s in sources_of(NAME, name, "flushed")))


@pytest.fixture
def folder(table_name: str) -> Path:
    return Path(sources_of(NAME, table_name, "flushed")[0].descriptor.folder)


@pytest.fixture
def load(spark: Any) -> Callable[..., pa.Table]:
    spark.dataSource.register(CassandraSSTable)

    def rows(folder: Path | str, **options: str) -> pa.Table:
        return spark.read.format("cassandra_sstable").options(**options).load(str(folder)).toArrow()

    return rows


def images(table_name: str) -> list[dict[str, Any]]:
    found = merged_images(sources_of(NAME, table_name, "flushed"))
    return sorted(pa.Table.from_batches(found).to_pylist(), key=repr)


def merged_images(sources: list[LocalSource]) -> list[pa.RecordBatch]:
    table = table_of(sources[0].descriptor)
    sstables = [open_sstable(source, table) for source in sources]
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(WHOLE_RING)]
    return [images_of_part(part, table, "raw") for part in merged_rows(parts, table, lambda loss: None)]


def test_the_table_is_read_from_its_snapshot(load: Callable[..., pa.Table], folder: Path, table_name: str) -> None:
    expected = images(table_name)
    assert len(expected) > 20
    for splits in ("1", "3"):
        found = load(folder, splits=splits, memory="16")
        assert sorted(found.to_pylist(), key=repr) == expected


def test_columns_of_changes_are_chosen(load: Callable[..., pa.Table], folder: Path, table_name: str) -> None:
    table = table_of(sources_of(NAME, table_name, "flushed")[0].descriptor)
    chosen = [column.name for column in table.of_kind("regular")][:1]
    found = load(folder, columns=",".join(chosen), rows="changes").to_pylist()
    assert {cell["column"] for row in found for cell in row["cells"]} == {0}
    assert any(row["cells"] for row in found)
    with pytest.raises(Exception, match="has no column nothing"):
        load(folder, columns="nothing", rows="changes")
    with pytest.raises(Exception, match="images need all columns"):
        load(folder, columns=chosen[0])


def test_changes_keep_what_a_select_cannot_show(load: Callable[..., pa.Table], folder: Path) -> None:
    found = load(folder, rows="changes")
    assert {"cells", "deletion", "complex_deletions"} <= set(found.schema.names)
    assert len(found) > 20


def test_values_are_what_a_select_shows(load: Callable[..., pa.Table]) -> None:
    sources = sources_of(NAME, "shop.orders", "flushed")
    table = table_of(sources[0].descriptor)
    found = load(Path(sources[0].descriptor.folder), rows="values", splits="3")
    shown = pa.Table.from_batches(list(shown_rows(merged_images(sources), table, int(time.time()))))
    alike = shown.select(found.schema.names).to_pylist()
    assert sorted(found.to_pylist(), key=repr) == sorted(alike, key=repr)
    assert len(alike) > 10


def test_what_is_wrong_is_said(load: Callable[..., pa.Table], folder: Path, tmp_path: Path) -> None:
    for options, told in (
        ({"row": "images"}, "did you mean rows"),
        ({"rows": "all"}, "rows of cassandra_sstable is images or changes or values"),
        ({"memory": "0"}, "memory of cassandra_sstable is a number from 1 on"),
        ({"table": "shop.nothing"}, "no SSTables of shop.nothing"),
    ):
        with pytest.raises(Exception, match=told):
            load(folder, **options)
    with pytest.raises(Exception, match="there is no"):
        load(tmp_path / "nothing")
    with pytest.raises(Exception, match="several tables"):
        load(folder.parents[2])


def test_a_damaged_sstable_fails_or_is_skipped(load: Callable[..., pa.Table], folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = max(copy.glob("*-Data.db"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(Exception, match=f"{data.name}.*damage=skip"):
        load(copy)
    left = load(copy, damage="skip")
    assert 0 < len(left) < len(load(folder))


def test_a_store_is_read_like_a_folder(folder: Path, table_name: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    for path in folder.iterdir():
        store.put(f"snapshots/{table_name}/node/{path.name}", path.read_bytes())
    table, sources = choose_table(files_in_store(store, "snapshots"))
    assert table == choose_table(files_in_folder(folder))[0]
    sstables = [open_sstable(source, table) for source in sources]
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(WHOLE_RING)]
    found = [images_of_part(part, table, "raw") for part in merged_rows(parts, table, lambda loss: None)]
    assert sorted(pa.Table.from_batches(found).to_pylist(), key=repr) == images(table_name)
    (split,) = split_tables(sstables)
    assert {url for url, _, _ in split.parts} == {store.url}
