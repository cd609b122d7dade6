"""Which rows of a bucket are settled: where the live replicas agree, and everything once the bucket is closed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringsync.ring.ranks import RankedRing
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.state.staging import Bucket, StagedFile

Sums = npt.NDArray[np.uint64]
"""uint64[ranges, 3]: number of rows and sums of both halves of their digests, without overflow."""

Mask = npt.NDArray[np.bool_]


@dataclass
class OpenBucket:
    """The staged files of one bucket of one table.

    :ivar files: by key, with the node that each comes from
    :ivar ring: digest of the ring snapshot that ``settled`` is about
    :ivar settled: the sums of each range's rows when it was last published
    :ivar united: files whose rows were published, or dropped, whatever the sums say
    """

    bucket: Bucket
    files: dict[str, tuple[str, StagedFile]] = field(default_factory=dict)
    ring: str = ""
    settled: Sums = field(default_factory=lambda: np.zeros((0, 3), np.uint64))
    united: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Reading:
    """Rows to read: these ranges of these files.

    :ivar files: key and node
    :ivar ranges: without wrap
    :ivar rows: about how many
    :ivar united: of all nodes, since they do not agree
    """

    files: tuple[tuple[str, str], ...]
    ranges: tuple[TokenRange, ...]
    rows: int
    united: bool = False


@dataclass(frozen=True)
class Settled:
    """What of a bucket can be published now.

    :ivar readings: by number of a token range; of a union over a ring that has changed all under 0
    :ivar sums: what ``OpenBucket.settled`` becomes once it is published
    :ivar united: what ``OpenBucket.united`` becomes
    :ivar everywhere: all replicas are alive and have these rows alike: none has had them alone, long ago
    """

    bucket: Bucket
    readings: tuple[tuple[int, Reading], ...]
    sums: Sums
    united: frozenset[str]
    everywhere: bool


def settle(open_bucket: OpenBucket, ring: RankedRing, now_ms: int, *, is_closed: bool) -> Settled | None:
    """Find what is settled and not yet published.

    :param ring: of the present plan
    :param now_ms: ms since the epoch
    :param is_closed: the bucket takes no more rows: what replicas do not agree on is united
    :returns: None: nothing
    """
    bucket = open_bucket.bucket
    files = open_bucket.files
    if now_ms < bucket.end or not files:
        return None
    settled = (
        open_bucket.settled if open_bucket.ring == ring.ring.digest else np.zeros((len(ring.ranges), 3), np.uint64)
    )
    comparable = all(file.ring == ring.ring.digest for _, file in files.values())
    readings: list[tuple[int, Reading]] = []
    sums = settled.copy()
    if comparable:
        totals = total_sums(files.values(), len(ring.ranges))
        agreed, reference, primary = agreement(totals, ring)
        fresh = agreed & (reference[:, 0] > 0) & (reference != settled).any(axis=1)
        sums[fresh] = reference[fresh]
        readings += _of_primaries(files, ring, fresh, reference, primary)
        everywhere = bool(ring.all_live[fresh].all())
        same = agreed & _same_everywhere(totals, reference)
    else:
        everywhere = False
        same = np.zeros(len(ring.ranges), np.bool_)
    united = open_bucket.united
    if is_closed and files.keys() - united:
        of_all = _of_all(files, ring, ~same, comparable)
        readings += of_all
        everywhere &= not of_all
        united = set(files)
    if not readings and united == open_bucket.united:
        return None
    return Settled(bucket, tuple(readings), sums, frozenset(united), everywhere)


def total_sums(files: Iterable[tuple[str, StagedFile]], ranges: int) -> dict[str, Sums]:
    """The sums of every node's files, by host id."""
    totals: dict[str, Sums] = {}
    for node, file in files:
        total = totals.setdefault(node, np.zeros((ranges, 3), np.uint64))
        if file.sums:
            sums = np.array(file.sums, np.uint64)
            total[sums[:, 0].astype(np.intp)] += sums[:, 1:]
    return totals


def agreement(totals: Mapping[str, Sums], ring: RankedRing) -> tuple[Mask, Sums, list[str | None]]:
    """Whether all live replicas of each range have the same rows; the sums and the host id of its primary."""
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
    """Where no node has other rows than the primary: not even one that is down by now, or has left."""
    same = np.ones(len(reference), np.bool_)
    for total in totals.values():
        same &= (total[:, 0] == 0) | (total == reference).all(axis=1)
    return same


def _of_primaries(
    files: Mapping[str, tuple[str, StagedFile]],
    ring: RankedRing,
    fresh: Mask,
    reference: Sums,
    primary: Sequence[str | None],
) -> list[tuple[int, Reading]]:
    own: dict[int, list[tuple[str, str]]] = {number: [] for number in np.flatnonzero(fresh).tolist()}
    for key, (node, file) in files.items():
        for number, *_ in file.sums:
            if number in own and primary[number] == node:
                own[number].append((key, node))
    return [
        (number, Reading(tuple(found), ring.ranges[number].unwrap(), int(reference[number, 0])))
        for number, found in own.items()
    ]


def _of_all(
    files: Mapping[str, tuple[str, StagedFile]], ring: RankedRing, wanted: Mask, comparable: bool
) -> list[tuple[int, Reading]]:
    if not comparable:
        everything = tuple((key, node) for key, (node, _) in files.items())
        return [
            (0, Reading(everything, WHOLE_RING.unwrap(), sum(file.rows for _, file in files.values()), united=True))
        ]
    there: dict[int, list[tuple[str, str, int]]] = {number: [] for number in np.flatnonzero(wanted).tolist()}
    for key, (node, file) in files.items():
        for number, rows, *_ in file.sums:
            if number in there:
                there[number].append((key, node, rows))
    return [
        (
            number,
            Reading(
                tuple((key, node) for key, node, _ in found),
                ring.ranges[number].unwrap(),
                sum(rows for *_, rows in found),
                united=True,
            ),
        )
        for number, found in there.items()
        if found
    ]
