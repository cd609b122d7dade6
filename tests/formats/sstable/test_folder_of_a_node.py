"""The folder of a table on a running node: what is read of it, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.partitions import read_partitions
from ringsync.formats.sstable.schema import file_columns, schema_of_all
from ringsync.formats.sstable.source import LocalSource, find_local
from ringsync.formats.sstable.statistics import read_statistics
from servers.cassandra import CassandraNode
from tests.formats.sstable.files import table_of

pytestmark = pytest.mark.server


def test_a_table_with_an_index_and_a_snapshot(cassandra: CassandraNode, session: Any, keyspace: str) -> None:
    session.execute(f'CREATE TABLE {keyspace}."Odd" (k int PRIMARY KEY, v text)')
    session.execute(f'CREATE INDEX by_v ON {keyspace}."Odd" (v)')
    for flush in range(2):
        for k in range(50):
            session.execute(f"INSERT INTO {keyspace}.\"Odd\" (k, v) VALUES ({k + 25 * flush}, 'v{k}')")
        cassandra.nodetool("flush", keyspace)
    cassandra.nodetool("snapshot", "-t", "nightly", keyspace)
    (folder,) = cassandra.folder.glob(f"data/{keyspace}/Odd-*")
    live, snapshot = find_local(folder), find_local(folder / "snapshots" / "nightly")
    assert [one.name for one in live.sstables] == [one.name for one in snapshot.sstables]
    assert len(live.sstables) == 2
    reasons = {one.path.removeprefix(f"{folder}/"): one.reason for one in live.left_out}
    assert reasons.keys() == {".by_v", "snapshots"}
    assert {one.path.rpartition("/")[2] for one in snapshot.left_out} == {".by_v"}

    headers = [(one, read_statistics(LocalSource(one))) for one in snapshot.sstables]
    table = table_of(headers[0][0])
    assert (table.keyspace, table.name) == (keyspace, "Odd")
    assert [column.name for column in schema_of_all(headers).columns] == ["partition_key", "v"]
    for one, header in headers:
        assert [column.column.name for column in file_columns(one, header, table).regular] == ["v"]
        source = LocalSource(one)
        assert len(read_partitions(source, DataFile(source).length, step_bytes=1)) == 50
