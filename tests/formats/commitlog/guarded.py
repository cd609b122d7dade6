"""Memory whose end is the end of what may be touched: a kernel that reads or writes one byte behind it is killed."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.compiled.memory import PADDING
from ringsync.formats.commitlog import segment, state

_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def array(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """An array before and behind which nothing may be touched (before it: but for less than a page)."""
    size = count * np.dtype(kind).itemsize
    pages = -(-size // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + (pages + 1) * _PAGE):
        if _LIBC.mprotect(guard, _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return np.frombuffer(memory, kind, count, (pages + 1) * _PAGE - size)


def padded(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """As :func:`ringsync.compiled.memory.padded`."""
    buffer = array(len(data) + PADDING, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


def guard_the_kernels() -> None:
    """From now on the kernels of commit logs read and write guarded memory, in this process."""
    segment.padded = padded  # type: ignore[attr-defined]
    segment._in_place = lambda view, sections: (padded(view), 0)  # a file's own memory has no guard
    state.pooled = array  # type: ignore[attr-defined]
