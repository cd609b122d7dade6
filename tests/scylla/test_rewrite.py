"""What the stand-in makes of statements."""

from __future__ import annotations

import struct

import pytest

from tests.scylla_server.ddl import comment_with, comment_without, extension, keyspace_statement, table_statement
from tests.scylla_server.frames import BatchPart, Refusal, join_batch, join_text, split_batch, split_text
from tests.scylla_server.log_table import log_columns
from tests.scylla_server.rewrite import Rules, rewrite
from tests.scylla_server.tokens import without_literals

TYPES = {"l": "list<int>", "f": "frozen<list<int>>", "v": "int", "u": "udt:address"}


def rules(element_times: bool = False, lwt: bool = False) -> Rules:
    return Rules("sim_schema", element_times, lwt, lambda k, t, c: TYPES.get(c), lambda keyspace: keyspace == "tab")


@pytest.mark.parametrize(
    ("cql", "expected"),
    [
        ("SELECT time FROM system_distributed.cdc_generation_timestamps", "sim_distributed.cdc_generation_timestamps"),
        ("SELECT * FROM System . cdc_local", "sim_system . cdc_local"),
        ('SELECT * FROM "system"."cdc_streams"', 'sim_system."cdc_streams"'),
        ("SELECT id FROM system_schema.tables", "FROM sim_schema.tables"),
        ("SELECT id FROM system_schema.views", "FROM system_schema.views"),
        ("SELECT release_version FROM system.local", "SELECT (text)'3.0.8' AS release_version FROM system.local"),
        ("INSERT INTO k.t (a) VALUES ('system.cdc_local') -- system.cdc_x", "('system.cdc_local') -- system.cdc_x"),
        ("SELECT a FROM k.t WHERE p = 1 BYPASS CACHE", "WHERE p = 1 "),
        ("SELECT a FROM k.t USING TIMEOUT 5s", "FROM k.t "),
        ("INSERT INTO k.t (a) VALUES (1) USING TTL 5 AND TIMEOUT 5s", "USING TTL 5 "),
        ("INSERT INTO k.t (a) VALUES (1) USING TIMEOUT 5s AND TTL 5", "USING  TTL 5"),
        ("SELECT writetime(v), ttl(f) FROM k.t", "SELECT writetime(v), ttl(f) FROM k.t"),
        ("UPDATE vnodes.t SET a = 1 WHERE p = 1 IF a = 2", "IF a = 2"),
    ],
)
def test_statements(cql: str, expected: str) -> None:
    assert rewrite(cql, rules()).endswith(expected)


