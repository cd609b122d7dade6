"""Which segments of a node need not be archived, since ``commitlog_stage`` has read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ringsync.ledger.finished_segments import SegmentIds
from ringsync.ledger.staging import Written


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
