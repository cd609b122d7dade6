"""What a Spark task does for the replica: merged change rows become complete images of all keys that they touch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.schema import OF_PARTITIONS
from ringsync.ledger.staging import decode_rows
from ringsync.replica.changes import changes_schema
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import DataFile
from ringsync.replica.folders import changes_folder
from ringsync.steps.passes.pieces import pieces, seen
from ringsync.steps.passes.rows_after import AfterReader, complete_rows, under_deletions
from ringsync.wiring import store_of


@dataclass(frozen=True)
class ReplicaTask:
    """Spark calls it with the keys of files of merged change rows.

    :ivar number: number of the pass
    """

    reader: AfterReader
    number: int

    def __call__(self, keys: Iterable[str]) -> Iterator[DataFile]:
        store = store_of(self.reader.config)
        table = self.reader.table
        for key in keys:
            writer = DataFileWriter(changes_schema(table))
            changes = {key: self.reader.version.from_store(decode_rows(store.get(key)))}
            for rows in pieces(changes, table, OF_PARTITIONS):
                merged = under_deletions(self.reader, ChangeRows.of(rows[key]))
                images = complete_rows(self.reader, merged).images
                seen(table, images)
                version = pa.array(np.full(images.num_rows, self.number), pa.int64())
                writer.add(pa.RecordBatch.from_arrays([*images.columns, version], schema=changes_schema(table)))
            if not writer.rows:
                continue
            name = f"pass-{self.number:012}-{secrets.token_hex(8)}.parquet"
            file, data = writer.finish(name, int(time.time() * 1000))
            store.put(f"{changes_folder(table.keyspace, table.name)}/{name}", data)
            yield file
