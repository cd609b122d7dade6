"""Passes over a real replica, without servers: ``before`` is what was there, and a consumer that knows only keys can
follow deletions of partitions and ranges."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from ringsync.changes.identity import TableVersion
from ringsync.changes.schema import EXPIRING
from ringsync.config import load_config
from ringsync.cql.types import Native
from ringsync.images.schema import row_image_schema
from ringsync.ledger.passes import Pass
from ringsync.replica.changes import append_pass
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.schema.table import Column, TableSchema
from ringsync.steps.passes.make import Outputs, PassContext, commit, make_outputs
from ringsync.steps.passes.replica_task import ReplicaTask
from ringsync.steps.passes.rows_after import AfterReader, UnreadRowsError
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from ringsync.streams.messages import envelope_schema, key_schema
from tests.newest_model import NewestModel
from tests.replica.bases import NOW_MS, state_of, write_base
from tests.steps.late_files import RangeDelete, Write, change_rows
from tests.stream_model import StreamModel

INT, TEXT = Native("int"), Native("text")
KEY = (Column("id", "partition_key", INT), Column("seq", "clustering", INT))
TABLE = TableSchema("shop", "t", "5" * 32, (*KEY, Column("v", "regular", TEXT)))
WITH_STATIC = TableSchema("shop", "t", "5" * 32, (*KEY, Column("s", "static", TEXT), Column("v", "regular", TEXT)))
SIMPLE = TableSchema("shop", "t", "5" * 32, (KEY[0], Column("v", "regular", TEXT)))
RING = ranked(
    RingSnapshot((Host("a", "127.0.0.1", 9042, "dc", "r1", (0,), True),), Replication("SimpleStrategy", (("", 1),)))
)

Message = dict[str, Any]
Change = Write | RangeDelete


class Lake:
    """A replica of a table that begins empty, and its stream."""

    def __init__(self, folder: Path, table: TableSchema = TABLE) -> None:
        document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
        conf = folder / "ringsync.yaml"
        conf.write_text(yaml.safe_dump(document))
        self.folder, self.table = folder / "lake", table
        self.store = LocalStore(self.folder)
        self.stream = FileStream(self.store, "test.shop.t")
        self.stream.put_schemas(1, *(make(table, "test", "exact") for make in (key_schema, envelope_schema)))
        write_base(self.folder, table, pa.Table.from_batches([], row_image_schema(table)))
        version = TableVersion.first(table)
        self.reader = AfterReader(load_config(conf), version, "none", RING, None, None, before=True, expand=True)  # type: ignore[arg-type]
        self.passes: list[Pass] = []

    def make(self, changes: Sequence[Change | pa.RecordBatch], **reader: Any) -> tuple[PassContext, Outputs]:
        """The files of the next pass, which is not committed."""
        batches = [one if isinstance(one, pa.RecordBatch) else change_rows([one], self.table) for one in changes]
        now = replace(self.reader, **{"replica": state_of(self.folder, self.table), **reader})
        attempt = f"{time.monotonic_ns():x}"
        context = PassContext(now, self.stream.topic, len(self.passes) + 1, attempt, "", False, {}, 1)
        made = make_outputs(context, self.store, {"late": pa.concat_batches(batches)}, "0000")
        assert made.outputs is not None
        return context, made.outputs

    def publish(self, *changes: Change | pa.RecordBatch, **reader: Any) -> list[Message]:
        """Make a pass of changes, have the replica take it, and give its messages."""
        context, outputs = self.make(changes, **reader)
        made = commit(self.store, context, [outputs], {})
        assert made is not None
        self.passes.append(made)
        self.stream.publish(made.folder, made.parts)
        seen = state_of(self.folder, self.table)
        task = ReplicaTask(replace(context.reader, replica=seen), made.number)
        append_pass(self.store, self.table, made.number, list(task(made.changes)), NOW_MS, seen=seen)
        messages = list(self.stream.read(made.folder))
        assert len(messages) == outputs.messages
        return messages


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def told(messages: list[Message]) -> list[tuple[Any, ...]]:
    """Key, op, the value before, the value after."""
    found = []
    for one in messages:
        before, after = (one["value"][name] and one["value"][name]["v"] for name in ("before", "after"))
        found.append((one["key"]["id"], one["key"].get("seq"), one["value"]["op"], before, after))
    return found


@dataclass(frozen=True)
class Expired(Write):
    """``UPDATE … USING TTL``, ten seconds after it has expired."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        found = super().row(table, node)
        ends = {"kind": EXPIRING, "ttl": 60, "local_deletion_time": int(time.time()) - 10}
        return found | {"liveness": None, "cells": [cell | ends for cell in found["cells"]]}


