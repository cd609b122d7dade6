"""Change rows of tests, which are Arrow's, as the package has them in memory."""

from __future__ import annotations

import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.reconcile.rows import merge
from ringsync.schema.table import TableSchema


def merged(batch: pa.RecordBatch, table: TableSchema) -> ChangeRows:
    """Reconcile change rows."""
    return merge(ChangeRows.of(batch), table)


def merged_batch(batch: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Do the same from Arrow to Arrow."""
    return merged(batch, table).to_arrow()
