"""Tests of reconciliation with generated change rows, full of ties, against the plain-Python model."""

from __future__ import annotations

import hashlib
import random
import struct
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.changes.columns import columns_of, logged_tables
from ringsync.changes.schema import (
    CHANGE_ROWS,
    EXPIRING,
    LIVE,
    PARTITION_DELETION,
    RANGE_DELETION,
    ROW,
    STATIC,
    TOMBSTONE,
)
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from tests.commitlog_model import cql_schema
from tests.commitlog_model.replay import replay, rows
from tests.formats.commitlog.comparable import of_package
from tests.reconciled import merged_batch

SCHEMA = """
CREATE TABLE k.t (p int, c decimal, d text, s text static, m map<int, text>, n set<text>, v text, w int,
    PRIMARY KEY (p, c, d)) WITH ID = 11111111-1111-1111-1111-111111111111 AND CLUSTERING ORDER BY (c DESC, d ASC);
ALTER TABLE k.t DROP w USING TIMESTAMP 3;
ALTER TABLE k.t ADD w int;
CREATE TABLE k.c (p int, c int, a counter, b counter, PRIMARY KEY (p, c))
    WITH ID = 22222222-2222-2222-2222-222222222222;
"""
TABLES = {table.name: table for table in parse_schema(SCHEMA, "schema.cql").tables}
MODELS = {table.name: table for table in cql_schema.parse_schema(SCHEMA).values()}
NUMBERS = {name: {c.name: c.number for c in columns_of(table)} for name, table in TABLES.items()}
WITH_NODE = CHANGE_ROWS.append(pa.field("node", pa.string()))
SOURCE = ("digest", "schema_version", "file", "position", "node")

MOMENTS = st.integers(0, 7)
SECONDS = st.integers(0, 3)
DELETIONS = st.fixed_dictionaries({"timestamp": MOMENTS, "local_deletion_time": SECONDS})
ONE, ONE_POINT_NOUGHT, TWO = b"\0\0\0\0\1", b"\0\0\0\1\x0a", b"\0\0\0\0\2"
FIRST, SECOND = [ONE, ONE_POINT_NOUGHT, TWO], [b"", b"a", b"b"]


def clustering(values: list[bytes], *inclusive: bool) -> bytes:
    return struct.pack("<i", len(values)) + b"".join(struct.pack("<i", len(v)) + v for v in values) + bytes(inclusive)


@st.composite
def cells(draw: st.DrawFn, table: str, name: str) -> dict[str, Any]:
    path = None
    value = draw(st.sampled_from([b"", b"x", b"y", b"yy"]))
    if name == "m":
        path = struct.pack(">i", draw(st.integers(-1, 1)))
    elif name == "n":
        path, value = draw(st.sampled_from([b"", b"e", b"f"])), b""
    elif name == "w":
        value = struct.pack(">i", draw(st.integers(-1, 1)))
    kind = draw(st.sampled_from([LIVE, EXPIRING, TOMBSTONE]))
    return {
        "column": NUMBERS[table][name],
        "path": path,
        "value": None if kind == TOMBSTONE else value,
        "timestamp": draw(MOMENTS),
        "ttl": draw(st.integers(1, 2)) if kind == EXPIRING else None,
        "local_deletion_time": None if kind == LIVE else draw(SECONDS),
        "kind": kind,
    }


