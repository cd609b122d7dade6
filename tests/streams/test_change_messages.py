"""Messages of changes, read by fastavro: whole ones, and what a consumer makes of a whole log's."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.avro.mapping import Mapping
from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import logged_tables
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import RANGE_DELETION, TOMBSTONE
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.from_changes import row_images_of
from ringsync.images.to_changes import change_rows_of
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from ringsync.streams.change_messages import change_messages
from ringsync.streams.messages import Messages, envelope_schema, key_schema
from tests.commitlog_model import cql_schema, replay, segment
from tests.commitlogs.fixtures import fixture_named, unpacked
from tests.cql.strategies import plain as arrow_plain
from tests.oracle import Rows, hashable, identity
from tests.reconciled import merged
from tests.stream_model import Raw, StreamModel
from tests.streams.change_images import decoded, images_of
from tests.streams.test_messages import SPELLED, number, read, spelled
from tests.streams.test_messages import images as image_batch

FIXTURE = fixture_named("5.0-v8-plain")
Change = dict[str, Any]


class Log:
    """The change rows of a real server's log, by table, as the package and as the model read them."""

    def __init__(self, folder: Path) -> None:
        text = FIXTURE.schema + FIXTURE.dropped
        self.tables = {table.full_name: table for table in parse_schema(text, "schema.cql").by_id().values()}
        known = cql_schema.parse_schema(text)
        self.models = {(table.keyspace, table.name): table for table in known.values()}
        logged = logged_tables(list(self.tables.values()))
        batches: list[pa.RecordBatch] = []
        self.changes: dict[str, list[Change]] = defaultdict(list)
        for path in unpacked(FIXTURE, folder):
            batches += [batch.rows for batch in read_log(path.read_bytes(), path.name, logged).batches]
            for change in segment.read_segment(path, known).changes:
                self.changes[change["table_id"].replace("-", "")].append(change)
        self.rows = pa.Table.from_batches(batches).combine_chunks()

    def of(self, table: TableSchema) -> tuple[pa.RecordBatch, list[Change]]:
        own = self.rows.filter(pa.compute.equal(self.rows["table_id"], bytes.fromhex(table.table_id)))
        (batch,) = own.to_batches()
        changes = self.changes[table.table_id]
        assert [one.hex() for one in batch["digest"].to_pylist()] == [change["digest"] for change in changes]
        return batch, changes


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("log"))


def messages_of(
    changes: ChangeRows,
    after: pa.RecordBatch,
    visible: list[bool],
    table: TableSchema,
    mapping: Mapping = "exact",
    **other: Any,
) -> Messages:
    hosts = pa.array([f"node{i % 3}" for i in range(len(changes))])
    arguments = {"hostnames": hosts, "processed_at_ms": 42, "schema_version": 3, **other}
    return change_messages(changes, after, np.array(visible, np.bool_), table, "demo", mapping, **arguments)


def decoded_messages(messages: Messages, table: TableSchema, mapping: Mapping = "exact") -> list[Change]:
    keys = read(key_schema(table, "demo", mapping), messages.keys)
    values = read(envelope_schema(table, "demo", mapping), messages.values)
    return [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]


def shown_row(state: replay.State, change: Change, model: Any) -> replay.Row | None:
    """What the model shows of a change's row, or of its partition's static cells."""
    wanted = change.get("raw_clustering", [])
    key = {(change["table_id"], change["raw_partition_key"]): state[change["table_id"], change["raw_partition_key"]]}
    for row in replay.rows(key, model, 0):
        if change["kind"] == "static":
            static = {name: cell for name, cell in row.items() if name in model.static}
            return {**{name: row[name] for name, _ in model.partition_key}, **static} if static else None
        found = [row[name].raw.hex() if name in row else None for name, *_ in model.clustering]  # type: ignore[union-attr]
        if found == wanted:
            return row
    return None


def whole_rows(changes: list[Change], table: TableSchema, model: Any) -> tuple[pa.RecordBatch, list[bool]]:
    """The whole row after each change, as SELECT shows it, and whether there is one."""
    state: replay.State = {}
    rows: list[replay.Row | None] = []
    for change in changes:
        for place, partition in replay.replay([change]).items():
            known = state.setdefault(place, replay.Partition())
            for name in ("deletions", "ranges", "static", "rows"):
                getattr(known, name).extend(getattr(partition, name))
        rows.append(shown_row(state, change, model) if change["kind"] in ("row", "static") else None)
    return images_of(table, [row or {} for row in rows]), [row is not None for row in rows]


