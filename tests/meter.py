"""A proxy before a Cassandra node that measures what the node answers: each response as it is on the wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HEADER_BYTES = 9
READY, AUTHENTICATE = 0x02, 0x03


@dataclass
class Meter:
    """A running proxy.

    :ivar port: for clients, on the same address as the node
    :ivar largest: bytes of the largest response since it was set to 0
    :ivar responses: their number; ``total``: their bytes
    """

    port: int
    largest: int = 0
    responses: int = 0
    total: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, size: int) -> None:
        """Count a response."""
        with self._lock:
            self.largest = max(self.largest, size)
            self.responses += 1
            self.total += size


class _Stream:
    """What one connection's node says (native_protocol_v5.spec, section 2): frames, and segments of frames once the
    connection is set up."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._received, self._frames = bytearray(), bytearray()
        self._in_segments = False
        self._missing = 0  # bytes of a frame that are still to come

    def feed(self, data: bytes) -> None:
        self._received += data
        while self._in_segments and len(self._received) >= 6:
            length = int.from_bytes(self._received[:3], "little") & 0x1FFFF
            end = 6 + length + 4
            if len(self._received) < end:
                return
            self._take(self._received[6 : 6 + length])
            del self._received[:end]
        if not self._in_segments:
            data, self._received = bytes(self._received), bytearray()
            self._take(data)

    def _take(self, data: bytes | bytearray) -> None:
        if self._missing >= len(data):
            self._missing -= len(data)
            return
        self._frames += data[self._missing :]
        self._missing = 0
        while len(self._frames) >= HEADER_BYTES:
            opcode, end = self._frames[4], HEADER_BYTES + int.from_bytes(self._frames[5:9], "big")
            self._meter.note(end)
            self._missing = max(0, end - len(self._frames))
            del self._frames[:end]
            self._in_segments |= opcode in (READY, AUTHENTICATE)


@contextmanager
def meter(address: str, port: int) -> Iterator[Meter]:
    """Run a proxy before a node that listens there."""
    listening = socket.create_server((address, 0))
    found = Meter(listening.getsockname()[1])
    open_sockets: list[socket.socket] = [listening]

    def forward(source: socket.socket, sink: socket.socket, stream: _Stream | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                sink.sendall(data)
                if stream:
                    stream.feed(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                try:
                    node = socket.create_connection((address, port))
                except OSError:  # the node is down
                    client.close()
                    continue
                open_sockets.extend((client, node))
                for arguments in ((client, node, None), (node, client, _Stream(found))):
                    threading.Thread(target=forward, args=arguments, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield found
    finally:
        for one in open_sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
