"""Measure the publishing of late rows: many small files of some tables, as stages write them; one local Cassandra node.

``python bench/late_rows.py`` prints a BENCHMARK_RESULT line. The rows' timestamps are an hour old; a part of
the rows has been deleted since. One cycle of ``out_of_sequence`` is measured: from the files to committed passes.
Cassandra runs on the same machine and competes for its cores.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import yaml
from cassandra.concurrent import execute_concurrent_with_args

from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import connect
from ringsync.config import load_config
from ringsync.schema.table import TableSchema
from ringsync.state.out_of_sequence import OutOfSequence
from ringsync.steps.application import Application
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode, NodeSettings
from tests.steps.late_files import Write, put_late

ROOT = Path(__file__).parent.parent
HIDDEN = 0.1
"""Share of the rows that has been deleted since."""


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=7)
    parser.add_argument("--files", type=int, default=700, help="files of all tables together (default: 700)")
    parser.add_argument("--rows", type=int, default=20, help="rows of a file (default: 20)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the server
    with tempfile.TemporaryDirectory(prefix="bench-late-rows.") as scratch:
        settings = NodeSettings(short_lived=False).on_free_ports()
        with CassandraNode(Path(scratch, "node"), settings, ROOT / ".cache") as node:
            print(f"BENCHMARK_RESULT {json.dumps(measure(Path(scratch), node, arguments))}")
    return 0


def measure(folder: Path, node: CassandraNode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Publish one row to warm up, then all."""
    conf = folder / "ringsync.yaml"
    cassandra = {"contact_points": [node.contact_point], "port": node.port}
    conf.write_text(yaml.safe_dump({"server_name": "bench", "cassandra": cassandra, "store": {"url": "lake"}}))
    config = load_config(conf)
    store = store_of(config)
    application = Application("out_of_sequence", str(conf), config, store, None, "bench", arguments)
    session = connect(cluster_settings(config))
    create_state(session, config)
    tables = create_tables(session, arguments.tables)
    with ControlServer() as control:
        queue = OutOfSequence(session, config.state.keyspace)
        late = LateRows(store, queue, LatePasses(application, session, control.address))
        for number, table in enumerate(tables):  # compiles the kernels
            put_late(store, [Write(2_000, 1, "x", 1), Write(2_000, None, None, 2)], table, f"warm-{number}")
        late.cycle()
        before = late.counts["published"]
        rows = put_files(session, store, tables, arguments.files, arguments.rows)
        began = time.perf_counter()
        late.cycle()
        seconds = time.perf_counter() - began
    assert late.counts["published"] - before == rows, late.counts
    return {
        "benchmark": "late_rows",
        "tables": len(tables),
        "files": arguments.files,
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_per_s": round(rows / seconds),
    }


def create_tables(session: Any, count: int) -> list[TableSchema]:
    """Create tables of one shape, with cdc."""
    session.execute("CREATE KEYSPACE late WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    for number in range(count):
        columns = "(id int, seq int, v text, PRIMARY KEY (id, seq))"
        session.execute(f"CREATE TABLE late.t{number} {columns} WITH cdc = true")
    return [read_table(session, "late", f"t{number}") for number in range(count)]


def put_files(session: Any, store: ObjectStore, tables: list[TableSchema], files: int, rows: int) -> int:
    """Write rows to the tables, and the same rows as files of late rows; return their number."""
    chance, hour_ago = random.Random(17), int(time.time() - 3600) * 10**6
    for number in range(files):
        table = tables[number % len(tables)]
        own = [
            Write(chance.randrange(2_000), chance.randrange(50), f"v{number}", hour_ago + number * rows + place)
            for place in range(rows)
        ]
        insert = session.prepare(f"INSERT INTO {table.full_name} (id, seq, v) VALUES (?, ?, ?) USING TIMESTAMP ?")
        execute_concurrent_with_args(session, insert, [(write.id, write.seq, write.v, write.at) for write in own])
        for write in own:
            if chance.random() < HIDDEN:
                session.execute(Write(write.id, write.seq, None, hour_ago + 10**9).cql(table.full_name))
        put_late(store, own, table, f"file-{number:06}")
    return files * rows


if __name__ == "__main__":
    sys.exit(main())
