"""What a Spark task does for the replica: merged change rows become complete images of all keys that they touch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ringsync.changes.cells import numbers
from ringsync.changes.merge import merge
from ringsync.changes.schema import PARTITION_DELETION
from ringsync.config import load_config
from ringsync.replica.base import changes_folder
from ringsync.replica.changes import changes_schema
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import DataFile
from ringsync.state.staging import decode_rows
from ringsync.steps.rows_after import AfterReader, complete_rows
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class ReplicaTask:
    """Spark calls it with the keys of files of merged change rows.

    :ivar number: of the pass
    :ivar deletions: keys of deletions of partitions and ranges that passes before this one have published lately: a row
        that is older than they are, and comes only now, must not live again
    :ivar late: the rows came late: what they meet may be hidden by tombstones that no SELECT has shown
    """

    reader: AfterReader
    number: int
    late: bool
    deletions: tuple[str, ...]

    def __call__(self, keys: Iterable[str]) -> Iterator[DataFile]:
        config = load_config(self.reader.config_path)
        store = config.open_store()
        table = self.reader.table
        for key in keys:
            images = complete_rows(self.reader, self._rows(store, key), late=self.late).images
            if not images.num_rows:
                continue
            version = pa.array(np.full(images.num_rows, self.number), pa.int64())
            writer = DataFileWriter(changes_schema(table))
            writer.add(pa.RecordBatch.from_arrays([*images.columns, version], schema=changes_schema(table)))
            name = f"pass-{self.number:012}-{secrets.token_hex(8)}.parquet"
            file, data = writer.finish(name, int(time.time() * 1000))
            store.put(f"{changes_folder(table.keyspace, table.name)}/{name}", data)
            yield file

    def _rows(self, store: ObjectStore, key: str) -> pa.RecordBatch:
        """The merged change rows of a file, after the deletions that were published before them."""
        version = self.reader.version
        rows = version.from_store(decode_rows(store.get(key)))
        tokens = numbers(rows["token"])
        found = [version.from_store(decode_rows(store.get(key))) for key in self.deletions]
        older = [one.filter(pa.array(np.isin(numbers(one["token"]), tokens))) for one in found]
        if not any(one.num_rows for one in older):
            return rows
        table = self.reader.table
        both = merge(pa.concat_batches([rows, *older]), table)
        own = rows.filter(pa.array(numbers(rows["kind"]) >= PARTITION_DELETION))
        # The older deletions were applied by their own passes.
        return merge(pa.concat_batches([both.filter(pa.array(numbers(both["kind"]) < PARTITION_DELETION)), own]), table)
