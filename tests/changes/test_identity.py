"""Tests of column ids: a stored cell keeps its column, even if the table is altered while its row waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.changes.columns import columns_of
from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.changes.schema import LIVE, ROW
from ringsync.cql.types import Native
from ringsync.images.from_changes import row_images_of
from ringsync.images.queries import queries
from ringsync.ledger.staging import STAGED_ROWS, decode_rows, encode_blocks, encode_rows, read_block
from ringsync.ledger.table_versions import latest_version, version_of
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.storage.local import LocalStore
from tests.reconciled import merged

INT, BIGINT = Native("int"), Native("bigint")
KEY = Column("id", "partition_key", INT)


def table_of(names: list[str], dropped: list[str] | None = None) -> TableSchema:
    """Make a table with these columns, all of type int, in Cassandra's order."""
    gone = tuple(DroppedColumn(name, "regular", INT, 5) for name in sorted(dropped or []))
    return TableSchema("shop", "t", "5" * 32, (KEY, *(Column(name, "regular", INT) for name in sorted(names))), gone)


def row_of(table: TableSchema, values: dict[str, int]) -> pa.RecordBatch:
    """Make a change row that writes these values, decoded under this schema."""
    numbers = {column.name: column.number for column in columns_of(table)}
    cells = [
        {"column": numbers[name], "value": value.to_bytes(4, "big"), "timestamp": 10, "kind": LIVE}
        for name, value in sorted(values.items())
    ]
    row: dict[str, Any] = {
        **{"table_id": bytes.fromhex(table.table_id), "schema_version": 0, "token": 1, "kind": ROW},
        **{"partition_key": (7).to_bytes(4, "big"), "clustering": (0).to_bytes(4, "little"), "write_time": 10},
        **{"digest": b"d" * 16, "liveness": {"timestamp": 10}, "cells": cells, "complex_deletions": []},
        **{"file": "f", "position": 1, "node": "n"},
    }
    return pa.RecordBatch.from_pylist([row], schema=STAGED_ROWS)


def values_of(rows: pa.RecordBatch, table: TableSchema) -> dict[str, Any]:
    """Return the values in a row's image."""
    images = row_images_of(merged(rows, table), table, "error")
    return {column.name: images[column.name][0].as_py() for column in table.value_columns}


@pytest.mark.parametrize("added", [INT, BIGINT], ids=str)
def test_a_column_that_is_added_while_a_row_waits_gets_none_of_its_values(tmp_path: Path, added: Native) -> None:
    """Places of columns move: by them, price came out as discount."""
    store = LocalStore(tmp_path)
    old = table_of(["price", "qty"])
    new = replace(old, columns=(KEY, Column("discount", "regular", added), *old.columns[1:]))
    staged = version_of(store, old).to_store(row_of(old, {"price": 999, "qty": 3}))
    data, places = encode_blocks([staged], "f")
    store.put("f", data)
    after = version_of(store, new)
    rows = after.from_store(read_block(store, places[0]))
    assert values_of(rows, new) == {"discount": None, "price": 999, "qty": 3}
    assert "price" in queries(merged(rows, new), new)[0].as_py()
    assert "discount" not in queries(merged(rows, new), new)[0].as_py()
    # The schema under which it was written gives the same.
    assert values_of(version_of(store, old).from_store(decode_rows(encode_rows(staged))), old) == {
        "price": 999,
        "qty": 3,
    }


def test_what_does_not_resolve_is_an_error_that_names_both_versions() -> None:
    old, new = table_of(["price"]), table_of(["discount", "price"])
    first = TableVersion.first(old)
    second = first.followed_by(new)
    staged = second.to_store(row_of(new, {"discount": 1}))
    with pytest.raises(UnresolvedRowsError, match=r"shop\.t follow version 2 .* later than version 1: they wait"):
        first.from_store(staged)
    for unknown in (99, -1):
        broken = staged.to_pylist()
        broken[0]["cells"][0]["column"] = unknown
        with pytest.raises(UnresolvedRowsError, match=f"with id {unknown}, which version 2 does not have"):
            second.from_store(pa.RecordBatch.from_pylist(broken, staged.schema))
    with pytest.raises(UnresolvedRowsError, match="without a version"):
        second.from_store(row_of(new, {"price": 1}))


def test_a_version_that_has_dropped_a_column_takes_no_rows_from_after_it_was_added_again() -> None:
    """It knew the column as dropped, and left out its cells, though they were newer than the drop."""
    first = TableVersion.first(table_of(["price", "qty"]))
    gone = first.followed_by(table_of(["qty"], ["price"]))
    again = gone.followed_by(table_of(["price", "qty"], ["price"]))
    staged = again.to_store(row_of(again.table, {"price": 999, "qty": 3}))
    with pytest.raises(UnresolvedRowsError, match="later than version 2"):
        gone.from_store(staged)
    assert again.from_store(staged).num_rows == 1


def test_ids_are_given_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    steps = [(["b"], []), (["a", "b"], []), (["a"], ["b"]), (["a", "c"], ["b"]), (["a", "b", "c"], ["b"])]
    versions = [version_of(store, table_of(*step)) for step in steps]
    assert [version.number for version in versions] == [1, 2, 3, 4, 5]
    assert versions[-1].names == ("b", "a", "c")
    assert version_of(store, versions[-1].table) == latest_version(store, "5" * 32) == versions[-1]
    # Changed back, or shown by a node that is behind (nobody knows since when): a version with the same ids.
    behind = version_of(store, versions[1].table)
    assert (behind.number, behind.names) == (6, versions[-1].names)
    assert latest_version(store, "6" * 32) is None


NAMES = st.sampled_from(list("abcdef"))


@given(data=st.data(), history=st.lists(st.sets(NAMES, min_size=1), min_size=2, max_size=6))
def test_every_value_comes_out_under_its_name(data: st.DataObject, history: list[set[str]]) -> None:
    """Rows staged under any version of a table, read under its last one."""
    seen: set[str] = set()
    versions: list[TableVersion] = []
    for columns in history:
        seen |= columns
        table = table_of(sorted(columns), sorted(seen - columns))
        versions.append(versions[-1].followed_by(table) if versions else TableVersion.first(table))
    last = versions[-1]
    written = data.draw(st.sampled_from(versions))
    present = [column.name for column in written.table.value_columns]
    values = {name: place + 1 for place, name in enumerate(present)}
    rows = last.from_store(written.to_store(row_of(written.table, values)))
    shown = values_of(rows, last.table)
    assert shown == {column.name: values.get(column.name) for column in last.table.value_columns}
