"""The record of what was published of a table: its passes, numbered from 1, as objects that are put once.

==================================================  ========================================================
``sync/<table id>/passes/<number>.json``            a pass: its messages, merged change rows, digests, counts
``sync/<table id>/changes/<number>-<part>.arrow``   the merged change rows behind its messages
``sync/<table id>/deletions/<number>-<part>.arrow`` the change rows among them that delete partitions and ranges
``sync/<table id>/published/<bucket>/<number>``     the digests of the change rows that it published; `late` instead of
                                                    a bucket: digests of rows outside the time of their bucket
==================================================  ========================================================

A pass exists once its object does: of several processes that make the same number exactly one succeeds. The maker of a
pass knows all passes before it, so that nothing is published twice; a process that was too late starts again. The
pass's folder in the stream and its images in the replica are made from the object, and making them may be repeated.

``begin`` and ``cutover`` enclose a bootstrap and publish nothing themselves. Passes between them go to the bootstrap
stream, passes after the cut-over to the table's own stream; so switching takes one conditional write. ``rows`` holds
the rows that the bootstrap copied. It is made at the end, but its place in the stream is that of ``begin``: after all
passes published before, and before all that wait.

``end`` is the last pass of a table that was dropped and created again: no pass follows it, and passes that waited for a
bootstrap wait no longer. ``start`` is the first pass of the new table (:mod:`ringsync.ledger.topic_owners`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.ledger.staging import closed_until
from ringsync.ring.ring import Epoch
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore
from ringsync.streams.files import FileStream, Part, StreamError

MarkKind = Literal["begin", "rows", "cutover"]
PassKind = Literal["changes", "start", "end"] | MarkKind
Digests = npt.NDArray[np.uint64]
"""uint64[rows, 2]: the halves of 16-byte digests as they lie in memory."""

LATE = "late"
"""Stands in place of a bucket for digests of rows that came long after their bucket had closed, that were written in
the future, or that belong to the bucket of their arrival. Copies of these rows may be in any bucket."""

_NUMBER = re.compile(r"/(\d{12})\.json$")


class TableReplacedError(StreamError):
    """A newer table of the same name has the table's stream, and the stream never returns to the old table.

    Usually the table was dropped, and its waiting rows are removed once the schema lacks it. But it may exist again
    with its old id: then consumers could not distinguish its messages from repetitions of the old ones.

    :param table_id: 32 hexadecimal digits
    """

    def __init__(self, table_id: str) -> None:
        super().__init__(
            f"table id {table_id} was dropped, and a newer table of the same name has its stream. If the table has "
            "this id now (a snapshot's schema.cql says WITH ID, or a node's clock was behind), its changes wait and "
            "are not published: drop it, create it again without an id, and bootstrap it"
        )


class BootstrapReplacedError(StreamError):
    """The bootstrap cannot continue: another one has begun since, or it was cancelled."""


@dataclass(frozen=True)
class Pass:
    """One pass over the settled rows of a table.

    :ivar number: number from 1; if another table had the topic before, from the number of its ``end`` or last folder
    :ivar kind: kind of the pass; ``changes`` has messages and rows, ``rows`` has messages, the others have neither
    :ivar bootstrap: id of the bootstrap that the pass belongs to, whose topic gets the messages first; empty: none
    :ivar begin: for ``rows`` the number of the bootstrap's ``begin``, whose place in the stream they take
    :ivar parts: parts of the pass's folder in the stream
    :ivar deletions: keys of files with the pass's deletions of partitions and ranges; older rows may still come
    :ivar deleted_until_us: greatest timestamp of these deletions, µs; None: there are none, or it is not known
    :ivar digests: keys of the digests of the published rows, by bucket (or :data:`LATE`)
    :ivar lag_ms: time from write to message of its changes, the median, ms; 0: unknown
    :ivar epoch: the replicas when the pass was made; for ``rows`` its ring is that of the whole copy, empty if that has
        changed. None: the pass is a mark
    """

    number: int
    kind: PassKind
    table_id: str
    created_at_ms: int
    bootstrap: str = ""
    begin: int = 0
    late: bool = False
    parts: tuple[Part, ...] = ()
    changes: tuple[str, ...] = ()
    deletions: tuple[str, ...] = ()
    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    deleted_until_us: int | None = None
    epoch: Epoch | None = None
    lag_ms: int = 0

    @property
    def folder(self) -> str:
        """Name of the pass's folder in the stream."""
        return pass_folder(self.begin or self.number)

    def is_of_open_bucket(self, store: ObjectStore) -> bool:
        """Tell whether rows of a bucket that is not closed may be in the pass: they are known by its digests. They were
        written before it was made, and those that come by arrival had come then."""
        return bool(self.digests) and self.created_at_ms > closed_until(store)

    def is_everywhere(self, epoch: Epoch) -> bool:
        """Tell whether all replicas have the rows, so that every read sees them.

        All had them when they were published. But a node that has joined since may lack them: Cassandra acknowledges
        what a joining node has dropped, and sends it a hint.
        """
        return self._was_everywhere and (self.epoch == epoch or not self.counts.get("rows"))

    def is_seen_in(self, ring: str) -> bool:
        """Tell whether a copy of the table has the rows for sure.

        :param ring: digest of the ring snapshot of the whole copy; empty: it has changed meanwhile
        """
        has_same = self.epoch is not None and self.epoch.ring == ring
        return self._was_everywhere and (has_same or not self.counts.get("rows"))

    def has_other_replication(self, epoch: Epoch) -> bool:
        """Tell whether the keyspace's replication is another one by now: most replicas may be new, and have nothing."""
        return self.kind == "changes" and self.epoch is not None and self.epoch.replication != epoch.replication

    @property
    def _was_everywhere(self) -> bool:
        return bool(self.counts.get("everywhere"))


