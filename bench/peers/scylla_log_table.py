"""Make the CDC log that bench/scylla_log.py reads on a real Cassandra node: once, flushed and compacted.

The node, behind a stand-in (tests/scylla_server), stands for a Scylla of three nodes with eight shards and 256 token
ranges each, in its first generation. Its log has a row for each change of ``CREATE TABLE bench.t (pk int, ck int,
a int, b text, c bigint, PRIMARY KEY (pk, ck))``. Row i is in stream i mod 6144. Of ten rows

0 to 5  are inserts (operation 2): a = i mod 777, b = "text number " and i mod 5000, c = i × 1,000,003
6 to 8  are updates (1) of c and, but for 8, a; row 7 also sets b to null
9       is a row deletion (3)

Each row is a group of its own (``cdc$end_of_batch``), and has pk = 31 i mod 100,003 and ck = i mod 1000. ``cdc$time``
is spread evenly over an hour.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from cassandra.concurrent import execute_concurrent_with_args
from cassandra.util import sortedset

from ringsync.cluster.session import ClusterSettings, close_all, connect
from ringsync.scylla.stream_ids import StreamId
from servers import ServerError, last_lines
from servers.cassandra import MODULE_FLAGS, CassandraNode
from servers.jars import fetch
from servers.java import find_java_home
from tests.scylla_server.proxy import StandIn
from tests.scylla_sim.arithmetic import stream_id

KEYSPACE, TABLE = "bench", "t"
LOG = f"{TABLE}_scylla_cdc_log"
NODES, SHARDS, VNODES = 3, 8, 256
GENERATION_MS = 1_700_000_000_000
START_MS = GENERATION_MS + 60_000
SPAN_MS = 3_600_000
END_MS = START_MS + SPAN_MS
TTL_S = 30 * 86_400
"""Longer than Scylla's day, so that the files of ``--keep`` last."""
WRITE_SECONDS = 600

COLUMNS = {
    '"cdc$stream_id"': "blob",
    '"cdc$time"': "timeuuid",
    '"cdc$batch_seq_no"': "int",
    '"cdc$operation"': "tinyint",
    '"cdc$end_of_batch"': "boolean",
    "pk": "int",
    "ck": "int",
    "a": "int",
    "b": "text",
    '"cdc$deleted_b"': "boolean",
    "c": "bigint",
}
"""Columns of the log that are not null in all rows."""

_LOG_KEY = 'PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no")'
CREATE_LOG = (
    f"CREATE TABLE {KEYSPACE}.{LOG} ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}, {_LOG_KEY})"
)
"""For the files, which name their columns. In the node the stand-in creates the log, with all its columns."""
INSERT = (
    f"INSERT INTO {KEYSPACE}.{LOG} ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "USING TIMESTAMP ? AND TTL ?"
)
SCHEMA = (
    f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} WITH replication = "
    "{'class': 'SimpleStrategy', 'replication_factor': 1}",
    f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.{TABLE} (pk int, ck int, a int, b text, c bigint, PRIMARY KEY (pk, ck)) "
    f"WITH cdc = {{'enabled': 'true', 'ttl': '{TTL_S}'}}",
)


@dataclass(frozen=True)
class Counts:
    """What a reader of the log has seen: of equal readers all of it is equal.

    :ivar values: values of a, b and c that are not null
    :ivar deleted_values: marks of values that were set to null
    """

    rows: int
    deletions: int
    values: int
    text_bytes: int
    deleted_values: int
    sum_keys: int
    sum_a: int
    sum_c: int


def expected(rows: int) -> Counts:
    """Count what the log has, from what the module's text says of it."""
    i = np.arange(rows, dtype=np.int64)
    kind = i % 10
    inserted, deleted = kind < 6, kind == 9
    has_a, has_c = ~deleted & (kind != 8), ~deleted
    text = len("text number ") * int(inserted.sum()) + sum(len(str(n)) for n in (i[inserted] % 5000).tolist())
    return Counts(
        rows,
        deletions=int(deleted.sum()),
        values=int(has_a.sum() + inserted.sum() + has_c.sum()),
        text_bytes=text,
        deleted_values=int((kind == 7).sum()),
        sum_keys=int((i * 31 % 100_003 + i % 1000).sum()),
        sum_a=int((i[has_a] % 777).sum()),
        sum_c=int((i[has_c] * 1_000_003).sum()),
    )


