"""The staging: decoded change rows on their way to the stream, as files in the object store.

=====================================================  =====================================================
``staging/rows/<node>/<number>-<name>.arrow``          rows read from a node's log at once, for the commit <number>: a
                                                       block for each table and bucket
``staging/late/<table id>/<name>.arrow``               late rows: their bucket was closed before they came
``staging/log/<node>/<number>.json``                   a commit: the blocks, and the position in the node's log
=====================================================  =====================================================

A file counts if a commit lists it. The commits of a node are numbered from 1, and each is put if absent. A commit makes
the files, their digests and the new positions durable at once. A process that repeats a step after a kill, or that was
thought dead, finds the commit and continues after it. So nothing is staged twice and nothing is left out. The newest
commit of a node has all positions in its log; earlier commits are removed once their rows are published. A process may
wake up when the commit of its number is removed. Then the commit before is removed, too, or it is ``followed``. So no
number is used twice, and the files of failed tries are recognised by their number and removed.

A block is a record batch of an Arrow IPC stream, sorted by token. Its commit says where in the file it lies. The commit
also has, by token range, the number of the block's rows and the sum of both halves of their digests. These sums depend
on no order and can be added, so that replicas can be compared without reading rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import google_crc32c
import pyarrow as pa

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    ObjectStore,
    Stat,
    VersionMismatchError,
    list_named,
)

STAGED_ROWS = CHANGE_ROWS.append(pa.field("node", pa.string()))
"""Schema of staged rows: change rows with the host id of the node whose log they come from."""

Written = tuple[int, int]
"""Least and greatest write time of rows, µs."""

NOTHING: Written = (0, -1)
"""There are no rows."""

OF_PASS = "pass-"
"""Begin of the names of files of late rows that passes put."""

_BUCKET = re.compile(r"(\d{1,16})-(\d{1,10})")
_COMMIT = re.compile(r"/\d{12}\.json$")
_ROWS = "staging/rows/"
_ROWS_KEY = re.compile(_ROWS + r"([^/]+)/(\d{12})-[^/]+\.arrow")
_WATERMARK = "staging/closed.json"


@dataclass(frozen=True, order=True)
class Bucket:
    """All change rows of a table that were written in one window interval.

    :ivar start: start of the interval, ms since the epoch
    :ivar length: length of the interval, ms
    """

    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.start:013}-{self.length}"

    @property
    def end(self) -> int:
        """First moment after the interval, ms since the epoch."""
        return self.start + self.length

    @staticmethod
    def parse(text: str) -> Bucket:
        """Read a bucket's name, as ``str`` writes it.

        :raises ValueError: the text is no bucket's name
        """
        match = _BUCKET.fullmatch(text)
        if not match:
            raise ValueError(f"{text!r} is not the name of a bucket: START-LENGTH, both in ms")
        return Bucket(int(match[1]), int(match[2]))


@dataclass(frozen=True, order=True)
class Place:
    """The place of a block.

    :ivar start: byte of the file where the block begins
    :ivar size: bytes
    """

    key: str
    start: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class Block:
    """Staged change rows of one table, bucket and node.

    :ivar table_id: 32 hexadecimal digits
    :ivar version: number of the table's version that the rows were decoded with
    :ivar ring: digest of the ring snapshot that has the token ranges; empty: the ring was not available
    :ivar sums: for each token range with rows its number, its count of rows, and the sums of the halves of their
        digests, without overflow
    :ivar is_agreed: whether no replica has to agree with its rows: they were read at a consistency level
    """

    place: Place
    table_id: str
    version: int
    bucket: str
    rows: int
    ring: str
    sums: tuple[tuple[int, int, int, int], ...]
    is_agreed: bool = False


@dataclass(frozen=True)
class LogPart:
    """A part of a segment that has been read.

    :ivar start: logical position where reading began
    :ivar end: logical position where reading ended
    :ivar finished: whether the segment is complete and has been read to its end
    """

    segment: str
    segment_id: int
    start: int
    end: int
    finished: bool


@dataclass(frozen=True)
class StageCommit:
    """A commit: the parts of a node's log that were read and staged at once.

    :ivar node: host id
    :ivar number: number of the commit among the node's
    :ivar ends: position up to which each unfinished segment has been read, by segment id
    :ivar finished: times when segments were finished (ms since the epoch), by id, unless that was long ago
        (:mod:`ringsync.ledger.finished_segments`)
    :ivar counts: numbers of records and rows by outcome
    :ivar late: keys of files of late rows
    :ivar written: write times of the followed rows of each segment in ``ends`` and ``finished``; those that were not
        read from their beginning, or not all of which could be decoded, are missing
    :ivar reached: position that unfinished segments reach by their index, if that is more than was read of them
    :ivar followed: whether the next commit was made; it may be removed by now
    :ivar whole_at_ms: all that was synced at this moment is in earlier commits; 0: unknown
    :ivar positions: how far the CDC logs of tables are read (:mod:`ringsync.scylla.progress`), by table id: only in
        commits of :data:`ringsync.ledger.database.CDC_LOGS`
    """

    node: str
    number: int
    parts: tuple[LogPart, ...]
    ends: Mapping[int, int]
    finished: Mapping[int, int]
    counts: Mapping[str, int]
    blocks: tuple[Block, ...]
    late: tuple[str, ...] = ()
    followed: bool = False
    whole_at_ms: int = 0
    written: Mapping[int, Written] = field(default_factory=dict)
    reached: Mapping[int, int] = field(default_factory=dict)
    positions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Key of the commit in the object store."""
        return f"{_folder(self.node)}{self.number:012}.json"

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of the files of its blocks."""
        return tuple(dict.fromkeys(block.place.key for block in self.blocks))


def put_commit(store: ObjectStore, commit: StageCommit) -> StageCommit:
    """Put a commit, unless another process has made the node's commit of this number, even long ago.

    :returns: commit that counts: ours, the other one of this number, or the node's newest
    :raises NotFoundError: the node's commits are gone, though this is not the first
    """
    if not _follows(store, commit):
        there = commit_keys(store, commit.node)
        if not there:
            raise NotFoundError(
                f"{store.uri(_folder(commit.node))} has no commit any more: restore the commits that were removed"
            )
        return get_commit(store, there[-1])
    try:
        store.put(commit.key, json.dumps(asdict(commit)).encode(), if_absent=True)
        return commit
    except AlreadyExistsError:
        return get_commit(store, commit.key)


def _follows(store: ObjectStore, commit: StageCommit) -> bool:
    """Tell whether the commit before is the node's newest, or there is none and this is the first."""
    if commit.number == 1:
        return not commit_keys(store, commit.node)
    try:
        before = json.loads(store.get(replace(commit, number=commit.number - 1).key))
    except NotFoundError:
        return False
    except (ChecksumError, ValueError):
        return True  # it is there; unreadable commits were never marked as followed
    return not before.get("followed")


