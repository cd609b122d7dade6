"""Names of segments and of their indexes, and positions in a node's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

INDEX_SUFFIX = "_cdc.idx"

_SEGMENT = re.compile(r"CommitLog-(\d+)-(\d{1,19})\.log")
_POSITION = re.compile(r"(?:(\d{1,19}):)?(\d{1,10})")


@dataclass(frozen=True)
class LogPosition:
    """A logical position in a segment of a node's log: Cassandra's CommitLogPosition."""

    segment_id: int
    position: int


def parse_position(text: str) -> LogPosition | int:
    """Read ``SEGMENT_ID:POSITION``, or ``POSITION`` in a known segment.

    :raises ValueError: the text is neither
    """
    if match := _POSITION.fullmatch(text):
        return LogPosition(int(match[1]), int(match[2])) if match[1] else int(match[2])
    raise ValueError(f"{text!r} is not a position: write POSITION or SEGMENT_ID:POSITION, e.g. 1700000000000:4711")


def segment_id(name: str) -> int | None:
    """Return the id in the name of a segment or of its index; None: it is no such name."""
    match = _SEGMENT.fullmatch(name.removesuffix(INDEX_SUFFIX) + ".log" if name.endswith(INDEX_SUFFIX) else name)
    return int(match[2]) if match else None


def is_segment(name: str) -> bool:
    """Tell whether this is the name of a segment."""
    return _SEGMENT.fullmatch(name) is not None


def index_name(segment: str) -> str:
    """Return the name of a segment's index."""
    return segment.removesuffix(".log") + INDEX_SUFFIX


def segment_name(index: str) -> str:
    """Return the name of an index's segment."""
    return index.removesuffix(INDEX_SUFFIX) + ".log"
