"""Row images of what a merge of sorted streams yields (:mod:`ringsync.changes.reconcile.streams`).

A stream has all that a table holds, so the images show what a SELECT shows, and what it cannot show: livenesses,
tombstones and the identities of list entries.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import concatenated
from ringsync.changes.reconcile.streams import MergedPart
from ringsync.changes.schema import STATIC
from ringsync.images.after import static_row_of, with_expected_rows
from ringsync.images.from_changes import Misfits, images_of
from ringsync.schema.table import TableSchema


def images_of_part(part: MergedPart, table: TableSchema, misfits: Misfits) -> pa.RecordBatch:
    """Convert a part of a merge to row images; expired cells and deleted rows stay, as the images of a replica do.

    :param misfits: treatment of values that the Arrow type cannot hold
    :returns: images with ``row_image_schema(table)``: one per row, with the static cells of its partition; one without
        clustering per partition with static cells; in a table without clustering one per deleted partition
    :raises UnrepresentableValueError: there is such a value, with ``misfits="error"``
    """
    if part.grid is not None:
        return images_of(part.rows, table, misfits, np.arange(len(part.rows)), part.grid)
    rows = part.rows if table.clustering else with_expected_rows(part.rows, part.rows, table)
    rows = rows.where(rows.of_row)
    if not table.of_kind("static"):
        return images_of(rows, table, misfits, np.arange(len(rows)))
    known = part.carried.where(part.carried.kind == STATIC)
    if len(known):
        rows = concatenated([known, rows])
    return images_of(rows, table, misfits, static_row_of(rows)).slice(len(known))
