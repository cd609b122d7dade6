"""The schema registry: logins, answers of every kind, and the compatibility that its owner has set."""

from __future__ import annotations

import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12

from ringsync.config.section import ConfigError, Secret
from ringsync.config.sections import OAuth, RegistryLogin, Tls
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics, registry_of
from ringsync.streams.kafka.schema_registry import SchemaRegistry
from ringsync.streams.sink import BrokerUnavailableError, RelayError
from servers.certificates import Certificates, make_certificates
from tests.mock_registry import NO_SUBJECT, Answer, MockRegistry, MockTokens, basic, mock_registry

SUBJECT = "demo.shop.orders-value"
SCHEMA: Any = {"type": "record", "name": "a", "fields": []}
OTHER: Any = {"type": "record", "name": "b", "fields": []}
PAGE: Answer = (200, b"<html>maintenance</html>")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client wait a moment only before it asks again."""
    monkeypatch.setattr("confluent_kafka.schema_registry._sync.schema_registry_client.full_jitter", lambda *_: 1)


@pytest.fixture
def server() -> Iterator[MockRegistry]:
    with mock_registry() as found:
        yield found


def by_password(secret: Path) -> RegistryLogin:
    return RegistryLogin(username="ringsync", password=Secret(file=str(secret)))


def by_oauth(tokens: MockTokens, secret: Path, **other: Any) -> RegistryLogin:
    oauth = OAuth(token_url=tokens.url, client_id="ringsync", client_secret=Secret(file=str(secret)), scope="schemas")
    return RegistryLogin(oauth=oauth, **other)


def will_pass(caught: pytest.ExceptionInfo[RelayError]) -> bool:
    return isinstance(caught.value, BrokerUnavailableError)


def test_a_schema_is_registered_once_and_no_connection_stays_open(server: MockRegistry) -> None:
    registry = SchemaRegistry(f"{server.url}/")
    assert [registry.register(SUBJECT, schema) for schema in (SCHEMA, OTHER, SCHEMA)] == [1, 2, 1]
    assert server.schemas == {SUBJECT: ['{"type":"record","name":"a","fields":[]}', server.schemas[SUBJECT][1]]}
    assert registry.register("ä/b", SCHEMA) == 101
    asked = len(server.asked)
    assert registry.register("ä/b", SCHEMA) == 101
    assert len(server.asked) == asked
    until = time.monotonic() + 1.0
    while server.connections and time.monotonic() < until:
        time.sleep(0.01)
    assert server.connections == 0


@pytest.mark.parametrize("only_known", [False, True])
def test_a_new_subject_becomes_backward_compatible(server: MockRegistry, only_known: bool) -> None:
    server.only_known = only_known
    SchemaRegistry(server.url).register(SUBJECT, SCHEMA)
    assert server.compatibility == {SUBJECT: "BACKWARD"}
    server.compatibility[SUBJECT] = "NONE"
    SchemaRegistry(server.url).register(SUBJECT, OTHER)
    assert server.compatibility == {SUBJECT: "NONE"}


@pytest.mark.parametrize(("wanted", "found"), [("NONE", {SUBJECT: "NONE"}), (None, {})])
def test_a_new_subject_gets_what_the_configuration_says(
    server: MockRegistry, wanted: str | None, found: dict[str, str]
) -> None:
    registry = SchemaRegistry(server.url, compatibility=wanted)
    assert [registry.register(SUBJECT, schema) for schema in (SCHEMA, OTHER)] == [1, 2]
    assert server.compatibility == found


def test_the_compatibility_of_a_subject_is_its_owner_s(server: MockRegistry) -> None:
    """Whether the owner has set it before there was a schema, or has left it to the registry's default."""
    server.compatibility["early"] = "FULL"
    server.schemas["known"] = ['"string"']
    for subject in ("early", "known"):
        SchemaRegistry(server.url).register(subject, SCHEMA)
    assert server.compatibility == {"early": "FULL"}
    assert not any(request.startswith("PUT") for request in server.asked)


def test_a_password(server: MockRegistry, secret: Path) -> None:
    server.authorization = basic("ringsync", "hush")
    registry = SchemaRegistry(server.url, login=by_password(secret))
    assert registry.register(SUBJECT, SCHEMA) == 1
    assert "hush" not in f"{registry!r} {vars(registry)!r}"


