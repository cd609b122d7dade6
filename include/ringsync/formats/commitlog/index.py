"""The ``_cdc.idx`` beside a segment in ``cdc_raw``: how much of the segment is synced.

See docs/formats.md, 1.1; C: CommitLogSegment.writeCDCIndexFile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringsync.formats.commitlog.segment import Wanted

_COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class SegmentIndex:
    """The content of an index.

    :ivar offset: logical position after the last synced section
    :ivar completed: whether the segment is complete: then all of it may be read, even beyond the offset
    """

    offset: int
    completed: bool

    @property
    def wanted(self) -> Wanted:
        """The part of the segment that may be read, and the position that it must reach."""
        return Wanted(completed_at=self.offset) if self.completed else Wanted(until=self.offset)


def parse_index(content: bytes) -> SegmentIndex | None:
    """Read an index.

    :returns: content; None: the file is empty or cut off, because Cassandra is rewriting it in place
    :raises ValueError: Cassandra never writes such a file
    """
    text = content.decode("ascii", "replace")
    if not text:
        return None
    offset, newline, word = text.partition("\n")
    if not re.fullmatch(r"\d{1,19}", offset) or not _COMPLETED.startswith(word):
        raise ValueError(f"{text[:40]!r} is not what Cassandra writes: an offset, and {_COMPLETED} in a second line")
    if newline and word != _COMPLETED:
        return None
    return SegmentIndex(int(offset), bool(newline))
