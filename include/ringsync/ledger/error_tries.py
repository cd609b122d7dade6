"""Tries to publish records that could not be decoded before: ``errors/retry/<id>.json``.

A try says which rows of ``processor_error`` wait for which files of late rows. It is put before its files
(``is_put`` false), and once more when all of them are there (true).

That a file is gone says nothing: somebody may have removed it. So ``out_of_sequence`` puts a mark
``errors/taken/<id>/<table id>`` before it removes the file: its rows are published, or their table is gone. A mark goes
after its try. Without a mark, the digests of the rows are proof, while these are kept.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from ringsync.changes.digest import DIGEST_BYTES
from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.ledger.passes import LATE, Digests, are_published, digest_halves, get_pass, pass_numbers, read_digests
from ringsync.ledger.staging import Bucket, late_key
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    ObjectStore,
    VersionMismatchError,
    list_named,
)

FileOutcome = Literal["published", "of_dropped_tables"]
"""What became of a file of late rows."""

TAKEN = "errors/taken/"
"""Folder of the marks."""

_FOLDER, _TRY = "errors/retry/", r"[^/. ]+\.json"
_TRIED_KEY = re.compile(r".*/([^/]+)/errors-([^/]+)\.arrow")
_PASSES, _FILES = 4096, 256
"""Passes, and files of digests, that are kept in memory."""


@dataclass(frozen=True)
class TriedFile:
    """A file of late rows that a try has put, or wants to put.

    :ivar key: key of the file
    :ivar behind: number of the table's last pass when its digests were looked at; 0: there was none
    :ivar digests: 16 bytes for each row, as base64
    :ivar write_times_ms: int64 for each row, as base64
    """

    key: str
    table_id: str
    behind: int
    digests: str
    write_times_ms: str

    @staticmethod
    def of(key: str, table_id: str, behind: int, rows: pa.RecordBatch) -> TriedFile:
        """Describe the file that is to hold these change rows."""
        halves, times = digest_halves(rows["digest"]), _times_ms(rows)
        return TriedFile(key, table_id, behind, _text(halves.tobytes()), _text(times.tobytes()))

    @property
    def halves(self) -> Digests:
        """The digests as numbers."""
        return np.frombuffer(base64.b64decode(self.digests), np.uint64).reshape(-1, DIGEST_BYTES // 8)

    @property
    def times_ms(self) -> Integers:
        """The write times, ms since the epoch."""
        return np.frombuffer(base64.b64decode(self.write_times_ms), np.int64)


@dataclass(frozen=True)
class TriedRow:
    """A row of ``processor_error`` that a try wants to solve.

    :ivar raw_object: key of the object with its bytes; None: the row has them
    :ivar records: number of its records whose rows wait
    :ivar files: places in :attr:`Try.files` of the files that it waits for
    :ivar left: of an overflow row: places of the records in its object that are not solved, and stay
    """

    node: str
    file: str
    position: int
    raw_object: str | None
    records: int
    files: tuple[int, ...]
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Try:
    """A try.

    :ivar id: its name
    :ivar at_ms: when it was begun, ms since the epoch
    :ivar is_put: whether all its files have been put
    """

    id: str
    at_ms: int
    is_put: bool
    rows: tuple[TriedRow, ...]
    files: tuple[TriedFile, ...]

    @property
    def key(self) -> str:
        """Key of its object."""
        return f"{_FOLDER}{self.id}.json"


def put_try(store: ObjectStore, made: Try, version: str | None = None) -> str | None:
    """Put a try, a new one or in place of an earlier version.

    :param version: version of the object to replace; None: it is new
    :returns: version of the object; None: another process has changed or removed it
    """
    data = json.dumps(asdict(made)).encode()
    try:
        stat = store.put(made.key, data, if_version=version) if version else store.put(made.key, data, if_absent=True)
    except (VersionMismatchError, AlreadyExistsError):
        return None
    return stat.version


def read_tries(store: ObjectStore) -> list[tuple[Try, str]]:
    """Read all tries with the versions of their objects, the oldest first.

    :raises ChecksumError: one cannot be read; the message says what to do
    """
    found = []
    for stat in list_named(store, _FOLDER, _TRY):
        with suppress(NotFoundError):  # it was solved meanwhile
            found.append((_read(store, stat.key), stat.version))
    return sorted(found, key=lambda one: (one[0].at_ms, one[0].id))


def _read(store: ObjectStore, key: str) -> Try:
    data = store.get(key)
    try:
        document = json.loads(data)
        rows = (
            TriedRow(**{**row, "files": tuple(row["files"]), "left": tuple(row["left"])}) for row in document["rows"]
        )
        files = (TriedFile(**file) for file in document["files"])
        return Try(document["id"], document["at_ms"], document["is_put"], tuple(rows), tuple(files))
    except (ValueError, KeyError, TypeError) as error:
        raise ChecksumError(
            f"{store.uri(key)} is no try ({type(error).__name__}: {error}): remove it, and run cdcservice errors retry "
            "again. Rows that were published are recognised while sync.digest_retention_h lasts"
        ) from error


def tried_key(table_id: str, try_id: str) -> str:
    """Return the key of the file of late rows that a try puts for a table."""
    return late_key(table_id, f"errors-{try_id}")


def mark_taken(store: ObjectStore, key: str, outcome: FileOutcome) -> None:
    """Record what has become of a file of late rows, before it is removed. What was recorded first stays. Only files
    of tries are recorded: nobody asks about others.

    :param key: key of the file
    """
    if (mark := _mark_of(key)) is not None:
        with suppress(AlreadyExistsError):
            store.put(mark, outcome.encode(), if_absent=True)


def taken(store: ObjectStore, key: str) -> FileOutcome | None:
    """Return what has become of a try's file of late rows; None: it is not recorded."""
    mark = _mark_of(key)
    try:
        said = store.get(mark).decode() if mark is not None else ""
    except NotFoundError:
        return None
    return next((outcome for outcome in get_args(FileOutcome) if outcome == said), None)


