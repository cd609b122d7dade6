"""Log rows that cannot be used are told, those of incomplete writes are held back, and no byte leads astray."""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest

from ringsync.cql.types import Native
from ringsync.schema.table import DroppedColumn
from ringsync.scylla import log_rows as log_rows_module
from tests.scylla.log_tables import Tables, tables_of
from tests.scylla.random_mutations import CLUSTERED, Maker
from tests.scylla.test_log_mutations import Times
from tests.scylla.test_log_rows import (
    KEY_ONLY,
    ONE,
    PREFIXES,
    STATIC,
    TIME,
    ZERO,
    T,
    changes,
    live,
    of_row,
    row,
    shown,
)
from tests.scylla_model.log_rows import log_rows

OTHER = UUID("c72c7c3e-2fda-11eb-ba1d-e2d8e9bb0299")
COLLECTIONS = tables_of("pk int, ck int, m map<int, text>, s set<int>, u u, t text", "pk, ck", types="a int, b text")
TWO_KEYS = tables_of("pk int, pk2 blob, v int", "(pk, pk2)")


def collection(*parts: bytes | None, count: int | None = None) -> bytes:
    data = b"".join(struct.pack(">i", -1 if part is None else len(part)) + (part or b"") for part in parts)
    return struct.pack(">i", len(parts) if count is None else count) + data


FIVE = b"\0\0\0\5"
MISFIT = 'the bytes of "{}" do not fit the type {}'


@pytest.mark.parametrize(
    ("tables", "columns", "reason"),
    [
        (STATIC, {"operation": 10, "ck": 1}, "cdc$operation is none that is known"),
        (STATIC, {"operation": -1, "ck": 1}, "cdc$operation is none that is known"),
        (STATIC, {"operation": b"", "ck": 1}, MISFIT.format("cdc$operation", "tinyint")),
        (STATIC, {"operation": None, "ck": 1}, MISFIT.format("cdc$operation", "tinyint")),
        (STATIC, {"number": None, "ck": 1, "c": 1}, MISFIT.format("cdc$batch_seq_no", "int")),
        (STATIC, {"time": uuid4(), "ck": 1, "c": 1}, MISFIT.format("cdc$time", "timeuuid")),
        (STATIC, {"time": b"short", "ck": 1, "c": 1}, MISFIT.format("cdc$time", "timeuuid")),
        (STATIC, {"cdc$stream_id": b"short", "ck": 1, "c": 1}, MISFIT.format("cdc$stream_id", "blob")),
        (STATIC, {"ttl": -1, "ck": 1, "c": 1}, "its cdc$ttl is no TTL"),
        (STATIC, {"ttl": 2**31, "ck": 1, "c": 1}, "its cdc$ttl is no TTL"),
        (STATIC, {"ttl": b"\1", "ck": 1, "c": 1}, "its cdc$ttl is no TTL"),
        (STATIC, {"pk": None, "ck": 1, "c": 1}, '"pk" is null'),
        (STATIC, {"pk": b"\1", "ck": 1, "c": 1}, MISFIT.format("pk", "int")),
        (STATIC, {"ck": b"\1", "c": 1}, MISFIT.format("ck", "int")),
        (STATIC, {"ck": 1, "c": b"\1\2\3"}, MISFIT.format("c", "int")),
        (STATIC, {"ck": 1, "deleted_c": b""}, MISFIT.format("cdc$deleted_c", "boolean")),
        (STATIC, {"ck": 1, "c": 1, "deleted_c": True}, '"c" is set and deleted at once'),
        (STATIC, {"ck": 1, "s": 1}, '"s" is set in a row of the other kind'),
        (STATIC, {"c": 1}, '"c" is set in a row of the other kind'),
        (STATIC, {"operation": 2, "s": 1}, "clustering columns do not fit"),
        (STATIC, {"operation": 3}, "clustering columns do not fit"),
        (STATIC, {"operation": 4, "ck": 1}, "clustering columns do not fit"),
        (STATIC, {"operation": 3, "ck": 1, "c": 1}, '"c" is set in a deletion'),
        (STATIC, {"operation": 4, "deleted_s": True}, '"cdc$deleted_s" is set in a deletion'),
        (STATIC, {"operation": 5, "ck": 1}, "the log row behind it is not its end"),
        (STATIC, {"operation": 8, "ck": 1}, "the log row before it is not its start"),
        (PREFIXES, {"ck1": 1, "ck3": 1, "v": 1}, "clustering columns do not fit"),
        (PREFIXES, {"v": 1}, "clustering columns do not fit"),
        (PREFIXES, {"operation": 5, "ck2": 1}, "clustering columns do not fit"),
        (KEY_ONLY, {"operation": 5}, "cdc$operation is none that is known"),
        (TWO_KEYS, {"v": 1}, '"pk2" is null'),
        (TWO_KEYS, {"pk2": bytes(65_529), "v": 1}, "its partition key has more than 65535 bytes"),
        (COLLECTIONS, {"m": collection(FIVE, None)}, MISFIT.format("m", "map<int, text>")),
        (COLLECTIONS, {"m": collection(None, b"x")}, MISFIT.format("m", "map<int, text>")),
        (COLLECTIONS, {"s": collection(FIVE, count=2)}, MISFIT.format("s", "set<int>")),
        (COLLECTIONS, {"s": collection(FIVE, FIVE, count=1)}, MISFIT.format("s", "set<int>")),
        (COLLECTIONS, {"s": collection(FIVE, count=-1)}, MISFIT.format("s", "set<int>")),
        (COLLECTIONS, {"s": b"\0\0"}, MISFIT.format("s", "set<int>")),
        (COLLECTIONS, {"deleted_elements_s": collection(FIVE)[:-1]}, MISFIT.format("cdc$deleted_elements_s", "")),
        (COLLECTIONS, {"u": collection(FIVE, b"x", FIVE)[4:]}, MISFIT.format("u", "u")),
        (COLLECTIONS, {"u": b"\0\0"}, MISFIT.format("u", "u")),
        (COLLECTIONS, {"deleted_elements_u": {2}}, MISFIT.format("cdc$deleted_elements_u", "")),
        (COLLECTIONS, {"deleted_elements_u": {-1}}, MISFIT.format("cdc$deleted_elements_u", "")),
    ],
)
def test_a_log_row_that_cannot_be_used(tables: Tables, columns: dict[str, Any], reason: str) -> None:
    given = {"number": 0, "operation": 1, "time": TIME} | ({"ck": 1} if tables is COLLECTIONS else {}) | columns
    stream = {"cdc$stream_id": given.pop("cdc$stream_id")} if "cdc$stream_id" in given else {}
    bad = row(given.pop("number"), given.pop("operation"), **given) | stream
    good = row(0, 3, time=OTHER, pk2=b"", **{key.name: 1 for key in tables.base.clustering})
    found = tables.decode(tables.page([bad, good]))
    assert found.counts.errors == found.rows.num_rows == 1
    (error,) = found.errors.to_pylist()
    assert reason in error["reason"].replace("frozen<", "")
    assert error["file"] == "ks.t_scylla_cdc_log"
    assert error["raw"] == tables.page([bad])
    assert error["length"] == len(error["raw"]) - 4
    assert error["position"] == (T if bad["cdc$time"] == TIME else 0)
    again = tables.decode(error["raw"])
    assert again.errors["reason"].to_pylist() == [error["reason"]]


