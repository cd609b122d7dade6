"""Change rows of one table in NumPy arrays: reconciliation, images, texts and messages work on these.

Arrow is for files and for Spark's tasks (:mod:`ringsync.changes.schema`). It is unpacked once, and packed again at the
end. Bytes are not copied on the way: :class:`Cells` point into the buffers that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes import schema
from ringsync.changes.digest import DIGEST_BYTES
from ringsync.changes.flat import FlatCells, FlatDeletions, joined, of_rows, taken
from ringsync.changes.schema import EXPIRING, LIVE, NEVER, NO_EXPIRY, NO_TTL, ROW, STATIC, UNKNOWN_TTL
from ringsync.compiled.arrow import Integers, Mask, array_of, filled, integers, list_of, rows_of_lists, structs_of
from ringsync.cql.cells import Cells, cells_of, no_cells, raw_values

Digests = npt.NDArray[np.uint64]
"""uint64[digests, 2]: both halves of each digest, its bytes read as native numbers."""


@dataclass(frozen=True)
class Liveness:
    """The liveness of each row.

    :ivar timestamp: µs; NEVER: the row has none
    :ivar ttl: s; NO_TTL, or UNKNOWN_TTL
    :ivar expires_at: s since the epoch, or NO_EXPIRY
    """

    timestamp: Integers
    ttl: Integers
    expires_at: Integers

    @property
    def there(self) -> Mask:
        return np.asarray(self.timestamp != NEVER)

    @property
    def unknown(self) -> Mask:
        """Whether the time is unknown: it is ``timestamp`` or earlier."""
        return np.asarray(self.there & (self.ttl == UNKNOWN_TTL))


@dataclass(frozen=True)
class Deletion:
    """The deletion of each row: time (µs; NEVER: there is none) and local deletion time (s since the epoch)."""

    timestamp: Integers
    local: Integers

    @property
    def there(self) -> Mask:
        return np.asarray(self.timestamp != NEVER)


@dataclass(frozen=True)
class ChangeRows:
    """Change rows, with the columns of :data:`ringsync.changes.schema.CHANGE_ROWS`.

    :ivar table_ids: int64[rows, 2]: both halves of the tables' ids
    :ivar cells: cells of all rows, sorted by row; ``complex_deletions`` likewise
    :ivar file: names of segments, UTF-8; ``node``: host ids, likewise; None: the rows have no such column
    """

    table_ids: Integers
    schema_version: Integers
    token: Integers
    partition_key: Cells
    kind: Integers
    clustering: Cells
    range_end: Cells
    write_time: Integers
    liveness: Liveness
    deletion: Deletion
    cells: FlatCells
    complex_deletions: FlatDeletions
    digest: Digests
    file: Cells
    position: Integers
    node: Cells | None = None

    def __len__(self) -> int:
        return len(self.token)

    @property
    def of_row(self) -> Mask:
        """Whether each change row is a row or a static row, not the deletion of a partition or range."""
        return np.asarray((self.kind == ROW) | (self.kind == STATIC))

    def take(self, places: npt.NDArray[np.integer[Any]]) -> ChangeRows:
        """Take the rows at these places."""
        parts = {name: of_rows(getattr(self, name), places, len(self)) for name in _PARTS}
        others = {name: taken(column, places) for name, column in vars(self).items() if name not in _PARTS}
        return ChangeRows(**(parts | others))

    def where(self, mask: Mask) -> ChangeRows:
        """Keep the rows for which the mask is true."""
        return self if mask.all() else self.take(np.flatnonzero(mask))

    @property
    def keys(self) -> pa.RecordBatch:
        """Token, partition key and clustering in Arrow's form."""
        arrays = [array_of(self.token), raw_values(self.partition_key), raw_values(self.clustering)]
        return pa.RecordBatch.from_arrays(arrays, ["token", "partition_key", "clustering"])

    @staticmethod
    def of(batch: pa.RecordBatch) -> ChangeRows:
        """Unpack a batch of ``CHANGE_ROWS``, which may have an extra column ``node``."""
        liveness, deletion = batch["liveness"].flatten(), batch["deletion"].flatten()
        return ChangeRows(
            fixed16(batch["table_id"]).view(np.int64),
            integers(batch["schema_version"]),
            integers(batch["token"]),
            cells_of(batch["partition_key"]),
            integers(batch["kind"]),
            cells_of(batch["clustering"]),
            cells_of(batch["range_end"]),
            integers(batch["write_time"]),
            Liveness(filled(liveness[0], NEVER), filled(liveness[1], NO_TTL), filled(liveness[2], NO_EXPIRY)),
            Deletion(filled(deletion[0], NEVER), integers(deletion[1])),
            _cells(batch["cells"]),
            _deletions(batch["complex_deletions"]),
            fixed16(batch["digest"]),
            cells_of(batch["file"].view(pa.binary())),
            integers(batch["position"]),
            cells_of(batch["node"].view(pa.binary())) if "node" in batch.schema.names else None,
        )

    def to_arrow(self) -> pa.RecordBatch:
        """Pack the rows: a batch of ``CHANGE_ROWS``, with an extra column ``node`` if they have it."""
        live, expiring = self.liveness.there, self.liveness.expires_at != NO_EXPIRY
        has_ttl = expiring | (self.liveness.ttl == UNKNOWN_TTL)
        liveness = [
            array_of(self.liveness.timestamp, live),
            array_of(self.liveness.ttl.astype(np.int32), has_ttl),
            array_of(self.liveness.expires_at, expiring),
        ]
        deleted = self.deletion.there
        deletion = [array_of(times, deleted) for times in (self.deletion.timestamp, self.deletion.local)]
        arrays = [
            fixed16_array(self.table_ids),
            array_of(self.schema_version.astype(np.int32)),
            array_of(self.token),
            raw_values(self.partition_key),
            array_of(self.kind.astype(np.int8)),
            raw_values(self.clustering),
            raw_values(self.range_end),
            array_of(self.write_time),
            structs_of(schema.LIVENESS, liveness, live),
            structs_of(schema.DELETION, deletion, deleted),
            self._listed(self.cells, _cell_structs(self.cells)),
            self._listed(self.complex_deletions, _deletion_structs(self.complex_deletions)),
            fixed16_array(self.digest),
            raw_values(self.file, pa.string()),
            array_of(self.position),
        ]
        columns = schema.CHANGE_ROWS
        if self.node is not None:
            arrays.append(raw_values(self.node, pa.string()))
            columns = columns.append(pa.field("node", pa.string()))
        return pa.RecordBatch.from_arrays(arrays, schema=columns)

    def _listed(self, parts: FlatDeletions, structs: pa.StructArray) -> pa.ListArray:
        return list_of(np.bincount(parts.row, minlength=len(self)), structs)


