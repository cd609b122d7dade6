"""What is written into the committed commit logs: every type, every kind of statement, always in the same order.

`schema.py` has the tables, `make.py` executes the statements on real servers.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.commitlogs import values
from tests.commitlogs.schema import MANY, ODD_COLUMN, QUOTED, creation
from tests.commitlogs.values import YEAR

FAR_TTL = 20 * YEAR
"""Ends after 2038-01-19, which only 5.0 in mode NONE accepts."""
EPOCH = 1442880000000000
"""µs: where the timestamps of a mutation start to be counted from."""
TIMESTAMPS = (1, 0, -1, -62135596800000000, EPOCH - 1, EPOCH, EPOCH + 1, 1400000000000000, -(2**62), 2**62)


def schema_statements(mode: str) -> list[str]:
    """
    Return the statements that create keyspaces, types and tables.

    :param mode: `4.0`, `4.1`, `5.0-v7` or `5.0-v8`: version of the server and of its commit log.
    """
    return creation(vectors=mode.startswith("5.0"))


def statements(mode: str) -> list[str]:
    """
    Return the statements that write, among them those that change the schema on the way.

    :param mode: as in `schema_statements`.
    """
    vectors = list(values.vectors()) if mode.startswith("5.0") else []
    far = list(_far_ttl()) if mode == "5.0-v8" else []
    return [
        *values.natives(),
        *values.empties(),
        *values.keys(),
        *values.elements(),
        *values.nested(),
        *vectors,
        *_counters(),
        *_plain_rows(),
        *_collections(),
        *_statics(),
        *_batches(),
        *_lwt(),
        *_deletions(),
        *_range_deletions("wide"),
        *_range_deletions("mixed"),
        *_boundaries(),
        *_composite(),
        *_many(),
        *_expiring(),
        *far,
        *_quoted(),
        *_dropping(),
        *_adding(),
        *_gone(),
        # After the DROP, which flushes all tables: 5.0.9 in mode NONE cannot read its own SSTable of these.
        *_times(),
    ]


def batch(*parts: str, kind: str = "UNLOGGED ", using: str = "") -> str:
    """Return a batch; `kind` is followed by a space or empty (a logged batch)."""
    return f"BEGIN {kind}BATCH {using}{' '.join(f'{part};' for part in parts)} APPLY BATCH"


def _counters() -> Iterator[str]:
    yield "UPDATE shop.counters SET n = n + 1, m = m - 5 WHERE id = 1 AND seq = 1"
    yield "UPDATE shop.counters SET n = n + 41 WHERE id = 1 AND seq = 1"
    yield "UPDATE shop.counters SET s = s + 7 WHERE id = 1"
    yield "UPDATE shop.counters SET n = n - 9223372036854775807 WHERE id = 2 AND seq = 1"
    yield batch(
        "UPDATE shop.counters SET n = n + 2 WHERE id = 1 AND seq = 2",
        "UPDATE shop.counters SET m = m + 3 WHERE id = 1 AND seq = 2",
        "UPDATE shop.counters SET s = s - 1 WHERE id = 1",
        "UPDATE shop.counters SET n = n + 1 WHERE id = 3 AND seq = 1",
        kind="COUNTER ",
    )
    yield "UPDATE shop.counters SET n = n + 1, m = m + 1 WHERE id = 4 AND seq = 1"
    yield "DELETE m FROM shop.counters WHERE id = 4 AND seq = 1"
    yield "UPDATE shop.counters SET n = n + 1 WHERE id = 4 AND seq = 2"
    yield "DELETE FROM shop.counters WHERE id = 4 AND seq = 2"
    yield "UPDATE shop.counters SET n = n + 1 WHERE id = 5 AND seq = 1"
    yield "DELETE FROM shop.counters WHERE id = 5"


def _plain_rows() -> Iterator[str]:
    for number in range(20):
        yield f"INSERT INTO shop.plain (id, v, w) VALUES ({number}, 'v{number}', {number * number})"
    yield "INSERT INTO shop.plain (id, v, w) VALUES (-1, 'minus', -1)"
    yield "UPDATE shop.plain SET w = 1 WHERE id = 0"
    yield "UPDATE shop.plain SET v = null WHERE id = 1"
    yield "UPDATE shop.plain SET v = 'update only' WHERE id = 30"
    yield "UPDATE shop.plain SET v = 'gone with its cell' WHERE id = 31"
    yield "UPDATE shop.plain SET v = null WHERE id = 31"
    yield "INSERT INTO shop.plain (id, w) VALUES (32, 5)"
    yield "INSERT INTO shop.nocdc (id, v) VALUES (0, 'n0')"
    yield "INSERT INTO shop.beyond (id, v) VALUES (0, 'before')"


def _collections() -> Iterator[str]:
    row = "WHERE id = 1 AND seq = 1"
    values = "'n0', 1, {'k1': 1, 'k2': 2}, {'a', 'b'}, [1, 2, 3, 2], {street: 'S', number: 1}"
    yield f"INSERT INTO shop.orders (id, seq, v, w, m, s, l, u) VALUES (1, 1, {values})"
    yield f"INSERT INTO shop.orders (id, seq, v, w, m, s, l, u) VALUES (1, 2, {values})"
    for change in (
        "l = l + [4, 5]",
        "l = [-1, 0] + l",
        "l = l - [2]",
        "l[0] = 77",
        "m['k3'] = 3",
        "m = m + {'k4': 4, 'k1': 11}",
        "m = m - {'k2'}",
        "s = s + {'c', 'd'}",
        "s = s - {'a'}",
        "u.street = 'T'",
        "u.tags = {'x'}",
        "m = {'only': 1}, s = s + {'e'}",
        "u = {street: 'whole'}, l = l + [6]",
        "m['only'] = null",
        "m = {}",
        "v = 'n1', m['late'] = 9",
    ):
        yield f"UPDATE shop.orders SET {change} {row}"
    for what in ("l[0]", "m['late']", "s['c']", "u.street", "w", "m, s"):
        yield f"DELETE {what} FROM shop.orders {row}"
    yield "UPDATE shop.orders SET l = [], s = null WHERE id = 1 AND seq = 2"
    yield "UPDATE shop.orders SET m['update only'] = 1 WHERE id = 1 AND seq = 3"
    yield f"UPDATE shop.orders USING TTL {YEAR} SET m['k9'] = 9, l = l + [9], s = s + {{'t'}}, u.number = 9 {row}"
    yield f"UPDATE shop.orders USING TIMESTAMP 1500000000000000 SET m['old'] = 1 {row}"
    yield "UPDATE shop.orders USING TIMESTAMP 1500000000000000 SET m = {'old': 2}, s = {'old'} WHERE id = 1 AND seq = 4"


def _statics() -> Iterator[str]:
    yield "INSERT INTO shop.orders (id, status) VALUES (2, 'static only')"
    yield "UPDATE shop.orders SET status = 'open', labels = {'a': 1, 'b': 2} WHERE id = 1"
    yield "UPDATE shop.orders SET labels['c'] = 3 WHERE id = 1"
    yield "DELETE labels['a'] FROM shop.orders WHERE id = 1"
    yield "UPDATE shop.orders SET status = 'both', v = 'with static' WHERE id = 3 AND seq = 1"
    yield "INSERT INTO shop.orders (id, seq, status, v) VALUES (3, 2, 'again', 'w')"
    yield f"UPDATE shop.orders USING TTL {YEAR} SET status = 'ttl' WHERE id = 4"
    yield "UPDATE shop.orders SET status = null WHERE id = 3"
    yield "DELETE status, labels FROM shop.orders WHERE id = 4"
    yield "UPDATE shop.orders SET labels = {'only': 1} WHERE id = 5"


def _batches() -> Iterator[str]:
    tables = ("nocdc", "plain", "natives")
    same_key = [f"INSERT INTO shop.{table} (id) VALUES (40)" for table in tables]
    yield batch("INSERT INTO shop.nocdc (id, v) VALUES (40, 'first')", *same_key)
    yield batch(
        "INSERT INTO shop.plain (id, v) VALUES (41, 'cdc first')",
        "INSERT INTO shop.nocdc (id, v) VALUES (41, 'second')",
        "UPDATE shop.orders SET status = 'b' WHERE id = 41",
        "INSERT INTO shop.orders (id, seq, v) VALUES (41, 1, 'x')",
        "DELETE FROM shop.natives WHERE id = 41",
    )
    yield batch(
        "INSERT INTO shop.plain (id, v) VALUES (42, 'logged')",
        "INSERT INTO shop.plain (id, v) VALUES (43, 'logged')",
        "INSERT INTO shop.nocdc (id, v) VALUES (42, 'logged')",
        "INSERT INTO shop.orders (id, seq, v) VALUES (43, 1, 'logged')",
        f'INSERT INTO {QUOTED} ("Id", "select") VALUES (43, \'other keyspace\')',
        kind="",
    )
    yield batch(
        "INSERT INTO shop.plain (id, v) VALUES (44, 'lost') USING TIMESTAMP 1600000000000000",
        "INSERT INTO shop.plain (id, v) VALUES (44, 'won') USING TIMESTAMP 1600000000000001",
        "UPDATE shop.plain USING TIMESTAMP 1600000000000002 SET w = 1 WHERE id = 44",
    )
    yield batch(
        "INSERT INTO shop.plain (id, v) VALUES (45, 'of the batch')",
        "DELETE w FROM shop.plain WHERE id = 45",
        using="USING TIMESTAMP 1600000000000003 ",
    )
    rows = [f"INSERT INTO shop.orders (id, seq, v, w) VALUES (46, {seq}, 'r', {seq})" for seq in range(30)]
    yield batch(*rows, "UPDATE shop.orders SET m['x'] = 1 WHERE id = 46 AND seq = 5")
    yield batch(
        "INSERT INTO shop.orders (id, seq, v) VALUES (47, 1, 'subset')",
        "UPDATE shop.orders SET w = 2 WHERE id = 47 AND seq = 2",
        "UPDATE shop.orders SET s = s + {'x'}, l = [1] WHERE id = 47 AND seq = 3",
        "INSERT INTO shop.orders (id, seq) VALUES (47, 4)",
        "DELETE FROM shop.orders WHERE id = 47 AND seq = 5",
    )


def _lwt() -> Iterator[str]:
    yield "INSERT INTO shop.lwt (id, c, v) VALUES (1, 1, 'won') IF NOT EXISTS"
    yield "INSERT INTO shop.lwt (id, c, v) VALUES (1, 1, 'lost') IF NOT EXISTS"
    yield "UPDATE shop.lwt SET v = 'won again' WHERE id = 1 AND c = 1 IF v = 'won'"
    yield "UPDATE shop.lwt SET v = 'lost again' WHERE id = 1 AND c = 1 IF v = 'won'"
    yield "UPDATE shop.lwt SET v = 'lost, no such row' WHERE id = 1 AND c = 2 IF EXISTS"
    yield f"INSERT INTO shop.lwt (id, c, v) VALUES (1, 3, 'ttl') IF NOT EXISTS USING TTL {YEAR}"
    yield "INSERT INTO shop.lwt (id, s) VALUES (2, 1) IF NOT EXISTS"
    yield batch(
        "UPDATE shop.lwt SET s = 2 WHERE id = 2 IF s = 1",
        "INSERT INTO shop.lwt (id, c, v) VALUES (2, 1, 'with the condition')",
    )
    yield "INSERT INTO shop.lwt (id, c, v) VALUES (3, 1, 'to go') IF NOT EXISTS"
    yield "DELETE FROM shop.lwt WHERE id = 3 AND c = 1 IF EXISTS"
    yield "DELETE v FROM shop.lwt WHERE id = 1 AND c = 3 IF v = 'ttl'"


def _deletions() -> Iterator[str]:
    yield "DELETE FROM shop.plain WHERE id = 2"
    yield "DELETE v FROM shop.plain WHERE id = 3"
    yield "DELETE FROM shop.plain WHERE id = 99"
    yield "DELETE FROM shop.orders WHERE id = 46 AND seq = 7"
    yield "DELETE FROM shop.orders WHERE id = 46 AND seq IN (8, 9, 20)"
    yield "DELETE FROM shop.orders USING TIMESTAMP 1600000000000000 WHERE id = 46 AND seq = 10"
    yield "INSERT INTO shop.orders (id, seq, v, status) VALUES (48, 1, 'to go', 'too')"
    yield "DELETE FROM shop.orders WHERE id = 48"
    yield "DELETE FROM shop.plain USING TIMESTAMP 1600000000000005 WHERE id = 4"
    yield batch(
        "DELETE FROM shop.orders USING TIMESTAMP 1600000000000010 WHERE id = 49 AND seq = 1",
        "INSERT INTO shop.orders (id, seq, v, m) VALUES (49, 1, 'after', {'a': 1}) USING TIMESTAMP 1600000000000011",
    )
    yield batch(
        "DELETE FROM shop.plain USING TIMESTAMP 1600000000000012 WHERE id = 50",
        "INSERT INTO shop.plain (id, v) VALUES (50, 'new') USING TIMESTAMP 1600000000000013",
    )
    yield batch(
        "DELETE FROM shop.orders USING TIMESTAMP 1600000000000014 WHERE id = 51",
        "INSERT INTO shop.orders (id, seq, v, status) VALUES (51, 1, 'new', 's') USING TIMESTAMP 1600000000000015",
        "DELETE FROM shop.orders USING TIMESTAMP 1600000000000016 WHERE id = 51 AND seq = 2",
        "DELETE FROM shop.orders USING TIMESTAMP 1600000000000016 WHERE id = 51 AND seq > 5",
    )
    yield batch("DELETE FROM shop.orders WHERE id = 52", "INSERT INTO shop.orders (id, seq) VALUES (52, 1)")


def _range_deletions(table: str) -> Iterator[str]:
    name = f"shop.{table}"
    for partition in ("a", "b"):
        yield f"UPDATE {name} SET s = 1 WHERE p = '{partition}'"
        for c in range(8):
            rows = [(c, d, e) for d in ("", "k", "z") for e in (1, 2)]
            inserts = [
                f"INSERT INTO {name} (p, c, d, e, v) VALUES ('{partition}', {c}, '{d}', {e}, {e})" for c, d, e in rows
            ]
            yield batch(*inserts)
    for condition in (
        "c = 0 AND d = 'k'",
        "c = 0 AND d = 'z' AND e > 1",
        "c = 1 AND d > 'k'",
        "c = 1 AND d <= ''",
        "c = 2 AND d >= 'k' AND d < 'z'",
        "c = 2 AND d = '' AND e > 0 AND e <= 1",
        "c > 3 AND c <= 4",
        "c >= 5 AND c < 6",
        "c = 6",
        "c IN (30, 31)",
        "c = 7 AND d IN ('', 'z')",
    ):
        yield f"DELETE FROM {name} WHERE p = 'a' AND {condition}"
    yield f"DELETE FROM {name} WHERE p = 'b' AND c < 3"
    yield f"DELETE FROM {name} WHERE p = 'b' AND c >= 6"
    yield f"DELETE FROM {name} WHERE p = 'none' AND c > 1"
    yield f"DELETE FROM {name} USING TIMESTAMP 1600000000000000 WHERE p = 'b' AND c <= 100"


def _boundaries() -> Iterator[str]:
    for table in ("wide", "mixed"):

        def delete(partition: str, where: str, time: int, table: str = table) -> str:
            using = f"USING TIMESTAMP {1600000000000000 + time}"
            return f"DELETE FROM shop.{table} {using} WHERE p = '{partition}' AND {where}"

        insert = f"INSERT INTO shop.{table} (p, c, d, e, v) VALUES"
        yield batch(
            delete("touching", "c >= 1 AND c < 3", 1),
            delete("touching", "c >= 3 AND c <= 5", 2),
            delete("touching", "c > 5 AND c < 9", 3),
            delete("touching", "c > 20", 4),
            f"{insert} ('touching', 4, 'd', 1, 1) USING TIMESTAMP 1600000000000009",
        )
        yield batch(
            delete("inside", "c > 0 AND c < 100", 1),
            delete("inside", "c = 7 AND d >= 'k'", 2),
            delete("inside", "c = 7 AND d = 'm' AND e > 3", 3),
            f"{insert} ('inside', 7, 'k', 1, 1)",
        )
        yield batch(delete("halves", "c < 5", 1), delete("halves", "c >= 5", 2))


def _composite() -> Iterator[str]:
    for number, (b, d) in enumerate((("", ""), ("x", "y" * 200), ("naïve", "☃"), ("x" * 300, ""))):
        values = f"{number}, '{b}', 0x{'ab' * number}, '{d}', 0x{'00' * number}, {number}"
        yield f"INSERT INTO shop.composite (a, b, c, d, e, v) VALUES ({values})"
    yield "UPDATE shop.composite SET v = 9 WHERE a = 0 AND b = '' AND c = 0x AND d = 'd' AND e = 0x"
    yield "DELETE FROM shop.composite WHERE a = 1 AND b = 'x' AND c = 0xab AND d > 'z'"
    yield "DELETE FROM shop.composite WHERE a = 2 AND b = 'naïve' AND c = 0xabab"
    yield "DELETE FROM shop.composite WHERE a = 0 AND b = '' AND c = 0x AND d = '' AND e > 0x"


def _many() -> Iterator[str]:
    def insert(c: int, names: tuple[str, ...], key: int = 1) -> str:
        values = ", ".join(str(number) for number in range(len(names)))
        return f"INSERT INTO shop.many (id, c, {', '.join(names)}) VALUES ({key}, {c}, {values})"

    yield insert(1, MANY)
    yield insert(2, MANY[:2])
    yield batch(
        insert(1, MANY, 2),
        insert(2, (MANY[3], MANY[66]), 2),
        insert(3, tuple(name for name in MANY if name not in (MANY[0], MANY[69])), 2),
        insert(4, MANY[:34], 2),
        insert(5, MANY[:35], 2),
        insert(6, MANY[35:], 2),
        insert(7, MANY[:36], 2),
        "INSERT INTO shop.many (id, c) VALUES (2, 8)",
        f"DELETE {MANY[40]} FROM shop.many WHERE id = 2 AND c = 9",
    )
    for count in (63, 64, 65):
        yield batch(insert(1, MANY[:count], count), insert(2, MANY[count - 2 : count], count))


def _times() -> Iterator[str]:
    for number, timestamp in enumerate(TIMESTAMPS):
        using = f"USING TIMESTAMP {timestamp}"
        yield f"INSERT INTO shop.times (id, c, v, m) VALUES ({number}, 1, 't', {{'a': 1}}) {using}"
        yield f"UPDATE shop.times {using} SET v = 'u', m['b'] = 2 WHERE id = {number} AND c = 2"
        yield f"DELETE FROM shop.times {using} WHERE id = {number} AND c = 3"
        yield f"DELETE FROM shop.times {using} WHERE id = {number} AND c > 5"
        yield f"DELETE v FROM shop.times {using} WHERE id = {number} AND c = 4"
        yield f"DELETE FROM shop.times {using} WHERE id = {100 + number}"
    yield batch(
        *(
            f"INSERT INTO shop.times (id, c, v) VALUES (50, {n}, 'x') USING TIMESTAMP {t}"
            for n, t in enumerate(TIMESTAMPS)
        )
    )
    for value in ("b", "c", "a"):
        yield f"INSERT INTO shop.times (id, c, v) VALUES (51, 1, '{value}') USING TIMESTAMP 1600000000000000"
    yield "DELETE v FROM shop.times USING TIMESTAMP 1600000000000000 WHERE id = 51 AND c = 2"
    yield "INSERT INTO shop.times (id, c, v) VALUES (51, 2, 'hidden') USING TIMESTAMP 1600000000000000"
    yield f"INSERT INTO shop.times (id, c, v) VALUES (51, 1, 'aa') USING TIMESTAMP 1600000000000000 AND TTL {YEAR}"
    for limit in (-(2**63) + 1, 2**63 - 1):
        yield f"INSERT INTO shop.times (id, c, v) VALUES (52, {limit % 7}, 'limit') USING TIMESTAMP {limit}"


def _expiring() -> Iterator[str]:
    yield "INSERT INTO shop.expiring (id, c, v, w) VALUES (1, 1, 'default', 'default')"
    yield f"INSERT INTO shop.expiring (id, c, v) VALUES (1, 2, 'own') USING TTL {2 * YEAR}"
    yield "INSERT INTO shop.expiring (id, c, v) VALUES (1, 3, 'none') USING TTL 0"
    yield f"UPDATE shop.expiring USING TTL {3 * YEAR} SET w = 'other' WHERE id = 1 AND c = 2"
    yield f"UPDATE shop.expiring USING TTL {4 * YEAR} AND TIMESTAMP 1600000000000000 SET v = 'u' WHERE id = 1 AND c = 4"
    yield "UPDATE shop.expiring USING TTL 0 SET m = {'a': 1, 'b': 2} WHERE id = 1 AND c = 5"
    yield f"UPDATE shop.expiring USING TTL {9 * YEAR} SET m['c'] = 3 WHERE id = 1 AND c = 5"
    yield f"UPDATE shop.expiring USING TTL {5 * YEAR} SET s = 'static' WHERE id = 1"
    yield batch(
        f"INSERT INTO shop.expiring (id, c, v) VALUES (2, 1, 'a') USING TTL {2 * YEAR}",
        f"UPDATE shop.expiring USING TTL {YEAR} SET w = 'b' WHERE id = 2 AND c = 1",
        f"INSERT INTO shop.expiring (id, c, v) VALUES (2, 2, 'c') USING TTL {7 * YEAR}",
        "UPDATE shop.expiring USING TTL 0 SET w = 'd' WHERE id = 2 AND c = 2",
    )
    yield "INSERT INTO shop.expiring (id, c, v) VALUES (3, 1, 'one second') USING TTL 1"


def _far_ttl() -> Iterator[str]:
    yield f"INSERT INTO shop.expiring (id, c, v, m) VALUES (4, 1, 'far', {{'a': 1}}) USING TTL {FAR_TTL}"
    yield f"UPDATE shop.expiring USING TTL {FAR_TTL} SET w = 'far' WHERE id = 4 AND c = 2"
    yield batch(
        f"INSERT INTO shop.expiring (id, c, v) VALUES (4, 3, 'far') USING TTL {FAR_TTL}",
        "INSERT INTO shop.expiring (id, c, v) VALUES (4, 4, 'near') USING TTL 40000000",
    )


def _quoted() -> Iterator[str]:
    columns = f'"Id", "select", {ODD_COLUMN}, p, q'
    yield (
        f"INSERT INTO {QUOTED} ({columns}) VALUES (1, 'from', {{'\"': 1, '''': 2}}, "
        '{"Left": 1, "right side": \'r\'}, {"Left": 2})'
    )
    yield f"UPDATE {QUOTED} SET {ODD_COLUMN}['☃'] = 3, q.\"right side\" = 's' WHERE \"Id\" = 1 AND \"select\" = 'from'"
    yield f'DELETE {ODD_COLUMN}[\'"\'] FROM {QUOTED} WHERE "Id" = 1 AND "select" = \'from\''
    yield f'DELETE FROM {QUOTED} WHERE "Id" = 1 AND "select" > \'where\''


def _dropping() -> Iterator[str]:
    address = "{street: 'S', number: 1, tags: {'t'}}"
    for key in (1, 2):
        values = f"{key}, 10, {{'k': 1}}, 'c', {address}, 5"
        yield f"INSERT INTO shop.dropping (id, a, b, c, d, e) VALUES ({values})"
    yield "DELETE b['k'] FROM shop.dropping WHERE id = 2"
    for column in ("a", "b", "d", "e"):
        yield f"ALTER TABLE shop.dropping DROP {column}"
    yield "INSERT INTO shop.dropping (id, c) VALUES (3, 'between')"
    yield "ALTER TABLE shop.dropping ADD a int"
    yield "ALTER TABLE shop.dropping ADD b map<text, int>"
    yield "INSERT INTO shop.dropping (id, a, b, c) VALUES (4, 40, {'n': 4}, 'after')"
    yield "UPDATE shop.dropping SET a = 20, b['m'] = 2 WHERE id = 2"


def _adding() -> Iterator[str]:
    yield "INSERT INTO shop.adding (id, a, c, u) VALUES (1, 1, 3, {street: 'short', number: 1})"
    yield "ALTER TABLE shop.adding ADD b text"
    yield "ALTER TABLE shop.adding ADD bb map<int, text>"
    yield "INSERT INTO shop.adding (id, a, b, bb, c) VALUES (2, 1, 'two', {2: 'b'}, 3)"
    yield "ALTER TYPE shop.address ADD zip int"
    yield "INSERT INTO shop.adding (id, u) VALUES (3, {street: 'long', zip: 12345})"
    yield "UPDATE shop.orders SET u.zip = 54321 WHERE id = 3 AND seq = 1"


def _gone() -> Iterator[str]:
    for number in range(5):
        yield f"INSERT INTO shop.gone (id, v, m) VALUES ({number}, 'v', {{'a': {number}}})"
    yield batch(
        "INSERT INTO shop.plain (id, v) VALUES (60, 'with a table that is dropped')",
        "INSERT INTO shop.gone (id, v) VALUES (60, 'dropped')",
        "INSERT INTO shop.nocdc (id, v) VALUES (60, 'with a table that is dropped')",
    )
    yield "DELETE FROM shop.gone WHERE id = 3"
    yield "DROP TABLE shop.gone"
    yield "INSERT INTO shop.plain (id, v) VALUES (61, 'after the drop')"
