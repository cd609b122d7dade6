"""Tests of the reader and of the streaming merge with SSTables of real servers, against what SELECT said."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.changes.reconcile.streams import Stream, merge_streams
from ringsync.formats.rows.state import Capacity
from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.reader import layout_of, read_rows
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.statistics import read_statistics
from ringsync.images.from_streams import images_of_part
from ringsync.schema.table import TableSchema
from tests.changes.images_of_logs import LoggedTable
from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.selected import differences
from tests.commitlog_model.test_fixtures import server_row
from tests.commitlog_model.types import Table
from tests.formats.commitlog.comparable import of_package
from tests.formats.sstable.files import sources_of, table_of
from tests.sstables.fixtures import FIXTURES

CAPACITIES = {"large": None, "small": Capacity(rows=8, cells=64, complex=8, bytes=2**19)}


def read(source: LocalSource, table: TableSchema, capacity: Capacity | None) -> Iterator[pa.RecordBatch]:
    data = DataFile(source)
    layout = layout_of(source.descriptor, read_statistics(source), table)
    end = 0
    for batch in read_rows(data, layout, 0, data.length, lambda position: None, capacity):
        batch.rows.validate(full=True)
        assert not batch.losses
        assert batch.end > end
        end = batch.end
        yield batch.rows
    assert end == data.length


def model_of(source: LocalSource) -> Table:
    tables = parse_schema((Path(source.descriptor.folder) / "schema.cql").read_text())
    (found,) = [table for table in tables.values() if table.name == source.descriptor.table]
    return found


# All servers with large batches; small ones, where ranges and partitions are cut, with each of their formats.
CASES = [(name, "flushed", "large") for name in FIXTURES]
CASES += [("4.0-nb", "compacted", "large"), ("5.0-da", "compacted", "large"), ("5.0-da", "flushed", "small")]


def logged_table(table: TableSchema, model: Table, batches: list[pa.RecordBatch]) -> LoggedTable:
    """Let the model replay the rows of SSTables."""
    changes = of_package([SimpleNamespace(rows=batch) for batch in batches], logged_tables([table]))  # type: ignore[misc]
    return LoggedTable(table, pa.concat_batches(batches), model, replay(changes))


@pytest.mark.parametrize(("name", "tag", "capacity"), CASES)
def test_sstables_hold_what_the_server_selects(name: str, tag: str, capacity: str) -> None:
    selected = FIXTURES[name].selected
    found, compared = [], 0
    for keyspace, tables in selected["keyspaces"].items():
        for table_name, its_rows in tables.items():
            sources = sources_of(name, f"{keyspace}.{table_name}", tag)
            if not sources:
                assert its_rows == []
                continue
            table, model = table_of(sources[0].descriptor), model_of(sources[0])
            server = [server_row(model, row) for row in its_rows]
            limit = CAPACITIES[capacity]
            plain = [batch for source in sources for batch in read(source, table, limit)]
            streams = [Stream(-(2**63), partial(read, source, table, limit)) for source in sources]
            parts = list(merge_streams(streams, table))
            logged = logged_table(table, model, plain)
            images = pa.concat_batches([images_of_part(part, table, "raw") for part in parts])
            for moment in (0, selected["moment"], 2**31, 2**32):
                assert logged.shown(images, moment) == logged.expected(moment), table.full_name
            for batches in (plain, [part.rows.to_arrow() for part in parts]):
                changes = of_package([SimpleNamespace(rows=batch) for batch in batches], logged_tables([table]))  # type: ignore[misc]
                state = rows(replay(changes), model, selected["moment"])
                found += differences(model, state, server)
            compared += len(server)
    assert found == []
    assert compared > 100