def token_ranges(seed: int = 17) -> list[tuple[int, list[StreamId]]]:
    """Make the generation: the end of each token range, and its streams in the order of the shards."""
    chance = random.Random(seed)
    ends = sorted(chance.randrange(-(2**63), 2**63) for _ in range(NODES * VNODES))
    ranges = []
    for index, end in enumerate(ends):
        start = ends[index - 1] if index else ends[-1] - 2**64
        tokens = (start + 1 + (end - start) * shard // SHARDS for shard in range(SHARDS))
        signed = ((token + 2**63) % 2**64 - 2**63 for token in tokens)
        ranges.append((end, [StreamId(stream_id(chance, token, index)) for token in signed]))
    return ranges


def fill(scylla: StandIn, rows: int) -> None:
    """Create the log and the generation, unless the node's folder has them with as many rows.

    :raises ServerError: Cassandra's own tools fail; with their last lines
    """
    node = scylla.node
    marker = node.folder / "loaded-log-rows"
    if marker.exists() and marker.read_text() == str(rows):
        return
    marker.unlink(missing_ok=True)
    ranges = token_ranges()
    try:
        session = connect(ClusterSettings((scylla.host,), scylla.port))
        for statement in SCHEMA:
            session.execute(statement)
    finally:
        close_all()
    scylla.session().execute(f"TRUNCATE {KEYSPACE}.{LOG}")
    _publish(scylla.session(), ranges)
    with tempfile.TemporaryDirectory(dir=node.folder) as folder:
        sstables = Path(folder, KEYSPACE, LOG)
        sstables.mkdir(parents=True)
        _write_sstables(node, sstables, rows, [stream for _, streams in ranges for stream in streams])
        node.nodetool("import", KEYSPACE, LOG, str(sstables))
    node.nodetool("compact", KEYSPACE, LOG)
    marker.write_text(str(rows))


def _publish(session: Any, ranges: list[tuple[int, list[StreamId]]]) -> None:
    time = datetime.fromtimestamp(GENERATION_MS / 1000, UTC)
    insert = session.prepare(
        "INSERT INTO sim_distributed.cdc_streams_descriptions_v2 (time, range_end, streams) VALUES (?, ?, ?)"
    )
    rows = [(time, end, sortedset(stream.data for stream in streams)) for end, streams in ranges]
    execute_concurrent_with_args(session, insert, rows)
    session.execute(
        "INSERT INTO sim_distributed.cdc_generation_timestamps (key, time) VALUES ('timestamps', %s)", (time,)
    )


def _write_sstables(node: CassandraNode, folder: Path, rows: int, streams: list[StreamId]) -> None:
    """Write the log's files by Cassandra's own classes; no node need run."""
    jars = fetch(f"cassandra-{node.settings.version}", node.cache)
    ids = folder.parent / "streams"
    ids.write_text("".join(f"{stream.data.hex()}\n" for stream in streams))
    command = [
        *(str(find_java_home() / "bin" / "java"), *MODULE_FLAGS, "-Xmx1g", "-XX:+UseSerialGC"),
        *(f"-Dcassandra.storagedir={folder.parent}", f"-Dlogback.configurationFile={node.folder / 'logback-off.xml'}"),
        *("-cp", f"{jars.resolve()}/*", str(Path(__file__).with_name("WriteScyllaLog.java"))),
        *(str(folder), CREATE_LOG, INSERT, str(rows), str(ids)),
        *(str(START_MS * 1000), str(SPAN_MS * 1000), str(TTL_S)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
    if done.returncode != 0:
        raise ServerError(f"The log's files could not be written:\n{last_lines(done.stdout + done.stderr)}")
