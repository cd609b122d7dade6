"""What only a replica that is down may have waits, whatever it writes or deletes; nothing waits where all answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.changes.batch import ChangeRows
from ringsync.changes.identity import TableVersion
from ringsync.changes.schema import EXPIRING, LIVE, ROW, TOMBSTONE
from ringsync.config import load_config
from ringsync.config.sections import ConsistencyLevel
from ringsync.cql.types import ListType, MapType, Native, SetType
from ringsync.images.after import without_deleted_livenesses
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.ledger.passes import pass_folder
from ringsync.ledger.staging import STAGED_ROWS, Bucket, decode_rows, encode_blocks, rows_key
from ringsync.replica.changes import CLOCK_SKEW_US
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import Column, TableSchema
from ringsync.status import LATE_ROWS
from ringsync.steps.close.agreement import Reading
from ringsync.steps.close.close_task import SliceOfBucket, StagedFiles, close_slice
from ringsync.steps.passes import rows_after, spared_rows
from ringsync.steps.passes.make import PassContext
from ringsync.steps.passes.rows_after import AfterReader, Seen, complete_rows, images_after
from ringsync.steps.passes.rows_before import alive
from ringsync.streams.files import FileStream
from ringsync.streams.messages import envelope_schema, key_schema
from tests.reconciled import merged
from tests.replica.bases import state_of, write_base
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import INT, NOW, RING, TABLE, VERSION, Lake

AT = int(time.time() - 3600) * 10**6
"""µs, when the change was written."""
BEFORE = AT - 10**6
TEXT = Native("text")
INSERTED = {"liveness": {"timestamp": BEFORE}}
EXPIRED = {"ttl": 60, "local_deletion_time": AT // 10**6 + 60, "kind": EXPIRING}
"""What makes a cell one that has expired by now."""
DELETED = {"deletion": {"timestamp": AT, "local_deletion_time": AT // 10**6}}


def table_of(*types: Any) -> TableSchema:
    keys = (Column("id", "partition_key", INT), Column("seq", "clustering", INT))
    return TableSchema(
        "shop", "t", "5" * 32, (*keys, *(Column(f"v{n}", "regular", one) for n, one in enumerate(types)))
    )


def cell(value: str, at: int = AT, *, column: int = 0, path: bytes | None = None, **others: Any) -> dict[str, Any]:
    return {"column": column, "path": path, "value": value.encode(), "timestamp": at, "kind": LIVE, **others}


def tombstone(*, column: int = 0, path: bytes | None = None) -> dict[str, Any]:
    gone = {"value": None, "local_deletion_time": AT // 10**6, "kind": TOMBSTONE}
    return cell("", column=column, path=path) | gone


def entry(number: int) -> bytes:
    return uuid.uuid1(node=number, clock_seq=number).bytes


def row(table: TableSchema, content: Mapping[str, Any], digest: bytes = b"2" * 16) -> ChangeRows:
    found = Write(1, 1, "", AT).row(table, "a") | {"cells": [], "liveness": None, "deletion": None, "digest": digest}
    return merged(pa.RecordBatch.from_pylist([found | content], STAGED_ROWS), table)


def selected(table: TableSchema, content: Mapping[str, Any], element_times: bool) -> pa.RecordBatch:
    """A row as a SELECT shows it: of its liveness nothing, no names of entries, maybe no times of elements."""
    shown = row_images_of(row(table, content, b"1" * 16), table, "raw").to_pylist()
    for one in shown:
        one["_merge"], one["_row"]["live"] = None, None
        if not element_times and one["v0"]:
            one["_x"] = {"id": None, "seq": None, "v0": {"d": [], "e": [], "raw": None}}
    return pa.RecordBatch.from_pylist(shown, row_image_schema(table))


@dataclass
class Source:
    """Shows one row, or nothing.

    :ivar all_alive: whether all replicas answer, if they are asked
    """

    images: pa.RecordBatch
    all_alive: bool = False

    def read_keys(self, reader: AfterReader, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        count = len(keys)
        there = np.full(count, len(self.images) > 0)
        return Seen(self.images, there, np.full(count, reader.disagreed and self.all_alive))


@dataclass(frozen=True)
class Case:
    """What there is where the change has not come, the change, and what there is where it has."""

    table: TableSchema
    there: Mapping[str, Any]
    change: Mapping[str, Any]
    after: Mapping[str, Any] | None
    element_times: bool = True


LISTS, SETS, MAPS, TEXTS = (table_of(one) for one in (ListType(TEXT), SetType(TEXT), MapType(TEXT, TEXT), TEXT))
KEYS_ONLY = table_of()
_OLD = cell("old", BEFORE, path=entry(1))
_ADDED = cell("x", path=entry(2))
_NEWER = cell("newer", AT + 10, path=entry(3))
_IN_SET, _X_IN_SET = cell("", BEFORE, path=b"old"), cell("", path=b"x")
_IN_MAP, _NEW_IN_MAP = cell("old", BEFORE, path=b"k"), cell("new", path=b"k")
CASES = {
    "value": Case(TEXTS, INSERTED | {"cells": [cell("old", BEFORE)]}, {"cells": [cell("x")]}, {"cells": [cell("x")]}),
    "list entry": Case(LISTS, {"cells": [_OLD]}, {"cells": [_ADDED]}, {"cells": [_OLD, _ADDED]}),
    "list entry beside a newer one": Case(
        LISTS, {"cells": [_OLD, _NEWER]}, {"cells": [_ADDED]}, {"cells": [_OLD, _ADDED, _NEWER]}
    ),
    "list entry's removal": Case(
        LISTS, {"cells": [_OLD, _NEWER]}, {"cells": [tombstone(path=_OLD["path"])]}, {"cells": [_NEWER]}
    ),
    "set element": Case(SETS, {"cells": [_IN_SET]}, {"cells": [_X_IN_SET]}, {"cells": [_IN_SET, _X_IN_SET]}),
    "set element without times": Case(
        SETS, {"cells": [_IN_SET]}, {"cells": [_X_IN_SET]}, {"cells": [_IN_SET, _X_IN_SET]}, element_times=False
    ),
    "set element's removal without times": Case(
        SETS, INSERTED | {"cells": [_IN_SET]}, {"cells": [tombstone(path=b"old")]}, INSERTED, element_times=False
    ),
    "map value without times": Case(
        MAPS, {"cells": [_IN_MAP]}, {"cells": [_NEW_IN_MAP]}, {"cells": [_NEW_IN_MAP]}, element_times=False
    ),
    "map without times that is replaced": Case(
        MAPS,
        {"cells": [_IN_MAP, cell("", BEFORE, path=b"l")]},
        {"cells": [_NEW_IN_MAP], "complex_deletions": [{"column": 0, "timestamp": AT - 1, "local_deletion_time": 1}]},
        {"cells": [_NEW_IN_MAP]},
        element_times=False,
    ),
    "the only value's deletion": Case(
        TEXTS, INSERTED | {"cells": [cell("old", BEFORE)]}, {"cells": [tombstone()]}, INSERTED
    ),
    "value that has expired": Case(
        TEXTS, INSERTED | {"cells": [cell("old", BEFORE)]}, {"cells": [cell("x") | EXPIRED]}, INSERTED
    ),
    "map value that has expired": Case(MAPS, {"cells": [_IN_MAP]}, {"cells": [_NEW_IN_MAP | EXPIRED]}, None),
    "set element that has expired": Case(
        SETS, INSERTED | {"cells": [_IN_SET]}, {"cells": [_IN_SET | {"timestamp": AT} | EXPIRED]}, INSERTED
    ),
    "set element without times that has expired": Case(
        SETS, {"cells": [_IN_SET]}, {"cells": [_IN_SET | {"timestamp": AT} | EXPIRED]}, None, element_times=False
    ),
    "insert of keys that has expired": Case(
        KEYS_ONLY, INSERTED, {"liveness": {"timestamp": AT, "ttl": 60, "expires_at": AT // 10**6 + 60}}, None
    ),
    "deletion of a row with a value": Case(TEXTS, INSERTED | {"cells": [cell("old", BEFORE)]}, DELETED, None),
    "deletion of a row without values": Case(TEXTS, INSERTED, DELETED, None),
    "deletion of a row of keys only": Case(KEYS_ONLY, INSERTED, DELETED, None),
    "deletion of a row without times": Case(SETS, {"cells": [_IN_SET]}, DELETED, None, element_times=False),
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def reader_of(lake: Lake, table: TableSchema) -> AfterReader:
    version = TableVersion.first(table)
    return AfterReader(load_config(lake.conf), version, "source", RING, control=None, replica=None, disagreed=True)  # type: ignore[arg-type]


def shown_by(monkeypatch: pytest.MonkeyPatch, images: pa.RecordBatch) -> Source:
    source = Source(images)
    monkeypatch.setattr(rows_after, "read_keys", source.read_keys)
    return source


def nothing_of(table: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], row_image_schema(table))


@pytest.mark.parametrize("name", CASES)
def test_what_a_quorum_does_not_show_waits_for_a_replica_that_is_down(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    before = selected(case.table, case.there, case.element_times)
    source = shown_by(monkeypatch, before)
    reader, change = reader_of(lake, case.table), row(case.table, case.change)
    assert images_after(reader, change).open.tolist() == [True]
    source.all_alive = True
    found = images_after(reader, change)
    assert (found.open.tolist(), found.visible.tolist()) == ([False], [True]), "something hides it"
    names = [column.name for column in case.table.value_columns]
    assert found.images.select(names).to_pylist() == before.select(names).to_pylist()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "list" not in name])
def test_what_a_quorum_shows_waits_for_nobody(lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of removals from lists nobody can tell."""
    case = CASES[name]
    after = nothing_of(case.table)
    if case.after is not None:
        after = selected(case.table, case.after, case.element_times)
    shown_by(monkeypatch, after)
    found = images_after(reader_of(lake, case.table), row(case.table, case.change))
    assert (found.open.tolist(), found.visible.tolist()) == ([False], [case.after is not None])