def test_a_wrong_password_is_told_and_may_be_mended(server: MockRegistry, secret: Path) -> None:
    server.authorization = basic("ringsync", "right")
    registry = SchemaRegistry(server.url, login=by_password(secret))
    for _ in range(2):
        with pytest.raises(
            RelayError, match=r"refuses our login .*401.*Unauthorized.*kafka\.schema_registry_login\.password"
        ) as caught:
            registry.register(SUBJECT, SCHEMA)
        assert not will_pass(caught)
        assert "hush" not in str(caught.value)
    assert server.schemas == {}
    secret.write_text("right")
    assert registry.register(SUBJECT, SCHEMA) == 1


def test_a_missing_login_is_told(server: MockRegistry) -> None:
    server.authorization = basic("ringsync", "right")
    with pytest.raises(RelayError, match=r"401.*check kafka\.schema_registry_login\b"):
        SchemaRegistry(server.url).register(SUBJECT, SCHEMA)


def test_a_missing_right_is_told(server: MockRegistry, secret: Path) -> None:
    registry = SchemaRegistry(server.url, login=by_password(secret))
    server.first = [(403, b"<html>forbidden</html>")]
    with pytest.raises(
        RelayError, match=rf"{SUBJECT}: 403: .*schema_registry_login\.password, and the rights"
    ) as caught:
        registry.register(SUBJECT, SCHEMA)
    assert not will_pass(caught)
    assert registry.register(SUBJECT, SCHEMA) == 1


def test_a_secret_that_is_away_is_told_and_read_again(server: MockRegistry, secret: Path) -> None:
    registry = SchemaRegistry(server.url, login=by_password(secret))
    secret.unlink()
    with pytest.raises(ConfigError, match=r"kafka\.schema_registry_login\.password: cannot read the secret's file"):
        registry.register(SUBJECT, SCHEMA)
    secret.write_text("hush")
    assert registry.register(SUBJECT, SCHEMA) == 1


def test_a_token(server: MockRegistry, secret: Path) -> None:
    server.authorization = "Bearer hush"
    login = RegistryLogin(token=Secret(file=str(secret)), logical_cluster="lsrc-1", identity_pool_id="pool-1")
    registry = SchemaRegistry(server.url, login=login)
    assert registry.register(SUBJECT, SCHEMA) == 1
    assert (server.headers["target-sr-cluster"], server.headers["confluent-identity-pool-id"]) == ("lsrc-1", "pool-1")
    server.authorization = "Bearer newer"
    with pytest.raises(RelayError, match=r"kafka\.schema_registry_login\.token"):
        registry.register(SUBJECT, OTHER)
    secret.write_text("newer")
    assert registry.register(SUBJECT, OTHER) == 2


@pytest.mark.parametrize("token", ["hush\x00", "hush\nX-Other: 1", "hüsh", "hush ", " hush", "hu=sh"])
def test_a_token_that_no_header_may_have_is_not_shown(server: MockRegistry, secret: Path, token: str) -> None:
    secret.write_bytes(token.encode())
    registry = SchemaRegistry(server.url, login=RegistryLogin(token=Secret(file=str(secret))))
    with pytest.raises(ConfigError, match=r"registry_login\.token: .*(end of a line|several lines)") as caught:
        registry.register(SUBJECT, SCHEMA)
    assert token[:4] not in str(caught.value)
    assert server.asked == []


@pytest.mark.parametrize(("content", "reason"), [(b"", "is empty"), (b"\xff\xfe", "is not text in UTF-8")])
def test_a_secret_that_is_none_is_told_as_such(server: MockRegistry, secret: Path, content: bytes, reason: str) -> None:
    secret.write_bytes(content)
    registry = SchemaRegistry(server.url, login=RegistryLogin(token=Secret(file=str(secret))))
    with pytest.raises(ConfigError, match=rf"kafka\.schema_registry_login\.token: .*{reason}"):
        registry.register(SUBJECT, SCHEMA)


def test_a_token_that_cannot_be_sent_is_not_shown(server: MockRegistry, tokens: MockTokens, secret: Path) -> None:
    tokens.first = [(200, {"access_token": "secret-token ", "token_type": "Bearer", "expires_in": 3600})]
    registry = SchemaRegistry(server.url, login=by_oauth(tokens, secret))
    with pytest.raises(RelayError, match=r"cannot be sent .*kafka\.schema_registry_login\.oauth") as caught:
        registry.register(SUBJECT, SCHEMA)
    assert "secret-token" not in str(caught.value)
    assert not will_pass(caught)


