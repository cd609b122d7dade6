"""A reader of the DER that keystores use. It reads everything into nested lists at once."""

from __future__ import annotations

from typing import Any

Der = tuple[int, Any]
"""Tag (the first byte) and content: a list of elements if the tag is constructed, else bytes."""

SEQUENCE = 0x30
_CONSTRUCTED = 0x20


def read_der(data: bytes) -> Der:
    """Read one element that fills the data.

    :raises ValueError: the data is not one element
    """
    elements = _elements(data)
    if len(elements) != 1:
        raise ValueError(f"{len(elements)} DER elements instead of one")
    return elements[0]


def _elements(data: bytes) -> list[Der]:
    elements = []
    position = 0
    while position < len(data):
        if len(data) - position < 2:
            raise ValueError("a DER element is cut off")
        tag, length = data[position], data[position + 1]
        position += 2
        if length >= 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[position : position + size], "big")
            position += size
        if length > len(data) - position:
            raise ValueError(f"a DER element of {length} bytes is cut off")
        content = data[position : position + length]
        elements.append((tag, _elements(content) if tag & _CONSTRUCTED else content))
        position += length
    return elements


def dotted(content: bytes) -> str:
    """Write an object identifier in dotted form."""
    numbers = [content[0] // 40, content[0] % 40]
    value = 0
    for byte in content[1:]:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            numbers.append(value)
            value = 0
    return ".".join(map(str, numbers))