@st.composite
def counter_cells(draw: st.DrawFn) -> dict[str, Any]:
    """Generate contexts of global and remote shards. Local ones are not idempotent in Cassandra either."""
    ids = sorted(draw(st.sets(st.integers(0, 3), max_size=3)))
    shards, header = b"", b""
    for place, one in enumerate(ids):
        clock = draw(st.integers(1, 3))
        shards += bytes([one]) * 16 + struct.pack(">qq", clock, 10 * clock + draw(st.integers(0, 1)))
        if draw(st.booleans()):
            header += struct.pack(">H", 0x8000 | place)
    value = struct.pack(">h", len(header) // 2) + header + shards
    return {
        "column": draw(st.sampled_from([*NUMBERS["c"].values()])),
        "path": None,
        "value": value,
        "timestamp": draw(MOMENTS),
        "ttl": None,
        "local_deletion_time": None,
        "kind": LIVE,
    }


def unique(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep one cell per column and path, as in all change rows."""
    return [*{(cell["column"], cell["path"]): cell for cell in found}.values()]


@st.composite
def change_rows(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from([ROW, ROW, ROW, STATIC, RANGE_DELETION, PARTITION_DELETION]))
    row: dict[str, Any] = {"kind": kind, "cells": [], "complex_deletions": []}
    if kind == ROW:
        row["clustering"] = clustering([draw(st.sampled_from(FIRST)), draw(st.sampled_from(SECOND))])
        names = st.sampled_from(["m", "m", "n", "v", "w"])
        row["cells"] = unique(draw(st.lists(names.flatmap(lambda name: cells("t", name)), max_size=4)))
        if draw(st.booleans()):
            ttl = draw(st.sampled_from([None, 1, 2, 2**31 - 1]))
            expires = None if ttl is None else draw(SECONDS)
            row["liveness"] = {"timestamp": draw(MOMENTS), "ttl": ttl, "expires_at": expires}
        row["deletion"] = draw(st.one_of(st.none(), DELETIONS))
        columns = draw(st.sets(st.sampled_from(["m", "n"])))
        row["complex_deletions"] = [{"column": NUMBERS["t"][name], **draw(DELETIONS)} for name in sorted(columns)]
    elif kind == STATIC:
        row["cells"] = draw(st.lists(cells("t", "s"), max_size=1))
    else:
        row["deletion"] = draw(DELETIONS)
    if kind == RANGE_DELETION:
        for side in ("clustering", "range_end"):
            bound = [draw(st.sampled_from(FIRST)), draw(st.sampled_from(SECOND))][: draw(st.integers(0, 2))]
            row[side] = clustering(bound, draw(st.booleans()))
    return row


@st.composite
def counter_rows(draw: st.DrawFn) -> dict[str, Any]:
    cells = unique(draw(st.lists(counter_cells(), max_size=3)))
    place = clustering([struct.pack(">i", draw(st.integers(0, 1)))])
    return {"kind": ROW, "clustering": place, "cells": cells, "complex_deletions": []}


def batch_of(found: list[dict[str, Any]], table: TableSchema) -> pa.RecordBatch:
    """Make change rows with plausible tokens, times, digests and sources."""
    whole = []
    for number, row in enumerate(found):
        times = [part["timestamp"] for part in [*row["cells"], *row["complex_deletions"]]]
        times += [row[name]["timestamp"] for name in ("liveness", "deletion") if row.get(name)]
        key = struct.pack(">i", row.get("p", 0))
        whole.append(
            {
                "table_id": bytes.fromhex(table.table_id),
                "schema_version": 0,
                # Two keys may have one token.
                "token": row.get("p", 0) // 2,
                "partition_key": key,
                "write_time": max(times, default=-(2**63)),
                "digest": hashlib.md5(repr((key, sorted(row.items()))).encode()).digest(),
                "file": f"log {number % 2}",
                "position": number // 3,
                "node": f"node {number}",
                **{name: value for name, value in row.items() if name != "p"},
            }
        )
    return pa.RecordBatch.from_pylist(whole, WITH_NODE)


def shown(batch: pa.RecordBatch, name: str, now: int) -> list[Any]:
    """Return what SELECT shows; equal decimals count as one."""
    found = rows(replay(of_package([SimpleNamespace(rows=batch)], logged_tables([TABLES[name]]))), MODELS[name], now)  # type: ignore[list-item]
    lines = []
    for row in found:
        line: dict[str, Any] = dict(row)
        if name == "t" and "c" in row:
            line["c"] = Decimal(str(row["c"].value)).normalize()
        lines.append(line)
    return sorted(lines, key=repr)


def in_partitions(found: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    placed = st.builds(lambda p, row: {**row, "p": p}, st.integers(0, 2), found)
    return st.lists(placed, max_size=14)


def check(name: str, found: list[dict[str, Any]], copies: list[int], cut: int) -> None:
    table = TABLES[name]
    own = batch_of(found, table)
    whole = merged_batch(own, table)
    whole.validate(full=True)
    for now in (0, 2, 10):
        assert shown(whole, name, now) == shown(own, name, now)
    places = [place for place in copies if place < len(own)]
    mixed = own.take(pa.array([*places, *sorted(set(range(len(own))) - set(places))], pa.int32()))
    assert merged_batch(mixed, table).equals(whole)
    parts = [merged_batch(part, table) for part in (mixed.slice(0, cut), mixed.slice(cut))]
    again = merged_batch(pa.Table.from_batches(parts).combine_chunks().to_batches()[0], table) if len(own) else whole
    assert again.drop_columns(SOURCE).equals(whole.drop_columns(SOURCE))
    assert merged_batch(whole, table).equals(whole)


@settings(max_examples=70, deadline=None)
@given(in_partitions(change_rows()), st.lists(st.integers(0, 13), max_size=20), st.integers(0, 20))
def test_rows_ranges_collections_and_dropped_columns(found: list[dict[str, Any]], copies: list[int], cut: int) -> None:
    check("t", found, copies, cut)


@settings(max_examples=50, deadline=None)
@given(in_partitions(counter_rows()), st.lists(st.integers(0, 13), max_size=20), st.integers(0, 20))
def test_counters(found: list[dict[str, Any]], copies: list[int], cut: int) -> None:
    check("c", found, copies, cut)


def test_a_wide_partition_with_a_large_map_is_sorted() -> None:
    chance = random.Random(1)
    keys = chance.sample(range(-3000, 3000), 3000)
    entry = {"column": NUMBERS["t"]["m"], "value": b"x", "ttl": None, "local_deletion_time": None, "kind": LIVE}
    large = [{**entry, "path": struct.pack(">i", key), "timestamp": abs(key)} for key in keys]
    found: list[dict[str, Any]] = [
        {"kind": ROW, "clustering": clustering([ONE, f"{key}".encode()]), "cells": [], "complex_deletions": []}
        for key in keys
    ]
    found += [{**found[0], "cells": large[:2000]}, {**found[0], "cells": large[1000:]}]
    merged = merged_batch(batch_of(found, TABLES["t"]), TABLES["t"]).to_pylist()
    texts = [row["clustering"][17:] for row in merged]
    assert texts == sorted(f"{key}".encode() for key in keys)
    (cells_of_row,) = [row["cells"] for row in merged if row["cells"]]
    assert [struct.unpack(">i", cell["path"])[0] for cell in cells_of_row] == sorted(keys)
