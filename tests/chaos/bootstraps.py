"""What the tests of bootstraps that are disturbed share: configuration, loading, preparing, and judging the outcome."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from cassandra.concurrent import execute_concurrent_with_args

from ringsync.cluster.cluster import read_hosts
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import connect
from ringsync.config import load_config
from ringsync.progress import Progress, read_progress
from ringsync.replica.folders import base_folder
from ringsync.schema.table import TableSchema
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.bootstrap import prepare as bootstrap_prepare
from ringsync.steps.loop import put_status
from ringsync.streams.files import FileStream
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode, nodetool_command
from servers.jars import fetch
from tests.oracle import Rows, differences, replica_rows, source_rows

BATCH_ROWS = 200
"""Rows of one partition that are inserted at once."""


def write_conf(folder: Path, nodes: Sequence[CassandraNode], **sections: dict[str, Any]) -> Path:
    """Write a configuration for these nodes, whose store is the folder's ``lake``; sections come on top."""
    document: dict[str, Any] = {
        "server_name": "test",
        "cassandra": {"contact_points": [node.contact_point for node in nodes], "port": nodes[0].port},
        "store": {"url": "lake"},
    }
    path = folder / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    change_conf(path, **sections)
    return path


def nodetool_of(node: CassandraNode) -> list[str]:
    """The command that reaches a node's management interface."""
    return nodetool_command(node.folder, node.settings, fetch(f"cassandra-{node.settings.version}", node.cache), ())


def change_conf(path: Path, **sections: dict[str, Any]) -> None:
    """Change keys of some sections; a section that is given as empty loses all of its keys."""
    document = yaml.safe_load(path.read_text())
    for name, keys in sections.items():
        document[name] = {**document.get(name, {}), **keys} if keys else {}
    path.write_text(yaml.safe_dump(document))


def load_partitions(session: Any, table: str, partitions: Iterable[int], rows: int) -> None:
    """Insert many rows quickly, into a table with the columns ``id, seq, v``: all ints, the first two the key.

    :param partitions: their ids
    :param rows: of each of them; beyond :data:`BATCH_ROWS` a multiple of that
    """
    size = min(rows, BATCH_ROWS)
    insert = f"INSERT INTO {table} (id, seq, v) VALUES (?, ?, ?)"
    batch = session.prepare(f"BEGIN UNLOGGED BATCH {'; '.join([insert] * size)}; APPLY BATCH")
    batches = ((partition, range(start, start + size)) for partition in partitions for start in range(0, rows, size))
    parameters = (
        tuple(value for seq in numbers for value in (partition, seq, partition ^ seq)) for partition, numbers in batches
    )
    execute_concurrent_with_args(session, batch, parameters, concurrency=32)


def prepare(conf: Path, table: str, run: str, **options: Any) -> str:
    """The first step, in this process; gives the id of the bootstrap."""
    config = load_config(conf)
    given = dict.fromkeys(("mode", "splits", "columns", "token_range", "where")) | {
        "dry_run": False,
        "restart": False,
        "enable_cdc": False,
    }
    keyspace, _, name = table.partition(".")
    arguments = argparse.Namespace(**{**given, **options})
    store = store_of(config)
    application = Application("bootstrap_prepare", str(conf), config, store, (keyspace, name), run, arguments)
    report, code = bootstrap_prepare.run(application)
    assert code == ExitCode.OK
    return str(report["bootstrap"])


def say_emptied(conf: Path) -> None:
    """Say what an archive says that can delete in the ``cdc_raw`` of all nodes: cdc may be switched on."""
    config = load_config(conf)
    hosts = read_hosts(connect(cluster_settings(config)))
    nodes = {host.id: {"endpoint": host.endpoint, "empties": True} for host in hosts}
    put_status(store_of(config), "commitlog_archive", "default", {"nodes": nodes})


def progress_of(conf: Path, run: str) -> Progress:
    """How far a run is."""
    return read_progress(store_of(load_config(conf)), run)


def scan_report(conf: Path, run: str) -> dict[str, Any]:
    """The report of a run's scan."""
    report: dict[str, Any] = json.loads(store_of(load_config(conf)).get(f"reports/bootstrap_scan/{run}.json"))
    return report


def committed_rows(conf: Path, bootstrap: str) -> int:
    """The rows of all ranges in the ledger."""
    config = load_config(conf)
    session = connect(cluster_settings(config))
    query = f"SELECT rows FROM {config.state.keyspace}.bootstrap_range WHERE bootstrap_id = %s"
    return sum(row.rows or 0 for row in session.execute(query, (bootstrap,)))


def check(conf: Path, table: str, session: Any, report: Any, rows: int) -> None:
    """Replica and stream are exact, and no other file is there.

    :param report: of the scan
    :param rows: that the source has
    """
    check_rows(conf, table, session, report, rows)
    store = store_of(load_config(conf))
    topic, bucket = report["stream"]["topic"], report["stream"]["folder"]
    parts = {part.name for part in FileStream(store, topic).parts(bucket) or ()}
    found = store.list(f"streams/{topic}/{bucket}/")
    files = {f"{part}.{kind}" for part in parts for kind in ("avro", "index")}
    assert {s.key.rsplit("/")[-1] for s in found} == files | {"manifest.json"}
    data = [s for s in store.list(f"{base_folder(*table.split('.'))}/") if s.key.endswith(".parquet")]
    assert len(data) == report["replica"]["files"]


def check_rows(conf: Path, table: str, session: Any, report: Any, rows: int) -> None:
    """Replica and stream hold the source's rows, each once, cell by cell with writetime and expiry.

    :param session: the source is read with its consistency level
    """
    schema = read_table(session, *table.split("."))
    source = source_rows(session, schema, now=int(time.time()))
    # Not in the assertions: pytest would show millions of rows.
    found = len(source)
    wrong = differences(source, replica_rows(report["replica"]["uri"], schema))
    assert not wrong, ("replica", len(wrong), wrong[:5])
    stream = FileStream(store_of(load_config(conf)), report["stream"]["topic"])
    wrong = differences(source, message_rows(stream, report["stream"]["folder"], schema))
    assert not wrong, ("stream", len(wrong), wrong[:5])
    assert found == rows == report["rows"]


def message_rows(stream: FileStream, bucket: str, table: TableSchema) -> Rows:
    """The rows that a bucket's messages say, as the oracle gives those of a source: numbers, texts and sets of them."""
    rows: Rows = {}
    for message in stream.read(bucket):
        key = tuple(message["key"][column.name] for column in table.key_columns)
        assert key not in rows, f"the stream has {key} twice"
        after, cells = message["value"]["after"], message["value"]["cells"]
        rows[key] = {
            column.name: (after[column.name], *_times(cells[column.name]))
            for column in table.value_columns
            if after[column.name] is not None
        }
    return rows


def _times(cell: Any) -> tuple[Any, Any]:
    """Writetime and expiry of a column's cell, or lists of its elements'."""
    if "elements" in cell:
        elements = cell["elements"]
        return [one["writetime"] for one in elements], [one["expires_at"] for one in elements]
    return cell["writetime"], cell["expires_at"]
