"""The feed of Kafka and the schema registry: away, refusing, with a wrong login. Only topics that need it wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringsync.config.sections import RegistryLogin, Secret
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.streams.kafka.client import KafkaSettings, KafkaTopics, registry_of
from tests.mock_kafka import MockKafka
from tests.mock_registry import basic, mock_registry
from tests.steps.test_sink_feed import SECONDS, feeding, pass_, streams_of, told, within
from tests.streams.outbox import notes, publish


def test_a_registry_that_answers_with_a_page_is_told_and_asked_again(
    tmp_path: Path, mock: MockKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = streams_of(tmp_path, "a b", mock)
    with mock_registry() as registry:
        registry.first = [(200, b"<html>maintenance</html>")]
        settings = KafkaSettings((mock.bootstrap,), schema_registry_url=registry.url)
        with SinkFeed(one.store, lambda: KafkaTopics(settings)) as feed:
            for stream in (one, other):
                feed.watch(stream.topic)
            within(SECONDS, lambda: told(feed, one)["messages"] == told(feed, other)["messages"] == 3)
            within(1.0, lambda: registry.connections == 0)  # hundreds of topics must not keep one each
    assert "does not answer in JSON" in capsys.readouterr().out


def test_a_secret_that_cannot_be_read_is_named_and_the_topic_goes_on_when_it_can(
    tmp_path: Path, mock: MockKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told as a damaged stream."""
    (stream,) = streams_of(tmp_path, "a", mock)
    secret = tmp_path / "secret"
    login = RegistryLogin(username="ringsync", password=Secret(file=str(secret)))
    with mock_registry() as registry:
        registry.authorization = basic("ringsync", "hush")
        settings = {"schema_registry_url": registry.url, "schema_registry_login": login}
        with feeding(stream.store, (mock.bootstrap,), **settings) as feed:
            feed.watch(stream.topic)
            within(SECONDS, lambda: told(feed, stream)["error"])
            begin = "kafka.schema_registry_login.password: cannot read the secret's file"
            assert str(told(feed, stream)["error"]).startswith(begin)
            secret.write_text("hush")
            within(SECONDS, lambda: told(feed, stream) == {"messages": 3, "error": None})
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("is_silent", [False, True])
def test_while_the_registry_is_down_nothing_is_lost(
    tmp_path: Path, mock: MockKafka, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Topics that need no new schema go on, and the others when the registry is back."""
    one, other = streams_of(tmp_path, "a b", mock)
    monkeypatch.setattr("ringsync.streams.kafka.schema_registry.TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("confluent_kafka.schema_registry._sync.schema_registry_client.full_jitter", lambda *_: 1)
    with mock_registry() as registry:
        settings = KafkaSettings((mock.bootstrap,), schema_registry_url=registry.url)
        shared = registry_of(settings)
        with SinkFeed(one.store, lambda: KafkaTopics(settings, shared)) as feed:
            feed.watch(one.topic)
            within(SECONDS, lambda: told(feed, one)["messages"] == 3)
            registry.is_silent = is_silent
            if not is_silent:
                registry.stop()
            feed.watch(other.topic)
            within(SECONDS, lambda: "does not answer" in str(told(feed, other)["error"]))
            publish(one, pass_(2), notes(3, 3))
            feed.announce(one.topic, pass_(2))
            within(SECONDS, lambda: told(feed, one)["messages"] == 6)
            assert told(feed, other)["messages"] == 0
            registry.is_silent = False
            if not is_silent:
                registry.start()
            within(SECONDS, lambda: told(feed, other) == {"messages": 3, "error": None})


@pytest.mark.parametrize("status", [409, 422])
def test_a_schema_that_the_registry_refuses_stops_its_topic_only(tmp_path: Path, mock: MockKafka, status: int) -> None:
    """The table was created again with a column of another type, say. Both topics have more to send."""
    one, other = streams_of(tmp_path, "a b", mock)
    with (
        mock_registry() as registry,
        feeding(one.store, (mock.bootstrap,), schema_registry_url=registry.url) as feed,
    ):
        for stream in (one, other):
            feed.watch(stream.topic)
        within(SECONDS, lambda: told(feed, one)["messages"] == told(feed, other)["messages"] == 3)
        reason = {"error_code": status, "message": "incompatible with an earlier schema"}
        registry.refused[f"{one.topic}-value"] = (status, reason)
        for stream in (one, other):
            key, value = stream.schemas(1)
            more = {"name": "more", "type": "long"}
            stream.put_schemas(2, key, {**value, "fields": [*value["fields"], more]})
            writer = stream.open_part(pass_(2), "part", 2)
            writer.add(notes(3, 3))
            stream.publish(pass_(2), [writer.finish()])
            feed.announce(stream.topic, pass_(2))
        within(SECONDS, lambda: told(feed, other) == {"messages": 6, "error": None})
        within(SECONDS, lambda: told(feed, one)["error"])
        error = str(told(feed, one)["error"])
        assert f"refuses a request for {one.topic}-value: {status}: incompatible with an earlier" in error
        assert "lower the compatibility of this subject" in error
        assert told(feed, one)["messages"] == 3
        registry.refused.clear()
        within(SECONDS, lambda: told(feed, one) == {"messages": 6, "error": None})


def test_a_wrong_password_of_the_registry_stops_who_needs_it_and_heals(tmp_path: Path, mock: MockKafka) -> None:
    """The password is changed in the registry, and then in our file; the topic that asks for nothing goes on."""
    one, other = streams_of(tmp_path, "a b", mock)
    (secret := tmp_path / "secret").write_text("hush")
    login = RegistryLogin(username="ringsync", password=Secret(file=str(secret)))
    with mock_registry() as registry:
        registry.authorization = basic("ringsync", "hush")
        settings = KafkaSettings((mock.bootstrap,), schema_registry_url=registry.url, schema_registry_login=login)
        shared = registry_of(settings)
        with SinkFeed(one.store, lambda: KafkaTopics(settings, shared)) as feed:
            feed.watch(one.topic)
            within(SECONDS, lambda: told(feed, one)["messages"] == 3)
            registry.authorization = basic("ringsync", "s3cond")
            feed.watch(other.topic)
            within(SECONDS, lambda: "check kafka.schema_registry_login.password" in str(told(feed, other)["error"]))
            publish(one, pass_(2), notes(3, 3))
            feed.announce(one.topic, pass_(2))
            within(SECONDS, lambda: told(feed, one)["messages"] == 6)
            assert told(feed, other)["messages"] == 0
            secret.write_text("s3cond")
            within(SECONDS, lambda: told(feed, other) == {"messages": 3, "error": None})
            assert not any(word in str(feed.status(other.topic)) for word in ("hush", "s3cond"))
