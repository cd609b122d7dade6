"""Encrypted sections."""

from collections.abc import Callable
from typing import Any


def decryptor(parameters: dict[str, Any], key_of: Callable[[str], bytes] | None) -> Callable[[memoryview, int], bytes]:
    raise ValueError("encrypted")
