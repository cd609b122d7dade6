"""What may be wrong: the kinds of problems, each with its section in docs/runbook.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What kind of problem it is. The value is the title of its section in docs/runbook.md."""

    SEGMENTS_LOST = "segments-lost"
    CDC_RAW_FULL = "cdc-raw-full"
    LOG_GAP = "log-gap"
    NODE_LOG_UNREADABLE = "node-log-unreadable"
    NODE_BEHIND = "node-behind"
    LOG_UNREADABLE = "log-unreadable"
    GENERATION_EMPTY = "generation-empty"
    RECORDS_UNDECODABLE = "records-undecodable"
    ARCHIVE_FAILING = "archive-failing"
    ARCHIVE_UNREADABLE = "archive-unreadable"
    LATE_ROWS_UNUSABLE = "late-rows-unusable"
    TABLE_FAILING = "table-failing"
    TABLE_LAGGING = "table-lagging"
    TABLE_LEFT_OUT = "table-left-out"
    REPLICA_FAILING = "replica-failing"
    KAFKA_FAILING = "kafka-failing"
    ROWS_UNCLAIMED = "rows-unclaimed"
    SCHEMA_UNSETTLED = "schema-unsettled"
    BOOTSTRAP_ABANDONED = "bootstrap-abandoned"
    SYNC_STOPPED = "sync-stopped"
    LOOP_SILENT = "loop-silent"
    LOOP_STUCK = "loop-stuck"
    LOOP_FAILING = "loop-failing"
    DAG_PAUSED = "dag-paused"
    DAG_FAILED = "dag-failed"
    AIRFLOW_AWAY = "airflow-away"
    STORE_AWAY = "store-away"
    ALARMS_UNTOLD = "alarms-untold"
    CONFIG_WRONG = "config-wrong"


_CRITICAL = frozenset({Kind.SEGMENTS_LOST, Kind.CDC_RAW_FULL, Kind.LOG_GAP})


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

    @property
    def page(self) -> str:
        """What to do about it."""
        return f"docs/runbook.md#{self.kind}"
