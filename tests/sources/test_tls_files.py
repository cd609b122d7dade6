"""The files of ``tls``: each that cannot be used is told with its key, and nobody is asked on the terminal."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives import serialization

from ringsync.cluster.session import ClusterError, ClusterSettings, UnreachableError, connect
from ringsync.config.section import ConfigError, Secret
from ringsync.config.sections import Tls
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.kafka.schema_registry import SchemaRegistry
from ringsync.streams.sink import BrokerUnavailableError
from servers.certificates import Certificates, make_certificates

CLOSED = 9
"""A port on which nobody listens."""


class Files(NamedTuple):
    """Certificates, and their key with a passphrase."""

    certificates: Certificates
    locked: Path

    def tls(self, password: str | None) -> Tls:
        """The client's certificate with the key that has a passphrase.

        :param password: environment variable with it
        """
        made = self.certificates
        return Tls(
            ca_file=str(made.authority),
            certificate_file=str(made.client_certificate),
            key_file=str(self.locked),
            key_password=Secret(env=password) if password else None,
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    made = make_certificates(folder)
    key = serialization.load_pem_private_key(made.client_key.read_bytes(), None)
    locked = folder / "locked.pem"
    encryption = serialization.BestAvailableEncryption(b"right-4711")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return Files(made, locked)


@pytest.fixture(autouse=True)
def _passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "right-4711")
    monkeypatch.setenv("WRONG", "wrong-4711")


def to_cassandra(tls: Tls) -> None:
    connect(ClusterSettings(("127.0.0.1",), CLOSED, tls=tls))


def to_kafka(tls: Tls) -> None:
    KafkaTopics(KafkaSettings((f"127.0.0.1:{CLOSED}",), tls=tls, answer_timeout_s=0.2)).check_answers()


def to_registry(tls: Tls) -> None:
    SchemaRegistry(f"https://127.0.0.1:{CLOSED}", tls).subjects()


@pytest.mark.parametrize("connects", [to_cassandra, to_kafka, to_registry])
def test_a_key_with_a_passphrase(files: Files, connects: Callable[[Tls], None]) -> None:
    """With the right one, only the server is missing."""
    own = ClusterError if connects is to_cassandra else BrokerUnavailableError
    section = "cassandra.tls" if connects is to_cassandra else "kafka.tls"
    with pytest.raises((UnreachableError, BrokerUnavailableError)) as caught:
        connects(files.tls("RIGHT"))
    assert "tls" not in str(caught.value)
    for wrong in ("WRONG", None):
        with pytest.raises(own, match=rf"{section}.*key_password") as caught:
            connects(files.tls(wrong))
        assert "4711" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf"^{section}\.key_password: environment variable NOWHERE is not set"):
        connects(files.tls("NOWHERE"))


@pytest.mark.parametrize("connects", [to_cassandra, to_kafka, to_registry])
def test_key_and_certificate_may_be_one_file(files: Files, tmp_path: Path, connects: Callable[[Tls], None]) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(files.certificates.client_certificate.read_bytes() + files.certificates.client_key.read_bytes())
    with pytest.raises((UnreachableError, BrokerUnavailableError)) as caught:
        connects(Tls(ca_file=str(files.certificates.authority), certificate_file=str(both)))
    assert "tls" not in str(caught.value)


@pytest.mark.parametrize("connects", [to_cassandra, to_kafka, to_registry])
@pytest.mark.parametrize("name", ["ca_file", "certificate_file", "key_file"])
@pytest.mark.parametrize("content", [None, "", "no certificate", "folder"])
def test_a_file_that_is_none(
    files: Files, tmp_path: Path, connects: Callable[[Tls], None], name: str, content: str | None
) -> None:
    if (name, content) == ("ca_file", "folder") and connects is not to_cassandra:
        return  # both clients take a folder of certificates
    path = tmp_path / "some.pem"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    whole = files.tls("RIGHT").model_copy(update={name: str(path)})
    with pytest.raises((ClusterError, BrokerUnavailableError), match=r"(cassandra|kafka)\.tls") as caught:
        connects(whole)
    assert not isinstance(caught.value, UnreachableError)


def test_nobody_is_asked_on_the_terminal(files: Files) -> None:
    """OpenSSL opens the terminal itself: here there is one, and nobody types."""
    program = f"""
import os, pty, select, sys
child, terminal = pty.fork()
if child == 0:
    from ringsync.config.sections import Tls
    from tests.sources.test_tls_files import to_cassandra, to_registry
    for connects in (to_cassandra, to_registry):
        try:
            connects(Tls(**{files.tls(None).model_dump()!r}))
        except Exception as error:
            print(type(error).__name__)
    print("END", flush=True)
    os._exit(0)
said = b""
while b"END" not in said and b"phrase" not in said and select.select([terminal], [], [], 40)[0]:
    said += os.read(terminal, 1000)
os.kill(child, 9)
sys.exit(said.decode() if b"END" not in said or b"phrase" in said else 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
