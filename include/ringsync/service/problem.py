"""What may be wrong: the kinds of problems, each with its section in docs/runbook.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What kind of problem it is. The value is the title of its section in docs/runbook.md."""

    SEGMENTS_LOST = "segments-lost"
    CDC_RAW_FULL = "cdc-raw-full"
    DISK_FULL = "disk-full"
    ARCHIVE_SILENT = "archive-silent"
    LOG_GAP = "log-gap"
    TABLE_GAP = "table-gap"
    NODE_LOG_UNREADABLE = "node-log-unreadable"
    NODE_BEHIND = "node-behind"
    NODE_PAST_HINTS = "node-past-hints"
    LOG_UNREADABLE = "log-unreadable"
    GENERATION_EMPTY = "generation-empty"
    RECORDS_UNDECODABLE = "records-undecodable"
    ARCHIVE_FAILING = "archive-failing"
    ARCHIVE_UNREADABLE = "archive-unreadable"
    ARCHIVE_WAITING = "archive-waiting"
    LATE_ROWS_UNUSABLE = "late-rows-unusable"
    LATE_ROWS_WAITING = "late-rows-waiting"
    TABLE_FAILING = "table-failing"
    TABLE_LAGGING = "table-lagging"
    TABLE_LEFT_OUT = "table-left-out"
    REPLICA_FAILING = "replica-failing"
    REPLICA_LAGGING = "replica-lagging"
    REPLICA_DIFFERS = "replica-differs"
    PROOF_OVERDUE = "proof-overdue"
    KAFKA_FAILING = "kafka-failing"
    KAFKA_LAGGING = "kafka-lagging"
    ROWS_UNCLAIMED = "rows-unclaimed"
    SCHEMA_UNSETTLED = "schema-unsettled"
    BOOTSTRAP_ABANDONED = "bootstrap-abandoned"
    SYNC_STOPPED = "sync-stopped"
    LOOP_SILENT = "loop-silent"
    LOOP_STUCK = "loop-stuck"
    LOOP_FAILING = "loop-failing"
    STATUS_UNREADABLE = "status-unreadable"
    CLOCK_OFF = "clock-off"
    INSTALLED_DIFFERS = "installed-differs"
    DAG_PAUSED = "dag-paused"
    DAG_FAILED = "dag-failed"
    AIRFLOW_AWAY = "airflow-away"
    STORE_AWAY = "store-away"
    ALARMS_UNTOLD = "alarms-untold"
    CONFIG_WRONG = "config-wrong"


_CRITICAL = frozenset(
    {
        *(Kind.SEGMENTS_LOST, Kind.CDC_RAW_FULL, Kind.DISK_FULL, Kind.ARCHIVE_SILENT),
        *(Kind.LOG_GAP, Kind.TABLE_GAP),
    }
)


LASTING = frozenset({Kind.ARCHIVE_SILENT})
"""Critical kinds that are raised once they have lasted, as others: a loop is silent between two of its runs."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    :ivar where: the loop, node, table or DAG that has it; kind and where together say which problem it is
    :ivar text: a sentence for people
    :ivar owner: who alone can say that it is over: a loop, a DAG; empty: whoever looks
    """

    kind: Kind
    where: str
    text: str
    owner: str = ""

    @property
    def is_critical(self) -> bool:
        """Whether the source is in danger, or changes are missing: somebody must act now."""
        return self.kind in _CRITICAL
