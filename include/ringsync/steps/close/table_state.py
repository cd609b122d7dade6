"""What a run of ``bucket_close`` knows of a table: its staged rows, what has become of them, and whether it fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ringsync.ledger.staging import Block, Bucket
from ringsync.steps.application import plain
from ringsync.steps.close.agreement import OpenBucket
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
    :ivar error: why it could not be served when that was last tried
    :ivar failures: how often in a row
    :ivar again_ms: time of the next try after a failure, ms since the epoch
    :ivar gone: the schema does not have it any more: only what was published of it is seen to
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
        """Take in a block."""
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
        """It could not be served: it backs off alone, for as long as the try took at least, which held up all others.

        :param began_ms: time when the try began, ms since the epoch
        :param now_ms: ms since the epoch
        """
        self.error, self.failures = plain(error), self.failures + 1
        wait_ms = min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** min(self.failures - 1, 10))
        self.again_ms = now_ms + max(wait_ms, now_ms - began_ms)
        print(f"ringsync: warning: {self.table.schema.full_name}, tried again later: {self.error}", flush=True)

    def served(self) -> None:
        """It is well."""
        self.error, self.failures, self.again_ms = None, 0, 0
