"""Run our side of bench/commitlog.py, in a process of its own: ``python bench/commitlog_ours.py ORDER``.

ORDER is JSON: ``schema``, a file; ``segments``; ``passes``; ``target``, a folder for staging Parquet (null: change rows
are dropped); ``one_file``: whether one file holds all segments. It prints a line of JSON after the first batch and
for each pass.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import pyarrow as pa
import pyarrow.parquet as pq

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.formats.commitlog.reader import read_log
from ringsync.schema.from_cql import parse_schema

ROW_GROUP_ROWS = 65_536


class Staging:
    """A Parquet file of change rows, durable when it is closed.

    :param path: path of the file
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = pq.ParquetWriter(
            path,
            CHANGE_ROWS,
            compression="zstd",
            compression_level=1,
            use_dictionary=["table_id", "file"],
            write_statistics=["token"],
        )
        self._waiting: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Append change rows; write a row group when it is full."""
        self._waiting.append(batch)
        if sum(batch.num_rows for batch in self._waiting) >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> int:
        """Write the rest, and wait until it is on disk; return the bytes of the file."""
        self._flush()
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._path.stat().st_size

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting), ROW_GROUP_ROWS * 2)
            self._waiting.clear()


def read(
    segments: list[Path], tables: LoggedTables, target: Path | None, one_file: bool, first: bool
) -> dict[str, Any]:
    """Decode all segments, and write staging files if there is a target; return the counts."""
    mutations = rows = cells = written = 0
    staging: Staging | None = None
    for segment in segments:
        changes = read_log(segment.read_bytes(), segment.name, tables)
        if changes.damages:
            raise SystemExit(f"{segment} is damaged: {changes.damages[0].reason}")
        if target and staging is None:
            staging = Staging(target / f"{segment.stem}.parquet")
        for batch in changes.batches:
            if first:
                print(json.dumps({"first_batch": time.monotonic()}))
                first = False
            rows += batch.rows.num_rows
            cells += len(batch.rows["cells"].values)
            if staging:
                staging.add(batch.rows)
        mutations += changes.records
        if staging and (not one_file or segment == segments[-1]):
            written += staging.close()
            staging = None
    return {"mutations": mutations, "rows": rows, "cells": cells, "written": written}


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    schema = parse_schema(Path(order["schema"]).read_text(), order["schema"])
    tables = logged_tables(schema.tables)
    target = Path(order["target"]) if order["target"] else None
    for number in range(order["passes"]):
        began, cpu = time.perf_counter(), time.process_time()
        segments = [Path(segment) for segment in order["segments"]]
        done = read(segments, tables, target, order.get("one_file", False), number == 0)
        done |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(done))


if __name__ == "__main__":
    main()
