"""How many SELECTs it takes to read the logs of a big cluster: ``python -m tests.scylla_sim.queries``.

Nothing is created: 100 nodes with 64 shards and 256 vnodes have 1.6 million streams, which are here 25 600 numbers.
What is counted is what a planner says for one window of one table; pages and rows are estimated. A server looks up each
stream that a SELECT names: fewer SELECTs are fewer requests, and only longer windows are fewer look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

STREAM_BYTES = 20
"""A stream id in a request, with its length."""

Planner = Callable[[Sequence[int]], Iterable[int]]
"""Given the number of streams of each token range, or tablet, in the order of the ring: the number of streams that each
SELECT of one window names."""


@dataclass(frozen=True)
class Shape:
    """A cluster and what it does.

    :ivar tablets: of each table; 0: the tables have vnodes
    :ivar rows_per_s: log rows per second and table, evenly spread over the streams
    """

    nodes: int = 100
    shards: int = 64
    vnodes: int = 256
    tablets: int = 0
    tables: int = 1
    rows_per_s: float = 10_000.0

    @property
    def ranges(self) -> list[int]:
        """The number of streams of each token range of a table."""
        return [1] * self.tablets if self.tablets else [self.shards] * (self.nodes * self.vnodes)


@dataclass(frozen=True)
class Cost:
    """What reading costs, all tables together.

    :ivar selects_per_hour: requests, further pages among them
    :ivar most_streams: in one SELECT
    :ivar sent_bytes_per_s: stream ids in requests
    :ivar empty: share of SELECTs that find no row
    """

    selects_per_hour: float
    most_streams: int
    sent_bytes_per_s: float
    empty: float

    @property
    def selects_per_s(self) -> float:
        """Requests per second, all nodes together."""
        return self.selects_per_hour / 3600


def cost(planner: Planner, shape: Shape, window_s: float, page_rows: int = 5000) -> Cost:
    """Count what a planner's SELECTs cost when every window of every table is read once.

    :param window_s: length of a window, s
    :param page_rows: rows of a result page
    :raises ValueError: the SELECTs do not name each stream once
    """
    ranges = shape.ranges
    streams, windows = sum(ranges), 3600 / window_s
    rows_per_stream = shape.rows_per_s * window_s / streams
    selects = sent = most = 0
    requests = empty = 0.0
    for named in planner(ranges):
        rows = rows_per_stream * named
        selects, sent, most = selects + 1, sent + named, max(most, named)
        requests += max(1.0, math.ceil(rows / page_rows))
        empty += math.exp(-rows)
    if sent != streams:
        raise ValueError(f"the SELECTs name {sent} streams of {streams}")
    scale = windows * shape.tables
    return Cost(requests * scale, most, sent * STREAM_BYTES * scale / 3600, empty / selects)


def each_stream(ranges: Sequence[int]) -> Iterator[int]:
    """As scylla-cdc-java: a SELECT for each stream."""
    for streams in ranges:
        yield from [1] * streams


def each_range(ranges: Sequence[int]) -> Iterator[int]:
    """As scylla-cdc-go and scylla-cdc-rust: a SELECT for each range of a ring of vnodes."""
    yield from ranges


def ranges_together(most: int) -> Planner:
    """Neighbouring ranges in one SELECT, as many as have no more streams than that; a larger range has its own."""

    def plan(ranges: Sequence[int]) -> Iterator[int]:
        named = 0
        for streams in ranges:
            if named and named + streams > most:
                yield named
                named = 0
            named += streams
        if named:
            yield named

    return plan


KNOWN: Mapping[str, tuple[Planner, float]] = {
    "a SELECT per stream, 30 s (Java)": (each_stream, 30),
    "a SELECT per range, 30 s (Go)": (each_range, 30),
    "a SELECT per range, 60 s (Rust)": (each_range, 60),
    "1000 streams together, 60 s": (ranges_together(1000), 60),
    "1000 streams together, 300 s": (ranges_together(1000), 300),
}
"""Planners to compare with, and their windows in s (docs/scylla.md)."""


def main() -> None:
    """Print what the known planners cost."""
    shapes = {
        "3 nodes × 8 shards × 256 vnodes": Shape(3, 8),
        "100 nodes × 64 shards × 256 vnodes": Shape(),
        "1024 tablets": Shape(tablets=1024),
    }
    for title, shape in shapes.items():
        print(f"{title}, {shape.rows_per_s:.0f} log rows/s, one table: {sum(shape.ranges)} streams")
        for name, (planner, window_s) in KNOWN.items():
            one = cost(planner, shape, window_s)
            print(
                f"  {name:36}{one.selects_per_hour:14,.0f} SELECTs/h {one.selects_per_s:10,.1f}/s"
                f" {one.sent_bytes_per_s / 1e3:10,.1f} kB/s of ids, {one.empty:4.0%} empty"
            )


if __name__ == "__main__":
    main()
