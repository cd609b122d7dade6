"""What has been staged: decoded change rows on their way to the stream, as files in the object store.

=====================================================  =====================================================
``staging/rows/<table id>/<bucket>/<name>.arrow``      change rows of one table, bucket and node, by token
``staging/late/<table id>/<name>.arrow``               those whose bucket was closed before they came
``staging/log/<node>/<segment id>-<start>.json``       a commit: these files, and how far the log is read by them
=====================================================  =====================================================

A file counts if a commit lists it. A commit begins where the one before it has ended, and is put if absent: it makes
the files, their digests and the new offset durable at once, and who repeats a step that was killed, or was thought
dead, finds it there and goes on behind it. So nothing is staged twice and nothing is left out.

The rows of a bucket are summed up by token range, so that replicas can be compared without reading them: their number
and the sum of both halves of their digests, which depends on no order and can be added to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.storage.port import AlreadyExistsError, NotFoundError, ObjectStore

STAGED_ROWS = CHANGE_ROWS.append(pa.field("node", pa.string()))
"""Change rows, and which node's log they come from (its host id)."""

_BUCKET = re.compile(r"(\d{1,16})-(\d{1,10})")
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


@dataclass(frozen=True)
class StagedFile:
    """Change rows of one table, bucket and node.

    :ivar key: in the object store
    :ivar table_id: 32 hexadecimal digits
    :ivar bucket: name; empty: they came late
    :ivar rows: how many
    :ivar ring: digest of the ring snapshot whose ranges are summed
    :ivar sums: for each token range that has rows its number, the number of its rows, and the sums of the halves of
        their digests, without overflow
    """

    key: str
    table_id: str
    bucket: str
    rows: int
    ring: str
    sums: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class StageCommit:
    """A part of a segment has been staged.

    :ivar node: host id
    :ivar segment: its name
    :ivar start: logical position behind which it was read …
    :ivar end: … and up to which
    :ivar finished: the segment is complete, and all of it is staged
    :ivar read_at_ms: ms since the epoch
    :ivar counts: records and rows by what became of them
    """

    node: str
    segment: str
    segment_id: int
    start: int
    end: int
    finished: bool
    read_at_ms: int
    counts: Mapping[str, int]
    files: tuple[StagedFile, ...]

    @property
    def key(self) -> str:
        """In the object store."""
        return f"{_folder(self.node)}{self.segment_id:019}-{self.start:010}.json"


def put_commit(store: ObjectStore, commit: StageCommit) -> StageCommit:
    """Commit, unless somebody else has committed from this position.

    :returns: the commit that counts
    """
    try:
        store.put(commit.key, json.dumps(asdict(commit)).encode(), if_absent=True)
        return commit
    except AlreadyExistsError:
        return get_commit(store, commit.key)


def get_commit(store: ObjectStore, key: str) -> StageCommit:
    """Read a commit."""
    document = json.loads(store.get(key))
    files = tuple(
        StagedFile(**{**file, "sums": tuple(tuple(one) for one in file["sums"])}) for file in document.pop("files")
    )
    return StageCommit(files=files, **document)


def commit_keys(store: ObjectStore, node: str | None = None) -> list[str]:
    """The commits of a node, or of all, in the order of its log."""
    return [stat.key for stat in store.list(_folder(node) if node else "staging/log/")]


def _folder(node: str) -> str:
    return f"staging/log/{node}/"


def node_of(commit_key: str) -> str:
    """The host id in the key of a commit."""
    return commit_key.split("/")[2]


def rows_key(table_id: str, bucket: str, name: str) -> str:
    """Key of a file of change rows; no bucket: late ones."""
    return f"staging/rows/{table_id}/{bucket}/{name}.arrow" if bucket else f"staging/late/{table_id}/{name}.arrow"


def encode_rows(rows: pa.RecordBatch) -> bytes:
    """Change rows as the bytes of a file: Arrow IPC, lz4 (a fifth of the time that Parquet takes to write)."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(sink, rows.schema, options=options) as writer:
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


def retire_commit(store: ObjectStore, commit: StageCommit, *, is_last: bool) -> None:
    """Forget the files of a commit, all of whose rows are published, and then remove them.

    :param is_last: of its segment: it must go on saying how far the segment was read
    """
    if is_last:
        store.put(commit.key, json.dumps(asdict(replace(commit, files=()))).encode())
    else:
        store.delete(commit.key)
    for file in commit.files:
        if file.bucket:
            store.delete(file.key)
