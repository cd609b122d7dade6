"""The Spark task of ``bucket_close``, and its slices: settled rows, without those published before, become messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.compiled.arrow import Integers, Mask, filtered, integers
from ringsync.ledger import passes
from ringsync.ledger.staging import OF_PASS, STAGED_ROWS, Bucket, Place, encode_rows, late_key, read_block
from ringsync.ring.tokens import TokenRange
from ringsync.steps.close.agreement import Reading, Settled
from ringsync.steps.passes.make import Outputs, PassContext, make_outputs, own_name
from ringsync.steps.passes.pieces import PIECE_BYTES, pieces
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of

SLICE_ROWS = 50_000
"""About how many rows a slice has: their arrays fit into the processor's caches, or nearly."""
HELD_PIECES = 4
"""Most decoded rows that a task holds, in :data:`PIECE_BYTES`, and a block. If its slices have more, it decodes the
blocks again for the others."""

_FETCHERS = ThreadPoolExecutor(8)
"""Hours of digests are many small objects: an object store answers many requests at once."""


@dataclass(frozen=True)
class SliceOfBucket:
    """The part of a slice in one bucket.

    :ivar published: keys of the files of digests to search for those of its rows
    :ivar elsewhere: keys of those to search, too, for rows that were not written in the bucket's time
    """

    bucket: str
    readings: tuple[Reading, ...]
    published: tuple[str, ...]
    elsewhere: tuple[str, ...]


Slice = tuple[str, tuple[SliceOfBucket, ...]]
"""Name of the slice, unique in the pass, and its parts of the buckets."""