def own_images(rows: ChangeRows, table: TableSchema) -> tuple[pa.RecordBatch, list[bool]]:
    """What each change alone says of its row, and whether that is more than that it was deleted."""
    of_rows, batch = rows.of_row, rows.to_arrow()
    places = pa.array(np.cumsum(of_rows) - 1, mask=~of_rows)
    parts = zip(*(batch[name].to_pylist() for name in ("cells", "complex_deletions", "liveness")), strict=True)
    return row_images_of(rows, table, "raw").take(places), [any(one) for one in parts]


def expected_rows(changes: list[Change], table: TableSchema, model: Any, now: int) -> Rows:
    """What the model replays, in the oracle's form."""
    rows = replay.rows(replay.replay(changes), model, now)
    columns = {}
    for column in table.columns:
        raws = [row[column.name].raw if column.name in row else None for row in rows]
        found_values, misfits = decoded(column, raws)
        plain = arrow_plain(found_values)
        columns[column.name] = [Raw(raw) if bad else one for raw, bad, one in zip(raws, misfits, plain, strict=True)]  # type: ignore[arg-type]
    found: Rows = {}
    for place, row in enumerate(rows):
        values = [(column, columns[column.name][place]) for column in table.key_columns]
        key = tuple(
            identity(column.type, value)
            if column.kind == "clustering" and not isinstance(value, Raw)
            else hashable(value)
            for column, value in values
        )
        found[key] = {
            column.name: (columns[column.name][place], row[column.name].writetime, row[column.name].expires_at)
            for column in table.value_columns
            if column.name in row
        }
    return found


def with_bits(value: Any) -> Any:
    """Floats as :func:`arrow_plain` has them."""
    if isinstance(value, float):
        return b"NaN" if math.isnan(value) else struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value)(map(with_bits, value))
    return value


def comparable(rows: Rows, table: TableSchema) -> dict[str, Any]:
    """Rows without the order of map entries and times of misfits and counters, each under its key's text."""
    found = {}
    for key, cells in rows.items():
        kept = {}
        for column in table.value_columns:
            if column.name in cells:
                value, *times = cells[column.name]
                kept[column.name] = (value, None) if isinstance(value, Raw) else (with_bits(value), times)
        found[repr(with_bits(key))] = kept
    return found


def interesting(log: Log) -> Iterator[tuple[TableSchema, Any]]:
    for name, table in log.tables.items():
        if name not in ("shop.filler", "shop.gone", "shop.nocdc"):
            yield table, log.models[table.keyspace, table.name]


@pytest.mark.parametrize("complete", [False, True])
def test_a_consumer_that_keeps_what_was_written_last_has_the_source_s_rows(log: Log, complete: bool) -> None:
    now = FIXTURE.selected["moment"]
    compared = 0
    for table, model in interesting(log):
        batch, changes = log.of(table)
        rows = ChangeRows.of(batch)
        if complete:
            after, visible = whole_rows(changes, table, model)
        else:
            rows = merge(rows, table)
            after, visible = own_images(rows, table)
        messages = messages_of(rows, after, visible, table)
        assert messages.event_ids.equals(rows.to_arrow()["digest"])
        found = StreamModel(table, complete).apply_all(decoded_messages(messages, table)).rows(now)
        mine, its = comparable(found, table), comparable(expected_rows(changes, table, model, now), table)
        assert mine.keys() == its.keys(), table.name
        for key in its:
            assert mine[key] == its[key], (table.name, key)
        compared += len(its)
    assert compared > 200


