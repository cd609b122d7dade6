"""Messages put together from received bytes: whatever the pieces, and never with a wrong checksum.

The other side is the driver's own encoder of segments, and for protocol v4, which has none, the plain frames; that the
whole works with a server is what all scans show, and for v4 those through the stand-in for Scylla.
"""

from __future__ import annotations

import io
import struct
from typing import Any
from unittest.mock import patch

import pytest
from cassandra.connection import (
    Connection,
    CrcMismatchException,
    ProtocolError,
    _ConnectionIOBuffer,
    segment_codec_no_compression,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cluster.connection import PageConnection


class Received(PageConnection):
    """A connection without a socket that keeps what it is told."""

    def __init__(self) -> None:
        self._parts, self._parts_size = [], 0
        self._is_checksumming_enabled = True
        self._segment_codec = segment_codec_no_compression
        self._io_buffer = _ConnectionIOBuffer(self)
        self._io_buffer._cql_frame_buffer = io.BytesIO()
        self.endpoint = "127.0.0.1:9042"
        self.messages: list[tuple[int, int, bytes]] = []
        self.error: Exception | None = None

    @classmethod
    def of_v4(cls) -> Received:
        """A connection that has just asked for the options, as the driver does it."""
        connection = cls()
        connection._is_checksumming_enabled = False
        connection._io_buffer = _ConnectionIOBuffer(connection)
        connection.protocol_version = 4
        with patch.object(Connection, "_send_options_message"):
            connection._send_options_message()
        return connection

    def process_msg(self, header: Any, body: bytes) -> None:
        assert len(body) == header.end_pos - header.body_offset
        self.messages.append((header.stream, header.opcode, body))

    def defunct(self, error: Exception) -> None:
        self.error = error

    def receive(self, data: bytes) -> None:
        """What the driver's event loops do with bytes that have come."""
        self._iobuf.write(data)
        if self._iobuf.tell():
            self.process_io_buffer()


def frames_of(messages: list[tuple[int, int, bytes]], version: int) -> list[bytes]:
    return [struct.pack(">BBhBi", 0x80 | version, 0, stream, op, len(body)) + body for stream, op, body in messages]


def sent(messages: list[tuple[int, int, bytes]], together: bool) -> bytes:
    """The bytes of messages as a server sends them; small ones can share a segment."""
    frames = frames_of(messages, 5)
    out = io.BytesIO()
    for frame in [b"".join(frames)] if together else frames:
        segment_codec_no_compression.encode(out, frame)
    return out.getvalue()


MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 32767),
        st.sampled_from([0x08, 0x0C]),
        st.one_of(st.binary(max_size=40), st.integers(131_060, 131_090).map(bytes), st.just(b"ab" * 300_000)),
    ),
    max_size=5,
)


@given(MESSAGES, st.booleans(), st.lists(st.integers(1, 200_000), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_pieces_give_the_messages(messages: Any, together: bool, pieces: list[int]) -> None:
    data = sent(messages, together)
    connection = Received()
    for size in [*pieces, len(data)]:
        connection.receive(data[:size])
        data = data[size:]
    assert connection.error is None
    assert connection.messages == messages
    assert connection._parts_size == 0


@given(st.integers(0, 10**9), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_is_noticed(place: int, bit: int) -> None:
    messages = [(1, 8, b"first" * 20), (2, 8, b"x" * 200_000)]
    data = bytearray(sent(messages, together=False))
    data[place % len(data)] ^= 1 << bit
    connection = Received()
    connection.receive(bytes(data))
    assert isinstance(connection.error, CrcMismatchException)
    assert connection.messages in ([], messages[:1])


@given(MESSAGES, st.lists(st.integers(1, 200_000), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_pieces_give_the_messages_of_v4(messages: Any, pieces: list[int]) -> None:
    data = b"".join(frames_of(messages, 4))
    connection = Received.of_v4()
    for size in [*pieces, len(data)]:
        connection.receive(data[:size])
        data = data[size:]
    assert connection.error is None
    assert connection.messages == messages
    assert connection._parts_size == 0
    assert connection._iobuf.tell() == 0


def test_messages_of_v4_may_be_cut_anywhere() -> None:
    messages = [(1, 8, b"first"), (2, 6, b""), (3, 8, b"third" * 3)]
    data = b"".join(frames_of(messages, 4))
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            connection = Received.of_v4()
            for piece in (data[:first], data[first:second], data[second:]):
                connection.receive(piece)
            assert connection.messages == messages
    byte_by_byte = Received.of_v4()
    for place in range(len(data)):
        byte_by_byte.receive(data[place : place + 1])
    assert byte_by_byte.messages == messages


def test_the_end_of_the_stream_leaves_nothing_to_process() -> None:
    """The driver closes a connection if it has no bytes after it has read, even if a message has begun."""
    connection = Received.of_v4()
    connection.receive(frames_of([(1, 8, b"cut off")], 4)[0][:-3])
    connection._iobuf.write(b"")
    assert connection._iobuf.tell() == 0
    assert connection.messages == []


@pytest.mark.parametrize(
    ("head", "said"),
    [(struct.pack(">BBhBi", 0x84, 0, 1, 8, -1), "length -1"), (struct.pack(">BBbBi", 0x82, 0, 1, 8, 9) + b"x", "2 of")],
)
def test_a_message_of_v4_that_cannot_be_is_an_error(head: bytes, said: str) -> None:
    connection = Received.of_v4()
    connection.receive(head)
    assert isinstance(connection.error, ProtocolError)
    assert said in str(connection.error)
    assert connection.messages == []
