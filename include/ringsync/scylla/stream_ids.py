"""Ids of the streams of Scylla's CDC log: 128 bits, of which the upper half is the token of the log's partition.

::

    128           64            26             4              0
      | token : 64 | random : 38 | index : 22 | version : 4 |

(S: cdc/generation.cc, ``stream_id``; docs/dev/cdc.md). The number is stored as 16 bytes, big-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 16
VERSION = 1
"""The version since Scylla 4.3. Ids of other versions are wholly random: their index says nothing."""

_INDEX_SHIFT, _INDEX_MASK, _VERSION_MASK = 4, 2**22 - 1, 2**4 - 1


class StreamIdError(ValueError):
    """Bytes that are no stream id."""


@dataclass(frozen=True, order=True)
class StreamId:
    """A stream. Ids have the order of their bytes.

    :ivar data: 16 bytes
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != ID_BYTES:
            raise StreamIdError(f"0x{self.data.hex()} has {len(self.data)} bytes: a stream id has {ID_BYTES}")

    def __str__(self) -> str:
        return f"0x{self.data.hex()}"

    @property
    def token(self) -> int:
        """Token of the stream's partition in the log table, whose partitioner does not hash."""
        return int.from_bytes(self.data[:8], "big", signed=True)

    @property
    def version(self) -> int:
        return self.data[-1] & _VERSION_MASK

    @property
    def index(self) -> int | None:
        """Number of the token range that the stream is of; None: the version has none. With tablets it is 0."""
        if self.version != VERSION:
            return None
        return int.from_bytes(self.data[8:], "big") >> _INDEX_SHIFT & _INDEX_MASK
