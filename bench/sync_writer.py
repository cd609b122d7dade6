"""Write to a cluster at a steady rate, in a process of its own: ``python bench/sync_writer.py ORDER``.

ORDER is JSON: ``nodes`` and ``port``; ``rows`` of ``orders`` to write before; ``changes``, ``rate`` (a second) and
``times``, a file for the write time (µs) of each change. At its end it prints a line of JSON.

Every change writes a row of its own, and its write time is unique: the time at which it was sent. So each change must
become one message. The message's ``ts_us`` identifies the change, and the row after it has this time in ``written_us``.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from array import array
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from cassandra import ConsistencyLevel
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
from cassandra.concurrent import execute_concurrent_with_args

KEYSPACE = "shop"
TABLES = {
    "orders": "customer text, number int, amount bigint, note text, placed timestamp, written_us bigint, "
    "PRIMARY KEY (customer, number)",
    "baskets": "id text PRIMARY KEY, tags set<text>, prices map<text, int>, written_us bigint",
    "events": "device int, number int, kind text, value double, written_us bigint, PRIMARY KEY (device, number)",
}
CYCLE = 20
"""Of this many changes 7 insert an order, 5 update and 1 deletes an existing one, 3 write a basket, 4 an event."""
OLD_PER_CYCLE = 6
PARTITION_ROWS = 5
IN_FLIGHT = 512
MAX_RETRIES = 1000
NOTE = "a note of about a hundred characters, which is what people write when they want their order on a Friday"
START = datetime(2026, 1, 1, tzinfo=UTC)

_STATEMENTS = {
    "insert": "INSERT INTO orders (customer, number, amount, note, placed, written_us) VALUES (?, ?, ?, ?, ?, ?)",
    "update": "UPDATE orders USING TIMESTAMP ? SET amount = ?, note = ?, written_us = ? "
    "WHERE customer = ? AND number = ?",
    "delete": "DELETE FROM orders USING TIMESTAMP ? WHERE customer = ? AND number = ?",
    "basket": "INSERT INTO baskets (id, tags, prices, written_us) VALUES (?, ?, ?, ?) USING TIMESTAMP ?",
    "event": "INSERT INTO events (device, number, kind, value, written_us) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?",
}
_STATEMENTS["order"] = f"{_STATEMENTS['insert']} USING TIMESTAMP ?"


def creation(*, replicas: int, cdc: frozenset[str]) -> list[str]:
    """Return the statements that create keyspace and tables.

    :param cdc: names of the tables that have cdc from the beginning
    """
    made = [
        f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': {replicas}}}"
    ]
    for name, columns in TABLES.items():
        made.append(f"CREATE TABLE {KEYSPACE}.{name} ({columns}) WITH cdc = {str(name in cdc).lower()}")
    return made


def rows_before(changes: int) -> int:
    """Return the number of orders that must exist before the changes: each is changed once at most."""
    return (changes // CYCLE + 1) * OLD_PER_CYCLE


def table_of(number: int) -> str:
    """Return the table to which a change writes."""
    place = number % CYCLE
    return "orders" if place < 13 else "baskets" if place < 16 else "events"


def change(number: int, us: int) -> tuple[str, tuple[Any, ...]]:
    """Return a change: the name of its statement, and the parameters.

    :param us: write time of the change, µs
    """
    place, cycle = number % CYCLE, number // CYCLE
    if place < 7:
        return "order", (*order("new", cycle * 7 + place), us, us)
    old = cycle * OLD_PER_CYCLE + place - 7
    if place < 12:
        return "update", (us, number, f"{NOTE} {number}", us, *order_key("old", old))
    if place == 12:
        return "delete", (us, *order_key("old", old))
    if place < 16:
        return "basket", (f"basket-{number}", {"new", f"tag-{number % 50}"}, {"shipping": number % 500}, us, us)
    return "event", (number % 1000, number, "measured", number / 3, us, us)


def order_key(kind: str, row: int) -> tuple[str, int]:
    """Return the key of an order."""
    return f"{kind}-{row // PARTITION_ROWS}", row % PARTITION_ROWS


def order(kind: str, row: int) -> tuple[Any, ...]:
    """Return an order without its write time."""
    return (*order_key(kind, row), row * 1_000_003, NOTE, START + timedelta(seconds=row))


class Writer:
    """Sender of changes; a change that fails is sent again with its time.

    :param session: session with the writes' consistency level, in the keyspace
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._prepared = {name: session.prepare(text) for name, text in _STATEMENTS.items()}
        self._free = threading.Semaphore(IN_FLIGHT)
        self._failed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.times = array("q")
        self.retries = 0
        self.behind_s = 0.0

    def fill(self, rows: int) -> None:
        """Write the orders that must exist before."""
        parameters = [(*order("old", row), 0) for row in range(rows)]
        execute_concurrent_with_args(self._session, self._prepared["insert"], parameters, concurrency=128)

    def run(self, changes: int, rate: float) -> float:
        """Write all changes; return the seconds that this took.

        :raises RuntimeError: too many writes fail
        """
        began = time.monotonic()
        while len(self.times) < changes:
            due = min(changes, int((time.monotonic() - began) * rate))
            while len(self.times) < due:
                self.times.append(max(time.time_ns() // 1000, self.times[-1] + 1 if self.times else 0))
                self._send(len(self.times) - 1)
            self.behind_s = max(self.behind_s, time.monotonic() - began - len(self.times) / rate)
            self._send_failed()
            time.sleep(0.01)
        for _ in range(IN_FLIGHT):
            while not self._free.acquire(timeout=0.1):
                self._send_failed()
        self._free.release(IN_FLIGHT)
        return time.monotonic() - began

    def _send(self, number: int) -> None:
        self._free.acquire()
        self._ask(number)

    def _send_failed(self) -> None:
        while not self._failed.empty():
            self.retries += 1
            if self.retries > MAX_RETRIES:
                raise RuntimeError(f"{MAX_RETRIES} writes have failed")
            self._ask(self._failed.get())

    def _ask(self, number: int) -> None:
        """Send a change; its place among the changes in flight is released when it is written."""
        name, parameters = change(number, self.times[number])
        future = self._session.execute_async(self._prepared[name], parameters)
        future.add_callbacks(lambda _: self._free.release(), lambda _: self._failed.put(number))


def main() -> None:
    """Execute the order."""
    given = json.loads(sys.argv[1])
    profile = ExecutionProfile(consistency_level=ConsistencyLevel.QUORUM, request_timeout=30)
    cluster = Cluster(
        given["nodes"], port=given["port"], protocol_version=5, execution_profiles={EXEC_PROFILE_DEFAULT: profile}
    )
    try:
        writer = Writer(cluster.connect(KEYSPACE))
        if given.get("rows"):
            writer.fill(given["rows"])
        seconds = writer.run(given["changes"], given["rate"]) if given.get("changes") else 0.0
    finally:
        cluster.shutdown()
    if given.get("changes"):
        Path(given["times"]).write_bytes(writer.times.tobytes())
    done = {"written": len(writer.times), "seconds": seconds, "retries": writer.retries, "behind_s": writer.behind_s}
    print(json.dumps(done))


if __name__ == "__main__":
    main()
