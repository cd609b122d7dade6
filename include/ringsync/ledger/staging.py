"""What has been staged: decoded change rows on their way to the stream, as files in the object store.

=====================================================  =====================================================
``staging/rows/<node>/<number>-<name>.arrow``          what was read of a node's log at once: change rows of all
                                                       tables, a block for each table and bucket; for which commit
``staging/late/<table id>/<name>.arrow``               those whose bucket was closed before they came
``staging/log/<node>/<number>.json``                   a commit: the blocks, and how far the node's log is read
=====================================================  =====================================================

A file counts if a commit lists it. The commits of a node are numbered from 1, and each is put if absent: it makes the
files, their digests and the new positions durable at once, and who repeats a step that was killed, or was thought dead,
finds it there and goes on behind it. So nothing is staged twice and nothing is left out. The newest commit of a node
tells all that is to be known of its log; those before it are removed once their rows are published. Who wakes up with a
number that is long gone finds the commit before its own gone, too, or ``followed``: no number is given twice. So what
tries have written that came to nothing is known by its number, and is removed.

A block is a record batch of an Arrow IPC stream, sorted by token; its commit says where in the file it lies, and sums
up its rows by token range, so that replicas can be compared without reading them: their number and the sum of both
halves of their digests, which depends on no order and can be added to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import google_crc32c
import pyarrow as pa

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, VersionMismatchError

STAGED_ROWS = CHANGE_ROWS.append(pa.field("node", pa.string()))
"""Change rows, and which node's log they come from (its host id)."""

_BUCKET = re.compile(r"(\d{1,16})-(\d{1,10})")
_COMMIT = re.compile(r"/\d{12}\.json$")
_ROWS = "staging/rows/"
_ROWS_KEY = re.compile(_ROWS + r"([^/]+)/(\d{12})-[^/]+\.arrow")
_WATERMARK = "staging/closed.json"


@dataclass(frozen=True, order=True)
class Bucket:
    """All change rows of a table that were written in one window interval.

    :ivar start: ms since the epoch
    :ivar length: ms
    """

    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.start:013}-{self.length}"

    @property
    def end(self) -> int:
        """ms since the epoch; the first moment behind it."""
        return self.start + self.length

    @staticmethod
    def parse(text: str) -> Bucket:
        """Read what ``str`` made.

        :raises ValueError: for anything else
        """
        found = _BUCKET.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is not the name of a bucket: START-LENGTH, both in ms")
        return Bucket(int(found[1]), int(found[2]))


@dataclass(frozen=True, order=True)
class Place:
    """Where a block lies.

    :ivar key: the file's key in the object store
    :ivar start: byte of the file at which it begins
    :ivar size: bytes
    :ivar crc32c: CRC-32C of its bytes
    """

    key: str
    start: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class Block:
    """Staged change rows of one table, bucket and node.

    :ivar table_id: 32 hexadecimal digits
    :ivar version: number of the table's version by which the rows were decoded
    :ivar bucket: name
    :ivar rows: how many
    :ivar ring: digest of the ring snapshot whose ranges are summed; empty: the ring could not be had
    :ivar sums: for each token range that has rows its number, the number of its rows, and the sums of the halves of
        their digests, without overflow
    """

    place: Place
    table_id: str
    version: int
    bucket: str
    rows: int
    ring: str
    sums: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class LogPart:
    """A part of a segment that has been read.

    :ivar segment: the segment's name
    :ivar start: logical position behind which it was read …
    :ivar end: … and up to which
    :ivar finished: the segment is complete, and all of it is read
    """

    segment: str
    segment_id: int
    start: int
    end: int
    finished: bool


@dataclass(frozen=True)
class StageCommit:
    """What was read of a node's log at once has been staged.

    :ivar node: host id
    :ivar number: the commit's number among the node's
    :ivar read_at_ms: ms since the epoch
    :ivar parts: what was read
    :ivar ends: how far every segment that is not finished has been read, by id
    :ivar finished: times when segments were finished (ms since the epoch), by id, unless that was long ago
        (:mod:`ringsync.ledger.finished_segments`)
    :ivar counts: records and rows by what became of them
    :ivar blocks: the rows
    :ivar late: keys of files of late rows
    :ivar followed: the commit after it was there, and may be gone by now
    """

    node: str
    number: int
    read_at_ms: int
    parts: tuple[LogPart, ...]
    ends: Mapping[int, int]
    finished: Mapping[int, int]
    counts: Mapping[str, int]
    blocks: tuple[Block, ...]
    late: tuple[str, ...] = ()
    followed: bool = False

    @property
    def key(self) -> str:
        """In the object store."""
        return f"{_folder(self.node)}{self.number:012}.json"

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of the files of its blocks."""
        return tuple(dict.fromkeys(block.place.key for block in self.blocks))


def put_commit(store: ObjectStore, commit: StageCommit) -> StageCommit:
    """Commit, unless somebody else has made the node's commit of this number, be it long ago.

    :returns: the commit that counts: ours, that of this number, or the node's newest
    :raises NotFoundError: there is no commit of the node any more, though this is not its first
    """
    if not _follows(store, commit):
        there = commit_keys(store, commit.node)
        if not there:
            raise NotFoundError(f"{store.uri(_folder(commit.node))} has no commit any more: who has removed them?")
        return get_commit(store, there[-1])
    try:
        store.put(commit.key, json.dumps(asdict(commit)).encode(), if_absent=True)
        return commit
    except AlreadyExistsError:
        return get_commit(store, commit.key)


def _follows(store: ObjectStore, commit: StageCommit) -> bool:
    """Whether the commit before is the node's newest, or there is none and this is the first; or ours may be there."""
    if commit.number == 1:
        return not commit_keys(store, commit.node)
    try:
        before = json.loads(store.get(replace(commit, number=commit.number - 1).key))
    except NotFoundError:
        return False
    except (ChecksumError, ValueError):
        return True  # it is there, and none that cannot be read was ever marked
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
        Block(**{**one, "place": Place(**one["place"]), "sums": tuple(tuple(sums) for sums in one["sums"])})
        for one in document.pop("blocks")
    )
    parts = tuple(LogPart(**part) for part in document.pop("parts"))
    ends, finished = (
        {int(segment): number for segment, number in document.pop(name).items()} for name in ("ends", "finished")
    )
    late = tuple(document.pop("late"))
    return StageCommit(blocks=blocks, parts=parts, ends=ends, finished=finished, late=late, **document)


