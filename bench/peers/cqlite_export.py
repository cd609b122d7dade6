"""Export a table by cqlite-py to Parquet, in a process of its own: ``python bench/peers/cqlite_export.py ORDER``.

ORDER is JSON: ``package``, the folder that has cqlite; ``folder`` of a snapshot; ``table``; ``passes``; ``target``, a
folder for the file. It prints a line of JSON for each pass.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    sys.path.insert(0, order["package"])
    import cqlite

    path = Path(order["target"]) / "cqlite.parquet"
    (schema,) = Path(order["folder"]).rglob("schema.cql")
    for _ in range(order["passes"]):
        began, cpu = time.perf_counter(), time.process_time()
        with cqlite.open(order["folder"], schema=str(schema)) as database:
            rows = database.export_parquet(f"SELECT * FROM {order['table']}", str(path), row_group_size=65_536)
        done = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(done | {"mutations": rows, "rows": rows, "cells": 0, "written": path.stat().st_size}))


if __name__ == "__main__":
    main()
