"""The schema of a moment: what a table was then, and every column that its log can name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringsync.changes.columns import columns_of
from ringsync.ledger.past_schema import past_schema
from ringsync.ledger.table_versions import version_of
from ringsync.storage.local import LocalStore
from tests.ledger.histories import history_of
from tests.ledger.test_table_versions import FIRST, SECOND, table


def test_each_table_is_as_it_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v", since_us=10))
    version_of(store, table("v", "w", since_us=20))
    version_of(store, table("w", since_us=30, dropped=("v",)))
    version_of(store, table("x", table_id=SECOND, since_us=40))
    found = {at_us: past_schema(store, at_us).versions for at_us in (5, 10, 19, 20, 35, 45, None)}
    # A table that was not there yet is as it was first: its id names no other.
    assert [versions[FIRST].number for versions in found.values()] == [1, 1, 1, 2, 3, 3, 3]
    assert {versions[SECOND].number for versions in found.values()} == {4}
    for versions in found.values():
        version = versions[FIRST]
        assert {column.name for column in columns_of(version.table)} == {"v", "w"}
        assert version.names == ("v", "w")
    assert [column.name for column in found[10][FIRST].table.value_columns] == ["v"]
    assert [column.name for column in found[35][FIRST].table.value_columns] == ["w"]
    assert set(past_schema(store).schema.by_id()) == {FIRST, SECOND}


def test_a_column_that_is_added_later_hides_none_of_its_cells(tmp_path: Path) -> None:
    """The table did not drop it then, and a time of a drop makes older cells disappear."""
    store = LocalStore(tmp_path)
    version_of(store, table("v", since_us=10))
    version_of(store, table("v", "w", since_us=20))
    version_of(store, table("v", since_us=30, dropped=("w",)))
    (dropped,) = past_schema(store, 10).versions[FIRST].table.dropped
    assert (dropped.name, dropped.dropped_at) == ("w", 0)
    (dropped,) = past_schema(store, 30).versions[FIRST].table.dropped
    assert (dropped.name, dropped.dropped_at) == ("w", 5)


def test_a_damaged_version_is_told_and_hides_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v", since_us=10))
    version_of(store, table("v", "w", since_us=20))
    other = replace(table("z", table_id=SECOND, since_us=5), name="other")
    version_of(store, other)
    assert history_of(store, "shop", "other")
    store.put("schemas/shop.t/000001.json", b"{")
    found = past_schema(store, 10)
    assert "schemas/shop.t/000001.json cannot be read" in found.damaged[0]
    assert (found.versions[FIRST].number, found.versions[SECOND].number) == (2, 1)
    store.put("schemas/shop.t/000002.json", b"{")
    assert set(past_schema(store).versions) == {SECOND}


def test_a_store_without_histories(tmp_path: Path) -> None:
    assert past_schema(LocalStore(tmp_path)).versions == {}
