"""Make the commit logs that bench/commitlog.py reads; a real Cassandra 5.0 node writes them, once for all runs."""

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

KEYSPACE = "bench"
WRITE_SECONDS = 900
CREATE_KEYSPACE = (
    f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} WITH replication = "
    "{'class': 'SimpleStrategy', 'replication_factor': 1}"
)
TABLES = {
    "orders": "customer text, seq int, n int, amount bigint, name text, ts timestamp, score double, ref uuid, "
    "PRIMARY KEY (customer, seq)",
    "baskets": "customer text PRIMARY KEY, tags set<text>, prices map<text, int>, notes list<text>",
}
TABLE_IDS = {"orders": "5b1ad7a0-0000-11ef-8000-000000000001", "baskets": "5b1ad7a0-0000-11ef-8000-000000000002"}
SETTINGS = NodeSettings(version="5.0", cdc=True, segment_mib=32, compatibility="NONE", heap_mb=1024, short_lived=False)


@dataclass(frozen=True)
class DataSet:
    """Segments of a node that has written nothing else for a client.

    :ivar name: ``uniform``: inserts of six cells, 158 bytes each; ``mix``: see WriteLog.java
    :ivar statements: number of statements that the client wrote; each is a record of the log
    :ivar segments: the segments in the order of the log
    :ivar version: Cassandra's version
    """

    name: str
    statements: int
    segments: tuple[Path, ...]
    version: str = SETTINGS.version

    @property
    def log_bytes(self) -> int:
        """Size of the records, bytes; the last segments have free space."""
        return sum(_used(segment.read_bytes()) for segment in self.segments)


def creation() -> list[str]:
    """Return the statements that create the tables, with their ids."""
    return [
        f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.{name} ({columns}) WITH id = {TABLE_IDS[name]} AND cdc = true"
        for name, columns in TABLES.items()
    ]


def data_set(folder: Path, name: str, statements: int, cache: Path) -> DataSet:
    """Return the segments of a node that has written this number of statements; make them if they are missing.

    :param folder: folder that keeps the segments, in a folder of their own
    :param name: ``uniform`` or ``mix``
    :param cache: folder that keeps the jars
    :raises ServerError: the node or its client fails
    """
    target, marker = folder / name, folder / name / "written.json"
    if not marker.exists() or json.loads(marker.read_text()) != statements:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        node = CassandraNode(target / "node", replace(SETTINGS).on_free_ports(), cache)
        with node:
            create_tables(node)
            write(node, name, statements)
        for segment in node.cdc_raw.glob("CommitLog-*.log"):
            segment.rename(target / segment.name)
        shutil.rmtree(node.folder)
        marker.write_text(json.dumps(statements))
    return DataSet(name, statements, segments_in(target))


def _used(segment: bytes) -> int:
    """Find where the zeros begin that fill the rest of a segment."""
    return len(segment.rstrip(b"\0"))


def schema_file(folder: Path) -> Path:
    """Write the tables as ``schema.cql`` into a folder."""
    path = folder / "schema.cql"
    path.write_text("".join(f"{statement};\n" for statement in creation()))
    return path


def segments_in(folder: Path) -> tuple[Path, ...]:
    """List segments in the order of their ids."""
    return tuple(sorted(folder.glob("CommitLog-*.log"), key=lambda path: int(path.stem.rpartition("-")[2])))


def create_tables(node: CassandraNode) -> None:
    """Create keyspace and tables on a running node."""
    cluster = node.cluster()
    try:
        session = cluster.connect()
        for statement in (CREATE_KEYSPACE, *creation()):
            session.execute(statement)
    finally:
        cluster.shutdown()


def write(node: CassandraNode, what: str, statements: int) -> None:
    """Write to a running node; a million statements take 20 s on two idle cores.

    :raises ServerError: the client fails; with its last lines
    """
    jars = fetch(f"cassandra-{SETTINGS.version}", node.cache).resolve()
    command = [
        *(str(find_java_home() / "bin" / "java"), "-Xmx512m", "-XX:+UseSerialGC"),
        f"-Dlogback.configurationFile={node.folder / 'logback-off.xml'}",
        *("-cp", f"{jars}/*", str(Path(__file__).with_name("WriteLog.java"))),
        *(node.contact_point, str(node.port), what, str(statements)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
    if done.returncode != 0:
        raise ServerError(f"The log could not be written:\n{last_lines(done.stdout + done.stderr)}")
