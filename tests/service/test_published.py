"""When all that was written before a moment is published: a sync in the small, whose loops go on working meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.config.sync import Sync
from ringsync.cql.types import Native
from ringsync.ledger.followed import end_following, followed_tables, keep_following
from ringsync.ledger.staging import Bucket
from ringsync.ring.ring import Host, Replication
from ringsync.schema.table import Column, TableSchema
from ringsync.service.expected import CLOSE
from ringsync.service.published import GIVE_UP_AFTER_S, LATE, Seen, Waited, logs_left, wait_until_published
from ringsync.status import LATE_ROWS, STOP_KEY
from ringsync.steps.sync_plan import FormerHost, SyncPlan, SyncTable, interval_at
from ringsync.storage.local import LocalStore
from ringsync.streams.cursor import CursorObject

LENGTH_MS = 2000
SYNC_MS = 1000
ORDERS = TableSchema("shop", "orders", "5" * 32, (Column("id", "partition_key", Native("int")),))
TABLE = SyncTable(TableVersion.first(ORDERS), "test.shop.orders", False)
NAME = TABLE.schema.full_name
HOSTS = tuple(Host(name, f"10.0.0.{n}", 9042, "dc", "r", (n,)) for n, name in enumerate("ab", 1))
QUEUES = Sync(queue_of_node={"a": "rack-a", "b": "rack-b"})
BEGIN_MS = 1_790_000_000_000


@dataclass
class Row:
    """Where a change is: in the log, a bucket, a file of late rows, a pass."""

    node: str
    written_ms: int
    synced_ms: int
    slow: bool
    staged: bool = False
    bucket: Bucket | None = None
    file: str = ""
    made: int = 0


@dataclass
class World:
    """Writers, loops, replica and Kafka.

    :ivar now_ms: by the clock of whoever waits
    :ivar rates: how often loops do a cycle: the part of all half seconds
    :ivar late_rate: the part of the files of late rows that are published in a cycle
    :ivar doubt_rate: the part of the rows of closed buckets that wait with the late rows
    :ivar down: loops that do not work
    :ivar table: added to what ``bucket_close`` says of the table
    :ivar others: what it says of tables that are not planned
    :ivar close_says: added to what it says of itself
    """

    store: LocalStore
    chance: random.Random
    now_ms: int = BEGIN_MS
    step_ms: int = 500
    hosts: tuple[Host, ...] = HOSTS
    skew_ms: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    late_rate: float = 0.4
    doubt_rate: float = 0.3
    by_arrival: bool = False
    down: set[str] = field(default_factory=set)
    replica: int | None = 0
    bootstrap: str = ""
    kafka: bool = True
    table: dict[str, Any] = field(default_factory=dict)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    close_says: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    last: int = 0
    relayed: int = 0
    closed_until: int = 0
    clear: dict[str, int] = field(default_factory=dict)
    files: int = 0

    def tick(self, _: float = 0.5) -> None:
        """Half a second, by default: everybody writes, and whoever is about to does a cycle."""
        self.now_ms += self.step_ms
        for _ in range(self.chance.randrange(3)):
            delay = self.chance.randrange(SYNC_MS)
            node, slow = self.chance.choice(HOSTS).id, self.chance.random() < 0.2
            self.rows.append(Row(node, self.now_ms, self.now_ms + delay, slow))
        cycles: dict[str, Callable[[], None]] = {
            **{f"commitlog_stage/rack-{host.id}": lambda host=host: self.stage(host) for host in HOSTS},  # type: ignore[misc]
            CLOSE: self.close,
            LATE: self.late,
        }
        for loop in self.chance.sample(sorted(cycles), len(cycles)):
            if loop not in self.down and self.chance.random() < self.rates.get(loop, 0.7):
                cycles[loop]()
        if self.kafka and self.chance.random() < self.rates.get("kafka", 0.5) and self.relayed < self.last:
            self.relayed += 1
            place = CursorObject(self.store, TABLE.topic, TABLE.topic)
            place.save(place.load().behind(f"pass-{self.relayed:012}"))

    @property
    def loops_ms(self) -> int:
        """The clock of the loops' hosts."""
        return self.now_ms + self.skew_ms

    def plan(self) -> Bucket:
        """Make the plan of the present interval, if nobody has."""
        interval = interval_at(self.loops_ms, LENGTH_MS)
        made = SyncPlan(interval, self.hosts, {"shop": Replication("SimpleStrategy", (("", 1),))}, (TABLE,))
        self.store.put(f"plans/sync/{interval.start:013}.json", made.to_json().encode())
        return interval

    def say(self, loop: str, status: dict[str, Any]) -> None:
        self.store.put(f"status/{loop}.json", json.dumps({"at_ms": self.loops_ms, "error": None, **status}).encode())

    def stage(self, host: Host) -> None:
        """Some of what is synced; a row that comes long after its time is late."""
        newest, began_ms = self.plan(), self.loops_ms
        found = [row for row in self.rows if row.node == host.id and not row.staged and row.synced_ms <= self.now_ms]
        taken = found[: self.chance.randrange(1, 6)]
        for row in taken:
            bucket = newest if self.by_arrival else interval_at(min(row.written_ms, newest.start), LENGTH_MS)
            row.staged = True
            if bucket.end <= self.closed_until or row.slow:
                self._lay_aside(row)
            else:
                row.bucket = bucket
        if len(taken) == len(found):
            self.clear[host.id] = began_ms
        node = {
            "endpoint": host.endpoint,
            "clear_at_ms": self.clear.get(host.id, 0),
            "backlog_bytes": 100 * (len(found) - len(taken)),
            "error": None,
        }
        self.say(f"commitlog_stage/rack-{host.id}", {"nodes": {host.id: node}})

    def _lay_aside(self, row: Row) -> None:
        self.files += 1
        row.bucket, row.file = None, f"{LATE_ROWS}{TABLE.table_id}/{self.files:06}.arrow"
        self.store.put(row.file, b"rows")

    def close(self) -> None:
        """Closed buckets become a pass, but for rows that have to wait; the replica takes one pass a cycle."""
        began_ms = self.loops_ms
        self.plan()
        up = [self.clear.get(host.id, 0) for host in self.hosts if host.up]
        self.closed_until = max(self.closed_until, (min(up) - LENGTH_MS) // LENGTH_MS * LENGTH_MS)
        closed = [row for row in self.rows if row.bucket and row.bucket.end <= self.closed_until and not row.made]
        for row in closed:
            if self.chance.random() < self.doubt_rate:
                self._lay_aside(row)
        self._make([row for row in closed if row.bucket])
        if self.replica is not None and not self.bootstrap and self.replica < self.last:
            self.replica += 1
        oldest = min((row.bucket.start for row in self.rows if row.bucket and not row.made), default=None)
        table = {
            **{"table_id": TABLE.table_id, "topic": TABLE.topic},
            **{"last_pass": self.last, "published_pass": self.last, "replica_pass": self.replica},
            **{"bootstrap": self.bootstrap, "replica_error": None, "kafka_error": None},
            **{"open_buckets": int(oldest is not None), "oldest_open_bucket_ms": oldest, **self.table},
        }
        self.say(CLOSE, {"began_ms": began_ms, "tables": {NAME: table, **self.others}, **self.close_says})

    def late(self) -> None:
        """Some of the files become a pass, and are removed then."""
        found = [row for row in self.rows if row.file and not row.made and self.chance.random() < self.late_rate]
        self._make(found)
        for row in found:
            self.store.delete(row.file)
        waiting = sum(bool(row.file and not row.made) for row in self.rows)
        self.say(LATE, {"waiting": waiting})

    def _make(self, rows: list[Row]) -> None:
        fresh = [row for row in rows if not row.made]
        if fresh:
            self.last += 1
            self.store.put(f"streams/{TABLE.topic}/pass-{self.last:012}/manifest.json", b"{}")
            for row in fresh:
                row.made = self.last

    def wait(self, timeout_s: float = 3000, told: list[str] | None = None) -> Waited:
        """Wait for what is written by now; each look takes half a second."""
        return wait_until_published(
            self.store,
            QUEUES,
            self.now_ms + SYNC_MS,
            timeout_s,
            kafka=str,
            tell=lambda left: (told if told is not None else []).append(left),
            clock=lambda: self.now_ms / 1000,
            sleep=self.tick,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A sync that has worked for some seconds."""
    return begun(World(LocalStore(tmp_path), random.Random(1)))


def begun(world: World) -> World:
    for _ in range(20):
        world.tick()
    return world


@pytest.mark.parametrize("seed", range(8))
def test_all_that_was_written_before_is_everywhere(tmp_path: Path, seed: int) -> None:
    """Whatever the order in which loops work, while others write on, and though clocks differ."""
    chance = random.Random(seed)
    world = World(LocalStore(tmp_path), chance, skew_ms=(0, 400, -400)[seed % 3], by_arrival=chance.random() < 0.5)
    world.rates = {f"commitlog_stage/rack-{name}": chance.choice((0.2, 0.7)) for name in "ab"}
    world.rates |= {loop: chance.choice((0.2, 0.7)) for loop in (CLOSE, LATE, "kafka")}
    world.late_rate = chance.choice((0.15, 0.4))
    begun(world)
    asked_ms = world.now_ms
    assert world.wait() == Waited("", ())
    assert world.now_ms > asked_ms
    before = [row for row in world.rows if row.written_ms <= asked_ms]
    assert len(before) > 5
    assert world.replica
    assert all(0 < row.made <= min(world.replica, world.relayed) for row in before)
    assert any(not row.made for row in world.rows), "the writers went on"


def test_a_table_without_a_replica_is_named_and_not_waited_for(world: World) -> None:
    world.replica = None
    assert world.wait() == Waited("", (f"{NAME} has no replica: cdcservice bootstrap --table {NAME} makes one",))


def test_a_replica_that_cannot_follow_is_not_taken_for_none(world: World) -> None:
    world.replica, world.table = None, {"replica_error": "only a selection was copied"}
    assert world.wait(30).left == f"the replica of {NAME} is not kept in step: only a selection was copied"


def test_a_bootstrap_is_waited_for(world: World) -> None:
    world.bootstrap = "orders-1"
    assert world.wait(30).left == f"{NAME} is being bootstrapped (orders-1): its changes wait"
    told = list[str]()

    def tick(_: float = 0) -> None:
        if any("orders-1" in one for one in told):
            world.bootstrap = ""
        World.tick(world)

    world.tick = tick  # type: ignore[method-assign]
    assert world.wait(told=told) == Waited("", ())


def test_kafka_that_is_down_is_waited_for(world: World) -> None:
    world.kafka, world.table = False, {"kafka_error": "brokers are down"}
    left = world.wait(30).left
    assert left.startswith("Kafka lacks ")
    assert left.endswith(f" folders of {TABLE.topic}: brokers are down")
    world.kafka = True
    assert world.wait() == Waited("", ())


def test_a_stream_that_is_not_written_is_waited_for(world: World) -> None:
    world.table = {"published_pass": 0}
    assert world.wait(30).left.startswith(f"the stream of {NAME} has pass 0 of ")


def test_a_table_whose_passes_cannot_be_looked_up_is_not_taken_for_done(world: World) -> None:
    world.table = {"last_pass": 0, "replica_pass": None, "oldest_open_bucket_ms": None, "error": "the store is away"}
    assert world.wait(30).left == f"{NAME}: the store is away"


@pytest.mark.parametrize(
    ("says", "left"),
    [
        ({"left_out": {"shop.lost": "no ring"}}, "shop.lost: not followed: no ring"),
        ({"commits_broken": {"log/1": "no JSON"}}, "log/1 cannot be read, and what it lists is not published: no JSON"),
        # They are named at once, though plans come once in an interval: what was written is in no stream.
        ({"rows_homeless": {"6" * 32: 5}, "homeless_since_ms": {"6" * 32: BEGIN_MS}}, "5 staged rows of table id 666"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_bucket_close_cannot_publish_is_waited_for_and_named(
    world: World, says: dict[str, Any], left: str
) -> None:
    world.close_says = says
    assert left in world.wait(30).left
    world.close_says = {}
    assert world.wait() == Waited("", ())


UNPLANNED = {"table_id": "6" * 32, "topic": "test.shop.other", "last_pass": 4, "published_pass": 4, "replica_pass": 4}


@pytest.mark.parametrize(
    ("lacks", "left"),
    [
        ({"oldest_open_bucket_ms": BEGIN_MS}, "shop.other: its oldest bucket is not closed"),
        ({"error": "no node answers"}, "shop.other: no node answers"),
        ({"published_pass": 3}, "the stream of shop.other has pass 3 of 4"),
        ({"replica_pass": 3}, "the replica of shop.other has pass 3 of 4"),
        ({"kafka_error": "no broker"}, "Kafka lacks 1 folders of test.shop.other: no broker"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_table_that_is_not_planned_any_more_is_waited_for(world: World, lacks: dict[str, Any], left: str) -> None:
    keep_following(world.store, "6" * 32)
    assert world.wait(30).left == f"bucket_close has not looked at table id {'6' * 32} yet"
    world.others = {"shop.other": {**UNPLANNED, **lacks}}
    world.store.put(f"streams/test.shop.other/pass-{4:012}/manifest.json", b"{}")
    assert world.wait(30).left == left

    def tick(_: float = 0) -> None:
        """It comes to its end."""
        if world.others:
            world.others = {}
            place = CursorObject(world.store, "test.shop.other", "test.shop.other")
            place.save(place.load().behind(f"pass-{4:012}"))
            for table_id, version in followed_tables(world.store).items():
                end_following(world.store, table_id, version)
        World.tick(world)

    world.tick = tick  # type: ignore[method-assign]
    assert world.wait() == Waited("", ())


def test_a_node_that_is_not_read_is_named_and_not_waited_for(world: World) -> None:
    world.hosts = (HOSTS[0], replace(HOSTS[1], is_read=False))
    note = "node 10.0.0.2:9042 is not read (sync.datacenters): what only it has logged does not come"
    assert world.wait() == Waited("", (note,))


def test_a_log_is_waited_for_after_its_node_has_left_the_ring() -> None:
    """What a node that left alive had logged may be in no other log: that it cannot be read was not even named."""
    well = {"clear_at_ms": 9000, "error": None, "is_read": True}

    def left(*, alive: bool = True, read: bool = True, **of_former: Any) -> list[str]:
        former = FormerHost(replace(HOSTS[1], up=alive, is_read=read), 4000)
        plan = SyncPlan(Bucket(5000, 2000), HOSTS[:1], {}, (), former=(former,))
        statuses = {
            "commitlog_stage/rack-a": {"nodes": {"a": well}},
            "commitlog_stage/rack-b": {"nodes": {"b": well | of_former} if of_former else {}, "error": None},
        }
        return [one.reason for one in logs_left(Seen(statuses, plan), QUEUES, 3000)]

    log = "the log of node 10.0.0.2:9042, which has left the ring,"
    unread = {"clear_at_ms": 0, "is_read": False, "error": "it cannot be read"}
    assert left(clear_at_ms=3000) == left(alive=False, clear_at_ms=3000) == []
    assert left(clear_at_ms=2999, error="slow") == left(alive=False, clear_at_ms=2999, error="slow")
    assert left(clear_at_ms=2999, error="slow") == [f"{log} is not staged: slow"]
    assert left(**unread) == [f"{log} is not staged: it cannot be read"]
    assert left() == [f"{log} is not read: commitlog_stage/rack-b has not"]
    assert left(alive=False, **unread) == left(alive=False) == left(read=False, **unread) == []


@pytest.mark.parametrize("loop", ["commitlog_stage/rack-b", CLOSE, LATE])
def test_a_loop_that_does_not_run_is_named(world: World, loop: str) -> None:
    world.down.add(loop)
    world.step_ms, began_ms = 10_000, world.now_ms
    left = world.wait(10_000).left
    silent_s = int(left.removeprefix(f"{loop} does not run: no sign of life for ").removesuffix(" s"))
    assert GIVE_UP_AFTER_S <= silent_s <= GIVE_UP_AFTER_S + 20
    assert world.now_ms < began_ms + (GIVE_UP_AFTER_S + 120) * 1000


def test_a_loop_that_never_ran_is_named(world: World) -> None:
    world.store.delete("status/commitlog_stage/rack-b.json")
    world.down.add("commitlog_stage/rack-b")
    told, world.step_ms = list[str](), 10_000
    assert world.wait(10_000, told).left.startswith("commitlog_stage/rack-b does not run: no sign of life for 3")
    assert "the log of node 10.0.0.2:9042 is not read: commitlog_stage/rack-b has not" in told


def test_a_sync_that_is_stopped_is_told_at_once(world: World) -> None:
    world.store.put(STOP_KEY, b"{}")
    began_ms = world.now_ms
    assert world.wait().left.startswith("the sync is stopped: cdcservice start")
    assert world.now_ms == began_ms


def test_a_node_that_is_down_is_named_and_not_waited_for(world: World) -> None:
    """Nor is the loop that reads its log on the same host."""
    world.hosts = (HOSTS[0], replace(HOSTS[1], up=False))
    world.down.add("commitlog_stage/rack-b")
    assert world.wait() == Waited("", ("node 10.0.0.2:9042 is down: what only it has logged comes when it is back",))


def test_a_log_that_cannot_be_read_is_named(world: World) -> None:
    node = {"endpoint": "10.0.0.2:9042", "clear_at_ms": 5, "backlog_bytes": 0, "error": "no such folder"}
    world.down.add("commitlog_stage/rack-b")
    world.say("commitlog_stage/rack-b", {"nodes": {"b": node}})
    assert world.wait(20).left == "the log of node 10.0.0.2:9042 is not staged: no such folder"


def test_a_table_that_fails_is_named_with_its_reason(world: World) -> None:
    world.table = {"oldest_open_bucket_ms": BEGIN_MS, "error": "a column is missing"}
    assert world.wait(30).left == f"{NAME}: a column is missing"


def test_late_rows_of_a_table_that_is_not_planned_are_waited_for(world: World) -> None:
    """They are published, or removed when it is gone."""
    world.store.put(file := f"{LATE_ROWS}{'7' * 32}/one.arrow", b"rows")
    assert world.wait(30).left.startswith("1 files of late rows are not published")
    world.store.delete(file)
    assert world.wait() == Waited("", ())


def test_late_rows_that_cannot_be_read_are_waited_for(world: World) -> None:
    world.store.put(f"{LATE_ROWS}{TABLE.table_id}/broken.arrow", b"rows")
    world.down.add(LATE)
    world.say(LATE, {"waiting": 3, "files_broken": 1})
    left = world.wait(30).left
    assert " files of late rows are not published, 3 rows wait: 1 files cannot be read" in left
