"""Tables of every kind, for tests that compare what a server says about them in different ways."""

from __future__ import annotations

EVERY_VERSION = """
CREATE TYPE {ks}.inner (x int, tags frozen<list<text>>)
CREATE TYPE {ks}."Outer" (inside frozen<inner>, "Num""ber" varint, "select" text)
CREATE TABLE {ks}.everything (b int, a text, c timestamp, d uuid, s_two text static, s_one set<int> static, \
"Mixed ""Case" text, zebra frozen<list<frozen<"Outer">>>, apple map<text, frozen<inner>>, bare inner, \
pair tuple<int, frozen<"Outer">>, nested frozen<map<frozen<set<int>>, list<decimal>>>, "select" text, static int, \
key frozen<"Outer">, PRIMARY KEY ((b, a), d, c)) WITH CLUSTERING ORDER BY (d DESC, c ASC) AND cdc = true \
AND comment = 'it''s -- a /* comment; $$ CREATE TABLE x.y (a int)'
CREATE TABLE {ks}.changed (k int, c int, s int static, v int, m map<text, int>, l list<int>, u frozen<inner>, \
lu list<frozen<"Outer">>, "Odd Name" text, again text, ss set<text> static, kept int static, PRIMARY KEY (k, c)) \
WITH CLUSTERING ORDER BY (c DESC)
ALTER TABLE {ks}.changed DROP v
ALTER TABLE {ks}.changed DROP m
ALTER TABLE {ks}.changed DROP s USING TIMESTAMP 1700000000123456
ALTER TABLE {ks}.changed DROP (l, u)
ALTER TABLE {ks}.changed DROP lu
ALTER TABLE {ks}.changed DROP "Odd Name"
ALTER TABLE {ks}.changed DROP again
ALTER TABLE {ks}.changed ADD again text
ALTER TABLE {ks}.changed DROP ss USING TIMESTAMP -5000
ALTER TABLE {ks}.changed ADD ss set<text> static
ALTER TABLE {ks}.changed ADD added int
CREATE TABLE {ks}.shrunk (id int PRIMARY KEY, a int, b text, c list<int>)
ALTER TABLE {ks}.shrunk DROP b
ALTER TABLE {ks}.shrunk DROP a
ALTER TABLE {ks}.shrunk DROP c
CREATE TABLE {ks}.hits (page text PRIMARY KEY, n counter)
CREATE TABLE {ks}."Orders" (id int PRIMARY KEY)
CREATE TABLE {ks}.renamed (id int, c int, v list<int>, PRIMARY KEY (id, c))
ALTER TABLE {ks}.renamed RENAME id TO "Identity" AND c TO position
CREATE TABLE {ks}.classes (id 'org.apache.cassandra.db.marshal.LexicalUUIDType', \
c 'org.apache.cassandra.db.marshal.DateType', e 'org.apache.cassandra.db.marshal.EmptyType', \
v 'org.apache.cassandra.db.marshal.BytesType', \
d 'org.apache.cassandra.db.marshal.DynamicCompositeType(a=>org.apache.cassandra.db.marshal.BytesType)', \
t 'org.apache.cassandra.db.marshal.CompositeType(org.apache.cassandra.db.marshal.Int32Type,\
org.apache.cassandra.db.marshal.UTF8Type)', PRIMARY KEY (id, c)) WITH CLUSTERING ORDER BY (c DESC)
CREATE TABLE {ks}.scalars (a ascii, b bigint, c blob, d boolean, e date, f decimal, g double, h duration, i float, \
j inet, k int PRIMARY KEY, l smallint, m text, n time, o timestamp, p timeuuid, q tinyint, r uuid, s varchar, t varint)
CREATE TABLE {ks}.compact (id int, c int, v int, PRIMARY KEY (id, c)) WITH COMPACT STORAGE
CREATE TABLE {ks}.compact_static (id int PRIMARY KEY, v int, w text) WITH COMPACT STORAGE
CREATE TABLE {ks}.compact_keys (id int, c int, d int, PRIMARY KEY (id, c, d)) WITH COMPACT STORAGE
CREATE TABLE {ks}.indexed (id int PRIMARY KEY, v text, s list<text>)
CREATE INDEX ON {ks}.indexed (v)
CREATE INDEX "By_Value" ON {ks}.indexed (values(s))
"""

VERSION_5 = """
CREATE TABLE {ks}.vectors (id int PRIMARY KEY, v vector<float, 3>, w vector<frozen<tuple<int, text>>, 2>, \
x list<frozen<vector<text, 2>>>, y vector<frozen<inner>, 2>)
ALTER TABLE {ks}.vectors DROP x
ALTER TABLE {ks}.vectors DROP y
CREATE INDEX ON {ks}.vectors (v) USING 'sai'
"""

WITH_OPTIONS = """
CREATE FUNCTION {ks}.first_body (a int) RETURNS NULL ON NULL INPUT RETURNS int LANGUAGE java \
AS $$ return a; /* CREATE TABLE nope.nope (a int primary key); ' */ $$
CREATE FUNCTION {ks}.second_body (state int, a int) CALLED ON NULL INPUT RETURNS int LANGUAGE java \
AS 'return a; // it''s; CREATE TABLE nope.nope (a int)'
CREATE AGGREGATE {ks}.last_of (int) SFUNC second_body STYPE int INITCOND 0
CREATE MATERIALIZED VIEW {ks}.by_select AS SELECT b, a, d, c, "select", apple FROM {ks}.everything WHERE b IS NOT NULL \
AND a IS NOT NULL AND d IS NOT NULL AND c IS NOT NULL AND "select" IS NOT NULL PRIMARY KEY ((a, b), "select", d, c) \
WITH comment = 'v; CREATE TABLE'
CREATE MATERIALIZED VIEW {ks}.all_indexed AS SELECT * FROM {ks}.indexed WHERE id IS NOT NULL AND v IS NOT NULL \
PRIMARY KEY (v, id) WITH CLUSTERING ORDER BY (id DESC)
"""
"""What a node allows only with functions and materialised views switched on."""

WITH_OPTIONS_5 = """
CREATE TABLE {ks}.masked (id int PRIMARY KEY, t int MASKED WITH DEFAULT, p text MASKED WITH mask_inner(1, null))
"""
"""… and with data masking."""


def statements(text: str, keyspace: str) -> list[str]:
    """The statements of one of these texts."""
    return [line.replace("{ks}", keyspace) for line in text.strip().splitlines()]
