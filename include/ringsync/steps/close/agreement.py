"""The settled rows of a bucket: where the live replicas agree, and everything once the bucket is closed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringsync.compiled.arrow import Mask
from ringsync.ledger.staging import Block, Bucket, Place
from ringsync.ring.ranks import Level, RankedRing
from ringsync.ring.tokens import WHOLE_RING, TokenRange

Sums = npt.NDArray[np.uint64]
"""uint64[ranges, 3]: number of rows and sums of both halves of their digests, without overflow."""


@dataclass
class OpenBucket:
    """The staged blocks of one bucket of one table.

    :ivar files: the blocks by place, each with its node
    :ivar ring: digest of the ring snapshot of ``settled``
    :ivar settled: the sums of each range's rows when it was last published
    :ivar read: files whose rows of a range were published when the replicas agreed, by number of the range
    :ivar united: files whose rows were published, or dropped, whatever the sums say
    """

    bucket: Bucket
    files: dict[Place, tuple[str, Block]] = field(default_factory=dict)
    ring: str = ""
    settled: Sums = field(default_factory=lambda: np.zeros((0, 3), np.uint64))
    read: dict[int, set[Place]] = field(default_factory=lambda: defaultdict(set))
    united: set[Place] = field(default_factory=set)

    def published(self, settled: Settled, ring: str) -> None:
        """Record that settled rows are published.

        :param ring: digest of the ring snapshot with which they were found settled
        """
        if ring != self.ring:
            self.read.clear()
        for number, reading in settled.readings:
            if not reading.united:
                self.read[number].update(key for key, _ in reading.files)
        self.ring, self.settled, self.united = ring, settled.sums, set(settled.united)


@dataclass(frozen=True)
class Reading:
    """Rows to read: these ranges of these blocks.

    :ivar files: the blocks, and the node of each
    :ivar ranges: without wrap
    :ivar united: whether the rows are of all nodes, since these do not agree
    :ivar level: consistency level at which a read meets at least one replica that has these rows; LOCAL_ONE: all have
        them
    """

    files: tuple[tuple[Place, str], ...]
    ranges: tuple[TokenRange, ...]
    rows: int
    united: bool = False
    level: Level = "LOCAL_ONE"


@dataclass(frozen=True)
class Settled:
    """What can be published of a bucket now.

    :ivar readings: readings by number of the token range; all under 0 if the ring has changed
    :ivar sums: the next ``OpenBucket.settled``
    :ivar united: the next ``OpenBucket.united``
    :ivar everywhere: all replicas are alive and have the same rows: no row can have been published long ago, when only
        one replica had it
    :ivar by_range: whether rows are read by token range; False: the ring has changed, and all are read together
    """

    bucket: Bucket
    readings: tuple[tuple[int, Reading], ...]
    sums: Sums
    united: frozenset[Place]
    everywhere: bool
    by_range: bool = True

    @property
    def rows(self) -> int:
        """Number of rows to read."""
        return sum(reading.rows for _, reading in self.readings)


def settle(
    open_bucket: OpenBucket, ring: RankedRing, now_ms: int, *, is_closed: bool, most: int = 2**63 - 1
) -> Settled | None:
    """Find what is settled and not yet published.

    :param ring: ring snapshot of the present plan
    :param is_closed: the bucket takes no more rows: the rows of replicas that do not agree are united
    :param most: about how many agreed rows to find, but at least one token range; the next call finds the others
    :returns: None: nothing
    """
    bucket, files = open_bucket.bucket, open_bucket.files
    if now_ms < bucket.end or not files:
        return None
    if all(block.is_agreed for _, block in files.values()):
        return _settle_agreed(open_bucket)
    is_known = open_bucket.ring == ring.ring.digest
    settled = open_bucket.settled if is_known else np.zeros((len(ring.ranges), 3), np.uint64)
    read = open_bucket.read if is_known else {}
    comparable = all(file.ring == ring.ring.digest for _, file in files.values())
    readings: list[tuple[int, Reading]] = []
    sums = settled.copy()
    if comparable:
        totals = total_sums(files.values(), len(ring.ranges))
        agreed, reference, primary = agreement(totals, ring)
        fresh = agreed & (reference[:, 0] > 0) & (reference != settled).any(axis=1)
        sums[fresh] = reference[fresh]
        readings = _readings(
            files,
            ring,
            fresh,
            ring.levels,
            lambda number, node, place: primary[number] == node and place not in read.get(number, ()),
        )
        before = np.cumsum([0, *(reading.rows for _, reading in readings)])[:-1]
        taken = int(np.count_nonzero(before < most))
        for number, _ in readings[taken:]:
            sums[number] = settled[number]
        is_closed &= taken == len(readings)
        readings = readings[:taken]
        same = agreed & _same_everywhere(totals, reference)
    else:
        same = np.zeros(len(ring.ranges), np.bool_)
    united = open_bucket.united
    if is_closed and files.keys() - united:
        if comparable:
            readings += _readings(files, ring, ~same, [None] * len(same))
        else:
            every = tuple((place, node) for place, (node, _) in files.items())
            rows = sum(block.rows for _, block in files.values())
            readings = [(0, Reading(every, WHOLE_RING.unwrap(), rows, True, "ALL"))]
        united = set(files)
    if not readings and united == open_bucket.united:
        return None
    everywhere = all(reading.level == "LOCAL_ONE" for _, reading in readings)
    return Settled(bucket, tuple(readings), sums, frozenset(united), everywhere, comparable)


def _settle_agreed(open_bucket: OpenBucket) -> Settled | None:
    """Settle what was read at a consistency level: no replica has other rows, whatever the ring looks like.

    No replica must have them all, so the rows after the changes are read at a quorum. A row may have been read before,
    by the search for late rows.
    """
    bucket, files = open_bucket.bucket, open_bucket.files
    fresh = files.keys() - open_bucket.united
    if not fresh:
        return None
    places = tuple((place, node) for place, (node, _) in files.items() if place in fresh)
    rows = sum(files[place][1].rows for place in fresh)
    reading = Reading(places, WHOLE_RING.unwrap(), rows, level="LOCAL_QUORUM")
    return Settled(bucket, ((0, reading),), open_bucket.settled, frozenset(files), everywhere=False)


def settle_together(
    buckets: Mapping[Bucket, OpenBucket], ring: RankedRing, now_ms: int, *, closed_until: int, most: int
) -> list[Settled]:
    """Find what one pass can publish, the oldest first.

    Buckets that are not read by token ranges are in no pass with others: a key could be in two slices of it, and the
    replica would take only one of the two images. Many together are in one pass, since a cycle has one of each table.

    :param ring: ring snapshot of the present plan
    :param closed_until: buckets that end then or before are closed
    :param most: about how many rows on which the replicas agree
    """
    together: list[Settled] = []
    rows = 0
    for bucket in sorted(buckets):
        if rows >= most:
            break
        settled = settle(buckets[bucket], ring, now_ms, is_closed=bucket.end <= closed_until, most=most - rows)
        if settled is None:
            continue
        if together and together[0].by_range != settled.by_range:
            break
        together.append(settled)
        rows += settled.rows
    return together


def total_sums(files: Iterable[tuple[str, Block]], ranges: int) -> dict[str, Sums]:
    """Return the sums of every node's files, by host id."""
    totals: dict[str, Sums] = {}
    for node, file in files:
        total = totals.setdefault(node, np.zeros((ranges, 3), np.uint64))
        if file.sums:
            sums = np.array(file.sums, np.uint64)
            total[sums[:, 0].astype(np.intp)] += sums[:, 1:]
    return totals


