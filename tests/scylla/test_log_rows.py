"""Log rows become the change rows that the documents describe, and what cannot be used is told.

Values are those of ScyllaDB's manual ("The CDC log table", "Basic operations in CDC", "Advanced column types") and of
ScyllaDB's own tests. Times are written out, not computed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from ringsync.scylla.log_rows import UNKNOWN_ARRIVAL, LogRows
from tests.formats.commitlog.comparable import of_package
from tests.scylla.log_tables import LOG_TTL, READ_AT, STREAM, Tables, tables_of

TIME, T = UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9"), 1584969040910883
LATER, T_LATER = UUID("c72c7c3e-2fda-11eb-ba1d-e2d8e9bb0299"), 1606390225588947
S = 1584969040
ONE, MINUS_ONE = "00000001", "ffffffff"
ZERO, TWO, THREE = "00000000", "00000002", "00000003"
ATOMIC = tables_of("pk int, ck int, a int, b int", "pk, ck")
STATIC = tables_of("pk int, ck int, c int, s int static", "pk, ck")
PREFIXES = tables_of("pk int, ck1 int, ck2 int, ck3 int, v int", "pk, ck1, ck2, ck3")
KEY_ONLY = tables_of("pk int, v int", "pk")


def row(number: int = 0, operation: int = 1, *, last: bool = True, time: Any = TIME, **columns: Any) -> dict[str, Any]:
    """A log row. ``deleted_v`` and ``deleted_elements_v`` stand for those with ``cdc$`` before it."""
    metadata: dict[str, Any] = {"cdc$time": time, "cdc$batch_seq_no": number, "cdc$operation": operation}
    given = {f"cdc${name}" if name.startswith("deleted_") or name == "ttl" else name: columns[name] for name in columns}
    return {"pk": 0} | metadata | ({"cdc$end_of_batch": True} if last else {}) | given


def changes(tables: Tables, *rows: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The change rows of log rows, all of which can be used, without what they have in common."""
    found = tables.decode(tables.page(rows), **options)
    assert found.errors.num_rows == 0, found.errors["reason"].to_pylist()
    return shown(tables, found)


def shown(tables: Tables, found: LogRows) -> list[dict[str, Any]]:
    """The change rows without what they have in common."""
    common = ("table_id", "token", "raw_partition_key", "digest", "position")
    comparable = of_package([SimpleNamespace(rows=found.rows)], tables.logged)  # type: ignore[list-item]
    return [{key: value for key, value in one.items() if key not in common} for one in comparable]


def live(column: str, raw: str, timestamp: int = T, path: str | None = None, **ttl: int) -> dict[str, Any]:
    return {"column": column, "raw": raw, "timestamp": timestamp} | ttl | ({"raw_path": path} if path else {})


def dead(column: str, timestamp: int = T, path: str | None = None, second: int = S) -> dict[str, Any]:
    found = {"column": column, "deleted": True, "timestamp": timestamp, "local_deletion_time": second}
    return found | ({"raw_path": path} if path else {})


def of_row(*cells: dict[str, Any], ck: tuple[str, ...] = (ZERO,), **content: Any) -> dict[str, Any]:
    return {"kind": "row", "raw_clustering": list(ck)} | ({"cells": list(cells)} if cells else {}) | content


DELETED = {"timestamp": T, "local_deletion_time": S}