@pytest.mark.parametrize(
    "url", ["http://a:8081,b:8081", "http://a:port", "http://[x"], ids=["two servers", "no port", "no address"]
)
def test_an_address_that_is_none_is_told_as_such(url: str) -> None:
    with pytest.raises(RelayError, match=r"cannot be asked: .*check kafka\.schema_registry_url") as caught:
        SchemaRegistry(url).register(SUBJECT, SCHEMA)
    assert not will_pass(caught)


def test_oauth(server: MockRegistry, tokens: MockTokens, secret: Path) -> None:
    registry = SchemaRegistry(server.url, login=by_oauth(tokens, secret, logical_cluster="lsrc-1"))
    server.authorization = "no token"
    with pytest.raises(RelayError, match=r"401.*kafka\.schema_registry_login\.oauth"):
        registry.register(SUBJECT, SCHEMA)
    assert tokens.asked_for == {"grant_type": ["client_credentials"], "scope": ["schemas"]}
    server.authorization = None
    for number in range(10):
        registry.register(f"subject-{number}", SCHEMA)
    assert server.headers["authorization"] == f"Bearer {tokens.given[-1]}"
    assert server.headers["target-sr-cluster"] == "lsrc-1"
    assert "confluent-identity-pool-id" not in server.headers
    assert len(tokens.given) == 2  # the refused one was not used again


def test_a_wrong_client_secret_is_told_and_may_be_mended(
    server: MockRegistry, tokens: MockTokens, secret: Path
) -> None:
    registry = SchemaRegistry(server.url, login=by_oauth(tokens, secret))
    tokens.secret = "right"
    with pytest.raises(RelayError, match=r"invalid_client.*kafka\.schema_registry_login\.oauth") as caught:
        registry.register(SUBJECT, SCHEMA)
    assert not will_pass(caught)
    assert "hush" not in str(caught.value)
    assert server.asked == []
    secret.write_text("right")
    assert registry.register(SUBJECT, SCHEMA) == 1


def test_a_token_server_s_page_of_a_refusal_is_a_refusal(
    server: MockRegistry, tokens: MockTokens, secret: Path
) -> None:
    tokens.first = [(403, b"<html>forbidden</html>")] * 4
    with pytest.raises(RelayError, match=r"refuses us: .*403.*kafka\.schema_registry_login\.oauth$") as caught:
        SchemaRegistry(server.url, login=by_oauth(tokens, secret)).register(SUBJECT, SCHEMA)
    assert not will_pass(caught)


@pytest.mark.parametrize("answer", [(503, b"down"), (429, b"busy"), PAGE, (200, {"no": "token"}), (200, ["no token"])])
def test_a_token_server_that_gives_none_is_told_and_asked_again(
    server: MockRegistry, tokens: MockTokens, secret: Path, answer: Answer
) -> None:
    registry = SchemaRegistry(server.url, login=by_oauth(tokens, secret))
    tokens.first = [answer] * 4
    with pytest.raises(BrokerUnavailableError, match=rf"{tokens.url}.*kafka\.schema_registry_login\.oauth"):
        registry.register(SUBJECT, SCHEMA)
    tokens.stop()
    with pytest.raises(BrokerUnavailableError, match=f"{tokens.url}.*refused"):
        registry.register(SUBJECT, SCHEMA)
    tokens.start()
    assert registry.register(SUBJECT, SCHEMA) == 1


@pytest.mark.parametrize("validity", [{}, {"expires_in": "3600"}, {"expires_in": 0}])
@pytest.mark.parametrize("checks", [True, False], ids=["check", "register"])
def test_a_token_of_unknown_validity_is_told(
    server: MockRegistry, tokens: MockTokens, secret: Path, validity: dict[str, Any], checks: bool
) -> None:
    """Confluent's client asks for ``expires_in`` as a number, which OAuth only recommends: but only from its second
    request on, so that a check with one request found nothing wrong."""
    tokens.first = [(200, {"access_token": "a", "token_type": "Bearer", **validity})]
    registry = SchemaRegistry(server.url, login=by_oauth(tokens, secret))
    with pytest.raises(RelayError, match=rf"token server {tokens.url} .*expires_in.*schema_registry_login\.oauth"):
        registry.subjects() if checks else registry.register(SUBJECT, SCHEMA)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_registry_is_asked_again(server: MockRegistry, status: int) -> None:
    registry = SchemaRegistry(server.url)
    server.first = [(status, b"busy")] * 3
    assert registry.register(SUBJECT, SCHEMA) == 1
    server.first = [(status, b"busy")] * 4
    with pytest.raises(BrokerUnavailableError, match=f"{status}.*busy"):
        registry.register(SUBJECT, OTHER)
    assert registry.register(SUBJECT, OTHER) == 2