def test_an_error_does_not_touch_the_rows_around_it() -> None:
    good = row(0, ck=0, m={1: "x"}, s={1}, deleted_u=True, last=False), row(2, 2, ck=1, u={"a": 1, "b": None})
    bad = row(1, ck=0, m={1: "x"}, u={"a": 1, "b": "x"}, s=b"\0", last=False)
    alone, found = (
        COLLECTIONS.decode(COLLECTIONS.page(good)),
        COLLECTIONS.decode(COLLECTIONS.page([good[0], bad, good[1]])),
    )
    assert found.rows.equals(alone.rows)
    assert (found.counts.changed, found.counts.errors) == (2, 1)


class TestRanges:
    """The two rows of a range deletion are next to each other."""

    START, END = row(0, 5, ck1=1, last=False), row(1, 7, ck1=1)

    @pytest.mark.parametrize(
        "rows",
        [
            (START, END | {"cdc$batch_seq_no": 2}),
            (START, END | {"pk": 1}),
            (START, END | {"cdc$time": OTHER}),
            (START, END | {"cdc$stream_id": bytes(16)}),
            (START, END | {"v": 5}),
            (END, START),
            (row(0, 5, last=False), row(1, 7)),
        ],
    )
    def test_both_are_errors_otherwise(self, rows: tuple[dict[str, Any], ...]) -> None:
        found = PREFIXES.decode(PREFIXES.page(rows), take_incomplete=True)
        assert (found.rows.num_rows, found.counts.errors) == (0, 2)

    def test_a_start_behind_a_start(self) -> None:
        rows = self.START, row(1, 6, ck1=2, last=False), row(2, 8, ck1=3)
        found = PREFIXES.decode(PREFIXES.page(rows))
        assert (found.rows.num_rows, found.counts.changed, found.counts.errors) == (1, 2, 1)
        (deleted,) = shown(PREFIXES, found)
        assert deleted["range"]["start"] == {"raw_clustering": ["00000002"], "inclusive": False}

    def test_many_in_one_write(self) -> None:
        rows = [
            one
            for i in range(0, 20, 2)
            for one in (row(i, 5, ck1=i, last=False), row(i + 1, 8, ck1=i, ck2=1, last=i == 18))
        ]
        found = PREFIXES.decode(*(PREFIXES.page([one]) for one in rows))
        starts = [one["range"]["start"]["raw_clustering"] for one in shown(PREFIXES, found)]
        assert starts == [[f"{i:08x}"] for i in range(0, 20, 2)]
        assert found.counts.changed == 20


