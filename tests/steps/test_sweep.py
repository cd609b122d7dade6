"""Whatever is killed when a pass is made, or loses against a rival: what no pass names is removed, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.ledger.passes import Pass, forget_pass, get_pass, pass_numbers
from ringsync.ledger.tries import Try
from ringsync.steps.application import Application
from ringsync.steps.passes import make as passes
from ringsync.steps.passes.follow_ups import SWEEP_EVERY_S, FollowUps
from ringsync.steps.passes.make import PassContext, make_outputs
from ringsync.steps.passes.rows_after import AfterReader
from ringsync.steps.sync_plan import SyncTable
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream, StreamConflictError
from ringsync.streams.messages import envelope_schema, key_schema
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, RING, TABLE, VERSION, Lake

TOPIC = "test.shop.t"
CHANGES = f"sync/{TABLE.table_id}/changes/"
MOMENT = NOW.start * 1000
WRITES = [Write(1, 1, "x", MOMENT + 1), Write(2, None, None, MOMENT + 2)]


@pytest.fixture
def store(tmp_path: Path) -> MortalStore:
    Lake(tmp_path)
    found = MortalStore(tmp_path / "lake")
    schemas = (make(TABLE, "test", "exact") for make in (key_schema, envelope_schema))
    FileStream(found, f"bootstrap.{TOPIC}").put_schemas(1, *schemas)
    return found


def context(folder: Path, number: int, attempt: str, topic: str = TOPIC) -> PassContext:
    reader = AfterReader(load_config(folder / "ringsync.yaml"), VERSION, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
    return PassContext(reader, topic, number, attempt, "", False, {}, 1)


def publish(store: LocalStore, made_for: PassContext, writes: list[Write]) -> Pass | None:
    """Make a pass of two slices."""
    outputs = [
        make_outputs(made_for, store, {str(NOW): change_rows([write], TABLE)}, f"{place:04}").outputs
        for place, write in enumerate(writes)
    ]
    return passes.commit(store, made_for, filter(None, outputs), {})


def follow_ups(store: LocalStore, folder: Path) -> FollowUps:
    config = load_config(folder / "ringsync.yaml")
    application = Application("close", "", config, store, None, "run", argparse.Namespace())
    found = FollowUps(application, SyncTable(VERSION, TOPIC, False), None, None)  # type: ignore[arg-type]
    found.ring = RING
    return found


def in_cycles(found: FollowUps) -> None:
    """A run publishes what it finds, and looks again."""
    found.catch_up()
    found.catch_up()


def left_over(store: LocalStore) -> list[str]:
    """Keys that neither a pass nor a manifest names."""
    named: set[str] = set()
    coming: set[str] = set()
    for number in pass_numbers(store, TABLE.table_id):
        one = get_pass(store, TABLE.table_id, number)
        named |= {*one.changes, *one.deletions, *(key for keys in one.digests.values() for key in keys)}
        coming |= {f"{one.folder}/{part.name}" for part in one.parts}
    for topic in (TOPIC, f"bootstrap.{TOPIC}"):
        stream = FileStream(store, topic)
        for bucket in stream.folders():
            for part in stream.parts(bucket) or ():
                named |= {stream._part_key(bucket, part), stream._index_key(bucket, part)}
    assert all(store.stat(key) for key in named)
    there = [stat.key for stat in store.list(f"sync/{TABLE.table_id}/") + store.list("streams/")]
    kept = ("/passes/", "/schemas/", "/tables/", "manifest.json")
    others = (key for key in there if key not in named and not any(one in key for one in kept))
    return [key for key in others if "/".join(key.rpartition(".")[0].split("/")[2:]) not in coming]


def killed_at_each(
    store: MortalStore, begin: Callable[[], None], work: Callable[[], Any], check: Callable[[], None]
) -> int:
    """Do some work again and again, killed one write later each time; how often it was killed."""
    for kill in range(100):
        begin()
        store.left = kill
        try:
            work()
        except Killed:
            store.left = IMMORTAL
            check()
        else:
            store.left = IMMORTAL
            return kill
    raise AssertionError("it has no end")


def test_what_a_killed_try_has_written_is_removed(store: MortalStore, tmp_path: Path) -> None:
    attempts = iter(f"{number:08x}" for number in range(1000))
    garbage = 0

    def killed_try(topic: str) -> None:
        publish(store, context(tmp_path, len(pass_numbers(store, TABLE.table_id)) + 1, next(attempts), topic), WRITES)

    def check() -> None:
        """Nothing of what may yet be committed is touched; all of it goes when another try has made the pass."""
        nonlocal garbage
        found = follow_ups(store, tmp_path)
        before = left_over(store)
        in_cycles(found)
        assert left_over(store) == before
        number = len(pass_numbers(store, TABLE.table_id)) + 1
        found.made(publish(store, context(tmp_path, number, next(attempts)), WRITES))  # type: ignore[arg-type]
        in_cycles(found)
        assert left_over(store) == []
        garbage += len(before)

    for topic in (TOPIC, f"bootstrap.{TOPIC}"):
        assert killed_at_each(store, lambda: None, lambda topic=topic: killed_try(topic), check) > 8
    assert garbage > 20


def test_what_a_rival_or_an_old_process_has_written_is_removed(store: MortalStore, tmp_path: Path) -> None:
    """It may be killed when it removes it itself."""
    attempts = iter(f"{number:08x}" for number in range(1000))

    def rival() -> None:
        number = len(pass_numbers(store, TABLE.table_id)) + 1
        slow = context(tmp_path, number, next(attempts))
        made = [make_outputs(slow, store, {str(NOW): change_rows([write], TABLE)}, write.v or "-") for write in WRITES]
        assert publish(store, context(tmp_path, number, next(attempts)), WRITES)
        asleep.append(lambda: passes.commit(store, slow, [one.outputs for one in made if one.outputs], {}))

    asleep: list[Callable[[], Any]] = []

    def check() -> None:
        found = follow_ups(store, tmp_path)
        number = len(pass_numbers(store, TABLE.table_id)) + 1
        found.made(publish(store, context(tmp_path, number, next(attempts)), WRITES))  # type: ignore[arg-type]
        in_cycles(found)
        assert left_over(store) == []

    assert killed_at_each(store, rival, lambda: asleep.pop()(), check) > 8
    assert asleep == []
    assert left_over(store) == [], "who is not killed leaves nothing"


def test_what_a_task_that_was_thought_dead_has_written_is_removed(store: MortalStore, tmp_path: Path) -> None:
    """It has the names of the pass, of the try and of the slice, as has the task that was started in its place."""
    found = follow_ups(store, tmp_path)
    made_for = context(tmp_path, 1, "a")
    rows = {str(NOW): change_rows(WRITES, TABLE)}
    make_outputs(made_for, store, rows, "0000")
    one = passes.commit(store, made_for, filter(None, [make_outputs(made_for, store, rows, "0000").outputs]), {})
    assert one is not None
    make_outputs(made_for, store, rows, "0000")
    found.made(one)
    assert len(store.list(CHANGES)) == 3
    in_cycles(found)
    assert left_over(store) == []
    assert len(list(FileStream(store, TOPIC).read(one.folder))) == len(WRITES)
    # Its bucket is visible, and it finds that out last.
    with pytest.raises(StreamConflictError):
        make_outputs(made_for, store, rows, "0000")
    assert left_over(store)
    found.made(publish(store, context(tmp_path, 2, "b"), WRITES))  # type: ignore[arg-type]
    found._swept_at = None
    in_cycles(found)
    assert left_over(store) == []


def test_what_is_left_of_a_forgotten_pass_is_removed_and_its_messages_stay(store: MortalStore, tmp_path: Path) -> None:
    attempts = iter(f"{number:08x}" for number in range(1000))
    found = follow_ups(store, tmp_path)
    forgotten: list[Pass] = []

    def make_two() -> None:
        for _ in range(2):
            number = (pass_numbers(store, TABLE.table_id) or [0])[-1] + 1
            found.made(publish(store, context(tmp_path, number, next(attempts)), WRITES))  # type: ignore[arg-type]
            in_cycles(found)
        forgotten.append(found.passes[0])

    def check() -> None:
        nonlocal found
        if pass_numbers(store, TABLE.table_id)[0] == forgotten[-1].number:
            return  # killed before anything was done
        found = follow_ups(store, tmp_path)
        make_two()
        in_cycles(found)
        assert left_over(store) == []
        stream = FileStream(store, TOPIC)
        assert len(list(stream.read(forgotten[-1].folder))) == len(WRITES)

    assert killed_at_each(store, make_two, lambda: forget_pass(store, forgotten[-1]), check) > 4


def test_a_table_is_not_listed_without_need(
    store: MortalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = follow_ups(store, tmp_path)
    listed: list[str] = []
    real = store.list
    monkeypatch.setattr(store, "list", lambda prefix="", start="": listed.append(prefix) or real(prefix, start))
    for _ in range(3):
        found.catch_up()
    assert not [prefix for prefix in listed if prefix == CHANGES], "nothing is new"
    for number in range(1, 6):
        found.made(publish(store, context(tmp_path, number, "a"), WRITES))  # type: ignore[arg-type]
        in_cycles(found)
    assert len([prefix for prefix in listed if prefix == CHANGES]) == 1
    assert found._swept_at is not None
    found._swept_at -= SWEEP_EVERY_S
    in_cycles(found)
    assert len([prefix for prefix in listed if prefix == CHANGES]) == 2


def test_who_wakes_up_with_the_first_number_when_it_is_forgotten_makes_no_pass(
    store: MortalStore, tmp_path: Path
) -> None:
    made = [publish(store, context(tmp_path, number, "a"), WRITES) for number in (1, 2)]
    assert made[0] is not None
    forget_pass(store, made[0])
    assert publish(store, context(tmp_path, 1, "b"), WRITES) is None
    assert pass_numbers(store, TABLE.table_id) == [2]
    assert Try.of(made[0].changes[0]).number == 1
    assert Try.of(made[0].changes[0]).name.startswith("a-0000-")
