"""``cdcservice start --check`` asks the schema registry."""

from __future__ import annotations

from typing import Any

import pytest

from ringsync.config import Config
from ringsync.service.checks import check_registry
from ringsync.service.table_checks import CheckError
from tests.mock_registry import MockRegistry, basic, mock_registry


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client wait a moment only before it asks again."""
    monkeypatch.setattr("confluent_kafka.schema_registry._sync.schema_registry_client.full_jitter", lambda *_: 1)


def config_of(registry: MockRegistry, **kafka: Any) -> Config:
    return Config.model_validate(
        {
            "server_name": "demo",
            "cassandra": {"contact_points": ["127.0.0.1"]},
            "store": {"url": "/nowhere"},
            "kafka": {"bootstrap_servers": ["b:1"], "schema_registry_url": f"{registry.url}/", **kafka},
        }
    )


def test_a_registry_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY", "hush")
    with mock_registry() as registry:
        registry.authorization = basic("me", "hush")
        registry.schemas = {"a": ["1"], "b": ["1"]}
        login = {"username": "me", "password": {"env": "REGISTRY"}}
        assert check_registry(config_of(registry, schema_registry_login=login)) == [
            f"{registry.url} answers, 2 subjects"
        ]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, b"<html>"), "does not answer in JSON: <html>"),
        ((200, {}), "is no registry's"),
        ((404, b"<html>"), "404"),
        ((401, {"error_code": 401, "message": "Unauthorized"}), r"401.*kafka\.schema_registry_login"),
    ],
)
def test_what_is_wrong_is_told(answer: Any, told: str) -> None:
    with mock_registry() as registry:
        registry.first = [answer]
        with pytest.raises(CheckError, match=rf"{told}.*\(kafka\.schema_registry_url\)$"):
            check_registry(config_of(registry))
        registry.stop()
        with pytest.raises(CheckError, match="does not answer: ConnectError"):
            check_registry(config_of(registry))
        registry.start()


def test_no_registry() -> None:
    with mock_registry() as registry:
        assert check_registry(config_of(registry, schema_registry_url=None)) == []
        assert registry.asked == []