def cut(
    settled: Sequence[Settled],
    published: Mapping[Bucket, tuple[str, ...]],
    elsewhere: Mapping[Bucket, tuple[str, ...]],
) -> list[Slice]:
    """Cut what is settled into slices by token: all rows of a key are in one, and all have about as many rows.

    Ranges whose rows a quorum may not show go to slices of their own: their rows are read from all replicas.

    :param published: keys of the files of digests to search for those of the rows, by bucket
    :param elsewhere: keys of those to search, too, for rows that were not written in the bucket's time, by bucket
    """
    rows: Counter[int] = Counter()
    for part in settled:
        for number, reading in part.readings:
            rows[number] += reading.rows
    of_all = {number for part in settled for number, reading in part.readings if reading.level == "ALL"}
    groups = group_ranges({number: rows[number] for number in rows.keys() - of_all}, SLICE_ROWS)
    groups += group_ranges({number: rows[number] for number in of_all}, SLICE_ROWS)
    slices: list[tuple[SliceOfBucket, ...]] = []
    for group in groups:
        pieces = -(-sum(rows[number] for number in group) // SLICE_ROWS)
        for piece in range(pieces):
            buckets = ((part, _of_group(part, group, piece, pieces)) for part in settled)
            slices.append(
                tuple(
                    SliceOfBucket(str(part.bucket), some, published[part.bucket], elsewhere[part.bucket])
                    for part, some in buckets
                    if some
                )
            )
    return [(f"{place:04}", buckets) for place, buckets in enumerate(slices) if buckets]


def _of_group(settled: Settled, group: frozenset[int], piece: int, pieces: int) -> tuple[Reading, ...]:
    return tuple(_piece_of(reading, piece, pieces) for number, reading in settled.readings if number in group)


def _piece_of(reading: Reading, piece: int, pieces: int) -> Reading:
    """Cut a piece of each of the token ranges: tokens are hashes, so equal widths have about as many rows."""
    return replace(reading, ranges=tuple(part for whole in reading.ranges for part in whole.split(pieces)[piece:][:1]))


def group_ranges(rows: Mapping[int, int], size: int) -> list[frozenset[int]]:
    """Group neighbouring token ranges that have at most ``size`` rows together, or are alone."""
    groups: list[frozenset[int]] = []
    present: set[int] = set()
    total = 0
    for number in sorted(rows):
        if present and total + rows[number] > size:
            groups.append(frozenset(present))
            present, total = set(), 0
        present.add(number)
        total += rows[number]
    return [*groups, frozenset(present)] if present else groups


@dataclass(frozen=True)
class SliceResult:
    """The result of a slice.

    :ivar outputs: of its pieces; none: everything was published before
    :ivar only_one: rows that only one node had, of those that were read
    :ivar open: rows that have become late rows: their present state cannot be known while replicas are down
    """

    outputs: tuple[Outputs, ...]
    read: int
    repeated: int
    published_before: int
    only_one: int
    open: int = 0


@dataclass(frozen=True)
class CloseTask:
    """Makes the outputs of the slices that Spark gives to one task.

    :ivar by_arrival: rows belong to the bucket of their arrival
    """

    context: PassContext
    by_arrival: bool

    def __call__(self, slices: Iterable[Slice]) -> Iterator[SliceResult]:
        store = store_of(self.context.reader.config)
        left = list(slices)
        while left:
            files = StagedFiles(store, self.context.reader.version)
            held, left = files.hold(left)
            for name, whole in held:
                for buckets in files.cut(whole):
                    yield close_slice(self.context, store, files, name, buckets, self.by_arrival)


def close_slice(
    context: PassContext,
    store: ObjectStore,
    files: StagedFiles,
    name: str,
    buckets: Sequence[SliceOfBucket],
    by_arrival: bool,
) -> SliceResult:
    """Make the outputs of some token ranges of a table."""
    fresh: dict[str, list[pa.RecordBatch]] = defaultdict(list)
    seen = np.empty((0, 2), np.uint64)
    read = repeated = before = only_one = 0
    for part in buckets:
        batches = [files.rows_of(reading) for reading in part.readings]
        only_one += sum(_held_once(rows) for rows, of in zip(batches, part.readings, strict=True) if of.united)
        if not len(rows := pa.concat_batches(batches)):
            continue
        halves = passes.digest_halves(rows["digest"])
        first = passes.first_of_each(halves)
        bucket, written = Bucket.parse(part.bucket), integers(rows["write_time"]) // 1000
        of_its_time = (written >= bucket.start) & (written < bucket.end)
        known = passes.are_published(halves, _read(store, part.published)) | passes.among(halves, seen)
        strays = ~of_its_time & ~known
        if strays.any():
            known[strays] = passes.are_published(halves[strays], _read(store, part.elsewhere))
        read += len(first)
        repeated += int(np.count_nonzero(~first))
        before += int(np.count_nonzero(first & known))
        if (first & ~known).any():
            in_time = of_its_time & (not by_arrival)
            for place, chosen in ((part.bucket, in_time), (passes.LATE, ~in_time)):
                if (new := first & ~known & chosen).any():
                    fresh[place].append(filtered(rows, new))
            seen = passes.sorted_digests(np.concatenate([seen, halves[first & ~known]]))
    if not fresh:
        return SliceResult((), read, repeated, before, only_one)
    levels = {reading.level for part in buckets for reading in part.readings}
    one_is_enough = context.reader.one_is_enough and levels == {"LOCAL_ONE"}
    disagreed = context.reader.disagreed or "ALL" in levels
    reader = replace(context.reader, disagreed=disagreed, one_is_enough=one_is_enough)
    context = replace(context, reader=reader)
    by_place = {place: pa.concat_batches(batches) for place, batches in fresh.items()}
    some = pieces(by_place, reader.table, reader.read_whole)
    made = [make_outputs(context, store, piece, name) for piece in some]
    left_open = pa.concat_batches([piece.open for piece in made])
    if left_open.num_rows:
        # A repeated pass writes these rows again: then its digests show which of them were published after all. Each
        # try has file names of its own: if all rows wait there is no pass, and the next try has the same number.
        key = late_key(context.reader.table.table_id, f"{OF_PASS}{context.number:012}-{own_name(context, name)}")
        store.put(key, encode_rows(context.reader.version.to_store(left_open)))
    outputs = tuple(piece.outputs for piece in made if piece.outputs)
    return SliceResult(outputs, read, repeated, before, only_one, left_open.num_rows)


def forget_waiting(store: ObjectStore, context: PassContext) -> None:
    """Remove the late rows that a failed try has written: all of its rows are still staged."""
    names = f"{OF_PASS}{context.number:012}-{context.attempt}-"
    for stat in store.list(late_key(context.reader.table.table_id, names).removesuffix(".arrow")):
        store.delete(stat.key)


def _read(store: ObjectStore, keys: Sequence[str]) -> Iterator[passes.Digests]:
    return _FETCHERS.map(partial(passes.read_digests, store), keys)


class StagedFiles:
    """Staged blocks, each decoded once: all slices of a task have rows in most of them.

    :param version: version of the table whose places of columns the rows have
    """

    def __init__(self, store: ObjectStore, version: TableVersion) -> None:
        self._store = store
        self._version = version
        self._read: dict[Place, tuple[pa.RecordBatch, Integers]] = {}

    def hold(self, slices: Sequence[Slice]) -> tuple[list[Slice], list[Slice]]:
        """Decode the blocks of slices, and keep the rows of as many slices as :data:`HELD_PIECES` permits.

        :returns: the slices whose rows are kept, and the others. A slice that is too large alone is cut by token
        :raises UnresolvedRowsError: rows follow a version of the table that this one does not know
        """
        held, others, size = list(slices), list[Slice](), 0
        wanted = _ranges_by_place(held)
        for place in [*wanted]:
            if place not in wanted:
                continue
            self._read[place] = _within(*self._block(place), wanted[place])
            size += self._read[place][0].nbytes
            while size > HELD_PIECES * PIECE_BYTES and (halves := _halves(held)):
                # The half with more rows is kept: soon it fits, or it is a single token.
                held, rest = sorted(halves, key=self._count, reverse=True)
                others, wanted = [*rest, *others], _ranges_by_place(held)
                self._read = {at: _within(*block, wanted[at]) for at, block in self._read.items() if at in wanted}
                size = sum(rows.nbytes for rows, _ in self._read.values())
        return held, others

    def _count(self, slices: Sequence[Slice]) -> int:
        """Count the rows of slices that are decoded."""
        wanted = _ranges_by_place(slices)
        blocks = ((place, tokens) for place, (_, tokens) in self._read.items() if place in wanted)
        return sum(int(np.count_nonzero(_in_ranges(tokens, wanted[place]))) for place, tokens in blocks)

    def rows_of(self, reading: Reading) -> pa.RecordBatch:
        """Return the rows of some token ranges; the blocks are sorted by token.

        :raises UnresolvedRowsError: rows follow a version of the table that this one does not know
        """
        return pa.concat_batches([_NOTHING, *self._rows_of(reading)])

    def cut(self, buckets: Sequence[SliceOfBucket]) -> Iterator[tuple[SliceOfBucket, ...]]:
        """Cut a slice by token, so that its parts have about :data:`PIECE_BYTES`: the cut by rows knows no bytes.

        :raises UnresolvedRowsError: rows follow a version of the table that this one does not know
        """
        size = sum(rows.nbytes for part in buckets for reading in part.readings for rows in self._rows_of(reading))
        yield from _cut(buckets, max(1, -(-size // PIECE_BYTES)))

    def _rows_of(self, reading: Reading) -> Iterator[pa.RecordBatch]:
        for place, _ in reading.files if reading.ranges else ():
            rows, tokens = self._block(place)
            for token_range in reading.ranges:
                start, end = np.searchsorted(tokens, [token_range.start, token_range.end], side="right").tolist()
                if end > start:
                    yield rows.slice(start, end - start)

    def _block(self, place: Place) -> tuple[pa.RecordBatch, Integers]:
        if place not in self._read:
            try:
                rows = self._version.from_store(read_block(self._store, place))
            except UnresolvedRowsError as error:
                raise UnresolvedRowsError(f"{place.key}: {error}") from None
            self._read[place] = rows, integers(rows["token"])
        return self._read[place]


def _cut(buckets: Sequence[SliceOfBucket], pieces: int) -> Iterator[tuple[SliceOfBucket, ...]]:
    for piece in range(pieces):
        yield tuple(
            replace(part, readings=tuple(_piece_of(reading, piece, pieces) for reading in part.readings))
            for part in buckets
        )


def _ranges_by_place(slices: Iterable[Slice]) -> dict[Place, list[TokenRange]]:
    ranges: dict[Place, list[TokenRange]] = defaultdict(list)
    for reading in (reading for _, buckets in slices for part in buckets for reading in part.readings):
        for place, _ in reading.files if reading.ranges else ():
            ranges[place] += reading.ranges
    return ranges


def _halves(slices: Sequence[Slice]) -> tuple[list[Slice], list[Slice]] | None:
    """Halve slices, or a single one by token; None: it is a single token."""
    if len(slices) > 1:
        return list(slices[: len(slices) // 2]), list(slices[len(slices) // 2 :])
    ((name, buckets),) = slices
    if all(part.width == 1 for bucket in buckets for reading in bucket.readings for part in reading.ranges):
        return None
    first, second = _cut(buckets, 2)
    return [(name, first)], [(name, second)]


def _within(rows: pa.RecordBatch, tokens: Integers, ranges: Sequence[TokenRange]) -> tuple[pa.RecordBatch, Integers]:
    """Keep the rows of token ranges, as a copy: a slice of an array holds all of it."""
    wanted = _in_ranges(tokens, ranges)
    return (rows, tokens) if wanted.all() else (rows.filter(pa.array(wanted)), tokens[wanted])


def _in_ranges(tokens: Integers, ranges: Sequence[TokenRange]) -> Mask:
    """Tell which of sorted tokens are in any of the ranges."""
    starts, ends = (
        np.bincount(np.searchsorted(tokens, bounds, side="right"), minlength=len(tokens) + 1)
        for bounds in ([part.start for part in ranges], [part.end for part in ranges])
    )
    return np.cumsum(starts - ends)[:-1] > 0


_NOTHING = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in STAGED_ROWS], schema=STAGED_ROWS)


def _held_once(rows: pa.RecordBatch) -> int:
    """Count the rows that only one node has: each node's own repeats were dropped when they were staged."""
    return int(np.count_nonzero(integers(rows["digest"].value_counts().field("counts")) == 1))
