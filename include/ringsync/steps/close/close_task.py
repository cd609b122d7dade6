"""What a Spark task of ``bucket_close`` does: read settled rows, drop what was published, make messages of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.ledger.passes import (
    LATE,
    among,
    are_published,
    digest_halves,
    first_of_each,
    read_digests,
    sorted_digests,
)
from ringsync.ledger.staging import STAGED_ROWS, Bucket, Place, encode_rows, late_key, read_block
from ringsync.steps.close.agreement import Reading
from ringsync.steps.passes.make import Outputs, PassContext, make_outputs, own_name
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of

_FETCHERS = ThreadPoolExecutor(8)
"""Hours of digests are many small objects: an object store answers many requests at once."""


@dataclass(frozen=True)
class SliceOfBucket:
    """What a task reads of one bucket.

    :ivar bucket: name of the bucket
    :ivar published: keys of the digests among which those of its rows may be
    """

    bucket: str
    readings: tuple[Reading, ...]
    published: tuple[str, ...]


Slice = tuple[str, tuple[SliceOfBucket, ...]]
"""Its name, unique in the pass, and what it has of each bucket."""


@dataclass(frozen=True)
class SliceResult:
    """What has come of a slice.

    :ivar outputs: None: everything was published before
    :ivar only_one: rows that one node had and other replicas that were read had not
    :ivar open: rows that are late now: what they have come to is not known while replicas are down
    """

    outputs: Outputs | None
    read: int
    repeated: int
    published_before: int
    only_one: int
    open: int = 0


@dataclass(frozen=True)
class CloseTask:
    """Spark calls it with the slices of one partition.

    :ivar by_arrival: rows belong to the bucket of their arrival
    """

    context: PassContext
    by_arrival: bool

    def __call__(self, slices: Iterable[Slice]) -> Iterator[SliceResult]:
        store = store_of(self.context.reader.config)
        files = StagedFiles(store, self.context.reader.version)
        for name, buckets in slices:
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
    for one in buckets:
        found = [files.rows_of(reading) for reading in one.readings]
        only_one += sum(_held_once(rows) for rows, of in zip(found, one.readings, strict=True) if of.united)
        rows = pa.concat_batches(found)
        halves = digest_halves(rows["digest"])
        first = first_of_each(halves)
        published = _FETCHERS.map(partial(read_digests, store), one.published)
        known = are_published(halves, published) | among(halves, seen)
        read += len(first)
        repeated += int(np.count_nonzero(~first))
        before += int(np.count_nonzero(first & known))
        if (first & ~known).any():
            new = _chosen(rows, first & ~known)
            own = _is_of_time(new, Bucket.parse(one.bucket)) & (not by_arrival)
            for place, chosen in ((one.bucket, own), (LATE, ~own)):
                if chosen.any():
                    fresh[place].append(_chosen(new, chosen))
            seen = sorted_digests(np.concatenate([seen, halves[first & ~known]]))
    by_place = {place: pa.concat_batches(batches) for place, batches in fresh.items()}
    levels = {reading.level for one in buckets for reading in one.readings}
    one_is_enough = context.reader.one_is_enough and levels == {"LOCAL_ONE"}
    reader = replace(context.reader, disagreed="ALL" in levels, one_is_enough=one_is_enough)
    context = replace(context, reader=reader)
    if not by_place:
        return SliceResult(None, read, repeated, before, only_one)
    made = make_outputs(context, store, by_place, name)
    if made.open.num_rows:
        # Whoever repeats the pass repeats this: then its digests tell which of them were published after all. No task
        # replaces another's file: where all rows wait there is no pass, and the next try has its number.
        key = late_key(context.reader.table.table_id, f"pass-{context.number:012}-{own_name(context, name)}")
        store.put(key, encode_rows(context.reader.version.to_store(made.open)))
    return SliceResult(made.outputs, read, repeated, before, only_one, made.open.num_rows)


def forget_waiting(store: ObjectStore, context: PassContext) -> None:
    """Forget a try that has failed: its rows are still staged, also those that were to wait."""
    names = f"pass-{context.number:012}-{context.attempt}-"
    for stat in store.list(late_key(context.reader.table.table_id, names).removesuffix(".arrow")):
        store.delete(stat.key)


def _chosen(rows: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    """Return those that the mask names; mostly all, which need no copying."""
    return rows if mask.all() else rows.filter(pa.array(mask))


def _is_of_time(rows: pa.RecordBatch, bucket: Bucket) -> Mask:
    written = integers(rows["write_time"]) // 1000
    return (written >= bucket.start) & (written < bucket.end)


class StagedFiles:
    """Staged blocks, each decoded once: all slices of a task have rows in most of them.

    :param version: version of the table; rows are handed out with its places of columns
    """

    def __init__(self, store: ObjectStore, version: TableVersion) -> None:
        self._store = store
        self._version = version
        self._read: dict[Place, tuple[pa.RecordBatch, Integers]] = {}

    def rows_of(self, reading: Reading) -> pa.RecordBatch:
        """Return the rows of some token ranges; the blocks are sorted by token.

        :raises UnresolvedRowsError: rows follow a version of the table that this one does not know
        """
        found = [_NOTHING]
        for place, _ in reading.files:
            rows, tokens = self._block(place)
            for token_range in reading.ranges:
                start, end = np.searchsorted(tokens, [token_range.start, token_range.end], side="right").tolist()
                if end > start:
                    found.append(rows.slice(start, end - start))
        return pa.concat_batches(found)

    def _block(self, place: Place) -> tuple[pa.RecordBatch, Integers]:
        if place not in self._read:
            try:
                rows = self._version.from_store(read_block(self._store, place))
            except UnresolvedRowsError as error:
                raise UnresolvedRowsError(f"{place.key}: {error}") from None
            self._read[place] = rows, integers(rows["token"])
        return self._read[place]


_NOTHING = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in STAGED_ROWS], schema=STAGED_ROWS)


def _held_once(rows: pa.RecordBatch) -> int:
    """Tell how many rows only one node has: each node's own repeats were dropped when they were staged."""
    halves = digest_halves(rows["digest"])
    ordered = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    same = np.zeros(len(ordered) + 1, np.bool_)
    same[1:-1] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return int(np.count_nonzero(~same[:-1] & ~same[1:]))
