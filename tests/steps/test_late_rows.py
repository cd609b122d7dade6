"""Late rows from their file to a pass, on a real node: each is published once, whatever is killed in between."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ringsync.changes.identity import TableVersion
from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import close_all, connect
from ringsync.config import Config, load_config
from ringsync.cql.types import Native
from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.ledger.staging import encode_rows, late_key
from ringsync.schema.table import Column, TableSchema
from ringsync.state.out_of_sequence import OutOfSequence
from ringsync.status import LATE_ROWS
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.late import out_of_sequence
from ringsync.steps.late.late_pass import LatePasses, Outcome
from ringsync.steps.late.late_rows import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    LateRows,
)
from ringsync.steps.own_keyspace import create_state
from ringsync.steps.passes.rows_after import AfterReader, UnreadRowsError
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode
from tests.steps.late_files import Write, change_rows, put_late

pytestmark = pytest.mark.server

HOUR_AGO = int(time.time() - 3600) * 10**6


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> TableSchema:
    session.execute(f"CREATE TABLE {keyspace}.t (id int, seq int, v text, PRIMARY KEY (id, seq)) WITH cdc = true")
    return read_table(session, keyspace, "t")


@pytest.fixture
def application(cassandra: CassandraNode, tmp_path: Path) -> Application:
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "lake"},
        "state": {"keyspace": "t_late"},
        "out_of_sequence_processor_poll_interval_ms": 200,
        "sync": {"run_s": 1.0},
    }
    path = tmp_path / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    config = load_config(path)
    return Application("out_of_sequence", str(path), config, store_of(config), None, "r", argparse.Namespace())


@pytest.fixture(scope="module")
def state(session: Any) -> Iterator[None]:
    create_state(session, Config.model_validate({**MINIMAL, "state": {"keyspace": "t_late"}}))
    yield
    session.execute("DROP KEYSPACE t_late")
    close_all()


MINIMAL = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "/nowhere"}}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def messages(store: ObjectStore, table: TableSchema) -> list[dict[str, Any]]:
    """What the passes of a table say, made visible as ``bucket_close`` does."""
    stream = FileStream(store, f"test.{table.keyspace}.{table.name}")
    found = []
    for number in pass_numbers(store, table.table_id):
        made = get_pass(store, table.table_id, number)
        stream.publish(made.folder, made.parts)
        found += [message["value"] for message in stream.read(made.folder)]
    return found


class Ring:
    """Says that a replica is down, or is not any more."""

    def __init__(self, passes: LatePasses) -> None:
        self.down = True
        self._real = passes._reader
        passes._reader = self.reader  # type: ignore[method-assign]

    def reader(self, table: TableSchema) -> AfterReader:
        found = self._real(table)
        if not self.down:
            return found
        ring = replace(found.ring)
        ring.__dict__["all_live"] = np.zeros(len(ring.ranges), np.bool_)
        return replace(found, ring=ring)


@pytest.mark.usefixtures("state")
def test_from_file_to_message(application: Application, table: TableSchema, session: Any) -> None:
    """What is shown is published at once. What is not waits for replicas that are down, and then is not there."""
    store, clock, t = application.store, Clock(), HOUR_AGO
    there, overwritten, deleted = Write(1, 1, "there", t), Write(1, 2, "old", t + 1), Write(2, 1, None, t + 5)
    coming, hidden, forgotten = Write(3, 1, "coming", t + 2), Write(4, 1, "hidden", t + 3), Write(5, 1, "done", t + 4)
    for write in (there, Write(1, 2, "newer", t + 100), Write(2, 1, "gone", t + 4), deleted, forgotten):
        session.execute(write.cql(table.full_name))
    put_late(store, [there, overwritten, deleted, coming], table, "node-1-a")
    put_late(store, [there, coming, hidden], table, "node-2-a", "node-2")
    with ControlServer() as control:
        passes = LatePasses(application, connect(cluster_settings(application.config)), control.address)
        ring = Ring(passes)
        assert passes.table("0" * 32) is None
        version = passes.table(table.table_id)
        assert version is not None
        assert version.table == table
        assert passes.publish(table, change_rows([forgotten], table)).published == 1
        put_late(store, [Write(6, None, None, t + 6)], table, "node-1-0")
        put_late(store, [forgotten], table, "node-1-b")
        late = LateRows(store, OutOfSequence(session, "t_late"), passes, clock)
        late.cycle()
        # coming is in both files: it waits in one of them.
        assert late.status()["waiting"] == 2
        folder = f"{LATE_ROWS}{table.table_id}/"
        assert [stat.key for stat in store.list(LATE_ROWS)] == [f"{folder}{name}.arrow" for name in WAITING]
        late.cycle()
        session.execute(coming.cql(table.full_name))
        clock.now += FIRST_WAIT_S
        late.cycle()
        assert late.status()["waiting"] == 1
        for _ in range(10):
            clock.now += LONGEST_WAIT_S
            late.cycle()
        assert late.status()["waiting"] == 1
        ring.down = False
        # Another process goes on, and a copy that comes later still is a duplicate.
        put_late(store, [hidden, there], table, "node-3-a", "node-3")
        clock.now += LONGEST_WAIT_S
        again = LateRows(store, OutOfSequence(session, "t_late"), passes, clock)
        again.cycle()
    assert not store.list(LATE_ROWS)
    assert session.execute("SELECT count(*) FROM t_late.out_of_sequence").one()[0] == 0
    assert dict(late.counts) == {
        **{"files": 4, "read": 9, "due": 12, "published": 5, "repeated": 3, "postponed": 13, "of_passes": 0},
    }
    assert {name: again.counts[name] for name in ("read", "due", "published", "repeated", "postponed")} == {
        **{"read": 2, "due": 1, "published": 1, "repeated": 2, "postponed": 0},
    }
    said = messages(store, table)
    assert all(one["source"]["late"] for one in said)
    assert sorted((one["source"]["ts_us"], one["op"], (one["after"] or {}).get("v")) for one in said) == [
        (t, "c", "there"),
        (t + 1, "c", "newer"),
        (t + 2, "c", "coming"),
        (t + 3, "d", None),
        (t + 4, "c", "done"),
        (t + 5, "d", None),
        (t + 6, "d", None),
    ]


WAITING = ("node-1-a", "node-2-a")


@pytest.mark.usefixtures("state")
def test_a_row_that_a_pass_has_published_meanwhile_is_left_out(
    application: Application, table: TableSchema, session: Any
) -> None:
    """Two processes publish the same rows at once: the second one finds the first one's pass, and begins anew."""
    writes = [Write(7, seq, "x", HOUR_AGO + seq) for seq in range(10)]
    rows = change_rows(writes, table)
    with ControlServer() as control:
        connected = connect(cluster_settings(application.config))
        first, second = (LatePasses(application, connected, control.address) for _ in range(2))
        assert first.table(table.table_id) == second.table(table.table_id)
        real = second.published

        def published(table: TableSchema, rows: pa.RecordBatch) -> Any:
            """Another is faster after we have looked."""
            found = real(table, rows)
            second.published = real  # type: ignore[method-assign]
            assert first.publish(table, change_rows(writes[:4], table)).published == 4
            return found

        second.published = published  # type: ignore[method-assign]
        assert second.publish(table, rows).published == 6
    found = sorted(one["source"]["ts_us"] for one in messages(application.store, table))
    assert found == [write.at for write in writes]