def pass_folder(number: int) -> str:
    """Name a pass's folder in the stream. Names sort by number."""
    return f"pass-{number:012}"


def put_pass(store: ObjectStore, made: Pass) -> bool:
    """Commit a pass.

    :returns: False: another pass has or had this number; after hours of sleep, a process may use a number whose pass
        was forgotten since
    :raises TableReplacedError: the table has ended: nothing more may be published
    """
    if not _follows(store, made):
        is_there = store.stat(_key(made.table_id, made.number)) is not None
        return is_there and get_pass(store, made.table_id, made.number) == made
    try:
        store.put(_key(made.table_id, made.number), json.dumps(asdict(made)).encode(), if_absent=True)
    except AlreadyExistsError:
        return get_pass(store, made.table_id, made.number) == made
    return True


def check_goes_on(last: Pass | None) -> None:
    """Check that passes may follow the last one of a table.

    :raises TableReplacedError: the last pass is the table's end
    """
    if last is not None and last.kind == "end":
        raise TableReplacedError(last.table_id)


def _follows(store: ObjectStore, made: Pass) -> bool:
    """Tell whether the pass before exists, or this is the table's first and there is none yet."""
    if made.number == 1 or made.kind == "start":
        return not pass_numbers(store, made.table_id)
    try:
        check_goes_on(get_pass(store, made.table_id, made.number - 1))
    except NotFoundError:
        return False
    return True


def get_pass(store: ObjectStore, table_id: str, number: int) -> Pass:
    """Read a pass."""
    document = json.loads(store.get(_key(table_id, number)))
    if epoch := document.get("epoch"):
        document["epoch"] = Epoch(**{**epoch, "datacenters": tuple(epoch["datacenters"])})
    return Pass(
        **{
            # A later version may have written more.
            **{one.name: document[one.name] for one in fields(Pass) if one.name in document},
            "parts": tuple(Part(**part) for part in document["parts"]),
            "changes": tuple(document["changes"]),
            "deletions": tuple(document["deletions"]),
            "digests": {bucket: tuple(keys) for bucket, keys in document["digests"].items()},
        }
    )


def passes_behind(store: ObjectStore, table_id: str, number: int) -> list[Pass]:
    """Read the passes after this one, in order. The cost does not depend on the passes before them."""
    passes: list[Pass] = []
    while store.stat(_key(table_id, number + 1)):
        passes.append(get_pass(store, table_id, number + 1))
        number += 1
    return passes


def pass_numbers(store: ObjectStore, table_id: str) -> list[int]:
    """List the numbers of a table's passes that have not been forgotten, ascending."""
    keys = (stat.key for stat in store.list(f"sync/{table_id}/passes/"))
    return sorted(int(match[1]) for key in keys if (match := _NUMBER.search(key)))


def _key(table_id: str, number: int) -> str:
    return f"sync/{table_id}/passes/{number:012}.json"


