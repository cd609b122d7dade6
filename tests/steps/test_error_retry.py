"""Records that could not be decoded are published once, and leave ``processor_error`` only then, whatever is killed."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringsync.changes.identity import TableVersion
from ringsync.formats.commitlog.reader import ERROR_ROWS
from ringsync.formats.rows.state import MALFORMED, REASONS
from ringsync.ledger.dropped_tables import mark_dropped
from ringsync.ledger.error_tries import TAKEN, mark_taken, read_tries
from ringsync.ledger.staging import decode_rows
from ringsync.ledger.table_versions import CdcBegun, version_of
from ringsync.schema.table import TableSchema
from ringsync.state import processor_error
from ringsync.state.processor_error import LARGEST_INLINE, OVERFLOW, ErrorKey
from ringsync.status import LATE_ROWS, STOP_KEY
from ringsync.steps.errors import retry as retry_module
from ringsync.steps.errors.discard import discard
from ringsync.steps.errors.records import KnownTables, Record, decode, recorded_tables
from ringsync.steps.errors.retry import NO_OBJECT, Chosen, Retry, RetryReport
from ringsync.steps.errors.settle import ABANDONED_MS, Settling
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from tests.mortal_store import IMMORTAL, Killed, MortalStore
from tests.steps.error_records import (
    CONFIG,
    NODE,
    NOW_S,
    TABLES,
    Rows,
    digests,
    of_several_tables,
    publish_late,
    withheld,
)

ORDERS, KEYS, VECTORS = (next(t for t in TABLES if t.name == name) for name in ("orders", "keys", "vectors"))
ALL = Chosen()
KEPT_MS = 4 * 3_600_000
FILE = withheld(KEYS)["file"][0].as_py()


def known(
    store: ObjectStore, there: tuple[TableSchema, ...] = TABLES, cdc: tuple[TableSchema, ...] = TABLES
) -> KnownTables:
    return recorded_tables(store, CONFIG, there, {t.table_id for t in there}, {t.table_id for t in cdc})


def few(table: TableSchema, count: int) -> pa.RecordBatch:
    return withheld(table).slice(0, count)


def wanted(*records: pa.RecordBatch) -> list[bytes]:
    """The digests of all change rows of some records."""
    given = [Record(NODE, **one) for batch in records for one in batch.to_pylist()]
    return sorted(decode(given, {t.table_id: TableVersion.first(t) for t in TABLES}).rows["digest"].to_pylist())


class World:
    """A store and a table; the late step runs when the retry sleeps, unless it is switched off."""

    def __init__(self, folder: Path, rows: dict[Any, Any] | None = None) -> None:
        self.folder, self.store, self.now_s = folder, MortalStore(folder), NOW_S
        self.errors = Rows(self.store, self._lives)
        self.errors.kept = dict(rows or {})
        self.sleeps: Callable[[], object] = lambda: publish_late(self.folder)
        self.tables: KnownTables | None = None

    def _lives(self) -> None:
        self.store._live()

    def settling(self) -> Settling:
        return Settling(self.store, self.errors, lambda: self.now_s)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps()

    def retry(self, chosen: Chosen = ALL, timeout_s: float = 5) -> RetryReport:
        self.tables = self.tables or known(self.store)
        settling = self.settling()
        retry = Retry(self.store, self.errors, self.tables, settling, lambda: self.now_s, self._sleep)
        report = retry.run(chosen, timeout_s)
        self.errors.forget_solved()
        return report

    def published(self) -> list[bytes]:
        """Of all tables, sorted, each as often as it was published."""
        store = LocalStore(self.folder)
        return sorted(one for table in TABLES for one in digests(store, table.table_id))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "lake")


def outcomes(report: RetryReport) -> dict[str, int]:
    return {name: count for name, count in report.outcomes.items() if count}


def test_records_of_a_table_whose_schema_was_unknown_are_published_once(world: World) -> None:
    records = few(ORDERS, 9)
    world.errors.put(records, NODE)
    world.errors.put(records, "another-replica")
    report = world.retry()
    assert (report.read, outcomes(report), report.left) == (18, {"published": 18}, 0)
    assert world.published() == sorted(set(wanted(records)))
    assert not world.errors.kept
    assert not world.store.list("errors/")
    world.errors.put(records.slice(0, 2), NODE)
    assert outcomes(world.retry()) == {"was_published": 2}
    assert not world.errors.kept
    assert not world.store.list(LATE_ROWS)


def test_a_late_file_names_node_segment_and_position(world: World) -> None:
    records = few(ORDERS, 3)
    world.errors.put(records, NODE)
    world.sleeps = lambda: None
    report = world.retry()
    assert (outcomes(report), len(world.errors.kept)) == ({"waits": 3}, 3)
    assert report.waits_because.startswith("the loop out_of_sequence does not run")
    (stat,) = world.store.list(LATE_ROWS)
    rows = decode_rows(world.store.get(stat.key))
    assert set(rows["node"].to_pylist()) == {NODE}
    assert {(row["file"], row["position"]) for row in rows.to_pylist()} <= {
        (row["file"], row["position"]) for row in records.to_pylist()
    }
    assert rows["schema_version"].to_pylist() == [version_of(world.store, ORDERS).number] * len(rows)
    # Another retry puts nothing more; once the file is published, it finds that.
    assert outcomes(world.retry()) == {"waits": 3}
    assert len(world.store.list(LATE_ROWS)) == 1
    publish_late(world.folder)
    again = world.retry()
    assert (dict(again.earlier), again.read, world.errors.kept) == ({"published": 3}, 0, {})


def test_a_stopped_sync_is_not_waited_for(world: World) -> None:
    world.errors.put(few(KEYS, 2), NODE)
    world.store.put(STOP_KEY, b"{}")
    world.sleeps = lambda: pytest.fail("nobody publishes now")
    report = world.retry()
    assert (outcomes(report), report.left) == ({"waits": 2}, 2)
    assert "cdcservice start" in report.waits_because


def test_each_record_has_one_outcome(world: World) -> None:
    """Dropped, not followed, without cdc, never seen, malformed, damaged: only what can be published is."""
    malformed = {**few(KEYS, 1).to_pylist()[0], "position": 7, "raw": b"\x01" + bytes(40)}
    damage = {"position": 8, "length": 9, "reason": "torn", "raw": None, "table_id": None, "file": FILE}
    world.errors.put(pa.RecordBatch.from_pylist([malformed, damage], ERROR_ROWS), NODE)
    for table in (ORDERS, KEYS, VECTORS):
        world.errors.put(few(table, 2), NODE)
    version_of(world.store, ORDERS)
    CdcBegun(world.store).begins(ORDERS.table_id, 0)
    mark_dropped(world.store, ORDERS.keyspace, ORDERS.name, ORDERS.table_id, 1)
    there = tuple(table for table in TABLES if table != ORDERS)
    world.tables = known(world.store, there, tuple(table for table in there if table != KEYS))
    world.store.put(f"cdc_damaged/{NODE}/{FILE}", b"segment")
    report = world.retry()
    assert report.read == 8
    assert outcomes(report) == {
        **{"of_dropped_tables": 2, "not_followed": 2, "published": 2},
        **{"still_undecodable": 1, "damage": 1},
    }
    assert report.undecodable.total() == 1
    assert report.damage == [
        {"node": NODE, "file": FILE, "position": 8, "reason": "torn", "copy": f"cdc_damaged/{NODE}/{FILE}"}
    ]
    assert [key.position for key in sorted(world.errors.kept)] == [7, 8]
    assert world.published() == wanted(few(VECTORS, 2))
    assert world.retry().left == 2


def test_a_record_of_several_tables_is_one_record(world: World) -> None:
    """It waits for the files of all its tables; rows of tables that are not followed are left out."""
    records = of_several_tables()
    given = [Record(NODE, **one) for one in records.to_pylist()]
    decoded = decode(given, {table.table_id: TableVersion.first(table) for table in TABLES})
    of_table: dict[str, set[bytes]] = {}
    for row in decoded.rows.select(["table_id", "digest"]).to_pylist():
        of_table.setdefault(row["table_id"].hex(), set()).add(row["digest"])
    first, *others = sorted(of_table)
    assert others
    world.errors.put(records, NODE)
    world.tables = known(world.store, cdc=tuple(table for table in TABLES if table.table_id != first))
    pauses = 0

    def one_file() -> None:
        """Each file is published in a pause of its own."""
        nonlocal pauses
        pauses += 1
        publish_late(world.folder, most=1)

    world.sleeps = one_file
    report = world.retry(timeout_s=60)
    assert (report.read, report.outcomes["waits"], pauses) == (len(records), 0, len(others))
    assert world.published() == sorted(set().union(*(of_table[table_id] for table_id in others)))
    assert len(world.errors.kept) == report.left == len(decoded.undecoded)


def test_rows_of_a_table_that_out_of_sequence_found_gone_are_removed(world: World) -> None:
    """Nobody has marked it as dropped yet: that it is gone for good is for the late step to find out."""
    world.errors.put(few(ORDERS, 2), NODE)
    version_of(world.store, ORDERS)
    CdcBegun(world.store).begins(ORDERS.table_id, 0)
    world.tables = known(world.store, tuple(table for table in TABLES if table != ORDERS))

    def forget() -> None:
        for stat in world.store.list(LATE_ROWS):
            mark_taken(world.store, stat.key, "of_dropped_tables")
            world.store.delete(stat.key)

    world.sleeps = forget
    assert outcomes(world.retry()) == {"of_dropped_tables": 2}
    assert not world.errors.kept
    assert not world.store.list(TAKEN)


def test_a_late_file_that_somebody_has_removed_is_not_taken_for_published(world: World) -> None:
    world.errors.put(few(ORDERS, 2), NODE)
    world.sleeps = lambda: [world.store.delete(stat.key) for stat in world.store.list(LATE_ROWS)]
    assert outcomes(world.retry()) == {"waits": 2}
    world.sleeps = lambda: publish_late(world.folder)
    assert outcomes(world.retry()) == {"published": 2}
    assert world.published() == sorted(set(wanted(few(ORDERS, 2))))


def test_a_late_file_that_was_removed_long_ago_is_not_taken_for_published_either(world: World) -> None:
    """It was taken for published as soon as digests of its time were forgotten, and its records were lost."""
    world.errors.put(few(ORDERS, 2), NODE)
    world.sleeps = lambda: None
    world.retry()
    for stat in world.store.list(LATE_ROWS):
        world.store.delete(stat.key)
    world.now_s += KEPT_MS / 1000
    assert world.settling().settle() == []
    assert len(world.errors.kept) == 2
    assert not world.store.list("errors/retry/")
    world.sleeps = lambda: publish_late(world.folder)
    assert outcomes(world.retry()) == {"published": 2}
    assert world.published() == sorted(set(wanted(few(ORDERS, 2))))


def forget_digests(world: World) -> None:
    """Time goes by: no pass of now is kept."""
    world.now_s += KEPT_MS / 1000
    for stat in world.store.list("sync/"):
        world.store.delete(stat.key)


def test_what_was_published_is_known_after_its_digests_are_forgotten(world: World) -> None:
    """``out_of_sequence`` has marked the file before it removed it."""
    world.errors.put(few(ORDERS, 2), NODE)
    world.sleeps = lambda: None
    world.retry()
    publish_late(world.folder)
    forget_digests(world)
    assert [(one.outcome, one.records) for one in world.settling().settle()] == [("published", 1)] * 2
    assert not world.errors.kept
    world.errors.forget_solved()
    assert not world.store.list("errors/")


@pytest.mark.parametrize("soon", [True, False])
def test_a_file_that_a_version_without_marks_has_published(world: World, soon: bool) -> None:
    """Digests prove it; once they are forgotten, nothing does, and the record stays until it is tried again."""
    world.errors.put(few(ORDERS, 2), NODE)
    world.sleeps = lambda: None
    world.retry()
    publish_late(world.folder)
    for stat in world.store.list(TAKEN):
        world.store.delete(stat.key)
    if not soon:
        forget_digests(world)
    assert [one.outcome for one in world.settling().settle()] == ["published"] * (2 if soon else 0)
    assert len(world.errors.kept) == (0 if soon else 2)
    world.sleeps = lambda: publish_late(world.folder)
    assert outcomes(world.retry()) == ({} if soon else {"published": 2})
    assert not world.errors.kept


def test_marks_go_with_their_try(world: World) -> None:
    """A try that was taken for dead may put its file all the same: nobody asks for its mark any more."""
    world.errors.put(few(ORDERS, 2), NODE)
    world.errors.put(few(VECTORS, 2), NODE)
    world.sleeps = lambda: None
    world.retry()
    for mark in (f"{TAKEN}1790000000000-dead/{ORDERS.table_id}", f"{TAKEN}unknown"):
        world.store.put(mark, b"published")
    publish_late(world.folder, most=1)
    world.settling().settle()
    (made, _), (mark,) = *read_tries(world.store), world.store.list(TAKEN)
    assert mark.key.split("/")[2] == made.id
    assert len(world.errors.kept) == 2
    publish_late(world.folder)
    world.settling().settle()
    world.errors.forget_solved()
    assert not world.store.list("errors/")


def test_only_the_chosen_are_tried(world: World) -> None:
    world.errors.put(few(KEYS, 3), NODE)
    world.errors.put(few(KEYS, 3), "b")
    other = {**few(KEYS, 1).to_pylist()[0], "file": "CommitLog-7-9.log", "reason": REASONS[MALFORMED]}
    world.errors.put(pa.RecordBatch.from_pylist([other], ERROR_ROWS), "b")
    assert world.retry(Chosen(node="b", file=FILE, limit=2)).read == 2
    assert world.retry(Chosen(node="b", reason=REASONS[MALFORMED].upper())).read == 1
    assert {(key.node, key.file) for key in world.errors.kept} == {(NODE, FILE), ("b", FILE)}
    assert len(world.errors.kept) == 4


def test_many_rows_are_tried_in_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module, "BATCH_RECORDS", 4)
    monkeypatch.setattr(retry_module, "MOST_WAITING", 8)
    records = few(ORDERS, 30)
    world.errors.put(records, NODE)
    most = 0

    def sleeps() -> None:
        nonlocal most
        most = max(most, len(world.store.list(LATE_ROWS)))
        publish_late(world.folder)

    world.sleeps = sleeps
    assert outcomes(world.retry(timeout_s=60)) == {"published": 30}
    assert most <= 3
    assert world.published() == sorted(set(wanted(records)))


def flooded(world: World, records: pa.RecordBatch) -> ErrorKey:
    world.errors.put_overflow(records, NODE)
    return next(key for key, row in world.errors.kept.items() if row.is_overflow)


def test_records_beyond_the_limit_are_solved_one_by_one(world: World) -> None:
    malformed = {**few(KEYS, 1).to_pylist()[0], "position": 7, "raw": b"\x01" + bytes(40)}
    records = pa.RecordBatch.from_pylist(
        [malformed, *few(ORDERS, 4).to_pylist(), *few(KEYS, 2).to_pylist()], ERROR_ROWS
    )
    key = flooded(world, records)
    assert world.errors.kept[key].records == 7
    world.tables = known(world.store, cdc=(ORDERS,))
    report = world.retry()
    assert (report.read, outcomes(report)) == (7, {"published": 4, "not_followed": 2, "still_undecodable": 1})
    (left,) = world.errors.kept.values()
    assert (left.records, len(world.store.list(OVERFLOW))) == (1, 1)
    assert world.errors.overflow(left).to_pylist() == [malformed]
    assert world.published() == sorted(set(wanted(few(ORDERS, 4))))
    assert (outcomes(world.retry()), list(world.errors.kept.values())) == ({"still_undecodable": 1}, [left])


def test_of_an_overflow_row_only_the_chosen_are_tried(world: World) -> None:
    flooded(world, few(ORDERS, 4).slice(0, 3))
    other = pa.RecordBatch.from_pylist(
        [{**one, "reason": REASONS[MALFORMED]} for one in few(KEYS, 2).to_pylist()], ERROR_ROWS
    )
    flooded(world, pa.concat_batches([few(ORDERS, 1), other]))
    report = world.retry(Chosen(reason=REASONS[MALFORMED]))
    assert (report.read, outcomes(report)) == (2, {"published": 2})
    assert sorted(row.records for row in world.errors.kept.values()) == [1, 3]


def test_bytes_that_are_not_there_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_error, "LARGEST_INLINE", 10)
    world.errors.put(few(ORDERS, 2), NODE)
    objects = [row.raw_object for row in world.errors.kept.values()]
    assert None not in objects
    world.store.delete(str(objects[0]))
    report = world.retry()
    assert outcomes(report) == {"published": 1, "still_undecodable": 1}
    assert dict(report.undecodable) == {NO_OBJECT: 1}
    assert not [stat for stat in world.store.list("errors/") if stat.key == objects[1]]
    world.store.delete(f"{OVERFLOW}{NODE}/{flooded(world, few(KEYS, 3)).file}")
    assert dict(world.retry().undecodable) == {NO_OBJECT: 2}


@pytest.mark.parametrize("published_between", [False, True])
def test_a_kill_between_any_two_effects_loses_nothing_and_publishes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published_between: bool
) -> None:
    monkeypatch.setattr(processor_error, "LARGEST_INLINE", 150)
    first, records, surplus = World(tmp_path / "first"), few(ORDERS, 3), few(VECTORS, 2)
    malformed = {**few(KEYS, 1).to_pylist()[0], "position": 7, "raw": b"\x01" + bytes(40)}
    bad = pa.RecordBatch.from_pylist([malformed, {**malformed, "position": 8}], ERROR_ROWS)
    flooded(first, pa.concat_batches([surplus, bad.slice(0, 1)]))
    flooded(first, pa.concat_batches([few(KEYS, 2), bad.slice(1)]))  # nothing of it waits
    first.errors.put(records, NODE)
    first.errors.put(few(KEYS, 1), NODE)
    tables = known(first.store, (ORDERS, VECTORS, KEYS), (ORDERS, VECTORS))
    assert any(row.raw_object for row in first.errors.kept.values() if not row.is_overflow)
    of_record = [set(wanted(records.slice(number, 1))) for number in range(len(records))]
    all_rows = sorted({*wanted(records), *wanted(surplus)})
    effects, killed = 0, True
    while killed:
        world = World(tmp_path / str(effects), first.errors.kept)
        shutil.copytree(first.folder, world.folder, dirs_exist_ok=True)
        world.tables, world.store.left, killed = tables, effects, False
        try:
            world.retry()
        except Killed:
            killed = True
        world.store.left = IMMORTAL
        if published_between:
            publish_late(world.folder)
        published, kept = set(world.published()), {(key.file, key.position) for key in world.errors.kept}
        for one, rows in zip(records.to_pylist(), of_record, strict=True):
            assert (one["file"], one["position"]) in kept or published >= rows, effects
        # Long after digests were forgotten, a file that was never put must not be taken for published.
        world.now_s += (ABANDONED_MS if published_between else KEPT_MS) / 1000
        world.retry()
        left = [one for row in world.errors.kept.values() for one in world.errors.overflow(row).to_pylist()]
        assert sorted(left, key=lambda one: one["position"]) == bad.to_pylist(), effects
        assert world.published() == all_rows, effects
        assert not world.store.list("errors/retry/")
        assert not world.store.list(TAKEN)
        assert not world.store.list(LATE_ROWS)
        effects += 1
        assert effects < 300
    assert effects > 15


@pytest.mark.parametrize("effects", range(12))
def test_two_retries_at_once(tmp_path: Path, effects: int) -> None:
    """The second does everything while the first one sleeps between two effects."""
    world = World(tmp_path / "lake")
    records = few(ORDERS, 4)
    world.errors.put(records, NODE)
    flooded(world, few(VECTORS, 3))
    world.tables = known(world.store)
    other = World(world.folder)
    other.errors, other.tables = world.errors, world.tables
    world.store.left = effects
    world.store.others = lambda: (setattr(other, "now_s", NOW_S + 100), other.retry(timeout_s=2))
    world.retry()
    world.now_s += 200
    world.retry()
    publish_late(world.folder)  # the first one, which was taken for dead, may have put its files all the same
    assert not world.errors.kept
    assert world.published() == sorted({*wanted(records), *wanted(few(VECTORS, 3))})
    assert not world.store.list("errors/retry/")


def test_what_is_discarded_is_written_down_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    records = few(KEYS, 3)
    large = {**records.to_pylist()[0], "position": 1, "raw": bytes(LARGEST_INLINE + 1)}
    world.errors.put(records, NODE)
    world.errors.put(pa.RecordBatch.from_pylist([large], ERROR_ROWS), NODE)
    rows = [row for _, row in sorted(world.errors.kept.items())]
    with pytest.raises(ValueError, match="say why"):
        discard(world.store, world.errors, rows, "someone", "  ")
    assert len(world.errors.kept) == 4
    world.store.left = 0
    with pytest.raises(Killed):
        discard(world.store, world.errors, rows, "someone", "old test data")
    world.store.left = IMMORTAL
    assert len(world.errors.kept) == 4
    done = discard(world.store, world.errors, rows, "someone", "old test data", lambda: NOW_S)
    assert (done.records, world.errors.kept) == (4, {})
    document = json.loads(world.store.get(done.objects[0]))
    assert (document["who"], document["reason"], document["at"][:4]) == ("someone", "old test data", "2026")
    assert document["rows"][0]["raw_object"] == f"errors/{NODE}/{FILE}/1"
    assert world.store.get(document["rows"][0]["raw_object"]) == large["raw"]
    raws = [base64.b64decode(row["raw"]) for row in document["rows"][1:]]
    assert raws == records["raw"].to_pylist()


def test_a_try_that_cannot_be_read_is_named(world: World) -> None:
    world.store.put("errors/retry/a.json", b"{}")
    with pytest.raises(Exception, match=r"errors/retry/a.json is no try"):
        world.retry()


def test_an_altered_table_is_decoded_by_its_newest_version(world: World) -> None:
    """A record of before the column was dropped."""
    dropped = next(column for column in ORDERS.value_columns if column.kind == "regular")
    altered = replace(ORDERS, columns=tuple(column for column in ORDERS.columns if column != dropped))
    world.errors.put(few(ORDERS, 5), NODE)
    version_of(world.store, ORDERS)
    there = tuple(table if table != ORDERS else altered for table in TABLES)
    world.tables = known(world.store, there)
    assert world.tables.versions[ORDERS.table_id].number == 2
    assert world.retry().read == 5
