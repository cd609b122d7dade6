"""The records of commit log sections: the place of each mutation, and whether its checksums are right.

A record is ``int32 size, int32 crc(size), mutation, int32 crc(size, mutation)`` (docs/formats.md, 1.5;
C: CommitLogReader.readSection).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ringsync.compiled.arrow import Integers, Mask
from ringsync.compiled.crc32 import CRC_TABLES, crc32_continue
from ringsync.compiled.memory import KERNEL, address, load8, load32, load64_native, store8, store64
from ringsync.formats.commitlog.segment import Damage, Section

OVERHEAD = 12
"""Bytes of a record besides its mutation."""
SMALLEST = 10
"""Bytes of the shortest mutation that Cassandra writes."""

_WHOLE, _BROKEN_SIZE, _TOO_SHORT, _BEYOND, _NO_RECORD = range(5)
_REASONS = {
    _BROKEN_SIZE: "the checksum of a record's size is wrong, so the start of the next record is unknown",
    _TOO_SHORT: f"a record of less than {SMALLEST} bytes: the section is damaged from here on",
    _BEYOND: "a record runs past the end of its section",
    _NO_RECORD: "zeros or other bytes where a record should be: something was lost here",
}


@dataclass(frozen=True)
class Records:
    """Records in the order of the log.

    :ivar offsets: int64, start of each mutation in the segment's buffer
    :ivar sizes: int64, bytes of each mutation
    :ivar positions: int64, the logical position after each record, which Cassandra calls the record's position
    :ivar sound: bool, whether the mutation's checksum is right
    """

    offsets: Integers
    sizes: Integers
    positions: Integers
    sound: Mask

    def __len__(self) -> int:
        return len(self.offsets)

    def behind(self, position: int, certain: int) -> Records:
        """Keep the records that end after a logical position, and all records whose positions are uncertain.

        :param certain: place in the buffer from which on positions are uncertain
        """
        first = int(np.searchsorted(self.positions, position, side="right"))
        first = min(first, int(np.searchsorted(self.offsets, certain)))
        return Records(self.offsets[first:], self.sizes[first:], self.positions[first:], self.sound[first:])

    def up_to(self, position: int) -> Records:
        """Keep the records that end at or before a logical position."""
        last = int(np.searchsorted(self.positions, position, side="right"))
        return Records(self.offsets[:last], self.sizes[:last], self.positions[:last], self.sound[:last])

    def only(self, chosen: Mask) -> Records:
        """Keep the records for which the mask is true."""
        if chosen.all():
            return self
        return Records(self.offsets[chosen], self.sizes[chosen], self.positions[chosen], self.sound[chosen])


def find_records(
    buffer: npt.NDArray[np.uint8], sections: list[Section], file_end: int = -1
) -> tuple[Records, list[Damage]]:
    """Find the records of a segment's sections, and the parts of the sections that are no records.

    :param buffer: bytes of the sections, followed by spare bytes
    :param sections: sections in the order of the log
    :param file_end: end in the buffer of a file that Cassandra filled with zeros before it wrote to it: a section that
        reaches this end may have zeros after its last record. Zeros anywhere else mean that something was lost
    """
    room = sum(section.end - section.start for section in sections) // (OVERHEAD + SMALLEST) + 1
    table = np.empty((3, room), np.int64)
    sound = np.empty(room, np.bool_)
    stop = np.empty(2, np.int64)
    damages = []
    count = 0
    for section in sections:
        count = _find_records(
            address(buffer),
            section.start,
            section.end,
            section.position - section.start,
            address(CRC_TABLES),
            address(table),
            address(sound),
            room,
            count,
            section.end == file_end,
            address(stop),
        )
        reason, at = int(stop[0]), int(stop[1])
        if reason != _WHOLE:
            damages.append(Damage(section.position + at - section.start, section.end - at, _REASONS[reason]))
    return Records(table[0, :count], table[1, :count], table[2, :count], sound[:count]), damages


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _find_records(
    base: int,
    start: int,
    end: int,
    shift: int,
    tables: int,
    records: int,
    sound: int,
    room: int,
    count: int,
    may_end_in_zeros: bool,
    stop: int,
) -> int:
    """Append a section's records to int64[3, room]: offsets, sizes, positions. Return the number of records now.

    :param stop: output: address of two int64: why and where the section ended
    """
    p, limit = base + start, base + end
    reason = _WHOLE
    while limit - p >= 4:
        size = load32(p)
        if size == 0:
            reason = _WHOLE if may_end_in_zeros and _is_zero(p, limit) else _NO_RECORD
            break
        if limit - p < 8 or crc32_continue(tables, p, 4, 0) != load32(p + 4):
            reason = _BROKEN_SIZE
            break
        if size < SMALLEST:
            reason = _TOO_SHORT
            break
        if size > limit - p - OVERHEAD:
            reason = _BEYOND
            break
        crc = crc32_continue(tables, p + 8, size, load32(p + 4))
        store64(records + 8 * count, p + 8 - base)
        store64(records + 8 * (room + count), size)
        p += OVERHEAD + size
        store64(records + 8 * (2 * room + count), p - base + shift)
        store8(sound + count, crc == load32(p - 4))
        count += 1
    if reason == _WHOLE and p < limit < p + 4 and not (may_end_in_zeros and _is_zero(p, limit)):
        reason = _NO_RECORD
    store64(stop, reason)
    store64(stop + 8, p - base)
    return count


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def _is_zero(p: int, end: int) -> bool:
    while end - p >= 8:
        if load64_native(p) != 0:
            return False
        p += 8
    while p < end:
        if load8(p) != 0:
            return False
        p += 1
    return True
