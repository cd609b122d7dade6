"""What a bootstrap has copied of replicas that lacked a change comes no later in the stream than that change."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ringsync.changes.batch import ChangeRows
from ringsync.changes.identity import TableVersion
from ringsync.changes.schema import EXPIRING, STATIC
from ringsync.cql.types import Native
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.ledger.passes import Pass, get_pass, pass_folder, pass_numbers
from ringsync.ledger.staging import put_closed_until
from ringsync.ledger.table_versions import version_of
from ringsync.replica.changes import replica_state
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.folders import base_folder
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import Column, TableSchema
from ringsync.state.bootstrap import CommittedRange
from ringsync.steps.bootstrap.cancel import end
from ringsync.steps.bootstrap.publish import Outputs
from ringsync.steps.passes import follow_ups as steps_follow_ups
from ringsync.steps.passes import pieces
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import commit
from ringsync.steps.passes.missed_rows import MissedRows
from ringsync.steps.passes.rows_after import AfterReader
from ringsync.steps.sync_plan import SyncTable
from ringsync.streams.files import FileStream, StreamConflictError
from ringsync.streams.messages import snapshot_messages
from tests.mortal_store import IMMORTAL, Killed
from tests.newest_model import NewestModel
from tests.steps import test_bootstrap_begins_back, test_bootstrap_marks, test_close
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import again, follow_ups, rows_of_replica
from tests.steps.test_bootstrap_marks import TOPIC, Lake, cycle, now_ms
from tests.steps.test_close import NOW, TABLE
from tests.steps.test_rows_before import WITH_STATIC, Expired, KeyOnly
from tests.stream_model import StreamModel

AT = NOW.start * 1000
OLD = [Write(1, 1, "old", AT), Write(2, 1, "old", AT), Write(3, 1, "old", AT), Write(4, 1, "old", AT)]
CHANGES = [
    Write(1, 1, "new", AT + 500),
    Write(2, 1, None, AT + 600),
    Write(3, None, None, AT + 700),
    Write(5, 1, "not copied", AT + 800),
]
"""Only one replica had these when they were published; the scan has read others."""
RIGHT = {(1, 1): "new", (4, 1): "old", (5, 1): "not copied"}


def as_read(writes: Sequence[Write]) -> pa.RecordBatch:
    """What a scan reads."""
    return row_images_of(ChangeRows.of(change_rows(writes, TABLE)), TABLE, "raw")


def copied(lake: Lake, name: str, begin: int, images: pa.RecordBatch) -> list[CommittedRange]:
    """What the tasks of a scan write that has read these."""
    version = lake.close.schema_version
    part = FileStream(lake.store, TOPIC).open_part(pass_folder(begin), f"{name}-x", version)
    told: dict[str, Any] = {"hostname": "b", "processed_at_ms": now_ms(), "schema_version": version}
    part.add(snapshot_messages(images, TABLE, "test", "exact", queries=None, **told))
    writer = DataFileWriter(row_image_schema(TABLE))
    writer.add(images)
    file, data = writer.finish(f"part-{name}-0.parquet", now_ms())
    lake.store.put(f"{base_folder(TABLE.keyspace, TABLE.name)}/{file.name}", data)
    outputs = Outputs((file,), (part.finish(),)).to_json()
    whole = TokenRange(-(2**63), 2**63 - 1)
    return [CommittedRange(whole, 1, len(images), len(images), 1, 1, outputs)]


def bootstrap(lake: Lake, name: str, images: pa.RecordBatch) -> None:
    """Copy the table; who follows it has not seen that yet."""
    begin = lake.begin(name)
    lake.publish_scan(name, begin, copied(lake, name, begin, images))
    lake.cutover(name)


def messages(lake: Lake) -> list[dict[str, Any]]:
    stream = FileStream(lake.store, TOPIC)
    return [message for bucket in stream.folders() for message in stream.read(bucket)]


def newest(lake: Lake) -> dict[tuple[int, int], str]:
    """What a consumer has that takes the newest."""
    rows = NewestModel(TABLE).apply_all(messages(lake)).rows(int(time.time()))
    return {(key[0], key[1]): row["v"] for key, row in rows.items()}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path)
    bootstrap(lake, "b1", as_read(OLD))
    cycle(lake.close)
    lake.write(CHANGES)
    assert rows_of_replica(lake) == newest(lake) == RIGHT
    return lake


def test_whoever_takes_the_newest_keeps_what_the_scan_has_missed(lake: Lake) -> None:
    bootstrap(lake, "b2", as_read(OLD))
    cycle(lake.close)
    assert rows_of_replica(lake) == newest(lake) == RIGHT
    everything = StreamModel(TABLE, True).apply_all(messages(lake)).rows(int(time.time()))
    assert len(everything) == len(RIGHT)
    ids = [one["value"]["source"]["event_id"] for one in messages(lake) if one["value"]["op"] != "r"]
    assert len(ids) == len(set(ids)), "who drops repeats drops none of them"


def test_many_changes_are_not_cut_into_pieces_of_few_rows(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only tells what was missed has to learn, too, how wide rows are: 14 million changes were 29,000 pieces."""
    sizes: list[int] = []
    said = MissedRows.said

    def counted(self: MissedRows, rows: Any, *more: Any) -> Any:
        sizes.append(len(rows))
        return said(self, rows, *more)

    lake.write([Write(n, 1, "new", AT + n) for n in range(10, 3_010)])
    bootstrap(lake, "b2", as_read(OLD))
    monkeypatch.setattr(MissedRows, "said", counted)
    call = MissedRows.__call__

    def in_a_new_worker(self: MissedRows, several: Any) -> Any:
        monkeypatch.setattr(pieces, "_known", defaultdict(pieces._Known))
        return call(self, several)

    monkeypatch.setattr(MissedRows, "__call__", in_a_new_worker)
    cycle(lake.close)
    assert sum(sizes) == 3_000 + len(CHANGES)
    assert (sizes[0], max(sizes) > 2_000) == (500, True)


