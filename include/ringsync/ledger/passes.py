"""What has been published of a table: its passes, numbered from 1, as objects that are put once.

==================================================  ========================================================
``sync/<table id>/passes/<number>.json``            a pass: its messages, merged change rows, digests, counts
``sync/<table id>/changes/<number>-<part>.arrow``   the merged change rows that its messages tell of
``sync/<table id>/deletions/<number>-<part>.arrow`` those of them that delete partitions and ranges
``sync/<table id>/published/<bucket>/<number>``     the digests of the change rows that it has published; `late`
                                                    instead of a bucket: of rows that are not of their bucket's time
==================================================  ========================================================

A pass exists once its object does: of many who want to make the same number exactly one succeeds. Who makes one knows
all passes before it, so that nothing is published twice; who was too late begins anew. All that follows — the bucket of
the stream, the replica — is made from what the object says and may be repeated.

``begin`` and ``cutover`` enclose a bootstrap, and publish nothing of their own. What is published between them goes to
the bootstrap stream, and behind the cut-over to the table's own; so the flip is one conditional write. ``rows`` is what
the bootstrap has copied. It is known at the end only, but its place in the stream is that of ``begin``: behind all that
was published before, and before all that waits.

``end`` is the last pass of a table that was dropped and created again: nothing comes behind it, and what has waited for
a bootstrap waits no longer. ``start`` is the first one of the new table (:mod:`ringsync.ledger.topic_owners`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore
from ringsync.streams.files import FileStream, Part, StreamError

MarkKind = Literal["begin", "rows", "cutover"]
PassKind = Literal["changes", "start", "end"] | MarkKind
Digests = npt.NDArray[np.uint64]
"""uint64[rows, 2]: the halves of 16-byte digests as they lie in memory."""

LATE = "late"
"""In the place of a bucket: digests of rows that came long after theirs had closed, that were written in the future, or
that belong to the bucket of their arrival. Their copies may be in any bucket."""

_NUMBER = re.compile(r"/(\d{12})\.json$")


class TableReplacedError(StreamError):
    """A table's stream goes on with another one of the same name, and never comes back to it.

    Mostly it was dropped, and what waits of it goes once the schema does not have it. But it may be there: an id can be
    given again, and a consumer could not tell its messages from repetitions of its old ones.

    :param table_id: 32 hexadecimal digits
    """

    def __init__(self, table_id: str) -> None:
        super().__init__(
            f"table id {table_id} was dropped, and a newer table of the same name has its stream. If the table has "
            "this id now (a snapshot's schema.cql says WITH ID, or a node's clock was behind), its changes wait and "
            "are not published: drop it, create it again without an id, and bootstrap it"
        )


class BootstrapReplacedError(StreamError):
    """A bootstrap is not the one that goes on: another has begun since, or it was cancelled."""


@dataclass(frozen=True)
class Pass:
    """One pass over the settled rows of a table.

    :ivar number: from 1, or where another table had the topic before from that of its ``end`` or its last bucket
    :ivar kind: only ``changes`` have messages and rows, and ``rows`` messages
    :ivar bootstrap: whose topic the messages go to first, and which ``begin`` and ``cutover`` enclose; empty: none
    :ivar begin: of ``rows``: the number of the bootstrap's ``begin``, in whose place of the stream they are
    :ivar late: its rows were late
    :ivar created_at_ms: ms since the epoch
    :ivar parts: of the stream's bucket
    :ivar changes: keys of files of merged change rows
    :ivar deletions: keys of files with its deletions of partitions and ranges: rows that are older may still come
    :ivar deleted_until_us: their greatest timestamp, µs; None: there is none, or a version before did not say it
    :ivar digests: by bucket (or :data:`LATE`) the keys of the digests of what was published
    :ivar counts: of this pass
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

    @property
    def bucket(self) -> str:
        """Of the stream."""
        return pass_bucket(self.begin or self.number)

    @property
    def everywhere(self) -> bool:
        """Whether all replicas had its rows when they were published: whoever reads the table since then sees them."""
        return bool(self.counts.get("everywhere"))


def pass_bucket(number: int) -> str:
    """The stream's bucket of a pass; they sort by number, behind ``bootstrap-…``, which older versions published."""
    return f"pass-{number:012}"


