"""Measure a backlog of one node that Debezium drains into Kafka, and our reader into staging files.

``commitlog_backlog.py ORDER``

ORDER is JSON: ``rows``; ``core``, ``kernels`` and ``scratch`` as in bench/commitlog.py; ``alone``: the process has a
network of its own, and must switch its loopback interface on. It prints a line of JSON.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "include"))

from peers import debezium
from peers.log import KEYSPACE, SETTINGS, create_tables, schema_file, segments_in, write
from peers.network import switch_loopback_on
from peers.one_core import on_one_core

from servers.cassandra import CassandraNode
from servers.kafka import BrokerSettings, KafkaBroker

ROOT = Path(__file__).parent.parent
SYNC_SECONDS = 3.0


def main() -> None:
    """Execute the order."""
    order = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception stops the servers
    if order["alone"]:
        switch_loopback_on()
    scratch = Path(order["scratch"])
    cache = ROOT / ".cache"
    settings = replace(SETTINGS, segment_mib=1).on_free_ports()
    with CassandraNode(scratch / "node", settings, cache) as node:
        create_tables(node)
        write(node, "uniform", order["rows"])
        time.sleep(SYNC_SECONDS)  # the log and its idx files are synced once a second
        with KafkaBroker(scratch / "kafka", BrokerSettings(heap_mb=512).on_free_ports(), cache) as broker:
            # Debezium deletes the segments that it has read, so our reader is first, beside the same idle servers.
            result = {"ours": ours(node, order, scratch)}
            folder = scratch / "debezium"
            folder.mkdir()
            result["debezium"] = asdict(debezium.drain(node, broker, KEYSPACE, "orders", order["rows"], folder))
    print(json.dumps(result))


def ours(node: CassandraNode, order: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run our reader on the same segments, in a new process on one core, until the last staging file is on disk."""
    segments = segments_in(node.cdc_raw)
    staging = scratch / "staging"
    staging.mkdir()
    request = {
        "schema": str(schema_file(scratch)),
        "segments": [str(segment) for segment in segments],
        "passes": 1,
        "target": str(staging),
        "one_file": True,
    }
    program = str(Path(__file__).with_name("commitlog_ours.py"))
    variables = {"NUMBA_CACHE_DIR": order["kernels"], "OMP_NUM_THREADS": "1"}
    done = on_one_core([sys.executable, program, json.dumps(request)], order["core"], "Our reader", variables)
    shutil.rmtree(staging)
    return {
        "rows": done.passes[0].rows,
        "first_seconds": done.ready_seconds,
        "last_seconds": done.end_seconds,
        "pass_seconds": done.passes[0].seconds,
        "cpu_seconds": done.cpu_seconds,
        "megabytes": done.passes[0].written / 1e6,
    }


if __name__ == "__main__":
    main()
