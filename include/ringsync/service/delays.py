"""What is later than it may be: tables, replicas, Kafka, late rows, archived segments, and nodes that are down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ringsync.config import Config
from ringsync.ledger.waiting_segments import waiting
from ringsync.progress import duration
from ringsync.service.problem import Kind, Problem
from ringsync.status import Status
from ringsync.storage.port import ObjectStore

ARCHIVE_WAITS = "archive/waiting"
"""Name of the status of the archived segments that are still to be read. No loop puts it: whoever looks counts them."""


def counted(store: ObjectStore) -> dict[str, Status]:
    """Count what waits in the store and no loop tells, in the form of a status.

    :raises UnavailableError: the store cannot be used
    """
    found = waiting(store)
    if not found.segments:
        return {}
    return {ARCHIVE_WAITS: {"waiting": found.segments, "bytes": found.size, "oldest_ms": found.oldest_ms}}


@dataclass(frozen=True)
class Limits:
    """How late something may be, s.

    :ivar bucket_s: age of a table's oldest open bucket, and of what is read last of its log; and the longest wait of an
        archived segment
    :ivar reader_s: how long ago something was published that replica or Kafka lack
    :ivar late_s: longest wait of a late row
    """

    bucket_s: float = math.inf
    reader_s: float = math.inf
    late_s: float = math.inf

    @staticmethod
    def of(config: Config) -> Limits:
        """Return the limits of a configuration: a bucket has its ordinary life, and ``alarms.lag_s``."""
        open_ms = config.commitlog_processor_window_count * config.commitlog_processor_window_interval_ms
        alarms = config.alarms
        return Limits(open_ms / 1000 + alarms.lag_s, alarms.lag_s, alarms.late_s)


def delays(loop: str, status: Status, limits: Limits, now_s: float) -> Iterator[Problem]:
    """Yield what the status of a loop tells of delays.

    :param now_s: present time, seconds since the epoch
    """
    for table, fields in status.get("tables", {}).items():
        yield from _of_table(table, fields, limits, now_s)
    for table, log in status.get("logs", {}).items():
        is_read = log.get("behind_ms") is not None and not log.get("error")
        if is_read and (age := now_s - (log.get("until_ms") or 0) / 1000) > limits.bucket_s:
            text = f"{table}: its log is read only up to what was written {duration(age)} ago"
            yield Problem(Kind.TABLE_LAGGING, table, text)
    for down in status.get("down", {}).values():
        yield from _of_node(down, status.get("hint_window_ms"), now_s)
    since_ms = status.get("oldest_ms")
    if since_ms is None:
        return
    age, count = now_s - since_ms / 1000, status.get("waiting") or 0
    if loop == ARCHIVE_WAITS and age > limits.bucket_s:
        text = (
            f"{count:,} archived segments ({(status.get('bytes') or 0) / 1e6:,.0f} MB) are not read, the oldest has "
            f"waited for {duration(age)}: does the DAG archive_reprocess run?"
        )
        yield Problem(Kind.ARCHIVE_WAITING, "cdc/", text)
    elif loop != ARCHIVE_WAITS and age > limits.late_s:
        text = f"{loop}: {count:,} late rows are not published, the oldest has waited for {duration(age)}"
        yield Problem(Kind.LATE_ROWS_WAITING, loop, text)


def _of_table(table: str, fields: Status, limits: Limits, now_s: float) -> Iterator[Problem]:
    since_ms = fields.get("oldest_open_bucket_ms")
    if since_ms is not None and (age := now_s - since_ms / 1000) > limits.bucket_s:
        text = f"{table}: changes written {duration(age)} ago are not published yet"
        yield Problem(Kind.TABLE_LAGGING, table, text)
    behind = fields.get("behind_ms", {})
    for reader, name, kind in _READERS:
        if (age := (behind.get(reader) or 0) / 1000) > limits.reader_s:
            text = f"{table}: {name} lacks changes that were published {duration(age)} ago"
            yield Problem(kind, table, text)


_READERS = (("replica", "its replica", Kind.REPLICA_LAGGING), ("kafka", "Kafka", Kind.KAFKA_LAGGING))


def _of_node(down: Status, window_ms: float | None, now_s: float) -> Iterator[Problem]:
    age = now_s - down["since_ms"] / 1000
    if window_ms is not None and age > window_ms / 1000:
        text = (
            f"node {down['endpoint']} has been down for {duration(age)}, and hints are kept for "
            f"{duration(window_ms / 1000)} (max_hint_window): what was written since then it does not get by itself. "
            "Repair it when it is back (nodetool repair), or remove it from the cluster"
        )
        yield Problem(Kind.NODE_PAST_HINTS, f"node {down['endpoint']}", text)