@pytest.mark.usefixtures("state")
def test_the_application(application: Application, table: TableSchema, session: Any) -> None:
    write = Write(8, 1, "x", HOUR_AGO)
    session.execute(write.cql(table.full_name))
    put_late(application.store, [write], table, "a")
    application.store.put(f"{LATE_ROWS}{table.table_id}/damaged.arrow", b"no Arrow file")
    application.store.put(f"{LATE_ROWS}{'0' * 32}/b.arrow", b"of a table that is gone")
    report, code = out_of_sequence.run(application)
    assert code == ExitCode.COMPLETED_WITH_ERRORS
    assert report["counts"]["published"] == 1
    assert len(report["problems"]) == 2
    assert [stat.key.rpartition("/")[2] for stat in application.store.list(LATE_ROWS)] == ["b.arrow", "damaged.arrow"]
    assert b'"published": 1' in application.store.get("status/out_of_sequence/queue.json")


class Killed(BaseException):
    """Nothing catches a kill."""


class Deadly:
    """Passes calls on, until one of them, whichever it is that is the last, is killed: before or after it was done."""

    def __init__(self, calls: int, after: bool) -> None:
        self.calls, self.after = calls, after

    def guard(self, one: Any) -> Any:
        outer = self

        class Guarded:
            def __getattr__(self, name: str) -> Any:
                found = getattr(one, name)
                return outer.killing(found) if callable(found) else found

        return Guarded()

    def killing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            self.calls -= 1
            if not self.calls and not self.after:
                raise Killed
            found = call(*arguments)
            if not self.calls:
                raise Killed
            return found

        return called


