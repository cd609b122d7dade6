"""The second phase of a retry: rows of ``processor_error`` go once their change rows are published.

Each effect may be repeated, and a kill between two of them loses nothing: the row goes before its bytes in the object
store, both before the try forgets the row, and an overflow row goes after the row for what is left of it is there. The
marks of a try's files go last: until then the try may be settled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from ringsync.ledger.error_tries import (
    FileOutcome,
    PublishedRows,
    TriedFile,
    TriedRow,
    Try,
    forget_taken,
    put_try,
    read_tries,
    taken,
)
from ringsync.state.processor_error import ErrorKey, ErrorRow, ErrorTable
from ringsync.storage.port import NotFoundError, ObjectStore

ABANDONED_MS = 60_000
"""A try whose files are not all put after so long is given up: its process was killed. If it lives all the same, its
late rows are published once, and its rows of ``processor_error`` are solved by the next retry."""

_Verdict = Literal["waits", "unsolved", "published", "of_dropped_tables"]


@dataclass(frozen=True)
class Settled:
    """A row that was solved and removed.

    :ivar records: number of its records that waited
    """

    key: ErrorKey
    outcome: FileOutcome
    records: int


class Settling:
    """All tries.

    :ivar published: what passes have published
    :ivar waits: rows that waited at the last :meth:`settle`, with the number of their records that did

    :param errors: the table ``processor_error``
    :param clock: s since the epoch
    """

    def __init__(self, store: ObjectStore, errors: ErrorTable, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._errors = errors
        self._clock = clock
        self.published = PublishedRows(store)
        self.waits: dict[ErrorKey, int] = {}

    def settle(self) -> list[Settled]:
        """Remove the rows of all tries whose late rows are published, or were given up because their table is gone.

        Rows whose late file was removed by somebody, and those of a try that was killed, are free for another retry.
        """
        self.waits = {}
        settled = [one for made, version in read_tries(self._store) for one in self._settle(made, version)]
        forget_taken(self._store)
        return settled

    def _settle(self, made: Try, version: str) -> list[Settled]:
        verdicts = [self._verdict(made, file) for file in made.files]
        left: list[TriedRow] = []
        solved: list[tuple[TriedRow, FileOutcome]] = []
        for row in made.rows:
            of_row = {verdicts[place] for place in row.files}
            if "waits" in of_row:
                left.append(row)
            elif "unsolved" not in of_row:
                solved.append((row, "of_dropped_tables" if "of_dropped_tables" in of_row else "published"))
        solve(self._store, self._errors, [row for row, _ in solved])
        self.waits |= {key_of(row): row.records for row in left}
        if not left:
            self._store.delete(made.key)
        elif len(left) < len(made.rows):
            put_try(self._store, replace(made, rows=tuple(left)), version)
        return [Settled(key_of(row), outcome, row.records) for row, outcome in solved]

    def _verdict(self, made: Try, file: TriedFile) -> _Verdict:
        if self._store.stat(file.key) is not None:
            return "waits"
        if (outcome := taken(self._store, file.key)) is not None:
            return outcome
        if self.published.has_all(file):
            return "published"  # somebody has removed the mark
        is_under_way = not made.is_put and int(self._clock() * 1000) - made.at_ms < ABANDONED_MS
        return "waits" if is_under_way else "unsolved"


def key_of(row: TriedRow) -> ErrorKey:
    """Return the key of a row that a try wants to solve."""
    return ErrorKey(row.node, row.file, row.position)


def solve(store: ObjectStore, errors: ErrorTable, rows: Sequence[TriedRow]) -> None:
    """Remove rows, with their bytes. Of an overflow row, the records that are not solved get an object and a row of
    their own before."""
    for row in rows:
        if row.left and row.raw_object is not None:
            with suppress(NotFoundError):  # another process has done this
                records = errors.overflow(ErrorRow(key_of(row), 0, "", raw_object=row.raw_object))
                errors.put_overflow(records.take(pa.array(row.left)), row.node)
    errors.remove([key_of(row) for row in rows])
    for row in rows:
        if row.raw_object is not None:
            store.delete(row.raw_object)


def waiting(store: ObjectStore) -> dict[ErrorKey, int]:
    """List the rows that wait for late files, with the number of their records that do."""
    return {key_of(row): row.records for made, _ in read_tries(store) for row in made.rows}
