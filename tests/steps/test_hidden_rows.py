"""What deletions hide that the replica does not show does not live again, whenever its pass comes; and what nothing can
hide costs the source nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ringsync.changes.schema import EXPIRING, LIVE, STATIC, TOMBSTONE
from ringsync.config import load_config
from ringsync.images.from_changes import row_images_of
from ringsync.ledger.passes import Pass, get_pass, mark, pass_numbers
from ringsync.ledger.staging import STAGED_ROWS, put_closed_until
from ringsync.replica.changes import CLOCK_SKEW_US
from ringsync.schema.table import TableSchema
from ringsync.steps.passes import rows_after
from ringsync.steps.passes.rows_after import AfterReader, Seen, complete_rows, images_after
from ringsync.steps.replica.merge import dead_kept_s
from ringsync.storage.local import LocalStore
from tests.reconciled import merged
from tests.replica.bases import state_of
from tests.steps.late_files import RangeDelete, Write, change_rows
from tests.steps.test_bootstrap_begins_back import KEPT_MS, again, bootstrap, caught_up, follow_ups, rows_of_replica
from tests.steps.test_close import NOW, TABLE, Lake
from tests.steps.test_rows_before import WITH_STATIC
from tests.steps.test_rows_before import Lake as WithStatic

LONG_AGO = int(time.time() - 20 * 86_400) * 10**6
"""µs, before all bases."""
LATER = NOW.start * 1000
"""µs, after them."""


@dataclass(frozen=True)
class Update(Write):
    """``UPDATE … SET v``, with ``v`` being None to null."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        found = {**Write(self.id, self.seq, "", self.at).row(table, node), "digest": self.digest, "liveness": None}
        value = {"value": self.v.encode()} if self.v else {"value": None, "local_deletion_time": self.at // 10**6}
        found["cells"] = [found["cells"][0] | value | ({} if self.v else {"kind": TOMBSTONE})]
        return found


@dataclass(frozen=True)
class Expired(Write):
    """An ``UPDATE``, or with ``inserted`` an ``INSERT``, ``USING TTL``, some seconds after it has expired."""

    inserted: bool = False

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        expired_at = int(time.time()) - 5
        found = Write(self.id, self.seq, self.v, self.at).row(table, node)
        liveness = {"timestamp": self.at, "ttl": 60, "expires_at": expired_at} if self.inserted else None
        cells = [found["cells"][0] | {"kind": EXPIRING, "ttl": 60, "local_deletion_time": expired_at}]
        return {**found, "digest": self.digest, "liveness": liveness, "cells": cells}


@dataclass(frozen=True)
class Beat(Write):
    """An ``INSERT`` for ever, and an ``UPDATE USING TTL`` of its value."""

    ends: int = 0

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        found = super().row(table, node)
        return found | {"cells": [found["cells"][0] | {"kind": EXPIRING, "ttl": 60, "local_deletion_time": self.ends}]}


class Source:
    """The cluster, as reading single rows shows it.

    :ivar rows: that it shows
    :ivar all_alive: whether all replicas answer
    :ivar asked: id and seq of the rows that were asked for
    """

    def __init__(self) -> None:
        self.rows: list[Write] = []
        self.all_alive = True
        self.asked: list[tuple[int, int]] = []

    def read_keys(self, reader: Any, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        wanted = list(zip(keys["partition_key"].to_pylist(), keys["clustering"].to_pylist(), strict=True))
        self.asked += [(int.from_bytes(key), int.from_bytes(clustering[-4:])) for key, clustering in wanted]
        found = {(row["partition_key"], row["clustering"]): one for one in self.rows for row in [one.row(TABLE, "a")]}
        shown = [found[key] for key in wanted if key in found]
        images = row_images_of(merged(change_rows(shown, TABLE), TABLE), TABLE, "raw")
        there = np.array([key in found for key in wanted], np.bool_)
        return Seen(images, there, np.full(len(wanted), reader.disagreed and self.all_alive))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source()
    monkeypatch.setattr(rows_after, "read_keys", made.read_keys)
    return made


@pytest.fixture
def lake(tmp_path: Path, source: Source) -> Lake:
    """Of a table that was bootstrapped."""
    found = Lake(tmp_path)
    bootstrap(found, "b0")
    return found


def publish(lake: Lake, writes: Sequence[Any], **counts: int) -> int:
    """A pass, which the replica does not have yet; its number."""
    lake.passes[:] = passes(lake)
    lake.publish(NOW, list(writes), by_arrival=False)
    number = lake.passes[-1].number
    again(lake, lambda one: replace(one, counts={**one.counts, **counts}) if one.number == number else one)
    return number


def passes(lake: Lake) -> list[Pass]:
    return [get_pass(lake.store, TABLE.table_id, number) for number in pass_numbers(lake.store, TABLE.table_id)]


def shown(lake: Lake) -> dict[tuple[int, int], str]:
    caught_up(follow_ups(lake))
    return rows_of_replica(lake)


DELETIONS = {
    "row": [Write(1, 1, None, LONG_AGO + 900)],
    "partition": [Write(1, None, None, LONG_AGO + 900)],
    "cell": [Update(1, 1, None, LONG_AGO + 900)],
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", DELETIONS)
def test_an_older_row_does_not_live_again_in_a_new_base(lake: Lake, source: Source, kind: str, is_open: bool) -> None:
    """All replicas had the deletion, so it is not added to the new base; the row waited for its bucket's close, since
    one replica had missed it."""
    publish(lake, DELETIONS[kind], everywhere=1)
    if is_open:
        bootstrap(lake, "b1", complete=False)
        mark(lake.store, TABLE.table_id, "cutover", "b1", int(time.time() * 1000))
    publish(lake, [Update(1, 1, "ghost", LONG_AGO + 100)], at_close=1)
    if not is_open:
        bootstrap(lake, "b1")
    assert shown(lake) == {}
    # Deletions of partitions and ranges are known as long as their passes are.
    assert source.asked == ([] if kind == "partition" else [(1, 1)])


@pytest.mark.parametrize("inserted", [False, True])
def test_what_has_expired_hides_older_rows_after_its_row_was_read(lake: Lake, source: Source, inserted: bool) -> None:
    publish(lake, [Expired(1, 1, "e", LATER + 900, inserted)])
    assert shown(lake) == {}
    publish(lake, [Update(1, 1, "straggler", LONG_AGO)])
    assert (shown(lake), source.asked) == ({}, [(1, 1)])
    publish(lake, [Update(1, 1, "older", LATER + 100)], at_close=1)
    assert (shown(lake), source.asked) == ({}, [(1, 1)])
    publish(lake, [Update(1, 1, "newer", LATER + 901)])
    assert shown(lake) == {(1, 1): "newer"}


def test_what_the_source_shows_is_added_to_a_new_base(lake: Lake, source: Source) -> None:
    row = Write(1, 1, "here", LONG_AGO + 100)
    source.rows = [row]
    publish(lake, [row], at_close=1)
    bootstrap(lake, "b1")
    assert shown(lake) == {(1, 1): "here"}


def test_where_not_all_replicas_answer_the_log_is_believed(lake: Lake, source: Source) -> None:
    """Maybe the one that is down has it alone: its copies, which come later, count as published."""
    source.all_alive = False
    publish(lake, [Write(1, 1, "alone", LONG_AGO + 100)], at_close=1)
    bootstrap(lake, "b1")
    assert shown(lake) == {(1, 1): "alone"}


@pytest.mark.parametrize("everywhere", [0, 1])
def test_one_replica_is_asked_only_where_all_have_what_was_published(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, everywhere: int
) -> None:
    """A node that was down lacks a deletion until its hint comes, and has newer changes of older rows."""
    asked: list[list[str]] = []

    def read_keys(reader: Any, keys: pa.RecordBatch, levels: list[str], now_s: int) -> Seen:
        asked.append(levels)
        nothing = np.zeros(len(keys), np.bool_)
        return Seen(row_images_of(merged(change_rows([], TABLE), TABLE), TABLE, "raw"), nothing, ~nothing)

    monkeypatch.setattr(rows_after, "read_keys", read_keys)
    publish(lake, [Write(1, 1, None, LATER + 900)], everywhere=everywhere)
    reader = replace(follow_ups(lake).reader("source"), mode="source")
    images_after(reader, merged(change_rows([Write(1, 1, "hidden", LATER + 100)], TABLE), TABLE))
    assert asked[0] == (["LOCAL_ONE"] if everywhere else [])


@pytest.mark.parametrize("counts", [{"at_close": 1}, {"agreed": 1, "everywhere": 0}])
def test_the_log_is_believed_where_few_have_agreed(lake: Lake, source: Source, counts: dict[str, int]) -> None:
    """The one replica that was alive agreed with itself; it is down by now, and the others have no hint yet."""
    source.all_alive = False
    publish(lake, [Write(1, 1, "alone", LONG_AGO + 100)], **counts)
    assert shown(lake) == {(1, 1): "alone"}


def test_rows_that_are_newer_than_the_base_are_not_asked_for(lake: Lake, source: Source) -> None:
    publish(lake, [Write(1, 1, "x", LATER + 100)])
    bootstrap(lake, "b1")
    publish(lake, [Write(1, 2, "y", LATER + 200)], at_close=1)
    moment = passes(lake)[-1].created_at_ms * 1000 + CLOCK_SKEW_US
    publish(lake, [Write(1, 3, "z", moment + 10**6)])
    assert shown(lake) == {(1, 1): "x", (1, 2): "y", (1, 3): "z"}
    assert source.asked == []


def test_a_deletion_among_old_ones_asks_for_nothing(lake: Lake, source: Source) -> None:
    publish(lake, [*DELETIONS["row"], Update(2, 1, None, LONG_AGO), Write(3, None, None, LONG_AGO)])
    assert shown(lake) == {}
    assert source.asked == []


@pytest.mark.parametrize("knows_times", [True, False])
@pytest.mark.parametrize("minutes", [5, 13, 60, 230])
def test_a_deletion_meets_older_rows_however_long_ago_it_was_published(
    lake: Lake, source: Source, minutes: int, knows_times: bool
) -> None:
    """Where one node is behind all buckets stay open, and what is agreed on is published long before what is not."""
    deletion = publish(lake, [Write(1, None, None, LATER + 900), RangeDelete(2, 0, 9, LATER + 900)])
    caught_up(follow_ups(lake))
    again(lake, lambda one: replace(one, created_at_ms=one.created_at_ms - minutes * 60_000))
    if not knows_times:
        forget_times(lake, deletion)
    publish(lake, [Write(1, 1, "ghost", LATER + 100), Write(2, 1, "ghost", LATER + 100), Write(2, 2, "x", LATER + 901)])
    assert shown(lake) == {(2, 2): "x"}
    assert source.asked == []


def forget_times(lake: Lake, number: int) -> None:
    """Have a pass as a version before made it."""
    key = f"sync/{TABLE.table_id}/passes/{number:012}.json"
    document = json.loads(lake.store.get(key))
    del document["deleted_until_us"]
    lake.store.put(key, json.dumps(document).encode())


def test_rows_that_are_newer_than_all_deletions_read_no_file_of_them(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(lake, [Write(1, None, None, LATER + 900)])
    caught_up(follow_ups(lake))
    publish(lake, [Write(1, 1, "x", LATER + 901)])
    read: list[str] = []
    real = LocalStore.get

    def get(store: LocalStore, key: str) -> bytes:
        read.append(key)
        return real(store, key)

    monkeypatch.setattr(LocalStore, "get", get)
    assert shown(lake) == {(1, 1): "x"}
    assert not [key for key in read if "/deletions/" in key]


def test_what_is_older_than_passes_are_kept_is_asked_for(
    lake: Lake, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions of partitions and ranges are forgotten with their passes."""
    with monkeypatch.context() as patch:
        month_ago = time.time() - 30 * 86_400
        patch.setattr(time, "time", lambda: month_ago)
        bootstrap(lake, "month-ago")
    kept_since_us = int(time.time() * 10**6) - KEPT_MS * 1000
    source.rows = [Write(1, 2, "here", kept_since_us - 10**6)]
    publish(
        lake, [Write(1, 1, "ghost", kept_since_us - 10**6), *source.rows, Write(1, 3, "x", kept_since_us + 6 * 10**7)]
    )
    assert shown(lake) == {(1, 2): "here", (1, 3): "x"}
    assert sorted(source.asked) == [(1, 1), (1, 2)]


def test_passes_that_were_forgotten_are_not_known_when_they_are_kept_longer(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, hour_us, now_us = Lake(tmp_path), 3_600_000_000, int(time.time() * 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now_us / 10**6 - 30 * 86_400)
        bootstrap(lake, "month-ago")
    publish(lake, [Write(1, None, None, now_us - 5 * hour_us)])
    again(lake, lambda one: replace(one, created_at_ms=one.created_at_ms - 5 * 3_600_000))
    put_closed_until(lake.store, (now_us - 4 * hour_us) // 1000)
    publish(lake, [Write(7, 7, "other", now_us - 60 * 10**6)])
    assert shown(lake) == {(7, 7): "other"}
    kept = passes(lake)
    assert len(kept) == 1
    document = yaml.safe_load(lake.conf.read_text()) | {"sync": {"digest_retention_h": 24}}
    lake.conf.write_text(yaml.safe_dump(document))
    lake.passes[:] = kept * kept[-1].number
    lake.publish(NOW, [Write(1, 1, "ghost", now_us - 6 * hour_us)], by_arrival=False)
    assert shown(lake) == {(7, 7): "other"}
    assert source.asked == [(1, 1)]


def test_messages_do_not_say_that_it_lives(lake: Lake, source: Source) -> None:
    """With ``after_image: replica``: what the replica cannot know is as the source has it."""
    publish(lake, DELETIONS["row"], everywhere=1)
    bootstrap(lake, "b1")
    source.rows = [Write(1, 2, "newer", LONG_AGO + 800)]
    reader = replica_reader(lake)
    rows = [Write(1, 1, "ghost", LONG_AGO + 100), Write(1, 2, "old", LONG_AGO + 100), Write(1, 3, "x", LATER)]
    known = images_after(reader, merged(change_rows(rows, TABLE), TABLE))
    assert known.visible.tolist() == [False, True, True]
    assert known.images["v"].filter(pa.array(known.visible)).to_pylist() == ["newer", "x"]
    assert not known.open.any()
    source.all_alive = False
    known = images_after(replace(reader, disagreed=True), merged(change_rows(rows, TABLE), TABLE))
    assert known.open.tolist() == [True, False, False], "nobody knows whether the replica that is down has it alone"


def replica_reader(lake: Lake) -> Any:
    return caught_up(follow_ups(lake)).reader("replica")


def test_dead_rows_are_kept_while_nobody_asks_what_hides_a_row(lake: Lake) -> None:
    config = load_config(lake.conf)
    assert dead_kept_s(config, 0) > KEPT_MS // 1000
    assert dead_kept_s(config, 864_000) == 864_000


@pytest.mark.parametrize("all_alive", [True, False])
def test_static_cells_that_may_be_hidden_are_asked_for_with_all_rows_that_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_alive: bool
) -> None:
    static = {**Write(1, None, None, LONG_AGO).row(WITH_STATIC, "a"), "kind": STATIC, "deletion": None}
    static["cells"] = [{"column": 0, "value": b"static", "timestamp": LONG_AGO, "kind": LIVE}]
    rows = [Write(1, seq, value, LATER).row(WITH_STATIC, "a") for seq, value in ((1, "a"), (2, "b"))]
    for one in rows:
        one["cells"][0]["column"] = 1
    shown, rows_there = WithStatic(tmp_path, WITH_STATIC), pa.RecordBatch.from_pylist(rows, STAGED_ROWS)
    shown.publish(rows_there)
    asked: list[int] = []

    def read_keys(reader: AfterReader, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        """Nobody has the static cell, but maybe the one that is down."""
        asked.append(len(keys))
        images = row_images_of(merged(rows_there, WITH_STATIC), WITH_STATIC, "raw")
        return Seen(images, np.array([False, True, True]), np.full(len(keys), all_alive))

    monkeypatch.setattr(rows_after, "read_keys", read_keys)
    replica = state_of(shown.folder, WITH_STATIC)
    reader = replace(shown.reader, replica=replica, disagreed=True, deletions_known_from_us=LONG_AGO + 1)
    found = complete_rows(reader, merged(pa.RecordBatch.from_pylist([static], STAGED_ROWS), WITH_STATIC)).images
    s = None if all_alive else "static"
    told = [(row["seq"], row["s"], row["v"]) for row in found.to_pylist()]
    assert told == [(None, s, None), (1, s, "a"), (2, s, "b")]
    assert asked == [3]


@pytest.mark.parametrize("kind", ["row", "partition"])
def test_a_row_that_lives_by_a_newer_cell_does_not_live_by_an_old_insert(lake: Lake, source: Source, kind: str) -> None:
    """A SELECT shows the row, and not whether the INSERT or only the UPDATE is there."""
    publish(lake, DELETIONS[kind], everywhere=1)
    bootstrap(lake, "b1")
    there = Update(1, 1, "u", LATER + 100)
    publish(lake, [there])
    source.rows = [there]
    publish(lake, [Write(1, 1, "old", LONG_AGO + 100)], at_close=1)
    assert shown(lake) == {(1, 1): "u"}
    source.rows = []
    last = Update(1, 1, None, LATER + 200)
    said = images_after(replica_reader(lake), merged(change_rows([last], TABLE), TABLE))
    publish(lake, [last])
    assert (shown(lake), said.visible.tolist()) == ({}, [False])


def test_a_row_that_lives_by_an_old_insert_lives_on_without_cells(lake: Lake, source: Source) -> None:
    old, newer, last = (
        Write(1, 1, "old", LONG_AGO + 100),
        Update(1, 1, "u", LATER + 100),
        Update(1, 1, None, LATER + 200),
    )
    bootstrap(lake, "b1")
    publish(lake, [newer])
    source.rows = [newer]
    publish(lake, [old], at_close=1)
    assert shown(lake) == {(1, 1): "u"}
    source.rows = [replace(old, v="")]
    publish(lake, [last])
    assert (list(shown(lake)), len(source.asked)) == ([(1, 1)], 2)


@pytest.mark.parametrize("at", [LONG_AGO, LATER], ids=["long_ago", "later"])
def test_a_row_that_was_inserted_stays_when_its_last_cell_expires(
    lake: Lake, source: Source, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Nobody reads it then."""
    row = Beat(1, 1, "beat", at + 100, ends=int(time.time()) + 60)
    source.rows = [row]
    publish(lake, [row])
    assert shown(lake) == {(1, 1): "beat"}
    assert len(source.asked) == (at == LONG_AGO)
    monkeypatch.setattr(time, "time", lambda: row.ends)
    assert list(rows_of_replica(lake)) == [(1, 1)]


@pytest.mark.parametrize("all_alive", [True, False])
@pytest.mark.parametrize("disagreed", [True, False])
@pytest.mark.parametrize("mode", ["source", "replica"])
def test_rows_do_not_show_static_cells_that_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, disagreed: bool, all_alive: bool
) -> None:
    """A pass has an old static cell, which a deletion that no SELECT shows hides, and a row of its partition."""
    static = {**Write(1, None, None, LONG_AGO).row(WITH_STATIC, "a"), "kind": STATIC, "deletion": None}
    static["cells"] = [{"column": 0, "value": b"hidden", "timestamp": LONG_AGO, "kind": LIVE}]
    rows = [Write(1, 1, "a", LATER).row(WITH_STATIC, "a"), Write(2, 1, "b", LATER).row(WITH_STATIC, "a")]
    for one in rows:
        one["cells"][0]["column"] = 1
    empty = WithStatic(tmp_path, WITH_STATIC)
    there = row_images_of(merged(pa.RecordBatch.from_pylist(rows, STAGED_ROWS), WITH_STATIC), WITH_STATIC, "raw")

    def read_keys(reader: AfterReader, keys: pa.RecordBatch, levels: Any, now_s: int) -> Seen:
        wanted = [(int.from_bytes(one["partition_key"]), one["clustering"] is not None) for one in keys.to_pylist()]
        shown = pa.array([(image["id"], True) in wanted for image in there.to_pylist()])
        found = np.array([is_row for _, is_row in wanted], np.bool_)
        return Seen(there.filter(shown), found, np.full(len(keys), reader.disagreed and all_alive))

    monkeypatch.setattr(rows_after, "read_keys", read_keys)
    reader = replace(
        empty.reader,
        mode=mode,
        replica=state_of(empty.folder, WITH_STATIC),
        disagreed=disagreed,
        deletions_known_from_us=LONG_AGO + 1,
    )
    changes = merged(pa.RecordBatch.from_pylist([static, *rows], STAGED_ROWS), WITH_STATIC)
    known = images_after(reader, changes)
    told = [
        (row["id"], row["seq"], row["s"], row["v"]) for row in known.images.filter(pa.array(known.visible)).to_pylist()
    ]
    assert sorted(told) == [(1, 1, None, "a"), (2, 1, None, "b")]
    assert known.visible.tolist() == (changes.kind != STATIC).tolist()
    assert known.open.any() == (disagreed and not all_alive)