class TestLogTable:
    """The CDC log table."""

    def test_an_update_has_the_write_time_of_its_timeuuid(self) -> None:
        found = ATOMIC.decode(ATOMIC.page([row(ck=0, a=0)]))
        assert shown(ATOMIC, found) == [of_row(live("a", ZERO))]
        (one,) = found.rows.to_pylist()
        # The token of the partition key 0, from the log row that "Querying CDC streams" prints.
        assert one["token"] == -3485513579396041028
        assert one["table_id"].hex() == "5e000000111122223333444444444444"
        assert (one["partition_key"], one["write_time"], one["position"]) == (bytes(4), T, T)
        assert one["file"] == "ks.t_scylla_cdc_log"
        assert (found.groups.stream[0].tobytes(), found.groups.time[0].tobytes()) == (STREAM, TIME.bytes)

    def test_a_timeuuid_between_two_microseconds(self) -> None:
        for ticks in range(10):
            time = UUID(fields=(0xB223C55E + ticks, *TIME.fields[1:]))
            assert changes(ATOMIC, row(ck=0, a=0, time=time)) == [of_row(live("a", ZERO))]

    def test_two_rows_in_a_batch(self) -> None:
        time = UUID("c3b851fe-6d0c-11ea-3f9b-422e11ed8da0")
        rows = row(0, ck=0, a=0, last=False, time=time), row(1, ck=1, a=0, time=time)
        found = ATOMIC.decode(ATOMIC.page(rows))
        assert found.rows["write_time"].to_pylist() == [1584971217889331] * 2
        assert (found.group.tolist(), len(found.groups)) == ([0, 0], 1)

    def test_two_timestamps_in_a_batch(self) -> None:
        times = UUID("c3b85208-6d0c-11ea-d600-dcd1bfc285c9"), UUID("c3b85212-6d0c-11ea-18fd-95fe5b0e6260")
        found = ATOMIC.decode(ATOMIC.page([row(ck=i, a=0, time=time) for i, time in enumerate(times)]))
        assert found.rows["write_time"].to_pylist() == [1584971217889332, 1584971217889333]
        assert (found.group.tolist(), len(found.groups)) == ([0, 1], 2)

    def test_ttl(self) -> None:
        expiring = live("a", ZERO, ttl=5, expires_at=S + 5)
        assert changes(ATOMIC, row(ck=0, a=0, ttl=5)) == [of_row(expiring)]
        assert changes(ATOMIC, row(ck=0, a=0, ttl=0)) == [of_row(live("a", ZERO))]

    def test_dead_and_live_cells_with_a_ttl(self) -> None:
        rows = row(0, ck=0, deleted_b=True, last=False), row(1, ck=0, a=0, ttl=5)
        assert changes(ATOMIC, *rows) == [of_row(dead("b")), of_row(live("a", ZERO, ttl=5, expires_at=S + 5))]


