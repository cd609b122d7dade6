"""Connections, and the words in which they fail."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cassandra.protocol import ServerError

from ringsync.cluster.session import (
    ClusterError,
    ClusterSettings,
    FewRetries,
    UnreachableError,
    close_all,
    connect,
    explained_errors,
)
from ringsync.config.sections import Tls
from ringsync.steps.down_nodes import read_hint_window
from servers.cassandra import CassandraNode, NodeSettings
from servers.certificates import make_certificates
from tests.sources.clusters import settings_of

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    """A node that wants TLS and passwords."""
    folder = tmp_path_factory.mktemp("guarded")
    certificates = make_certificates(folder / "certificates")
    settings = replace(
        NodeSettings().on_free_ports(), heap_mb=256, authenticator="password", client_tls=certificates, cdc=False
    )
    with CassandraNode(folder / "node", settings, cache) as node:
        yield node


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


def test_one_session_a_process_and_settings(cassandra: CassandraNode) -> None:
    settings = settings_of(cassandra)
    first = connect(settings)
    assert connect(replace(settings)) is first
    assert connect(replace(settings, page_size=7)) is not first
    assert first.cluster.protocol_version == 5
    close_all()
    assert connect(settings) is not first
    assert connect(settings).execute("SELECT key FROM system.local").one().key == "local"


def test_a_node_says_for_how_long_it_keeps_hints(cassandra: CassandraNode) -> None:
    session = connect(settings_of(cassandra))
    assert read_hint_window(session, of_scylla=False) == 10_800_000


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{port}.*[Cc]onnection refused") as caught:
            connect(ClusterSettings(("127.0.0.1",), port))
    assert "cassandra.contact_points" in str(caught.value)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(UnreachableError, match=r"no such host: nowhere\.invalid"):
        connect(ClusterSettings(("nowhere.invalid",)))


def test_a_datacenter_that_does_not_exist(cassandra: CassandraNode) -> None:
    with pytest.raises(ClusterError, match=r"no datacenter europe; it has datacenter1"):
        connect(settings_of(cassandra, local_datacenter="europe"))
    connect(settings_of(cassandra, local_datacenter="datacenter1"))


def test_a_server_that_speaks_another_protocol(cassandra: CassandraNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringsync.cluster.session.NATIVE_PROTOCOL", 65)
    with pytest.raises(ClusterError, match=r"does not speak native protocol 65.*Cassandra 4\.0"):
        connect(settings_of(cassandra))


def test_passwords(guarded: CassandraNode) -> None:
    connect(settings_of(guarded))
    with pytest.raises(ClusterError, match="refused user cassandra") as caught:
        connect(settings_of(guarded, password="guess-4711"))
    assert "guess-4711" not in str(caught.value)
    with pytest.raises(ClusterError, match=r"requires a user name .* cassandra\.username"):
        connect(settings_of(guarded, username=None, password=None))


def test_a_missing_permission_names_its_grant(guarded: CassandraNode) -> None:
    admin = connect(settings_of(guarded))
    admin.execute("CREATE KEYSPACE shop WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
    admin.execute("CREATE TABLE shop.orders (id int PRIMARY KEY)")
    admin.execute("CREATE ROLE reader WITH PASSWORD = 'r' AND LOGIN = true")
    reader = connect(settings_of(guarded, username="reader", password="r"))
    with (
        pytest.raises(ClusterError, match=r"GRANT SELECT ON TABLE shop\.orders TO reader"),
        explained_errors("reader"),
    ):
        reader.execute("SELECT * FROM shop.orders")


def test_tls(guarded: CassandraNode, tmp_path: Path) -> None:
    assert guarded.settings.client_tls is not None
    authority = str(guarded.settings.client_tls.authority)
    stranger = str(make_certificates(tmp_path / "other").authority)
    with pytest.raises(ClusterError, match=r"certificate verify failed.*ca_file"):
        connect(settings_of(guarded, tls=Tls(ca_file=stranger)))
    with pytest.raises(ClusterError, match=r"cannot read the TLS file /nowhere/ca\.pem"):
        connect(settings_of(guarded, tls=Tls(ca_file="/nowhere/ca.pem")))
    (tmp_path / "broken.pem").write_text("no certificate")
    with pytest.raises(ClusterError, match="not usable PEM"):
        connect(settings_of(guarded, tls=Tls(ca_file=str(tmp_path / "broken.pem"))))
    connect(settings_of(guarded, tls=Tls(ca_file=authority, verify_hostname=False)))


def test_tls_where_only_one_side_speaks_it(guarded: CassandraNode, cassandra: CassandraNode) -> None:
    with pytest.raises(UnreachableError, match=r"if the cluster requires TLS, set cassandra\.tls"):
        connect(settings_of(guarded, tls=None, connect_timeout_s=3.0))
    with pytest.raises(ClusterError, match="check that the node speaks TLS"):
        connect(settings_of(cassandra, tls=Tls(verify_hostname=False), connect_timeout_s=3.0))


def test_no_secret_is_shown() -> None:
    assert "hunter2" not in repr(ClusterSettings(("a",), username="u", password="hunter2"))


def test_a_host_that_fails_is_not_asked_again_and_again() -> None:
    """For a request to one host the driver's own policy would do so, without a pause, until the request times out."""
    policy, error = FewRetries(), ServerError(0, "injected", None)
    decisions = [policy.on_request_error(None, None, error, tried)[0] for tried in range(12)]
    assert decisions == [policy.RETRY_NEXT_HOST] * 10 + [policy.RETHROW] * 2
