"""The files that an operator names: segments, the indexes beside them, and where in a log to begin."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ringsync.formats.commitlog.index import SegmentIndex, parse_index
from ringsync.formats.commitlog.segment import NAME

INDEX_SUFFIX = "_cdc.idx"


class InspectError(Exception):
    """Nothing can be read as asked; the message says what and what to do."""


@dataclass(frozen=True)
class LogPosition:
    """Where in a node's log to begin: a CommitLogPosition.

    :ivar segment_id: None: of the only segment
    :ivar position: logical
    """

    segment_id: int | None
    position: int


def parse_position(text: str) -> LogPosition:
    """Read ``POSITION`` or ``SEGMENT_ID:POSITION``.

    :raises ValueError: for anything else
    """
    if found := re.fullmatch(r"(?:(\d{1,19}):)?(\d{1,10})", text):
        return LogPosition(int(found[1]) if found[1] else None, int(found[2]))
    raise ValueError(f"{text!r} is not a position: write POSITION or SEGMENT_ID:POSITION, e.g. 1700000000000:4711")


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
    return segment.with_name(segment.stem + INDEX_SUFFIX)


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


def segment_id(path: Path) -> int:
    """The id in the name of a segment or index; 0 if it has another name."""
    found = NAME.fullmatch(path.name.removesuffix(INDEX_SUFFIX).removesuffix(".log") + ".log")
    return int(found[2]) if found else 0


def _found(paths: Sequence[Path], pattern: str) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob(pattern), key=lambda one: (segment_id(one), one.name))
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