class TestBasicOperations:
    """Basic operations in CDC."""

    def test_updates_and_inserts(self) -> None:
        born = {"liveness": {"timestamp": T}}
        assert changes(ATOMIC, row(ck=0, a=0)) == [of_row(live("a", ZERO))]
        assert changes(ATOMIC, row(ck=0, deleted_b=True)) == [of_row(dead("b"))]
        assert changes(ATOMIC, row(0, 2, ck=0, a=0)) == [of_row(live("a", ZERO), **born)]
        assert changes(ATOMIC, row(0, 2, ck=0, deleted_b=True)) == [of_row(dead("b"), **born)]
        assert changes(ATOMIC, row(0, 2, ck=0)) == [of_row(**born)]
        with_ttl = {"liveness": {"timestamp": T, "ttl": 5, "expires_at": S + 5}}
        assert changes(ATOMIC, row(0, 2, ck=0, ttl=5)) == [of_row(**with_ttl)]

    def test_an_empty_value_is_a_value(self) -> None:
        assert changes(ATOMIC, row(ck=0, a=b"")) == [of_row(live("a", ""))]

    def test_static_and_clustered_row(self) -> None:
        rows = row(0, s=0, last=False), row(1, 2, ck=0, c=0)
        static = {"kind": "static", "cells": [live("s", ZERO)]}
        assert changes(STATIC, *rows) == [static, of_row(live("c", ZERO), liveness={"timestamp": T})]
        assert changes(STATIC, row(deleted_s=True)) == [{"kind": "static", "cells": [dead("s")]}]

    @pytest.mark.parametrize("operation", [3, -3])
    def test_row_deletion(self, operation: int) -> None:
        assert changes(ATOMIC, row(0, operation, ck=0)) == [of_row(deletion=DELETED)]

    @pytest.mark.parametrize("operation", [4, -4])
    def test_partition_deletion(self, operation: int) -> None:
        gone = [{"kind": "partition_deletion", "deletion": DELETED}]
        assert changes(ATOMIC, row(0, operation)) == gone
        # Cassandra's commit log has a deletion of the partition, too, for a DELETE by the whole key of such a table.
        assert changes(KEY_ONLY, row(0, operation)) == gone

    def test_rows_without_clustering(self) -> None:
        assert changes(KEY_ONLY, row(v=1)) == [of_row(live("v", ONE), ck=())]
        assert changes(KEY_ONLY, row(0, 3)) == [of_row(ck=(), deletion=DELETED)]

    @pytest.mark.parametrize(
        ("starts", "start", "ends", "end", "bounds"),
        [
            # (0, 2], (-inf, 3)
            (6, (0,), 7, (2,), (([ZERO], False), ([TWO], True))),
            (5, (), 8, (3,), (([], True), ([THREE], False))),
            # ck1 = 0 and ck2 > 0 and ck2 < 3
            (6, (0, 0), 8, (0, 3), (([ZERO, ZERO], False), ([ZERO, THREE], False))),
            # ck1 = 2
            (5, (2,), 7, (2,), (([TWO], True), ([TWO], True))),
            # ck1 = 2 and ck2 >= 1
            (5, (2, 1), 7, (2,), (([TWO, ONE], True), ([TWO], True))),
            # no bound on a side, with whatever operation
            (6, (1,), 7, (), (([ONE], False), ([], True))),
            (6, (), 8, (1, 1, 1), (([], True), ([ONE, ONE, ONE], False))),
        ],
    )
    def test_range_deletions(self, starts: int, start: Any, ends: int, end: Any, bounds: Any) -> None:
        def bound(number: int, operation: int, values: Any, last: bool) -> dict[str, Any]:
            return row(number, operation, last=last, **{f"ck{i}": value for i, value in enumerate(values, 1)})

        rows = bound(0, starts, start, False), bound(1, ends, end, True)
        sides = [{"raw_clustering": values, "inclusive": inclusive} for values, inclusive in bounds]
        expected = {"kind": "range_deletion", "range": dict(zip(("start", "end"), sides, strict=True))}
        assert changes(PREFIXES, *rows) == [expected | {"deletion": DELETED}]
        # The pages may end between both.
        found = PREFIXES.decode(*(PREFIXES.page([one]) for one in rows))
        assert shown(PREFIXES, found) == [expected | {"deletion": DELETED}]
        assert found.counts.changed == 2

    def test_images_are_left_out(self) -> None:
        rows = row(0, 0, ck=0, a=1, deleted_b=True, last=False), row(1, ck=0, a=0, last=False), row(2, 9, ck=0, a=0)
        found = ATOMIC.decode(ATOMIC.page(rows))
        assert shown(ATOMIC, found) == [of_row(live("a", ZERO))]
        assert (found.counts.images, found.counts.changed, found.groups.complete.tolist()) == (2, 1, [True])

    def test_an_update_that_sets_nothing_is_an_error(self) -> None:
        """Scylla logs none: the log did not have what it has set (``delta: keys``)."""
        found = ATOMIC.decode(ATOMIC.page([row(ck=0, ttl=5)]))
        assert (found.rows.num_rows, found.counts.errors) == (0, 1)
        assert "sets nothing" in found.errors["reason"][0].as_py()

    @pytest.mark.parametrize(("others", "is_error"), [([], True), ([{"ck": 1, "s": {1}}], False), ([{"ck": 1}], True)])
    def test_a_statement_of_a_batch_may_change_no_element(self, others: list[dict[str, Any]], is_error: bool) -> None:
        """As removing what is not in a list. Without any content in its batch it is an error all the same."""
        tables = tables_of("pk int, ck int, s set<int>", "pk, ck")
        rows = [row(0, ck=0, last=not others), *(row(1, 2 if "s" not in one else 1, **one) for one in others)]
        counts = tables.decode(tables.page(rows)).counts
        assert (counts.errors, counts.empty) == (is_error, not is_error)

    @pytest.mark.parametrize("ttl", [None, 5])
    def test_the_same_write_twice_with_a_ttl_is_two_changes(self, ttl: int | None) -> None:
        """The later one expires later, which nothing but its arrival says; without a TTL both are one."""
        again = UUID(bytes=TIME.bytes[:15] + bytes([TIME.bytes[15] ^ 1]))
        rows = [row(0, 2, ck=0, a=0, ttl=ttl, time=time) for time in (TIME, again)]
        found = ATOMIC.decode(ATOMIC.page(rows))
        assert len(found.rows["digest"].unique()) == (2 if ttl else 1)


