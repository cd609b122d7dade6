"""Hypothesis strategies for mutations of made-up tables, with everything that servers seldom write."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.schema.from_cql import parse_schema
from tests.commitlog_model import cql_schema
from tests.commitlog_model.digest import digest
from tests.commitlog_model.murmur3 import token
from tests.commitlog_model.types import Table, Type
from tests.commitlog_model.write import LIVE_TIMESTAMP, UpdateWriter
from tests.formats.commitlog.comparable import Change

_VALUES = "a int, b blob, c boolean, d bigint, e uuid, l list<int>, m map<blob, int>, t set<blob>"
_MANY = ", ".join([*(f"v{i:02} int" for i in range(70)), "mm map<int, blob>"])
_DEEP = ", ".join(f"c{i:02} {'int' if i % 3 else 'blob'}" for i in range(34))
_DEEP_KEY = ", ".join(f"c{i:02}" for i in range(34))
SCHEMA = f"""
CREATE TABLE made.flat (p blob, {_VALUES}, PRIMARY KEY (p)) WITH ID = 00000001-0000-1000-8000-000000000001;
CREATE TABLE made.wide (p blob, c1 int, c2 blob, c3 uuid, s1 blob STATIC, s2 map<int, int> STATIC, {_VALUES},
    PRIMARY KEY (p, c1, c2, c3)) WITH ID = 00000002-0000-1000-8000-000000000002;
CREATE TABLE made.many (p blob, c int, {_MANY}, PRIMARY KEY (p, c)) WITH ID = 00000003-0000-1000-8000-000000000003;
CREATE TABLE made.deep (p blob, {_DEEP}, a int, PRIMARY KEY (p, {_DEEP_KEY}))
    WITH ID = 00000004-0000-1000-8000-000000000004;
"""

_TIMESTAMPS = st.one_of(
    st.sampled_from([0, -1, 1, LIVE_TIMESTAMP + 1, (1 << 63) - 1, 1442879999999999, 1442880000000000]),
    st.integers(-(1 << 63) + 1, (1 << 63) - 1),
    st.integers(1700000000000000, 1800000000000000),
)
_LOCAL_TIMES = st.one_of(st.sampled_from([0, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]), st.integers(0, (1 << 32) - 1))
_TTLS = st.integers(1, (1 << 31) - 1)
_BLOBS = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"\xff" * 300, bytes(17)]))


def tables() -> dict[str, Table]:
    """Return the model's tables, by name."""
    return {table.name: table for table in cql_schema.parse_schema(SCHEMA).values()}


def package_tables() -> LoggedTables:
    """Return the package's tables."""
    return logged_tables(parse_schema(SCHEMA, "synthetic").tables)


def _raw(kind: Type) -> st.SearchStrategy[bytes]:
    if kind.kind == "boolean":
        return st.sampled_from([b"\0", b"\1"])
    length = kind.fixed_length
    return _BLOBS if length is None else st.binary(min_size=length, max_size=length)


def _hex_or_empty(kind: Type) -> st.SearchStrategy[str]:
    return st.one_of(_raw(kind).map(bytes.hex), st.just(""))


@st.composite
def _cells(draw: Any, name: str, kind: Type, times: st.SearchStrategy[int], liveness: Change) -> list[Change]:
    """Generate the cells of one column."""
    paths: list[str | None] = [None]
    if kind.is_complex:
        path_type = Type("timeuuid") if kind.kind == "list" else kind.inner[0]
        found = draw(st.lists(_raw(path_type).map(bytes.hex), max_size=3, unique=True))
        paths = sorted(found)
    value_type = kind if not kind.is_complex else kind.inner[-1]
    cells = []
    for path in paths:
        cell: Change = {"column": name, "timestamp": draw(times)}
        if path is not None:
            cell["raw_path"] = path
        form = draw(st.integers(0, 3))
        if form == 0:
            cells.append(cell | {"deleted": True, "local_deletion_time": draw(_LOCAL_TIMES)})
            continue
        cell["raw"] = "" if kind.kind == "set" else draw(_hex_or_empty(value_type))
        if form == 1 and "ttl" in liveness:
            cell |= {key: liveness[key] for key in ("ttl", "expires_at")}
        elif form <= 2:
            cell |= {"ttl": draw(_TTLS), "expires_at": draw(_LOCAL_TIMES)}
        cells.append(cell)
    return cells