def test_it_is_told_once(lake: Lake) -> None:
    bootstrap(lake, "b2", as_read(OLD))
    cycle(lake.close)
    there = messages(lake)
    for close in (lake.close, follow_ups(lake)):
        cycle(close)
    assert messages(lake) == there
    bootstrap(lake, "b3", as_read(OLD))
    cycle(lake.close)
    assert newest(lake) == RIGHT


def test_what_was_copied_as_it_is_is_not_told_again(lake: Lake) -> None:
    bootstrap(lake, "b2", as_read([Write(1, 1, "new", AT + 500), *OLD[3:], CHANGES[3]]))
    before = len(messages(lake))
    cycle(lake.close)
    assert len(messages(lake)) == before
    assert newest(lake) == RIGHT


def test_another_process_is_faster(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has told them: its pass has the number, and there is no other."""
    bootstrap(lake, "b2", as_read(OLD))
    made = FollowUps._told_again

    def slower(self: FollowUps, *arguments: Any) -> bool:
        monkeypatch.setattr(FollowUps, "_told_again", made)
        lake.change(6, follow_ups(lake))
        return made(self, *arguments)

    monkeypatch.setattr(FollowUps, "_told_again", slower)
    with pytest.raises(StreamConflictError):
        cycle(lake.close)
    cycle(lake.close)
    assert newest(lake) == {**RIGHT, (6, 6): "c"}
    assert len(told_again(lake)) == 1


def told_again(lake: Lake) -> list[Pass]:
    passes = (get_pass(lake.store, TABLE.table_id, number) for number in pass_numbers(lake.store, TABLE.table_id))
    return [one for one in passes if "told_again" in one.counts]


def test_nothing_is_forgotten_before_it_is_told(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap has lasted for six hours, and a late pass comes while the missed rows are looked for."""
    begin = lake.begin("b2")
    lake.publish_scan("b2", begin, copied(lake, "b2", begin, as_read(OLD)))
    long_ago = 6 * 3_600_000
    again(lake, lambda one: replace(one, created_at_ms=one.created_at_ms - long_ago * (one.number <= begin)))
    put_closed_until(lake.store, NOW.end - long_ago // 2)
    lake.cutover("b2")

    def late(*arguments: Any) -> Pass | None:
        monkeypatch.setattr(steps_follow_ups, "commit", commit)
        ours = follow_ups(lake)
        ours.catch_up = ours.tell_missed = lambda: None  # type: ignore[method-assign]
        lake.write([Write(6, 6, "late", AT + 6)], ours)
        return commit(*arguments)

    monkeypatch.setattr(steps_follow_ups, "commit", late)
    lake.close = follow_ups(lake)
    for _ in range(3):
        cycle(lake.close)
    assert newest(lake) == rows_of_replica(lake) == {**RIGHT, (6, 6): "late"}
    assert min(pass_numbers(lake.store, TABLE.table_id)) > begin, "then it is"


@pytest.mark.parametrize("left", [1, 2, 3, IMMORTAL])
@pytest.mark.parametrize("cancelled", [True, False])
def test_each_bootstrap_owes_what_it_has_copied(lake: Lake, left: int, *, cancelled: bool) -> None:
    """It was killed behind its rows or is complete, and another has begun before anything was told."""
    begin = lake.begin("b2")
    ranges = copied(lake, "b2", begin, as_read(OLD))
    lake.store.left = left
    with suppress(Killed):
        lake.publish_scan("b2", begin, ranges)
        lake.cutover("b2")
    lake.store.left = IMMORTAL
    if cancelled:
        lake.begin("b3")
        end(lake.config, lake.store, TABLE, "b3", lambda: None)
    else:
        bootstrap(lake, "b3", as_read([Write(1, 1, "new", AT + 500), OLD[3], CHANGES[3]]))
    lake.close = follow_ups(lake)
    for _ in range(3):
        cycle(lake.close)
    assert newest(lake) == rows_of_replica(lake) == RIGHT


@dataclass(frozen=True)
class Expiring(Write):
    """``INSERT … USING TTL``, which ends at a moment (s since the epoch)."""

    end_s: int = 0

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        row, ends = super().row(table, node), {"ttl": 3600}
        cells = [row["cells"][0] | ends | {"kind": EXPIRING, "local_deletion_time": self.end_s}]
        return row | {"cells": cells, "liveness": {"timestamp": self.at, "expires_at": self.end_s} | ends}


def test_a_copy_that_has_expired_hides_no_row(lake: Lake) -> None:
    """The scan has seen a row that was to end, and missed that it was written again."""
    bootstrap(lake, "b2", as_read([Expiring(1, 1, "ended", AT, int(time.time()) - 1), *OLD[3:]]))
    cycle(lake.close)
    assert newest(lake) == rows_of_replica(lake) == RIGHT


def altered(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ALTER TABLE … ADD w``, of which all learn."""
    wider = replace(TABLE, columns=(*TABLE.columns, Column("w", "regular", Native("int"))))
    for module in (test_close, test_bootstrap_begins_back, test_bootstrap_marks, sys.modules[__name__]):
        monkeypatch.setattr(module, "TABLE", wider)
    lake.close.follow(SyncTable(version_of(lake.store, wider), TOPIC, False))


def test_what_was_copied_before_the_table_was_altered_is_told_all_the_same(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bootstrap owed it when a column was added: the replica follows. The table may be bootstrapped again, too."""
    bootstrap(lake, "b2", as_read(OLD))
    altered(lake, monkeypatch)
    cycle(lake.close)
    assert (lake.close.status()["replica_error"], len(told_again(lake))) == (None, 1)
    assert newest(lake) == rows_of_replica(lake) == RIGHT
    bootstrap(lake, "b3", as_read([Write(1, 1, "new", AT + 500), OLD[3], CHANGES[3]]))
    for _ in range(3):
        cycle(lake.close)
    assert len(told_again(lake)) == 2, "of each bootstrap"
    assert newest(lake) == rows_of_replica(lake) == RIGHT
    assert lake.close.is_done()


def test_what_cannot_be_told_is_not_waited_for(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap(lake, "b2", as_read(OLD))

    def broken(*arguments: Any) -> Any:
        raise ValueError("a file of changes is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(MissedRows, "__call__", broken)
        with pytest.raises(ValueError, match="is damaged"):
            lake.write([Write(6, 6, "fresh", AT + 6)])
        assert newest(lake)[6, 6] == rows_of_replica(lake)[6, 6] == "fresh"
    cycle(lake.close)
    assert newest(lake) == rows_of_replica(lake) == {**RIGHT, (6, 6): "fresh"}


def test_a_copy_that_cannot_be_read_any_more_is_told_like_one_that_nobody_knows(lake: Lake) -> None:
    bootstrap(lake, "b2", as_read(OLD))
    bootstrap(lake, "b3", as_read(OLD))
    folder = base_folder(TABLE.keyspace, TABLE.name)
    lake.store.delete(f"{folder}/part-b2-0.parquet")
    for _ in range(2):
        cycle(lake.close)
    assert len(told_again(lake)) == 2
    assert newest(lake) == rows_of_replica(lake) == RIGHT


def test_a_row_that_has_changed_in_many_passes_is_told_once(lake: Lake) -> None:
    for number in range(5):
        lake.write([Write(1, 1, f"v{number}", AT + 1000 + number)])
    bootstrap(lake, "b2", as_read(OLD))
    cycle(lake.close)
    (told,) = told_again(lake)
    keys = [(one["key"]["id"], one["key"]["seq"]) for one in FileStream(lake.store, TOPIC).read(told.folder)]
    assert sorted(keys, key=str) == [(1, 1), (2, 1), (3, 1), (3, None)]
    assert newest(lake) == {**RIGHT, (1, 1): "v4"}


def test_what_is_told_again_is_told_without_what_has_expired(lake: Lake) -> None:
    lake.write([KeyOnly(6, 1, "", AT + 900)])
    lake.write([Expired(6, 1, "short", AT + 950)])
    bootstrap(lake, "b2", as_read([*OLD, Write(6, 1, "copied", AT)]))
    cycle(lake.close)
    (told,) = told_again(lake)
    again = [one["value"]["after"] for one in FileStream(lake.store, TOPIC).read(told.folder) if one["key"]["id"] == 6]
    assert [row["v"] for row in again] == [None]


@dataclass(frozen=True)
class Row(Write):
    """Of a table whose first value column is static."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        row = super().row(table, node)
        return row | {"cells": [cell | {"column": 1} for cell in row["cells"]]}


@dataclass(frozen=True)
class Static(Write):
    """``UPDATE … SET s = … WHERE id = …``."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        row = Write(self.id, 0, self.v, self.at).row(table, node)
        return row | {"kind": STATIC, "clustering": None, "liveness": None}


@pytest.fixture
def with_static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Of a table with a static column."""
    table = replace(WITH_STATIC, keyspace="shop", name="t", table_id=TABLE.table_id)
    for module in (test_close, test_bootstrap_begins_back, test_bootstrap_marks, sys.modules[__name__]):
        monkeypatch.setattr(module, "TABLE", table)
    monkeypatch.setattr(test_close, "VERSION", TableVersion.first(table))
    lake = Lake(tmp_path)

    def reader(*arguments: Any, **others: Any) -> AfterReader:
        state = replica_state(lake.store, table)
        return replace(AfterReader(*arguments, **{**others, "replica": state}), mode="replica" if state else "none")

    monkeypatch.setattr(test_bootstrap_marks, "AfterReader", reader)
    return lake


def with_static_cell(rows: Sequence[Row], text: str) -> pa.RecordBatch:
    """What a scan reads: a SELECT shows static cells on the rows of the partition."""
    images = as_read(rows)
    cells = pa.array([text] * len(images))
    return images.set_column(images.schema.names.index("s"), images.schema.field("s"), cells)


def test_static_cells_are_told_where_no_copied_row_is_left(with_static: Lake) -> None:
    lake, images = with_static, with_static_cell([Row(1, 1, "r1", AT)], "old")
    bootstrap(lake, "b1", images)
    cycle(lake.close)
    lake.write([Static(1, None, "new", AT + 10), Row(1, 1, None, AT + 11), Row(1, 2, "r2", AT + 12)])
    right = newest(lake)
    bootstrap(lake, "b2", images)
    cycle(lake.close)
    assert newest(lake) == rows_of_replica(lake) == right == {(1, 2): "r2"}
    statics = [one["value"]["after"]["s"] for one in messages(lake) if one["value"]["after"]]
    assert statics[-1] == "new", "the newest of the partition"


@pytest.mark.parametrize("written", [1, 2, 3])
def test_rows_that_the_missed_changes_do_not_touch_stay(with_static: Lake, written: int) -> None:
    """Each lookup adds a row of the partition, for its static cells: of the copies another one than of the replica."""
    lake = with_static
    images = with_static_cell([Row(1, seq, f"r{seq}", AT) for seq in (1, 2, 3, 4)], "old")
    bootstrap(lake, "b1", images)
    cycle(lake.close)
    lake.write([Row(1, 1, "missed", AT + 10)])
    bootstrap(lake, "b2", images)
    lake.close.tell_missed = lambda: None  # type: ignore[method-assign]
    lake.write([Row(1, written, "written", AT + 20)])
    del lake.close.tell_missed
    cycle(lake.close)
    assert len(told_again(lake)) == 1
    right = {(1, 1): "missed", (1, 2): "r2", (1, 3): "r3", (1, 4): "r4", (1, written): "written"}
    assert newest(lake) == rows_of_replica(lake) == right
