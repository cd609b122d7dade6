"""A table that is not planned any more is followed until stream, replica and Kafka have all its passes."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ringsync.config import load_config
from ringsync.ledger.followed import end_following, followed_tables, keep_following
from ringsync.ledger.passes import mark, pass_folder, pass_numbers
from ringsync.ledger.staging import encode_rows, late_key
from ringsync.ledger.table_versions import version_of
from ringsync.service.expected import Expected
from ringsync.service.health import problems
from ringsync.service.published import CLOSE, Seen, buckets_left, kafka_left, passes_left
from ringsync.status import read_status
from ringsync.steps.application import Application, ExitCode
from ringsync.steps.close.bucket_close import Closer, exit_code
from ringsync.steps.close.followed import Followed
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.loop import put_status
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.sync_plan import SyncTable
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from ringsync.streams.cursor import CursorObject
from ringsync.streams.files import FileStream, bootstrap_topic
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import TABLE, Lake
from tests.steps.test_id_comes_again import FIRST, ROWS, SECOND, TOPIC, Cluster, Context, Queue, cycle

EXPECTED = Expected.of_commit_logs([])

VERSION = f"schemas/{TABLE.keyspace}.{TABLE.name}/000001.json"
"""What says how the first table looks."""

NOT_PLANNED = pytest.mark.parametrize("there", [(FIRST,), ()], ids=["without cdc", "dropped"])


class Feed:
    """Of Kafka, which relays when it is told to."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.watched = store, set[str]()

    def watch(self, topic: str) -> None:
        self.watched.add(topic)

    def announce(self, topic: str, bucket: str) -> None:
        pass

    def status(self, topic: str) -> dict[str, Any]:
        return {"messages": 0, "error": None}

    def relay(self) -> None:
        for topic in self.watched:
            place = CursorObject(self.store, topic, topic)
            for bucket in FileStream(self.store, topic).folders():
                place.save(place.load().behind(bucket))


