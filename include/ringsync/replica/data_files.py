"""A writer of Parquet files of row images, piece by piece, in the task that reads the rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringsync.replica.delta_log import DataFile

ROW_GROUP_ROWS = 200_000
ROW_GROUP_BYTES = 64 * 2**20
"""Size in memory, as Arrow. A row group ends at the first of both limits."""


class DataFileWriter:
    """A Parquet file that is written in memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._sink = pa.BufferOutputStream()
        # Readers skip by the statistics of token alone. Spark's own files have none of nested columns either.
        self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd", write_statistics=["token"])
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self.rows = 0
        self._min_token: int | None = None
        self._max_token: int | None = None

    @property
    def size(self) -> int:
        """Bytes encoded so far."""
        return int(self._sink.tell())

    def add(self, batch: pa.RecordBatch) -> None:
        """Append row images in token order."""
        if not batch.num_rows:
            return
        if self._min_token is None:
            self._min_token = batch["token"][0].as_py()
        self._max_token = batch["token"][-1].as_py()
        self.rows += batch.num_rows
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def finish(self, name: str, now_ms: int) -> tuple[DataFile, bytes]:
        """Close the file and return its description and its bytes.

        :param name: name of the file in the table's folder
        :raises ValueError: the file has no rows
        """
        if self._min_token is None or self._max_token is None:
            raise ValueError("a data file must have rows")
        self._write_row_group()
        self._writer.close()
        data = self._sink.getvalue().to_pybytes()
        return DataFile(name, self.rows, len(data), self._min_token, self._max_token, now_ms), data

    def _write_row_group(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema), row_group_size=2**31 - 1)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


def last_token(batch: pa.RecordBatch) -> int:
    """Return the greatest token of row images in token order."""
    return int(batch["token"][-1].as_py())


def first_row_of_last_token(batch: pa.RecordBatch) -> int:
    """Find where the rows of the greatest token begin: all partitions before are complete. 0 without rows."""
    return int(pc.index(batch["token"], batch["token"][-1]).as_py()) if batch.num_rows else 0
