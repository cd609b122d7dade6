"""Make the committed SSTables: `python -m tests.sstables.make [NAME…]` (default: all).

For each fixture a real server is started, told to create all tables and to write some rows, killed, and started again.
Then it is told the rest of `statements.py`, with several flushes on the way and no compaction.
Now it is asked what its tables hold, and two snapshots are taken: as flushed, and compacted. Its folder in `data/` has

* `sstables.tar.xz`: all files of both snapshots, which are also in the same order as on disk;
* `select.json.xz`: what SELECT said, see `tests/commitlogs/capture.py`; it is the same before and after compaction.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from servers.cassandra import CassandraNode, NodeSettings
from servers.jars import DEFAULT_CACHE
from tests.commitlogs.capture import captured
from tests.commitlogs.make import connected, packed, write
from tests.sstables.fixtures import FIXTURES, TAGS, Fixture
from tests.sstables.statements import all_schema_statements, all_statements, replayed_statements

KEYSPACES = ("shop", "MixedCase", "workload", "files")
FLUSHES = 3
SYNCED_SECONDS, EXPIRED_SECONDS = 3, 2


def make(fixture: Fixture, cache: Path) -> None:
    """
    Run a server and write the fixture's folder, which is replaced if it exists.

    :param fixture: which.
    :param cache: folder of the jars.
    """
    settings = NodeSettings(
        version=fixture.server_version,  # type: ignore[arg-type]
        compatibility=fixture.compatibility,
        sstable_format=fixture.sstable_format,  # type: ignore[arg-type]
        uuid_sstable_ids=fixture.uuid_ids,
        segment_mib=4,
    ).on_free_ports()
    with tempfile.TemporaryDirectory(prefix="ringsync-sstables-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        with CassandraNode(Path(scratch) / "node", settings, cache) as node:
            with connected(node) as cluster:
                session = cluster.connect()
                write(session, all_schema_statements(fixture.server_version, fixture.log_mode))
                write(session, replayed_statements(fixture.log_mode))
            time.sleep(SYNCED_SECONDS)
            node.kill()
            node.start()
            with connected(node) as cluster:
                fill(node, cluster.connect(), fixture)
            time.sleep(EXPIRED_SECONDS)
            flushed, before = snapshot(node, "flushed"), selected(node, fixture)
            node.nodetool("compact", *KEYSPACES[:1])
            for keyspace in KEYSPACES[1:]:
                node.nodetool("compact", keyspace)
            compacted, after = snapshot(node, "compacted"), selected(node, fixture)
            assert before["keyspaces"] == after["keyspaces"], "compaction changed what SELECT says"
            (made / "select.json.xz").write_bytes(packed(json.dumps(before, ensure_ascii=False, indent=1).encode()))
            (made / "sstables.tar.xz").write_bytes(packed(archive(node, flushed + compacted)))
        shutil.rmtree(fixture.folder, ignore_errors=True)
        shutil.copytree(made, fixture.folder)


def fill(node: CassandraNode, session: Any, fixture: Fixture) -> None:
    """Execute all statements, with flushes on the way."""
    node.nodetool("disableautocompaction", *KEYSPACES[:1])
    for keyspace in KEYSPACES[1:]:
        node.nodetool("disableautocompaction", keyspace)
    texts = all_statements(fixture.server_version, fixture.log_mode)
    size = -(-len(texts) // FLUSHES)
    for start in range(0, len(texts), size):
        write(session, texts[start : start + size])
        for keyspace in KEYSPACES:
            node.nodetool("flush", keyspace)


def selected(node: CassandraNode, fixture: Fixture) -> dict[str, Any]:
    """Return what SELECT says of all tables."""
    with connected(node) as cluster:
        return captured(cluster, fixture.server_version, KEYSPACES)


def snapshot(node: CassandraNode, tag: str) -> list[Path]:
    """Take a snapshot of what is flushed; return its files."""
    assert tag in TAGS
    node.nodetool("snapshot", "--skip-flush", "-t", tag, *KEYSPACES)
    found = sorted(node.folder.glob(f"data/*/*/snapshots/{tag}/*"))
    return [path for path in found if path.parts[-5] in KEYSPACES and path.is_file()]


def archive(node: CassandraNode, paths: list[Path]) -> bytes:
    """Return a tar of files, without anything about this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in paths:
            entry = tarfile.TarInfo(str(path.relative_to(node.folder / "data")))
            content = path.read_bytes()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def main() -> int:
    """Make what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.sstables.make", description="Make committed SSTables.")
    parser.add_argument("names", nargs="*", metavar="name", choices=[[], *FIXTURES], help="for example 5.0-da")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder of jars (default: .cache)")
    arguments = parser.parse_args()
    for name in arguments.names or FIXTURES:
        started = time.monotonic()
        make(FIXTURES[name], arguments.cache)
        size = sum(path.stat().st_size for path in (FIXTURES[name].folder).iterdir())
        print(f"{name}: {size / 1e3:.0f} kB ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