def commit_keys(store: ObjectStore, node: str | None = None) -> list[str]:
    """The commits of a node, or of all: each node's in their order."""
    keys = (stat.key for stat in store.list(_folder(node) if node else "staging/log/"))
    return [key for key in keys if _COMMIT.search(key)]


def _folder(node: str) -> str:
    return f"staging/log/{node}/"


def node_of(commit_key: str) -> str:
    """The host id in the key of a commit."""
    return commit_key.split("/")[2]


def rows_key(node: str, number: int, name: str) -> str:
    """Key of a file of blocks.

    :param number: number of the commit that will list it
    """
    return f"{_ROWS}{node}/{number:012}-{name}.arrow"


def rows_keys(store: ObjectStore) -> list[str]:
    """The files of blocks of all nodes, also those that no commit lists."""
    return [stat.key for stat in store.list(_ROWS)]


def commit_of_rows(key: str) -> tuple[str, int] | None:
    """For which commit a file of blocks was written: node and number; None: an older version wrote it, nobody knows.

    :param key: the file's key
    """
    found = _ROWS_KEY.fullmatch(key)
    return (found[1], int(found[2])) if found else None


def late_key(table_id: str, name: str) -> str:
    """Key of a file of late rows of a table."""
    return f"staging/late/{table_id}/{name}.arrow"


_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
"""A fifth of the time that Parquet takes to write."""


def encode_blocks(batches: Sequence[pa.RecordBatch], key: str) -> tuple[bytes, list[Place]]:
    """Batches of change rows as the bytes of a file, an Arrow IPC stream, and where in it each lies.

    :param batches: record batches of :data:`STAGED_ROWS`, at least one
    :param key: the file's key
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
    """The change rows of a block.

    :raises NotFoundError: its file is not there
    :raises ChecksumError: its bytes are not those that were written
    """
    data = store.get_range(place.key, place.start, place.size)
    if google_crc32c.value(data) != place.crc32c:
        raise ChecksumError(
            f"{store.uri(place.key)}: bytes {place.start} to {place.start + place.size} are damaged: their CRC-32C is "
            f"{google_crc32c.value(data):08x}, {place.crc32c:08x} was written; restore the file"
        )
    return pa.ipc.read_record_batch(pa.py_buffer(data), STAGED_ROWS)


def encode_rows(rows: pa.RecordBatch) -> bytes:
    """Change rows as the bytes of a file of their own: Arrow IPC."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def decode_rows(data: bytes) -> pa.RecordBatch:
    """What :func:`encode_rows` has made."""
    with pa.ipc.open_file(pa.BufferReader(data)) as file:
        return file.get_batch(0)


def closed_until(store: ObjectStore) -> int:
    """ms since the epoch: buckets that end then or before are closed."""
    try:
        return int(json.loads(store.get(_WATERMARK))["closed_until_ms"])
    except NotFoundError:
        return 0


def put_closed_until(store: ObjectStore, moment: int) -> None:
    """Say that buckets that end at this moment (ms since the epoch) or before are closed."""
    store.put(_WATERMARK, json.dumps({"closed_until_ms": moment}).encode())


def retire_commit(store: ObjectStore, commit: StageCommit, *, keep: bool) -> None:
    """Forget the blocks of a commit, all of whose rows are published, and then remove their files.

    :param keep: it goes on saying how far the log is read: it is the node's newest
    """
    if keep:
        store.put(commit.key, json.dumps(asdict(replace(commit, blocks=()))).encode())
    else:
        store.delete(commit.key)
    remove_files(store, commit)


def mark_followed(store: ObjectStore, commit: StageCommit) -> StageCommit | None:
    """Say that the commit after this one was there, before that is removed.

    :returns: None: somebody else has changed it since, or removed it
    """
    marked, found = replace(commit, followed=True), store.stat(commit.key)
    if found is None:
        return None
    try:
        store.put(commit.key, json.dumps(asdict(marked)).encode(), if_version=found.version)
    except VersionMismatchError:
        return None
    return marked


def remove_files(store: ObjectStore, commit: StageCommit) -> None:
    """Remove the files of the blocks of a commit."""
    for key in commit.files:
        store.delete(key)
