"""Memory that the mutation kernels share: where they read, what they remember, where they write.

One address is their argument: of int64[WORDS], whose words lie at the byte offsets below. The first block is what
:func:`Output.new` fills in, then come cursors, which go back when a record cannot be decoded or does not fit, then what
is remembered within an update and a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.changes.columns import COLUMN_WORDS, TABLE_WORDS, LoggedTables
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.compiled.arrow import pooled
from ringsync.compiled.memory import PADDING, address

COLUMNS: tuple[tuple[str, str, type[np.generic], int], ...] = (
    ("row_table_id", "rows", np.uint8, 16),
    ("row_kind", "rows", np.int8, 1),
    ("row_token", "rows", np.int64, 1),
    ("row_position", "rows", np.int64, 1),
    ("row_write_time", "rows", np.int64, 1),
    ("row_liveness", "rows", np.int8, 1),
    ("row_liveness_timestamp", "rows", np.int64, 1),
    ("row_liveness_ttl", "rows", np.int32, 1),
    ("row_liveness_expires", "rows", np.int64, 1),
    ("row_deletion", "rows", np.int8, 1),
    ("row_deletion_timestamp", "rows", np.int64, 1),
    ("row_deletion_local", "rows", np.int64, 1),
    ("row_digest", "rows", np.uint8, DIGEST_BYTES),
    ("key_ends", "rows", np.int32, 1),
    ("clustering_ends", "rows", np.int32, 1),
    ("range_ends", "rows", np.int32, 1),
    ("row_cells", "rows", np.int32, 1),
    ("row_complex", "rows", np.int32, 1),
    ("cell_column", "cells", np.int32, 1),
    ("cell_has_path", "cells", np.uint8, 1),
    ("cell_timestamp", "cells", np.int64, 1),
    ("cell_ttl", "cells", np.int32, 1),
    ("cell_local", "cells", np.int64, 1),
    ("cell_kind", "cells", np.int8, 1),
    ("path_ends", "cells", np.int32, 1),
    ("value_ends", "cells", np.int32, 1),
    ("complex_column", "complex", np.int32, 1),
    ("complex_hash", "complex", np.int64, 1),
    ("complex_timestamp", "complex", np.int64, 1),
    ("complex_local", "complex", np.int64, 1),
    ("keys", "key_bytes", np.uint8, 1),
    ("clusterings", "clustering_bytes", np.uint8, 1),
    ("ranges", "range_bytes", np.uint8, 1),
    ("paths", "path_bytes", np.uint8, 1),
    ("values", "value_bytes", np.uint8, 1),
    ("scratch", "scratch_bytes", np.uint8, 1),
)
"""Arrays that the kernels write: name, the capacity that says how long it is, type of an entry, entries each.
Those named ``…_ends``, ``row_cells`` and ``row_complex`` have one entry more, since they are Arrow's offsets. What is
null (``cell_ttl`` of a cell without TTL, …) is not written."""

CAPACITIES = (
    "rows",
    "cells",
    "complex",
    "key_bytes",
    "clustering_bytes",
    "range_bytes",
    "path_bytes",
    "value_bytes",
    "scratch_bytes",
)
"""How much there is room for; the kernels' cursors have the same names, but for the scratch."""

(
    ROW_TABLE_ID,
    ROW_KIND,
    ROW_TOKEN,
    ROW_POSITION,
    ROW_WRITE_TIME,
    ROW_LIVENESS,
    ROW_LIVENESS_TIMESTAMP,
    ROW_LIVENESS_TTL,
    ROW_LIVENESS_EXPIRES,
    ROW_DELETION,
    ROW_DELETION_TIMESTAMP,
    ROW_DELETION_LOCAL,
    ROW_DIGEST,
    KEY_ENDS,
    CLUSTERING_ENDS,
    RANGE_ENDS,
    ROW_CELLS,
    ROW_COMPLEX,
    CELL_COLUMN,
    CELL_HAS_PATH,
    CELL_TIMESTAMP,
    CELL_TTL,
    CELL_LOCAL,
    CELL_KIND,
    PATH_ENDS,
    VALUE_ENDS,
    COMPLEX_COLUMN,
    COMPLEX_HASH,
    COMPLEX_TIMESTAMP,
    COMPLEX_LOCAL,
    KEYS,
    CLUSTERINGS,
    RANGES,
    PATHS,
    VALUES,
    SCRATCH,
) = range(0, 8 * len(COLUMNS), 8)
_FIRST_ROOM = 8 * len(COLUMNS)
(
    ROOM_ROWS,
    ROOM_CELLS,
    ROOM_COMPLEX,
    ROOM_KEY_BYTES,
    ROOM_CLUSTERING_BYTES,
    ROOM_RANGE_BYTES,
    ROOM_PATH_BYTES,
    ROOM_VALUE_BYTES,
    ROOM_SCRATCH,
) = range(_FIRST_ROOM, _FIRST_ROOM + 8 * len(CAPACITIES), 8)
_FIRST_CURSOR = _FIRST_ROOM + 8 * len(CAPACITIES)
CURSORS = (_FIRST_CURSOR, _FIRST_CURSOR + 64)
(
    ROWS,
    CELLS,
    COMPLEX,
    KEY_BYTES,
    CLUSTERING_BYTES,
    RANGE_BYTES,
    PATH_BYTES,
    VALUE_BYTES,
) = range(*CURSORS, 8)
SAVED = CURSORS[1]
"""A copy of the cursors as of the record's begin."""
_FIRST_INPUT = SAVED + 64
(
    BASE,
    DIRECTORY,
    LOOKUP,
    LOOKUP_MASK,
    UNKNOWN_ID,
    SUBSET,
    STATIC_MAP,
    STATIC_COUNT,
    STATIC_NAMES,
    STATIC_BYTES,
    REGULAR_MAP,
    REGULAR_COUNT,
    REGULAR_NAMES,
    REGULAR_BYTES,
    NAMES_TABLE,
    POSITION,
    TABLE,
    KEY,
    KEY_LENGTH,
    TOKEN,
    HEAD_END,
    MIN_TIMESTAMP,
    MIN_LOCAL,
    MIN_TTL,
    ROW_TIMESTAMP,
    ROW_TTL,
    ROW_EXPIRES,
    WRITE_TIME,
    OPEN,
    OPEN_SIZE,
    OPEN_INCLUSIVE,
    FIRST_CELL,
    FIRST_COMPLEX,
    SCRATCH_END,
) = range(_FIRST_INPUT, _FIRST_INPUT + 34 * 8, 8)
WORDS = (_FIRST_INPUT + 34 * 8) // 8
HEAD_ROOM = 128
"""Bytes of the scratch behind ``SCRATCH_END``: more than a digest has between clustering and cells."""

TABLE_BYTES, COLUMN_BYTES = 8 * TABLE_WORDS, 8 * COLUMN_WORDS
TABLE_CLUSTERING, TABLE_CLUSTERING_LENGTHS, TABLE_STATIC, TABLE_REGULAR = 16, 24, 32, 48
COLUMN_NAME, COLUMN_NAME_LENGTH, COLUMN_NUMBER, COLUMN_FIXED, COLUMN_IS_COMPLEX, COLUMN_HASH = range(0, 48, 8)
"""Where in the descriptions of tables and columns what lies (:mod:`ringsync.changes.columns`)."""


LONGEST_KEY = 65535
"""Bytes of a partition key."""
_HEAD = LONGEST_KEY + 256
"""More than the digest's bytes have before the clustering, with the spare ones."""


@dataclass(frozen=True)
class Capacity:
    """How much change rows a batch has room for: rows, cells, complex deletions, and bytes of each kind.

    Records are given to the kernels for at most so many bytes at once, so their values and paths always fit.
    """

    rows: int = 2**15
    cells: int = 2**18
    complex: int = 2**15
    bytes: int = 2**23

    @property
    def is_largest(self) -> bool:
        """Whether Arrow's offsets allow for no more."""
        return self.bytes >= 2**30

    def doubled(self) -> Capacity:
        """Twice the room, for a record that does not fit."""
        return Capacity(2 * self.rows, 2 * self.cells, 2 * self.complex, 2 * self.bytes)

    def of(self, name: str) -> int:
        """By the names of ``CAPACITIES``."""
        several = {"rows": self.rows, "cells": self.cells, "complex": self.complex}
        return several.get(name, self.bytes + (_HEAD if name == "scratch_bytes" else 0))


