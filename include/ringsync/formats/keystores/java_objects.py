"""A reader of the serialised Java objects in keystores: their fields are numbers, strings and byte arrays.

Grammar: Java Object Serialization Specification, chapter 6.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

_STREAM = bytes.fromhex("aced0005")
_END_OF_ANNOTATIONS = 0x78
_FIRST_HANDLE = 0x7E0000
_SERIALIZABLE = 0x02
"""Flags of a class whose objects write nothing but their fields."""
_PRIMITIVES = {"B": ">b", "C": ">H", "D": ">d", "F": ">f", "I": ">i", "J": ">q", "S": ">h", "Z": ">?"}


@dataclass
class ByteReader:
    """A reader of bytes, from front to back."""

    data: bytes
    position: int = 0

    def take(self, size: int) -> bytes:
        """Read the next ``size`` bytes."""
        if not 0 <= size <= len(self.data) - self.position:
            raise ValueError(f"{size} bytes at {self.position} of {len(self.data)}")
        self.position += size
        return self.data[self.position - size : self.position]

    def int32(self) -> int:
        """Read the next four bytes as a number."""
        return int.from_bytes(self.take(4), "big", signed=True)

    def text(self) -> str:
        """Read a string that DataOutput.writeUTF wrote: its length, then its bytes."""
        return self.take(int.from_bytes(self.take(2), "big")).decode()


@dataclass
class _Class:
    name: str
    fields: list[tuple[str, str]]
    parent: _Class | None


def read_object(reader: ByteReader) -> dict[str, Any]:
    """Read one serialised object after its stream's header.

    :returns: fields by name, including those of parent classes
    :raises ValueError: the bytes are no such object
    """
    if reader.take(len(_STREAM)) != _STREAM:
        raise ValueError("a Java object was expected")
    fields = _Stream(reader).content()
    if not isinstance(fields, dict):
        raise ValueError("a Java object was expected, and there is something else")
    return fields


class _Stream:
    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._handles: list[Any] = []

    def content(self) -> Any:
        kind = self._reader.take(1)[0]
        match kind:
            case 0x70:  # TC_NULL
                return None
            case 0x71:  # TC_REFERENCE
                return self._handles[self._reader.int32() - _FIRST_HANDLE]
            case 0x72:  # TC_CLASSDESC
                return self._class()
            case 0x73:  # TC_OBJECT
                return self._object()
            case 0x74:  # TC_STRING
                return self._remember(self._reader.text())
            case 0x75:  # TC_ARRAY
                return self._bytes()
        raise ValueError(f"content of kind {kind:#x} in a Java object")

    def _remember(self, value: Any) -> Any:
        self._handles.append(value)
        return value

    def _class(self) -> _Class:
        described: _Class = self._remember(_Class(self._reader.text(), [], None))
        self._reader.take(8)
        flags = self._reader.take(1)[0]
        for _ in range(int.from_bytes(self._reader.take(2), "big")):
            kind, name = chr(self._reader.take(1)[0]), self._reader.text()
            if kind in "[L":
                self.content()
            described.fields.append((kind, name))
        if flags != _SERIALIZABLE or self._reader.take(1)[0] != _END_OF_ANNOTATIONS:
            raise ValueError(f"the Java class {described.name} writes more than its fields")
        described.parent = self.content()
        return described

    def _object(self) -> dict[str, Any]:
        kind: _Class | None = self.content()
        values: dict[str, Any] = self._remember({})
        fields: list[tuple[str, str]] = []
        while kind is not None:
            fields = kind.fields + fields
            kind = kind.parent
        for code, name in fields:
            values[name] = self._primitive(code) if code in _PRIMITIVES else self.content()
        return values

    def _primitive(self, code: str) -> Any:
        layout = _PRIMITIVES[code]
        return struct.unpack(layout, self._reader.take(struct.calcsize(layout)))[0]

    def _bytes(self) -> bytes:
        kind: _Class = self.content()
        if kind.name != "[B":
            raise ValueError(f"an array of {kind.name} in a Java object")
        content: bytes = self._remember(self._reader.take(self._reader.int32()))
        return content