FIRST, SECOND = UUID("db3214f0-2fe9-11eb-af55-000000000001"), UUID("db3214f1-2fe9-11eb-af55-000000000001")
LIVES, CLEARED = 1606390225588947, {"column": "v", "timestamp": 1606390225588946, "local_deletion_time": 1606390225}
OF_TYPE = {
    "map": tables_of("pk int, ck int, v map<int, text>", "pk, ck"),
    "set": tables_of("pk int, ck int, v set<int>", "pk, ck"),
    "list": tables_of("pk int, ck int, v list<int>", "pk, ck"),
    "udt": tables_of("pk int, ck int, v u", "pk, ck", types="a int, b int, c int"),
}
CELLS: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "map": ({1: "v1", 2: "v2"}, [(ONE, "7631"), (TWO, "7632")]),
    "set": ({1, 2}, [(ONE, ""), (TWO, "")]),
    "list": ({FIRST: 1, SECOND: 2}, [(FIRST.hex, ONE), (SECOND.hex, TWO)]),
    "udt": ({"a": 1, "b": 2, "c": None}, [("0000", ONE), ("0001", TWO)]),
}
REMOVED: dict[str, tuple[Any, list[str]]] = {
    "map": ({1, 2, 3}, [ONE, TWO, THREE]),
    "set": ({1, 2, 3}, [ONE, TWO, THREE]),
    "list": ({FIRST, SECOND}, [FIRST.hex, SECOND.hex]),
    "udt": ({0, 2}, ["0000", "0002"]),
}


@pytest.mark.parametrize("kind", OF_TYPE)
class TestAdvancedColumnTypes:
    """Advanced column types. ``LATER`` is the timeuuid of 1606390225588947 µs."""

    def test_added_elements(self, kind: str) -> None:
        value, cells = CELLS[kind]
        expected = [live("v", raw, LIVES, path) for path, raw in cells]
        assert changes(OF_TYPE[kind], row(ck=0, v=value, time=LATER)) == [of_row(*expected)]

    def test_removed_elements(self, kind: str) -> None:
        removed, paths = REMOVED[kind]
        untouched = {"v": dict.fromkeys("abc")} if kind == "udt" else {}
        expected = [dead("v", LIVES, path, 1606390225) for path in paths]
        found = changes(OF_TYPE[kind], row(ck=0, deleted_elements_v=removed, time=LATER, **untouched))
        assert found[0]["cells"] == sorted(found[0]["cells"], key=lambda cell: cell["raw_path"])
        assert found == [of_row(*expected)]

    def test_an_overwrite_clears_one_microsecond_before_it_sets(self, kind: str) -> None:
        value, cells = CELLS[kind]
        expected = [live("v", raw, LIVES, path) for path, raw in cells]
        found = changes(OF_TYPE[kind], row(ck=0, v=value, deleted_v=True, time=LATER))
        assert found == [of_row(*expected, complex_deletions=[CLEARED])]

    def test_a_deletion_is_logged_one_microsecond_late(self, kind: str) -> None:
        found = OF_TYPE[kind].decode(OF_TYPE[kind].page([row(ck=0, deleted_v=True, time=LATER)]))
        assert shown(OF_TYPE[kind], found) == [of_row(complex_deletions=[CLEARED])]
        assert found.rows["write_time"].to_pylist() == [LIVES - 1]

    def test_an_insert_of_an_empty_collection_clears_it(self, kind: str) -> None:
        empty = {"v": dict.fromkeys("abc")} if kind == "udt" else {}
        found = changes(OF_TYPE[kind], row(0, 2, ck=0, deleted_v=True, time=LATER, **empty))
        assert found == [of_row(liveness={"timestamp": LIVES}, complex_deletions=[CLEARED])]

    def test_elements_with_a_ttl(self, kind: str) -> None:
        value, cells = CELLS[kind]
        expected = [live("v", raw, LIVES, path, ttl=5, expires_at=1606390230) for path, raw in cells]
        assert changes(OF_TYPE[kind], row(ck=0, v=value, ttl=5, time=LATER)) == [of_row(*expected)]

    def test_added_and_removed_at_once(self, kind: str) -> None:
        value, cells = CELLS[kind]
        gone: Any = {"udt": 2, "list": UUID(int=FIRST.int + 7)}.get(kind, 9)
        path = {"udt": "0002", "list": UUID(int=FIRST.int + 7).hex}.get(kind, "00000009")
        found = changes(OF_TYPE[kind], row(ck=0, v=value, deleted_elements_v={gone}, time=LATER))
        expected = [live("v", raw, LIVES, path) for path, raw in cells]
        assert found == [of_row(*expected, dead("v", LIVES, path, 1606390225))]


