"""What a SELECT shows of row images that also hold what it does not show: deleted rows, expired cells.

The images of SSTables are such. They come in token order and in pieces, and a partition may be larger than a piece.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.compiled.arrow import Mask, valid_mask
from ringsync.images.after import without_expired
from ringsync.images.keys import partition_digests
from ringsync.images.live import live_rows
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.schema.table import TableSchema


class Shown:
    """The rows of images that a SELECT shows, without expired cells.

    A partition of which only static cells live is shown as one row without clustering. That is known once its last
    image was seen, so this row comes with the images of the next partition, or at the end.

    :param now_s: moment of the SELECT, s since the epoch
    """

    def __init__(self, table: TableSchema, now_s: int) -> None:
        self._table, self._now_s = table, now_s
        self._has_static = bool(table.clustering and table.of_kind("static"))
        self._waiting: pa.RecordBatch | None = None
        self._last: bytes | None = None  # the last partition: its digest

    def of(self, images: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that these images show, in their order.

        :param images: whole images, those of a partition together: first the one without clustering, if there is one
        """
        if not images.num_rows:
            return images
        live = live_rows(images, self._table, self._now_s)
        alive = _mask(live["#alive"])
        if not self._has_static:
            return self._unexpired(images.filter(pa.array(alive)))
        digests = partition_digests(images, self._table)
        begins = np.ones(len(images), np.bool_)
        begins[1:] = _mask(pc.not_equal(digests.slice(1), digests.slice(0, len(images) - 1)))
        partition = np.cumsum(begins) - 1
        has_rows = np.bincount(partition, alive, partition[-1] + 1) > 0
        before = self._before(digests[0].as_py(), bool(has_rows[0]), ends=bool(partition[-1] > 0))
        alone = self._static_only(images, live) & ~has_rows[partition]
        last = np.flatnonzero(alone & (partition == partition[-1]))
        if len(last):
            alone[last] = False
            self._waiting = images.slice(int(last[0]), 1)
        elif partition[-1] > 0:
            self._waiting = None
        self._last = digests[-1].as_py()
        shown = images.filter(pa.array(alive | alone))
        return self._unexpired(shown if before is None else _joined([before, shown]))

    def end(self) -> pa.RecordBatch:
        """Return the row that is still waiting, if there is one: no more images of its partition come."""
        waiting, self._waiting, self._last = self._waiting, None, None
        if waiting is None:
            return pa.RecordBatch.from_pylist([], row_image_schema(self._table))
        return self._unexpired(waiting)

    def _before(self, first: bytes, has_rows: bool, *, ends: bool) -> pa.RecordBatch | None:
        """Take the waiting row if its partition has ended; forget it if the partition has a row after all.

        :param first: digest of the first partition of the images that follow
        :param has_rows: whether they show a row of it; ``ends``: whether they have another partition, too
        """
        waiting = self._waiting
        if waiting is None or (self._last == first and not has_rows and not ends):
            return None
        self._waiting = None
        return None if self._last == first and has_rows else waiting

    def _static_only(self, images: pa.RecordBatch, live: pa.RecordBatch) -> Mask:
        """Tell which images have no clustering, and live static cells."""
        name = lake_names(self._table)[self._table.clustering[0].name]
        clustered = valid_mask(images[name]) | valid_mask(pc.struct_field(images["_x"], [name, "raw"]))
        return np.asarray(_mask(live["#static"]) & ~clustered)

    def _unexpired(self, images: pa.RecordBatch) -> pa.RecordBatch:
        return without_expired(images, self._table, self._now_s) if images.num_rows else images


def _mask(flags: pa.Array) -> Mask:
    return valid_mask(pc.if_else(flags, flags, pa.scalar(None, pa.bool_())))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch
