"""Memory that the mutation kernels share: their input, their state, their output.

The kernels get one address, of int64[WORDS]. The constants below are byte offsets of its words. First come addresses
and capacities of the output. Then come cursors, which are set back if a record cannot be decoded or does not fit. Then
come addresses of the input, and values that are remembered within an update or a row.
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
"""Arrays that the kernels write: name, capacity that gives the length, type of an entry, entries per unit. Those named
``…_ends``, ``row_cells`` and ``row_complex`` have one entry more, because they are Arrow's offsets. Nulls (such as
``cell_ttl`` of a cell without TTL) are not written."""

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
"""Names of the capacities. The kernels' cursors have the same names; the scratch has no cursor."""

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
"""A copy of the cursors from the start of the record."""
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
"""Bytes of the scratch after ``SCRATCH_END``: more than a digest has between clustering and cells."""

TABLE_BYTES, COLUMN_BYTES = 8 * TABLE_WORDS, 8 * COLUMN_WORDS
TABLE_CLUSTERING, TABLE_CLUSTERING_LENGTHS, TABLE_STATIC, TABLE_REGULAR = 16, 24, 32, 48
COLUMN_NAME, COLUMN_NAME_LENGTH, COLUMN_NUMBER, COLUMN_FIXED, COLUMN_IS_COMPLEX, COLUMN_HASH = range(0, 48, 8)
"""Byte offsets in the descriptions of tables and columns (:mod:`ringsync.changes.columns`)."""

LONGEST_KEY = 65535
"""Most bytes of a partition key."""
_HEAD = LONGEST_KEY + 256
"""A bound for the digest's bytes before the clustering, spare bytes included."""


@dataclass(frozen=True)
class Capacity:
    """The room of a batch: rows, cells, complex deletions, and bytes of each kind.

    The kernels get records of at most ``bytes`` bytes at once, so values and paths always fit.
    """

    rows: int = 2**15
    cells: int = 2**18
    complex: int = 2**15
    bytes: int = 2**23

    @property
    def is_largest(self) -> bool:
        """Whether Arrow's offsets allow no larger batch."""
        return self.bytes >= 2**30

    def doubled(self) -> Capacity:
        """Return twice the room, for a record that does not fit."""
        return Capacity(2 * self.rows, 2 * self.cells, 2 * self.complex, 2 * self.bytes)

    def of(self, name: str) -> int:
        """Return the capacity with a name of ``CAPACITIES``."""
        several = {"rows": self.rows, "cells": self.cells, "complex": self.complex}
        return several.get(name, self.bytes + (_HEAD if name == "scratch_bytes" else 0))


_STARTS = [name for name, *_ in COLUMNS if name.endswith("_ends") or name in ("row_cells", "row_complex")]
_LINE = 64


@cache
def _layout(capacity: Capacity) -> tuple[list[tuple[str, int, int, type[np.generic]]], int]:
    """Place the arrays in one block of memory. Return name, first byte, bytes, type of each, and the block's size."""
    places = []
    place = 0
    for name, room, kind, entries in COLUMNS:
        length = (capacity.of(room) * entries + PADDING) * np.dtype(kind).itemsize
        places.append((name, place, length, kind))
        # An odd number of cache lines, so that equal places of arrays do not share the same few sets of a cache.
        place += (-(-length // _LINE) | 1) * _LINE
    return places, place


@dataclass(frozen=True)
class Output:
    """The kernels' state and the arrays that they fill.

    :ivar state: int64[WORDS]
    :ivar arrays: arrays by the names of ``COLUMNS``
    :ivar kept: arrays that ``state`` points to
    """

    state: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[Any]] = field(repr=False)
    kept: tuple[npt.NDArray[Any], ...] = field(repr=False)

    @classmethod
    def new(cls, buffer: npt.NDArray[np.uint8], tables: LoggedTables, capacity: Capacity) -> Output:
        """Allocate room for a batch.

        :param buffer: bytes of the records, followed by spare bytes
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
        # The kernels store only ones.
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
        """Return the value of a cursor."""
        return int(self.state[cursor // 8])


FULL, UNKNOWN_TABLE, UNKNOWN_COLUMN, MALFORMED, TOO_LARGE, DECODED = range(1, 7)
"""Outcomes of a record. ``FULL``: it does not fit into the rest of the batch and is decoded again in the next one;
``TOO_LARGE``: it does not fit even into the largest batch."""

LAST_CODE = DECODED

REASONS = {
    UNKNOWN_TABLE: "of a table that is not in the schema",
    UNKNOWN_COLUMN: "names a column that its table does not have in the schema",
    TOO_LARGE: "its change rows would need more memory than a batch may have",
    MALFORMED: "cannot be decoded by the schema, though its checksum is right: is the schema of that day?",
}
"""Explanations for people of what is wrong with a record."""
