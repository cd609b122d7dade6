"""One Airflow for the tests of this folder, with applications of the tests' own behind the DAGs.

spark-submit starts these as it starts the real ones, without a Spark session.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from servers.airflow import Airflow
from servers.ports import free_port

ROOT = Path(__file__).parents[2]

VERIFY = """
import os, pathlib, sys, time
table = sys.argv[sys.argv.index("--table") + 1]
if table == "shop.slow":
    pathlib.Path(__file__).parents[1].joinpath("slow").write_text(os.environ["SPARK_LOCAL_IP"])
    time.sleep(60)
if table == "shop.good":
    print("ringsync: report: {}", flush=True)
    sys.exit(0)
print(f"ringsync: error: {table} does not exist: check its name", file=sys.stderr, flush=True)
sys.exit(3)
"""

LOOP = """
import argparse, json, os, time
from datetime import datetime, UTC
from ringsync.config import load_config
from ringsync.status import STOP_KEY
from ringsync.wiring import store_of

NAME = "<name>"
LOOPS = {"bucket_close": "close", "out_of_sequence": "queue", "schema_update": "schema", "replica_merge": None,
         "archive_reprocess": None}
parser = argparse.ArgumentParser()
for option in ("--conf", "--run", "--queue"):
    parser.add_argument(option)
given = parser.parse_args()
store, started = store_of(load_config(given.conf)), datetime.now(UTC)
until = time.time() + 14_400
name = LOOPS.get(NAME, given.queue)
while name and time.time() < until and (NAME == "commitlog_archive" or store.stat(STOP_KEY) is None):
    content = {"at_ms": int(time.time() * 1000), "pid": os.getpid()}
    if NAME == "commitlog_stage":
        content["nodes"] = {"n1": {"endpoint": "127.0.0.1:9042", "up": True, "is_read": True, "refused": None}}
    store.put(f"status/{NAME}/{name}.json", json.dumps(content).encode())
    time.sleep(0.5)
report = {"application": NAME, "started_at": started.isoformat(), "rows": 17, "nodes": {"n1": {"backlog_bytes": 2.5}}}
store.put(f"reports/{NAME}/{given.run}.json", json.dumps(report).encode())
print("ringsync: report: {}", flush=True)
"""


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with applications and configuration; the tests write ``config/ringsync.yaml`` anew as they like."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("spark_apps", "config"):
        (folder / name).mkdir()
    (folder / "spark_apps" / "replica_verify.py").write_text(VERIFY)
    loops = ("commitlog_stage", "bucket_close", "out_of_sequence", "schema_update", "commitlog_archive")
    for name in (*loops, "replica_merge", "archive_reprocess"):
        (folder / "spark_apps" / f"{name}.py").write_text(LOOP.replace("<name>", name))
    shutil.copy(ROOT / "config" / "spark-log4j2.properties", folder / "config")
    (folder / "config" / "ringsync.yaml").write_text(
        "server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: ../lake}\n"
    )
    return folder


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """What an OpenTelemetry collector gets."""
    with Collector() as found:
        yield found


@pytest.fixture(scope="package")
def airflow(project: Path, collector: Collector) -> Iterator[Airflow]:
    """Airflow, which sends its metrics to the collector."""
    environment = {
        "RINGSYNC_HOME": str(project),
        "RINGSYNC_CONFIG": str(project / "config" / "ringsync.yaml"),
        "AIRFLOW__METRICS__OTEL_ON": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    home = project / "airflow"
    with Airflow(home=home, port=free_port(), dags=ROOT / "dags", environment=environment) as started:
        yield started


class Collector:
    """Takes metrics over OTLP/HTTP."""

    def __init__(self) -> None:
        self.numbers: list[tuple[str, float, dict[str, str]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Keep quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in (*metric.gauge.data_points, *metric.sum.data_points):
                    tags = {tag.key: tag.value.string_value for tag in point.attributes}
                    self.numbers.append((metric.name, point.as_double or point.as_int, tags))
