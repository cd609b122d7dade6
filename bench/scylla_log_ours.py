"""Run our side of bench/scylla_log.py, in a process of its own: ``python bench/scylla_log_ours.py ORDER``.

ORDER is JSON: ``host``, ``port``; ``keyspace``, ``table``; ``generation_ms``; ``start_ms``, ``end_ms``: the window;
``ttl_s`` of the log; ``passes``. It prints a line of JSON for each pass. The first one, in which the kernels are
loaded or compiled, also counts what is in the change rows, to compare it with what the peer sees.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import columns_of
from ringsync.changes.schema import NEVER, TOMBSTONE
from ringsync.cluster.cluster import read_ring
from ringsync.cluster.generations import Clocks, Streams, read_generation
from ringsync.cluster.limits import Limiter
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import ClusterSettings, close_all, connect
from ringsync.ring.ranks import ranked
from ringsync.scylla.log_rows import LogRows
from ringsync.scylla.log_schema import LOG_SUFFIX, LogTable, log_table_of
from ringsync.sources.cdc_log import LogRead, LogReader, Requests, grouped, joined
from ringsync.steps.scylla.log_task import READS_AT_ONCE

CLOCKS = Clocks(0, 0, 0, "")


def read_all(reader: LogReader, requests: Requests, table: LogTable, order: dict[str, Any]) -> Iterator[LogRows]:
    """Yield the change rows; as many requests as in a task of the product are on their way at once."""

    def reads() -> Iterator[tuple[None, LogRead]]:
        running: deque[Callable[[], LogRead]] = deque()
        for streams, endpoints in requests:
            if len(running) == READS_AT_ONCE:
                yield None, running.popleft()()
            running.append(reader.begin(table, streams, order["start_ms"], order["end_ms"], endpoints=endpoints))
        for read in running:
            yield None, read()

    for _, found in joined(reads()):
        yield found.decoded(table, [order["ttl_s"]], clocks=CLOCKS)


def count(batch: pa.RecordBatch, table: LogTable) -> dict[str, int]:
    """Count what is in change rows, as the peer's consumer does."""
    names = np.array([column.name for column in columns_of(table.base)])
    cells = batch["cells"].values
    name = names[cells.field("column").to_numpy()]
    values = pa.array(cells.field("value"))
    dead = cells.field("kind").to_numpy() == TOMBSTONE

    def integers(of: str, kind: str) -> int:
        return number(pc.drop_null(values.filter(pa.array((name == of) & ~dead))), kind)

    return {
        "rows": batch.num_rows,
        "deletions": pc.sum(
            pc.fill_null(pc.greater(pc.struct_field(batch["deletion"], "timestamp"), NEVER), False)
        ).as_py()
        or 0,
        "values": int((~dead).sum()),
        "text_bytes": pc.sum(pc.binary_length(values.filter(pa.array((name == "b") & ~dead)))).as_py() or 0,
        "deleted_values": int(dead.sum()),
        "sum_keys": number(batch["partition_key"], ">i4") + number(pc.binary_slice(batch["clustering"], 8, 12), ">i4"),
        "sum_a": integers("a", ">i4"),
        "sum_c": integers("c", ">i8"),
    }


def number(values: pa.Array, kind: str) -> int:
    """Sum values of one width."""
    return int(np.frombuffer(b"".join(values.to_pylist()), kind).sum(dtype=np.int64))


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    settings = ClusterSettings((order["host"],), order["port"], consistency_level="LOCAL_ONE")
    try:
        schema_session = connect(settings)
        base, log = (
            read_table(schema_session, order["keyspace"], name)
            for name in (order["table"], order["table"] + LOG_SUFFIX)
        )
        table = log_table_of(base, log)
        reader = LogReader.open(settings, Limiter())
        for number_of_pass in range(order["passes"]):
            began, cpu = time.perf_counter(), time.process_time()
            generation = read_generation(schema_session, Streams(), order["generation_ms"])
            requests = grouped(generation, ranked(read_ring(schema_session, order["keyspace"])))
            told: Counter[str] = Counter()
            for decoded in read_all(reader, requests, table, order):
                told.update(counts(decoded, table, number_of_pass == 0))
            done = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps(done | told), flush=True)
    finally:
        close_all()


def counts(decoded: LogRows, table: LogTable, thoroughly: bool) -> dict[str, int]:
    """Count change rows; each log row must have become one.

    :param thoroughly: count also what is in them
    """
    if decoded.counts.changed != decoded.counts.read or decoded.rows.num_rows != decoded.counts.read:
        raise SystemExit(f"not each log row became a change row: {decoded.counts}")
    return count(decoded.rows, table) if thoroughly else {"rows": decoded.rows.num_rows}


if __name__ == "__main__":
    main()
