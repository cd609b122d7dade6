"""Parts of SSTables that cannot be read, or merged: they are unread, and named; what is beside them is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import open_sstable
from ringsync.ledger.snapshots import NodeSnapshot, StoredSSTable, get_failure, get_manifest, put_manifest
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.scan import Unread
from ringsync.sources.sstable_files import split_tables
from ringsync.steps.bootstrap import rows_of_split
from ringsync.steps.bootstrap.rows_of_split import SnapshotRows
from ringsync.storage.local import LocalStore
from tests.formats.sstable.maker import TABLE_ID, int32, partition, row, sized, sstable, statistics, table_of

BOOTSTRAP = "20261125T101500Z-0000000a"
KEYS, ROWS = range(20), range(600)
"""A partition is larger than a batch."""
TABLE = table_of(
    f"p int, c text, v text, PRIMARY KEY (p, c)) WITH ID = {TABLE_ID[:8]}-{TABLE_ID[8:12]}-{TABLE_ID[12:16]}-"
    f"{TABLE_ID[16:20]}-{TABLE_ID[20:]}"
)


def written(folder: Path, number: int, swapped: int | None = None) -> Descriptor:
    """Write an SSTable whose checksums are right; in one partition, maybe, the first row comes last."""
    partitions = {}
    for key in KEYS:
        rows = [row(b"\0" + sized(b"%020d" % at), [sized(b"x" * 500)], number) for at in ROWS]
        if key == swapped:
            rows = [*rows[1:], rows[0]]
        partitions[int32(key)] = partition(int32(key), rows)
    stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
    made = sstable(partitions, stats, number, folder.as_posix())
    for component, content in made.files.items():
        Path(made.descriptor.path(component)).write_bytes(content)
    return made.descriptor


def read(store: LocalStore, descriptors: Sequence[Descriptor], splits: int = 10) -> tuple[int, list[Unread]]:
    """Read SSTables by some splits at least: rows of ranges that were read, and what was not."""
    opened = [open_sstable(LocalSource(one), TABLE) for one in descriptors]
    stored = tuple(("id-1", StoredSSTable(one, {})) for one in descriptors)
    splits = SnapshotRows(BOOTSTRAP, tuple(split_tables(opened, splits)), stored, TABLE)
    config: Any = SimpleNamespace(sstable=SimpleNamespace(memory_mb=1))
    plan: Any = SimpleNamespace(table=TABLE, now=1, unrepresentable_values="error")
    permits: Any = SimpleNamespace(ask=lambda rows: 1, answered=lambda rows, size: None)
    count, unread = 0, list[Unread]()
    for tokens, pages in splits.read(config, plan, store, permits):
        for page in pages:
            if isinstance(page, Unread):
                assert page.range == tokens
                unread.append(page)
            else:
                count += page.rows.num_rows
    return count, unread


def test_rows_that_are_not_in_their_order_are_unread_and_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "lake")
    put_manifest(store, BOOTSTRAP, NodeSnapshot("id-1", "", 1, ()))
    count, unread = read(store, [written(tmp_path, 1), written(tmp_path, 2)])
    assert (count, unread) == (len(KEYS) * len(ROWS), [])
    count, (lost,) = read(store, [written(tmp_path, 1), written(tmp_path, 2, swapped=7)])
    assert 0.7 * len(KEYS) * len(ROWS) < count < len(KEYS) * len(ROWS)
    assert f"k.t, {lost.range}: {tmp_path}/nb-2-big-Data.db: the row at " in lost.reason
    assert "(uncompressed), of token " in lost.reason
    assert "is not in its order; the file is damaged" in lost.reason
    assert get_manifest(store, BOOTSTRAP, "id-1") is None
    assert f"damaged: {tmp_path}/nb-2-big-Data.db" in (get_failure(store, BOOTSTRAP, "id-1") or "")


def test_all_damaged_sstables_of_a_node_are_found_in_one_run(tmp_path: Path) -> None:
    """Each cost a run of its own: once a node has no snapshot, nothing more is read of it."""
    store = LocalStore(tmp_path / "lake")
    put_manifest(store, BOOTSTRAP, NodeSnapshot("id-1", "", 1, ()))
    there = [written(tmp_path, 1), written(tmp_path, 2, swapped=7), written(tmp_path, 3, swapped=9)]
    read(store, there, splits=1)
    assert get_manifest(store, BOOTSTRAP, "id-1") is None
    reason = get_failure(store, BOOTSTRAP, "id-1") or ""
    assert [f"damaged: {tmp_path}/nb-{number}-big-Data.db" in reason for number in (1, 2, 3)] == [False, True, True]
    put_manifest(store, BOOTSTRAP, NodeSnapshot("id-1", "", 2, ()))
    assert get_failure(store, BOOTSTRAP, "id-1") is None


@pytest.mark.parametrize("error", [ValueError("a length is wrong"), IndexError("it ends behind its bytes")])
def test_a_merge_that_fails_is_unread_and_names_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever damage no check of the files has found."""
    found, calls = [written(tmp_path, 1), written(tmp_path, 2)], list[int]()
    images_of_part = rows_of_split.images_of_part

    def once(part: Any, table: TableSchema, misfits: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise error
        return images_of_part(part, table, misfits)

    monkeypatch.setattr(rows_of_split, "images_of_part", once)
    store = LocalStore(tmp_path / "lake")
    count, (lost,) = read(store, found)
    assert 0 < count < len(KEYS) * len(ROWS)
    files = f"{tmp_path}/nb-1-big-Data.db, {tmp_path}/nb-2-big-Data.db"
    assert f": rows of {files} cannot be merged ({type(error).__name__}: {error}): is one" in lost.reason
    assert get_failure(store, BOOTSTRAP, "id-1") is None
