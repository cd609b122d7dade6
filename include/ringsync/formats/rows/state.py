"""Memory that the kernels of rows share: their input, their state, their output.

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
from ringsync.compiled.arrow import Integers, pooled
from ringsync.compiled.memory import PADDING, address

COLUMNS: list[tuple[str, type[np.generic], int]] = []
"""Arrays that the kernels write: attribute of :class:`Capacity` that gives the length, type of an entry, entries per
unit."""


def _array(room: str, kind: type[np.generic], entries: int = 1) -> int:
    """Declare an array. Return the byte offset of its address in the state."""
    COLUMNS.append((room, kind, entries))
    return 8 * (len(COLUMNS) - 1)


ROW_TABLE_ID = _array("rows", np.uint8, 16)
ROW_KIND = _array("rows", np.int8)
ROW_TOKEN = _array("rows", np.int64)
ROW_POSITION = _array("rows", np.int64)
ROW_WRITE_TIME = _array("rows", np.int64)
ROW_LIVENESS = _array("rows", np.int8)
ROW_LIVENESS_TIMESTAMP = _array("rows", np.int64)
ROW_LIVENESS_TTL = _array("rows", np.int32)
ROW_LIVENESS_EXPIRES = _array("rows", np.int64)
ROW_DELETION = _array("rows", np.int8)
ROW_DELETION_TIMESTAMP = _array("rows", np.int64)
ROW_DELETION_LOCAL = _array("rows", np.int64)
ROW_DIGEST = _array("rows", np.uint8, DIGEST_BYTES)
KEY_ENDS = _array("rows", np.int32)
CLUSTERING_ENDS = _array("rows", np.int32)
RANGE_ENDS = _array("rows", np.int32)
ROW_CELLS = _array("rows", np.int32)
ROW_COMPLEX = _array("rows", np.int32)
KEY_LENGTHS = _array("rows", np.int32)
CELL_COLUMN = _array("cells", np.int32)
CELL_HAS_PATH = _array("cells", np.uint8)
CELL_TIMESTAMP = _array("cells", np.int64)
CELL_TTL = _array("cells", np.int32)
CELL_LOCAL = _array("cells", np.int64)
CELL_KIND = _array("cells", np.int8)
PATH_ENDS = _array("cells", np.int32)
VALUE_ENDS = _array("cells", np.int32)
VALUE_LENGTHS = _array("cells", np.int32)
COMPLEX_COLUMN = _array("complex", np.int32)
COMPLEX_HASH = _array("complex", np.int64)
COMPLEX_TIMESTAMP = _array("complex", np.int64)
COMPLEX_LOCAL = _array("complex", np.int64)
KEYS = _array("bytes", np.uint8)
CLUSTERINGS = _array("bytes", np.uint8)
RANGES = _array("bytes", np.uint8)
PATHS = _array("bytes", np.uint8)
VALUES = _array("bytes", np.uint8)
SCRATCH = _array("scratch_bytes", np.uint8)
_NOT_PLAIN = (PATHS, VALUES)
"""Arrays that plain rows do not have."""
_ARROW_OFFSETS = (KEY_ENDS, CLUSTERING_ENDS, RANGE_ENDS, ROW_CELLS, ROW_COMPLEX, PATH_ENDS, VALUE_ENDS)
"""Arrays with one entry more than rows or cells. The kernels write no nulls, such as the TTL of a cell without one."""

_FIRST_ROOM = 8 * len(COLUMNS)
CURSOR_BYTES = 64
"""Bytes of the cursors. Their capacities stand before them, their values at the start of the record behind them."""
CURSORS = (_FIRST_ROOM + CURSOR_BYTES, _FIRST_ROOM + 2 * CURSOR_BYTES)
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
_FIRST_INPUT = CURSORS[1] + CURSOR_BYTES
_INPUT_WORDS = 43
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
    OPEN_END,
    OPEN_SIZE,
    OPEN_INCLUSIVE,
    OPEN_TIMESTAMP,
    OPEN_LOCAL,
    LAST_CLUSTERING,
    LAST_CLUSTERING_END,
    HAS_SIZES,
    BYTES_MISSING,
    FIRST_CELL,
    FIRST_COMPLEX,
    SCRATCH_END,
    IS_PLAIN,
    KEY_PLACE,
) = range(_FIRST_INPUT, _FIRST_INPUT + _INPUT_WORDS * 8, 8)
WORDS = _FIRST_INPUT // 8 + _INPUT_WORDS
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

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch."""
        return self.bytes + _HEAD


