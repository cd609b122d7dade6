"""The files of suspects in the object store, ``verify/<ms>-<run>/``: what differed at look 1 waits for the next looks.

Tasks of Spark write and read them. The run removes them at its end, and those of runs that were killed long ago.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from ringsync.config import Config
from ringsync.ledger.staging import decode_rows, encode_rows
from ringsync.replica.suspects import BYTES_OF_A_FILE, ROWS_OF_A_FILE, suspects
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of

_FOLDER = "verify/"

_LEFT_MS = 8 * 86_400_000
"""Nobody looks any more at suspects that are so old, ms: no run takes so long."""

BYTES_TOGETHER = 8 << 20
"""About how many bytes of suspects, in memory, are looked at together: some thousand rows."""


def folder_of(run: str, began_ms: int) -> str:
    """Return the folder of a run's suspects."""
    return f"{_FOLDER}{began_ms:013}-{run}/"


def tidy(store: ObjectStore, folder: str, now_ms: int) -> None:
    """Remove the suspects of a run that ends, and of those that were killed."""
    for stat in store.list(_FOLDER):
        began = stat.key.removeprefix(_FOLDER).partition("-")[0]
        is_left = began.isdecimal() and int(began) < now_ms - _LEFT_MS
        if is_left or stat.key.startswith(folder):
            store.delete(stat.key)


@dataclass(frozen=True)
class FirstLook:
    """What the first comparison of a table's rows has found.

    :ivar equal: number of rows that are equal; ``others``: of those that are not
    :ivar files: keys of the files with the others
    """

    equal: int
    others: int
    files: list[str]


@dataclass(frozen=True)
class Keep:
    """Keeps rows that differ (:func:`ringsync.replica.compare.compare_rows`).

    :ivar folder: of the run
    :ivar now_s: moment of look 1, s since the epoch
    """

    config: Config
    folder: str
    now_s: int

    def __call__(self, found: pa.RecordBatch) -> list[str]:
        """Return the keys of the files."""
        return put_suspects(store_of(self.config), self.folder, suspects(found, self.now_s))


def put_suspects(store: ObjectStore, folder: str, rows: pa.RecordBatch) -> list[str]:
    """Put suspects, and return the keys of their files, whose names have the bytes of the rows in memory."""
    most = max(1, min(ROWS_OF_A_FILE, BYTES_OF_A_FILE * len(rows) // max(1, rows.nbytes)))
    parts = [rows.slice(start, most) for start in range(0, len(rows), most)]
    keys = [f"{folder}{uuid.uuid4().hex}-{part.nbytes}.arrow" for part in parts]
    for key, part in zip(keys, parts, strict=True):
        store.put(key, encode_rows(part))
    return keys


def get_suspects(store: ObjectStore, keys: Iterable[str]) -> list[pa.RecordBatch]:
    """Read suspects that :func:`put_suspects` has put, those of one moment together."""
    of_moment: dict[int, list[pa.RecordBatch]] = defaultdict(list)
    for key in keys:
        rows = decode_rows(store.get(key))
        of_moment[rows["now_s"][0].as_py()].append(rows)
    return [pa.concat_batches(batches) for batches in of_moment.values()]


def few_together(keys: Iterable[str]) -> list[list[str]]:
    """Group files of suspects that are looked at together: each look reads much of the replica, however few they are.

    :param keys: as :func:`put_suspects` returns them: they have the bytes of the rows
    """
    groups: list[list[str]] = []
    room = 0
    for key in keys:
        size = int(key.rpartition("-")[2].removesuffix(".arrow"))
        if not groups or size > room:
            groups.append([])
            room = BYTES_TOGETHER
        groups[-1].append(key)
        room -= size
    return groups
