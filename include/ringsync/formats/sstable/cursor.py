"""A reader of the small files of an SSTable, from front to back. Nothing is read beyond their end."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ringsync.formats.sstable.errors import SSTableError

_UNSIGNED_16 = struct.Struct(">H")
_SIGNED_32 = struct.Struct(">i")
_UNSIGNED_32 = struct.Struct(">I")
_SIGNED_64 = struct.Struct(">q")

DAMAGED = "the file is damaged or was cut off: take the SSTable from another snapshot or replica"


@dataclass
class Cursor:
    """A place in bytes.

    :ivar data: bytes
    :ivar file: name of their file, for messages
    :ivar position: the next byte
    :ivar end: the byte after the last one that may be read
    """

    data: bytes
    file: str
    position: int = 0
    end: int = -1

    def __post_init__(self) -> None:
        if self.end < 0:
            self.end = len(self.data)

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return self.end - self.position

    def fail(self, problem: str, advice: str = DAMAGED) -> SSTableError:
        """Return an error at this place."""
        return SSTableError(self.file, self.position, problem, advice)

    def skip(self, size: int) -> int:
        """Move on; return the place before.

        :raises SSTableError: so many bytes are not left; all methods that read raise it
        """
        if size < 0 or size > self.left:
            raise self.fail(f"{size:,} bytes should follow, but {self.left:,} are left")
        self.position += size
        return self.position - size

    def take(self, size: int) -> bytes:
        """Read some bytes."""
        start = self.skip(size)
        return self.data[start : start + size]

    def u8(self) -> int:
        """Read a byte."""
        return self.data[self.skip(1)]

    def u16(self) -> int:
        """Read an unsigned number of two bytes."""
        return int(_UNSIGNED_16.unpack_from(self.data, self.skip(2))[0])

    def i32(self) -> int:
        """Read a signed number of four bytes."""
        return int(_SIGNED_32.unpack_from(self.data, self.skip(4))[0])

    def u32(self) -> int:
        """Read an unsigned number of four bytes."""
        return int(_UNSIGNED_32.unpack_from(self.data, self.skip(4))[0])

    def i64(self) -> int:
        """Read a signed number of eight bytes."""
        return int(_SIGNED_64.unpack_from(self.data, self.skip(8))[0])

    def count(self, size: int, what: str) -> int:
        """Read how many things of at least ``size`` bytes each follow, in four bytes."""
        number = self.i32()
        if number < 0 or number * size > self.left:
            raise self.fail(f"{number:,} {what} cannot follow in {self.left:,} bytes")
        return number

    def uvint(self) -> int:
        """Read an unsigned vint: as many bytes follow the first one as it has leading one bits."""
        first = self.u8()
        extra = 8 - (first ^ 0xFF).bit_length()
        more = self.take(extra)
        return (first & (0xFF >> extra)) << 8 * extra | int.from_bytes(more, "big")

    def text16(self) -> str:
        """Read Java's UTF: a text after its length in two bytes."""
        return self._decoded(self.take(self.u16()))

    def sized(self) -> bytes:
        """Read bytes after their length in a vint."""
        return self.take(self.uvint())

    def text(self) -> str:
        """Read a text after its length in a vint."""
        return self._decoded(self.sized())

    def _decoded(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fail("text that is not UTF-8") from error
