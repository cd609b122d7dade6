"""Tests of reconciliation by the plain-Python model: order and splits of the change rows do not matter."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.formats.commitlog.reader import read_log
from ringsync.schema.table import TableSchema
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.types import Table
from tests.formats.commitlog.comparable import of_package
from tests.formats.commitlog.sources import model_tables_of, sources, tables_of
from tests.reconciled import merged_batch

LOGS = ("4.0-plain", "4.1-plain", "5.0-v7-plain", "5.0-v8-plain")
SOURCE = ("digest", "schema_version", "file", "position")
"""Columns that depend on how the rows are split."""


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    combined = pa.Table.from_batches(batches).combine_chunks()
    return combined.to_batches()[0] if len(combined) else combined.schema.empty_table().to_batches()[0]


@cache
def logged(name: str) -> list[tuple[TableSchema, Table, pa.RecordBatch]]:
    """Return the change rows of a commit log by table."""
    tables = tables_of(name)
    batches = [
        batch.rows
        for source in sources(name)
        for batch in read_log(source.data, source.name, tables, key_of=source.key_of).batches
    ]
    whole = joined(batches)
    models = {table.id.replace("-", ""): table for table in model_tables_of(name).values()}
    compared = []
    for table in tables.tables:
        of_table = whole.filter(pc.equal(whole["table_id"], pa.scalar(bytes.fromhex(table.table_id), pa.binary(16))))
        compared.append((table, models[table.table_id], of_table))
    return compared


def shown(batch: pa.RecordBatch, table: TableSchema, model: Table, now: int) -> list[Any]:
    """Return what SELECT shows after these change rows."""
    changes = of_package([SimpleNamespace(rows=batch)], logged_tables([table]))  # type: ignore[list-item]
    return sorted(rows(replay(changes), model, now), key=repr)


@pytest.mark.parametrize("name", LOGS)
def test_the_merge_of_a_commit_log_shows_what_the_log_shows(name: str) -> None:
    compared = merged_rows = 0
    for table, model, own in logged(name):
        merged = merged_batch(own, table)
        merged.validate(full=True)
        for now in (0, 1_800_000_000, 2**31):
            expected = shown(own, table, model, now)
            assert shown(merged, table, model, now) == expected, table.full_name
            compared += len(expected)
        merged_rows += len(own) - len(merged)
    assert compared > 500
    assert merged_rows > 100


@pytest.mark.parametrize("name", LOGS[-1:])
def test_order_copies_and_splits_make_no_difference(name: str) -> None:
    chance = random.Random(name)
    for table, _, own in logged(name):
        whole = merged_batch(own, table)
        places = [*range(len(own)), *chance.choices(range(len(own)), k=len(own) // 2)] if len(own) else []
        chance.shuffle(places)
        mixed = own.take(pa.array(places, pa.int32()))
        assert merged_batch(mixed, table).equals(whole), table.full_name
        assert merged_batch(whole, table).drop_columns(SOURCE).equals(whole.drop_columns(SOURCE)), table.full_name
        cut = chance.randrange(len(places) + 1)
        parts = [merged_batch(part, table) for part in (mixed.slice(0, cut), mixed.slice(cut))]
        assert merged_batch(joined(parts), table).drop_columns(SOURCE).equals(whole.drop_columns(SOURCE)), (
            table.full_name
        )


def test_nothing_is_merged_to_nothing() -> None:
    table = logged(LOGS[0])[0][0]
    nothing = CHANGE_ROWS.empty_table().to_batches()
    empty = nothing[0] if nothing else pa.RecordBatch.from_pylist([], CHANGE_ROWS)
    assert merged_batch(empty, table).equals(empty)


def test_rows_of_another_table_are_refused() -> None:
    (_, _, own), (other, *_) = [entry for entry in logged(LOGS[0]) if len(entry[2])][:2]
    with pytest.raises(ValueError, match="merge one table at a time"):
        merged_batch(own, other)