class TestIncompleteWrites:
    """A write of which the last row is missing is held back."""

    ROWS = row(0, ck=0, c=0, last=False), row(1, ck=1, c=0)

    def test_all_rows_of_the_write_are_held(self) -> None:
        before, behind = row(0, ck=7, c=0, time=OTHER), row(0, 3, ck=8) | {"cdc$stream_id": bytes(16)}
        found = STATIC.decode(STATIC.page([before, self.ROWS[0], self.ROWS[0] | {"cdc$operation": 77}, behind]))
        assert (found.counts.held, found.counts.errors, found.counts.changed) == (2, 0, 2)
        assert found.groups.complete.tolist() == [True, False, True]
        assert found.group.tolist() == [0, 2]
        assert found.groups.time[1].tobytes() == TIME.bytes
        assert [one["raw_clustering"] for one in shown(STATIC, found)] == [["00000007"], ["00000008"]]

    def test_they_are_taken_on_demand(self) -> None:
        found = STATIC.decode(STATIC.page(self.ROWS[:1]), take_incomplete=True)
        assert (found.counts.changed, found.groups.complete.tolist()) == (1, [False])

    def test_half_a_range_is_no_error_yet(self) -> None:
        start = PREFIXES.page([row(0, 5, ck1=1, last=False)])
        assert PREFIXES.decode(start).counts.held == 1
        assert PREFIXES.decode(start, take_incomplete=True).counts.errors == 1

    def test_the_write_goes_on_in_the_next_page(self) -> None:
        found = STATIC.decode(*(STATIC.page([one]) for one in self.ROWS))
        assert (found.counts.changed, found.groups.complete.tolist()) == (2, [True])

    def test_a_log_without_the_mark(self) -> None:
        old = replace(STATIC, log=replace(STATIC.log, has_end_of_batch=False))
        found = old.decode(old.page(self.ROWS[:1]))
        assert (found.counts.changed, found.groups.complete.tolist()) == (1, [True])

    def test_collections_that_are_held_leave_nothing_behind(self) -> None:
        held = row(0, ck=0, m={1: "x"}, deleted_m=True, last=False, time=OTHER)
        good = row(0, ck=0, t="text")
        expected = COLLECTIONS.decode(COLLECTIONS.page([good])).rows
        assert COLLECTIONS.decode(COLLECTIONS.page([held, good])).rows.equals(expected)


class TestAlter:
    """The log is read by a schema that is not that of all its rows."""

    def test_a_column_was_added(self) -> None:
        tables = tables_of("pk int, v int, new int", "pk")
        rows = row(v=1), row(time=OTHER, new=1)
        assert changes(tables, *rows)[0] == of_row(live("v", ONE), ck=())
        gone = ("new", "cdc$deleted_new")
        without = replace(
            tables, log=replace(tables.log, columns=tuple(c for c in tables.log.columns if c.name not in gone))
        )
        assert changes(without, row(v=1)) == [of_row(live("v", ONE), ck=())]

    def test_a_column_was_dropped_and_the_log_has_it(self) -> None:
        tables = tables_of("pk int, a int, b int", "pk")
        kept = tuple(column for column in tables.base.columns if column.name != "a")
        dropped = replace(tables.base, columns=kept, dropped=(DroppedColumn("a", "regular", Native("int"), 5),))
        column = replace(tables.log.columns[0], number=1)
        log = replace(tables.log, base=dropped, columns=(column, replace(tables.log.columns[1], number=0)))
        after = replace(tables, base=dropped, log=log)
        assert changes(after, row(a=1, b=0)) == [of_row(live("a", ONE), live("b", ZERO), ck=())]

    @pytest.mark.parametrize(("dropped_at", "is_empty"), [(T, True), (T - 60_000_000, False)])
    def test_a_column_was_dropped_with_all_that_a_row_set(self, dropped_at: int, is_empty: bool) -> None:
        """What was written after that must set another one."""
        tables = tables_of("pk int, b int", "pk")
        dropped = replace(tables.base, dropped=(DroppedColumn("a", "regular", Native("int"), dropped_at),))
        after = replace(tables, base=dropped, log=replace(tables.log, base=dropped))
        counts = after.decode(after.page([row()])).counts
        assert (counts.empty, counts.errors) == (is_empty, not is_empty)

    def test_a_type_got_another_field(self) -> None:
        grown = tables_of("pk int, ck int, u u", "pk, ck", types="a int, b text, c int")
        assert changes(grown, row(ck=0, u=collection(FIVE, b"x")[4:])) == [
            of_row(live("u", "00000005", path="0000"), live("u", "78", path="0001"))
        ]


