"""Numbers of the sync for monitoring: as Prometheus reads them from a file, and as Airflow sends them.

Prometheus gets the status of the loops all the time (:mod:`ringsync.status`); Airflow's own metrics get the report of
each task at its end. The DAGs import this module, so it imports only the standard library.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Family:
    """A metric: all numbers of one name.

    :ivar source: keys of the status object, from outside to inside, joined by dots
    :ivar scale: factor for the status object's number: Prometheus counts in seconds and bytes
    :ivar labels: labels of all its numbers, in addition to node, queue or table
    """

    source: str
    name: str
    kind: Kind
    help: str
    scale: float = 1
    labels: Mapping[str, str] = field(default_factory=dict)


Sample = tuple[Family, Mapping[str, str], float]
"""One number and its labels."""

_LAG = ("ringsync_table_lag_seconds", "gauge", "Time from the write to the message, or to agreement, replica or Kafka")
_BEHIND = ("ringsync_table_behind_seconds", "gauge", "How long ago the oldest changes were published that it lacks")
_AT = Family("at_ms", "ringsync_status_timestamp_seconds", "gauge", "When the loop last gave a sign of life", 1e-3)

STAGE = (
    Family("up", "ringsync_node_up", "gauge", "Whether the cluster takes the node for alive"),
    Family("error", "ringsync_node_failing", "gauge", "Whether the node's log cannot be read"),
    Family("position", "ringsync_node_position_bytes", "gauge", "How far the node's newest segment has been read"),
    Family("backlog_bytes", "ringsync_node_backlog_bytes", "gauge", "Synced commit log that has not been read yet"),
    Family("records", "ringsync_node_records_total", "counter", "Commit log records read by this run"),
    Family("rows", "ringsync_node_rows_total", "counter", "Change rows read by this run"),
    Family("late", "ringsync_node_late_total", "counter", "Change rows that came after their bucket closed"),
    Family("errors", "ringsync_node_errors_total", "counter", "Records that could not be decoded"),
)
"""Metrics of each node, from ``commitlog_stage``."""

LOG = (
    Family("behind_ms", "ringsync_log_behind_seconds", "gauge", "Age of the newest write that has been read", 1e-3),
    Family("error", "ringsync_log_failing", "gauge", "Whether the table's CDC log cannot be read"),
    Family("waiting", "ringsync_log_waiting", "gauge", "Groups of log rows that are not complete yet"),
)
"""Metrics of each table's CDC log, from ``scylla_log_stage``."""

LOGS = (
    Family("clear_at_ms", "ringsync_logs_read_timestamp_seconds", "gauge", "All logs are read up to this moment", 1e-3),
    Family("clock_skew_ms", "ringsync_logs_clock_skew_seconds", "gauge", "Greatest error of a node's clock", 1e-3),
    Family("generations", "ringsync_logs_generations", "gauge", "Generations of CDC streams that are known"),
    Family("rows", "ringsync_logs_rows_total", "counter", "Rows of CDC logs read by this run"),
    Family("errors", "ringsync_logs_errors_total", "counter", "Rows of CDC logs that could not be decoded"),
)
"""Metrics of all CDC logs together, from ``scylla_log_stage``."""

