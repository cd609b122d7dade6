"""A node of our own: it starts, keeps its data through kill -9, stays on loopback, and says what is wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import NoHostAvailable

from servers import ServerError
from servers.cassandra import CassandraNode, CommitLogEncryption, NodeSettings, write_configuration
from servers.certificates import make_certificates
from servers.process import session_members

pytestmark = pytest.mark.server


def listening_addresses(pid: int) -> set[str]:
    """The local addresses, in hexadecimal as the kernel prints them, of the sockets on which a process listens."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def own_node(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    """A node with passwords, TLS and client certificates: it may be killed, the shared one may not."""
    settings = NodeSettings(
        heap_mb=256,
        authenticator="password",
        client_tls=make_certificates(tmp_path_factory.mktemp("certificates")),
        client_certificates=True,
    )
    with CassandraNode(tmp_path_factory.mktemp("own"), settings.on_free_ports(), cache) as node:
        yield node


def test_only_loopback_is_listened_on(cassandra: CassandraNode) -> None:
    addresses = listening_addresses(cassandra.pid)
    assert addresses
    assert addresses <= LOOPBACK


def test_a_session_answers_and_nodetool_flushes(cassandra: CassandraNode, session: Any, keyspace: str) -> None:
    session.execute(f"CREATE TABLE {keyspace}.t (id int PRIMARY KEY, v vector<float, 2>)")
    session.execute(f"INSERT INTO {keyspace}.t (id, v) VALUES (1, [1, 2])")
    cassandra.nodetool("flush", keyspace, "t")
    assert list(cassandra.folder.glob(f"data/{keyspace}/t-*/oa-*-Data.db"))
    assert session.execute(f"SELECT v FROM {keyspace}.t").one().v == [1.0, 2.0]


def test_nodetool_reports_what_failed(cassandra: CassandraNode) -> None:
    with pytest.raises(ServerError, match=r"(?s)flush no_such_keyspace failed.*no_such_keyspace"):
        cassandra.nodetool("flush", "no_such_keyspace")


def test_data_survive_a_kill(own_node: CassandraNode) -> None:
    cluster = own_node.cluster()
    session = cluster.connect()
    session.execute("CREATE KEYSPACE k WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    session.execute("CREATE TABLE k.t (id int PRIMARY KEY) WITH cdc = true")
    session.execute("INSERT INTO k.t (id) VALUES (7)")
    # Periodic commit log sync: wait for what is on disk, the write above may not be yet.
    own_node.nodetool("flush", "k")
    cluster.shutdown()
    assert list(own_node.cdc_raw.glob("CommitLog-8-*.log"))
    old = own_node.pid
    own_node.kill()
    assert session_members(old) == []
    own_node.start()
    cluster = own_node.cluster()
    assert [row.id for row in cluster.connect().execute("SELECT id FROM k.t")] == [7]
    cluster.shutdown()


def test_a_wrong_password_is_refused(own_node: CassandraNode) -> None:
    cluster = own_node.cluster(auth_provider=PlainTextAuthProvider("cassandra", "wrong"))
    with pytest.raises(NoHostAvailable, match="incorrect"):
        cluster.connect()
    cluster.shutdown()


def test_a_client_without_tls_is_refused(own_node: CassandraNode) -> None:
    cluster = own_node.cluster(ssl_context=None, connect_timeout=3)
    with pytest.raises(NoHostAvailable):
        cluster.connect()
    cluster.shutdown()


def test_secrets_are_not_shown(own_node: CassandraNode) -> None:
    certificates = own_node.settings.client_tls
    assert certificates is not None
    assert certificates.password not in repr(own_node)
    assert (own_node.folder / "cassandra.yaml").stat().st_mode & 0o077 == 0
    assert certificates.client_key.stat().st_mode & 0o077 == 0


def test_a_taken_port_is_named(tmp_path: Path, cache: Path) -> None:
    settings = NodeSettings().on_free_ports()
    with socket.socket() as taken:
        taken.bind((settings.address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        node = CassandraNode(tmp_path, replace(settings, native_port=port), cache)
        with pytest.raises(ServerError, match=rf"CQL port 127\.0\.0\.1:{port} is taken"):
            node.start()


def test_an_early_end_shows_the_log(tmp_path: Path, cache: Path) -> None:
    node = CassandraNode(tmp_path, NodeSettings(compatibility="OLD").on_free_ports(), cache)
    with pytest.raises(
        ServerError, match=r"(?s)ended with code .* while starting.*system\.log.*StorageCompatibilityMode"
    ):
        node.start()
    with pytest.raises(ServerError, match="not running"):
        _ = node.pid


@pytest.mark.parametrize("copies", [False, True])
def test_who_joins_a_cluster_can_be_told_to_copy_its_data(tmp_path: Path, copies: bool) -> None:
    write_configuration(tmp_path, NodeSettings(auto_bootstrap=copies))
    assert yaml.safe_load((tmp_path / "cassandra.yaml").read_text())["auto_bootstrap"] is copies


def test_the_commit_log_can_be_compressed_and_encrypted(tmp_path: Path) -> None:
    """`tests/commitlogs/make.py` proves it with servers; here only the keys."""

    def configured(settings: NodeSettings) -> dict[str, Any]:
        write_configuration(tmp_path, settings)
        found: dict[str, Any] = yaml.safe_load((tmp_path / "cassandra.yaml").read_text())
        return found

    plain = configured(NodeSettings(version="4.0", commitlog_sync_ms=250))
    assert plain["commitlog_sync_period_in_ms"] == 250
    assert not plain.keys() & {"commitlog_compression", "transparent_data_encryption_options"}
    compressed = configured(NodeSettings(commitlog_compressor="ZstdCompressor"))
    assert compressed["commitlog_compression"] == [{"class_name": "ZstdCompressor"}]
    encryption = CommitLogEncryption(tmp_path / "k.jceks", "JCEKS", "of the store", "key:1", "of the key", 4)
    options = configured(NodeSettings(commitlog_encryption=encryption))["transparent_data_encryption_options"]
    assert (options["enabled"], options["key_alias"], options["chunk_length_kb"]) == (True, "key:1", 4)
    (parameters,) = options["key_provider"][0]["parameters"]
    assert (parameters["keystore_password"], parameters["key_password"]) == ("of the store", "of the key")
    assert "of the" not in repr(NodeSettings(commitlog_encryption=encryption))
