"""The space that a bootstrap needs in a local object store: for replica and stream, and for copies of SSTables."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringsync.steps.application import StepError
from ringsync.storage.port import ObjectStore

LAKE_BYTES_PER_PAGE_BYTE = 1.5
"""Bytes of replica and stream for each byte of result pages; generous: both are compressed."""


class Space:
    """Adds up the bytes that are needed in the object store, by several tables at once."""

    def __init__(self) -> None:
        self._needed = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def kept(self, size: float) -> Iterator[float]:
        """Add bytes that are needed, and yield the sum. They are given back if what needs them fails."""
        needed = self.take(size)
        try:
            yield needed
        except BaseException:
            self.give_back(size)
            raise

    def take(self, size: float) -> float:
        """Add bytes that are needed, and return the sum."""
        with self._lock:
            self._needed += size
            return self._needed

    def give_back(self, size: float) -> None:
        """Subtract bytes that are written, or that are not needed any more."""
        with self._lock:
            self._needed -= size


def lake_bytes(page_bytes: float) -> float:
    """Return about how many bytes replica and stream need.

    :param page_bytes: bytes of result pages
    """
    return page_bytes * LAKE_BYTES_PER_PAGE_BYTE


def check_space(store: ObjectStore, what: str, needed: float, otherwise: str) -> None:
    """Refuse what a local store has too little space for.

    :param what: what the space is for
    :param needed: bytes
    :param otherwise: what else can be done than to make room
    :raises StepError: with the bytes needed and free
    """
    if not store.url.startswith("file://"):
        return
    folder = Path(store.url.removeprefix("file://"))
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < needed:
        raise StepError(
            f"{store.url}: about {needed / 2**30:.1f} GiB are needed for {what}, but {free / 2**30:.1f} GiB are free: "
            f"make room, or {otherwise}"
        )
