"""Make the committed commit logs: `python -m tests.commitlogs.make [NAME…]` (names or their beginnings; default: all).

For each fixture a real server is started, told `statements.py`, asked what its tables hold, and ended: by a clean stop,
or by SIGKILL just after more rows were written. Its folder in `data/` then has

* the segments of `cdc_raw` that have an idx, packed (they are preallocated with zeros), and their idx files;
* `statements.cql`: what was executed, one statement per line; `beyond.cql`: what was executed after the last sync;
* `schema.cql`: the `schema.cql` files of a snapshot, one after the other (each has its table's types as well);
  `describe.cql`: `DESCRIBE KEYSPACE … WITH INTERNALS`; `dropped.cql`: tables that are gone;
* `select.json.xz`: what SELECT said, see `capture.py`.

Half-way through the statements, rows of a table without cdc fill the segment, so that each log has several.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.cassandra import CassandraNode, CommitLogEncryption, NodeSettings
from servers.jars import DEFAULT_CACHE
from servers.java import find_java_home
from tests.commitlogs.capture import captured
from tests.commitlogs.fixtures import COMPRESSORS, DATA, KEYSTORES, MODES, Fixture, Keystore, fixture_named
from tests.commitlogs.statements import schema_statements, statements

KEYSPACES = ("shop", "MixedCase")
FILLER = "CREATE TABLE shop.filler (id int PRIMARY KEY, v blob)"
FILLER_ROWS, FILLER_BYTES = 12, 100_000
BARRIER = "INSERT INTO shop.beyond (id, v) VALUES (-1, 'barrier') USING TIMESTAMP 1600000000000000"
BEYOND = [f"INSERT INTO shop.beyond (id, v) VALUES ({number}, 'beyond the idx')" for number in range(1, 21)]
SYNC_MS, SLOW_SYNC_MS = 200, 3000
MARKER_SECONDS = 0.4
"""In periodic mode a plain segment gets a marker every 100 ms, whether it is synced or not."""
EXPIRED_SECONDS = 2
NAMES = [
    *(f"{mode}-plain" for mode in MODES),
    *(f"{mode}-{codec}" for codec in ("lz4", "snappy", "deflate", "zstd") for mode in MODES),
    *(f"{mode}-plain-killed" for mode in MODES),
    "5.0-v8-lz4-killed",
    *(f"{mode}-jceks" for mode in MODES),
    "5.0-v8-pkcs12",
    "5.0-v8-jceks-killed",
]
PRINT_KEY = """
var store = java.security.KeyStore.getInstance(new java.io.File("{path}"), "{store}".toCharArray());
System.out.println(java.util.HexFormat.of().formatHex(store.getKey("{alias}", "{key}".toCharArray()).getEncoded()));
/exit
"""


def make(fixture: Fixture, cache: Path) -> None:
    """
    Run a server and write the fixture's folder, which is replaced if it exists.

    :param fixture: which.
    :param cache: folder of the jars.
    """
    with tempfile.TemporaryDirectory(prefix="ringsync-commitlog-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        node = CassandraNode(Path(scratch) / "node", settings(fixture), cache)
        with node:
            fill(node, fixture, made)
            if fixture.killed:
                node.kill()
        pack(node.cdc_raw, made)
        shutil.rmtree(fixture.folder, ignore_errors=True)
        shutil.copytree(made, fixture.folder)


def settings(fixture: Fixture) -> NodeSettings:
    """Return how the fixture's server is set up."""
    keystore = fixture.keystore
    encryption = None
    if keystore is not None:
        encryption = CommitLogEncryption(
            keystore.path,
            keystore.store_type,  # type: ignore[arg-type]
            keystore.store_password,
            keystore.key_alias,
            keystore.key_password,
            chunk_kib=1,  # so that mutations lie across blocks
        )
    return NodeSettings(
        version=fixture.server_version,  # type: ignore[arg-type]
        compatibility="NONE" if fixture.log_version == 8 else "CASSANDRA_4",
        commitlog_sync_ms=SLOW_SYNC_MS if fixture.killed else SYNC_MS,
        commitlog_compressor=COMPRESSORS[fixture.codec],
        commitlog_encryption=encryption,
    ).on_free_ports()


def fill(node: CassandraNode, fixture: Fixture, made: Path) -> None:
    """Execute all statements, and write everything but the log into a folder."""
    with connected(node) as cluster, connected(node) as reader:
        fill_by(node, cluster.connect(), reader, fixture, made)