@st.composite
def _row(draw: Any, table: Table, kind: str) -> Change:
    row: Change = {"kind": kind}
    if kind == "row":
        row["raw_clustering"] = [draw(st.one_of(_hex_or_empty(one), st.none())) for _, one in table.clustering_types]
    liveness: Change = {}
    if kind == "row" and draw(st.booleans()):
        liveness = row["liveness"] = {"timestamp": draw(_TIMESTAMPS)}
        if draw(st.booleans()):
            liveness |= {"ttl": draw(_TTLS), "expires_at": draw(_LOCAL_TIMES)}
    if kind == "row" and draw(st.integers(0, 3)) == 0:
        row["deletion"] = draw(_deletions)
    times = st.one_of(_TIMESTAMPS, st.just(liveness["timestamp"])) if liveness else _TIMESTAMPS
    of_table = table.static if kind == "static" else table.regular
    names = draw(st.lists(st.sampled_from(sorted(of_table)), unique=True, max_size=70)) if of_table else []
    names.sort(key=lambda name: (table.types[name].is_complex, name.encode()))
    cells, deletions = [], []
    for name in names:
        cells += draw(_cells(name, table.types[name], times, liveness))
        if table.types[name].is_complex and draw(st.integers(0, 2)) == 0:
            deletions.append({"column": name, **draw(_deletions)})
    row |= {"cells": cells} if cells else {}
    return row | ({"complex_deletions": deletions} if deletions else {})


_deletions = st.builds(
    lambda timestamp, local_time: {"timestamp": timestamp, "local_deletion_time": local_time}, _TIMESTAMPS, _LOCAL_TIMES
)


@st.composite
def _range(draw: Any, table: Table, before: Change | None) -> Change:
    """Generate a range; it may begin at the end of the one before."""

    def bound() -> Change:
        types = table.clustering_types[: draw(st.integers(0, len(table.clustering)))]
        values = [draw(st.one_of(_hex_or_empty(one), st.none())) for _, one in types]
        return {"raw_clustering": values, "inclusive": draw(st.booleans())}

    start = bound()
    if before is not None and before["kind"] == "range_deletion" and draw(st.booleans()):
        end = before["range"]["end"]
        start = end | {"inclusive": not end["inclusive"]}
    return {"kind": "range_deletion", "deletion": draw(_deletions), "range": {"start": start, "end": bound()}}


@st.composite
def updates(draw: Any, only: str | None = None) -> tuple[list[Change], bytes]:
    """Generate the change rows of an update, and its bytes."""
    table = tables()[only or draw(st.sampled_from(["flat", "wide", "many", "deep"]))]
    key = draw(_BLOBS)
    changes: list[Change] = []
    if draw(st.integers(0, 3)) == 0:
        changes.append({"kind": "partition_deletion", "deletion": draw(_deletions)})
    if table.static and draw(st.booleans()):
        changes.append(draw(_row(table, "static")))
    for _ in range(draw(st.integers(0, 4))):
        is_range = bool(table.clustering) and draw(st.booleans())
        before = changes[-1] if changes else None
        changes.append(draw(_range(table, before) if is_range else _row(table, "row")))
    data = UpdateWriter(table, Random(draw(st.integers(0, 1 << 30)))).write(key, changes)
    common = {"table_id": table.id, "token": token(key), "raw_partition_key": key.hex()}
    found = [change | common for change in changes]
    return [change | {"digest": digest(change)} for change in found], data
