"""Tables that change, fail and fall behind while the sync runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ringsync.ledger.staging import commit_keys
from ringsync.status import read_statuses
from tests.sync.pipeline import WINDOW_MS, Pipeline
from tests.sync.scenario import rotated

KEYSPACE = "under_way"
ENDING = ("brief", "ended", "short")
"""Tables of which much expires, some of it before its message is made."""

LONGEST_TTL_S = 6

TABLES = {
    "altered": "id int, seq int, price int, qty int, PRIMARY KEY (id, seq)",
    "shrunk": "id int, seq int, old int, price int, PRIMARY KEY (id, seq)",
    "past": "id int, seq int, price int, note text static, PRIMARY KEY (id, seq)",
    "gone": "id int, seq int, price int, PRIMARY KEY (id, seq)",
    "poisoned": "id int, seq int, price int, PRIMARY KEY (id, seq)",
    "decimals": "id int, seq decimal, price int, tags set<decimal>, PRIMARY KEY (id, seq)",
    "again": "id int, seq int, price int, old int, PRIMARY KEY (id, seq)",
    **dict.fromkeys(ENDING, "id int, seq int, price int, qty int, PRIMARY KEY (id, seq)"),
}
NAMES = tuple(f"{KEYSPACE}.{name}" for name in TABLES)
JUDGED = tuple(name for name in NAMES if not name.endswith(".gone"))
POISONED, AGAIN = f"{KEYSPACE}.poisoned", f"{KEYSPACE}.again"


def modes(turn: int) -> dict[str, dict[str, str]]:
    """Settings of the tables: in three turns each has each way to find the row after a change."""
    return rotated(NAMES, turn)


def copied(turn: int) -> tuple[str, ...]:
    """The tables that are bootstrapped."""
    by_replica = {name for name, settings in modes(turn).items() if settings["after_image"] == "replica"}
    return tuple(name for name in NAMES if name in {*by_replica, f"{KEYSPACE}.decimals", AGAIN})


def copied_again(turn: int) -> tuple[str, ...]:
    """Those whose replica says that it must be made anew: they were altered, or created again."""
    changed = {f"{KEYSPACE}.altered", f"{KEYSPACE}.shrunk", AGAIN}
    return tuple(name for name in copied(turn) if name in changed)


def create_schema(session: Any) -> None:
    session.execute(
        f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}"
    )
    for name, columns in TABLES.items():
        session.execute(f"CREATE TABLE {KEYSPACE}.{name} ({columns}) WITH cdc = true")


def changes(tables: Iterator[int]) -> Iterator[str]:
    """Statements on all tables: inserts, updates, deletions of rows, ranges and partitions; endless."""
    for number in tables:
        key, seq, now_us = number % 7, number % 11, time.time_ns() // 1000
        for table in ("altered", "shrunk", "gone", "poisoned", "again"):
            yield f"INSERT INTO {KEYSPACE}.{table} (id, seq, price) VALUES ({key}, {seq}, {number})"
        spelt = f"{seq}.{'0' * (number % 3)}" if number % 3 else f"{seq}"
        yield f"UPDATE {KEYSPACE}.decimals SET price = {number} WHERE id = {key} AND seq = {spelt}"
        yield f"UPDATE {KEYSPACE}.decimals SET tags = tags + {{{spelt}, 1.5}} WHERE id = {key} AND seq = {spelt}0"
        ago_us = now_us - (number * 7919 % 3_600_000_000 if number % 2 else 0)
        yield f"INSERT INTO {KEYSPACE}.past (id, seq, price) VALUES ({key}, {seq}, {number}) USING TIMESTAMP {ago_us}"
        if number % 5 == 0:
            yield f"UPDATE {KEYSPACE}.past USING TIMESTAMP {ago_us} SET note = 'n{number}' WHERE id = {key}"
            yield f"DELETE FROM {KEYSPACE}.altered WHERE id = {key} AND seq > {seq}"
        if number % 6 == 0:
            yield f"DELETE FROM {KEYSPACE}.past USING TIMESTAMP {ago_us} WHERE id = {key} AND seq = {seq}"
        if number % 17 == 0:
            yield f"DELETE FROM {KEYSPACE}.past USING TIMESTAMP {ago_us} WHERE id = {key} AND seq < {seq}"
            yield f"DELETE FROM {KEYSPACE}.decimals WHERE id = {key} AND seq = {seq}.0"
        if number % 29 == 0:
            yield f"DELETE FROM {KEYSPACE}.past USING TIMESTAMP {ago_us - 1000} WHERE id = {key}"
        yield from ending(number)


def ending(number: int) -> Iterator[str]:
    """Statements that write rows for ever, and again with a TTL: some rows by INSERT only, others by UPDATE only, since
    who takes the newest does not know the liveness of a row that was read."""
    key, seq = number % 7, number % 11
    using = f"USING TTL {1 + number % LONGEST_TTL_S} " if number % 3 == 0 else ""
    for table in ENDING:
        if seq % 2:
            yield f"UPDATE {KEYSPACE}.{table} {using}SET price = {number} WHERE id = {key} AND seq = {seq}"
        else:
            yield f"INSERT INTO {KEYSPACE}.{table} (id, seq, price) VALUES ({key}, {seq}, {number}) {using}"
        if number % 16 == 0:
            yield f"UPDATE {KEYSPACE}.{table} SET qty = {number} WHERE id = {key} AND seq = {seq}"


class Writer:
    """Goes on where it stopped.

    :ivar ends_at: when the last of what was written with a short TTL ends, s since the epoch
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._numbers = iter(range(1, 10**9))
        self.ends_at = 0.0

    def write(self, seconds: float, rate: float = 20, *, without: tuple[str, ...] = ()) -> None:
        """Write for so long.

        :param rate: numbers a second, each some statements
        :param without: tables that are not there any more
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for statement in changes(iter([next(self._numbers)])):
                if not any(f".{name} " in statement for name in without):
                    self._session.execute(statement)
            time.sleep(1 / rate)
        self.ends_at = time.time() + LONGEST_TTL_S

    def wait_until_all_has_ended(self) -> None:
        """Wait until nothing expires any more, so that all can be compared as of one moment."""
        time.sleep(max(0.0, self.ends_at + 2 - time.time()))


def poison(session: Any) -> None:
    """An int without bytes: no type of the lake holds it, and the policy ``error`` refuses it."""
    session.execute(f"INSERT INTO {POISONED} (id, seq, price) VALUES (1000, 1, blobAsInt(0x))")


def antidote(session: Any) -> None:
    """A number in its place: the driver, by which the source is read, shows no misfits."""
    session.execute(f"INSERT INTO {POISONED} (id, seq, price) VALUES (1000, 1, 1)")


def wait_until_it_fails(running: Pipeline, table: str) -> None:
    """Wait until this table is told to fail, and no other."""
    deadline = time.monotonic() + 180
    failing: set[str] = set()
    while failing != {table}:
        assert time.monotonic() < deadline, failing
        running.check()
        time.sleep(1)
        told = read_statuses(running.store)["bucket_close/close"]["tables"]
        failing = {name for name, one in told.items() if one["error"]}


def altered_while_rows_wait(running: Pipeline, session: Any, writer: Writer) -> None:
    """Columns come and go, a table goes and one comes again, while staged rows wait for a close, and while all runs."""
    running.kill("bucket_close")
    writer.write(2 * WINDOW_MS / 1000)
    assert commit_keys(running.store)
    session.execute(f"ALTER TABLE {KEYSPACE}.altered ADD discount int")
    session.execute(f"INSERT INTO {KEYSPACE}.altered (id, seq, discount, qty) VALUES (100, 1, 5, 6)")
    session.execute(f"ALTER TABLE {KEYSPACE}.shrunk DROP old")
    session.execute(f"DROP TABLE {KEYSPACE}.gone")
    session.execute(f"DROP TABLE {AGAIN}")
    session.execute(
        f"CREATE TABLE {AGAIN} (id int, seq int, price int, note text, PRIMARY KEY (id, seq)) WITH cdc = true"
    )
    session.execute(f"INSERT INTO {AGAIN} (id, seq, note) VALUES (100, 1, 'new')")
    writer.write(2, without=("gone",))
    running.start("bucket_close")
    writer.write(10, without=("gone",))
    session.execute(f"ALTER TABLE {KEYSPACE}.altered ADD again int")
    session.execute(f"INSERT INTO {KEYSPACE}.altered (id, seq, again) VALUES (100, 2, 7)")
    writer.write(5, without=("gone",))


def fallen_behind(running: Pipeline, writer: Writer) -> None:
    """Stage and close stand still for ten buckets; nothing that has waited is late."""
    writer.write(5, without=("gone", "past"))
    for name in ("commitlog_stage", "bucket_close"):
        running.kill(name)
    writer.write(10 * WINDOW_MS / 1000, rate=5, without=("gone", "past"))
    written_ms = time.time() * 1000
    for name in ("bucket_close", "commitlog_stage"):
        running.start(name)
    deadline = time.monotonic() + 180
    while not (nodes := staged_since(running, written_ms)):
        assert time.monotonic() < deadline
        running.check()
        time.sleep(1)
    assert sum(one["rows"] for one in nodes) > 100
    assert sum(one["late"] for one in nodes) == 0


def staged_since(running: Pipeline, moment_ms: float) -> list[Any]:
    """What the stage tells of its nodes, once all that was logged before a moment is staged."""
    status = read_statuses(running.store).get("commitlog_stage/default", {})
    nodes = list(status.get("nodes", {}).values())
    return nodes if len(nodes) == 3 and all(one["clear_at_ms"] > moment_ms + 3000 for one in nodes) else []