def test_pages_that_are_cut_off() -> None:
    page = STATIC.page([row(ck=0, c=0)])
    for end in (4, 20, len(page) - 1):
        with pytest.raises(ValueError, match="result page"):
            STATIC.decode(page[:end])
    with pytest.raises(ValueError, match="malformed"):
        STATIC.decode(page + b"\0")


def test_too_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    page = STATIC.page([row(ck=0, c=0)])
    monkeypatch.setattr(log_rows_module, "MOST_BYTES", 3 * len(page) - 1)
    assert STATIC.decode(page, page).counts.changed == 2
    with pytest.raises(ValueError, match=r"3 pages of ks\.t_scylla_cdc_log have .* pass fewer pages at once"):
        STATIC.decode(page, page, page)


@pytest.mark.parametrize("tables", [STATIC, COLLECTIONS], ids=["walked once", "walked twice"])
@pytest.mark.parametrize("columns", [{}, {"ttl": 5, "last": False}], ids=["common", "other lengths"])
def test_a_page_may_be_cut_off_anywhere(tables: Tables, columns: dict[str, Any]) -> None:
    """The message names the cell that does not end, or the page's beginning if so few bytes cannot hold the rows."""
    page = tables.page([row(ck=0, **columns), row(ck=1, operation=2, **columns)])
    starts, place = [], 4
    while place < len(page):
        starts.append(place)
        place += 4 + max(struct.unpack_from(">i", page, place)[0], 0)
    for end in range(4, len(page)):
        inside = max((start for start in starts if start <= end), default=0)
        named = inside if end >= 4 + 4 * len(starts) else 0
        with pytest.raises(ValueError, match=rf"result page.* byte {named}\b"):
            tables.decode(page[:end])


def test_the_first_row_of_a_write_is_undone_alone() -> None:
    before, bad = row(ck=7, c=7, time=OTHER), row(ck=0, c=b"\1\2\3", last=False)
    good = row(ck=1, c=5, number=1)
    found = STATIC.decode(STATIC.page([before, bad, good]))
    assert (found.counts.changed, found.counts.errors, len(found.groups)) == (2, 1, 2)
    assert shown(STATIC, found) == [*changes(STATIC, before), *changes(STATIC, good)]
    held = STATIC.decode(STATIC.page([before, bad, row(ck=1, c=5, number=1, last=False)]))
    assert (held.counts.changed, held.counts.held) == (1, 2)
    assert shown(STATIC, held) == changes(STATIC, before)


def test_no_rows() -> None:
    for pages in ([], [STATIC.page([])], [STATIC.page([])] * 3):
        found = STATIC.decode(*pages)
        assert (found.rows.num_rows, found.errors.num_rows, len(found.groups)) == (0, 0, 0)


def test_odd_bytes_lead_to_errors_and_to_nothing_worse() -> None:
    """Each cell's bytes may be anything; the rows next to it stay as they are."""
    chance, maker = Random(5), Maker(CLUSTERED, 5)
    times, errors = Times(chance), 0
    for _ in range(400):
        rows = [one for _ in range(5) for one in log_rows(maker.mutation(), times)]
        page = bytearray(CLUSTERED.page(rows))
        for _ in range(chance.randint(1, 4)):
            page[chance.randrange(4, len(page))] = chance.choice([0, 1, 2, 127, 128, 255, chance.randrange(256)])
        try:
            errors += CLUSTERED.decode(bytes(page), take_incomplete=True, log_ttls_s=[86_400]).counts.errors
        except ValueError as error:
            assert "result page" in str(error)  # noqa: PT017
    assert errors > 50


def test_large_rows() -> None:
    entries = {i: "x" * (i % 50) for i in range(20_000)}
    rows = row(ck=0, m=entries, deleted_elements_s=set(range(30_000)), t="y" * 300_000)
    found = COLLECTIONS.decode(COLLECTIONS.page([rows]))
    assert found.counts.changed == 1
    assert len(found.rows["cells"][0]) == 50_001
