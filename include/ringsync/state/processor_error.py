"""Records of commit logs that could not be decoded, kept with their bytes until the cause is repaired.

There is one partition per segment, which bounds it, and one row per record. Staging a segment twice writes the same
rows. Mutations of more than :data:`LARGEST_INLINE` bytes lie in the object store as
``errors/<node>/<file>/<position>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from cassandra.cluster import Session

from ringsync.state.session import StateSession
from ringsync.storage.port import ObjectStore

LARGEST_INLINE = 1_000_000
"""Bytes of a mutation that a row may hold."""

_ROWS_AT_ONCE = 100


class ErrorTable:
    """The table ``processor_error``. Each method raises :class:`ringsync.state.session.StateError` as that module says.

    :param session, keyspace: those of :class:`ringsync.state.session.StateSession`
    :param store: object store for large mutations
    """

    def __init__(self, session: Session, keyspace: str, store: ObjectStore) -> None:
        self._state = StateSession(session, keyspace)
        self._store = store
        self._table = f"{self._state.keyspace}.processor_error"

    def put(self, errors: pa.RecordBatch, node: str) -> None:
        """Keep records. Repeating it writes the same rows.

        :param errors: batch of :data:`ringsync.formats.commitlog.reader.UNDECODED`, with the segment's name as
            ``file``; ``raw`` is null for damaged bytes
        :param node: host id of the node whose log has the records
        :raises UnavailableError: the object store does not take a large mutation
        """
        cql = (
            f"INSERT INTO {self._table} (node, file, position, length, reason, table_id, raw, raw_object) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        )
        self._state.write_all(self._state.bind(cql, (node, *row)) for row in self._rows(errors, node))

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

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Count the kept records by node and reason, for people. It reads all rows, but not their bytes."""
        segments = next(self._state.read_all([self._state.bind(f"SELECT DISTINCT node, file FROM {self._table}", ())]))
        of_segment = f"SELECT node, reason FROM {self._table} WHERE node = ? AND file = ?"
        counts: Counter[tuple[str, str]] = Counter()
        for rows in self._state.read_all(self._state.bind(of_segment, (node, file)) for node, file in segments):
            counts.update((row.node, row.reason) for row in rows)
        return counts
