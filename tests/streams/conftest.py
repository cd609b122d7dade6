"""What the tests of logins share: a server of tokens, and a file with the secret that it knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mock_registry import MockTokens, mock_tokens


@pytest.fixture
def tokens() -> Iterator[MockTokens]:
    with mock_tokens() as found:
        yield found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hush\n")
    return path
