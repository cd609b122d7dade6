"""Who takes the newest has what SELECT shows: late rows that deletions hide, deletions that spare rows, static columns.

Each statement is executed on a real node, and its change row published by a pass, in another order than it was written.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ringsync.changes.columns import columns_of
from ringsync.changes.schema import LIVE, PARTITION_DELETION, RANGE_DELETION, ROW, STATIC, TOMBSTONE
from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import close_all, connect
from ringsync.config import load_config
from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.ledger.staging import STAGED_ROWS
from ringsync.schema.table import TableSchema
from ringsync.steps.application import Application
from ringsync.steps.late.late_pass import LatePasses
from ringsync.streams.files import FileStream
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode
from tests.commitlog_model.murmur3 import token
from tests.newest_model import NewestModel, newest_differences
from tests.oracle import differences, source_rows
from tests.stream_model import StreamModel

pytestmark = pytest.mark.server

HOUR_AGO = int(time.time() - 3600) * 10**6
TABLES = {
    "t": "(id int, seq int, s text static, v text, w text, PRIMARY KEY (id, seq)) WITH cdc = true",
    "d": "(id int, seq int, s text static, v text, w text, PRIMARY KEY (id, seq)) "
    "WITH cdc = true AND CLUSTERING ORDER BY (seq DESC)",
    "p": "(id int, a text, b int, v text, w text, PRIMARY KEY (id, a, b)) WITH cdc = true",
    "single": "(id int PRIMARY KEY, v text, w text) WITH cdc = true",
}


@dataclass(frozen=True)
class Statement:
    """One statement.

    :ivar at: µs
    :ivar kind: of its change row
    :ivar clustering: values; of a range those that its bounds share
    :ivar bounds: of a range: the values (or None) of the next clustering column where it starts and ends, both included
    :ivar values: by column; None: its cell is deleted
    :ivar inserts: whether it writes the row's own liveness
    """

    at: int
    kind: int
    id: int
    clustering: tuple[Any, ...] = ()
    bounds: tuple[Any, Any] = (None, None)
    values: tuple[tuple[str, str | None], ...] = ()
    inserts: bool = False

    def cql(self, table: TableSchema) -> str:
        """What a client executes."""
        names = ["id", *(column.name for column in table.clustering)]
        where = [f"{name} = {value!r}" for name, value in zip(names, (self.id, *self.clustering), strict=False)]
        using = f"USING TIMESTAMP {self.at}"
        if self.kind == RANGE_DELETION:
            name = names[1 + len(self.clustering)]
            where += [
                f"{name} {sign} {value!r}"
                for sign, value in zip((">=", "<="), self.bounds, strict=True)
                if value is not None
            ]
        if self.kind in (PARTITION_DELETION, RANGE_DELETION) or (
            self.kind == ROW and not self.values and not self.inserts
        ):
            return f"DELETE FROM {table.full_name} {using} WHERE {' AND '.join(where)}"
        if self.inserts:
            written = {**dict(zip(names, (self.id, *self.clustering), strict=True)), **dict(self.values)}
            values = ", ".join(map(repr, written.values()))
            return f"INSERT INTO {table.full_name} ({', '.join(written)}) VALUES ({values}) {using}"
        sets = ", ".join(f"{name} = {'null' if value is None else repr(value)}" for name, value in self.values)
        return f"UPDATE {table.full_name} {using} SET {sets} WHERE {' AND '.join(where)}"

    def row(self, table: TableSchema) -> dict[str, Any]:
        """Its change row."""
        key = self.id.to_bytes(4, "big")
        numbers = {column.name: column.number for column in columns_of(table)}
        cells = [
            {"column": numbers[name], "timestamp": self.at}
            | (
                {"kind": TOMBSTONE, "local_deletion_time": self.at // 10**6}
                if value is None
                else {"kind": LIVE, "value": value.encode()}
            )
            for name, value in sorted(self.values, key=lambda one: numbers[one[0]])
        ]
        found = {
            **{"table_id": bytes.fromhex(table.table_id), "schema_version": 0, "token": token(key)},
            **{"partition_key": key, "kind": self.kind, "write_time": self.at, "cells": cells, "complex_deletions": []},
            **{"digest": hashlib.md5(repr(self).encode()).digest(), "file": "CommitLog-8-1.log", "node": "n"},
            "position": self.at % 10**6,
        }
        if self.kind == ROW:
            found["clustering"] = _clustering(self.clustering)
        if self.kind == RANGE_DELETION:
            bounds = self.bounds[::-1] if table.clustering[len(self.clustering)].descending else self.bounds
            sides = [self.clustering + (() if value is None else (value,)) for value in bounds]
            found["clustering"], found["range_end"] = (_clustering(side) + b"\1" for side in sides)
        if not cells and not self.inserts:
            found["deletion"] = {"timestamp": self.at, "local_deletion_time": self.at // 10**6}
        return found | ({"liveness": {"timestamp": self.at}} if self.inserts else {})


def _clustering(values: Sequence[Any]) -> bytes:
    parts = [value.encode() if isinstance(value, str) else value.to_bytes(4, "big") for value in values]
    return len(parts).to_bytes(4, "little") + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def change_rows(statements: Sequence[Statement], table: TableSchema) -> pa.RecordBatch:
    rows = sorted((one.row(table) for one in statements), key=lambda row: row["token"])
    return pa.RecordBatch.from_pylist(rows, schema=STAGED_ROWS)


def random_statement(random: Random, table: TableSchema, at: int) -> Statement:
    """A statement of any kind. Few keys, so that they meet."""
    pools = [["x", "y"] if str(column.type) == "text" else list(range(5)) for column in table.clustering]
    clustering = tuple(random.choice(pool) for pool in pools)
    values = tuple((name, f"{name}{at}") for name in random.sample(("v", "w"), random.choice((1, 2))))
    one = Statement(at, ROW, random.randrange(3), clustering)
    choice = random.random()
    if choice < 0.3:
        return replace(one, values=values, inserts=True)
    if choice < 0.5:
        return replace(one, values=values)
    if choice < 0.6:
        return replace(one, values=((random.choice("vw"), None),))
    if choice < 0.7:
        return one if table.clustering else replace(one, kind=PARTITION_DELETION)
    if choice < 0.8 and table.of_kind("static"):
        return replace(one, kind=STATIC, clustering=(), values=(("s", random.choice((None, f"s{at}"))),))
    if choice < 0.93 and table.clustering:
        length = random.randrange(len(clustering))
        ends = sorted(random.choices(pools[length], k=2))
        bounds = random.choice([(ends[0], ends[1]), (None, ends[1]), (ends[0], None)])
        return replace(one, kind=RANGE_DELETION, clustering=clustering[:length], bounds=bounds)
    return replace(one, kind=PARTITION_DELETION, clustering=())


@pytest.fixture(scope="module")
def tables(session: Any, keyspace: str) -> dict[str, TableSchema]:
    for name, columns in TABLES.items():
        session.execute(f"CREATE TABLE {keyspace}.{name} {columns}")
    return {name: read_table(session, keyspace, name) for name in TABLES}


@pytest.fixture(autouse=True)
def empty(session: Any, tables: dict[str, TableSchema]) -> None:
    for table in tables.values():
        session.execute(f"TRUNCATE {table.full_name}")


@pytest.fixture
def passes(cassandra: CassandraNode, tmp_path: Path) -> Iterator[LatePasses]:
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "lake"},
    }
    path = tmp_path / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    config = load_config(path)
    application = Application("out_of_sequence", str(path), config, store_of(config), None, "r", argparse.Namespace())
    with ControlServer() as control:
        yield LatePasses(application, connect(cluster_settings(config)), control.address)
    close_all()


def publish(passes: LatePasses, table: TableSchema, statements: Sequence[Statement]) -> None:
    """Make one pass of them."""
    version = passes.table(table.table_id)
    assert version is not None
    assert version.table == table
    passes.publish(table, change_rows(statements, table))


def messages(passes: LatePasses, table: TableSchema) -> list[dict[str, Any]]:
    stream = FileStream(passes._store, f"test.{table.keyspace}.{table.name}")
    for number in pass_numbers(passes._store, table.table_id):
        made = get_pass(passes._store, table.table_id, number)
        stream.publish(made.folder, made.parts)
    return [message for bucket in stream.folders() for message in stream.read(bucket)]


def judge(passes: LatePasses, session: Any, table: TableSchema) -> list[dict[str, Any]]:
    """Both kinds of consumers, and that no message is there twice; the messages."""
    said, now = messages(passes, table), int(time.time())
    source = source_rows(session, table, now)
    assert not newest_differences(source, NewestModel(table).apply_all(said).rows(now))
    assert not differences(source, StreamModel(table, True).apply_all(said).rows(now))
    ids = [one["value"]["source"]["event_id"] for one in said]
    assert len(ids) == len(set(ids))
    return said


def test_what_a_deletion_hides_is_not_there(passes: LatePasses, tables: Any, session: Any) -> None:
    """A late row that was deleted long ago; a late cell under a row that was deleted, and written again without it."""
    table, t = tables["t"], HOUR_AGO
    hidden = Statement(t, ROW, 11, (1,), values=(("v", "hidden"),), inserts=True)
    cell = Statement(t + 1, ROW, 11, (2,), values=(("v", "hidden"), ("w", "hidden")))
    before = [
        Statement(t + 5, PARTITION_DELETION, 11),
        Statement(t + 6, ROW, 11, (2,), values=(("w", "newer"),)),
    ]
    for one in (*before, hidden, cell):
        session.execute(one.cql(table))
    publish(passes, table, before)
    publish(passes, table, [hidden, cell])
    said = judge(passes, session, table)
    shown = {(one["key"]["seq"], one["value"]["source"]["ts_us"]): one["value"] for one in said}
    assert (shown[1, t]["op"], shown[1, t]["after"]) == ("d", None)
    assert (shown[2, t + 1]["after"]["v"], shown[2, t + 1]["after"]["w"]) == (None, "newer")


def test_what_a_late_deletion_spares_follows_it(passes: LatePasses, tables: Any, session: Any) -> None:
    table, t = tables["t"], HOUR_AGO
    rows = [Statement(t + seq, ROW, 12, (seq,), values=(("v", f"v{seq}"),), inserts=True) for seq in range(10)]
    static = Statement(t + 20, STATIC, 12, values=(("s", "static"),))
    late = [Statement(t + 3, RANGE_DELETION, 12, bounds=(2, 7)), Statement(t + 1, PARTITION_DELETION, 12)]
    for one in (*rows, static, *late):
        session.execute(one.cql(table))
    publish(passes, table, [*rows, static])
    publish(passes, table, late)
    said = judge(passes, session, table)
    spared = [one for one in said if one["value"]["source"]["query"] is None]
    assert {one["key"]["seq"] for one in spared} == {4, 5, 6, 7, 8, 9}
    assert all(one["value"]["after"]["s"] == "static" for one in spared)


def test_static_cells_survive_the_deletion_of_their_partition(passes: LatePasses, tables: Any, session: Any) -> None:
    table, t = tables["t"], HOUR_AGO
    static, deletion = Statement(t + 1, STATIC, 13, values=(("s", "left"),)), Statement(t, PARTITION_DELETION, 13)
    for one in (static, deletion):
        session.execute(one.cql(table))
    publish(passes, table, [static])
    publish(passes, table, [deletion])
    judge(passes, session, table)


def test_late_messages_have_the_whole_row(passes: LatePasses, tables: Any, session: Any) -> None:
    table, t = tables["t"], HOUR_AGO
    on_time = [
        Statement(t + 1, STATIC, 14, values=(("s", "static"),)),
        Statement(t + 2, ROW, 14, (1,), values=(("v", "v"),), inserts=True),
    ]
    late = Statement(t, ROW, 14, (1,), values=(("v", "older"), ("w", "w")))
    for one in (*on_time, late):
        session.execute(one.cql(table))
    publish(passes, table, on_time)
    publish(passes, table, [late])
    after = judge(passes, session, table)[-1]["value"]["after"]
    assert (after["s"], after["v"], after["w"]) == ("static", "v", "w")


def of_rows(*keys: Any, at: int, clustering: tuple[Any, ...] = ()) -> list[Statement]:
    inserts: Any = {"kind": ROW, "values": (("v", "x"),), "inserts": True}
    return [Statement(at + n, id=14, clustering=(*clustering, key), **inserts) for n, key in enumerate(keys)]


ALONE = Statement(HOUR_AGO + 100, PARTITION_DELETION, 14)
"""What only one replica has."""
NEWER = replace(ALONE, at=HOUR_AGO + 200, kind=STATIC, values=(("s", "newer"),))
DELETIONS = {
    "partition": ("t", of_rows(1, 2, at=HOUR_AGO), ALONE, True),
    "partition of newer rows": ("t", of_rows(1, 2, at=HOUR_AGO + 200), ALONE, False),
    "partition that is empty": ("t", [], ALONE, False),
    "static cell": ("t", [*of_rows(1, at=HOUR_AGO + 200), replace(NEWER, at=HOUR_AGO)], ALONE, True),
    "static cell that is newer": ("t", [*of_rows(1, at=HOUR_AGO + 200), NEWER], ALONE, False),
    "one of a row's cells": (
        "t",
        [*of_rows(1, at=HOUR_AGO + 200), Statement(HOUR_AGO, ROW, 14, (1,), values=(("w", "old"),))],
        ALONE,
        True,
    ),
    "row of keys only": ("t", [Statement(HOUR_AGO, ROW, 14, (1,), inserts=True)], ALONE, True),
    "range": ("d", of_rows(1, 5, at=HOUR_AGO), replace(ALONE, kind=RANGE_DELETION, bounds=(2, 7)), True),
    "range without rows": ("d", of_rows(1, 8, at=HOUR_AGO), replace(ALONE, kind=RANGE_DELETION, bounds=(2, 7)), False),
    "range of the second column": (
        "p",
        of_rows(1, 5, at=HOUR_AGO, clustering=("a",)),
        replace(ALONE, kind=RANGE_DELETION, clustering=("a",), bounds=(2, None)),
        True,
    ),
    "partition that is a row": ("single", [Statement(HOUR_AGO, ROW, 14, values=(("v", "x"),))], ALONE, True),
    "partition that is a newer row": (
        "single",
        [Statement(HOUR_AGO + 200, ROW, 14, values=(("v", "x"),))],
        ALONE,
        False,
    ),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_a_deletion_that_a_quorum_does_not_show_waits_for_a_replica_that_is_down(
    name: str, passes: LatePasses, tables: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies, which come later, would count as published, and its rows live for ever. Nothing waits with it."""
    where, before, alone, waits = DELETIONS[name]
    table, real, all_live = tables[where], passes._reader, [False]

    def reader(table: TableSchema) -> Any:
        found = real(table)
        vars(found.ring)["all_live"] = np.full(len(found.ring.hosts), all_live[0])
        return found

    monkeypatch.setattr(passes, "_reader", reader)
    others = [Statement(HOUR_AGO + 101, PARTITION_DELETION, 15)]
    if where == "t":
        others += [replace(one, at=HOUR_AGO + 300 + one.at % 10, clustering=(7,)) for one in of_rows(7, at=HOUR_AGO)]
    for one in (*before, *others):
        session.execute(one.cql(table))
    publish(passes, table, before)
    rows = change_rows([alone, *others], table)
    for _ in range(2):
        outcome = passes.publish(table, rows)
        assert rows["digest"].filter(pa.array(outcome.waiting)).to_pylist() == [alone.row(table)["digest"]] * waits
        if waits:
            judge(passes, session, table)
    session.execute(alone.cql(table))
    all_live[0] = True
    assert passes.publish(table, rows).published == waits
    judge(passes, session, table)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("late", [True, False], ids=["late", "on time"])
def test_whatever_is_written_and_in_whatever_order_it_is_published(
    name: str, late: bool, passes: LatePasses, tables: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not late:  # as of rows on which all replicas agree
        real = passes._reader
        monkeypatch.setattr(passes, "_reader", lambda table: replace(real(table), disagreed=False))
    table, random = tables[name], Random(f"{name} {late}")
    for _ in range(12):
        times = random.sample(range(HOUR_AGO, HOUR_AGO + 1000), random.randrange(1, 12))
        statements = [random_statement(random, table, at) for at in times]
        for one in statements:
            session.execute(one.cql(table))
        random.shuffle(statements)
        while statements:
            count = random.randrange(1, 6)
            publish(passes, table, statements[:count])
            statements = statements[count:]
    judge(passes, session, table)
