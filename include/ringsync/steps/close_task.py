"""What a Spark task of ``bucket_close`` does: read settled rows, drop what was published, make messages of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.changes.cells import Numbers, numbers
from ringsync.config import load_config
from ringsync.state.staging import STAGED_ROWS, decode_rows
from ringsync.steps.agreement import Reading
from ringsync.steps.passes import Outputs, PassContext, make_outputs
from ringsync.storage.port import ObjectStore
from ringsync.streams.pass_log import among, digest_halves, first_of_each, read_digests, sorted_digests


@dataclass(frozen=True)
class SliceOfBucket:
    """What a task reads of one bucket.

    :ivar bucket: its name
    :ivar published: keys of the digests of what was published of it, and of other buckets where rows are displaced
    """

    bucket: str
    readings: tuple[Reading, ...]
    published: tuple[str, ...]


@dataclass(frozen=True)
class SliceResult:
    """What has come of a slice.

    :ivar outputs: None: everything was published before
    :ivar distinct: by bucket the different rows that were read
    :ivar only_one: rows that one node had and other replicas that were read had not
    """

    outputs: Outputs | None
    distinct: Mapping[str, int]
    read: int
    repeated: int
    published_before: int
    only_one: int


@dataclass(frozen=True)
class CloseTask:
    """Spark calls it with the slices of one partition: (name, buckets), the name unique in the pass."""

    context: PassContext

    def __call__(self, slices: Iterable[tuple[str, tuple[SliceOfBucket, ...]]]) -> Iterator[SliceResult]:
        config = load_config(self.context.config_path)
        store = config.open_store()
        for name, buckets in slices:
            yield close_slice(self.context, store, name, buckets)


def close_slice(context: PassContext, store: ObjectStore, name: str, buckets: Sequence[SliceOfBucket]) -> SliceResult:
    """Make the outputs of some token ranges of a table."""
    fresh: dict[str, pa.RecordBatch] = {}
    seen = np.empty((0, 2), np.uint64)
    read = repeated = before = only_one = 0
    distinct: dict[str, int] = {}
    files = _Files(store)
    for one in buckets:
        found = [files.rows_of(reading) for reading in one.readings]
        only_one += sum(_held_once(rows) for rows, of in zip(found, one.readings, strict=True) if of.united)
        rows = pa.concat_batches(found)
        halves = digest_halves(rows["digest"])
        first = first_of_each(halves)
        known = among(halves, read_digests(store, one.published)) | among(halves, seen)
        read += len(first)
        repeated += int(np.count_nonzero(~first))
        before += int(np.count_nonzero(first & known))
        distinct[one.bucket] = int(np.count_nonzero(first))
        if (first & ~known).any():
            fresh[one.bucket] = rows.filter(pa.array(first & ~known))
            seen = sorted_digests(np.concatenate([seen, halves[first & ~known]]))
    outputs = make_outputs(context, store, fresh, name) if fresh else None
    return SliceResult(outputs, distinct, read, repeated, before, only_one)


class _Files:
    """Staged files, each decoded once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._read: dict[str, tuple[pa.RecordBatch, Numbers]] = {}

    def rows_of(self, reading: Reading) -> pa.RecordBatch:
        """The rows of some token ranges; the files are sorted by token."""
        found = [_NOTHING]
        for key, _ in reading.files:
            rows, tokens = self._file(key)
            for token_range in reading.ranges:
                start, end = np.searchsorted(tokens, [token_range.start, token_range.end], side="right").tolist()
                if end > start:
                    found.append(rows.slice(start, end - start))
        return pa.concat_batches(found)

    def _file(self, key: str) -> tuple[pa.RecordBatch, Numbers]:
        if key not in self._read:
            rows = decode_rows(self._store.get(key))
            self._read[key] = rows, numbers(rows["token"])
        return self._read[key]


_NOTHING = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in STAGED_ROWS], schema=STAGED_ROWS)


def _held_once(rows: pa.RecordBatch) -> int:
    """How many rows only one node has: each node's own repeats were dropped when they were staged."""
    halves = digest_halves(rows["digest"])
    ordered = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    same = np.zeros(len(ordered) + 1, np.bool_)
    same[1:-1] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return int(np.count_nonzero(~same[:-1] & ~same[1:]))