@contextmanager
def connected(node: CassandraNode) -> Iterator[Any]:
    """A cluster object of the driver that does not look at the schema."""
    cluster = node.cluster(schema_metadata_enabled=False, token_metadata_enabled=False)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def fill_by(node: CassandraNode, session: Any, reader: Any, fixture: Fixture, made: Path) -> None:
    """As `fill`, by a session that writes and a cluster object that reads."""
    creating, writing = [*schema_statements(fixture.mode), FILLER], statements(fixture.mode)
    write(session, creating)
    dropped = write(session, writing[: len(writing) // 2])
    filler = session.prepare("INSERT INTO shop.filler (id, v) VALUES (?, ?)")
    for number in range(FILLER_ROWS):
        session.execute(filler, (number, bytes(FILLER_BYTES)))
    dropped += write(session, writing[len(writing) // 2 :])
    executed = creating + writing
    if fixture.killed:
        executed.append(BARRIER)
        for _ in range(2):  # what was written before the first sync that begins after the first barrier is on disk
            wait_for_sync(node, session)
    time.sleep(EXPIRED_SECONDS)
    answer = captured(reader, fixture.server_version, KEYSPACES, without=("filler",))
    (made / "select.json.xz").write_bytes(packed(json.dumps(answer, ensure_ascii=False, indent=1).encode()))
    (made / "statements.cql").write_text("\n".join(executed) + "\n")
    described = [list(session.execute(f'DESCRIBE KEYSPACE "{keyspace}" WITH INTERNALS')) for keyspace in KEYSPACES]
    write_texts(made / "describe.cql", [row.create_statement for rows in described for row in rows])
    write_texts(made / "dropped.cql", dropped)
    write_texts(made / "schema.cql", snapshot_schemas(node))
    if fixture.killed:
        (made / "beyond.cql").write_text("\n".join(BEYOND) + "\n")
        wait_for_sync(node, session)
        write(session, BEYOND)
        time.sleep(MARKER_SECONDS)


def write(session: Any, texts: list[str]) -> list[str]:
    """Execute statements; return the descriptions of the tables that they drop."""
    dropped = []
    for text in texts:
        if text.startswith("DROP TABLE "):
            name = text.removeprefix("DROP TABLE ")
            dropped += [row.create_statement for row in session.execute(f"DESCRIBE TABLE {name} WITH INTERNALS")]
        try:
            session.execute(text)
        except Exception as error:
            raise RuntimeError(f"the server refuses: {text[:2000]}") from error
    return dropped


def wait_for_sync(node: CassandraNode, session: Any) -> None:
    """Write a row and wait until an idx has changed."""

    def state() -> dict[str, str]:
        return {idx.name: idx.read_text() for idx in node.cdc_raw.glob("*_cdc.idx")}

    before = state()
    session.execute(BARRIER)
    while state() == before:
        time.sleep(0.005)


def snapshot_schemas(node: CassandraNode) -> list[str]:
    """Take a snapshot without flushing; return the texts of its `schema.cql` files, by path."""
    node.nodetool("snapshot", "--skip-flush", "-t", "fixture", *KEYSPACES)
    paths = sorted(node.folder.glob("data/*/*/snapshots/fixture/schema.cql"))
    return [path.read_text() for path in paths if path.parts[-5] in KEYSPACES]


def write_texts(path: Path, texts: list[str]) -> None:
    """Write texts with an empty line after each."""
    path.write_text("".join(text.strip() + "\n\n" for text in texts))


def pack(cdc_raw: Path, made: Path) -> None:
    """Pack the segments that have an idx; the others hold nothing of tables with cdc."""
    for idx in sorted(cdc_raw.glob("*_cdc.idx")):
        segment = idx.with_name(idx.name.replace("_cdc.idx", ".log"))
        (made / idx.name).write_bytes(idx.read_bytes())
        (made / f"{segment.name}.xz").write_bytes(packed(segment.read_bytes()))


def packed(content: bytes) -> bytes:
    """Return the content, compressed as well as can be."""
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


def make_keystore(keystore: Keystore) -> None:
    """Make a keystore with a new key by keytool, and write the key's bytes beside it, unless both are there."""
    if keystore.path.exists() and keystore.key_file.exists():
        return
    binaries = find_java_home() / "bin"
    keystore.path.unlink(missing_ok=True)
    keystore.path.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "keyalg": "AES",
        "keysize": str(keystore.key_bits),
        "alias": keystore.key_alias,
        "keystore": str(keystore.path),
        "storetype": keystore.store_type,
        "storepass": keystore.store_password,
        "keypass": keystore.key_password,
    }
    arguments = [part for name, value in options.items() for part in (f"-{name}", value)]
    subprocess.run([binaries / "keytool", "-genseckey", *arguments], check=True, capture_output=True)
    script = PRINT_KEY.format(
        path=keystore.path, store=keystore.store_password, alias=keystore.key_alias, key=keystore.key_password
    )
    shell = [binaries / "jshell", "-s", "-"]
    answer = subprocess.run(shell, input=script, check=True, capture_output=True, text=True)
    assert len(bytes.fromhex(answer.stdout)) * 8 == keystore.key_bits, answer
    keystore.key_file.write_text(answer.stdout)


def main() -> int:
    """Make what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.commitlogs.make", description="Make committed commit logs.")
    parser.add_argument("names", nargs="*", metavar="name", help="names or their beginnings, for example 5.0-v8")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder of jars (default: .cache)")
    arguments = parser.parse_args()
    exact = [name for name in arguments.names if name in NAMES]
    beginnings = tuple(name for name in arguments.names if name not in NAMES)
    chosen = [name for name in NAMES if name in exact or name.startswith(beginnings) or not arguments.names]
    if not chosen:
        parser.error(f"no fixture is called like that; there are {', '.join(NAMES)}")
    for keystore in KEYSTORES.values():
        make_keystore(keystore)
    for name in chosen:
        started = time.monotonic()
        make(fixture_named(name), arguments.cache)
        size = sum(path.stat().st_size for path in (DATA / name).iterdir())
        print(f"{name}: {size / 1e3:.0f} kB ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
