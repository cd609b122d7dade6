"""Tests of typed change rows. The JSON form, which the model proves, is the oracle."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.changes.columns import LoggedColumn, columns_of, logged_tables
from ringsync.changes.text.json import json_lines
from ringsync.changes.typed import typed_rows, typed_schema
from ringsync.cql.types import ListType, MapType, SetType
from ringsync.formats.commitlog.reader import read_log
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from tests.commitlogs.fixtures import fixture_named, unpacked


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]]:
    """Return for each table its change rows, and their JSON objects with raw values."""
    fixture = fixture_named("5.0-v8-plain")
    schema = parse_schema(fixture.schema + fixture.dropped, "schema.cql")
    logged = logged_tables(schema.tables)
    rows = []
    for path in unpacked(fixture, tmp_path_factory.mktemp("log")):
        rows += [batch.rows for batch in read_log(path.read_bytes(), path.name, logged).batches]
    together = pa.concat_batches(rows)
    tables = []
    for table in schema.tables:
        part = together.filter(pc.equal(together["table_id"], pa.scalar(bytes.fromhex(table.table_id), pa.binary(16))))
        if part.num_rows:
            tables.append((table, part, [json.loads(line) for line in json_lines(part, schema.by_id(), raw=True)[0]]))
    return tables


def same_times(cell: dict[str, Any], decoded: Any) -> bool:
    """Tell whether a typed cell has the times of the JSON form, and is deleted if that is."""
    times = (cell["timestamp"], cell.get("ttl"), cell.get("expires_at"), cell.get("deleted", False))
    return times == (decoded["timestamp"], decoded["ttl"], decoded["expires_at"], decoded["deleted"])


def test_every_cell_is_in_its_column(
    changes: list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]],
) -> None:
    cells = 0
    for table, rows, objects in changes:
        typed = typed_rows(rows, table)
        assert typed.schema == typed_schema(table)
        typed.validate(full=True)
        columns = columns_of(table)
        names = typed.schema.names[len(table.key_columns) :]
        for row, expected in zip(_plain(typed), objects, strict=True):
            assert (row["_kind"], row["_token"], row["_position"]) == (
                expected["kind"],
                expected["token"],
                expected["source"]["position"],
            )
            assert row["_digest"].hex() == expected["digest"]
            assert row["_liveness"] == (_filled(expected.get("liveness"), ("timestamp", "ttl", "expires_at")))
            for column, name in zip(columns, names, strict=False):
                if name not in row:
                    continue
                wanted = [cell for cell in expected.get("cells", []) if cell["column"] == column.name]
                value = row[name]
                given = [] if value is None else value["cells"] if column.is_multicell else [value]
                assert len(given) == len(wanted)
                assert all(same_times(*pair) for pair in zip(wanted, given, strict=True))
                cells += len(given)
    assert cells > 1000


def cells_of(
    changes: list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]],
) -> Iterator[tuple[LoggedColumn, Any, list[dict[str, Any]]]]:
    """Yield for each column of each row its typed value, and its cells in the JSON form."""
    for table, rows, objects in changes:
        for row, expected in zip(_plain(typed_rows(rows, table)), objects, strict=True):
            for column in columns_of(table):
                if column.name in row:
                    cells = [cell for cell in expected.get("cells", []) if cell["column"] == column.name]
                    yield column, row[column.name], cells


def test_values_are_decoded(changes: list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]]) -> None:
    compared = 0
    for column, typed, cells in cells_of(changes):
        if str(column.type) in ("text", "int", "bigint", "boolean"):
            for cell in (cell for cell in cells if "value" in cell and cell["raw"]):
                assert typed["value"] == cell["value"]
                compared += 1
    assert compared > 100


def test_paths_are_decoded(changes: list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]]) -> None:
    compared = 0
    for column, typed, cells in cells_of(changes):
        if column.is_multicell and isinstance(column.type, ListType | SetType | MapType):
            for given, cell in zip(typed["cells"] if cells else [], cells, strict=True):
                assert given["path"] is not None
                if isinstance(column.type, ListType):
                    assert uuid.UUID(given["path"]) == uuid.UUID(cell["path"])
                compared += 1
    assert compared > 100


def test_ranges_have_typed_bounds(changes: list[tuple[TableSchema, pa.RecordBatch, list[dict[str, Any]]]]) -> None:
    compared = 0
    for table, rows, objects in changes:
        for row, expected in zip(_plain(typed_rows(rows, table)), objects, strict=True):
            if "_range" not in row:
                continue
            assert (row["_range"] is not None) == ("range" in expected)
            for side in ("start", "end") if "range" in expected else ():
                bound, wanted = row["_range"][side], expected["range"][side]
                assert (bound["columns"], bound["inclusive"]) == (len(wanted["clustering"]), wanted["inclusive"])
                compared += 1
    assert compared > 20


def _plain(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return Python values, without columns with times, because Python cannot hold all of them."""
    types = [str(field.type) for field in rows.schema]
    chosen = [place for place, kind in enumerate(types) if "timestamp[" not in kind and "date32" not in kind]
    found: list[dict[str, Any]] = rows.select(chosen).to_pylist()
    return found


def _filled(found: dict[str, int] | None, names: tuple[str, ...]) -> dict[str, int | None] | None:
    return None if found is None else {name: found.get(name) for name in names}
