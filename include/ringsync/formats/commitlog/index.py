"""The ``_cdc.idx`` beside a segment in ``cdc_raw``: how much of it is synced (docs/formats.md, 1.1;
C: CommitLogSegment.writeCDCIndexFile)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringsync.formats.commitlog.segment import Wanted

_COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class SegmentIndex:
    """What an index says.

    :ivar offset: logical position behind the last synced section
    :ivar completed: nothing more will be written: read the whole segment, whatever the offset says
    """

    offset: int
    completed: bool

    @property
    def wanted(self) -> Wanted:
        """What of the segment may be read, and how far it must reach."""
        return Wanted(completed_at=self.offset) if self.completed else Wanted(until=self.offset)


def parse_index(content: bytes) -> SegmentIndex | None:
    """Read an index.

    :returns: None for a file that Cassandra is just rewriting in place: empty, or cut off. That is no news.
    :raises ValueError: for anything else that Cassandra never writes
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