def test_what_messages_say_of_deletions_and_static_cells(log: Log) -> None:
    found = {}
    for name in ("shop.orders", "shop.wide"):
        table = log.tables[name]
        rows = merged(log.of(table)[0], table)
        queries = pa.array([f"query {i}" for i in range(len(rows))])
        messages = messages_of(rows, *own_images(rows, table), table, late=True, queries=queries)
        found[name] = decoded_messages(messages, table)
        for place, message in enumerate(found[name]):
            source = message["value"]["source"]
            assert (source["query"], source["late"], source["snapshot"]) == (f"query {place}", True, False)
            assert (source["hostname"], source["pos"]) == (f"node{place % 3}", rows.position[place])
            assert source["ts_ms"] == source["ts_us"] // 1000
            assert source["event_id"] == rows.digest[place].tobytes().hex()
    orders = [(message["key"]["id"], message["key"]["seq"], message["value"]) for message in found["shop.orders"]]

    # What was static cells is an own row, of which nothing but the partition's deletion is left.
    partition, static = [value for id_, seq, value in orders if (id_, seq) == (48, None)]
    for value in (partition, static):
        row = value["cells"].pop("_row")
        assert (value["op"], row["writetime"], row["deleted_at"]) == ("d", None, value["source"]["ts_us"])
        assert (value["after"], value["range"], set(value["cells"].values())) == (None, None, {None})

    (static,) = [value for id_, seq, value in orders if (id_, seq) == (5, None)]
    assert (static["op"], static["after"]["seq"], static["after"]["labels"]) == ("u", None, {"only": 1})
    (label,) = static["cells"]["labels"]["elements"]
    assert static["cells"]["labels"]["deleted_at"] == label["writetime"] - 1

    (changed,) = [value for id_, seq, value in orders if (id_, seq) == (1, 1)]
    assert changed["op"] == "c"
    live = [one for one in changed["cells"]["l"]["elements"] if one["writetime"] is not None]
    gone = [one for one in changed["cells"]["l"]["elements"] if one["writetime"] is None]
    assert len(live) == len(changed["after"]["l"])
    assert len({one["identity"] for one in live + gone} - {None}) == len(live + gone) > len(live)
    assert all(one["deleted_at"] for one in gone)
    assert changed["cells"]["w"]["deleted_at"] is not None
    assert changed["cells"]["w"]["writetime"] is None

    ranges = [m["value"]["range"] for m in found["shop.wide"] if m["key"]["p"] == "b" and m["value"]["range"]]
    nowhere = {"c": None, "d": None, "e": None, "_x": None}
    assert {
        "start": {"clustering": {**nowhere, "c": 6}, "columns": 1, "inclusive": True},
        "end": {"clustering": nowhere, "columns": 0, "inclusive": True},
    } in ranges


def test_classic_messages_of_changes_can_be_read(log: Log) -> None:
    table = log.tables["shop.orders"]
    rows = merged(log.of(table)[0], table)
    exact, classic = (
        decoded_messages(messages_of(rows, *own_images(rows, table), table, mapping), table, mapping)
        for mapping in ("exact", "classic")
    )
    assert [m["value"]["op"] for m in classic] == [m["value"]["op"] for m in exact]
    assert [m["value"]["cells"] for m in classic] == [m["value"]["cells"] for m in exact]


def test_the_key_of_a_change_is_that_of_the_row_whatever_their_spelling() -> None:
    """Changes, deleted elements and bounds of ranges, each spelled otherwise than the row."""
    names = [SPELLED.columns[place].name for place in (3, 4)]
    row = image_batch(SPELLED, spelled("1.0", "2.0", "30", "4.0"))
    made = change_rows_of(row, SPELLED).to_arrow()
    (change,) = made.to_pylist()
    other = change_rows_of(image_batch(SPELLED, spelled("1.0", "2.00", "3E+1", "4")), SPELLED).to_arrow().to_pylist()[0]
    gone = [
        cell | {"kind": TOMBSTONE, "value": None, "local_deletion_time": 1, "timestamp": 9} for cell in other["cells"]
    ]
    bound = other["clustering"] + b"\1"
    changes = pa.RecordBatch.from_pylist(
        [
            change,
            change | {"clustering": other["clustering"], "cells": gone},
            other | {"kind": RANGE_DELETION, "clustering": bound, "range_end": bound, "cells": [], "liveness": None},
        ],
        schema=made.schema,
    )
    after = pa.concat_batches([row] * 3)
    messages = decoded_messages(messages_of(ChangeRows.of(changes), after, [True] * 3, SPELLED), SPELLED)
    first, second, ranged = messages
    assert first["key"] == second["key"]
    clustering = {name: first["key"][name] for name in ("c", "t", "_x")}
    assert clustering == {"c": number(2, 0), "t": {"field_1": number(3, -1), "field_2": "x"}, "_x": None}
    assert ranged["value"]["range"]["start"]["clustering"] == clustering
    assert ranged["value"]["range"]["end"]["clustering"] == clustering
    assert second["value"]["after"]["c"] == number(20, 1)
    for name in names:
        elements = second["value"]["cells"][name]["elements"]
        assert [one["identity"] for one in elements] == [number(4, 0)] * 2
        assert [one["deleted_at"] for one in elements] == [None, 9]
