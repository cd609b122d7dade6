"""What the tests of streams share: a broker; for logins a server of tokens, and a file with the secret it knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.kafka import BrokerSettings, KafkaBroker
from tests.mock_registry import MockTokens, mock_tokens


@pytest.fixture(scope="package")
def broker(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[KafkaBroker]:
    """One broker for all modules: each test has topics of its own. Who kills it starts it again."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka"), BrokerSettings().on_free_ports(), cache) as found:
        yield found


@pytest.fixture
def tokens() -> Iterator[MockTokens]:
    with mock_tokens() as found:
        yield found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hush\n")
    return path
