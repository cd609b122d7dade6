"""What a node's ``cdc_raw`` holds, and how much room is left in it, without asking anybody."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import index_name, is_segment, segment_id

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DEFAULT_BYTES = 4096 * 2**20

TOTAL_SPACE = ("cdc_total_space", "cdc_total_space_in_mb")
"""The setting, as Cassandra 4.1 and later name it, and earlier versions."""


@dataclass(frozen=True)
class RawSegment:
    """A segment in ``cdc_raw``.

    :ivar index: content of its index; empty: it has none, or it is being written
    :ivar is_complete: whether Cassandra has finished it
    :ivar size: bytes, of segment and index
    :ivar began_ms: when the segment before it was written last, ms since the epoch; 0: unknown
    :ivar ended_ms: when it was written last
    """

    identity: int
    file: Path
    index: str
    is_complete: bool
    size: int
    began_ms: int
    ended_ms: int

    def remove(self) -> None:
        """Remove it. The index goes last: if only it is left, it shows that the segment was taken.

        :raises OSError: this user may not
        """
        self.file.unlink(missing_ok=True)
        self.file.with_name(index_name(self.file.name)).unlink(missing_ok=True)


@dataclass(frozen=True)
class RawFolder:
    """A look into ``cdc_raw``.

    :ivar segments: the oldest first
    :ivar used: bytes of all files, as Cassandra counts them: a preallocated segment has its whole size
    :ivar free: bytes until Cassandra's limit, or the disk's
    :ivar is_disk_full: whether it is the disk that ends first: others have filled it
    """

    segments: tuple[RawSegment, ...]
    used: int
    free: int
    is_disk_full: bool = False

    def room_in(self, folder: str, total_bytes: int) -> str:
        """Say how much room there is.

        :param total_bytes: the node's ``cdc_total_space``; 0: unknown
        """
        mb = 2**20
        return f"{self.free // mb:,} of {(total_bytes or self.used + self.free) // mb:,} MB are free in {folder}"

    @property
    def why_nothing_leaves(self) -> str:
        """Say why there is little room though all that is finished has left."""
        if self.is_disk_full:
            return (
                f"the disk is full: the folder itself has {self.used // 2**20:,} MB, the rest others have used. Make "
                "room on that disk"
            )
        return "Cassandra has not finished the segments that are left there"


def look(folder: Path, total_bytes: int) -> RawFolder:
    """Look into a folder.

    :param total_bytes: the node's ``cdc_total_space``
    :raises OSError: the folder cannot be listed
    """
    sizes: dict[str, os.stat_result] = {}
    for entry in os.scandir(folder):
        try:
            sizes[entry.name] = entry.stat()
        except FileNotFoundError:
            continue  # it was removed just now
    segments, before_ms = [], 0
    for name in sorted(filter(is_segment, sizes), key=lambda name: segment_id(name) or 0):
        file, stat = folder / name, sizes[name]
        index, is_complete = _index(file)
        size = stat.st_size + (sizes[index_name(name)].st_size if index_name(name) in sizes else 0)
        ended_ms = int(stat.st_mtime * 1000)
        segments.append(RawSegment(segment_id(name) or 0, file, index, is_complete, size, before_ms, ended_ms))
        before_ms = ended_ms
    used = sum(stat.st_size for stat in sizes.values())
    free, of_disk = max(0, total_bytes - used), shutil.disk_usage(folder).free
    return RawFolder(tuple(segments), used, min(free, of_disk), of_disk < free)


def _index(file: Path) -> tuple[str, bool]:
    """Read a segment's index; what cannot be read or parsed is told by the stage."""
    try:
        content = file.with_name(index_name(file.name)).read_bytes()
        parsed = parse_index(content)
    except (OSError, ValueError):
        return "", False
    return content.decode("ascii", "replace"), parsed is not None and parsed.completed


def total_space(settings: Mapping[str, str], folder: Path) -> int:
    """Return a node's ``cdc_total_space``, in bytes. 0 or none stands for Cassandra's default: an eighth of the volume,
    at most 4 GiB (C: DatabaseDescriptor.applyAll).

    :param settings: the node's :data:`TOTAL_SPACE`
    :raises OSError: the folder is not there
    """
    text = settings.get("cdc_total_space") or ""
    number = text.rstrip("BKMGTi")
    size = int(number) * _UNITS.get(text[len(number) :], 0) if number.isdecimal() else 0
    size = size or int(settings.get("cdc_total_space_in_mb") or 0) * 2**20
    return size or min(_DEFAULT_BYTES, shutil.disk_usage(folder).total // 8)