def changes_key(table_id: str, number: int, name: str) -> str:
    """Return the key of a file of a pass's merged change rows."""
    return f"sync/{table_id}/changes/{number:012}-{name}.arrow"


def deletions_key(table_id: str, number: int, name: str) -> str:
    """Return the key of a file of a pass's deletions of partitions and ranges."""
    return f"sync/{table_id}/deletions/{number:012}-{name}.arrow"


def digests_key(table_id: str, bucket: str, number: int, name: str) -> str:
    """Return the key of a file of digests that a pass has published."""
    return f"sync/{table_id}/published/{bucket}/{number:012}-{name}.digests"


def digest_keys(passes: Iterable[Pass], buckets: Collection[str], late_since_ms: float) -> tuple[str, ...]:
    """List the keys of the digests that passes have published in some buckets, and of :data:`LATE` rows.

    :param late_since_ms: time since which :data:`LATE` rows were published, ms since the epoch; older ones are left out
    """
    return tuple(
        key
        for made in passes
        for place, keys in made.digests.items()
        if (made.created_at_ms >= late_since_ms if place == LATE else place in buckets)
        for key in keys
    )


def encode_digests(digests: pa.Array) -> bytes:
    """Encode the digests of change rows, binary(16), as the bytes of a file: sorted, each once."""
    return bytes(sorted_digests(digest_halves(digests)).tobytes())


def read_digests(store: ObjectStore, key: str) -> Digests:
    """Read the sorted digests of a file."""
    return np.frombuffer(store.get(key), np.uint64).reshape(-1, 2)


def are_published(halves: Digests, published: Iterable[Digests]) -> npt.NDArray[np.bool_]:
    """Tell which digests are in one of the files (each sorted)."""
    order = np.argsort(halves[:, 0])  # an ordered search finds the next place in the processor's caches
    ordered = halves[order]
    is_published = np.zeros(len(halves), np.bool_)
    for digests in published:
        is_published[order] |= among(ordered, digests)
    return is_published


def digest_halves(digests: pa.Array) -> Digests:
    """View an array of binary(16) as numbers, in its order."""
    halves = np.frombuffer(digests.buffers()[1], np.uint64) if len(digests) else np.empty(0, np.uint64)
    return halves.reshape(-1, 2)[digests.offset : digests.offset + len(digests)]


