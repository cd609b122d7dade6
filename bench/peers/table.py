"""Make the table that bench/scan.py reads, on a real node: once, flushed and compacted."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from servers import ServerError, last_lines
from servers.cassandra import MODULE_FLAGS, CassandraNode
from servers.jars import fetch
from servers.java import find_java_home

KEYSPACE, TABLE, EMPTY_TABLE = "bench", "orders", "nothing"
VALUE_COLUMNS = ("n", "amount", "name", "ts", "score", "ref")
COLUMNS = ("customer", "seq", *VALUE_COLUMNS)
TYPES = ("text", "int", "int", "bigint", "text", "timestamp", "double", "uuid")
PARTITION_ROWS = 5
WRITE_SECONDS = 600

CREATE_KEYSPACE = (
    f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} WITH replication = "
    "{'class': 'SimpleStrategy', 'replication_factor': 1}"
)
INSERT = f"INSERT INTO {KEYSPACE}.{TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * 8)}) USING TIMESTAMP ?"


def create_table(name: str) -> str:
    """Return the CREATE TABLE of the table to read, or of a similar one."""
    columns = ", ".join(f"{column} {kind}" for column, kind in zip(COLUMNS, TYPES, strict=True))
    return f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.{name} ({columns}, PRIMARY KEY (customer, seq))"


def fill(node: CassandraNode, rows: int) -> None:
    """Create the table, and an empty one of the same kind, unless the node's folder has them with as many rows.

    :param rows: a multiple of ``PARTITION_ROWS``
    :raises ServerError: Cassandra's own tools fail; with their last lines
    """
    marker = node.folder / "loaded-rows"
    if marker.exists() and marker.read_text() == str(rows):
        return
    marker.unlink(missing_ok=True)
    cluster = node.cluster()
    try:
        session = cluster.connect()
        for statement in (CREATE_KEYSPACE, create_table(TABLE), create_table(EMPTY_TABLE)):
            session.execute(statement)
        session.execute(f"TRUNCATE {KEYSPACE}.{TABLE}")
    finally:
        cluster.shutdown()
    with tempfile.TemporaryDirectory(dir=node.folder) as folder:
        sstables = Path(folder, KEYSPACE, TABLE)
        sstables.mkdir(parents=True)
        write_sstables(node, sstables, rows)
        node.nodetool("import", KEYSPACE, TABLE, str(sstables))
    node.nodetool("compact", KEYSPACE, TABLE)
    # dsbulk and the Spark connector cut the table by these estimates; the server makes them only every five minutes.
    node.nodetool("refreshsizeestimates")
    marker.write_text(str(rows))


def write_sstables(node: CassandraNode, folder: Path, rows: int) -> None:
    """Write the table's files by Cassandra's own classes; no node need run."""
    jars = fetch(f"cassandra-{node.settings.version}", node.cache)
    command = [
        *(str(find_java_home() / "bin" / "java"), *MODULE_FLAGS, "-Xmx1g", "-XX:+UseSerialGC"),
        *(f"-Dcassandra.storagedir={folder.parent}", f"-Dlogback.configurationFile={node.folder / 'logback-off.xml'}"),
        *("-cp", f"{jars.resolve()}/*", str(Path(__file__).with_name("WriteTable.java"))),
        *(str(folder), create_table(TABLE), INSERT, str(rows), str(PARTITION_ROWS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
    if done.returncode != 0:
        raise ServerError(f"The table's files could not be written:\n{last_lines(done.stdout + done.stderr)}")