@dataclass(frozen=True)
class KeyOnly(Write):
    """``INSERT`` of a key and nothing else."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        return super().row(table, node) | {"cells": []}


@pytest.mark.parametrize("first", [Expired(1, 1, "short", 10), Write(1, 1, "for ever", 5)])
def test_a_row_is_told_without_what_has_expired_before(lake: Lake, first: Write) -> None:
    lake.reader = replace(lake.reader, mode="replica")
    messages = lake.publish(first)
    if not isinstance(first, Expired):
        messages += lake.publish(Expired(1, 1, "short", 10))
    (inserted,) = lake.publish(KeyOnly(1, 1, "", 20))
    assert told([inserted]) == [(1, 1, "c", None, None)]
    messages.append(inserted)
    now = int(time.time())
    assert NewestModel(TABLE).apply_all(messages).rows(now) == {(1, 1): {}}
    assert list(StreamModel(TABLE, True).apply_all(messages).rows(now)) == [(1, 1)]


def test_a_pass_is_made_by_the_configuration_that_its_driver_has_read(lake: Lake, tmp_path: Path) -> None:
    """Somebody edits it while the loops run: tasks looked for the files of their driver in another store."""
    conf = tmp_path / "ringsync.yaml"
    conf.write_text(conf.read_text().replace("url: lake", "url: elsewhere"))
    assert told(lake.publish(Write(1, 1, "a", 10))) == [(1, 1, "c", None, "a")]


def test_before_is_the_row_that_was_there(lake: Lake) -> None:
    lake.reader = replace(lake.reader, mode="replica")
    assert told(lake.publish(Write(1, 1, "a", 10), Write(1, 2, "b", 11))) == [
        (1, 1, "c", None, "a"),
        (1, 2, "c", None, "b"),
    ]
    (changed, removed) = lake.publish(Write(1, 1, "A", 20), Write(1, 2, None, 21))
    assert changed["value"]["before"] == {"id": 1, "seq": 1, "v": "a"}
    assert told([changed, removed]) == [(1, 1, "c", "a", "A"), (1, 2, "d", "b", None)]
    assert told(lake.publish(Write(1, 2, None, 30))) == [(1, 2, "d", None, None)]
    assert told(lake.publish(Write(1, 1, "B", 40), before=False)) == [(1, 1, "c", None, "B")]
    assert told(lake.publish(Write(1, 1, "C", 50), replica=None, mode="none")) == [(1, 1, "c", None, "C")]
    assert told(lake.publish(Write(1, 1, "D", 60), mode="none")) == [(1, 1, "c", "C", "D")]


def test_a_repeated_change_has_the_same_id_whatever_was_before(lake: Lake) -> None:
    write = Write(1, 1, "a", 10)
    ids = [message["value"]["source"]["event_id"] for _ in range(2) for message in lake.publish(write)]
    assert ids == [write.digest.hex()] * 2


def test_where_a_partition_is_a_row_its_deletion_says_what_was_there(tmp_path: Path) -> None:
    lake = Lake(tmp_path, SIMPLE)
    row = change_rows([Write(1, 1, "a", 10)], SIMPLE)
    place = row.schema.get_field_index("clustering")
    lake.publish(row.set_column(place, row.schema.field(place), pa.array([bytes(4)], pa.binary())))
    assert told(lake.publish(Write(1, None, None, 20))) == [(1, None, "d", "a", None)]


def test_before_of_static_cells(tmp_path: Path) -> None:
    lake = Lake(tmp_path, WITH_STATIC)
    lake.reader = replace(lake.reader, mode="replica")

    def static(value: str, at: int) -> pa.RecordBatch:
        row = {**Write(1, None, None, at).row(WITH_STATIC, "node"), "kind": 1, "deletion": None}
        row["digest"] = at.to_bytes(16, "big")
        row["cells"] = [{"column": 0, "value": value.encode(), "timestamp": at, "kind": 1}]
        return pa.RecordBatch.from_pylist([row], schema=change_rows([], WITH_STATIC).schema)

    def insert(value: str, at: int) -> pa.RecordBatch:
        row = Write(1, 7, value, at).row(WITH_STATIC, "node")
        row["cells"][0]["column"] = 1
        return pa.RecordBatch.from_pylist([row], schema=change_rows([], WITH_STATIC).schema)

    (first,) = lake.publish(static("x", 10))
    assert (first["value"]["before"], first["value"]["after"]["s"]) == (None, "x")
    (row,) = lake.publish(insert("a", 20))
    assert (row["value"]["before"], row["value"]["after"]["s"]) == (None, "x")
    changed, row = lake.publish(static("y", 30), insert("b", 31))
    assert changed["value"]["before"] == {"id": 1, "seq": None, "s": "x", "v": None}
    assert row["value"]["before"] == {"id": 1, "seq": 7, "s": "x", "v": "a"}
    assert row["value"]["after"] == {"id": 1, "seq": 7, "s": "y", "v": "b"}


def test_deletions_of_partitions_and_ranges_are_expanded_behind_themselves(lake: Lake) -> None:
    lake.publish(*(Write(1, seq, f"{seq}", 10 + seq) for seq in range(6)), Write(2, 1, "other", 10))
    deletion = RangeDelete(1, 1, 5, 14)  # 1 to 4 were written at 11 to 14
    assert told(lake.publish(Write(1, 5, "five", 21))) == [(1, 5, "c", "5", "five")]
    messages = lake.publish(Write(1, 3, "three", 30), deletion)
    assert told(messages) == [
        (1, None, "d", None, None),
        (1, 3, "c", "3", "three"),
        *((1, seq, "d", f"{seq}", None) for seq in (1, 2, 4)),
    ]
    own, _, *expanded = (message["value"] for message in messages)
    ids = [value["source"]["event_id"] for value in expanded]
    assert len({own["source"]["event_id"], *ids}) == 4
    for value in expanded:
        assert value["range"] is None
        assert value["cells"]["_row"] == {"writetime": None, "expires_at": None, "deleted_at": 14}
        assert value["source"]["query"] is None
        same = ("hostname", "file", "pos", "ts_us", "token", "late")
        assert [value["source"][name] for name in same] == [own["source"][name] for name in same]
    assert told(lake.publish(Write(1, None, None, 25))) == [
        (1, None, "d", None, None),
        (1, 0, "d", "0", None),
        (1, 5, "d", "five", None),
    ]
    assert told(lake.publish(Write(1, None, None, 26), expand=False)) == [(1, None, "d", None, None)]
    assert told(lake.publish(Write(1, None, None, 40), expand=False)) == [(1, None, "d", None, None)]


def test_expanded_deletions_that_are_made_again_have_the_same_ids(lake: Lake) -> None:
    lake.publish(*(Write(1, seq, "x", 10) for seq in range(3)))
    made = [lake.make([RangeDelete(1, 0, 2, 20), Write(1, None, None, 15)])[1].part for _ in range(2)]
    ids = [[id_ for block in lake.stream.blocks("pass-000000000002", part) for id_ in block.event_ids] for part in made]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2 + 3


def test_what_cannot_be_expanded_is_refused_with_what_to_do(lake: Lake) -> None:
    lake.publish(Write(1, 1, "a", 10))
    with pytest.raises(UnreadRowsError, match=r"shop\.t: expand_deletions .* bootstrap it, or set sync\.tables"):
        lake.publish(RangeDelete(1, 0, 9, 20), replica=None)
    assert told(lake.publish(Write(1, 1, None, 20), replica=None)) == [(1, 1, "d", None, None)]


@pytest.mark.parametrize("seed", range(6))
def test_a_consumer_that_knows_only_keys_has_the_rows(lake: Lake, seed: int) -> None:
    rng = random.Random(seed)
    model, consumer = Model(), dict[tuple[int, int], str]()
    expanded = 0
    for number in range(1, 9):
        changes = [random_change(rng, number * 1000 + place) for place in rng.sample(range(1000), rng.randrange(1, 12))]
        model.changes += changes
        for message in lake.publish(*changes):
            id_, seq, _, before, after = told([message])[0]
            if seq is None:
                continue
            expanded += message["value"]["source"]["query"] is None
            assert consumer.get((id_, seq)) == before
            consumer.pop((id_, seq), None)
            if after is not None:
                consumer[id_, seq] = after
        assert consumer == model.rows()
    assert expanded


def random_change(rng: random.Random, at: int) -> Change:
    id_, seq = rng.randrange(3), rng.randrange(8)
    match rng.randrange(10):
        case 0:
            return Write(id_, None, None, at)
        case 1 | 2:
            return RangeDelete(id_, seq, seq + rng.randrange(1, 6), at)
        case 3:
            return Write(id_, seq, None, at)
    return Write(id_, seq, f"{at}", at)


class Model:
    """All changes there were: a row is the newest write that no later deletion covers."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def rows(self) -> dict[tuple[int, int], str]:
        found: dict[tuple[int, int], str] = {}
        for change in sorted(self.changes, key=lambda one: one.at):
            if isinstance(change, Write) and change.seq is not None and change.v is not None:
                found[change.id, change.seq] = change.v
            else:
                found = {key: v for key, v in found.items() if not covers(change, *key)}
        return found


def covers(deletion: Change, id_: int, seq: int) -> bool:
    if isinstance(deletion, RangeDelete):
        return deletion.id == id_ and deletion.start <= seq < deletion.end
    return deletion.id == id_ and deletion.seq in (None, seq)