_STARTS = [name for name, *_ in COLUMNS if name.endswith("_ends") or name in ("row_cells", "row_complex")]
_LINE = 64


@cache
def _layout(capacity: Capacity) -> tuple[list[tuple[str, int, int, type[np.generic]]], int]:
    """Where each array lies in one block of memory (name, first byte, bytes, type), and the bytes of the block."""
    places = []
    place = 0
    for name, room, kind, each in COLUMNS:
        length = (capacity.of(room) * each + PADDING) * np.dtype(kind).itemsize
        places.append((name, place, length, kind))
        # An odd number of cache lines: places of arrays of one kind must not fall into the same few sets of a cache.
        place += (-(-length // _LINE) | 1) * _LINE
    return places, place


@dataclass(frozen=True)
class Output:
    """The kernels' state and the arrays that they fill.

    :ivar state: int64[WORDS]
    :ivar arrays: by the names of ``COLUMNS``
    """

    state: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[Any]] = field(repr=False)
    kept: tuple[npt.NDArray[Any], ...] = field(repr=False)

    @classmethod
    def new(cls, buffer: npt.NDArray[np.uint8], tables: LoggedTables, capacity: Capacity) -> Output:
        """Room for a batch.

        :param buffer: where the records lie; with spare bytes
        """
        places, size = _layout(capacity)
        block = pooled(size, np.uint8)
        state = np.zeros(WORDS, np.int64)
        state[: len(COLUMNS)] = address(block)
        arrays = {}
        for word, (name, place, length, kind) in enumerate(places):
            arrays[name] = block[place : place + length].view(kind)
            state[word] += place
        for name in _STARTS:
            arrays[name][0] = 0
        # Kernels store what is not zero.
        arrays["cell_has_path"].fill(0)
        state[_FIRST_ROOM // 8 : _FIRST_CURSOR // 8] = [capacity.of(name) for name in CAPACITIES]
        state[SCRATCH_END // 8] = state[SCRATCH // 8] + capacity.of("scratch_bytes") - HEAD_ROOM
        most = tables.most_columns
        kept = (np.zeros((2, most + 1), np.int64), np.zeros(most + 1, np.uint8), np.zeros(2, np.int64))
        maps, subset, unknown = kept
        state[BASE // 8] = address(buffer)
        state[DIRECTORY // 8] = address(tables.directory)
        state[LOOKUP // 8], state[LOOKUP_MASK // 8] = address(tables.lookup), len(tables.lookup) - 1
        state[STATIC_MAP // 8], state[REGULAR_MAP // 8] = address(maps[0]), address(maps[1])
        state[SUBSET // 8], state[UNKNOWN_ID // 8] = address(subset), address(unknown)
        state[NAMES_TABLE // 8] = -1
        return cls(state, arrays, kept)

    def count(self, cursor: int) -> int:
        """How far a cursor is."""
        return int(self.state[cursor // 8])


FULL, UNKNOWN_TABLE, UNKNOWN_COLUMN, MALFORMED, TOO_LARGE, DECODED = range(1, 7)
"""``FULL``: it does not fit into what is left of the batch, which is handed on, and the record begun again;
``TOO_LARGE``: it would not fit into the largest one either."""

LAST_CODE = DECODED

REASONS = {
    UNKNOWN_TABLE: "of a table that is not in the schema",
    UNKNOWN_COLUMN: "names a column that its table does not have in the schema",
    TOO_LARGE: "its change rows would need more memory than a batch may have",
    MALFORMED: "cannot be decoded by the schema, though its checksum is right: is the schema of that day?",
}
"""For people: what is wrong with a record."""
