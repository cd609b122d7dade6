"""The status of the sync as tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ringsync.airflow_client import DagHealth
from ringsync.ledger.proofs import PROOFS
from ringsync.progress import duration
from ringsync.service.delays import ARCHIVE_WAITS
from ringsync.service.expected import ARCHIVE, CLOSE, LOG_STAGE, SCHEMA
from ringsync.status import BOOTSTRAPS, NODES, Status, age_s

Row = Sequence[Any]

UNREAD = (
    "What is written there is published once a node that is read has logged it: as its replica, or by a hint, a read "
    "or a repair."
)
"""Said of datacenters that ``sync.datacenters`` leaves out: it is as somebody wants it, and no problem."""


def status_lines(statuses: Mapping[str, Status], dags: Mapping[str, DagHealth], now_s: float) -> Iterator[str]:
    """Format the whole status for people.

    :param now_s: present time, seconds since the epoch
    """
    yield from _table("DAG, state, tasks", [_dag(dag, health) for dag, health in dags.items()])
    bootstraps = {key: status for key, status in statuses.items() if key.startswith(BOOTSTRAPS)}
    yield from _table(
        "loop, last sign of life",
        [
            (loop, f"{age_s(status, now_s):.0f} s ago")
            for loop, status in statuses.items()
            if loop not in (*bootstraps, ARCHIVE_WAITS, NODES, PROOFS)
        ],
    )
    yield from _table(
        "bootstrap of, step, copied, id, last sign of life",
        [
            (entry["table"], entry["step"], f"{entry['fraction']:.0%}", entry["bootstrap"], _ago(entry["at_ms"], now_s))
            for entry in bootstraps.values()
        ],
    )
    archives = {key: status for key, status in statuses.items() if key.startswith(ARCHIVE)}
    stages = (status for key, status in statuses.items() if key not in archives)
    nodes = [node for status in stages for node in status.get("nodes", {}).items()]
    yield from _table(
        "node, state, segment, position, backlog MB, records, rows, late, errors",
        [_node(host, node) for host, node in nodes],
    )
    if of_logs := statuses.get(LOG_STAGE):
        yield from _table(
            "CDC log of, read up to, behind s, groups waiting, error",
            [_log(name, log, now_s) for name, log in of_logs.get("logs", {}).items()],
        )
        yield from _table("generations, clock skew s, log rows, errors", [_of_all_logs(of_logs)])
    if left_out := statuses.get(CLOSE, {}).get("datacenters_left_out"):
        yield from _table("not read (sync.datacenters), nodes", [(dc, ", ".join(of)) for dc, of in left_out.items()])
        yield f"{UNREAD}\n"
    watched = [node for status in archives.values() for node in status.get("nodes", {}).values()]
    yield from _table(
        "cdc_raw of, MB free, of MB, finished segments, archived by this run",
        [
            (
                node.get("endpoint"),
                *(_mb(node.get(name)) for name in ("free_bytes", "total_bytes")),
                node.get("waiting"),
                node.get("archived"),
            )
            for node in watched
        ],
    )
    if archived := statuses.get(ARCHIVE_WAITS):
        size, oldest = f"{(archived.get('bytes') or 0) / 1e6:,.1f}", _ago(archived.get("oldest_ms"), now_s)
        yield from _table("archived segments waiting, MB, oldest", [(archived.get("waiting"), size, oldest)])
    down, window_ms = statuses.get(NODES, {}).get("down", {}).values(), statuses.get(NODES, {}).get("hint_window_ms")
    yield from _table(
        "node that is down, since, hints are kept for",
        [(node["endpoint"], _ago(node["since_ms"], now_s), window_ms and duration(window_ms / 1000)) for node in down],
    )
    tables = [table for status in statuses.values() for table in status.get("tables", {}).items()]
    yield from _table(
        "table, lag p50 s, p99 s, agreement s, replica s, kafka s, open buckets, oldest, last pass, replica, to kafka, "
        "rows, duplicates, only one replica",
        [_published(name, table, now_s) for name, table in tables],
    )
    yield from _table(
        "replica of, proved equal, token ranges that differ, of",
        [
            (table, _ago(proof["proved_ms"] or None, now_s), proof["ranges_differing"], proof["ranges"])
            for table, proof in statuses.get(PROOFS, {}).get("proofs", {}).items()
        ],
    )
    if late := statuses.get("out_of_sequence/queue"):
        yield from _table(
            "late rows waiting, oldest, published, duplicates",
            [(late.get("waiting"), _ago(late.get("oldest_ms"), now_s), late.get("published"), late.get("duplicates"))],
        )
    if schema := statuses.get(SCHEMA):
        yield from _table(
            "schema changes, to kafka, tables, nodes disagree since",
            [
                (
                    *(schema.get(name) for name in ("changes", "kafka_changes", "tables_recorded")),
                    _ago(schema.get("disagreement_since_ms"), now_s),
                )
            ],
        )


def _dag(dag: str, health: DagHealth) -> Row:
    if health.run is None:
        return dag, "paused" if health.paused else "not run yet", ""
    tasks = ", ".join(
        f"{task.task} {task.state}" + (f" (try {task.try_number})" if task.try_number > 1 else "")
        for task in health.run.tasks
    )
    return dag, f"paused ({health.run.state})" if health.paused else health.run.state, tasks


def _node(host: str, node: Status) -> Row:
    backlog = node.get("backlog_bytes")
    return (
        node.get("endpoint") or host,
        "left" if node.get("left") else "up" if node.get("up") else "down",
        node.get("segment"),
        node.get("position"),
        None if backlog is None else f"{backlog / 1e6:,.1f}",
        *(node.get(name) for name in ("records", "rows", "late", "errors")),
    )


def _log(name: str, log: Status, now_s: float) -> Row:
    behind_ms = log.get("behind_ms")
    if behind_ms is None:  # it is not read yet
        return name, None, None, log.get("waiting"), log.get("error")
    until_s = (log.get("until_ms") or 0) / 1000
    until = datetime.fromtimestamp(until_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return name, until, f"{now_s - until_s:,.1f}", log.get("waiting"), log.get("error")


def _of_all_logs(status: Status) -> Row:
    skew_ms = status.get("clock_skew_ms")
    skew = None if skew_ms is None else f"{skew_ms / 1000:,.1f}"
    return status.get("generations"), skew, status.get("rows"), status.get("errors")


def _published(name: str, table: Status, now_s: float) -> Row:
    lag = table.get("lag_ms") or {}
    seconds = [
        None if lag.get(lag_name) is None else f"{lag[lag_name] / 1000:,.1f}"
        for lag_name in ("message_p50", "message_p99", "agreement_p50", "replica_p50", "kafka_p50")
    ]
    counts = [table.get(name) for name in ("last_pass", "replica_pass", "kafka_messages")]
    rows = [table.get(name) for name in ("rows_published", "duplicates", "only_one_replica")]
    return name, *seconds, table.get("open_buckets"), _ago(table.get("oldest_open_bucket_ms"), now_s), *counts, *rows


def _mb(count: int | None) -> int | None:
    return None if count is None else count // 2**20


def _ago(moment_ms: int | None, now_s: float) -> str | None:
    return None if moment_ms is None else f"{duration(max(0.0, now_s - moment_ms / 1000))} ago"


def _table(head: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with columns as wide as needed; nothing if there are no rows.

    :param head: names of the columns, with commas between
    """
    if not rows:
        return
    texts = [head.split(", "), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    yield ""


def _text(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
