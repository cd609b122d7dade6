"""What ``inspect --format cql`` prints, executed on empty tables, gives the same SELECT with WRITETIME and TTL."""

from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.cli import main
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.queries import queries
from ringsync.schema.from_cql import parse_schema
from servers.cassandra import CassandraNode, NodeSettings
from tests.changes.query_replay import replay_queries
from tests.commitlogs.capture import RawHandler, captured
from tests.commitlogs.make import connected
from tests.commitlogs.workload import KEYSPACE, Table, random_schema, random_statements, tables
from tests.inspect.replaying import replay
from tests.reconciled import merged

Rows = list[dict[str, dict[str, Any]]]
OF_SEVERAL_LINES = (
    f"INSERT INTO {KEYSPACE}.collections (p, c, sm, lt, m) "
    "VALUES ('a\n;b', 1, {'x\r\n': 1}, ['l\n', '-- l'], {'k\n': 1.5, 'y': 2})",
    f"UPDATE {KEYSPACE}.collections USING TTL 100000 SET m = m + {{'\n-- k': 2.5}} WHERE p = 'a\n;b' AND c = 1",
    f"DELETE m['k\n'] FROM {KEYSPACE}.collections WHERE p = 'a\n;b' AND c = 1",
)
"""What must come out on one line each all the same."""
SYNC_MS = 200
CALM_S = 2.0


def copied_log(node: CassandraNode, folder: Path) -> None:
    """Copy the segments as soon as everything is synced: indexes first, so that they never say too much."""

    def offsets() -> dict[str, str]:
        return {path.name: path.read_text() for path in node.cdc_raw.glob("*_cdc.idx")}

    before: dict[str, str] = {}
    while (now := offsets()) != before or not now:
        before = now
        time.sleep(CALM_S)
    folder.mkdir()
    for name in before:
        for copied in (name, name.replace("_cdc.idx", ".log")):
            shutil.copy(node.cdc_raw / copied, folder / copied)


def elements(cell: dict[str, Any]) -> list[Any]:
    """The entries of a list in any order, each with its times where the server tells them."""
    raw = bytes.fromhex(cell["raw"])
    (count,), position, found = struct.unpack_from(">i", raw), 4, []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, position)
        found.append(raw[position + 4 : position + 4 + length].hex())
        position += 4 + length
    times = [cell.get(name) or [None] * count for name in ("writetime", "expires_at")]
    return sorted(zip(found, *times, strict=True), key=repr)


def comparable(rows: Rows, types: dict[str, str]) -> Rows:
    """Rows without what a replay cannot have: the order of lists, and the times of counters."""
    found = []
    for row in rows:
        cells = dict(row)
        for name, cell in row.items():
            if types[name].startswith("list<"):
                cells[name] = {"elements": elements(cell)}
            elif types[name] == "counter":
                cells[name] = {"raw": cell["raw"]}
        found.append(cells)
    return found


def selected(node: CassandraNode, version: str) -> dict[str, Rows]:
    with connected(node) as reader:
        found: dict[str, Rows] = captured(reader, version, (KEYSPACE,))["keyspaces"][KEYSPACE]
    types = {
        table.name: {**table.partition, **table.clustering, **table.static, **table.regular}
        for table in tables(version)
    }
    return {name: comparable(rows, types[name]) for name, rows in found.items()}


@pytest.mark.server
@pytest.mark.parametrize(
    ("version", "count"),
    [
        ("5.0", 350),
        *(pytest.param(version, 20_000, marks=pytest.mark.chaos) for version in ("4.0", "4.1", "5.0")),
    ],
)
def test_replayed_statements_give_the_same_rows(version: str, count: int, cache: Path, tmp_path: Path) -> None:
    settings = NodeSettings(version=version, commitlog_sync_ms=SYNC_MS).on_free_ports()  # type: ignore[arg-type]
    with CassandraNode(tmp_path / "node", settings, cache) as node, connected(node) as cluster:
        session, writer = cluster.connect(), cluster.connect()
        writer.client_protocol_handler = RawHandler  # the driver cannot decode all that a failed condition answers
        for statement in random_schema(version):
            session.execute(statement)
        for statement in random_statements(count, count, version):
            writer.execute(statement)
        for statement in OF_SEVERAL_LINES:
            session.execute(statement)
        source = selected(node, version)
        assert sum(map(len, source.values())) > 100
        copied_log(node, tmp_path / "log")
        described = session.execute(f"DESCRIBE KEYSPACE {KEYSPACE} WITH INTERNALS")
        (tmp_path / "schema.cql").write_text("\n".join(row.create_statement for row in described))
        log, schema = str(tmp_path / "log"), ("--schema", str(tmp_path / "schema.cql"))
        assert (
            main(["inspect", "commitlog", log, *schema, "--format", "cql", "--output", str(tmp_path / "log.cql")]) == 0
        )
        summaries = [tmp_path / "1.txt", tmp_path / "2.txt"]
        for target, source_of_schema in zip(
            summaries, (schema, ("--contact-point", f"{node.contact_point}:{node.port}")), strict=True
        ):
            options = ("--format", "summary", "--output", str(target))
            assert main(["inspect", "commitlog", log, *source_of_schema, *options]) == 0
        assert summaries[0].read_text() == summaries[1].read_text()
        for table in tables(version):
            session.execute(f"TRUNCATE {table.full_name}")
        assert not any(selected(node, version).values())
        assert replay(cluster.connect(), (tmp_path / "log.cql").read_text()) > count / 2
        replayed = selected(node, version)
        for name, rows in source.items():
            for mine, its in zip(replayed[name], rows, strict=True):
                assert mine == its, name
        for table in tables(version):
            session.execute(f"TRUNCATE {table.full_name}")
        assert replay_queries(cluster.connect(), merged_queries(tmp_path)) > 100
        found = selected(node, version)
        for table in tables(version):
            if table.name != "counters":
                assert without_lists(table, found) == without_lists(table, source), table.name


def merged_queries(folder: Path) -> list[str | None]:
    """``source.query`` of all changes in a log, merged."""
    known = parse_schema((folder / "schema.cql").read_text(), "schema.cql").tables
    logged = logged_tables(known)
    logs = [(path.read_bytes(), path.name) for path in sorted((folder / "log").glob("*.log"))]
    rows = pa.concat_batches([batch.rows for log in logs for batch in read_log(*log, logged).batches])
    found = []
    for table in known:
        own = rows.filter(pc.equal(rows["table_id"], pa.scalar(bytes.fromhex(table.table_id), pa.binary(16))))
        found += queries(merged(own, table), table).to_pylist()
    return found


def without_lists(table: Table, rows: dict[str, Rows]) -> Rows:
    """Rows without the lists that are not frozen: CQL cannot say which of their entries were changed."""
    types = {**table.static, **table.regular}
    return [
        {name: cell for name, cell in row.items() if not types.get(name, "").startswith("list<")}
        for row in rows[table.name]
    ]