def agreement(totals: Mapping[str, Sums], ring: RankedRing) -> tuple[Mask, Sums, list[str | None]]:
    """Return for each range whether all live replicas have the same rows, and the sums and host id of its primary."""
    numbers = np.arange(len(ring.ranges))
    nothing = np.zeros((len(numbers), 3), np.uint64)
    # One entry more, for index −1: a missing node has no rows.
    known = np.stack([*(totals.get(node, nothing) for node in ring.nodes), nothing])
    first, others = ring.live[:, 0], ring.live[:, 1:]
    reference = known[first, numbers]
    agreed = first >= 0
    for of_rank in others.T:
        agreed &= (of_rank < 0) | (known[of_rank, numbers] == reference).all(axis=1)
    return agreed, reference, [ring.nodes[place] if place >= 0 else None for place in first.tolist()]


def _same_everywhere(totals: Mapping[str, Sums], reference: Sums) -> Mask:
    """Find ranges in which each node has the primary's rows or none, including nodes that are down or have left."""
    same = np.ones(len(reference), np.bool_)
    for total in totals.values():
        same &= (total[:, 0] == 0) | (total == reference).all(axis=1)
    return same


def _readings(
    files: Mapping[Place, tuple[str, Block]],
    ring: RankedRing,
    wanted: Mask,
    levels: Sequence[Level | None],
    chosen: Callable[[int, str, Place], bool] = lambda number, node, place: True,
) -> list[tuple[int, Reading]]:
    """Return what blocks have of the wanted ranges.

    :param levels: level of each range, at which a read meets a replica that has its rows; None: nodes do not agree
    :param chosen: tells whether the rows of a range in a node's block are to be read
    """
    blocks: dict[int, list[tuple[Place, str, int]]] = {number: [] for number in np.flatnonzero(wanted).tolist()}
    for place, (node, block) in files.items():
        for number, rows, *_ in block.sums:
            if number in blocks and chosen(number, node, place):
                blocks[number].append((place, node, rows))
    readings: list[tuple[int, Reading]] = []
    for number, parts in blocks.items():
        if parts:
            places, level = tuple((place, node) for place, node, _ in parts), levels[number]
            rows = sum(rows for *_, rows in parts)
            ranges = ring.ranges[number].unwrap()
            readings.append((number, Reading(places, ranges, rows, united=level is None, level=level or "ALL")))
    return readings
