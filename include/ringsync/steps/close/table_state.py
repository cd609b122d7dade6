"""A table as a run of ``bucket_close`` knows it: its staged rows, what has become of them, and whether it fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringsync.ledger.staging import Block, Bucket
from ringsync.steps.application import plain
from ringsync.steps.close.agreement import OpenBucket
from ringsync.steps.passes.behind import behind_ms, lag_until_ms
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.sync_plan import SyncTable

FIRST_WAIT_MS, LONGEST_WAIT_MS = 1_000, 60_000
"""A table that could not be served is tried again after 1 s, 2 s, 4 s …"""


@dataclass
class TableState:
    """What this run knows of a table.

    :ivar follow_ups: None: not begun yet
    :ivar buckets: buckets that have staged blocks
    :ivar lags_ms: time from write to message of rows of the last pass, ms
    :ivar agreement_ms: time from write to agreement of the replicas, of agreed rows of the last pass, ms
    :ivar newest: the highest version of the table under which its blocks were staged
    :ivar error: why the last try to serve it failed
    :ivar failures: number of failed tries in a row
    :ivar again_ms: time of the next try after a failure
    :ivar gone: the schema has lost it: only what was published of it is brought to its end
    """

    table: SyncTable
    follow_ups: FollowUps | None = None
    buckets: dict[Bucket, OpenBucket] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lags_ms: list[int] = field(default_factory=list)
    agreement_ms: list[int] = field(default_factory=list)
    newest: int = 0
    error: str | None = None
    failures: int = 0
    again_ms: int = 0
    gone: bool = False

    def add(self, node: str, block: Block) -> None:
        """Add a staged block."""
        bucket = Bucket.parse(block.bucket)
        self.buckets.setdefault(bucket, OpenBucket(bucket)).files[block.place] = (node, block)
        self.newest = max(self.newest, block.version)

    def follow(self, table: SyncTable) -> None:
        """Go on with a newer version of the table."""
        if table != self.table and table.version.number >= self.table.version.number:
            self.table = table
            if self.follow_ups is not None:
                self.follow_ups.follow(table)

    def failed(self, error: Exception, began_ms: int, now_ms: int) -> None:
        """Record a failure. The pause before the next try is at least as long as this try, which held up all others."""
        self.error, self.failures = plain(error), self.failures + 1
        wait_ms = min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** min(self.failures - 1, 10))
        self.again_ms = now_ms + max(wait_ms, now_ms - began_ms)
        print(f"ringsync: warning: {self.table.schema.full_name}, tried again later: {self.error}", flush=True)

    def served(self) -> None:
        """Record that the table was served without a failure."""
        self.error, self.failures, self.again_ms = None, 0, 0

    def status(self, kafka: Mapping[str, Any], closed_until: int, complete_until: int | None) -> dict[str, Any]:
        """Return the status of the table, for ``cdcservice status`` and ``wait``.

        :param kafka: status of its topic in Kafka; empty: unknown
        :param closed_until: end of the closed buckets, ms since the epoch
        :param complete_until: the same, if a cycle has ended since; None: not yet
        """
        lags, agreements = self.lags_ms, self.agreement_ms
        follow_ups = self._status_of_follow_ups()
        behind, kafka_lag_ms = self._behind(follow_ups, kafka)
        # The replica has all rows that were written before the end of the closed buckets, except late ones.
        is_complete = (
            not self.table.by_arrival
            and not follow_ups["bootstrap"]
            and follow_ups["replica_pass"] == follow_ups["last_pass"]
            and all(bucket.end > closed_until for bucket in self.buckets)
        )
        return {
            "error": self.error,
            "table_id": self.table.table_id,
            "topic": self.table.topic,
            "open_buckets": len(self.buckets),
            "oldest_open_bucket_ms": min((bucket.start for bucket in self.buckets), default=None),
            "rows_published": self.counts["rows"],
            "messages": self.counts["messages"],
            "duplicates": self.counts["repeated"] + self.counts["published_before"],
            "rows_agreed": self.counts["agreed"],
            "rows_read_at_close": self.counts["at_close"],
            "only_one_replica": self.counts["only_one"],
            "lag_ms": {
                "message_p50": int(np.percentile(lags, 50)) if lags else None,
                "message_p99": int(np.percentile(lags, 99)) if lags else None,
                "agreement_p50": int(np.percentile(agreements, 50)) if agreements else None,
                "replica_p50": self.follow_ups.replica_lag_ms if self.follow_ups else None,
                "kafka_p50": kafka_lag_ms,
            },
            "behind_ms": behind,
            **follow_ups,
            "complete_until_ms": complete_until if is_complete else None,
            "kafka_messages": kafka.get("messages"),
            "kafka_error": kafka.get("error"),
        }

    def _behind(self, status: Mapping[str, Any], kafka: Mapping[str, Any]) -> tuple[dict[str, int | None], int | None]:
        """Return for how long replica and Kafka have lacked something that is published, ms, and the time from write to
        acknowledgement of what Kafka has confirmed last, ms; None: unknown. During a bootstrap nothing is due."""
        newest, replica_pass = kafka.get("newest"), status["replica_pass"]
        if self.follow_ups is None or status["bootstrap"]:
            return {"replica": None, "kafka": None}, None
        passes, now_ms = self.follow_ups.passes, int(time.time() * 1000)
        of_replica = of_kafka = None
        if replica_pass is not None:
            of_replica = behind_ms(passes, lambda made: made.number <= replica_pass, now_ms)
        if newest is not None:
            of_kafka = behind_ms(passes, lambda made: made.folder <= newest, now_ms)
        lags = (lag_until_ms(made, kafka["newest_ms"]) for made in passes if made.folder == newest)
        return {"replica": of_replica, "kafka": of_kafka}, next(lags, None)

    def _status_of_follow_ups(self) -> dict[str, Any]:
        """Return how far the table's passes have come; what cannot be read now is unknown."""
        unknown = {"last_pass": 0, "bootstrap": "", "replica_error": None, "replica_pass": None}
        if self.follow_ups is None:
            return unknown
        try:
            return self.follow_ups.status()
        except Exception as error:
            return {**unknown, "last_pass": self.follow_ups.last, "replica_error": plain(error)}
