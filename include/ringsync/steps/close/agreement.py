"""Which rows of a bucket are settled: where the live replicas agree, and everything once the bucket is closed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
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

    :ivar files: the blocks by where they lie, with the node that each comes from
    :ivar ring: digest of the ring snapshot that ``settled`` is about
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

    def published(self, what: Settled, ring: str) -> None:
        """Take in that what was settled is published.

        :param ring: digest of the ring snapshot that it was settled by
        """
        if ring != self.ring:
            self.read.clear()
        for number, reading in what.readings:
            if not reading.united:
                self.read[number].update(key for key, _ in reading.files)
        self.ring, self.settled, self.united = ring, what.sums, set(what.united)


@dataclass(frozen=True)
class Reading:
    """Rows to read: these ranges of these blocks.

    :ivar files: the blocks, and the node of each
    :ivar ranges: without wrap
    :ivar rows: how many
    :ivar united: whether the rows are of all nodes, since these do not agree
    :ivar level: consistency level at which a read meets at least one replica that has these rows; LOCAL_ONE: all
        have them
    """

    files: tuple[tuple[Place, str], ...]
    ranges: tuple[TokenRange, ...]
    rows: int
    united: bool = False
    level: Level = "LOCAL_ONE"


@dataclass(frozen=True)
class Settled:
    """What of a bucket can be published now.

    :ivar readings: readings by number of the token range; all under 0 if the ring has changed
    :ivar sums: what ``OpenBucket.settled`` becomes once it is published
    :ivar united: what ``OpenBucket.united`` becomes
    :ivar everywhere: all replicas are alive and have these rows alike: none has had them alone, long ago
    :ivar by_range: False: the ring has changed, and all is read in one
    """

    bucket: Bucket
    readings: tuple[tuple[int, Reading], ...]
    sums: Sums
    united: frozenset[Place]
    everywhere: bool
    by_range: bool = True

    @property
    def rows(self) -> int:
        """How many are to be read."""
        return sum(reading.rows for _, reading in self.readings)


def settle(
    open_bucket: OpenBucket, ring: RankedRing, now_ms: int, *, is_closed: bool, most: int = 2**63 - 1
) -> Settled | None:
    """Find what is settled and not yet published.

    :param ring: ring snapshot of the present plan
    :param now_ms: ms since the epoch
    :param is_closed: the bucket takes no more rows: what replicas do not agree on is united
    :param most: about so many rows on which they agree, and one token range at least: who asks again finds the others
    :returns: None: nothing
    """
    bucket = open_bucket.bucket
    files = open_bucket.files
    if now_ms < bucket.end or not files:
        return None
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
        readings, left = _up_to(most, _of_primaries(files, ring, fresh, primary, read))
        for number, _ in left:
            sums[number] = settled[number]
        is_closed &= not left
        same = agreed & _same_everywhere(totals, reference)
    else:
        same = np.zeros(len(ring.ranges), np.bool_)
    united = open_bucket.united
    if is_closed and files.keys() - united:
        of_all = _of_all(files, ring, ~same, comparable)
        readings += of_all
        united = set(files)
    if not readings and united == open_bucket.united:
        return None
    everywhere = all(reading.level == "LOCAL_ONE" for _, reading in readings)
    return Settled(bucket, tuple(readings), sums, frozenset(united), everywhere, comparable)


def settle_together(
    buckets: Mapping[Bucket, OpenBucket], ring: RankedRing, now_ms: int, *, closed_until: int, most: int
) -> list[Settled]:
    """Find what one pass can publish, the oldest first.

    A bucket that is not read by token ranges has a pass of its own: beside others a key of it could be in two slices,
    and the replica would take only one of the two images that they make of it.

    :param ring: ring snapshot of the present plan
    :param now_ms: ms since the epoch
    :param closed_until: ms since the epoch: buckets that end then or before are closed
    :param most: about so many rows on which the replicas agree
    """
    found: list[Settled] = []
    rows = 0
    for bucket in sorted(buckets):
        if rows >= most:
            break
        one = settle(buckets[bucket], ring, now_ms, is_closed=bucket.end <= closed_until, most=most - rows)
        if one is not None and not one.by_range:
            return found or [one]
        if one is not None:
            found.append(one)
            rows += one.rows
    return found


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
    """Tell whether all live replicas of each range have the same rows; the sums and the host id of its primary."""
    numbers = np.arange(len(ring.ranges))
    nothing = np.zeros((len(numbers), 3), np.uint64)
    # A place more, for −1: whoever is not there has nothing.
    known = np.stack([*(totals.get(node, nothing) for node in ring.nodes), nothing])
    first, others = ring.live[:, 0], ring.live[:, 1:]
    reference = known[first, numbers]
    agreed = first >= 0
    for of_rank in others.T:
        agreed &= (of_rank < 0) | (known[of_rank, numbers] == reference).all(axis=1)
    return agreed, reference, [ring.nodes[place] if place >= 0 else None for place in first.tolist()]


def _same_everywhere(totals: Mapping[str, Sums], reference: Sums) -> Mask:
    """Tell where no node has other rows than the primary: not even one that is down by now, or has left."""
    same = np.ones(len(reference), np.bool_)
    for total in totals.values():
        same &= (total[:, 0] == 0) | (total == reference).all(axis=1)
    return same


def _of_primaries(
    files: Mapping[Place, tuple[str, Block]],
    ring: RankedRing,
    fresh: Mask,
    primary: Sequence[str | None],
    read: Mapping[int, Set[Place]],
) -> list[tuple[int, Reading]]:
    """Return what the primaries have in files that were not read before."""
    own: dict[int, list[tuple[Place, str, int]]] = {number: [] for number in np.flatnonzero(fresh).tolist()}
    for key, (node, file) in files.items():
        for number, rows, *_ in file.sums:
            if number in own and primary[number] == node and key not in read.get(number, ()):
                own[number].append((key, node, rows))
    return [(number, _reading(ring, number, found, ring.levels[number])) for number, found in own.items() if found]


def _up_to(
    most: int, readings: list[tuple[int, Reading]]
) -> tuple[list[tuple[int, Reading]], list[tuple[int, Reading]]]:
    """Return the first that have about so many rows, and the others."""
    before = np.cumsum([0, *(reading.rows for _, reading in readings)])[:-1]
    taken = int(np.count_nonzero(before < most))
    return readings[:taken], readings[taken:]


def _reading(ring: RankedRing, number: int, found: Sequence[tuple[Place, str, int]], level: Level | None) -> Reading:
    """Of one range.

    :param found: place, node and number of rows of blocks
    :param level: consistency level at which a read meets a replica that has them; None: nodes do not agree
    """
    files = tuple((key, node) for key, node, _ in found)
    rows = sum(rows for *_, rows in found)
    return Reading(files, ring.ranges[number].unwrap(), rows, united=level is None, level=level or "ALL")


def _of_all(
    files: Mapping[Place, tuple[str, Block]], ring: RankedRing, wanted: Mask, comparable: bool
) -> list[tuple[int, Reading]]:
    if not comparable:
        everything = tuple((key, node) for key, (node, _) in files.items())
        return [
            (0, Reading(everything, WHOLE_RING.unwrap(), sum(file.rows for _, file in files.values()), True, "ALL"))
        ]
    there: dict[int, list[tuple[Place, str, int]]] = {number: [] for number in np.flatnonzero(wanted).tolist()}
    for key, (node, file) in files.items():
        for number, rows, *_ in file.sums:
            if number in there:
                there[number].append((key, node, rows))
    return [(number, _reading(ring, number, found, None)) for number, found in there.items() if found]
