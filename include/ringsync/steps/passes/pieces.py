"""Pieces of change rows: the rows after them are in memory at once, so pieces are cut by bytes, too.

A change may be small where its row is large, and only what was read says how large. So a process remembers for each
table how wide its last rows were, and the first piece has few rows. Tokens are hashes: the next rows are about as wide.
The same holds for partitions that are read as a whole, since something in them is deleted or static.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.keys.order import key_numbers
from ringsync.changes.schema import ROW
from ringsync.cluster.page_size import STEP
from ringsync.compiled.arrow import Integers, Mask, integers
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.keys import differs

PIECE_BYTES = 128 * 2**20
"""Wanted size of a piece's rows; Arrow's arrays hold 2 GiB, and messages are some copies of them."""
FIRST_ROWS = 500
"""Rows of a piece before any row of the table was seen."""
MEMORY = 0.9
"""Part of the widest rows' size that is remembered after narrower ones."""


@dataclass
class _Known:
    """What a process has seen of a table.

    :ivar row: bytes of a row
    :ivar partition: bytes of the rows of a partition that was read as a whole
    :ivar partitions: most such partitions that were read together
    """

    row: float = 0.0
    partition: float = 0.0
    partitions: int = 0


_known: dict[str, _Known] = defaultdict(_Known)
"""By table id."""


def seen(table: TableSchema, images: pa.RecordBatch) -> None:
    """Learn from row images how wide rows are."""
    if images.num_rows:
        known = _known[table.table_id]
        known.row = max(images.nbytes / images.num_rows, MEMORY * known.row)


def seen_partitions(table: TableSchema, partitions: pa.Array, images: pa.RecordBatch) -> None:
    """Learn from row images how large partitions are.

    :param partitions: tokens of the partitions that were read as a whole; not empty
    :param images: all rows that were read
    """
    known, of_them = _known[table.table_id], images.filter(pc.is_in(images["token"], partitions))
    known.partition = max(of_them.nbytes / len(partitions), MEMORY * known.partition)
    known.partitions = max(known.partitions, len(partitions))


def pieces(
    rows: Mapping[str, pa.RecordBatch], table: TableSchema, read_whole: Collection[int]
) -> Iterator[dict[str, pa.RecordBatch]]:
    """Cut change rows into pieces. All of a key are in one, and all of a partition that has more than changes of rows.

    :param rows: by any name, which pieces keep
    :param read_whole: kinds of changes for which partitions are read as a whole: the first piece has one of these, and
        the next ones grow
    """
    kind, tokens = (np.concatenate([integers(batch[name]) for batch in rows.values()]) for name in ("kind", "token"))
    change_bytes = sum(batch.nbytes for batch in rows.values()) / max(1, len(tokens))
    together, whole = np.isin(tokens, tokens[kind != ROW]), np.isin(tokens, tokens[np.isin(kind, [*read_whole])])
    order = np.argsort(tokens, kind="stable")

    def fitting(begin: int) -> int:
        left = order[begin:]
        return begin + _fitting(table, change_bytes, tokens[left], whole[left])

    end = fitting(0)
    if end >= len(order):
        yield dict(rows)
        return
    every = ChangeRows.of(pa.concat_batches(list(rows.values())))
    (numbers,) = key_numbers(table, (every.partition_key, every.clustering.without(kind != ROW)))
    numbers[together] = -1
    order = np.lexsort((numbers, tokens))
    ends = np.append(np.flatnonzero(differs(tokens[order], numbers[order]))[1:], len(order))
    begin = 0
    while begin < len(order):
        first, last = np.searchsorted(ends, [begin, fitting(begin)], side="right").tolist()
        end = int(ends[max(first, last - 1)])
        chosen = np.zeros(len(order), np.bool_)
        chosen[order[begin:end]] = True
        yield divided(rows, chosen)
        begin = end


def divided(rows: Mapping[str, pa.RecordBatch], chosen: Mask) -> dict[str, pa.RecordBatch]:
    """Keep the rows that the mask names, of all batches together, without batches that become empty."""
    ends = np.cumsum([batch.num_rows for batch in rows.values()])[:-1]
    parts = zip(rows.items(), np.split(chosen, ends), strict=True)
    return {place: batch.filter(pa.array(mask)) for (place, batch), mask in parts if mask.any()}


def _fitting(table: TableSchema, change_bytes: float, tokens: Integers, whole: Mask) -> int:
    """Return how many of the changes a piece may have, at least one.

    :param tokens: sorted
    :param whole: mask of the changes whose partitions are read as a whole
    """
    known = _known[table.table_id]
    width = max(1.0, change_bytes, known.row or PIECE_BYTES / FIRST_ROWS)
    partitions = np.cumsum(differs(tokens) & whole)
    size = width * np.arange(1, len(tokens) + 1) + known.partition * partitions
    fits = (size <= PIECE_BYTES) & (partitions <= max(1, STEP * known.partitions))
    return max(1, int(np.count_nonzero(fits)))
