"""Run the plain-Python equivalent of our decoder: the tests' model, which also decodes values, and keeps everything.

``python bench/peers/plain_python.py ORDER``; ORDER is JSON: ``schema``, a file; ``segment``; ``bytes`` of it to read.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.segment import read_segment


def main() -> None:
    """Read the beginning of a segment once; print a line as bench/peers/one_core.py reads it."""
    order = json.loads(sys.argv[1])
    tables = parse_schema(Path(order["schema"]).read_text())
    data = Path(order["segment"]).read_bytes()
    began, cpu = time.perf_counter(), time.process_time()
    segment = read_segment(data, tables, Path(order["segment"]).name, end=order["bytes"])
    done = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    done["mutations"] = len({change["source"]["position"] for change in segment.changes})
    done["rows"] = len(segment.changes)
    done["cells"] = sum(len(change.get("cells", ())) for change in segment.changes)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
