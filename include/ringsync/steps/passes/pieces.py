"""Pieces of change rows: the rows after them are in memory at once, so pieces are cut by bytes, too.

A change may be small where its row is large, and only what was read says how large. So a process remembers for each
table how wide its last rows were, and the first piece has few rows. Tokens are hashes: the next rows are about as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.keys.order import key_numbers
from ringsync.changes.schema import ROW
from ringsync.compiled.arrow import Mask
from ringsync.schema.table import TableSchema

PIECE_BYTES = 128 * 2**20
"""Wanted size of a piece's rows; Arrow's arrays hold 2 GiB, and messages are some copies of them."""
FIRST_ROWS = 500
"""Rows of a piece before any row of the table was seen."""
MEMORY = 0.9
"""Part of the widest rows' size that is remembered after narrower ones."""

_widths: dict[str, float] = {}
"""Bytes of a row by table id, as this process has seen them."""


def seen(table: TableSchema, images: pa.RecordBatch) -> None:
    """Learn from row images how wide rows are."""
    if images.num_rows:
        width = images.nbytes / images.num_rows
        _widths[table.table_id] = max(width, MEMORY * _widths.get(table.table_id, 0.0))


def pieces(rows: Mapping[str, pa.RecordBatch], table: TableSchema) -> Iterator[dict[str, pa.RecordBatch]]:
    """Cut change rows into pieces. All of a key are in one, and all of a partition that has more than changes of rows.

    :param rows: by any name, which pieces keep
    """
    count = sum(batch.num_rows for batch in rows.values())
    size = sum(batch.nbytes for batch in rows.values())
    if count <= (most := _most_rows(table, size / max(1, count))):
        yield dict(rows)
        return
    every = ChangeRows.of(pa.concat_batches(list(rows.values())))
    (numbers,) = key_numbers(table, (every.partition_key, every.clustering.without(every.kind != ROW)))
    numbers[np.isin(every.token, every.token[every.kind != ROW])] = -1
    order = np.lexsort((numbers, every.token))
    tokens, numbers = every.token[order], numbers[order]
    bounds = np.flatnonzero((tokens[1:] != tokens[:-1]) | (numbers[1:] != numbers[:-1])) + 1
    begin = 0
    while begin < count:
        later = bounds[np.searchsorted(bounds, begin + most) :]
        end = int(later[0]) if len(later) else count
        chosen = np.zeros(count, np.bool_)
        chosen[order[begin:end]] = True
        yield divided(rows, chosen)
        begin, most = end, _most_rows(table, size / count)


def divided(rows: Mapping[str, pa.RecordBatch], chosen: Mask) -> dict[str, pa.RecordBatch]:
    """Keep the rows that the mask names, of all batches together, without batches that become empty."""
    ends = np.cumsum([batch.num_rows for batch in rows.values()])[:-1]
    parts = zip(rows.items(), np.split(chosen, ends), strict=True)
    return {place: batch.filter(pa.array(mask)) for (place, batch), mask in parts if mask.any()}


def _most_rows(table: TableSchema, change_bytes: float) -> int:
    width = max(change_bytes, _widths.get(table.table_id, PIECE_BYTES / FIRST_ROWS))
    return max(1, int(PIECE_BYTES / max(1.0, width)))
