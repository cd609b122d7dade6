"""Records of commit logs that could not be decoded, kept with their bytes until the cause is repaired.

There is one partition per segment, which bounds it, and one row per record. Staging a segment twice writes the same
rows. Mutations of more than :data:`LARGEST_INLINE` bytes lie in the object store as
``errors/<node>/<file>/<position>``.

A flood of such records would be a load for the cluster. What is more than a limit for each node and hour lies in the
object store only: an Arrow IPC file for each commit (:data:`ringsync.formats.commitlog.reader.ERROR_ROWS`), and one row
that names it. This row has a partition of its own, whose ``file`` is the name of the object, so no other row ever
replaces it. The name has the segment of the first record, the number of records, and a digest of the content: the same
records give the same row.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from cassandra.cluster import Session

from ringsync.formats.commitlog.names import segment_id
from ringsync.state.session import StateSession
from ringsync.state.undecodable import forget_undecodable, note_undecodable, with_undecodable
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore

LARGEST_INLINE = 1_000_000
"""Bytes of a mutation that a row may hold."""

OVERFLOW = "errors/overflow/"
"""Folder of the records that were beyond the limit, by node."""

_ROWS_AT_ONCE = 100
_KEY_BYTES = 200
"""About how many bytes the short columns of a row have."""
_HOUR_MS = 3_600_000
_OVERFLOW_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]{16}\.arrow")
_COLUMNS = ("position", "length", "reason", "table_id", "raw", "raw_object")


@dataclass(frozen=True, order=True)
class ErrorKey:
    """The key of a row.

    :ivar node: host id of the node whose log has the record
    :ivar file: name of the segment; of an overflow row, the name of its object
    :ivar position: logical position after the record; of an overflow row 0
    """

    node: str
    file: str
    position: int

    def __str__(self) -> str:
        return f"{self.node} {self.file} {self.position}"


@dataclass(frozen=True)
class ErrorRow:
    """A row: a record, a damaged part of a segment, or many records in an object.

    :ivar length: bytes of the mutation; of an overflow row, of all its mutations
    :ivar table_id: id of the table that was unknown; None: the reason is another
    :ivar raw: the mutation; None: it is in ``raw_object``, or there is none, or it was not asked for
    :ivar raw_object: key of the object with the bytes
    """

    key: ErrorKey
    length: int
    reason: str
    table_id: bytes | None = None
    raw: bytes | None = None
    raw_object: str | None = None

    @property
    def is_overflow(self) -> bool:
        """Whether the row stands for the records in an object."""
        return self.raw_object is not None and self.raw_object.startswith(OVERFLOW)

    @property
    def records(self) -> int:
        """Number of records that the row stands for."""
        match = _OVERFLOW_NAME.fullmatch(self.key.file) if self.is_overflow else None
        return int(match[2]) if match else 1


def file_order(file: str) -> tuple[int, str]:
    """Order files by the time when their segments were begun (the segment id), the oldest first."""
    match = _OVERFLOW_NAME.fullmatch(file)
    return (int(match[1]) if match else segment_id(file) or 0), file


class ErrorTable:
    """The table ``processor_error``. Each method raises :class:`ringsync.state.session.StateError` as that module says.

    :param session, keyspace: those of :class:`ringsync.state.session.StateSession`
    :param store: object store for large mutations
    :param most_per_hour: records of one node that :meth:`put` writes to the table in an hour; None: no limit
    :param clock: s since the epoch
    """

    def __init__(
        self,
        session: Session,
        keyspace: str,
        store: ObjectStore,
        most_per_hour: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = StateSession(session, keyspace)
        self._store = store
        self._most_per_hour = most_per_hour
        self._clock = clock
        self._table = f"{self._state.keyspace}.processor_error"

    def put(self, errors: pa.RecordBatch, node: str) -> None:
        """Keep records. Repeating it writes the same rows; if the limit was reached meanwhile, some records may be
        kept twice, in the table and in an object.

        :param errors: batch of :data:`ringsync.formats.commitlog.reader.ERROR_ROWS`, with the segment's name as
            ``file``; ``raw`` is null for damaged bytes
        :param node: host id of the node whose log has the records
        :raises UnavailableError: the object store does not take a large mutation
        """
        allowed = self._allow(node, errors.num_rows)
        if allowed < errors.num_rows:
            self.put_overflow(errors.slice(allowed), node)
        self._write((node, *row) for row in self._rows(errors.slice(0, allowed), node))
        if errors.num_rows:
            note_undecodable(self._store, node)

    def put_overflow(self, errors: pa.RecordBatch, node: str) -> None:
        """Keep records in one object, and one row that names it. Repeating it with the same records changes nothing.

        :param errors: as for :meth:`put`, at least one
        """
        data = _encode(errors)
        first, count = segment_id(errors["file"][0].as_py()) or 0, errors.num_rows
        name = f"{first}-{count}-{hashlib.sha256(data).hexdigest()[:16]}.arrow"
        key = f"{OVERFLOW}{node}/{name}"
        self._store.put(key, data)
        reasons = Counter(errors["reason"].to_pylist())
        most = f"{count:,} records of one commit, most of them: {reasons.most_common(1)[0][0]}"
        length = sum(errors["length"].to_pylist())
        self._write([(node, name, 0, length, f"more than sync.max_errors_per_hour: {most}", None, None, key)])

    def _write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        cql = f"INSERT INTO {self._table} (node, file, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._state.write_all(self._state.bind(cql, row) for row in rows)

    def _allow(self, node: str, wanted: int) -> int:
        """Tell how many more rows of a node may be written now, and note that they are. A process that begins anew
        goes on counting."""
        if self._most_per_hour is None:
            return wanted
        key, now_ms = f"errors/written/{node}.json", int(self._clock() * 1000)
        since_ms, written = now_ms, 0
        try:
            noted = json.loads(self._store.get(key))
            if 0 <= now_ms - noted["since_ms"] < _HOUR_MS:
                since_ms, written = noted["since_ms"], noted["rows"]
        except (NotFoundError, ChecksumError, ValueError, KeyError, TypeError):
            pass  # nothing was written in this hour, or the note is damaged: then it is made again
        allowed = max(0, min(wanted, self._most_per_hour - written))
        self._store.put(key, json.dumps({"since_ms": since_ms, "rows": written + allowed}).encode())
        return allowed

    def _rows(self, errors: pa.RecordBatch, node: str) -> Iterator[tuple[Any, ...]]:
        """Make the row of each record, after putting a mutation that is too large for it into the store."""
        for start in range(0, len(errors), _ROWS_AT_ONCE):
            for row in errors.slice(start, _ROWS_AT_ONCE).to_pylist():
                key = None
                if row["raw"] is not None and len(row["raw"]) > LARGEST_INLINE:
                    key = f"errors/{node}/{row['file']}/{row['position']}"
                    self._store.put(key, row["raw"])
                    row["raw"] = None
                yield *(row[name] for name in ("file", "position", "length", "reason", "table_id", "raw")), key

    def is_there(self) -> bool:
        """Tell whether the table was created: the first application that needs it does that."""
        return self._state.has(["processor_error"])

    def files(self, node: str | None = None, file: str | None = None) -> list[tuple[str, str]]:
        """List the partitions, node and file, the oldest segments first.

        :param node, file: only those of this node, or of this segment (or overflow object)
        """
        distinct = self._state.bind(f"SELECT DISTINCT node, file FROM {self._table}", ())
        found = [
            (row.node, row.file)
            for page in self._state.pages(distinct, lambda _: _KEY_BYTES)
            for row in page
            if (node is None or row.node == node) and (file is None or row.file == file)
        ]
        return sorted(found, key=lambda place: (file_order(place[1]), place[0]))

    def rows(self, node: str, file: str, *, with_bytes: bool = False) -> Iterator[ErrorRow]:
        """Read the rows of a partition, in the order of the log, a page at a time.

        :param with_bytes: whether to read ``raw``, too
        """
        columns = _COLUMNS if with_bytes else tuple(name for name in _COLUMNS if name != "raw")
        cql = f"SELECT {', '.join(columns)} FROM {self._table} WHERE node = ? AND file = ?"
        for page in self._state.pages(self._state.bind(cql, (node, file)), _width):
            for row in page:
                yield _row(ErrorKey(node, file, row.position), row)

    def row(self, key: ErrorKey) -> ErrorRow | None:
        """Read a row with its bytes; None: it is not there."""
        cql = f"SELECT {', '.join(_COLUMNS)} FROM {self._table} WHERE node = ? AND file = ? AND position = ?"
        statement = self._state.bind(cql, (key.node, key.file, key.position))
        found = [row for rows in self._state.read_all([statement]) for row in rows]
        return _row(key, found[0]) if found else None

    def mutation(self, row: ErrorRow) -> bytes | None:
        """Return the bytes of a record that was read with its bytes; None: it is damage, which has none.

        :raises NotFoundError: its object is not there
        """
        if row.raw is None and row.raw_object is not None and not row.is_overflow:
            return self._store.get(row.raw_object)
        return row.raw

    def overflow(self, row: ErrorRow) -> pa.RecordBatch:
        """Read the records of an overflow row, a batch of ``ERROR_ROWS``.

        :raises NotFoundError: its object is not there
        """
        assert row.raw_object is not None
        with pa.ipc.open_file(pa.BufferReader(self._store.get(row.raw_object))) as file:
            return file.get_batch(0)

    def remove(self, keys: Iterable[ErrorKey]) -> None:
        """Delete rows. Repeating it is safe. Their objects stay."""
        cql = f"DELETE FROM {self._table} WHERE node = ? AND file = ? AND position = ?"
        self._state.write_all(self._state.bind(cql, (key.node, key.file, key.position)) for key in keys)

    def forget_solved(self) -> None:
        """Record of which nodes no row is left. Rows that are put meanwhile may be noted before, so they are looked for
        once more."""
        for node in {*with_undecodable(self._store)} - {node for node, _ in self.files()}:
            forget_undecodable(self._store, node)
        for node in {node for node, _ in self.files()} - {*with_undecodable(self._store)}:
            note_undecodable(self._store, node)


def _width(row: Any) -> int:
    return _KEY_BYTES + len(row.reason or "") + len(getattr(row, "raw", None) or b"")


def _row(key: ErrorKey, row: Any) -> ErrorRow:
    return ErrorRow(key, row.length, row.reason, row.table_id, getattr(row, "raw", None), row.raw_object)


def _encode(errors: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, errors.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(errors)
    return bytes(sink.getvalue())