def get_commit(store: ObjectStore, key: str) -> StageCommit:
    """Read a commit.

    :raises NotFoundError: it is not there
    :raises ChecksumError: it is not as it was written, or is no commit
    """
    data = store.get(key)
    try:
        return _commit_of(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise ChecksumError(f"{store.uri(key)} is no commit ({type(error).__name__}: {error}): restore it") from error


def _commit_of(document: dict[str, Any]) -> StageCommit:
    blocks = tuple(
        Block(**{**block, "place": Place(**block["place"]), "sums": tuple(tuple(sums) for sums in block["sums"])})
        for block in document.pop("blocks")
    )
    parts = tuple(LogPart(**part) for part in document.pop("parts"))
    ends, finished, reached = (
        {int(segment): number for segment, number in document.pop(name).items()}
        for name in ("ends", "finished", "reached")
    )
    late = tuple(document.pop("late"))
    written = {int(segment): (first, last) for segment, (first, last) in document.pop("written").items()}
    # A later version may have written more.
    known = {one.name: document[one.name] for one in fields(StageCommit) if one.name in document}
    known |= {"ends": ends, "finished": finished, "written": written, "reached": reached}
    return StageCommit(blocks=blocks, parts=parts, late=late, **known)


def commit_keys(store: ObjectStore, node: str | None = None) -> list[str]:
    """List the keys of the commits of a node, or of all nodes, each node's in order."""
    keys = (stat.key for stat in store.list(_folder(node) if node else "staging/log/"))
    return [key for key in keys if _COMMIT.search(key)]


def _folder(node: str) -> str:
    return f"staging/log/{node}/"


def node_of(commit_key: str) -> str:
    """Return the host id in the key of a commit."""
    return commit_key.split("/")[2]


def rows_key(node: str, number: int, name: str) -> str:
    """Return the key of a file of blocks.

    :param number: number of the commit that will list it
    """
    return f"{_ROWS}{node}/{number:012}-{name}.arrow"


def rows_keys(store: ObjectStore) -> list[str]:
    """List the keys of all nodes' files of blocks, listed by a commit or not."""
    return [stat.key for stat in list_named(store, _ROWS, r"[^ ]+\.arrow")]


def commit_of_rows(key: str) -> tuple[str, int] | None:
    """Return node and number of the commit that a file of blocks was written for.

    :returns: host id and number; None: this file is not ours
    """
    match = _ROWS_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def late_key(table_id: str, name: str) -> str:
    """Return the key of a file of late rows of a table."""
    return f"staging/late/{table_id}/{name}.arrow"


def late_files(store: ObjectStore, table_id: str = "") -> list[str]:
    """List the keys of the files of late rows of a table, or of all tables."""
    return [stat.key for stat in late_stats(store, table_id)]


def late_stats(store: ObjectStore, table_id: str = "") -> list[Stat]:
    """List the files of late rows of a table, or of all tables."""
    stats = list_named(store, f"staging/late/{table_id}/" if table_id else "staging/late/", r"[^ ]+\.arrow")
    return [stat for stat in stats if stat.key.count("/") > 2]


def is_of_pass(key: str) -> bool:
    """Tell whether a pass has put a file of late rows: their replicas were down, so they wait."""
    return key.rpartition("/")[2].startswith(OF_PASS)


_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
"""Writing takes a fifth of the time that Parquet takes."""


def encode_blocks(batches: Sequence[pa.RecordBatch], key: str) -> tuple[bytes, list[Place]]:
    """Encode batches of change rows as a file, an Arrow IPC stream, and return its bytes and each batch's place.

    :param batches: record batches of :data:`STAGED_ROWS`, at least one
    """
    sink = pa.BufferOutputStream()
    ends = [STAGED_ROWS.serialize().size]
    with pa.ipc.new_stream(sink, STAGED_ROWS, options=_OPTIONS) as writer:
        for batch in batches:
            writer.write_batch(batch)
            ends.append(sink.tell())
    data = bytes(sink.getvalue())
    return data, [Place(key, start, end - start, google_crc32c.value(data[start:end])) for start, end in pairwise(ends)]


def read_block(store: ObjectStore, place: Place) -> pa.RecordBatch:
    """Read the change rows of a block.

    :raises NotFoundError: the block's file is not there
    :raises ChecksumError: the block's bytes have changed
    """
    data = store.get_range(place.key, place.start, place.size)
    if google_crc32c.value(data) != place.crc32c:
        raise ChecksumError(
            f"{store.uri(place.key)}: bytes {place.start} to {place.start + place.size} are damaged: their CRC-32C is "
            f"{google_crc32c.value(data):08x}, but {place.crc32c:08x} was written; restore the file"
        )
    return pa.ipc.read_record_batch(pa.py_buffer(data), STAGED_ROWS)


def encode_rows(rows: pa.RecordBatch) -> bytes:
    """Encode change rows as the bytes of an Arrow IPC file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def decode_rows(data: bytes) -> pa.RecordBatch:
    """Read a file that :func:`encode_rows` has made."""
    with pa.ipc.open_file(pa.BufferReader(data)) as file:
        return file.get_batch(0)


def together(one: Written, other: Written) -> Written:
    """Return the write times of rows of both."""
    if NOTHING in (one, other):
        return other if one == NOTHING else one
    return min(one[0], other[0]), max(one[1], other[1])


def closed_until(store: ObjectStore) -> int:
    """Read the moment until which buckets are closed, ms since the epoch; a bucket that ends then is closed.

    If the object is damaged, none is: ``bucket_close`` writes it again at once, and digests tell what was published.
    """
    with suppress(NotFoundError, ChecksumError, ValueError, TypeError, KeyError):
        return int(json.loads(store.get(_WATERMARK))["closed_until_ms"])
    return 0


def put_closed_until(store: ObjectStore, moment: int) -> None:
    """Record that buckets that end at this moment (ms since the epoch) or before are closed."""
    store.put(_WATERMARK, json.dumps({"closed_until_ms": moment}).encode())


def retire_commit(store: ObjectStore, commit: StageCommit, *, keep: bool) -> None:
    """Remove the blocks of a commit whose rows are all published, first from the commit, then their files.

    :param keep: whether to keep the commit for its positions in the log, since it is the node's newest
    """
    if keep:
        store.put(commit.key, json.dumps(asdict(replace(commit, blocks=()))).encode())
    else:
        store.delete(commit.key)
    for key in commit.files:
        store.delete(key)


def mark_followed(store: ObjectStore, commit: StageCommit) -> StageCommit | None:
    """Record that the commit after this one was made, before that one is removed.

    :returns: the marked commit; None: another process has changed or removed it since
    """
    marked, stat = replace(commit, followed=True), store.stat(commit.key)
    if stat is None:
        return None
    try:
        store.put(commit.key, json.dumps(asdict(marked)).encode(), if_version=stat.version)
    except VersionMismatchError:
        return None
    return marked
