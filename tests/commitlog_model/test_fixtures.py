"""The model on the committed commit logs of real servers: what it replays is what their SELECT said."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.replay import Row, Shown, replay, rows
from tests.commitlog_model.segment import Segment, read_segment
from tests.commitlog_model.selected import UNTOLD, differences
from tests.commitlog_model.types import Table
from tests.commitlogs.fixtures import Fixture, fixtures, unpacked


def read(fixture: Fixture, folder: Path, tables: dict[str, Table]) -> list[Segment]:
    key = bytes.fromhex(fixture.keystore.key_file.read_text()) if fixture.keystore else None
    found = []
    for path in unpacked(fixture, folder):
        offset, *completed = path.with_name(path.stem + "_cdc.idx").read_text().split("\n")
        found.append(read_segment(path, tables, end=None if completed == ["COMPLETED"] else int(offset), key=key))
    return found


def server_row(table: Table, row: dict[str, dict[str, Any]]) -> Row:
    """A row of the fixture's select.json."""
    keys = [name for name, *_ in [*table.partition_key, *table.clustering]]
    shown = {}
    for name, cell in row.items():
        # 4.x does not tell the times of elements, and cannot print all values as JSON.
        value = json.loads(cell["json"], parse_float=Decimal) if cell.get("json") is not None else UNTOLD
        has_times = name in keys or "writetime" in cell
        writetime = cell.get("writetime") if has_times else UNTOLD
        shown[name] = Shown(value, bytes.fromhex(cell["raw"]), writetime, cell.get("expires_at"))
    return shown


@pytest.mark.parametrize("fixture", fixtures(), ids=lambda one: one.name)
def test_what_is_replayed_is_what_the_server_selects(fixture: Fixture, tmp_path: Path) -> None:
    tables = parse_schema(fixture.schema + fixture.dropped)
    segments = read(fixture, tmp_path, tables)
    assert [p for segment in segments for p in segment.problems if p["reason"] != "unknown table"] == []
    assert {segment.version for segment in segments} == {fixture.log_version}
    state = replay(change for segment in segments for change in segment.changes)
    selected = fixture.selected
    by_name = {(table.keyspace, table.name): table for table in parse_schema(fixture.schema).values()}
    found = [
        difference
        for keyspace, its_tables in selected["keyspaces"].items()
        for name, its_rows in its_tables.items()
        if (table := by_name[keyspace, name])
        for difference in differences(
            table, rows(state, table, selected["moment"]), [server_row(table, row) for row in its_rows]
        )
    ]
    assert found == []