def sorted_digests(halves: Digests) -> Digests:
    """Sort digests by both halves, and keep each once."""
    ordered = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    again = np.zeros(len(ordered), np.bool_)
    again[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return ordered[~again]


def first_of_each(halves: Digests) -> npt.NDArray[np.bool_]:
    """Mark where each digest occurs for the first time."""
    order = np.lexsort((np.arange(len(halves)), halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    first = np.ones(len(halves), np.bool_)
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def among(halves: Digests, published: Digests) -> npt.NDArray[np.bool_]:
    """Tell which digests are among the published ones (sorted)."""
    keys, first = (np.ascontiguousarray(digests[:, 0]) for digests in (halves, published))
    step = np.searchsorted(first, keys)
    is_published = np.zeros(len(halves), np.bool_)
    # First halves are practically unique; only for equal ones the second halves are compared.
    left = np.flatnonzero(step < len(first))
    while len(left := left[first[step[left]] == keys[left]]):
        is_published[left] = published[step[left], 1] == halves[left, 1]
        step[left] += 1
        left = left[~is_published[left] & (step[left] < len(first))]
    return is_published


def mark(
    store: ObjectStore,
    table_id: str,
    kind: MarkKind,
    bootstrap: str,
    now_ms: int,
    parts: tuple[Part, ...] = (),
    check: Callable[[], None] | None = None,
    topic: str = "",
    ring: str | None = None,
) -> int:
    """Add the mark that begins a bootstrap, publishes its rows, or ends it. Repeating it is safe.

    Later passes go to another stream after a begin or cut-over. A cut-over without rows ends an unfinished bootstrap.

    :param check: function that raises if the mark is not allowed. It is called after the last pass was read: if another
        process then adds a pass, it is called again. None: a cut-over checks that no other bootstrap has begun. Rows
        are always checked by :func:`check_rows`
    :param topic: topic that holds the parts
    :param ring: for rows the digest of the ring snapshot of the whole copy; empty: it has changed meanwhile
    :returns: number of the mark's pass
    :raises BootstrapReplacedError: the rows or the cut-over belong to a bootstrap that cannot continue
    :raises StreamDamagedError: a part is missing in the rows' folder
    :raises TableReplacedError: the table has ended: nothing more may be published
    """
    while True:
        numbers = pass_numbers(store, table_id)
        marks = marks_of_latest(store, table_id, numbers, through_changes=kind != "begin")
        for made in marks:
            if (made.kind, made.bootstrap) == (kind, bootstrap):
                return made.number
        begin = next((made for made in marks if made.kind == "begin"), None)
        if kind == "rows":
            check_rows(store, table_id, bootstrap, parts, topic)
        elif check:
            check()
        elif kind == "cutover":
            _check_not_replaced(bootstrap, begin)
        place = begin.number if begin and kind == "rows" else 0
        number = (numbers[-1] if numbers else 0) + 1
        epoch = None if ring is None else Epoch(ring)
        if put_pass(store, Pass(number, kind, table_id, now_ms, bootstrap, place, parts=parts, epoch=epoch)):
            return number


def check_rows(store: ObjectStore, table_id: str, bootstrap: str, parts: Sequence[Part], topic: str) -> None:
    """Check that the rows of a bootstrap may be published, or are already.

    A pass that the stream cannot show must not be made: all passes after it would wait.

    :param topic: topic that holds the parts
    :raises BootstrapReplacedError: another bootstrap has begun, or this one was cancelled
    :raises StreamDamagedError: a part in the folder of the bootstrap's begin is missing or has other content
    """
    marks = marks_of_latest(store, table_id, pass_numbers(store, table_id))
    if any((made.kind, made.bootstrap) == ("rows", bootstrap) for made in marks):
        return
    begin = next((made for made in marks if made.kind == "begin"), None)
    _check_not_replaced(bootstrap, begin)
    if begin is None or any(made.kind == "cutover" for made in marks):
        raise BootstrapReplacedError(f"bootstrap {bootstrap} was cancelled: trigger bootstrap_table again")
    if parts:
        FileStream(store, topic).check_parts(begin.folder, parts)


def _check_not_replaced(bootstrap: str, begin: Pass | None) -> None:
    if begin is not None and begin.bootstrap != bootstrap:
        raise BootstrapReplacedError(
            f"bootstrap {bootstrap} was replaced by {begin.bootstrap} of the same table: follow that one"
        )


def marks_of_latest(
    store: ObjectStore, table_id: str, numbers: list[int], *, through_changes: bool = True
) -> list[Pass]:
    """Read the kept marks of a table's latest bootstrap, the newest first.

    :param numbers: numbers of the table's passes, ascending
    :param through_changes: whether to search before changes of the table's own stream, too; else only a bootstrap that
        continues or has just ended is found
    """
    marks: list[Pass] = []
    for number in reversed(numbers):
        made = get_pass(store, table_id, number)
        if made.kind != "changes":
            marks.append(made)
            if made.kind == "begin":
                break
        elif not made.bootstrap and not through_changes:
            break
    return marks


def first_to_add(passes: Mapping[int, Pass], begin: int, reach_ms: float, ring: str) -> int:
    """Find the first pass whose changes the rows of a bootstrap may lack.

    The scan may have missed rows that only some replicas had when they were published. Their later copies count as
    published already.

    :param begin: number of the pass that began the bootstrap
    :param reach_ms: time in which copies of published rows may still come, ms
    :param ring: see :meth:`Pass.is_seen_in`
    """
    since_ms = passes[begin].created_at_ms - reach_ms
    first = begin + 1
    for number in sorted((known for known in passes if known < begin), reverse=True):
        earlier = passes[number]
        if earlier.created_at_ms < since_ms:
            break
        if earlier.kind == "changes" and not earlier.is_seen_in(ring):
            first = number
    return first


def forget_pass(store: ObjectStore, old: Pass) -> None:
    """Remove a pass whose digests and changes are no longer needed. The last pass of a table must stay.

    The pass's object goes first. So a kill leaves unused files, but never a pass without digests, which would stop
    publishing.
    """
    store.delete(_key(old.table_id, old.number))
    digests = (key for keys in old.digests.values() for key in keys)
    # The changes go last: their names lead to the other files of a pass (tries.py).
    for key in (*digests, *old.deletions, *old.changes):
        store.delete(key)