def put_pass(store: ObjectStore, made: Pass) -> bool:
    """Commit a pass.

    :returns: False: there is another of this number, or was one: who slept for hours may come with a number that is
        forgotten by now
    :raises TableReplacedError: nothing is published of this table any more
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
    """Look whether passes may come behind the last one of a table.

    :raises TableReplacedError: they may not
    """
    if last is not None and last.kind == "end":
        raise TableReplacedError(last.table_id)


def _follows(store: ObjectStore, made: Pass) -> bool:
    """Whether the pass before is there, or there is none and this is the first of the table.

    :raises TableReplacedError: nothing is published of this table any more
    """
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
    return Pass(
        **{
            **document,
            "parts": tuple(Part(**part) for part in document["parts"]),
            "changes": tuple(document["changes"]),
            "deletions": tuple(document["deletions"]),
            "digests": {bucket: tuple(keys) for bucket, keys in document["digests"].items()},
        }
    )


def passes_behind(store: ObjectStore, table_id: str, number: int) -> list[Pass]:
    """The passes after this one, in their order; what many passes are before them costs nothing."""
    found: list[Pass] = []
    while store.stat(_key(table_id, number + 1)):
        found.append(get_pass(store, table_id, number + 1))
        number += 1
    return found


def pass_numbers(store: ObjectStore, table_id: str) -> list[int]:
    """The passes of a table that have not been forgotten, rising."""
    keys = (stat.key for stat in store.list(f"sync/{table_id}/passes/"))
    return sorted(int(found[1]) for key in keys if (found := _NUMBER.search(key)))


def _key(table_id: str, number: int) -> str:
    return f"sync/{table_id}/passes/{number:012}.json"


def changes_key(table_id: str, number: int, name: str) -> str:
    """Key of a file of a pass's merged change rows."""
    return f"sync/{table_id}/changes/{number:012}-{name}.arrow"


def deletions_key(table_id: str, number: int, name: str) -> str:
    """Key of a file of a pass's deletions of partitions and ranges."""
    return f"sync/{table_id}/deletions/{number:012}-{name}.arrow"


def digests_key(table_id: str, bucket: str, number: int, name: str) -> str:
    """Key of a file of digests that a pass has published."""
    return f"sync/{table_id}/published/{bucket}/{number:012}-{name}.digests"


def digest_keys(passes: Iterable[Pass], buckets: Collection[str], late_since_ms: float) -> tuple[str, ...]:
    """Keys of the digests of what passes have published in some buckets, and of :data:`LATE` rows.

    :param late_since_ms: of these rows those that were published since then, ms since the epoch
    """
    return tuple(
        key
        for one in passes
        for place, keys in one.digests.items()
        if (one.created_at_ms >= late_since_ms if place == LATE else place in buckets)
        for key in keys
    )


def encode_digests(digests: pa.Array) -> bytes:
    """The digests of change rows as the bytes of a file: sorted, each once.

    :param digests: binary(16)
    """
    return bytes(sorted_digests(digest_halves(digests)).tobytes())


def read_digests(store: ObjectStore, key: str) -> Digests:
    """The digests in a file, sorted."""
    return np.frombuffer(store.get(key), np.uint64).reshape(-1, 2)


def are_published(halves: Digests, published: Iterable[Digests]) -> npt.NDArray[np.bool_]:
    """Which digests are in one of the files (each sorted)."""
    order = np.argsort(halves[:, 0])  # who searches in order finds the next place in the processor's caches
    ordered = halves[order]
    found = np.zeros(len(halves), np.bool_)
    for one in published:
        found[order] |= among(ordered, one)
    return found


def digest_halves(digests: pa.Array) -> Digests:
    """An array of binary(16) as numbers, in its order."""
    halves = np.frombuffer(digests.buffers()[1], np.uint64) if len(digests) else np.empty(0, np.uint64)
    return halves.reshape(-1, 2)[digests.offset : digests.offset + len(digests)]


