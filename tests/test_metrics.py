"""The numbers of the sync as Prometheus and Airflow get them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from ringsync.metrics import exposition, report_metrics, write_prometheus

NODE = {
    **{"endpoint": "10.0.0.1:9042", "up": True, "segment": 17, "position": 4096, "backlog_bytes": 0, "records": 5},
    **{"rows": 9, "late": 1, "errors": 0, "error": None},
}
TABLE = {
    **{"table_id": "00", "open_buckets": 2, "oldest_open_bucket_ms": 1_000, "last_pass": 7, "rows_published": 40},
    **{"duplicates": 80, "only_one_replica": 0, "replica_pass": 6, "kafka_messages": None},
    "lag_ms": {"message_p50": 1500, "message_p99": 20_000, "agreement_p50": None},
}
STATUSES: dict[str, Any] = {
    "commitlog_stage/rack-a": {"at_ms": 12_500, "nodes": {"4e5d": NODE, "77": {**NODE, "error": "no such folder"}}},
    "bucket_close/close": {"at_ms": 13_000, "tables": {"shop.orders": TABLE, 'a."b\\c"\n': TABLE}},
    "out_of_sequence/queue": {"at_ms": 13_000, "waiting": 3, "published": 1, "duplicates": 2, "oldest_ms": None},
}
LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
"""A sample of Prometheus's text format."""


def read(text: str) -> dict[tuple[str, str], float]:
    """The samples by name and labels; every family must be together, behind its type."""
    found: dict[tuple[str, str], float] = {}
    family, seen = "", set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split()
            assert family not in seen
            assert (kind == "counter") == family.endswith("_total")
            seen.add(family)
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            assert match[1] == family
            assert (match[1], match[2] or "") not in found
            found[match[1], match[2] or ""] = float(match[3])
    return found


def test_prometheus_gets_every_number_in_its_base_unit() -> None:
    found = read(exposition(STATUSES))
    node = 'node="4e5d",endpoint="10.0.0.1:9042",queue="rack-a"'
    assert found["ringsync_node_backlog_bytes", node] == 0
    assert found["ringsync_node_up", node] == 1
    assert found["ringsync_node_rows_total", node] == 9
    assert found["ringsync_node_failing", node] == 0
    assert found["ringsync_node_failing", node.replace("4e5d", "77")] == 1
    table = 'table="shop.orders"'
    assert found["ringsync_table_lag_seconds", f'{table},until="message",quantile="0.99"'] == 20
    assert found["ringsync_table_replica_pass", table] == 6
    assert ("ringsync_table_kafka_messages_total", table) not in found
    assert found["ringsync_table_pass", r'table="a.\"b\\c\"\n"'] == 7
    assert found["ringsync_late_waiting", ""] == 3
    loop = 'loop="commitlog_stage",queue="rack-a"'
    assert found["ringsync_status_timestamp_seconds", loop] == 12.5


def test_the_file_is_replaced_at_once_and_can_be_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "ringsync.prom"
    write_prometheus(path, {})
    assert path.read_text() == ""
    write_prometheus(path, STATUSES)
    assert path.read_text() == exposition(STATUSES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "ringsync.prom").mkdir()
    with pytest.raises(OSError, match=r"ringsync\.prom"):
        write_prometheus(tmp_path / "ringsync.prom", STATUSES)
    assert os.listdir(tmp_path) == ["ringsync.prom"]


def test_airflow_gets_the_numbers_of_a_report() -> None:
    report = {
        **{"application": "bucket_close", "run": "r", "started_at": "2026-11-21T04:20:00Z", "exit_code": 0},
        **{"seconds": 600.5, "dry_run": False, "tables": {"shop.orders": TABLE}, "forecast": {"rows low": 3}},
    }
    found = {(one.name.removeprefix("ringsync.bucket_close."), one.kind): one for one in report_metrics(report)}
    assert set(found) == {
        *(("seconds", "gauge"), ("forecast.rows_low", "gauge"), ("open_buckets", "gauge"), ("last_pass", "gauge")),
        *(("oldest_open_bucket_ms", "gauge"), ("replica_pass", "gauge"), ("lag_ms.message_p50", "gauge")),
        *(("lag_ms.message_p99", "gauge"), ("rows_published", "counter"), ("duplicates", "counter")),
        ("only_one_replica", "counter"),
    }
    assert found["duplicates", "counter"].value == 80
    assert found["duplicates", "counter"].tags == {"application": "bucket_close", "table": "shop.orders"}
    assert found["seconds", "gauge"].tags == {"application": "bucket_close"}


def test_a_report_of_one_table_bears_its_name() -> None:
    report = {"application": "bootstrap_scan", "keyspace": "shop", "table": "orders", "rows": 5}
    (rows,) = report_metrics(report)
    assert (rows.name, rows.kind, rows.value) == ("ringsync.bootstrap_scan.rows", "counter", 5)
    assert rows.tags == {"application": "bootstrap_scan", "table": "shop.orders"}


def test_of_several_tables_nothing_is_counted_twice() -> None:
    tables = {"shop.a": {"rows": 3}, "shop.b": {"rows": 4}}
    failed = {"shop.c": {"error": "no rights", "exit_code": 3}}
    sums = {"rows": 7, "tables_done": 2, "tables_failed": 1, "failed": failed}
    found = report_metrics({"application": "bootstrap_scan", "tables": tables, **sums})
    assert {(one.name, one.tags.get("table"), one.value) for one in found} == {
        ("ringsync.bootstrap_scan.rows", "shop.a", 3),
        ("ringsync.bootstrap_scan.rows", "shop.b", 4),
        ("ringsync.bootstrap_scan.tables_done", None, 2),
        ("ringsync.bootstrap_scan.tables_failed", None, 1),
    }