_LINE = 64


@cache
def _layout(capacity: Capacity, plain: bool) -> tuple[list[tuple[int, int, type[np.generic]]], int]:
    """Place the arrays in one block of memory. Return first byte, bytes and type of each, and the block's size."""
    places = []
    place = 0
    for word, (room, kind, entries) in enumerate(COLUMNS):
        count = 0 if plain and 8 * word in _NOT_PLAIN else getattr(capacity, room) * entries
        length = (count + PADDING) * np.dtype(kind).itemsize
        places.append((place, length, kind))
        # An odd number of cache lines, so that equal places of arrays do not share the same few sets of a cache.
        place += (-(-length // _LINE) | 1) * _LINE
    return places, place


@dataclass(frozen=True)
class Output:
    """The kernels' state and the arrays that they fill.

    :ivar state: int64[WORDS]
    :ivar arrays: arrays by the byte offsets of their addresses in the state: ``ROW_TABLE_ID`` …
    :ivar kept: arrays that ``state`` points to
    """

    state: Integers
    arrays: dict[int, npt.NDArray[Any]] = field(repr=False)
    kept: tuple[npt.NDArray[Any], ...] = field(repr=False)

    @classmethod
    def new(
        cls, buffer: npt.NDArray[np.uint8], tables: LoggedTables, capacity: Capacity, *, plain: bool = False
    ) -> Output:
        """Allocate room for a batch.

        :param buffer: bytes of the records, followed by spare bytes
        :param plain: whether values stay in the buffer, and no cell has a path
        """
        places, size = _layout(capacity, plain)
        block = pooled(size, np.uint8)
        state = np.zeros(WORDS, np.int64)
        state[: len(COLUMNS)] = address(block)
        arrays = {}
        for word, (place, length, kind) in enumerate(places):
            arrays[8 * word] = block[place : place + length].view(kind)
            state[word] += place
        for starts in _ARROW_OFFSETS:
            arrays[starts][0] = 0
        if not plain:
            # The kernels store only ones.
            arrays[CELL_HAS_PATH].fill(0)
        state[IS_PLAIN // 8] = plain
        rooms = [capacity.rows, capacity.cells, capacity.complex, *5 * [capacity.bytes]]
        state[_FIRST_ROOM // 8 : CURSORS[0] // 8] = rooms
        state[SCRATCH_END // 8] = state[SCRATCH // 8] + capacity.scratch_bytes - HEAD_ROOM
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


FULL, UNKNOWN_TABLE, UNKNOWN_COLUMN, MALFORMED, TOO_LARGE, DECODED, CUT, SHADOWABLE = range(1, 9)
"""Outcomes of a record, or of a row of an SSTable. ``FULL``: it does not fit into the rest of the batch and is decoded
again in the next one; ``TOO_LARGE``: it does not fit even into the largest batch; ``CUT``: a row of an SSTable that
goes on behind the bytes that were read; ``SHADOWABLE``: a row of a materialised view: other rules hold there."""

LAST_CODE = SHADOWABLE

REASONS = {
    UNKNOWN_TABLE: "of a table that is not in the schema",
    UNKNOWN_COLUMN: "names a column that its table does not have in the schema",
    TOO_LARGE: "its change rows would need more memory than a batch may have",
    MALFORMED: "cannot be decoded by the schema, though its checksum is right: had the table another schema then?",
}
"""Explanations for people of what is wrong with a record."""
