"""The relay where Kafka is as in production: a schema registry, TLS, a login. All three are real."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from ringsync.config import Tls
from ringsync.config.section import Secret
from ringsync.config.sync import BrokerOAuth
from ringsync.streams.files import FileStream
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics
from ringsync.streams.relay import relay
from ringsync.streams.sink import BrokerUnavailableError, RelayError
from servers.certificates import make_certificates
from servers.kafka import BrokerSettings, KafkaBroker
from servers.registry import RegistryServer
from tests.kafka_reading import confluent_avro, kafka_messages, read_topic
from tests.mock_registry import mock_tokens
from tests.streams.outbox import notes, outbox, publish, published

pytestmark = [pytest.mark.server, pytest.mark.chaos]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka"), BrokerSettings().on_free_ports(), cache) as found:
        yield found


def changed(stream: FileStream, version: int, *fields: dict[str, Any], drop: int = 0) -> None:
    """Put a version of the schemas with other fields at the end of the envelope."""
    key, value = stream.schemas(1)
    kept = value["fields"][: len(value["fields"]) - drop]
    stream.put_schemas(version, key, {**value, "fields": [*kept, *fields]})


def test_schemas_are_registered_and_compatible(broker: KafkaBroker, tmp_path: Path, cache: Path) -> None:
    stream = outbox(tmp_path / "lake", "demo.shop.registered")
    publish(stream, "pass-000000000001", notes(0, 3000))
    with RegistryServer(tmp_path / "registry", cache) as registry:
        settings = KafkaSettings((broker.bootstrap,), schema_registry_url=registry.url)
        with KafkaTopics(settings) as kafka:
            assert relay(stream.store, stream.topic, kafka).messages == 3000
            publish(stream, "pass-000000000002", notes(3000, 10))
            assert relay(stream.store, stream.topic, kafka).messages == 10
        decode = confluent_avro(registry.url)
        assert kafka_messages(read_topic(broker.bootstrap, stream.topic), decode, decode) == published(stream)
        for subject in (f"{stream.topic}-key", f"{stream.topic}-value"):
            assert requests.get(f"{registry.url}/subjects/{subject}/versions", timeout=10).json() == [1]
            config = requests.get(f"{registry.url}/config/{subject}", timeout=10).json()
            assert config["compatibilityLevel"] == "BACKWARD"

        changed(stream, 2, {"name": "more", "type": ["null", "long"], "default": None})
        changed(stream, 3, {"name": "required", "type": "long"})
        with KafkaTopics(settings) as kafka:
            writer = stream.open_part("pass-000000000003", "part", 2)
            stream.publish("pass-000000000003", [writer.finish()])
            assert relay(stream.store, stream.topic, kafka).messages == 0
            writer = stream.open_part("pass-000000000004", "part", 3)
            writer.add(notes(5000, 1))
            stream.publish("pass-000000000004", [writer.finish()])
            with pytest.raises(RelayError, match=r"refuses a request for demo.shop.registered-value: 409") as caught:
                relay(stream.store, stream.topic, kafka)
            assert not isinstance(caught.value, BrokerUnavailableError)
            # The owner lets it pass, and nobody takes that back.
            owned = f"{registry.url}/config/{stream.topic}-value"
            requests.put(owned, json={"compatibility": "NONE"}, timeout=10).raise_for_status()
            assert relay(stream.store, stream.topic, kafka).messages == 1
            assert requests.get(owned, timeout=10).json()["compatibilityLevel"] == "NONE"
    publish(stream, "pass-000000000005", notes(6000, 1))
    with KafkaTopics(settings) as kafka, pytest.raises(BrokerUnavailableError, match=r"registry .* does not answer"):
        relay(stream.store, stream.topic, kafka)


def test_tls_and_login(tmp_path: Path, cache: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    login = ("ringsync", secrets.token_urlsafe(12))
    guarded = replace(BrokerSettings().on_free_ports(), certificates=certificates, login=login)
    stream = outbox(tmp_path / "lake", "demo.shop.guarded")
    publish(stream, "pass-000000000001", notes(0, 3000))
    with KafkaBroker(tmp_path / "kafka", guarded, cache) as broker:
        right = KafkaSettings(
            (broker.bootstrap,),
            tls=Tls(ca_file=str(certificates.authority)),
            sasl_mechanism="SCRAM-SHA-512",
            username=login[0],
            password=login[1],
            answer_timeout_s=5.0,
        )
        for wrong, reason in (
            (replace(right, password="wrong"), "uthentication failed"),
            (replace(right, tls=Tls()), "certificate verify failed"),
            (replace(right, tls=None), "is not available"),
        ):
            with KafkaTopics(wrong) as kafka, pytest.raises(BrokerUnavailableError, match=reason) as caught:
                relay(stream.store, stream.topic, kafka)
            assert login[1] not in str(caught.value)
        with KafkaTopics(right) as kafka:
            assert relay(stream.store, stream.topic, kafka).messages == 3000


def test_a_login_by_oauth(tmp_path: Path, cache: Path) -> None:
    stream = outbox(tmp_path / "lake", "demo.shop.tokens")
    publish(stream, "pass-000000000001", notes(0, 3000))
    (tmp_path / "secret").write_text("wrong")
    guarded = replace(BrokerSettings().on_free_ports(), takes_tokens=True)
    with mock_tokens() as tokens, KafkaBroker(tmp_path / "kafka", guarded, cache) as broker:
        secret = Secret(file=str(tmp_path / "secret"))
        oauth = BrokerOAuth(token_url=tokens.url, client_id="ringsync", client_secret=secret, scope="kafka")
        settings = KafkaSettings((broker.bootstrap,), sasl_mechanism="OAUTHBEARER", oauth=oauth, answer_timeout_s=5.0)
        with KafkaTopics(settings) as kafka:
            with pytest.raises(BrokerUnavailableError, match=r"acquire SASL OAUTHBEARER token: .*invalid_client"):
                relay(stream.store, stream.topic, kafka)
            (tmp_path / "secret").write_text(tokens.secret)
            assert relay(stream.store, stream.topic, kafka).messages == 3000
        tokens.stop()
        publish(stream, "pass-000000000002", notes(3000, 10))
        with KafkaTopics(settings) as kafka:
            with pytest.raises(BrokerUnavailableError, match="acquire SASL OAUTHBEARER"):
                relay(stream.store, stream.topic, kafka)
            tokens.start()
            assert relay(stream.store, stream.topic, kafka).messages == 10
