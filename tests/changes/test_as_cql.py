"""Tests of statements for lists and counters, whose cells CQL cannot name. Replays on servers prove the others."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.changes.schema import CHANGE_ROWS, LIVE, NO_EXPIRY, NO_TTL, RANGE_DELETION, TOMBSTONE
from ringsync.changes.text.assignments import are_prepended
from ringsync.changes.text.lists import Entry, ListEntries
from ringsync.changes.text.replay import CqlStatements
from ringsync.cql.cells import cells_of_values
from ringsync.cql.types import ListType, Native
from ringsync.formats.commitlog.reader import read_log
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, TableSchema
from tests.commitlogs.fixtures import fixture_named, unpacked

KEY = ("row", "l")


def entry(number: int, value: str, timestamp: int) -> Entry:
    path = uuid.uuid1(node=1, clock_seq=number).bytes[:8] + bytes([0x80 + number]) + bytes(7)
    return Entry(0, timestamp, NO_EXPIRY, NO_TTL, LIVE, path, value.encode())


def deleted(cell: Entry, timestamp: int) -> Entry:
    return dataclasses.replace(cell, value=None, timestamp=timestamp, local=timestamp, kind=TOMBSTONE)


def test_an_entry_that_goes_is_removed_by_its_value_and_those_like_it_come_back() -> None:
    lists = ListEntries()
    a, b, other = entry(1, "x", 10), entry(2, "x", 20), entry(3, "y", 20)
    assert lists.change(KEY, [a, b, other]).added == [a, b, other]
    change = lists.change(KEY, [deleted(a, 30)])
    assert change.removed == [(b"x", 30)]
    assert change.back == [b]
    assert not change.added


@pytest.mark.parametrize("nothing", [b"\xff\xff\xff\xff", b"\x02\0\0\0\xff\xff"], ids=["null", "malformed"])
@pytest.mark.parametrize("unsayable", ["clustering", "range_end"])
def test_a_range_whose_bound_is_no_value_is_not_said(unsayable: str, nothing: bytes) -> None:
    columns = Column("k", "partition_key", Native("int")), Column("c", "clustering", ListType(Native("int"), True))
    table = TableSchema("ks", "t", "0" * 32, columns)
    an_empty_list = b"\x04\0\0\0" + bytes(4)
    bounds = dict.fromkeys(("clustering", "range_end"), b"\x01\x00\x00\x00" + an_empty_list + b"\x01")
    bounds[unsayable] = b"\x01\0\0\0" + nothing + b"\x01"
    row = {"table_id": bytes(16), "partition_key": bytes((0, 0, 0, 1)), "kind": RANGE_DELETION, **bounds}
    row |= {"deletion": {"timestamp": 1, "local_deletion_time": 1}, "cells": [], "complex_deletions": []}
    statements = CqlStatements({table.table_id: table})
    said = list(statements.lines(pa.RecordBatch.from_pylist([{**row, "file": "log", "position": 1}], CHANGE_ROWS)))
    assert said[1:] == ["-- cannot be expressed in CQL: a row of ks.t whose key is no value of its type"]
    assert statements.omitted == 1


def test_an_entry_of_a_later_time_is_not_removed_with_those_like_it() -> None:
    lists = ListEntries()
    a, late = entry(1, "x", 10), entry(2, "x", 40)
    lists.change(KEY, [a, late])
    assert lists.change(KEY, [deleted(a, 30)]).back == []


def test_the_same_cell_again_and_an_older_one_change_nothing() -> None:
    lists = ListEntries()
    a = entry(1, "x", 10)
    lists.change(KEY, [a])
    for cell in (a, dataclasses.replace(a, timestamp=5), deleted(a, 9)):
        assert lists.change(KEY, [cell]) == lists.change("another list", [])


def test_a_deletion_that_comes_before_its_entry_wins() -> None:
    lists = ListEntries()
    a = entry(1, "x", 10)
    assert lists.change(KEY, [deleted(a, 30)]).unknown == 1
    assert not lists.change(KEY, [a]).added


@pytest.mark.parametrize(("text", "prepended"), [("2011-01-01", False), ("2009-01-01", True)])
def test_entries_with_times_before_2010_were_put_before_the_others(text: str, prepended: bool) -> None:
    years = int(text[:4]) - 1970
    ticks = 0x01B21DD213814000 + int(years * 365.2425 * 86400) * 10_000_000
    fields = (ticks & 0xFFFFFFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0xFFF | 0x1000, 0x80, 0, 1)
    assert are_prepended(cells_of_values([uuid.UUID(fields=fields).bytes])).tolist() == [prepended]


def test_a_log_that_is_read_twice_adds_to_lists_and_counters_once(tmp_path: Path) -> None:
    fixture = fixture_named("4.1-plain")
    tables = parse_schema(fixture.schema + fixture.dropped, "schema.cql").by_id()
    statements = CqlStatements(tables)
    logs = [(path.read_bytes(), path.name) for path in unpacked(fixture, tmp_path)]
    texts = []
    for _ in range(2):
        batches = [batch for log in logs for batch in read_log(*log, logged_tables(list(tables.values()))).batches]
        texts.append([line for batch in batches for line in statements.lines(batch.rows)])
    first, second = ([line for line in text if "UPDATE shop.counters SET" in line] for text in texts)
    assert len(first) > 5
    assert second == []
    first, second = ([line for line in text if "SET l = l +" in line or "SET l = l -" in line] for text in texts)
    assert len(first) > 3
    assert second == []
