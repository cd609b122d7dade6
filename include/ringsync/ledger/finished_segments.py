"""Which segments of a node's log are staged whole, in one object: ``staging/finished/<node>.json``.

A finished segment stays finished, though Cassandra links it again when it replays it after a crash (invariant I7): its
id must be known for ever. Cassandra counts ids up, so that a year of them is a few ranges, not a million objects.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ringsync.storage.port import NotFoundError, ObjectStore

REMEMBERED_S = 3600.0
"""s; so long the commits of a node say that a segment is finished: one who thinks that it is not finds it there."""


@dataclass(frozen=True)
class SegmentIds:
    """A set of ids.

    :ivar ranges: first and last id of each, ascending, never adjacent
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, segment_id: object) -> bool:
        if not isinstance(segment_id, int):
            return False
        place = bisect_right(self.ranges, segment_id, key=lambda one: one[0]) - 1
        return place >= 0 and segment_id <= self.ranges[place][1]

    def with_ids(self, ids: Iterable[int]) -> SegmentIds:
        """These and others."""
        found: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, *((one, one) for one in ids)]):
            if found and first <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(last, found[-1][1]))
            else:
                found.append((first, last))
        return SegmentIds(tuple(found))


def finished_segments(store: ObjectStore, node: str) -> SegmentIds:
    """The finished segments of a node of which its commits need not tell any more.

    :param node: host id
    """
    try:
        return SegmentIds(tuple((first, last) for first, last in json.loads(store.get(_key(node)))["ranges"]))
    except NotFoundError:
        return SegmentIds()


def fold_finished(store: ObjectStore, node: str, segments: Iterable[int]) -> SegmentIds:
    """Remember segments as finished; after that no commit needs to say it.

    :param segments: their ids
    :raises VersionMismatchError: somebody else does the same; nothing was written
    :raises AlreadyExistsError: likewise
    """
    before = store.stat(_key(node))
    found = finished_segments(store, node).with_ids(segments)
    document = json.dumps({"ranges": found.ranges}).encode()
    if before is None:
        store.put(_key(node), document, if_absent=True)
    else:
        store.put(_key(node), document, if_version=before.version)
    return found


def _key(node: str) -> str:
    return f"staging/finished/{node}.json"
