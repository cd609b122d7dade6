"""The finished segments of a node's log, those staged whole, in one object: ``staging/finished/<node>.json``.

A finished segment stays finished, though Cassandra links it again when it replays it after a crash (invariant I7). So
its id must be kept for ever. Cassandra counts ids up, so a year of them is a few ranges, not a million objects.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ringsync.storage.port import ChecksumError, ObjectStore, get_json

REMEMBERED_S = 3600.0
"""Seconds that a node's commits keep saying that a segment is finished, for processes that do not know it yet."""


@dataclass(frozen=True)
class SegmentIds:
    """A set of ids.

    :ivar ranges: first and last id of each range, ascending, never adjacent
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, segment_id: object) -> bool:
        if not isinstance(segment_id, int):
            return False
        place = bisect_right(self.ranges, segment_id, key=lambda range_: range_[0]) - 1
        return place >= 0 and segment_id <= self.ranges[place][1]

    def with_ids(self, ids: Iterable[int]) -> SegmentIds:
        """Return these ids and others."""
        ranges: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, *((segment_id, segment_id) for segment_id in ids)]):
            if ranges and first <= ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            else:
                ranges.append((first, last))
        return SegmentIds(tuple(ranges))


def finished_segments(store: ObjectStore, node: str) -> SegmentIds:
    """Read the finished segments of a node that its commits need not name any more.

    :raises ChecksumError: the object is damaged
    """
    try:
        if (document := get_json(store, _key(node))) is None:
            return SegmentIds()
        return SegmentIds(tuple((int(first), int(last)) for first, last in document["ranges"]))
    except (ChecksumError, ValueError, TypeError, KeyError) as error:
        raise ChecksumError(
            f"{store.uri(_key(node))}, which segments of the node were staged whole, cannot be read "
            f"({type(error).__name__}): restore it"
        ) from error


def fold_finished(store: ObjectStore, node: str, segments: Iterable[int]) -> SegmentIds:
    """Record segments as finished; then no commit needs to name them any more.

    :raises AlreadyExistsError, VersionMismatchError: another process does the same; nothing was written
    """
    before = store.stat(_key(node))
    finished = finished_segments(store, node).with_ids(segments)
    document = json.dumps({"ranges": finished.ranges}).encode()
    store.put(_key(node), document, if_absent=before is None, if_version=before.version if before else None)
    return finished


def _key(node: str) -> str:
    return f"staging/finished/{node}.json"
