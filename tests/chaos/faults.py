"""Fifteen things that go wrong in production, the alarm of each, and what its alarm says to do."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ringsync.airflow_client import AirflowError
from ringsync.cli import main
from ringsync.ledger.alarms import Alarm
from ringsync.ledger.waiting_segments import waiting
from ringsync.replica.delta_log import read_snapshot, remove
from ringsync.replica.folders import base_folder
from ringsync.service.expected import SCHEMA
from ringsync.storage.gcs import GcsStore
from tests.chaos.processes import running
from tests.chaos.under_airflow import Sync, until
from tests.gcs_faults import FaultyProxy
from tests.sync.scenario import TROUBLES

CONNECTION, ROLE, PASSWORD = "ringsync_cassandra", "ringsync", "r1ngsync"
ORDERS, PEOPLE, NOTES, PICTURES = "shop.orders", "shop.people", "shop.notes", "shop.pictures"
WINDOW_S, HINTS_S, AFTER_S, LAG_S = 20, 45, 10, 90
OPEN_S = 5 * WINDOW_S
CDC_MIB = 256
RETRY_S = 60
AWAY_S = 150
ROW_BYTES, ROWS = 2_500_000, 100
UNTOUCHED = 3
"""Id of a row of :data:`ORDERS` that production does not write."""
CLOCK = """
import os, time
if os.path.exists("{flag}"):
    with open("/proc/self/cmdline", "rb") as file:
        if b"schema_update.py" in file.read():
            now = time.time
            time.time = lambda: now() + 60
