"""The kernel that reads the subset of columns that a row has, if the table has many."""

from __future__ import annotations

from numba import njit

from ringsync.compiled.memory import KERNEL, load64_native, load_unsigned_vint, store8
from ringsync.formats.commitlog import state as at
from ringsync.formats.commitlog.state import MALFORMED


@njit(**KERNEL)  # type: ignore[untyped-decorator]
def read_subset(s: int, p: int, end: int, count: int, missing: int) -> int:
    """Read which of 64 or more columns a row has, as one byte per column.

    See docs/formats.md, 2.3; C: Columns.deserializeLargeSubset.
    """
    if missing < 0 or missing > count:
        return MALFORMED
    listed = count - missing
    present = 1
    if listed >= count // 2:
        listed, present = missing, 0
    subset = load64_native(s + at.SUBSET)
    for place in range(count):
        store8(subset + place, 1 - present)
    for _ in range(listed):
        if p >= end:
            return MALFORMED
        place, p = load_unsigned_vint(p)
        if place < 0 or place >= count:
            return MALFORMED
        store8(subset + place, present)
    return p