CLOSE = (
    Family("open_buckets", "ringsync_table_open_buckets", "gauge", "Buckets that are not wholly published"),
    Family("last_pass", "ringsync_table_pass", "gauge", "Number of the last pass that was published"),
    Family("replica_pass", "ringsync_table_replica_pass", "gauge", "Number of the last pass in the replica"),
    Family("kafka_messages", "ringsync_table_kafka_messages_total", "counter", "Messages relayed to Kafka by this run"),
    Family("rows_published", "ringsync_table_rows_total", "counter", "Change rows published by this run"),
    Family("duplicates", "ringsync_table_duplicates_total", "counter", "Copies of published rows on other replicas"),
    Family("only_one_replica", "ringsync_table_only_one_replica_total", "counter", "Rows that only one replica had"),
    Family("lag_ms.message_p50", *_LAG, 1e-3, {"until": "message", "quantile": "0.5"}),  # type: ignore[arg-type]
    Family("lag_ms.message_p99", *_LAG, 1e-3, {"until": "message", "quantile": "0.99"}),  # type: ignore[arg-type]
    Family("lag_ms.agreement_p50", *_LAG, 1e-3, {"until": "agreement", "quantile": "0.5"}),  # type: ignore[arg-type]
    Family("lag_ms.replica_p50", *_LAG, 1e-3, {"until": "replica", "quantile": "0.5"}),  # type: ignore[arg-type]
    Family("lag_ms.kafka_p50", *_LAG, 1e-3, {"until": "kafka", "quantile": "0.5"}),  # type: ignore[arg-type]
    Family("behind_ms.replica", *_BEHIND, 1e-3, {"reader": "replica"}),  # type: ignore[arg-type]
    Family("behind_ms.kafka", *_BEHIND, 1e-3, {"reader": "kafka"}),  # type: ignore[arg-type]
)
"""Metrics of each table, from ``bucket_close``."""

ARCHIVE = (
    Family("free_bytes", "ringsync_node_cdc_raw_free_bytes", "gauge", "Room in the node's cdc_raw"),
    Family("total_bytes", "ringsync_node_cdc_raw_limit_bytes", "gauge", "The node's cdc_total_space"),
    Family("waiting", "ringsync_node_cdc_raw_segments", "gauge", "Finished segments in the node's cdc_raw"),
    Family("archived", "ringsync_node_archived_total", "counter", "Segments that this run has archived"),
    Family("error", "ringsync_node_archive_failing", "gauge", "Whether too little room is left, or it is unknown"),
)
"""Metrics of each node, from ``commitlog_archive``."""

LATE = (
    Family("waiting", "ringsync_late_waiting", "gauge", "Late rows that wait to be published"),
    Family("oldest_ms", "ringsync_late_oldest_timestamp_seconds", "gauge", "Since when the first of them waits", 1e-3),
    Family("published", "ringsync_late_published_total", "counter", "Late rows published by this run"),
    Family("duplicates", "ringsync_late_duplicates_total", "counter", "Late rows that were published before"),
)
"""Metrics of the queue, from ``out_of_sequence``."""

ARCHIVED = (
    Family("waiting", "ringsync_archive_waiting", "gauge", "Archived segments that are still to be read"),
    Family("bytes", "ringsync_archive_waiting_bytes", "gauge", "Bytes of the archived segments that are to be read"),
    Family("oldest_ms", "ringsync_archive_oldest_timestamp_seconds", "gauge", "When the first was archived", 1e-3),
)
"""Metrics of the archive, counted by who looks."""

DOWN = (Family("since_ms", "ringsync_node_down_timestamp_seconds", "gauge", "Since when the node is down", 1e-3),)
"""Metrics of each node that is down, by the plan of the sync."""

_OF_ALL = {"out_of_sequence": LATE, "scylla_log_stage": LOGS, "archive": ARCHIVED}

ALARM = Family("", "ringsync_alarm", "gauge", "A problem that lasts: docs/runbook.md says what to do")
"""1 for each alarm that is raised, from the DAG ``alarms``."""