class World(Cluster):
    """A cluster whose tables' rows after changes are not read, and with a Kafka."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, store: ObjectStore | None = None) -> None:
        lake = Lake(folder)
        super().__init__(lake, monkeypatch)
        document = yaml.safe_load(lake.conf.read_text()) | {"sync": {"after_image": "none"}}
        lake.conf.write_text(yaml.safe_dump(document))
        self.store = store or lake.store
        config = load_config(lake.conf)
        self.application = Application("close", str(lake.conf), config, self.store, None, "run", argparse.Namespace())
        self.feed = Feed(self.store)

    def closer(self) -> Closer:
        """A new run."""
        self.feed = Feed(self.store)
        control: Any = SimpleNamespace(address=None)
        return Closer(self.application, None, Context(), control, self.feed)  # type: ignore[arg-type]

    def put_late(self, seq: int = 1) -> str:
        """Lay a late row of the first table aside; gives the key of its file."""
        rows = change_rows([Write(1, seq, "late", 1_790_000_000_000_000)], replace(TABLE, table_id=FIRST))
        key = late_key(FIRST, f"a-{seq}-0")
        self.store.put(key, encode_rows(self.table(FIRST).version.to_store(rows)))
        return key

    def publish_late(self) -> None:
        """A run of ``out_of_sequence``."""
        late = LateRows(self.store, Queue(), LatePasses(self.application, None, None))  # type: ignore[arg-type]
        late.cycle()
        assert late.error is None

    @property
    def folders(self) -> list[str]:
        return FileStream(self.store, TOPIC).folders()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(tmp_path, monkeypatch)
    found.there = (FIRST,)
    cycle(found.closer())
    return found


def seen(world: World, closer: Closer, status: dict[str, Any]) -> Seen:
    return Seen({CLOSE: status}, closer._plan, followed_tables(world.store).keys())


def test_late_rows_of_a_table_that_has_lost_cdc_come_into_the_stream(world: World) -> None:
    world.planned = ()
    key = world.put_late()
    closer = world.closer()
    cycle(closer)
    world.publish_late()
    assert world.store.stat(key) is None
    told = list(buckets_left(Seen({CLOSE: cycle(world.closer())}, None, {FIRST}), 0, 0))
    assert told == [], "it is listed, and so taken up, in the first cycle of a run"
    cycle(closer)
    assert world.folders == [pass_folder(1)]


def test_who_waits_is_told_of_a_table_that_is_not_taken_up_yet(world: World) -> None:
    world.planned = ()
    closer = world.closer()
    for _ in range(3):
        status = cycle(closer)
    assert (followed_tables(world.store), status["tables"]) == ({}, {}), "nothing is left to do"
    world.put_late()
    world.publish_late()
    for left in (buckets_left(seen(world, closer, status), 0, 0), passes_left(seen(world, closer, status), {})):
        assert [one.reason for one in left] == [f"bucket_close has not looked at table id {FIRST} yet"]


@NOT_PLANNED
def test_it_is_followed_until_kafka_has_all_of_it(world: World, there: tuple[str, ...]) -> None:
    world.put_late()
    world.publish_late()
    cycle(world.closer())
    world.planned, world.there = (), there
    closer = world.closer()
    for _ in range(5):
        status = cycle(closer)
    assert world.feed.watched == {TOPIC}
    left = list(kafka_left(world.store, str, seen(world, closer, status), {}))
    assert [one.reason for one in left] == [f"Kafka lacks 1 folders of {TOPIC}"]
    assert list(status["tables"]) == ["shop.t"]
    world.feed.relay()
    status = cycle(closer)
    assert (followed_tables(world.store), status["tables"]) == ({}, {})
    again = world.closer()
    cycle(again)
    assert world.feed.watched == set()


@NOT_PLANNED
def test_what_a_run_has_not_published_any_more_is_published(world: World, there: tuple[str, ...]) -> None:
    """It was killed behind the pass."""
    world.put_late()
    world.publish_late()
    world.planned, world.there = (), there
    closer = world.closer()
    for _ in range(3):
        cycle(closer)
    assert world.folders == [pass_folder(1)]


def test_a_table_whose_topic_another_one_has_by_now_comes_to_its_end(world: World) -> None:
    """Though Kafka is never up to date with the new one."""
    world.put_late()
    world.publish_late()
    cycle(world.closer())
    world.there = (SECOND,)
    closer = world.closer()
    for _ in range(3):
        status = cycle(closer)
    assert status["tables"].keys() == {"shop.t", f"shop.t (table id {FIRST})"}
    assert status["tables"]["shop.t"]["table_id"] == SECOND
    world.feed.relay()
    FileStream(world.store, TOPIC).publish(pass_folder(9), [])
    assert cycle(closer)["tables"].keys() == {"shop.t"}
    assert followed_tables(world.store).keys() == {SECOND}


def test_a_replica_that_is_behind_and_a_bootstrap_that_goes_on_are_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.planned = ()
    applied = [0]
    monkeypatch.setattr(FollowUps, "_update_replica", lambda one: None)
    monkeypatch.setattr(
        FollowUps, "_replica", lambda one: SimpleNamespace(applied=applied[0], deletions_known_from_us=0)
    )
    world.put_late()
    world.publish_late()

    def is_followed() -> bool:
        closer = world.closer()
        cycle(closer)
        world.feed.relay()
        cycle(closer)
        return bool(followed_tables(world.store))

    assert is_followed()
    applied[0] = 1
    mark(world.store, FIRST, "begin", "b", 1, check=lambda: None)
    applied[0] = 2
    assert is_followed()
    mark(world.store, FIRST, "cutover", "b", 1)
    applied[0] = 3
    assert not is_followed()


def test_a_pass_that_is_made_while_a_table_comes_to_its_end_is_followed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.planned = ()
    world.put_late()
    is_done = FollowUps.is_done

    def made_meanwhile(one: FollowUps) -> bool:
        done = is_done(one)
        world.publish_late()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(FollowUps, "is_done", made_meanwhile)
        cycle(world.closer())
    assert (pass_numbers(world.store, FIRST), world.folders) == ([1], [])
    cycle(world.closer())
    assert world.folders == [pass_folder(1)]


def mortal_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, MortalStore]]:
    """One after the other, each with a store whose user can be killed."""
    for number in itertools.count():
        folder = tmp_path / f"{number}"
        folder.mkdir()
        store = MortalStore(folder / "lake")
        world = World(folder, monkeypatch, store)
        world.there = (FIRST,)
        yield world, store


def test_a_kill_between_any_two_writes_of_either_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``bucket_close`` ends the table, ``out_of_sequence`` makes a pass; who is killed begins again."""
    for writes, (world, store) in enumerate(mortal_worlds(tmp_path, monkeypatch)):
        cycle(world.closer())
        world.planned = ()
        world.put_late()
        store.left, killed = writes, False
        for loop in (world.publish_late, lambda world=world: cycle(world.closer())):
            try:
                loop()  # type: ignore[operator]
            except Killed:
                killed, store.left = True, IMMORTAL
                cycle(world.closer())  # it may come to an end here …
        store.left = IMMORTAL
        world.publish_late()  # … and what is done again begins it anew
        cycle(world.closer())
        assert world.folders == [pass_folder(1)], writes
        if not killed:
            assert writes > 5
            return


