"""Make the SSTables that bench/sstable.py reads; a real Cassandra 5.0 node writes them, once for all runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from servers import ServerError, last_lines
from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import fetch
from servers.java import find_java_home

KEYSPACE, TABLE = "bench", "ev"
COLUMNS = (
    "id text, seq int, n int, amount bigint, name text, ts timestamp, score double, ref uuid, PRIMARY KEY (id, seq)"
)
VERSIONS = 4
WRITE_SECONDS = 900
CREATION = (
    f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 1}}",
    f"CREATE TABLE {KEYSPACE}.{TABLE} ({COLUMNS})",
)
SETTINGS = NodeSettings(version="5.0", cdc=False, segment_mib=32, compatibility="NONE", heap_mb=1024, short_lived=False)


@dataclass(frozen=True)
class SSTableSet:
    """The snapshots of one table.

    :ivar overlapping: ``VERSIONS`` SSTables; half of the rows of each are in all of them
    :ivar compacted: one SSTable with the same rows
    :ivar version: Cassandra's version
    """

    overlapping: Path
    compacted: Path
    version: str = SETTINGS.version


def sstables(folder: Path, rows: int, cache: Path) -> SSTableSet:
    """Return the snapshots of a node that has written this number of rows into each of ``VERSIONS`` SSTables; make them
    if they are missing.

    :param folder: folder that keeps the snapshots
    :param cache: folder that keeps the jars
    :raises ServerError: the node or its client fails
    """
    made, marker = SSTableSet(folder / "overlapping", folder / "compacted"), folder / "written.json"
    if not marker.exists() or json.loads(marker.read_text()) != rows or not (folder / "node").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        node = node_of(folder, cache)
        with node:
            _create(node)
            node.nodetool("disableautocompaction")
            for version in range(VERSIONS):
                before = _data_files(node)
                _write(node, version, rows)
                node.nodetool("flush", KEYSPACE, TABLE)
                # The node also flushes when its memory is full.
                node.nodetool("compact", "--user-defined", *map(str, _data_files(node) - before))
            _snapshot(node, made.overlapping)
            node.nodetool("compact", KEYSPACE, TABLE)
            _snapshot(node, made.compacted)
        marker.write_text(json.dumps(rows))
    return made


def node_of(folder: Path, cache: Path) -> CassandraNode:
    """Return the node that has written the snapshots, not started; its table is compacted."""
    return CassandraNode(folder / "node", replace(SETTINGS).on_free_ports(), cache)


def _data_files(node: CassandraNode) -> set[Path]:
    return set(node.folder.glob(f"data/{KEYSPACE}/{TABLE}-*/*-Data.db"))


def _create(node: CassandraNode) -> None:
    cluster = node.cluster()
    try:
        session = cluster.connect()
        for statement in CREATION:
            session.execute(statement)
    finally:
        cluster.shutdown()


def _write(node: CassandraNode, version: int, rows: int) -> None:
    jars = fetch(f"cassandra-{SETTINGS.version}", node.cache).resolve()
    command = [
        *(str(find_java_home() / "bin" / "java"), "-Xmx512m", "-XX:+UseSerialGC"),
        f"-Dlogback.configurationFile={node.folder / 'logback-off.xml'}",
        *("-cp", f"{jars}/*", str(Path(__file__).with_name("WriteVersions.java"))),
        *(node.contact_point, str(node.port), KEYSPACE, str(version), str(rows)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
    if done.returncode != 0:
        raise ServerError(f"The rows could not be written:\n{last_lines(done.stdout + done.stderr)}")


def _snapshot(node: CassandraNode, target: Path) -> None:
    """Copy a snapshot of the table, as ``<target>/<keyspace>/<table>-<id>/``."""
    node.nodetool("snapshot", "--tag", target.name, "--table", TABLE, KEYSPACE)
    (source,) = node.folder.glob(f"data/{KEYSPACE}/{TABLE}-*/snapshots/{target.name}")
    shutil.copytree(source, target / KEYSPACE / source.parents[1].name)
