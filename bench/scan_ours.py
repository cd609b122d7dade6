"""Run our side of bench/scan.py: each function reads splits in the process that calls it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
from peers.measure import Work

from ringsync.cluster.limits import Limiter
from ringsync.config import Config, load_config
from ringsync.images.schema import row_image_schema
from ringsync.replica.data_files import DataFileWriter
from ringsync.ring.splits import Split
from ringsync.sources.cassandra_table import read_split
from ringsync.sources.scan.plan import ScanPlan
from ringsync.steps.bootstrap.task import BATCHES_AHEAD, Behind
from ringsync.streams.files import FileStream
from ringsync.streams.messages import envelope_schema, key_schema, snapshot_messages
from ringsync.wiring import store_of

IN_FLIGHT = 2
"""Token ranges that one process asks for at once; the other Python clients of the benchmark do the same."""


def to_arrow(config: Config, plan: ScanPlan, splits: Sequence[Split]) -> Work:
    """Read splits as Arrow row images and drop these."""
    return Work(sum(batch.num_rows for split in splits for batch in read_split(config, plan, split, Limiter())))


def to_delta(config: Config, plan: ScanPlan, splits: Sequence[Split]) -> Work:
    """Read splits into the data files of a replica. The commit that makes them a replica takes milliseconds."""
    return _to_files(config, plan, splits, lambda name: _Replica(config, plan, name))


def to_avro(config: Config, plan: ScanPlan, splits: Sequence[Split]) -> Work:
    """Read splits into the parts of a change stream: a message per row, with key, values and the times of cells."""
    return _to_files(config, plan, splits, lambda name: _Stream(config, plan, name))


def _to_files(
    config: Config, plan: ScanPlan, splits: Sequence[Split], open_file: Callable[[str], _Replica | _Stream]
) -> Work:
    """Write rows as a bootstrap's task does: a second thread encodes, compresses and stores them."""
    rows = written = 0
    for split in splits:
        file = open_file(uuid.uuid4().hex)
        with Behind(BATCHES_AHEAD) as behind:
            for batch in read_split(config, plan, split, Limiter()):
                behind.do(file.add, batch)
                rows += batch.num_rows
        written += file.finish()
    return Work(rows, written)


class _Replica:
    def __init__(self, config: Config, plan: ScanPlan, name: str) -> None:
        self._store, self._name = store_of(config), f"{name}.zstd.parquet"
        self._file = DataFileWriter(row_image_schema(plan.table))
        self.add = self._file.add

    def finish(self) -> int:
        """Put the file into the store; return its bytes."""
        file, data = self._file.finish(self._name, 0)
        self._store.put(f"bench/{self._name}", data)
        return file.bytes


class _Stream:
    def __init__(self, config: Config, plan: ScanPlan, name: str) -> None:
        server, mapping = config.server_name, config.stream.mapping
        stream = FileStream(store_of(config), "bench")
        stream.put_schemas(1, key_schema(plan.table, server, mapping), envelope_schema(plan.table, server, mapping))
        self._part = stream.open_part("bench", name, 1, config.stream.codec)
        self._describe = partial(
            snapshot_messages,
            table=plan.table,
            server=server,
            mapping=mapping,
            hostname="bench",
            processed_at_ms=0,
            schema_version=1,
        )

    def add(self, batch: pa.RecordBatch) -> None:
        """Append a message for each row image."""
        self._part.add(self._describe(batch))

    def finish(self) -> int:
        """Put the part into the store; return its bytes."""
        return self._part.finish().bytes


OURS = {"arrow": to_arrow, "delta": to_delta, "avro": to_avro}
"""Functions that bench/scan.py measures, by name."""


def reader(name: str, config_path: str, plan_json: str, splits: Sequence[Split]) -> Callable[[], Work]:
    """Return a function that reads the splits by one of ``OURS``; it has read one split to warm up."""
    config, plan = load_config(config_path), ScanPlan.from_json(plan_json)
    OURS[name](config, plan, splits[:1])
    return lambda: OURS[name](config, plan, splits)
