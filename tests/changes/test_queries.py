"""Tests of ``source.query``: on a real server it writes the content of its log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.cql.types import Native
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.queries import queries, snapshot_queries
from ringsync.images.schema import row_image_schema
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, TableSchema
from servers.cassandra import CassandraNode
from tests.changes.query_replay import replay_queries
from tests.commitlog_model import cql_schema, replay, segment
from tests.commitlogs.capture import captured
from tests.commitlogs.fixtures import unpacked
from tests.commitlogs.make import KEYSPACES, connected
from tests.inspect.test_fixture_replay import (
    FIXTURE,
    LEFT_OUT,
    empty,
    expected,
    in_order,
    is_nothing,
    without_new_fields,
)
from tests.inspect.test_round_trip import comparable
from tests.reconciled import merged
from tests.streams.change_images import images_of

__all__ = ["empty"]


def changes_of(paths: list[Path], tables: list[TableSchema]) -> dict[str, pa.RecordBatch]:
    """Read the change rows of some segments, by table id."""
    logged = logged_tables(tables)
    batches = [b.rows for path in paths for b in read_log(path.read_bytes(), path.name, logged).batches]
    rows = pa.Table.from_batches(batches).combine_chunks()
    found = {}
    for table in tables:
        own = rows.filter(pa.compute.equal(rows["table_id"], bytes.fromhex(table.table_id)))
        if len(own):
            (found[table.table_id],) = own.combine_chunks().to_batches()
    return found


def test_a_row_has_its_query_also_alone(tmp_path: Path) -> None:
    """Some have none: of the removal of a list's entry CQL cannot say which."""
    paths = unpacked(FIXTURE, tmp_path)
    tables = parse_schema(FIXTURE.schema + FIXTURE.dropped, "schema.cql").by_id()
    rows = changes_of(paths, list(tables.values()))
    without = 0
    for table_id, changes in rows.items():
        rows_of = merged(changes, tables[table_id])
        texts = queries(rows_of, tables[table_id])
        for place in range(min(60, len(rows_of))):
            assert queries(rows_of.take(np.array([place])), tables[table_id]).to_pylist() == [texts[place].as_py()]
        without += texts.null_count
        nothing = rows_of.where(np.array(texts.is_null()))
        assert queries(nothing, tables[table_id]).null_count == len(nothing)
    assert without


@pytest.mark.server
@pytest.mark.usefixtures("empty")
def test_a_server_that_executes_the_queries_shows_what_the_model_replays(
    cassandra: CassandraNode, tmp_path: Path
) -> None:
    paths = unpacked(FIXTURE, tmp_path)
    text = FIXTURE.schema + FIXTURE.dropped
    models = {table.id: table for table in cql_schema.parse_schema(FIXTURE.schema).values()}
    tables = [one for one in parse_schema(text, "schema.cql").by_id().values() if one.name not in (*LEFT_OUT, "nocdc")]
    rows = changes_of(paths, list(parse_schema(text, "schema.cql").by_id().values()))
    known = cql_schema.parse_schema(text)
    state = replay.replay([change for path in paths for change in segment.read_segment(path, known).changes])

    def shown(unsayable: set[tuple[str, str]]) -> int:
        with connected(cassandra) as reader:
            answer = captured(reader, "5.0", KEYSPACES, without=LEFT_OUT)
        of_tables = [model for model in models.values() if model.name not in (*LEFT_OUT, "nocdc", "counters")]
        return sum(compare(one, expected(state, one, answer["moment"]), answer, unsayable) for one in of_tables)

    with connected(cassandra) as cluster:
        session = cluster.connect()
        changed = [queries(merged(rows[table.table_id], table), table).to_pylist() for table in tables]
        assert replay_queries(session, [query for of_table in changed for query in of_table]) > 300
        assert shown({("orders", "l")}) > 200
        read = []
        for table in tables:
            session.execute(f"TRUNCATE {table.full_name}")
            (model,) = [one for one in models.values() if one.id.replace("-", "") == table.table_id]
            images = images_of(table, replay.rows(state, model, int(time.time())))
            read += snapshot_queries(images, table, int(time.time() * 1e6)).to_pylist()
        replay_queries(session, read)
        assert shown(set()) > 200


def test_a_row_that_was_read_has_the_liveness_of_its_own_cells_not_of_static_ones() -> None:
    kinds = {"p": "partition_key", "c": "clustering", "s": "static", "z": "static", "v": "regular"}
    table = TableSchema("shop", "t", "0" * 32, tuple(Column(n, kind, Native("int")) for n, kind in kinds.items()))
    common = {"writetime": 900, "expires_at": None, "deleted_at": None, "live": None}
    rows = [
        {"token": 1, "p": 1, "c": 1, "s": 3, "z": 4, "v": 5, "_row": common, "_x": {"v": {"d": -800}}},
        {"token": 1, "p": 1, "c": 2, "s": 3, "z": 4, "_row": common},
        {"token": 2, "p": 2, "c": 1, "_row": {**common, "writetime": None}},
        {"token": 3, "p": 3, "c": 1, "v": 5, "_row": {**common, "expires_at": 2_000_000_000}},
    ]
    found = snapshot_queries(pa.RecordBatch.from_pylist(rows, row_image_schema(table)), table, 7000).to_pylist()
    insert = "INSERT INTO shop.t (p, c"
    assert f"{insert}, v) VALUES (1, 1, 5) USING TIMESTAMP 100;" in found[0]
    assert "UPDATE shop.t USING TIMESTAMP 900 SET s = 3, z = 4 WHERE p = 1;" in found[0]
    assert found[1] == f"{insert}) VALUES (1, 2) USING TIMESTAMP 900"
    assert found[2] == f"{insert}) VALUES (2, 1) USING TIMESTAMP 7000"
    assert found[3].startswith(f"{insert}, v) VALUES (3, 1, 5) USING TIMESTAMP 900 AND TTL ")


def compare(model: Any, wanted: list[Any], answer: dict[str, Any], unsayable: set[tuple[str, str]]) -> int:
    """Compare a table's rows with the server's. Return their number.

    :param unsayable: lists of which entries were changed: CQL cannot write them again
    """
    texts = {**dict(model.partition_key), **{name: text for name, text, _ in model.clustering}}
    types = texts | dict(model.static) | dict(model.regular)
    shown = [
        {
            name: {part: v for part, v in cell.items() if part != "json" and not is_nothing(v)}
            for name, cell in row.items()
        }
        for row in answer["keyspaces"][model.keyspace][model.name]
    ]
    mine, its = (
        without_new_fields(comparable(without(model, rows, unsayable), types), model) for rows in (wanted, shown)
    )
    assert len(mine) == len(its), (model.name, mine, its)
    for a, b in zip(*(sorted(rows, key=in_order) for rows in (mine, its)), strict=True):
        assert b == a, model.name
    return len(its)


def without(model: Any, rows: list[Any], unsayable: set[tuple[str, str]]) -> list[Any]:
    return [{name: cell for name, cell in row.items() if (model.name, name) not in unsayable} for row in rows]