class Published:
    """Effects that remember what was published; what is in ``open`` waits some looks."""

    def __init__(self, table: TableSchema, open: list[Write]) -> None:
        self.version = TableVersion.first(table)
        self.open = {write.digest: 3 for write in open}
        self.times: list[bytes] = []

    def table(self, table_id: str) -> TableVersion | None:
        return self.version if table_id == self.version.table_id else None

    def gone(self, missed: Set[str]) -> frozenset[str]:
        return frozenset(missed & {GONE})

    def publish(self, table: TableSchema, rows: pa.RecordBatch) -> Outcome:
        digests = rows["digest"].to_pylist()
        waiting = np.zeros(len(digests), np.bool_)
        new = []
        for place, digest in enumerate(digests):
            if digest in self.times:
                continue
            self.open[digest] = self.open.get(digest, 0) - 1
            waiting[place] = self.open[digest] >= 0
            if not waiting[place]:
                new.append(digest)
        self.times += new
        return Outcome(len(new), waiting)

    def digests_left(self, writes: list[Write]) -> set[bytes]:
        """Of those that are not published."""
        return {write.digest for write in writes} - set(self.times)


GONE = "f" * 32


@pytest.mark.usefixtures("state")
def test_rows_of_a_table_that_is_gone_are_counted_and_those_of_others_go_on(
    table: TableSchema, session: Any, tmp_path: Path
) -> None:
    effects, store, clock = Published(table, []), LocalStore(tmp_path), Clock()
    gone, unknown = (replace(table, table_id=one) for one in (GONE, "e" * 32))
    for one, count in ((gone, 3), (unknown, 2), (table, 1)):
        put_late(store, [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(count)], one, "a")
    late = LateRows(store, OutOfSequence(session, "t_late"), effects, clock)
    late.cycle()
    assert (late.counts["of_dropped_tables"], late.counts["published"]) == (3, 1)
    assert [stat.key.split("/")[2] for stat in store.list(LATE_ROWS)] == [unknown.table_id]
    assert unknown.table_id in late.problems[0]


@pytest.mark.usefixtures("state")
def test_one_table_that_fails_holds_up_no_other(table: TableSchema, session: Any, tmp_path: Path) -> None:
    effects, store, clock = Published(table, []), LocalStore(tmp_path), Clock()
    poisoned = replace(table, table_id="0" * 32)
    for one in (poisoned, table):
        put_late(store, [Write(1, 1, "x", HOUR_AGO)], one, "a")
    real = effects.table

    def failing(table_id: str) -> TableVersion | None:
        if table_id == poisoned.table_id:
            raise RuntimeError("no ring")
        return real(table_id)

    effects.table = failing  # type: ignore[method-assign]
    late = LateRows(store, OutOfSequence(session, "t_late"), effects, clock)
    late.cycle()
    assert late.counts["published"] == 1
    assert late.error is not None
    assert "no ring" in late.error


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("admitted", [False, True], ids=["new", "in the queue"])
def test_a_file_that_cannot_be_used_holds_up_no_other_of_its_table(
    admitted: bool, table: TableSchema, session: Any, tmp_path: Path
) -> None:
    """It is named with both versions, tried again ever more seldom, and published once its version is known."""
    store, clock = LocalStore(tmp_path), Clock()
    writes = [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(4)]
    effects = Published(table, [writes[1]] if admitted else [])
    altered = replace(table, columns=(*table.columns[:2], Column("a", "regular", Native("text")), *table.columns[2:]))
    older, newer = TableVersion.first(table), TableVersion.first(table).followed_by(altered)
    named = [f"{admitted}-{name}" for name in ("0", "1-newer", "2-damaged", "3-other", "4")]
    unresolved, damaged, other = (late_key(table.table_id, name) for name in named[1:4])
    put_late(store, [writes[0]], table, named[0])
    store.put(unresolved, encode_rows(newer.to_store(change_rows([writes[1]], altered))))
    store.put(damaged, b"no Arrow file")
    store.put(other, encode_rows(pa.RecordBatch.from_pydict({"digest": [1]})))
    put_late(store, [writes[2]], table, named[4])
    late = LateRows(store, OutOfSequence(session, "t_late"), effects, clock)
    if admitted:
        effects.version = newer
        late.cycle()
        clock.now += FIRST_WAIT_S
        assert late.status()["waiting"] == 1
        effects.version = older
    for _ in range(3):
        late.cycle()
    assert sorted(effects.times) == sorted(write.digest for write in (writes[0], writes[2]))
    assert [stat.key for stat in store.list(LATE_ROWS)] == [unresolved, damaged, other]
    status = late.status()
    assert (status["error"], status["waiting"], status["files_broken"]) == (None, 1, 3)
    assert "version 2 of its schema, which is later than version 1" in status["broken"][unresolved]
    assert list(status["broken"]) == [unresolved, damaged, other]
    assert all(key in " ".join(late.problems) for key in (unresolved, damaged, other))
    if admitted:
        clock.now += LONGEST_WAIT_S  # also what waits in the queue is tried again, and fails again
        late.cycle()
        assert effects.digests_left(writes) == {writes[1].digest, writes[3].digest}
    effects.version = newer
    put_late(store, [writes[3]], table, f"{admitted}-5")
    late.cycle()
    assert effects.digests_left(writes) == {writes[1].digest}, "it is not tried in each cycle"
    for _ in range(4):
        clock.now += LONGEST_WAIT_S
        late.cycle()
    assert not effects.digests_left(writes)
    assert (late.status()["waiting"], late.status()["files_broken"]) == (0, 2)
    for key in (damaged, other):
        store.delete(key)
    late.cycle()
    assert (late.problems, store.list(LATE_ROWS)) == ([], [])
    assert session.execute("SELECT count(*) FROM t_late.out_of_sequence").one()[0] == 0


