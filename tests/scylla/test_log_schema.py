"""The columns of a CDC log table are found as cdc/log.cc (add_columns_to_cdc_log) names them."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from ringsync.cql.types import Native, TupleType
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.scylla.log_schema import ATOMIC, FIELDS, MAP, SET, LogTableError, log_table_of, lowest_time

TYPES = """
    CREATE TYPE ks.u (a int, b text);
"""
BASE = """
    CREATE TABLE ks.t (pk1 int, pk2 int, ck1 int, ck2 int, v int, vs int static, s set<text>, m map<int, frozen<u>>,
        l list<frozen<set<int>>>, o u, f frozen<map<int, text>>, "Odd ""name" vector<float, 2>,
        PRIMARY KEY ((pk1, pk2), ck1, ck2)) WITH ID = 11111111-1111-1111-1111-111111111111;
"""
LOG = """
    CREATE TABLE ks.t_scylla_cdc_log ("cdc$stream_id" blob, "cdc$time" timeuuid, "cdc$batch_seq_no" int,
        "cdc$operation" tinyint, "cdc$ttl" bigint, "cdc$end_of_batch" boolean,
        pk1 int, pk2 int, ck1 int, ck2 int,
        v int, "cdc$deleted_v" boolean,
        vs int, "cdc$deleted_vs" boolean,
        s frozen<set<text>>, "cdc$deleted_s" boolean, "cdc$deleted_elements_s" frozen<set<text>>,
        m frozen<map<int, frozen<u>>>, "cdc$deleted_m" boolean, "cdc$deleted_elements_m" frozen<set<int>>,
        l frozen<map<timeuuid, frozen<set<int>>>>, "cdc$deleted_l" boolean,
            "cdc$deleted_elements_l" frozen<set<timeuuid>>,
        o frozen<u>, "cdc$deleted_o" boolean, "cdc$deleted_elements_o" frozen<set<smallint>>,
        f frozen<map<int, text>>, "cdc$deleted_f" boolean,
        "Odd ""name" vector<float, 2>, "cdc$deleted_Odd ""name" boolean,
        PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no"));
"""


def tables(base: str = BASE, log: str = LOG) -> tuple[TableSchema, TableSchema]:
    parsed = {table.name: table for table in parse_schema(TYPES + base + log, "test").tables}
    return parsed["t"], parsed["t_scylla_cdc_log"]


def without(table: TableSchema, *names: str) -> TableSchema:
    return replace(table, columns=tuple(column for column in table.columns if column.name not in names))


def test_columns_have_their_forms() -> None:
    table = log_table_of(*tables())
    forms = [(column.name, column.form, column.is_static) for column in table.columns]
    assert forms == [
        *(('Odd "name', ATOMIC, False), ("f", ATOMIC, False), ("v", ATOMIC, False), ("vs", ATOMIC, True)),
        *(("l", MAP, False), ("m", MAP, False), ("o", FIELDS, False), ("s", SET, False)),
    ]
    assert table.full_name == "ks.t_scylla_cdc_log"


def test_the_statement_names_each_column() -> None:
    base, log = tables(
        "CREATE TABLE ks.t (pk int, ck int, v int, s set<int>, PRIMARY KEY (pk, ck));",
        'CREATE TABLE ks.t_scylla_cdc_log ("cdc$stream_id" blob, "cdc$time" timeuuid, "cdc$batch_seq_no" int, '
        '"cdc$operation" tinyint, "cdc$ttl" bigint, "cdc$end_of_batch" boolean, pk int, ck int, v int, '
        '"cdc$deleted_v" boolean, s frozen<set<int>>, "cdc$deleted_s" boolean, "cdc$deleted_elements_s" '
        'frozen<set<int>>, PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no"));',
    )
    statement = (
        'SELECT "cdc$stream_id", "cdc$time", "cdc$batch_seq_no", "cdc$operation", "cdc$ttl", TTL("cdc$operation"), '
        '"cdc$end_of_batch", "pk", "ck", "v", "cdc$deleted_v", "s", "cdc$deleted_s", "cdc$deleted_elements_s" '
        'FROM "ks"."t_scylla_cdc_log" WHERE "cdc$stream_id" IN ? AND "cdc$time" >= ? AND "cdc$time" < ?'
    )
    assert log_table_of(base, log).select() == statement
    assert log_table_of(base, log).select(bypass_cache=True) == statement + " BYPASS CACHE"
    old = log_table_of(base, without(log, "cdc$end_of_batch"))
    assert not old.has_end_of_batch
    assert old.select() == statement.replace('"cdc$end_of_batch", ', "")


def test_a_column_that_the_log_does_not_have_is_a_problem() -> None:
    """As of a table WITH COMPACT STORAGE that has key columns only: of its one value nothing is logged."""
    base, log = tables()
    with pytest.raises(LogTableError, match='the log has no "s": what is written to it is not logged'):
        log_table_of(base, without(log, "s", "cdc$deleted_s", "cdc$deleted_elements_s"))


def test_a_dropped_column_is_read_as_long_as_the_log_has_it() -> None:
    base, log = tables()
    dropped = (
        DroppedColumn("o", "regular", TupleType((Native("int"), Native("text"))), 1),
        DroppedColumn("v", "regular", Native("int"), 1),
    )
    base = replace(without(base, "v", "o"), dropped=dropped)
    columns = {column.name: column for column in log_table_of(base, log).columns}
    assert columns["v"].number == 7
    assert columns["o"].form == FIELDS
    gone = without(log, "v", "cdc$deleted_v", "o", "cdc$deleted_o", "cdc$deleted_elements_o")
    assert {column.name for column in log_table_of(base, gone).columns} == columns.keys() - {"v", "o"}


def test_some_columns_of_the_base_table_suffice() -> None:
    base, log = tables()
    assert [column.name for column in log_table_of(base.only(["v"]), log).columns] == ["v"]


@pytest.mark.parametrize(
    ("gone", "added", "message"),
    [
        (("cdc$deleted_v",), None, 'the log lacks "cdc\\$deleted_v"'),
        (("cdc$deleted_elements_m",), None, 'the log lacks "cdc\\$deleted_elements_m"'),
        (("ck2",), None, 'the log lacks "ck2"'),
        (("cdc$ttl",), None, 'the log lacks "cdc\\$ttl"'),
        (("v",), Column("v", "regular", Native("text")), '"v" is text instead of int'),
        (("pk1",), Column("pk1", "regular", Native("blob")), '"pk1" is blob instead of int'),
        ((), Column("new", "regular", Native("int")), 'the log has "new", which belongs to no column'),
        ((), Column("cdc$deleted_x", "regular", Native("boolean")), 'the log has "cdc\\$deleted_x"'),
        (("cdc$batch_seq_no",), None, "its primary key is \\(cdc\\$stream_id, cdc\\$time\\) instead of"),
    ],
)
def test_a_log_that_does_not_fit_is_refused(gone: tuple[str, ...], added: Column | None, message: str) -> None:
    base, log = tables()
    log = without(log, *gone)
    if added:
        log = replace(log, columns=(*log.columns, added))
    with pytest.raises(LogTableError, match=f"the log table ks.t_scylla_cdc_log does not fit ks.t: .*{message}"):
        log_table_of(base, log)


def test_metadata_of_a_newer_scylla_is_left_alone() -> None:
    base, log = tables()
    newer = replace(log, columns=(*log.columns, Column("cdc$cause", "regular", Native("text"))))
    assert log_table_of(base, newer) == log_table_of(base, log)


@pytest.mark.parametrize("time_ms", [0, -1, 1, 1584969040910, 1606390225588, 4102444800000])
def test_the_lowest_timeuuid_of_a_millisecond(time_ms: int) -> None:
    uuid = UUID(bytes=lowest_time(time_ms))
    assert (uuid.time - 0x01B21DD213814000, uuid.version) == (time_ms * 10_000, 1)
    assert uuid.bytes[8:] == bytes([0x80] * 8)  # -128, the lowest signed byte


def test_timeuuids_have_an_end() -> None:
    for time_ms in (-(10**14), 10**15):
        with pytest.raises(ValueError, match="no time that a timeuuid can hold"):
            lowest_time(time_ms)
