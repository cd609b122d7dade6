"""Rows of tables whose columns have one cell each, as the decoder of SSTables has written them.

Most tables are like that, and most rows need no more than to be chosen. So they stay where they are: values in the
bytes of the file, numbers as narrow as they were written. They have no digests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringsync.changes.batch import ChangeRows, Deletion, Liveness
from ringsync.changes.columns import columns_of
from ringsync.changes.flat import FlatCells, FlatDeletions
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, TOMBSTONE
from ringsync.compiled.arrow import Integers, Places32
from ringsync.compiled.memory import PADDING
from ringsync.cql.cells import Cells, cells_of_values, no_cells
from ringsync.schema.table import TableSchema

Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class PlainRows:
    """Rows, and deletions of partitions and ranges, in the order of an SSTable.

    :ivar table_id: 16 bytes; ``file``: path of the SSTable
    :ivar token: int64[rows], as are all times: µs, and s since the epoch for local times
    :ivar liveness: 0 none, 1 without TTL, 2 with it; the next three columns are undefined where it says so
    :ivar deletion: whether the row has one; the next two columns likewise
    :ivar cell_starts: int32[rows + 1]: number of the first cell of each row, and of the one behind the last
    :ivar column: number of each cell's column, ascending in a row; this and the columns below have all cells of a batch
    :ivar value: undefined for tombstones
    """

    table_id: bytes
    file: str
    token: Integers
    kind: Codes
    partition_key: Cells
    clustering: Cells
    range_end: Cells
    write_time: Integers
    position: Integers
    liveness: Codes
    liveness_timestamp: Integers
    liveness_ttl: Places32
    liveness_expires: Integers
    deletion: Codes
    deletion_timestamp: Integers
    deletion_local: Integers
    cell_starts: Places32
    column: Places32
    timestamp: Integers
    ttl: Places32
    local: Integers
    cell_kind: Codes
    value: Cells

    def __len__(self) -> int:
        return len(self.token)

    def part(self, first: int, end: int) -> PlainRows:
        """Return the rows from ``first`` on, and before ``end``. Nothing is copied."""
        if first == 0 and end == len(self):
            return self
        rows = {name: getattr(self, name)[first:end] for name in _ROW_ARRAYS}
        keys = {name: getattr(self, name).part(first, end) for name in ("partition_key", "clustering", "range_end")}
        return replace(self, **rows, **keys, cell_starts=self.cell_starts[first : end + 1])

    def copied(self) -> PlainRows:
        """Return the same rows in memory of their size; the bytes of the values stay where they are."""
        arrays: dict[str, Any] = {
            name: column.copy() for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        keys = {name: _copied(getattr(self, name)) for name in ("partition_key", "clustering", "range_end")}
        value = Cells(self.value.buffer, self.value.offsets.copy(), self.value.lengths.copy())
        return replace(self, **(arrays | keys), value=value)

    def change_rows(self) -> ChangeRows:
        """Return the same as change rows, with digests of zeros."""
        count, zeros = len(self), np.zeros((len(self), 2), np.uint64)
        lives, deleted = self.liveness > 0, self.deletion > 0
        first, end = int(self.cell_starts[0]), int(self.cell_starts[-1])
        of_batch = slice(first, end)
        kind = self.cell_kind[of_batch].astype(np.int64)
        values = self.value.part(first, end)
        nothing = np.zeros(0, np.int64)
        return ChangeRows(
            np.broadcast_to(np.frombuffer(self.table_id, np.int64), (count, 2)),
            np.zeros(count, np.int64),
            self.token,
            self.partition_key,
            self.kind.astype(np.int64),
            self.clustering,
            self.range_end,
            self.write_time,
            Liveness(
                np.where(lives, self.liveness_timestamp, NEVER),
                np.where(self.liveness == 2, self.liveness_ttl.astype(np.int64), NO_TTL),
                np.where(self.liveness == 2, self.liveness_expires, NO_EXPIRY),
            ),
            Deletion(np.where(deleted, self.deletion_timestamp, NEVER), np.where(deleted, self.deletion_local, 0)),
            FlatCells(
                np.repeat(np.arange(count), np.diff(self.cell_starts)),
                self.column[of_batch].astype(np.int64),
                self.timestamp[of_batch],
                np.where(kind == LIVE, NO_EXPIRY, self.local[of_batch]),
                np.where(kind == EXPIRING, self.ttl[of_batch].astype(np.int64), NO_TTL),
                kind,
                no_cells(end - first),
                values.without(kind == TOMBSTONE),
            ),
            FlatDeletions(nothing, nothing, nothing, nothing),
            zeros,
            cells_of_values([self.file.encode()]).take(np.zeros(count, np.intp)),
            self.position,
        )


_ROW_ARRAYS = (
    *("token", "kind", "write_time", "position", "liveness", "liveness_timestamp", "liveness_ttl"),
    *("liveness_expires", "deletion", "deletion_timestamp", "deletion_local"),
)


def _copied(cells: Cells) -> Cells:
    """Copy values, which begin at the start of their buffer."""
    end = int((cells.offsets + cells.lengths.clip(0)).max(initial=0))
    return Cells(cells.buffer[: end + PADDING].copy(), cells.offsets.copy(), cells.lengths.copy())


def is_plain(table: TableSchema) -> bool:
    """Tell whether each column of a table has one cell: no static ones, collections, counters, or dropped ones."""
    return not table.dropped and not any(
        column.is_static or column.is_multicell or column.is_counter for column in columns_of(table)
    )