LOOKS = 6


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_anywhere_loses_and_repeats_nothing(
    after: bool, table: TableSchema, session: Any, tmp_path: Path
) -> None:
    shown = [Write(1, seq, "x", HOUR_AGO + seq) for seq in range(6)]
    hidden = [Write(2, seq, "y", HOUR_AGO + seq) for seq in range(3)]
    kills = 0
    for calls in range(1 + after, 100, 3):
        store, clock, effects = LocalStore(tmp_path / f"{calls}"), Clock(), Published(table, hidden)
        effects.times = [shown[0].digest]
        put_late(store, [*shown, *hidden], table, f"a{calls}")
        put_late(store, [*shown[3:], hidden[0]], table, f"b{calls}", "node-2")
        deadly = Deadly(calls, after)
        queue = OutOfSequence(session, "t_late")
        try:
            guarded = [deadly.guard(one) for one in (store, queue, effects)]
            late = LateRows(*guarded, clock)
            for _ in range(LOOKS):
                late.cycle()
                clock.now += 700
        except Killed:
            kills += 1
        late = LateRows(store, queue, effects, clock)
        for _ in range(LOOKS):
            late.cycle()
            clock.now += 700
        assert sorted(effects.times) == sorted(write.digest for write in (*shown, *hidden)), f"killed at call {calls}"
        assert not store.list(LATE_ROWS)
        if deadly.calls > 0:
            break
    assert kills > 6
    assert session.execute("SELECT count(*) FROM t_late.out_of_sequence").one()[0] == 0


@pytest.mark.usefixtures("state")
def test_what_cannot_be_read_waits(table: TableSchema, session: Any, tmp_path: Path) -> None:
    effects, store, clock = Published(table, []), LocalStore(tmp_path), Clock()
    real = effects.publish

    def unreadable(table: TableSchema, rows: pa.RecordBatch) -> Outcome:
        raise UnreadRowsError("two of three nodes are down")

    effects.publish = unreadable  # type: ignore[method-assign]
    put_late(store, [Write(1, 1, "x", HOUR_AGO)], table, "unreadable")
    late = LateRows(store, OutOfSequence(session, "t_late"), effects, clock)
    first_ms = int(clock() * 1000)
    for _ in range(LOOKS):
        late.cycle()
        clock.now += 10
    assert late.problems == [f"{table.full_name}: two of three nodes are down"]
    assert (late.status()["waiting"], late.status()["oldest_ms"]) == (1, first_ms)
    effects.publish = real  # type: ignore[method-assign]
    clock.now += LONGEST_WAIT_S
    late.cycle()
    assert (late.problems, late.counts["published"], late.status()["waiting"]) == ([], 1, 0)
    assert not store.list(LATE_ROWS)