def test_a_registry_that_comes_back_goes_on(server: MockRegistry) -> None:
    registry = SchemaRegistry(server.url)
    server.stop()
    with pytest.raises(BrokerUnavailableError, match=rf"registry {server.url} does not answer: .*refused"):
        registry.register(SUBJECT, SCHEMA)
    server.start()
    assert registry.register(SUBJECT, SCHEMA) == 1


def test_a_registry_that_is_silent_does_not_answer(server: MockRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringsync.streams.kafka.schema_registry.TIMEOUT_SECONDS", 0.1)
    server.is_silent = True
    with pytest.raises(BrokerUnavailableError, match="does not answer: ReadTimeout"):
        SchemaRegistry(server.url).register(SUBJECT, SCHEMA)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (PAGE, "does not answer in JSON: <html>maintenance"),
        ((302, b""), "302"),
        ((404, b"<html>nothing here</html>"), "404.*nothing here"),
        ((404, {"message": "no route"}), "404.*no route"),
        ((413, b"too much"), "413.*too much"),
        ((200, {"compatibility": "BACKWARD"}), "is no registry's"),
        ((200, ["a"]), "is no registry's"),
        ((200, b"\xff"), "is no registry's"),
    ],
)
def test_what_is_no_registry_is_told_and_asked_again(server: MockRegistry, answer: Answer, told: str) -> None:
    """In place of the versions of a subject, of its compatibility, and of the id of a schema."""
    registry = SchemaRegistry(server.url)
    versions, setting = (200, [1]), (200, {"compatibilityLevel": "FULL"})
    for before in ([], [NO_SUBJECT], [NO_SUBJECT, setting], [versions]):
        if (before, answer[1]) == ([], ["a"]):
            continue  # looks like versions
        server.first = [*before, answer]
        with pytest.raises(BrokerUnavailableError, match=told):
            registry.register(SUBJECT, SCHEMA)
    assert server.schemas == {}
    assert registry.register(SUBJECT, SCHEMA) == 1


@pytest.mark.parametrize("status", [400, 409, 422])
def test_a_schema_that_is_refused_is_told(server: MockRegistry, status: int) -> None:
    reason = {"error_code": status, "message": "not compatible with version 1"}
    registry = SchemaRegistry(server.url)
    registry.register(SUBJECT, SCHEMA)
    server.first = [(200, [1]), (status, reason)]
    with pytest.raises(RelayError, match=rf"refuses .*{SUBJECT}: {status}: not compatible with version 1") as caught:
        registry.register(SUBJECT, OTHER)
    assert not will_pass(caught)
    assert registry.register(SUBJECT, OTHER) == 2


def guarded(certificates: Certificates, folder: Path) -> ssl.SSLContext:
    """A server's side of TLS that asks for a client's certificate."""
    key, certificate, _ = pkcs12.load_key_and_certificates(
        certificates.keystore.read_bytes(), certificates.password.encode()
    )
    assert key
    assert certificate
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(plain + certificate.public_bytes(pem))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    context.load_cert_chain(folder / "server.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certificates")
    authority = str(made.authority)
    right = Tls(ca_file=authority, certificate_file=str(made.client_certificate), key_file=str(made.client_key))
    with mock_registry(guarded(made, tmp_path)) as server:
        assert SchemaRegistry(server.url, right).register(SUBJECT, SCHEMA) == 1
        for wrong, told in (
            (None, "certificate verify failed"),
            (Tls(ca_file=authority), "does not answer"),
            (Tls(ca_file=f"{authority}.new"), r"kafka\.tls.*authority\.pem\.new"),
        ):
            with pytest.raises(BrokerUnavailableError, match=told):
                SchemaRegistry(server.url, wrong).register(SUBJECT, SCHEMA)
        kafka = KafkaTopics(KafkaSettings(("b:1",), schema_registry_url=server.url, tls=right))
        assert kafka.registry
        assert kafka.registry.subjects() == [SUBJECT]


def test_without_a_registry_its_client_is_not_imported() -> None:
    code = (
        "import sys; from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics; "
        "KafkaTopics(KafkaSettings(('b:1',))); sys.exit('httpx2' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_topics_share_a_registry(server: MockRegistry) -> None:
    settings = KafkaSettings(("b:1",), schema_registry_url=server.url)
    registry = registry_of(settings)
    assert registry is KafkaTopics(settings, registry).registry
    assert registry_of(KafkaSettings(("b:1",))) is None