def test_what_waits_for_the_bootstrap_of_a_table_that_is_dropped_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else ends the bootstrap if the table is not created again. With a kill between any two writes, too."""
    for writes, (world, store) in enumerate(mortal_worlds(tmp_path, monkeypatch)):
        closer = world.closer()
        mark(store, FIRST, "begin", "b", 1, check=lambda: None)
        put_status(store, "bootstrap", FIRST, {"table": "shop.t", "bootstrap": "b"})
        world.put_late()
        world.publish_late()
        cycle(closer)
        waiting = FileStream(store, bootstrap_topic(TOPIC))
        assert (world.folders, waiting.folders()) == ([], [pass_folder(2)])
        world.there = ()
        store.left, killed = writes, False
        try:
            for _ in range(3):
                cycle(closer)
        except Killed:
            killed, store.left = True, IMMORTAL
            closer = world.closer()
            for _ in range(3):
                cycle(closer)
        store.left = IMMORTAL
        assert (world.folders, waiting.folders()) == ([pass_folder(2)], []), writes
        assert read_status(store, f"bootstrap/{FIRST}") is None, "status would ask for it to be finished for ever"
        assert followed_tables(store).keys() == {FIRST}, "Kafka has not got it yet"
        world.feed.relay()
        cycle(closer)
        cycle(closer)
        assert followed_tables(store) == {}
        if not killed:
            assert writes > 3
            return


def test_staged_rows_find_their_table_in_the_first_cycle_of_a_run(world: World) -> None:
    """Also of one that nobody has ever followed."""
    world.stage(SECOND)
    world.planned, world.there = (), (FIRST, SECOND)
    status = cycle(world.closer())
    assert status["rows_homeless"] == {}
    assert any(one["oldest_open_bucket_ms"] for one in status["tables"].values())


def test_a_look_at_the_schema_that_fails_is_done_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next cycle, and not in the next interval."""
    world.put_late()
    world.publish_late()
    world.planned = ()
    closer = world.closer()
    with monkeypatch.context() as patch:
        patch.delattr(world, "there")
        with pytest.raises(AttributeError):
            closer.cycle()
    closer.cycle()
    assert world.folders == [pass_folder(1)]


def test_a_table_that_gets_cdc_again_is_followed_again(world: World) -> None:
    world.planned = ()
    closer = world.closer()
    cycle(closer)
    assert followed_tables(world.store) == {}
    world.planned = None
    cycle(closer)
    assert followed_tables(world.store).keys() == {FIRST}


