"""Memory that the kernels of the CDC log share: their input, and what they remember within a log row.

The kernels get one address ``m``, of int64[WORDS]; the constants below are byte offsets of its words. What they write
is the output of the kernels of rows (:mod:`ringsync.formats.rows.state`), whose address is the word ``OUTPUT``.

The cells of a log row stand in a table of two words per column of the result: address, and length (-1: null). There are
two such tables, since the deletion of a range is two log rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ringsync.changes.columns import columns_of
from ringsync.changes.digest import column_hashes
from ringsync.compiled.arrow import Integers
from ringsync.compiled.memory import PADDING, address
from ringsync.cql.natives import NATIVES
from ringsync.cql.types import CqlType, Native, VectorType, stored_length, types_inside
from ringsync.formats.rows.state import FULL, LONGEST_KEY, Output
from ringsync.scylla.log_schema import FIELDS, METADATA, LogTable

(
    OUTPUT,
    COLUMNS,
    WIDTHS,
    KEY,
    KEYS,
    CLUSTERING,
    CLUSTERINGS,
    VALUES,
    VALUES_END,
    HAS_STATIC,
    END_OF_BATCH_COLUMN,
    TABLE_ID,
    KEY_ROOM,
    CURSORS_OF_GROUP,
    CURSORS_OF_ROW,
    CELLS,
    START,
    TIME,
    LOCAL,
    TTL,
    CULPRIT,
    READ_AT,
    LOG_TTL,
    GROUPS,
    PREFIX,
    PREFIX_LENGTHS,
    PREFIX_BYTES,
    DROPPED_UNTIL,
) = range(0, 28 * 8, 8)
"""``COLUMNS``: number of columns of the result; ``WIDTHS``: address of the bytes that a value of each column has, 0:
they differ; ``KEY``, ``CLUSTERING``: first column of the partition key and of the clustering, then their numbers;
``VALUES``: address of the descriptions of static and regular columns, then their end; ``KEY_ROOM``: address of room for
a partition key; ``CELLS``: address of the log row's cells; ``START``: of those of the last range's start; ``TIME``
(µs), ``LOCAL`` (the same in s), ``TTL`` (s, 0: none): those of the log row; ``CULPRIT``: the column because of which a
log row failed; ``READ_AT``: when the log row's page was asked for (s); ``LOG_TTL``: largest TTL of log rows (s;
negative: for ever); ``GROUPS``: number of its groups;
``PREFIX``: how many columns each row mostly begins with that have one length; ``PREFIX_LENGTHS``: address of these
lengths, and ``PREFIX_BYTES``: their bytes with those of the lengths; ``DROPPED_UNTIL``: the log may have lost what
it had of a column until then (µs), since that was dropped."""
WORDS = 28

STREAM_COLUMN, TIME_COLUMN, NUMBER_COLUMN, OPERATION_COLUMN, TTL_COLUMN, REMAINING_COLUMN = range(6)
"""Places of the metadata in the result."""
_CLOCKS_US = 10_000_000
"""So much later than its drop may a coordinator have written a column, by its clock and for want of the new schema."""
_METADATA_LENGTHS = (16, 16, 4, 1, -1, 4)
"""Lengths that they mostly have: no TTL, and the log has one."""
CELL_BYTES = 16

VALUE_PLACE, VALUE_FORM, VALUE_IS_STATIC, VALUE_FIELDS, VALUE_PATHS, VALUE_NUMBER, VALUE_HASH = range(0, 56, 8)
VALUE_BYTES = 56
"""Description of a static or regular column: place of its value in the result, form, whether it is static, number of
fields, address of their paths, number among ``columns_of``, and the hash that stands for it in digests."""

CHANGED, IMAGE, EMPTY, HELD = range(FULL + 1, FULL + 5)
"""Outcomes of log rows: it became a change row or is a part of one; it is a pre- or postimage; an update without any
content, all of whose columns may have been dropped; its write is not complete. ``FULL``: there was no room."""
(
    UNKNOWN_OPERATION,
    NO_START,
    NO_END,
    NO_KEY,
    LONG_KEY,
    BAD_CLUSTERING,
    MISFIT,
    FOREIGN,
    BAD_TTL,
    CONTRADICTION,
    CONTENT,
    UNSET,
) = range(HELD + 1, HELD + 13)
LAST_OUTCOME = UNSET

REASONS = {
    FULL: "its change row would need more memory than a batch may have",
    UNKNOWN_OPERATION: "its cdc$operation is none that is known: is Scylla newer than this ringsync?",
    NO_START: "the end of a range deletion, and the log row before it is not its start",
    NO_END: "the start of a range deletion, and the log row behind it is not its end",
    NO_KEY: "{column} is null, and it belongs to the partition key",
    LONG_KEY: f"its partition key has more than {LONGEST_KEY} bytes",
    BAD_CLUSTERING: "its clustering columns do not fit its cdc$operation: some are null or set that must not be so",
    MISFIT: "the bytes of {column} do not fit the type {type}: had the table another schema then?",
    FOREIGN: "{column} is set in a row of the other kind: static columns have log rows without clustering",
    BAD_TTL: "its cdc$ttl is no TTL",
    CONTRADICTION: "{column} is set and deleted at once",
    CONTENT: "{column} is set in a deletion",
    UNSET: "it sets nothing: the log had no values then (cdc = {{'delta': 'keys'}}), or not those of all columns; what "
    "it has set is missing until cdcservice verify --repair",
}
"""Explanations for people of what is wrong with a log row; its columns are those of the result."""


@dataclass(frozen=True)
class LogState:
    """The state of the kernels.

    :ivar words: int64[WORDS]
    :ivar kept: arrays that ``words`` points to
    """

    words: Integers
    kept: tuple[npt.NDArray[np.generic], ...]

    @classmethod
    def new(cls, table: LogTable, log_ttl_s: int) -> LogState:
        """Describe a log table to the kernels. The output comes later.

        :param log_ttl_s: largest TTL of its rows, s; negative: they stay for ever
        """
        described, kept = _described(table)
        words = described.copy()
        cells = np.empty((2, 2 * len(table.layout)), np.int64)
        room = np.empty(LONGEST_KEY + PADDING, np.uint8)
        cursors = np.empty((2, 8), np.int64)
        given = {
            KEY_ROOM: address(room),
            CURSORS_OF_GROUP: address(cursors[0]),
            CURSORS_OF_ROW: address(cursors[1]),
            CELLS: address(cells[0]),
            START: address(cells[1]),
            LOG_TTL: log_ttl_s,
        }
        for word, value in given.items():
            words[word // 8] = value
        return cls(words, (*kept, cells, room, cursors))

    def write_to(self, output: Output) -> None:
        """Let the kernels write there, as long as it exists."""
        self.words[OUTPUT // 8] = address(output.state)


@lru_cache(maxsize=64)
def _described(table: LogTable) -> tuple[Integers, tuple[npt.NDArray[np.generic], ...]]:
    """Return the words that are the same for all pages of a table, and what they point to. Nobody may change them."""
    metadata = len(METADATA) + 1 + table.has_end_of_batch
    keys, clusterings = len(table.base.partition_key), len(table.base.clustering)
    widths = np.array([_width(kind) for _, kind in table.layout], np.int64)
    table_id = np.frombuffer(bytes.fromhex(table.base.table_id or "0" * 32), np.uint8).copy()
    values, paths = _values(table, metadata + keys + clusterings)
    prefix = _prefix(table)
    words = np.zeros(WORDS, np.int64)
    given = {
        COLUMNS: len(table.layout),
        WIDTHS: address(widths),
        KEY: metadata,
        KEYS: keys,
        CLUSTERING: metadata + keys,
        CLUSTERINGS: clusterings,
        VALUES: address(values),
        VALUES_END: address(values) + values.nbytes,
        HAS_STATIC: any(column.is_static for column in columns_of(table.base)),
        END_OF_BATCH_COLUMN: metadata - 1 if table.has_end_of_batch else -1,
        TABLE_ID: address(table_id),
        PREFIX: len(prefix),
        PREFIX_LENGTHS: address(prefix),
        PREFIX_BYTES: 4 * len(prefix) + int(np.maximum(prefix, 0).sum()),
        DROPPED_UNTIL: max((one.dropped_at for one in table.base.dropped), default=-_CLOCKS_US) + _CLOCKS_US,
    }
    for word, value in given.items():
        words[word // 8] = value
    return words, (widths, table_id, values, paths, prefix)


def _prefix(table: LogTable) -> Integers:
    """Return the lengths that most rows' first columns have: metadata and keys, up to one without a fixed length."""
    lengths = [*_METADATA_LENGTHS, *[1] * table.has_end_of_batch]
    for key in table.base.key_columns:
        if not (width := _width(key.type)):
            break
        lengths.append(width)
    return np.array(lengths, np.int64)


def _values(table: LogTable, place: int) -> tuple[Integers, npt.NDArray[np.uint8]]:
    """Describe the static and regular columns, of which the first is at this place of the result."""
    hashes = column_hashes([column.name for column in table.columns])
    fields = [len(types_inside(column.type)) if column.form == FIELDS else 0 for column in table.columns]
    paths = np.arange(max(fields, default=0) + PADDING, dtype=">i2").view(np.uint8)
    values = np.zeros((len(table.columns), VALUE_BYTES // 8), np.int64)
    for entry, column, count in zip(values, table.columns, fields, strict=True):
        is_static = int(column.is_static)
        entry[:] = (place, column.form, is_static, count, address(paths), column.number, hashes[column.name])
        place += len(column.log_names)
    return values, paths


def _width(kind: CqlType) -> int:
    """Return the bytes of each value of a type; 0: they differ. Empty values are of no bytes whatever the type."""
    match kind:
        case Native(name):
            return NATIVES[name].width
        case VectorType():
            return max(stored_length(kind), 0)
    return 0
