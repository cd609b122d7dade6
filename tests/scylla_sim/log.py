"""The log in memory: log rows, each visible from a moment on until its TTL is over."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tests.scylla_model.log_rows import LogRow
from tests.scylla_sim.arithmetic import micros_of, timeuuid_order
from tests.scylla_sim.clock import SECOND
from tests.scylla_sim.tables import BaseTable

DAY_S = 86_400
"""The TTL of a log if none is told."""


@dataclass(frozen=True)
class Delivery:
    """Log rows of one group that become visible together; times are µs since the epoch.

    :ivar rows: with all columns of the log; those that are not set are None
    :ivar arrived_us: when their coordinator wrote them, by its clock: from then on their TTL counts
    :ivar visible_us: from when on a read shows them
    """

    table: BaseTable
    rows: tuple[LogRow, ...]
    arrived_us: int
    visible_us: int

    @property
    def stream(self) -> bytes:
        """The stream that they are in."""
        return bytes(self.rows[0]["cdc$stream_id"])

    @property
    def time_us(self) -> int:
        """The timestamp that they tell of."""
        return micros_of(self.rows[0]["cdc$time"])

    def ttl_left(self, ttl_s: int, now_us: int) -> int:
        """How long rows with that TTL live at a moment, in s; less than 1: no longer. Both are not for TTL 0."""
        return ttl_s + self.arrived_us // SECOND - now_us // SECOND


@dataclass
class Log:
    """The log of one table.

    :ivar ttl_s: of its rows; 0: they stay for ever
    """

    ttl_s: int = DAY_S
    deliveries: list[Delivery] = field(default_factory=list)

    def add(self, *deliveries: Delivery) -> None:
        """Take what a write gave."""
        self.deliveries += deliveries

    def select(self, streams: Collection[bytes] | None, start_us: int, end_us: int, now_us: int) -> list[LogRow]:
        """The rows of streams with start <= ``cdc$time`` < end that are visible, by stream, time and number.

        :param streams: None: of all
        """
        wanted = None if streams is None else set(streams)
        found = [
            row
            for one in self.deliveries
            if start_us <= one.time_us < end_us and one.visible_us <= now_us
            if (wanted is None or one.stream in wanted) and (not self.ttl_s or one.ttl_left(self.ttl_s, now_us) > 0)
            for row in one.rows
        ]
        return sorted(found, key=log_order)

    def all_visible_us(self) -> int:
        """The moment from which on all is visible that was written until now."""
        return max((one.visible_us for one in self.deliveries), default=0)


def log_order(row: LogRow) -> tuple[bytes, tuple[int, bytes], int]:
    """By this the rows of a log are sorted, but for the order of streams, which is by tokens in a server."""
    return row["cdc$stream_id"], timeuuid_order(row["cdc$time"]), row["cdc$batch_seq_no"]
