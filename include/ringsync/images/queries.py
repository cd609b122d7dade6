"""The CQL of ``source.query``: statements that repeat each change, with its own timestamps.

docs/messages.md lists changes that CQL cannot express. :mod:`ringsync.changes.text.replay` can express more of them,
because it remembers earlier changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, Liveness
from ringsync.changes.common_times import NO_CELL, ElementTimes, RowTimes, common_times
from ringsync.changes.flat import expiries as expiries_of
from ringsync.changes.flat import kept
from ringsync.changes.schema import NO_EXPIRY, NO_TTL
from ringsync.changes.text.assignments import assignments, deleted_names, live_cells
from ringsync.changes.text.statements import Statements, cell_deletions, deletions_of_rows, row_keys, writes
from ringsync.compiled.arrow import array_of, filled, integers, list_of, valid_mask
from ringsync.cql.text.literals import message_literals
from ringsync.images.to_changes import change_rows_of
from ringsync.schema.table import TableSchema

_BEGIN, _END = "BEGIN UNLOGGED BATCH ", "; APPLY BATCH"


def queries(merged: ChangeRows, table: TableSchema) -> pa.Array:
    """Write a statement, or a batch of several, for each merged change row.

    The result is null for rows that CQL cannot express: rows of tables with counters (statements add, but a change has
    the total), rows with a key that has no literal, and deletions of list entries.

    :returns: array of strings
    """
    if table.has_counters:
        return pa.nulls(len(merged), pa.string())
    keys = row_keys(merged, table, message_literals)
    cells, deletions = kept(merged.cells, table), kept(merged.complex_deletions, table)
    live = live_cells(cells, deletions, table, message_literals)
    deleted = deleted_names(cells, deletions, table, live.whole, message_literals)
    statements = [
        *deletions_of_rows(merged, table, keys.where),
        *cell_deletions(table, deleted, keys.where),
        *writes(merged, table, assignments(live, in_log_order=False), keys),
    ]
    return _by_row(statements, len(merged))


def snapshot_queries(images: pa.RecordBatch, table: TableSchema, unknown_at_us: int) -> pa.Array:
    """Write the statements that write rows of a scan into an empty table.

    A row of unknown liveness gets the time of most of its cells; if it has no cells, that of most static cells of its
    partition. TTLs follow from writetime and expiry. The query of a partition's first row in this batch has its static
    cells.

    :param unknown_at_us: latest possible time of writes of unknown time, µs; they get it as timestamp
    :returns: array of strings
    """
    rows = _with_liveness(change_rows_of(images, table, unknown_at_us=unknown_at_us), images)
    texts = queries(rows, table)
    of_image = rows.position
    counts = np.bincount(of_image, valid_mask(texts), len(images))
    texts = pc.if_else(pa.array(counts[of_image] > 1), _unpacked(texts), texts)
    return _by_row([Statements(of_image, texts)], len(images))


def _with_liveness(rows: ChangeRows, images: pa.RecordBatch) -> ChangeRows:
    """Give change rows of unknown liveness the liveness that they probably have."""
    unknown = rows.liveness.unknown
    of_cells, of_image = _times_of_most(rows), images["_row"].take(array_of(rows.position))
    has_cells = of_cells.expiries != NO_CELL
    # If a row has static cells only, most cells of its image are static.
    writetime, expires_at = (pc.struct_field(of_image, name) for name in ("writetime", "expires_at"))
    guessed = unknown & (has_cells | valid_mask(writetime))
    timestamps = np.where(has_cells, of_cells.writetimes, integers(writetime))
    expiries = np.where(has_cells, of_cells.expiries, filled(expires_at, NO_EXPIRY))
    liveness = Liveness(
        np.where(guessed, timestamps, rows.liveness.timestamp),
        np.where(guessed, NO_TTL, rows.liveness.ttl),
        np.where(guessed, expiries, rows.liveness.expires_at),
    )
    return replace(rows, liveness=liveness)


def _times_of_most(rows: ChangeRows) -> RowTimes:
    """Find the times that most cells of each row have; cells of unknown times do not count."""
    cells = rows.cells.where(~rows.cells.unknown)
    starts = np.concatenate([[0], np.cumsum(np.bincount(cells.row, minlength=len(rows)))]).astype(np.int32)
    nothing = np.empty((0, len(rows)), np.int64)
    return common_times(nothing, nothing, [ElementTimes(starts, cells.timestamp, expiries_of(cells))], len(rows))


def _unpacked(texts: pa.Array) -> pa.Array:
    """Take the statements out of batches, so that they can go into another batch."""
    batch = pc.starts_with(texts, _BEGIN)
    inner = pc.utf8_slice_codeunits(texts, len(_BEGIN), -len(_END))
    return pc.if_else(batch, inner, texts)


def _by_row(statements: Sequence[Statements], count: int) -> pa.Array:
    """Join the statements of each row: several become a batch."""
    if not statements:
        return pa.nulls(count, pa.string())
    rows = np.concatenate([part.rows for part in statements])
    texts = pa.concat_arrays([part.texts.cast(pa.string()) for part in statements])
    given = np.flatnonzero(valid_mask(texts))
    order = given[np.argsort(rows[given], kind="stable")]
    sizes = np.bincount(rows[order], minlength=count)
    if (sizes == 1).all():
        return texts.take(pa.array(order))
    whole = pc.binary_join(list_of(sizes, texts.take(array_of(order))), "; ")
    if (sizes > 1).any():
        batch = pc.binary_join_element_wise(_BEGIN, whole, _END, "")
        whole = pc.if_else(pa.array(sizes > 1), batch, whole)
    return pc.if_else(pa.array(sizes > 0), whole, pa.scalar(None, pa.string()))