@pytest.mark.parametrize("name", ["list entry", "set element without times", "map value without times"])
def test_with_after_image_replica_it_waits_as_well(lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    before = selected(case.table, case.there, case.element_times)
    source = shown_by(monkeypatch, before)
    write_base(lake.conf.parent / "lake", case.table, pa.Table.from_batches([before]))
    replica = state_of(lake.conf.parent / "lake", case.table)
    reader = replace(reader_of(lake, case.table), mode="replica", replica=replica)
    for source.all_alive in (False, True):
        assert images_after(reader, row(case.table, case.change)).open.tolist() == [not source.all_alive]


@pytest.mark.parametrize("all_alive", [False, True])
def test_a_counter_waits_for_all_replicas_whatever_time_a_quorum_shows(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, all_alive: bool
) -> None:
    """Another replica has counted later: the time is newer, but the total lacks what only this one has."""
    table = table_of(Native("counter"))

    def counted(count: int, at: int) -> dict[str, Any]:
        shard = uuid.UUID(int=count).bytes + (1).to_bytes(8) + count.to_bytes(8)
        return cell("", at) | {"value": b"\0\1\0\0" + shard}

    shown_by(monkeypatch, selected(table, {"cells": [counted(7, AT + 10)]}, True)).all_alive = all_alive
    found = images_after(reader_of(lake, table), row(table, {"cells": [counted(5, AT)]}))
    assert (found.open.tolist(), found.visible.tolist()) == ([not all_alive], [True])


def test_an_entry_that_a_quorum_shows_waits_for_nobody(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    shown_by(monkeypatch, selected(LISTS, {"cells": [_OLD, _ADDED, _NEWER]}, True))
    assert not images_after(reader_of(lake, LISTS), row(LISTS, {"cells": [_ADDED]})).open.any()


@pytest.mark.parametrize(
    ("name", "believed"),
    [
        ("list entry", {"cells": [_OLD, _ADDED]}),
        ("set element without times", {"cells": [_IN_SET, _X_IN_SET]}),
        ("list entry's removal", {"cells": [_OLD, _NEWER]}),
    ],
)
@pytest.mark.parametrize("all_alive", [False, True])
def test_the_replica_believes_the_log_as_long(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, name: str, believed: Mapping[str, Any], all_alive: bool
) -> None:
    """But for what the log cannot say: which of the entries that were read is removed."""
    case = CASES[name]
    before = selected(case.table, case.there, case.element_times)
    shown_by(monkeypatch, before).all_alive = all_alive
    write_base(lake.conf.parent / "lake", case.table, pa.Table.from_batches([before]))
    replica = state_of(lake.conf.parent / "lake", case.table)
    reader = replace(reader_of(lake, case.table), mode="replica", replica=replica)
    found = complete_rows(reader, row(case.table, case.change)).images
    expected = before if all_alive else selected(case.table, believed, True)
    assert found["v0"].to_pylist() == expected["v0"].to_pylist()


@pytest.mark.parametrize(("after_us", "is_there"), [(0, False), (1, True)])
def test_a_row_whose_deletion_is_believed_does_not_live_by_what_nobody_knows(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, after_us: int, is_there: bool
) -> None:
    """It was without cells in the replica, for ever: its unknown liveness might have been newer, by other clocks."""
    before = selected(TEXTS, INSERTED | {"cells": [cell("old", BEFORE)]}, True)
    shown_by(monkeypatch, before)
    write_base(lake.conf.parent / "lake", TEXTS, pa.Table.from_batches([before]))
    replica = state_of(lake.conf.parent / "lake", TEXTS)
    replica = replace(replica, live_known_from_us=AT + after_us + CLOCK_SKEW_US)
    reader = replace(reader_of(lake, TEXTS), mode="replica", replica=replica)
    found = complete_rows(reader, row(TEXTS, DELETED)).images
    assert found["v0"].to_pylist() == [None]
    assert alive(found, TEXTS, int(time.time())).tolist() == [is_there]


@pytest.mark.parametrize(("after_us", "was_read", "is_there"), [(0, True, False), (1, True, True), (1, False, False)])
def test_an_unknown_liveness_ends_with_a_later_deletion_or_a_read_that_shows_no_row(
    after_us: int, was_read: bool, is_there: bool
) -> None:
    """All rows of a partition are believed with its static cells, also one that a read has shown to be gone."""
    image = selected(TEXTS, DELETED, True)
    found = without_deleted_livenesses(image, TEXTS, AT + after_us, np.array([was_read]))
    assert alive(found, TEXTS, int(time.time())).tolist() == [is_there]


@pytest.mark.parametrize("all_alive", [False, True])
def test_a_list_that_loses_an_entry_does_not_take_the_rest_of_its_row(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, all_alive: bool
) -> None:
    table = table_of(ListType(TEXT), TEXT)
    before = selected(table, {"cells": [_OLD, _NEWER, cell("before", BEFORE, column=1)]}, True)
    shown_by(monkeypatch, before).all_alive = all_alive
    write_base(lake.conf.parent / "lake", table, pa.Table.from_batches([before]))
    replica = state_of(lake.conf.parent / "lake", table)
    reader = replace(reader_of(lake, table), mode="replica", replica=replica)
    removal = tombstone(path=_OLD["path"]) | {"timestamp": AT + 5}
    for change, v1 in (({"cells": [removal, cell("x", column=1)]}, "x"), (DELETED | {"cells": [removal]}, None)):
        found = complete_rows(reader, row(table, change)).images
        assert found["v1"].to_pylist() == ["before" if all_alive else v1]


def test_a_cell_that_has_expired_does_not_excuse_others(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer deletion of ``v1`` was published before; all replicas answer."""
    table = table_of(TEXT, TEXT)
    shown_by(monkeypatch, selected(table, INSERTED, True)).all_alive = True
    expired = cell("beat") | EXPIRED
    change = row(table, {"cells": [expired, cell("hidden", column=1)]})
    found = images_after(reader_of(lake, table), change)
    assert (found.visible.tolist(), found.open.tolist()) == ([True], [False])
    assert found.images["v1"].to_pylist() == [None]


@pytest.mark.parametrize(("level", "is_open"), [("LOCAL_ONE", False), ("LOCAL_QUORUM", False), ("ALL", True)])
def test_what_a_read_may_not_meet_waits(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, level: ConsistencyLevel, is_open: bool
) -> None:
    """Where few replicas were alive when they agreed, they may be down by now, and the others back without hints."""
    shown_by(monkeypatch, nothing_of(TABLE))
    write = Write(1, 1, "alone", NOW.start * 1000)
    data, places = encode_blocks([VERSION.to_store(change_rows([write], TABLE))], rows_key("a", 1, "file"))
    lake.store.put(places[0].key, data)
    reader = replace(reader_of(lake, TABLE), version=VERSION, disagreed=False)
    context = PassContext(reader, "test.shop.t", 1, "00000001", "", False, {}, 1)
    reading = Reading(((places[0], "a"),), WHOLE_RING.unwrap(), 1, level=level)
    slices = [SliceOfBucket(str(NOW), (reading,), (), ())]
    found = close_slice(context, lake.store, StagedFiles(lake.store, VERSION), "0000", slices, by_arrival=False)
    assert (found.open, not found.outputs) == (is_open, is_open)


SIMPLE = TableSchema("shop", "t", "5" * 32, (Column("id", "partition_key", INT), Column("v", "regular", TEXT)))


@pytest.mark.parametrize("all_alive", [False, True])
@pytest.mark.parametrize("is_later", [False, True])
def test_the_deletion_of_a_partition_waits_as_the_rows_under_it_do(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, is_later: bool, all_alive: bool
) -> None:
    """All else of the slice is published, and who takes the newest has what the quorum shows."""
    version, table = TableVersion.first(SIMPLE), SIMPLE
    rows = [Write(id_, None, value, AT + id_).row(table, "a") for id_, value in ((1, None), (2, "there"))]
    rows[1] |= {"kind": ROW, "clustering": bytes(4), "deletion": None}
    there = [Write(1, None, "shown", AT + 10 if is_later else BEFORE).row(table, "a"), rows[1]]
    there[0] |= {"kind": ROW, "clustering": bytes(4), "deletion": None}
    shown = row_images_of(merged(pa.RecordBatch.from_pylist(there, STAGED_ROWS), table), table, "raw")
    by_key = {key: n for n, key in enumerate(shown["id"].to_pylist())}

    def read_keys(reader: AfterReader, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        wanted = [by_key[int.from_bytes(key)] for key in keys["partition_key"].to_pylist()]
        every = np.ones(len(wanted), np.bool_)
        return Seen(shown.take(pa.array(wanted)), every, every & all_alive)

    for module in (rows_after, spared_rows):
        monkeypatch.setattr(module, "read_keys", read_keys)
    stream = FileStream(lake.store, "test.shop.simple")
    stream.put_schemas(1, *(make(table, "test", "exact") for make in (key_schema, envelope_schema)))
    batch = pa.RecordBatch.from_pylist(sorted(rows, key=lambda one: one["token"]), STAGED_ROWS)
    data, places = encode_blocks([version.to_store(batch)], rows_key("a", 1, "file"))
    lake.store.put(places[0].key, data)
    context = PassContext(reader_of(lake, table), stream.topic, 1, "00000001", "", False, {}, 1)
    reading = Reading(((places[0], "a"),), WHOLE_RING.unwrap(), 2, level="ALL")
    bucket = str(Bucket(AT // 1000 // 60_000 * 60_000, 60_000))
    slices = [SliceOfBucket(bucket, (reading,), (), ())]
    found = close_slice(context, lake.store, StagedFiles(lake.store, version), "0000", slices, by_arrival=False)
    waits = not is_later and not all_alive
    waiting = [version.from_store(decode_rows(lake.store.get(stat.key))) for stat in lake.store.list(LATE_ROWS)]
    assert [one["digest"].to_pylist() for one in waiting] == [[rows[0]["digest"]]] * waits
    (output,) = found.outputs
    assert (found.open, output.rows) == (waits, 2 - waits)
    assert (output.deletions is None) == waits, "the replica takes it"
    stream.publish(pass_folder(1), [output.part])
    said = [(one["key"]["id"], one["value"]["op"]) for one in stream.read(pass_folder(1))]
    assert sorted(said) == ([(2, "c")] if waits else [(1, "d"), (1, "u"), (2, "c")])