def test_an_insert_of_collections_with_a_ttl_is_three_rows() -> None:
    tables = tables_of("pk int, ck int, m1 map<int, text>, m2 map<int, text>", "pk, ck")
    rows = (
        row(0, 2, ck=0, ttl=5, last=False),
        row(1, ck=0, deleted_m1=True, deleted_m2=True, last=False),
        row(2, ck=0, m1={1: "v1"}, m2={2: "v2"}, ttl=5),
    )
    expiry = {"ttl": 5, "expires_at": S + 5}
    cleared = [{"column": name, "timestamp": T - 1, "local_deletion_time": S} for name in ("m1", "m2")]
    assert changes(tables, *rows) == [
        of_row(liveness={"timestamp": T} | expiry),
        of_row(complex_deletions=cleared),
        of_row(live("m1", "7631", path=ONE, **expiry), live("m2", "7632", path=TWO, **expiry)),
    ]


class TestArrival:
    """When a write was at its coordinator: its log row had the whole TTL then."""

    def decode(self, remaining: int | None, *log_ttls_s: int) -> LogRows:
        rows = [row(0, 2, ck=0, a=0, ttl=50) | {'TTL("cdc$operation")': remaining}]
        return ATOMIC.decode(ATOMIC.page(rows), log_ttls_s=log_ttls_s or (LOG_TTL,))

    def test_expiry_is_of_the_arrival_and_the_digest_is_not(self) -> None:
        found, later = self.decode(86_300), self.decode(86_299)
        assert found.arrivals_s[0].tolist() == [READ_AT - 100]
        expiry = {"ttl": 50, "expires_at": READ_AT - 50}
        expected = of_row(live("a", ZERO, **expiry), liveness={"timestamp": T} | expiry)
        assert shown(ATOMIC, found) == [expected]
        assert later.rows["digest"].equals(found.rows["digest"])
        assert self.decode(None).rows["digest"].equals(found.rows["digest"])

    @pytest.mark.parametrize(
        ("arrived_later_s", "took_s", "expected_later_s"),
        [(0, 0, 0), (0, 1, 0), (1, 1, 1), (2, 0, 2), (2, 1, 2), (-1, 1, 0), (-2, 1, -1)],
    )
    def test_a_timestamp_a_little_aside_is_believed_as_far_as_the_ttl_allows(
        self, arrived_later_s: int, took_s: int, expected_later_s: int
    ) -> None:
        """It may be a client's. The arrival is known to a second, and to the time that the page took."""
        remaining = LOG_TTL - (100 - arrived_later_s)
        rows = [row(0, 2, ck=0, a=0, ttl=50) | {'TTL("cdc$operation")': remaining}]
        found = ATOMIC.decode(ATOMIC.page(rows), read_at_s=S + 100, log_ttls_s=(LOG_TTL,), took_s=took_s)
        assert found.rows["cells"].to_pylist()[0][0]["local_deletion_time"] == S + 50 + expected_later_s

    @pytest.mark.parametrize("node_ahead_s", [-120, -3, 0, 5, 60])
    def test_the_clock_of_the_node_that_tells_what_is_left_may_be_wrong(self, node_ahead_s: int) -> None:
        rows = [row(0, 2, ck=0, a=0, ttl=50) | {'TTL("cdc$operation")': LOG_TTL - 100 - node_ahead_s}]
        error_s = abs(node_ahead_s)
        found = ATOMIC.decode(ATOMIC.page(rows), read_at_s=S + 100, log_ttls_s=(LOG_TTL,), error_s=error_s)
        assert found.rows["cells"].to_pylist()[0][0]["local_deletion_time"] == S + 50

    @pytest.mark.parametrize("remaining", [None, 86_401])
    def test_unknown(self, remaining: int | None) -> None:
        found = self.decode(remaining)
        assert found.arrivals_s[0].tolist() == [UNKNOWN_ARRIVAL]
        assert found.rows["cells"].to_pylist()[0][0]["local_deletion_time"] == S + 50
