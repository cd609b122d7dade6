"""What a node's log goes by: names of segments and of their indexes, and positions in the log."""

from __future__ import annotations

import re
from dataclasses import dataclass

INDEX_SUFFIX = "_cdc.idx"

_SEGMENT = re.compile(r"CommitLog-(\d+)-(\d{1,19})\.log")
_POSITION = re.compile(r"(?:(\d{1,19}):)?(\d{1,10})")


@dataclass(frozen=True)
class LogPosition:
    """A position in a node's log: Cassandra's CommitLogPosition.

    :ivar position: logical
    """

    segment_id: int
    position: int


def parse_position(text: str) -> LogPosition | int:
    """Read ``SEGMENT_ID:POSITION``, or ``POSITION`` of a segment that is known.

    :raises ValueError: for anything else
    """
    if found := _POSITION.fullmatch(text):
        return LogPosition(int(found[1]), int(found[2])) if found[1] else int(found[2])
    raise ValueError(f"{text!r} is not a position: write POSITION or SEGMENT_ID:POSITION, e.g. 1700000000000:4711")


def segment_id(name: str) -> int | None:
    """The id in the name of a segment or of its index; None: no such file is named so."""
    found = _SEGMENT.fullmatch(name.removesuffix(INDEX_SUFFIX) + ".log" if name.endswith(INDEX_SUFFIX) else name)
    return int(found[2]) if found else None


def is_segment(name: str) -> bool:
    """Whether Cassandra names segments so."""
    return _SEGMENT.fullmatch(name) is not None


def index_name(segment: str) -> str:
    """Name of the file in which Cassandra says how much of a segment is synced."""
    return segment.removesuffix(".log") + INDEX_SUFFIX


def segment_name(index: str) -> str:
    """Name of the segment of which an index speaks."""
    return index.removesuffix(INDEX_SUFFIX) + ".log"
