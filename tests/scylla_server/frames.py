"""Frames of native protocol v4 (native_protocol_v4.spec, section 2), as far as a proxy must understand them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

HEADER = struct.Struct(">BBhBi")
VERSION = 4
RESPONSE = 0x80

ERROR, STARTUP, OPTIONS, SUPPORTED, QUERY, RESULT = 0x00, 0x01, 0x05, 0x06, 0x07, 0x08
PREPARE, EXECUTE, EVENT, BATCH = 0x09, 0x0A, 0x0C, 0x0D
KINDS = {STARTUP: "STARTUP", OPTIONS: "OPTIONS", QUERY: "QUERY", PREPARE: "PREPARE", EXECUTE: "EXECUTE"}
KINDS |= {BATCH: "BATCH", 0x0B: "REGISTER", 0x0F: "AUTH_RESPONSE"}

PROTOCOL_ERROR, SERVER_ERROR, SYNTAX_ERROR, INVALID, CONFIG_ERROR = 0x000A, 0x0000, 0x2000, 0x2200, 0x2300
RESULT_PREPARED = 4


@dataclass(frozen=True)
class Frame:
    """A request or an answer.

    :ivar version: protocol version, with the bit that says that it is an answer
    :ivar stream: number that joins an answer to its request; -1: an event
    """

    version: int
    flags: int
    stream: int
    opcode: int
    body: bytes

    def encode(self) -> bytes:
        """Return the frame as it is sent."""
        return HEADER.pack(self.version, self.flags, self.stream, self.opcode, len(self.body)) + self.body

    def with_body(self, body: bytes) -> Frame:
        """Return the same frame with another body."""
        return replace(self, body=body)

    def answer(self, opcode: int, body: bytes) -> Frame:
        """Return an answer to this request."""
        return Frame(RESPONSE | VERSION, 0, self.stream, opcode, body)


class Refusal(Exception):
    """The server refuses a request.

    :param code: error code of the protocol
    """

    def __init__(self, message: str, code: int = INVALID) -> None:
        super().__init__(message)
        self.code = code

    def body(self) -> bytes:
        """Return the body of an ERROR."""
        return struct.pack(">i", self.code) + string(str(self))


def read_frame(source: socket.socket) -> Frame | None:
    """Wait for a frame; None: the other side has closed the connection."""
    head = _read(source, HEADER.size)
    if head is None:
        return None
    version, flags, stream, opcode, length = HEADER.unpack(head)
    body = _read(source, length)
    return None if body is None else Frame(version, flags, stream, opcode, body)


def _read(source: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = source.recv_into(view[at:])
        except OSError:
            return None
        if count == 0:
            return None
        at += count
    return bytes(data)


def string(text: str) -> bytes:
    """Encode a [string]."""
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def multimap(options: Mapping[str, Sequence[str]]) -> bytes:
    """Encode a [string multimap], the body of SUPPORTED."""
    out = [struct.pack(">H", len(options))]
    for key, values in options.items():
        out += [string(key), struct.pack(">H", len(values)), *map(string, values)]
    return b"".join(out)


def split_text(body: bytes) -> tuple[str, bytes]:
    """Take the statement off the body of a QUERY or PREPARE: a [long string]; the rest follows."""
    (length,) = struct.unpack_from(">i", body)
    return body[4 : 4 + length].decode(), body[4 + length :]


def join_text(text: str, rest: bytes) -> bytes:
    """Undo :func:`split_text`."""
    data = text.encode()
    return struct.pack(">i", len(data)) + data + rest


def short_bytes(body: bytes, at: int = 0) -> bytes:
    """Read a [short bytes], as the id of a prepared statement."""
    (length,) = struct.unpack_from(">H", body, at)
    return body[at + 2 : at + 2 + length]


def prepared_id(answer: Frame) -> bytes | None:
    """Return the id in the answer to a PREPARE; None: it is none.

    The proxy asks for no tracing, warnings or payloads, which would stand first.
    """
    if answer.opcode != RESULT or answer.flags or struct.unpack_from(">i", answer.body)[0] != RESULT_PREPARED:
        return None
    return short_bytes(answer.body, 4)


@dataclass(frozen=True)
class BatchPart:
    """A statement of a BATCH: its text, or the id of a prepared one; and its values as they came."""

    text: str | None
    prepared: bytes
    values: bytes


def split_batch(body: bytes) -> tuple[bytes, list[BatchPart], bytes]:
    """Take a BATCH apart: its type, its statements, and what follows them."""
    (count,) = struct.unpack_from(">H", body, 1)
    at, parts = 3, []
    for _ in range(count):
        kind, at = body[at], at + 1
        text, prepared = None, b""
        if kind == 0:
            (length,) = struct.unpack_from(">i", body, at)
            text, at = body[at + 4 : at + 4 + length].decode(), at + 4 + length
        else:
            prepared = short_bytes(body, at)
            at += 2 + len(prepared)
        begin = at
        (values,) = struct.unpack_from(">H", body, at)
        at += 2
        for _ in range(values):
            (length,) = struct.unpack_from(">i", body, at)
            at += 4 + max(length, 0)
        parts.append(BatchPart(text, prepared, body[begin:at]))
    return body[:1], parts, body[at:]


def join_batch(kind: bytes, parts: Sequence[BatchPart], rest: bytes) -> bytes:
    """Undo :func:`split_batch`."""
    out = [kind, struct.pack(">H", len(parts))]
    for part in parts:
        if part.text is None:
            out += [b"\1", struct.pack(">H", len(part.prepared)), part.prepared]
        else:
            out += [b"\0", join_text(part.text, b"")]
        out.append(part.values)
    return b"".join([*out, rest])


def event_from_port(answer: Frame, port: int) -> Frame:
    """Let a STATUS_CHANGE or TOPOLOGY_CHANGE name another port: that of the proxies instead of the nodes'."""
    (length,) = struct.unpack_from(">H", answer.body)
    if answer.body[2 : 2 + length] == b"SCHEMA_CHANGE":
        return answer
    return answer.with_body(answer.body[:-4] + struct.pack(">i", port))