def sorted_digests(halves: Digests) -> Digests:
    """Sorted by both halves, each once."""
    ordered = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    again = np.zeros(len(ordered), np.bool_)
    again[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return ordered[~again]


def first_of_each(halves: Digests) -> npt.NDArray[np.bool_]:
    """Where digests are seen for the first time."""
    order = np.lexsort((np.arange(len(halves)), halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    first = np.ones(len(halves), np.bool_)
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def among(halves: Digests, published: Digests) -> npt.NDArray[np.bool_]:
    """Which digests are among those that are published (sorted)."""
    keys, first = (np.ascontiguousarray(one[:, 0]) for one in (halves, published))
    step = np.searchsorted(first, keys)
    found = np.zeros(len(halves), np.bool_)
    # The first halves are practically unique; what has the same one is looked at.
    left = np.flatnonzero(step < len(first))
    while len(left := left[first[step[left]] == keys[left]]):
        found[left] = published[step[left], 1] == halves[left, 1]
        step[left] += 1
        left = left[~found[left] & (step[left] < len(first))]
    return found


def mark(
    store: ObjectStore,
    table_id: str,
    kind: MarkKind,
    bootstrap: str,
    now_ms: int,
    parts: tuple[Part, ...] = (),
    check: Callable[[], None] | None = None,
    topic: str = "",
) -> int:
    """Begin a bootstrap, publish its rows, or end it: what is published from here on goes elsewhere. Again is fine.

    A cut-over without rows ends a bootstrap that has not come to its end.

    :param now_ms: ms since the epoch
    :param parts: of the rows
    :param check: raises when it may not be; asked after the last pass was seen, so that whoever has said so before and
        adds a pass then makes us ask again. None: a cut-over wants no other bootstrap to have begun; of rows
        :func:`check_rows` is asked
    :param topic: where the parts are
    :returns: the number of the pass that says so
    :raises BootstrapReplacedError: there are rows or a cut-over of a bootstrap that does not go on
    :raises StreamDamagedError: a part is not where the rows' bucket has it
    :raises TableReplacedError: nothing is published of this table any more
    """
    while True:
        numbers = pass_numbers(store, table_id)
        marks = marks_of_latest(store, table_id, numbers, through_changes=kind != "begin")
        for one in marks:
            if (one.kind, one.bootstrap) == (kind, bootstrap):
                return one.number
        begin = next((one for one in marks if one.kind == "begin"), None)
        if kind == "rows":
            check_rows(store, table_id, bootstrap, parts, topic)
        elif check:
            check()
        elif kind == "cutover":
            _check_not_replaced(bootstrap, begin)
        place = begin.number if begin and kind == "rows" else 0
        number = (numbers[-1] if numbers else 0) + 1
        if put_pass(store, Pass(number, kind, table_id, now_ms, bootstrap, place, parts=parts)):
            return number


def check_rows(store: ObjectStore, table_id: str, bootstrap: str, parts: Sequence[Part], topic: str) -> None:
    """Look whether the rows of a bootstrap may be published, or are.

    What cannot become a bucket must not become a pass: all passes behind it would wait.

    :param topic: where the parts are
    :raises BootstrapReplacedError: another bootstrap has begun, or this one was cancelled
    :raises StreamDamagedError: a part is not in the bucket of the bootstrap's begin, as it was written
    """
    marks = marks_of_latest(store, table_id, pass_numbers(store, table_id))
    if any((one.kind, one.bootstrap) == ("rows", bootstrap) for one in marks):
        return
    begin = next((one for one in marks if one.kind == "begin"), None)
    _check_not_replaced(bootstrap, begin)
    if begin is None or any(one.kind == "cutover" for one in marks):
        raise BootstrapReplacedError(f"bootstrap {bootstrap} was cancelled: trigger bootstrap_table again")
    if parts:
        FileStream(store, topic).check_parts(begin.bucket, parts)


def _check_not_replaced(bootstrap: str, begin: Pass | None) -> None:
    if begin is not None and begin.bootstrap != bootstrap:
        raise BootstrapReplacedError(
            f"bootstrap {bootstrap} was replaced by {begin.bootstrap} of the same table: follow that one"
        )


def marks_of_latest(
    store: ObjectStore, table_id: str, numbers: list[int], *, through_changes: bool = True
) -> list[Pass]:
    """The marks of a table's latest bootstrap as far as they are kept, the newest first.

    :param numbers: of the table's passes, rising
    :param through_changes: look for it before changes of the table's own stream, too; else only one that goes on, or
        that has just ended, is found
    """
    found: list[Pass] = []
    for number in reversed(numbers):
        one = get_pass(store, table_id, number)
        if one.kind != "changes":
            found.append(one)
            if one.kind == "begin":
                break
        elif not one.bootstrap and not through_changes:
            break
    return found


def first_to_add(store: ObjectStore, passes: Mapping[int, Pass], begin: int, reach_ms: float) -> int:
    """The first pass that the rows of a bootstrap may lack something of.

    What only some replicas had when it was published the scan may not have seen; and its copies, which come later,
    count as published.

    :param passes: of the table, by number
    :param begin: of the pass with which the bootstrap has begun
    :param reach_ms: so long copies of what was published may still come
    """
    since_ms = passes[begin].created_at_ms - reach_ms
    there = {stat.key for stat in store.list(f"sync/{passes[begin].table_id}/changes/")}
    found = begin + 1
    for number in sorted((known for known in passes if known < begin), reverse=True):
        one = passes[number]
        # Versions before did not keep the changes so long.
        if one.created_at_ms < since_ms or not there.issuperset(one.changes):
            break
        if one.kind == "changes" and not one.everywhere:
            found = number
    return found


def forget_pass(store: ObjectStore, one: Pass) -> None:
    """Remove a pass: neither its digests nor its changes are asked for any more. The last pass of a table must stay.

    The pass goes first: a kill leaves files that nobody asks for, and no pass without its digests, at which whoever
    publishes would stop.
    """
    store.delete(_key(one.table_id, one.number))
    digests = (key for keys in one.digests.values() for key in keys)
    # The changes go last: what is left of a pass is found by them (tries.py).
    for key in (*digests, *one.deletions, *one.changes):
        store.delete(key)
