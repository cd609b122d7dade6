"""The files that an operator names: segments and the indexes beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ringsync.formats.commitlog.index import SegmentIndex, parse_index
from ringsync.formats.commitlog.names import INDEX_SUFFIX, index_name, segment_id


class InspectError(Exception):
    """Nothing can be read as asked; the message says what and what to do."""


def find_segments(paths: Sequence[Path]) -> list[Path]:
    """The segments that paths name: files as they are given, of a folder all ``CommitLog-*.log`` by segment id.

    :raises InspectError: when a path does not exist, or a folder has no segments
    """
    return _found(paths, "CommitLog-*.log")


def find_indexes(paths: Sequence[Path]) -> list[Path]:
    """The same for indexes.

    :raises InspectError: when a path does not exist, or a folder has no indexes
    """
    return _found(paths, f"CommitLog-*{INDEX_SUFFIX}")


def index_path(segment: Path) -> Path:
    """Where the index of a segment is."""
    return segment.with_name(index_name(segment.name))


def read_index(segment: Path) -> SegmentIndex | None:
    """The index beside a segment; None: there is none, or Cassandra is just rewriting it.

    :raises InspectError: when it is no index
    """
    path = index_path(segment)
    try:
        return parse_index(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InspectError(f"{path.name}: {error}") from error


def _found(paths: Sequence[Path], pattern: str) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob(pattern), key=lambda one: (segment_id(one.name) or 0, one.name))
            if not inside:
                raise InspectError(f"{path}: there is no {pattern} in this folder")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InspectError(f"{path}: there is no such file")
    return found


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that is there only when it is whole.

    :raises OSError: it cannot be written
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
