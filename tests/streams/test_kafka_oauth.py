"""The login to the brokers by OAuth: librdkafka itself gets the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringsync.config.section import ConfigError, Secret
from ringsync.config.sync import BrokerOAuth
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics, connection_settings
from ringsync.streams.sink import BrokerUnavailableError
from tests.mock_registry import MockTokens


def settings_of(tokens: MockTokens, secret: Path) -> KafkaSettings:
    oauth = BrokerOAuth(
        token_url=tokens.url,
        client_id="ringsync",
        client_secret=Secret(file=str(secret)),
        scope="kafka",
        extensions={"logicalCluster": "lkc-1", "identityPoolId": "pool-1"},
    )
    return KafkaSettings(("127.0.0.1:1",), sasl_mechanism="OAUTHBEARER", oauth=oauth, answer_timeout_s=3.0)


def test_what_librdkafka_is_told(tokens: MockTokens, secret: Path) -> None:
    settings = settings_of(tokens, secret)
    told = connection_settings(settings, print)
    assert {key: value for key, value in told.items() if key.startswith(("sasl", "security"))} == {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": tokens.url,
        "sasl.oauthbearer.client.id": "ringsync",
        "sasl.oauthbearer.client.secret": "hush",
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-1",
    }
    assert "hush" not in repr(settings)


def test_librdkafka_asks_for_a_token(tokens: MockTokens, secret: Path) -> None:
    """It has one, so it only lacks a broker."""
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1.* refused"):
        KafkaTopics(settings_of(tokens, secret)).check_answers()
    assert len(tokens.given) == 1
    assert tokens.asked_for == {"grant_type": ["client_credentials"], "scope": ["kafka"]}


def test_a_wrong_client_secret_is_told_and_may_be_mended(
    tokens: MockTokens, secret: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka = KafkaTopics(settings_of(tokens, secret))
    tokens.secret = "right"
    with pytest.raises(BrokerUnavailableError, match=r"OAUTHBEARER token: .*invalid_client") as caught:
        kafka.check_answers()
    assert "hush" not in f"{caught.value} {capfd.readouterr()}"
    assert tokens.given == []
    secret.write_text("right")
    with pytest.raises(BrokerUnavailableError, match="refused"):
        kafka.check_answers()
    assert len(tokens.given) == 1


def test_a_secret_that_is_away_is_told(tokens: MockTokens, secret: Path) -> None:
    secret.unlink()
    with pytest.raises(ConfigError, match=r"kafka\.oauth\.client_secret: cannot read the secret's file"):
        KafkaTopics(settings_of(tokens, secret)).check_answers()