def samples(statuses: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Read all numbers in the loops' status objects (:func:`ringsync.status.read_statuses`)."""
    for key, status in statuses.items():
        application, _, name = key.partition("/")
        yield from _numbers((_AT,), status, {"loop": application, "queue": name})
        for node, inner in status.get("nodes", {}).items():
            labels = {"node": node, "endpoint": str(inner.get("endpoint", "")), "queue": name}
            yield from _numbers(ARCHIVE if application == "commitlog_archive" else STAGE, inner, labels)
        for table, inner in status.get("tables", {}).items():
            yield from _numbers(CLOSE, inner, {"table": table})
        for table, inner in status.get("logs", {}).items():
            yield from _numbers(LOG, inner, {"table": table})
        for node, inner in status.get("down", {}).items():
            yield from _numbers(DOWN, inner, {"node": node, "endpoint": str(inner.get("endpoint", ""))})
        if application in _OF_ALL:
            yield from _numbers(_OF_ALL[application], status, {})


def _numbers(families: Iterable[Family], status: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Sample]:
    for family in families:
        value: Any = status
        for part in family.source.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if family.source == "error":
            value = value is not None
        if isinstance(value, int | float):
            yield family, {**labels, **family.labels}, value * family.scale


def exposition(statuses: Mapping[str, Mapping[str, Any]], alarms: Iterable[Mapping[str, str]] = ()) -> str:
    """Format the numbers as Prometheus reads them (its text format 0.0.4).

    :param alarms: labels of the alarms that are raised now
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in (*samples(statuses), *((ALARM, labels, 1.0) for labels in alarms)):
        by_name.setdefault(sample[0].name, []).append(sample)
    lines = []
    for name, members in sorted(by_name.items()):
        family = members[0][0]
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for _, labels, value in members:
            texts = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{texts}}} {value!r}" if texts else f"{name} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write_prometheus(
    path: str | Path, statuses: Mapping[str, Mapping[str, Any]], alarms: Iterable[Mapping[str, str]] = ()
) -> None:
    """Replace a file of Prometheus's textfile collector at once: readers see the old file or the new one.

    :param path: ``metrics.prometheus_file``; its folder must exist
    :param alarms: labels of the alarms that are raised now
    :raises OSError: the file cannot be written
    """
    path = Path(path)
    # The collector reads *.prom only, and may run as another user.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(exposition(statuses, alarms))
            os.fchmod(descriptor, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass(frozen=True)
class Reported:
    """A number in an application's report, for Airflow's metrics.

    :ivar name: e.g. ``ringsync.bucket_close.duplicates``
    :ivar tags: application, and table or node if the number belongs to one
    """

    name: str
    kind: Kind
    value: float
    tags: Mapping[str, str]


COUNTED = frozenset(
    [
        *("records", "rows", "cells", "ranges", "bytes", "pages", "files", "messages", "staged", "late", "errors"),
        *("repeated", "not_cdc", "published", "duplicates", "rows_published", "only_one_replica", "superseded"),
        "differences",
    ]
)
"""Keys of reports that add up over runs; all other numbers are gauges."""

_TAGS = {"tables": "table", "logs": "table", "merged": "table", "nodes": "node"}
_NOT_METRICS = frozenset({"exit_code", "at_ms", "clear_at_ms", "until_ms", "waiting_from_ms"})


def report_metrics(report: Mapping[str, Any]) -> list[Reported]:
    """Return the numbers of a report, also those within objects; ``tables``, ``logs`` and ``nodes`` become tags.

    :param report: ``reports/<application>/<run>.json``
    """
    tags = {"application": str(report["application"])}
    if report.get("table") and report.get("keyspace"):
        tags["table"] = f"{report['keyspace']}.{report['table']}"
    # Of several tables the counters are told table by table: their sums would count all twice.
    summed = COUNTED if "tables_done" in report else frozenset()
    told = {name: value for name, value in report.items() if name not in summed}
    return list(_reported(told, f"ringsync.{report['application']}", tags))


def _reported(document: Mapping[str, Any], name: str, tags: Mapping[str, str]) -> Iterator[Reported]:
    for key, value in document.items():
        path = f"{name}.{re.sub(r'[^A-Za-z0-9_.-]', '_', key)}"
        if isinstance(value, Mapping) and key in _TAGS:
            for member, inner in value.items():
                if isinstance(inner, Mapping):
                    yield from _reported(inner, name, {**tags, _TAGS[key]: member})
        elif isinstance(value, Mapping):
            yield from _reported(value, path, tags)
        elif isinstance(value, int | float) and not isinstance(value, bool) and key not in _NOT_METRICS:
            yield Reported(path, "counter" if key in COUNTED else "gauge", value, tags)