_PARTS = ("cells", "complex_deletions")


def concatenated(parts: Sequence[ChangeRows]) -> ChangeRows:
    """Join batches of rows. Either all of them have the column ``node``, or none has."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    moved = [
        replace(part, **{name: getattr(part, name).moved(shift) for name in _PARTS})
        for part, shift in zip(parts, shifts.tolist(), strict=True)
    ]
    rows: ChangeRows = joined(moved)
    return rows


def without_content(rows: ChangeRows, **others: Any) -> ChangeRows:
    """Return rows that keep only their keys and their source.

    :param others: fields that get other values
    """
    count = len(rows)
    never = np.full(count, NEVER)
    nothing = np.zeros(0, np.intp)
    empty: dict[str, Any] = {
        "range_end": no_cells(count),
        "liveness": Liveness(never, np.full(count, NO_TTL), np.full(count, NO_EXPIRY)),
        "deletion": Deletion(never, np.zeros(count, np.int64)),
        "cells": rows.cells.take(nothing),
        "complex_deletions": rows.complex_deletions.take(nothing),
    }
    return replace(rows, **(empty | others))


def _cells(lists: pa.ListArray) -> FlatCells:
    row, structs = rows_of_lists(lists)
    column, path, value, timestamp, ttl, local, kind = structs.flatten()
    return FlatCells(
        row,
        integers(column),
        integers(timestamp),
        filled(local, NO_EXPIRY),
        filled(ttl, NO_TTL),
        integers(kind),
        cells_of(path),
        cells_of(value),
    )


def _cell_structs(cells: FlatCells) -> pa.StructArray:
    has_ttl = (cells.kind == EXPIRING) | cells.unknown
    arrays = [
        array_of(cells.column.astype(np.int32)),
        raw_values(cells.path),
        raw_values(cells.value),
        array_of(cells.timestamp),
        array_of(cells.ttl.astype(np.int32), has_ttl),
        array_of(cells.local, cells.kind != LIVE),
        array_of(cells.kind.astype(np.int8)),
    ]
    return structs_of(schema.CELL, arrays)


def _deletions(lists: pa.ListArray) -> FlatDeletions:
    row, structs = rows_of_lists(lists)
    return FlatDeletions(row, *(integers(field) for field in structs.flatten()))


def _deletion_structs(parts: FlatDeletions) -> pa.StructArray:
    column = array_of(parts.column.astype(np.int32))
    return structs_of(schema.COMPLEX_DELETION, [column, array_of(parts.timestamp), array_of(parts.local)])


def fixed16(array: pa.Array) -> Digests:
    """View ``binary(16)`` as numbers: both halves of each value."""
    data = np.frombuffer(array.buffers()[1], np.uint64) if len(array) else np.empty(0, np.uint64)
    return data.reshape(-1, 2)[array.offset : array.offset + len(array)]


def fixed16_array(halves: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """Make ``binary(16)`` of both halves of each value."""
    data = pa.py_buffer(np.ascontiguousarray(halves))
    return pa.Array.from_buffers(pa.binary(DIGEST_BYTES), len(halves), [None, data], 0)