@pytest.mark.parametrize(
    ("cql", "reason"),
    [
        ("SELECT * FROM system.peers_v2", "unconfigured table peers_v2"),
        ("SELECT name FROM system_views.settings", "system_views"),
        ("SELECT id, cdc FROM system_schema.tables", "Unrecognized name cdc"),
        ("SELECT WRITETIME(l) FROM k.t", "collections"),
        ("SELECT v, ttl(u) FROM k.t", "collections"),
        ("UPDATE tab.t SET a = 1 WHERE p = 1 IF a = 2", "LWT"),
        ("INSERT INTO tab.t (a) VALUES (1) IF NOT EXISTS", "LWT"),
        ("DELETE FROM tab.t WHERE p = 1 IF EXISTS", "LWT"),
    ],
)
def test_refusals(cql: str, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        rewrite(cql, rules())


def test_what_newer_servers_allow() -> None:
    for cql in ("SELECT WRITETIME(l) FROM k.t", "UPDATE tab.t SET a = 1 WHERE p = 1 IF a = 2"):
        assert rewrite(cql, rules(element_times=True, lwt=True)) == cql


def test_cdc_of_a_table() -> None:
    statement = table_statement(
        "CREATE TABLE IF NOT EXISTS k.\"T\" (a int, PRIMARY KEY (a)) WITH cdc = {'enabled': true, 'ttl': 5} "
        "AND gc_grace_seconds = 3;"
    )
    assert statement is not None
    assert (statement.verb, statement.keyspace, statement.table) == ("create", "k", "T")
    assert statement.cdc == {"enabled": "true", "ttl": "5"}
    assert statement.with_comment("it's").endswith("PRIMARY KEY (a)) WITH gc_grace_seconds = 3 AND comment = 'it''s'")
    alter = table_statement("ALTER TABLE k.t WITH cdc = {'enabled': 'true'}")
    assert alter is not None
    assert alter.with_comment("x") == "ALTER TABLE k.t WITH comment = 'x'"
    assert table_statement("SELECT a FROM k.t") is None
    for wrong in ("true", "{'on': true}", "{'preimage': 'half'}", "{'ttl': -1}"):
        with pytest.raises(Refusal):
            table_statement(f"ALTER TABLE k.t WITH cdc = {wrong}")


def test_tablets_of_a_keyspace() -> None:
    text = "CREATE KEYSPACE IF NOT EXISTS \"k\" WITH replication = {'class': 'NetworkTopologyStrategy', 'd': '1'}"
    statement = keyspace_statement(f"{text} AND tablets = {{'enabled': false}}")
    assert statement is not None
    assert (statement.cql.strip(), statement.keyspace, statement.tablets) == (text, "k", False)
    plain = keyspace_statement(text)
    assert plain is not None
    assert plain.tablets is None
    assert plain.is_network_topology


def test_the_bytes_of_an_extension() -> None:
    assert extension({"ttl": "7"}) == b"\1\0\0\0" + b"\3\0\0\0ttl" + b"\1\0\0\0" + b"7"
    own, options = comment_without(comment_with({"ttl": "7"}, "mine"))
    assert own == "mine"
    assert options is not None
    assert options["ttl"] == "7"
    assert comment_without("mine") == ("mine", None)


class Column:
    def __init__(self, column_name: str, kind: str, type: str) -> None:
        self.column_name, self.kind, self.type = column_name, kind, type


def test_columns_of_a_log() -> None:
    """By the documents, one column of each kind."""
    found = log_columns(
        [
            Column("p", "partition_key", "int"),
            Column("s", "static", "text"),
            Column("f", "regular", "frozen<list<int>>"),
            Column("l", "regular", "list<frozen<map<int, int>>>"),
            Column("m", "regular", "map<frozen<tuple<int, int>>, text>"),
            Column("u", "regular", "address"),
            Column("z", "regular", "set<uuid>"),
            Column("e", "regular", "vector<float, 3>"),
        ]
    )
    fixed = {name: found.pop(name) for name in list(found) if name in ("cdc$time", "cdc$ttl", "cdc$end_of_batch")}
    assert fixed == {"cdc$time": "timeuuid", "cdc$ttl": "bigint", "cdc$end_of_batch": "boolean"}
    for name in ("cdc$stream_id", "cdc$batch_seq_no", "cdc$operation"):
        del found[name]
    deleted = {f"cdc$deleted_{name}": "boolean" for name in "sflmuze"}
    assert found == {
        **deleted,
        "p": "int",
        "s": "text",
        "f": "frozen<list<int>>",
        "l": "frozen<map<timeuuid, frozen<map<int, int>>>>",
        "cdc$deleted_elements_l": "frozen<set<timeuuid>>",
        "m": "frozen<map<frozen<tuple<int, int>>, text>>",
        "cdc$deleted_elements_m": "frozen<set<frozen<tuple<int, int>>>>",
        "u": "frozen<address>",
        "cdc$deleted_elements_u": "frozen<set<smallint>>",
        "z": "frozen<set<uuid>>",
        "cdc$deleted_elements_z": "frozen<set<uuid>>",
        "e": "vector<float, 3>",
    }


def test_texts_and_batches_come_back() -> None:
    assert split_text(join_text("größer", b"rest")) == ("größer", b"rest")
    values = struct.pack(">H", 2) + struct.pack(">i", 3) + b"abc" + struct.pack(">i", -1)
    parts = [BatchPart("UPDATE …", b"", values), BatchPart(None, b"id", struct.pack(">H", 0))]
    body = join_batch(b"\1", parts, b"end")
    assert split_batch(body) == (b"\1", parts, b"end")


def test_statements_that_differ_in_values_are_one() -> None:
    one, other = "SELECT a FROM t WHERE k = 'x''y' AND i IN (1, 0xab)", "SELECT a  FROM t WHERE k = '' AND i IN (7, 0x)"
    assert without_literals(one) == without_literals(other) == "SELECT a FROM t WHERE k = ? AND i IN (?, ?)"
