"""Messages put together from received bytes: whatever the pieces, and never with a wrong checksum.

The other side is the driver's own encoder of segments; that the whole works with a server is what all scans show.
"""

from __future__ import annotations

import io
import struct
from typing import Any

from cassandra.connection import CrcMismatchException, _ConnectionIOBuffer, segment_codec_no_compression
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

    def process_msg(self, header: Any, body: bytes) -> None:
        assert len(body) == header.end_pos - header.body_offset
        self.messages.append((header.stream, header.opcode, body))

    def defunct(self, error: Exception) -> None:
        self.error = error

    def receive(self, data: bytes) -> None:
        self._io_buffer.io_buffer.write(data)
        self.process_io_buffer()


def sent(messages: list[tuple[int, int, bytes]], together: bool) -> bytes:
    """The bytes of messages as a server sends them; small ones can share a segment."""
    frames = [struct.pack(">BBhBi", 0x85, 0, stream, op, len(body)) + body for stream, op, body in messages]
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