def forget_taken(store: ObjectStore) -> None:
    """Remove the marks of tries that are gone. A mark's try was there before the mark, and no id is used twice."""
    if marks := [stat.key for stat in store.list(TAKEN)]:
        tries = {stat.key for stat in store.list(_FOLDER)}
        for mark in marks:
            if f"{_FOLDER}{mark.removeprefix(TAKEN).partition('/')[0]}.json" not in tries:
                store.delete(mark)


def _mark_of(key: str) -> str | None:
    """Return the key of the mark of a file of late rows; None: no try has put it."""
    match = _TRIED_KEY.fullmatch(key)
    return f"{TAKEN}{match[2]}/{match[1]}" if match else None


class PublishedRows:
    """What passes have published, as far as their digests are kept. Passes never change, so they are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pass = lru_cache(maxsize=_PASSES)(lambda table_id, number: get_pass(store, table_id, number))
        self._digests = lru_cache(maxsize=_FILES)(lambda key: read_digests(store, key))

    def among(self, table_id: str, rows: pa.RecordBatch) -> tuple[Mask, int]:
        """Tell which change rows of a table were published, and the number of the last pass that was looked at."""
        numbers = pass_numbers(self._store, table_id)
        return self._look(table_id, digest_halves(rows["digest"]), _times_ms(rows), numbers), max(numbers, default=0)

    def has_all(self, file: TriedFile) -> bool:
        """Tell whether passes have published all rows of a file, since it was tried."""
        numbers = [number for number in pass_numbers(self._store, file.table_id) if number > file.behind]
        return bool(self._look(file.table_id, file.halves, file.times_ms, numbers).all())

    def _look(self, table_id: str, halves: Digests, times_ms: Integers, numbers: Sequence[int]) -> Mask:
        ordered, found = np.sort(times_ms), np.zeros(len(halves), np.bool_)
        for number in reversed(numbers):
            if found.all():
                break
            with suppress(NotFoundError):  # the pass was forgotten just now
                digests = self._pass(table_id, number).digests
                keys = [key for place, keys in digests.items() if _may_have(place, ordered) for key in keys]
                found |= are_published(halves, map(self._digests, keys))
        return found


def _may_have(place: str, ordered: Integers) -> bool:
    """Tell whether a pass keeps the digests of rows with these write times (ms, sorted) in this place."""
    if place == LATE:
        return True
    bucket = Bucket.parse(place)
    first, last = np.searchsorted(ordered, [bucket.start, bucket.end], side="left")
    return bool(last > first)


def _times_ms(rows: pa.RecordBatch) -> Integers:
    return integers(rows["write_time"]) // 1000


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
