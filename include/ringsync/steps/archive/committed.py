"""What ``commitlog_stage`` has committed of a node's log, as the archive asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ringsync.ledger.finished_segments import SegmentIds, finished_segments
from ringsync.ledger.staging import Written, commit_keys, get_commit
from ringsync.storage.port import ChecksumError, ObjectStore


@dataclass(frozen=True)
class Committed:
    """What ``commitlog_stage`` has committed of a node's log.

    :ivar finished: ids of segments that it has wholly committed of late
    :ivar folded: ids of those that it had committed long ago
    :ivar written: write times of the rows of segments, as far as they are known
    """

    finished: Collection[int] = ()
    folded: SegmentIds = field(default_factory=SegmentIds)
    written: Mapping[int, Written] = field(default_factory=dict)

    def has(self, identity: int) -> bool:
        """Tell whether a segment is wholly committed."""
        return identity in self.finished or identity in self.folded


def committed_of(store: ObjectStore, node: str) -> Committed:
    """Return what ``commitlog_stage`` has committed of a node's log."""
    with suppress(ChecksumError):  # the stage reports it; whatever it has read is archived once more
        if keys := commit_keys(store, node):
            last = get_commit(store, keys[-1])
            return Committed(last.finished, finished_segments(store, node), last.written)
    return Committed()
