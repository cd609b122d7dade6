"""``source.query``: the CQL that makes each change again, with its own timestamps.

docs/messages.md says what CQL cannot say; :mod:`ringsync.changes.text.replay` says more of it, because it remembers
what came before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.common_times import NO_CELL, NO_EXPIRY, ElementTimes, RowTimes, common_times
from ringsync.changes.flat import UNKNOWN_TTL, flat, kept
from ringsync.changes.schema import LIVENESS
from ringsync.changes.text.assignments import assignments, deleted_names, live_cells
from ringsync.changes.text.statements import Statements, cell_deletions, deletions_of_rows, row_keys, writes
from ringsync.compiled.arrow import int64_array, integers, starts_of, valid_mask
from ringsync.cql.text.literals import message_literals
from ringsync.images.from_changes import change_rows_of
from ringsync.schema.table import TableSchema

_BEGIN, _END = "BEGIN UNLOGGED BATCH ", "; APPLY BATCH"


def queries(merged: pa.RecordBatch, table: TableSchema) -> pa.Array:
    """A statement, or a batch of several, for each merged change row.

    Null for a row of which CQL can say nothing: all rows of tables of counters, whose statements add while a change
    has the total, rows with a key that has no literal, a deletion of list entries.

    :param merged: change rows (``CHANGE_ROWS``) of this table
    :returns: string
    """
    if table.has_counters:
        return pa.nulls(len(merged), pa.string())
    keys = row_keys(merged, table, message_literals)
    cells, deletions = (kept(flat(merged[name]), table) for name in ("cells", "complex_deletions"))
    live = live_cells(cells, deletions, table, message_literals)
    deleted = deleted_names(cells, deletions, table, live.whole, message_literals)
    found = [
        *deletions_of_rows(merged, table, keys.where),
        *cell_deletions(table, deleted, keys.where),
        *writes(merged, table, assignments(live, in_log_order=False), keys),
    ]
    return _by_row(found, len(merged))


def snapshot_queries(images: pa.RecordBatch, table: TableSchema, unknown_at_us: int) -> pa.Array:
    """The same for rows that were read: what writes them into an empty table.

    A row whose own liveness is not known gets that of most of its cells; if it has none, that of most of its
    partition's static ones. TTLs are what the times of writing and expiry make them. Static cells are in the query of
    the first row of their partition in this batch.

    :param images: row images of this table
    :param unknown_at_us: µs, when what has no known time was written at the latest: that is its timestamp
    :returns: string
    """
    rows = _with_liveness(change_rows_of(images, table, unknown_at_us=unknown_at_us), images)
    found = queries(rows, table)
    of_image = integers(rows["position"])
    said = np.bincount(of_image, valid_mask(found), len(images))
    found = pc.if_else(pa.array(said[of_image] > 1), _unpacked(found), found)
    return _by_row([Statements(of_image, found)], len(images))


def _with_liveness(rows: pa.RecordBatch, images: pa.RecordBatch) -> pa.RecordBatch:
    """Change rows of images with the liveness that those rows probably have whose own is not known."""
    ttl = rows["liveness"].field("ttl")
    unknown = valid_mask(rows["liveness"]) & valid_mask(ttl) & (integers(ttl) == UNKNOWN_TTL)
    of_cells, of_image = _times_of_most(rows), images["_row"].take(rows["position"])
    has_cells = of_cells.expiries != NO_CELL
    # What most cells of the image have is of static ones where the row has no others.
    writetime, expires_at = (pc.struct_field(of_image, name) for name in ("writetime", "expires_at"))
    guessed = unknown & (has_cells | valid_mask(writetime))
    timestamps = np.where(has_cells, of_cells.writetimes, integers(writetime))
    expiries = np.where(has_cells, of_cells.expiries, integers(pc.fill_null(expires_at, NO_EXPIRY)))
    expiring = expiries >= 0
    fields = [
        pa.array(timestamps),
        int64_array(np.zeros(len(rows), np.int64), expiring).cast(pa.int32()),
        int64_array(expiries, expiring),
    ]
    liveness = pa.StructArray.from_arrays(fields, fields=list(LIVENESS))
    found = pc.if_else(pa.array(guessed), liveness, rows["liveness"])
    return rows.set_column(rows.schema.get_field_index("liveness"), "liveness", found)


def _times_of_most(rows: pa.RecordBatch) -> RowTimes:
    """The times that most cells of each row have; cells of unknown times do not count."""
    cells = flat(rows["cells"])
    cells = cells.where(~cells.unknown)
    starts = np.concatenate([[0], np.cumsum(np.bincount(cells.row, minlength=len(rows)))]).astype(np.int32)
    nothing = np.empty((0, len(rows)), np.int64)
    return common_times(
        nothing, nothing, [ElementTimes(starts, cells.integers("timestamp"), cells.expiries)], len(rows)
    )


def _unpacked(found: pa.Array) -> pa.Array:
    """The statements of batches, so that they can go into another."""
    batch = pc.starts_with(found, _BEGIN)
    inner = pc.utf8_slice_codeunits(found, len(_BEGIN), -len(_END))
    return pc.if_else(batch, inner, found)


def _by_row(statements: Sequence[Statements], count: int) -> pa.Array:
    """The statements of each row as one: a batch if there are several."""
    if not statements:
        return pa.nulls(count, pa.string())
    rows = np.concatenate([one.rows for one in statements])
    texts = pa.concat_arrays([one.texts.cast(pa.string()) for one in statements])
    said = np.flatnonzero(valid_mask(texts))
    order = said[np.argsort(rows[said], kind="stable")]
    sizes = np.bincount(rows[order], minlength=count)
    if (sizes == 1).all():
        return texts.take(pa.array(order))
    whole = pc.binary_join(pa.ListArray.from_arrays(starts_of(sizes), texts.take(pa.array(order))), "; ")
    if (sizes > 1).any():
        batch = pc.binary_join_element_wise(_BEGIN, whole, _END, "")
        whole = pc.if_else(pa.array(sizes > 1), batch, whole)
    return pc.if_else(pa.array(sizes > 0), whole, pa.scalar(None, pa.string()))
