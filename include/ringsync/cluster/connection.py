"""A connection of the driver that joins received bytes with fewer copies, for pages of a megabyte.

The driver reads 4096 bytes at a time and copies them through two growing buffers. So it copies a page seven times,
which is two thirds of the client's cost of a scan. Here a page's parts are joined once. This module replaces only the
framing: that of protocol v5 (native_protocol_v5.spec, section 2: segments with checksums, uncompressed), and that of
v4, whose messages follow one another without segments. The handshake and everything else is the driver's own code, of
the exact version in requirements.txt.
"""

from __future__ import annotations

import io
from typing import Any

from cassandra import ProtocolVersion
from cassandra.cluster import DefaultConnection
from cassandra.connection import (
    ConnectionException,
    CrcMismatchException,
    ProtocolError,
    _Frame,
    defunct_on_error,
    frame_header_v3,
)
from cassandra.protocol import SupportedMessage
from cassandra.segment import CRC32_INITIAL, Segment, compute_crc24
from isal import isal_zlib

_SEGMENT_HEADER_BYTES = 3 + 3
_CHECKSUM_BYTES = 4
_FRAME_HEADER_BYTES = 1 + frame_header_v3.size
_VERSION_MASK = 0x7F
_SCYLLA_OPTION = "SCYLLA_"
"""Beginning of the names of options by which ScyllaDB says that it is none other."""


class _Pieces:
    """Received bytes, piece by piece: what the driver uses of a BytesIO, but nothing is copied."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        """Add a piece; the end of the stream is an empty one."""
        if piece:
            self._pieces.append(piece)

    def tell(self) -> int:
        """Return how many bytes there are: with none, the driver closes the connection."""
        return sum(map(len, self._pieces))

    def getvalue(self) -> bytes:
        """Return the bytes, for the driver's log."""
        return b"".join(self._pieces)

    def take(self) -> list[bytes]:
        """Remove all pieces, and return them."""
        pieces, self._pieces = self._pieces, []
        return pieces


class PageConnection(DefaultConnection):  # type: ignore[misc]
    """A connection that receives large messages with few copies."""

    in_buffer_size = 2**18

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._parts: list[memoryview] = []
        self._parts_size = 0
        super().__init__(*args, **kwargs)

    def _send_options_message(self) -> None:
        """Begin the handshake. Before that the node sends nothing."""
        if self.protocol_version < ProtocolVersion.V5:
            self._io_buffer._io_buffer = _Pieces()
        super()._send_options_message()

    def process_io_buffer(self) -> None:
        """Take whole segments from the received bytes, if there are any, and pass on each complete message."""
        if isinstance(self._io_buffer.io_buffer, _Pieces):
            self._take_pieces(self._io_buffer.io_buffer)
        elif not self._is_checksumming_enabled or self._segment_codec.compression or self._driver_is_reading():
            super().process_io_buffer()
        else:
            self._take_segments()

    def _driver_is_reading(self) -> bool:
        """Tell whether the driver's own code is reading a message, as at the end of the handshake."""
        return self._current_frame is not None or bool(self._io_buffer.readable_cql_frame_bytes())

    @defunct_on_error  # type: ignore[untyped-decorator]
    def _take_pieces(self, received: _Pieces) -> None:
        for piece in received.take():
            self._parts.append(memoryview(piece))
            self._parts_size += len(piece)
        self._take_messages()

    @defunct_on_error  # type: ignore[untyped-decorator]
    def _take_segments(self) -> None:
        received = memoryview(self._io_buffer.io_buffer.getvalue())
        position = 0
        while (end := self._segment_end(received, position)) is not None:
            part = received[position + _SEGMENT_HEADER_BYTES : end - _CHECKSUM_BYTES]
            if isal_zlib.crc32(part, CRC32_INITIAL) != int.from_bytes(received[end - _CHECKSUM_BYTES : end], "little"):
                raise CrcMismatchException("the checksum of a segment's payload does not match", self.endpoint)
            self._parts.append(part)
            self._parts_size += len(part)
            position = end
            self._take_messages()
        rest = io.BytesIO()
        rest.write(received[position:])
        self._io_buffer._io_buffer = rest

    def _segment_end(self, received: memoryview, position: int) -> int | None:
        """Find where the segment at a position ends; None: it is not complete yet."""
        header = received[position : position + _SEGMENT_HEADER_BYTES]
        if len(header) < _SEGMENT_HEADER_BYTES:
            return None
        number = int.from_bytes(header[:3], "little")
        if compute_crc24(number, 3) != int.from_bytes(header[3:], "little"):
            raise CrcMismatchException("the checksum of a segment's header does not match", self.endpoint)
        end = position + _SEGMENT_HEADER_BYTES + (number & Segment.MAX_PAYLOAD_LENGTH) + _CHECKSUM_BYTES
        return end if end <= len(received) else None

    def _take_messages(self) -> None:
        while self._parts_size >= _FRAME_HEADER_BYTES:
            if len(self._parts[0]) < _FRAME_HEADER_BYTES:
                self._parts = [memoryview(b"".join(self._parts))]
            head = self._parts[0]
            version = head[0] & _VERSION_MASK
            if version < ProtocolVersion.V3:
                raise ProtocolError(f"the node answers with version {version} of the native protocol")
            flags, stream, opcode, length = frame_header_v3.unpack_from(head, 1)
            if length < 0:
                raise ProtocolError(f"the node sent a message with the length {length}")
            end = _FRAME_HEADER_BYTES + length
            if self._parts_size < end:
                return
            body = self._take(end)
            frame = _Frame(version, flags, stream, opcode, _FRAME_HEADER_BYTES, end)
            self.process_msg(frame, body)

    def _take(self, size: int) -> bytes:
        """Remove the first ``size`` bytes from the parts, and join them without the frame's header."""
        taken: list[memoryview] = []
        missing = size
        while missing > len(self._parts[0]):
            missing -= len(self._parts[0])
            taken.append(self._parts.pop(0))
        taken.append(self._parts[0][:missing])
        self._parts[0] = self._parts[0][missing:]
        if not self._parts[0]:
            self._parts.pop(0)
        self._parts_size -= size
        taken[0] = taken[0][_FRAME_HEADER_BYTES:]
        return b"".join(taken)


class NotScyllaError(ConnectionException):  # type: ignore[misc]
    """The node is no ScyllaDB."""


class ScyllaConnection(PageConnection):
    """A connection that only ScyllaDB gets: of an old Cassandra, which speaks protocol v4 as well, nothing is read."""

    in_buffer_size = 2**20
    """More than a page mostly has: those of 256 KiB cost a quarter more: memory is taken and given back each time."""

    @defunct_on_error  # type: ignore[untyped-decorator]
    def _handle_options_response(self, options_response: Any) -> None:
        """Look at what the node says of itself, before the handshake goes on."""
        if isinstance(options_response, SupportedMessage) and not any(
            name.startswith(_SCYLLA_OPTION) for name in options_response.options
        ):
            raise NotScyllaError("the node is neither Cassandra 4.0 or newer nor ScyllaDB", self.endpoint)
        super()._handle_options_response(options_response)