"""
"""Python imports it first of all: it moves the clock of one loop, while a file is there."""


@dataclass
class World:
    """What gives way.

    :ivar direct: the store without faults
    :ivar session: of the superuser, at QUORUM
    :ivar refused: writes of production that were refused
    """

    sync: Sync
    proxy: FaultyProxy
    direct: GcsStore
    session: Any
    folder: Path
    refused: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=count)
    broker_is_fast: Event = field(default_factory=Event)

    def command(self, *arguments: str) -> int:
        """Run cdcservice."""
        print(f"  cdcservice {' '.join(arguments)}", flush=True)
        return main([*arguments, "--conf", str(self.sync.conf)])

    def verify(self, table: str, *options: str) -> int:
        """Let Airflow verify a table, and wait for the end."""
        return self.command("verify", "--table", table, "--wait", *options)

    def kill(self, *applications: str) -> None:
        """Kill applications; Airflow starts them again."""
        for name in applications:
            for pid in running(f"{name}.py", str(self.sync.conf)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def write(self, statement: Any, values: tuple[Any, ...]) -> None:
        """Execute a write of production. A node that has just died may cost a try, as any client's."""
        for _ in range(2):
            try:
                self.session.execute(statement, values)
                return
            except TROUBLES as error:
                last = error
                time.sleep(1)
        self.refused[f"{type(last).__name__}: {last}"[:200]] += 1


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    :ivar kind: of its alarm; empty: nothing may be raised
    :ivar where: of its alarm, a pattern
    :ivar within_s: after so long it must be raised, by docs/runbook.md
    :ivar begin: lets it happen; when it began, s since the epoch, if that is later than its call
    :ivar end: does what the alarm says
    """

    kind: str
    where: str
    within_s: float
    begin: Callable[[World], float | None]
    end: Callable[[World, Alarm], object] = lambda world, alarm: None


def named(alarm: Alarm, pattern: str) -> str:
    """The command that an alarm names."""
    found = re.search(pattern, alarm.text)
    assert found, alarm.text
    return found[0]


def repair(world: World, alarm: Alarm) -> None:
    """Run the verification that an alarm names."""
    _, *words = named(alarm, r"cdcservice verify --repair --table [\w.]+\w").split()
    assert world.command(*words, "--wait") in (0, 1)


def start(world: World, alarm: Alarm) -> None:
    """Start the sync again."""
    assert world.command("start", "--timeout", "120") in (0, 1), alarm.text


def break_yaml(world: World) -> None:
    conf = world.sync.conf
    (world.folder / "good.yaml").write_text(conf.read_text())
    conf.write_text(conf.read_text().replace("run_s:", "runs:"))


def mend_yaml(world: World, alarm: Alarm) -> None:
    world.sync.conf.write_text((world.folder / "good.yaml").read_text())
    assert "runs" in alarm.text, alarm.text


def lose_connection(world: World) -> None:
    while_airflow_answers(lambda: world.sync.client._request("DELETE", f"connections/{CONNECTION}"))
    world.kill("bucket_close", "commitlog_stage")  # those that run have the password


def give_connection(world: World) -> None:
    connection = {"connection_id": CONNECTION, "conn_type": "generic", "password": PASSWORD}
    while_airflow_answers(lambda: world.sync.client._request("POST", "connections", connection))


def while_airflow_answers(ask: Callable[[], object]) -> None:
    """Ask Airflow, again while it does not answer."""

    def answered() -> bool:
        with suppress(AirflowError):
            ask()
            return True
        return False

    until(answered)


def silence_archive(world: World) -> None:
    for pid in until(lambda: running("commitlog_archive.py", str(world.sync.conf))):
        os.kill(pid, signal.SIGSTOP)


def wake_archive(world: World, alarm: Alarm) -> None:
    for pid in running("commitlog_archive.py", str(world.sync.conf)):
        os.kill(pid, signal.SIGCONT)


def take_store(world: World) -> None:
    """The store is away when the archive and the sync start."""
    world.proxy.share = 1.0
    world.kill("commitlog_archive", "bucket_close", "commitlog_stage")
    time.sleep(AWAY_S)
    world.proxy.share = 0


def stray_objects(world: World) -> None:
    folders = {stat.key.rpartition("/")[0] for stat in world.direct.list()}
    parts = {"/".join(folder.split("/")[:depth]) for folder in folders for depth in (1, 2, 3, 4)}
    for folder in sorted(parts):
        if not folder.startswith("replica"):  # its tables belong to Delta
            world.direct.put(f"{folder}/thumbs.db", b"\x00")


def slow_broker(world: World) -> None:
    """The broker answers a moment now and then: nothing fails."""
    assert world.sync.broker is not None
    pid = world.sync.broker._process.pid  # type: ignore[union-attr]

    def slow() -> None:
        while not world.broker_is_fast.is_set():
            os.kill(pid, signal.SIGSTOP)
            world.broker_is_fast.wait(100)
            os.kill(pid, signal.SIGCONT)
            world.broker_is_fast.wait(1)

    Thread(target=slow, daemon=True).start()


def archive_waits(world: World) -> float:
    """Segments are archived before anybody has read them, and the DAG that reads archived ones is off."""
    while_airflow_answers(lambda: world.sync.client.set_paused("archive_reprocess", True))
    stage = until(lambda: running("commitlog_stage.py", str(world.sync.conf)))
    for pid in stage:
        os.kill(pid, signal.SIGSTOP)
    insert = world.session.prepare(f"INSERT INTO {ORDERS} (id, state) VALUES (?, ?)")
    for number in range(300):  # 8 MB of segments are finished
        world.write(insert, (1000 + number % 10, "x" * 100_000))
        time.sleep(0.05)
    until(lambda: waiting(world.direct).segments, 180)
    for pid in stage:
        os.kill(pid, signal.SIGCONT)
    return time.time()


def plant_difference(world: World) -> float:
    folder = base_folder(*ORDERS.split("."))
    before = read_snapshot(world.direct, folder)
    remove(world.direct, folder, before, before.files, now_ms=int(time.time() * 1000))
    assert world.verify(ORDERS) == 1
    return time.time()


def mask(world: World) -> None:
    world.session.execute(f"ALTER TABLE {PEOPLE} ALTER name MASKED WITH mask_inner(1, 0)")


def unmask(world: World, alarm: Alarm) -> None:
    world.session.execute(named(alarm, r"GRANT UNMASK ON TABLE [\w.\"]+ TO [\w\"]+"))


def big_rows(world: World) -> None:
    """A partition of 100 rows of 2.5 MB, of nodes with small heaps, is bootstrapped, then changed."""
    insert = world.session.prepare(f"INSERT INTO {PICTURES} (id, seq, v) VALUES (1, ?, ?)")
    chance = random.Random(1)
    for seq in range(ROWS):
        world.write(insert, (seq, chance.randbytes(ROW_BYTES)))
        time.sleep(0.3)
    assert world.command("bootstrap", "--table", PICTURES, "--enable-cdc", "--wait") == 0
    for seq in range(0, ROWS, 20):
        world.write(insert, (seq, chance.randbytes(ROW_BYTES)))


def out_of_cdc(world: World) -> float:
    world.session.execute(f"ALTER TABLE {NOTES} WITH cdc = false")
    time.sleep(3 * WINDOW_S)
    for number in range(20):
        world.write(f"INSERT INTO {NOTES} (id, v) VALUES (%s, 'meanwhile')", (number,))
    time.sleep(3 * WINDOW_S)
    world.session.execute(f"ALTER TABLE {NOTES} WITH cdc = true")
    return time.time()


def clock_ahead(world: World) -> float:
    (world.folder / "ahead").touch()
    world.kill("schema_update")
    # Airflow starts it again, and it says what the time is.
    until(lambda: json.loads(world.direct.get(f"status/{SCHEMA}.json"))["at_ms"] > 1000 * time.time() + 30_000)
    return time.time()


def clock_right(world: World, alarm: Alarm) -> None:
    (world.folder / "ahead").unlink()
    world.kill("schema_update")
    assert re.search(r"(5\d|60)\.\d s ahead", alarm.text), alarm.text


def fill_disk(world: World) -> None:
    disk = world.sync.nodes[2].folder
    free = os.statvfs(disk)
    left = free.f_bavail * free.f_frsize
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, left - CDC_MIB * 2**20 // 6)


def free_disk(world: World, alarm: Alarm) -> None:
    (world.sync.nodes[2].folder / "ballast").unlink()


def node_down(world: World) -> None:
    world.sync.nodes[1].kill()


def node_back(world: World, alarm: Alarm) -> None:
    node = world.sync.nodes[1]
    node.start()
    until(lambda: node.nodetool("status").count("UN") == 3)
    node.nodetool("repair", "shop")
    assert "nodetool repair" in alarm.text, alarm.text


def damage_status(world: World) -> None:
    world.direct.put("status/older_loop/loop.json", b"\x00{")


FAULTS = {
    "broken yaml": Fault("config-wrong", "alarms/alarms", AFTER_S, break_yaml, mend_yaml),
    "damaged status": Fault("status-unreadable", "older_loop/loop", AFTER_S, damage_status, start),
    "full disk": Fault("disk-full", "node .*", 0, fill_disk, free_disk),
    "stray object": Fault("", "", 0, stray_objects),
    "silent archive": Fault("archive-silent", "commitlog_archive/default", 40 + AFTER_S, silence_archive, wake_archive),
    "clock ahead": Fault("clock-off", ".*", AFTER_S, clock_ahead, clock_right),
    "node down past its hints": Fault("node-past-hints", "node .*", HINTS_S + 60 + AFTER_S, node_down, node_back),
    "planted difference": Fault("replica-differs", ORDERS, 2 * AFTER_S, plant_difference, repair),
    "masked column": Fault("table-failing", PEOPLE, WINDOW_S + AFTER_S, mask, unmask),
    "slow broker": Fault(
        *("kafka-lagging", f"{ORDERS}|{PEOPLE}", WINDOW_S + LAG_S + AFTER_S, slow_broker),
        lambda world, alarm: world.broker_is_fast.set(),
    ),
    "table out of and back into cdc": Fault("table-gap", NOTES, WINDOW_S, out_of_cdc, repair),
    "big rows": Fault("", "", 0, big_rows),
    "missing connection": Fault(
        "dag-failed",
        "(commitlog_stage|bucket_close).*",
        60 + AFTER_S,
        lose_connection,
        lambda world, alarm: give_connection(world),
    ),
    "waiting archive": Fault("archive-waiting", "cdc/", OPEN_S + LAG_S + AFTER_S, archive_waits, start),
    "store away at start": Fault("store-away", "object store", 2 * RETRY_S + AFTER_S, take_store),
}
ACTS = (
    ("store away at start",),
    ("table out of and back into cdc", "big rows"),
    ("missing connection",),
    ("waiting archive",),
    ("broken yaml", "damaged status", "full disk", "stray object"),
    ("silent archive", "clock ahead", "node down past its hints"),
    ("planted difference",),  # its repair waits for all that was archived: what fails meanwhile would fall far behind
    ("masked column", "slow broker"),
)
"""What goes wrong at the same time."""
