"""Where the files of an SSTable are read from: a folder here; ``sources/`` has the object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ringsync.formats.sstable.names import Descriptor, FoundSSTables, find_sstables


class Source(Protocol):
    """The files of one SSTable. ``component`` is ``Data.db``, for example.

    :ivar descriptor: which SSTable it is
    """

    @property
    def descriptor(self) -> Descriptor: ...

    def read(self, component: str) -> bytes | None:
        """Read a whole file; None: there is none."""

    def size(self, component: str) -> int | None:
        """Return the bytes of a file; None: there is none."""

    def read_range(self, component: str, start: int, length: int) -> bytes:
        """Read bytes of a file; fewer where it ends.

        :raises OSError: there is no such file, or it cannot be read
        """


@dataclass(frozen=True)
class LocalSource:
    """The files of an SSTable in a local folder; the descriptor has its path."""

    descriptor: Descriptor

    def read(self, component: str) -> bytes | None:
        try:
            return self._path(component).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, component: str) -> int | None:
        try:
            return self._path(component).stat().st_size
        except FileNotFoundError:
            return None

    def read_range(self, component: str, start: int, length: int) -> bytes:
        # The file is not mapped: a signal would end the process if a disk or mount failed to give a page.
        with self._opened(component) as file:
            parts = []
            while length > 0 and (part := os.pread(file, length, start)):
                parts.append(part)
                start, length = start + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _path(self, component: str) -> Path:
        return Path(self.descriptor.path(component))

    @contextmanager
    def _opened(self, component: str) -> Iterator[int]:
        file = os.open(self._path(component), os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)


def find_local(folder: Path) -> FoundSSTables:
    """Find the complete SSTables in a folder and all folders in it, also linked ones; see :func:`.names.find_sstables`.

    :raises OSError: there is no such folder, or it or a folder in it cannot be read
    :raises SSTableError: a set is of an unknown version
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    return find_sstables(_files_in(folder.resolve()))


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder and in those in it, each folder once: by its own path if it has one
    without links."""
    seen: set[str] = set()
    roots = [folder.as_posix()]
    for root in roots:  # links are followed last, and add to it
        for parent, folders, files in os.walk(root, onerror=_refuse):
            if (real := os.path.realpath(parent)) in seen:
                folders.clear()
                continue
            seen.add(real)
            paths = (Path(parent, name).as_posix() for name in sorted(folders))
            roots += [path for path in paths if os.path.islink(path)]
            yield from (Path(parent, name).as_posix() for name in files)


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a folder that has gone meanwhile holds nothing
        raise error
