"""Files that an operator names: segments and the indexes beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ringsync.formats.commitlog.index import SegmentIndex, parse_index
from ringsync.formats.commitlog.names import INDEX_SUFFIX, index_name, segment_id


class InspectError(Exception):
    """The request cannot be served; the message says why and what to do."""


def find_segments(paths: Sequence[Path]) -> list[Path]:
    """Find the segments that paths name: each file, and all ``CommitLog-*.log`` of a folder by segment id.

    :raises InspectError: a path does not exist, or a folder has no segments
    """
    return _find(paths, "CommitLog-*.log")


def find_indexes(paths: Sequence[Path]) -> list[Path]:
    """Find the indexes that paths name: each file, and all indexes of a folder by segment id.

    :raises InspectError: a path does not exist, or a folder has no indexes
    """
    return _find(paths, f"CommitLog-*{INDEX_SUFFIX}")


def index_path(segment: Path) -> Path:
    """Return the path of a segment's index."""
    return segment.with_name(index_name(segment.name))


def read_index(segment: Path) -> SegmentIndex | None:
    """Read the index beside a segment; None: there is none, or Cassandra is just rewriting it.

    :raises InspectError: the file is no index
    """
    path = index_path(segment)
    try:
        return parse_index(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InspectError(f"{path.name}: {error}") from error


def _find(paths: Sequence[Path], pattern: str) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob(pattern), key=lambda file: (segment_id(file.name) or 0, file.name))
            if not inside:
                raise InspectError(f"{path}: there is no {pattern} in this folder")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise InspectError(f"{path}: there is no such file")
    return files


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears only when it is complete.

    :raises OSError: the file cannot be written
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