@NOT_PLANNED
@pytest.mark.parametrize("staged", [False, True])
def test_a_table_whose_version_cannot_be_read_holds_up_no_other(
    world: World, there: tuple[str, ...], staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SyncTable(version_of(world.store, replace(TABLE, name="other", table_id=SECOND)), "test.shop.other", False)
    table = world.table
    monkeypatch.setattr(world, "table", lambda table_id: other if table_id == SECOND else table(table_id))
    world.put_late()
    world.publish_late()
    if staged:
        world.stage(FIRST)
    version = world.store.get(VERSION)
    world.store.put(VERSION, b'{"number": 1}')
    world.planned, world.there = (SECOND,), (*there, SECOND)
    closer = world.closer()
    for _ in range(4):
        status = cycle(closer)
        assert status["tables"]["shop.other"]["error"] is None
        assert closer._tables[SECOND].follow_ups is not None, "it is served"
    (reason,) = status["others_failed"].values()
    assert f"{VERSION} cannot be read (KeyError: 'columns_by_id'): restore it" in reason
    told = [one.text for one in problems({"bucket_close/close": status | {"at_ms": 10**6}}, {}, EXPECTED, False, 0.0)]
    assert [one for one in told if FIRST in one and reason in one]
    assert [one.reason for one in buckets_left(seen(world, closer, status), 0, 0) if reason in one.reason]
    failed = closer.report()
    assert (failed["others_failed"], exit_code(failed)) == (status["others_failed"], ExitCode.COMPLETED_WITH_ERRORS)
    assert status["rows_of_dropped_tables"] == {}
    assert status["rows_homeless"] == ({FIRST: ROWS} if staged else {}), "nothing of it is forgotten"

    world.store.put(VERSION, version)
    assert cycle(closer)["others_failed"] == {}
    for _ in range(2):
        status = cycle(closer)
    assert status["rows_of_dropped_tables"] == ({"shop.t": ROWS} if staged and not there else {})
    assert world.folders[:1] == [pass_folder(1)]


def test_a_table_that_this_run_has_served_and_cannot_forget_keeps_its_rows(world: World) -> None:
    world.stage(FIRST)
    closer = world.closer()
    cycle(closer)
    version = world.store.get(VERSION)
    world.store.put(VERSION, b'{"number": 1}')
    world.planned, world.there = (), ()
    for _ in range(3):
        status = cycle(closer)
    assert (status["others_failed"].keys(), status["rows_of_dropped_tables"]) == ({FIRST}, {})
    assert closer._tables[FIRST].buckets
    world.store.put(VERSION, version)
    assert cycle(closer)["rows_of_dropped_tables"] == {"shop.t": ROWS}


def test_a_planned_table_that_cannot_be_followed_holds_up_no_late_rows_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.planned = (SECOND, FIRST)
    take = FollowUps.__init__

    def begin(one: FollowUps, application: Any, table: Any, *others: Any) -> None:
        if table.table_id == SECOND:
            raise ValueError("its passes cannot be read")
        take(one, application, table, *others)

    monkeypatch.setattr(FollowUps, "__init__", begin)
    world.there = (FIRST, SECOND)
    world.put_late()
    world.publish_late()
    passes = LatePasses(world.application, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its passes"):
        passes.table(SECOND)


def test_tables_that_have_come_to_their_end_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Counter[str] = Counter()

    class Counting(LocalStore):
        def __getattribute__(self, name: str) -> Any:
            if name in ("get", "put", "list", "stat", "delete"):
                requests[name] += 1
            return super().__getattribute__(name)

    def cycle_of(tables: int) -> Counter[str]:
        folder = tmp_path / f"{tables}"
        folder.mkdir()
        world = World(folder, monkeypatch, Counting(folder / "lake"))
        for number in range(tables):
            assert end_following(world.store, f"{number:032}", keep_following(world.store, f"{number:032}"))
        closer = world.closer()
        cycle(closer)
        requests.clear()
        cycle(closer)
        return Counter(requests)

    assert cycle_of(50) == cycle_of(0)


def test_a_dropped_table_whose_history_is_not_found_by_its_id_is_found(tmp_path: Path) -> None:
    """Whoever removed a damaged place, as told, gave up the table's unpublished rows."""
    lake = Lake(tmp_path)
    version = version_of(lake.store, TABLE)
    keep_following(lake.store, TABLE.table_id)
    lake.store.delete(f"schemas/{TABLE.table_id}.json")
    feed: Any = Feed(lake.store)
    followed = Followed(lake.store, load_config(lake.conf), feed)
    followed.look(set(), ())
    state = followed.gone(TABLE.table_id)
    assert state is not None
    assert state.table.version == version
    assert list(followed_tables(lake.store)) == [TABLE.table_id]
