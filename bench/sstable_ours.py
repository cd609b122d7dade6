"""Run our side of bench/sstable.py, in a process of its own: ``python bench/sstable_ours.py ORDER``.

ORDER is JSON: ``folder`` of a snapshot; ``what``: ``arrow`` (change rows, file by file), ``changes`` (reconciled change
rows), ``images`` (typed rows with their times), ``values`` (without), ``times`` or ``parquet`` (images or values in a
file, snappy); ``passes``; ``target``, a folder for the file. It prints a line of JSON for each pass.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

import pyarrow as pa
import pyarrow.parquet as pq

from ringsync.formats.sstable.sstables import SSTable, merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.images.values import repeating_columns, shown_values
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import TableSchema
from ringsync.sources.sstable_files import choose_table, files_in_folder

ROW_GROUP_ROWS = 65_536


def refuse(loss: object) -> None:
    """End: the files are sound."""
    raise SystemExit(f"a part cannot be read: {loss}")


def batches(sstables: list[SSTable], table: TableSchema, what: str) -> Iterator[pa.RecordBatch]:
    """Yield what is asked for."""
    parts = [(sstable, part) for sstable in sstables for part in sstable.parts(WHOLE_RING)]
    if what == "arrow":
        for sstable, part in parts:
            for batch in sstable.rows(part):
                if batch.losses:
                    refuse(batch.losses[0])
                yield batch.rows
        return
    merged = merged_rows(parts, table, refuse, with_source=what == "changes")
    if what in ("values", "parquet"):
        yield from shown_values(merged, table, int(time.time()))
        return
    for part in merged:
        yield part.rows.to_arrow() if what == "changes" else images_of_part(part, table, "raw")


def read(folder: Path, what: str, target: Path) -> dict[str, int]:
    """Read a snapshot; return the counts."""
    table, sources = choose_table(files_in_folder(folder))
    sstables = [open_sstable(source, table) for source in sources]
    rows = written = 0
    if what not in ("times", "parquet"):
        rows = sum(batch.num_rows for batch in batches(sstables, table, what))
    else:
        path = target / "rows.parquet"
        found = batches(sstables, table, what)
        first = next(found)
        # As inspect sstable does.
        dictionaries = repeating_columns(first) if what == "parquet" else True
        with pq.ParquetWriter(path, first.schema, compression="snappy", use_dictionary=dictionaries) as writer:
            for batch in itertools.chain([first], found):
                writer.write_batch(batch, ROW_GROUP_ROWS)
                rows += batch.num_rows
        written = path.stat().st_size
    return {"mutations": rows, "rows": rows, "cells": 0, "written": written}


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    pa.set_cpu_count(1)
    for _ in range(order["passes"]):
        began, cpu = time.perf_counter(), time.process_time()
        done: dict[str, float] = dict(read(Path(order["folder"]), order["what"], Path(order["target"])))
        done |= {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(done))


if __name__ == "__main__":
    main()
