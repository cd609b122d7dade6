"""Guarded memory: the system kills a kernel that reads or writes one byte after its end."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.compiled.memory import PADDING
from ringsync.formats.commitlog import segment
from ringsync.formats.rows import state
from ringsync.formats.sstable import index, reader, tries

_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def array(count: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Allocate an array with forbidden memory right after its end, and less than a page before its start."""
    size = count * np.dtype(kind).itemsize
    pages = -(-size // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + (pages + 1) * _PAGE):
        if _LIBC.mprotect(guard, _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return np.frombuffer(memory, kind, count, (pages + 1) * _PAGE - size)


def padded(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """Copy bytes like :func:`ringsync.compiled.memory.padded`, into guarded memory."""
    buffer = array(len(data) + PADDING, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return buffer


class _Guarding:
    """NumPy whose new arrays are guarded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: int | tuple[int, ...], kind: type[np.generic]) -> npt.NDArray[Any]:
        return array(int(np.prod(shape)), kind).reshape(shape)

    empty = zeros


def guard_the_kernels() -> None:
    """Make the kernels of commit logs and SSTables read and write guarded memory from now on, in this process."""
    segment.padded = padded  # type: ignore[attr-defined]
    segment._in_place = lambda view, sections: (padded(view), 0)  # a file's own memory has no guard
    state.pooled = array  # type: ignore[attr-defined]
    for module in (reader, index, tries):
        module.np = _Guarding()  # type: ignore[attr-defined]
    for module in (index, tries):
        module.padded = padded  # type: ignore[attr-defined]
