"""What the schema updater tells of what it finds, without a server."""

from __future__ import annotations

import pytest

from ringsync.ledger import schema_changes
from ringsync.ledger.table_versions import next_version, version_of
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.steps import schema_update
from ringsync.storage.port import UnavailableError
from tests.steps.schema_looks import Looks, Types, looks, table

__all__ = ["looks"]

T = table("t", "a", "v int", since=1)


@pytest.mark.parametrize(
    "again",
    [
        table("t", "a", "v int", clustering="c int", since=2),
        table("t", "a", "v int", key="id text", since=2),
        table("t", "a", "v text", since=2),
    ],
)
def test_a_table_that_got_an_old_id_is_told_as_another_one(looks: Looks, again: TableSchema) -> None:
    looks.look(T, table("o", "b", "v int", since=1))
    drop, create, add = looks.look(again, table("o", "b", "v int; w int", since=2))
    assert (drop[0], create[0].split(" (")[0]) == ("DROP TABLE k.t;", "CREATE TABLE k.t")
    assert add == ("ALTER TABLE k.o ADD w int;", {"k.o": 2, "k.t": 2})
    assert looks.updater.problems == []


def test_a_table_that_cannot_be_told_is_held_back_alone(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    looks.look(T)
    write = schema_update.change_statements

    def fails(before: TableSchema, after: TableSchema) -> list[str]:
        if after.name == "t":
            raise KeyError("odd")
        return write(before, after)

    monkeypatch.setattr(schema_update, "change_statements", fails)
    altered = table("t", "a", "v int; w int", since=2)
    assert [version for _, version in looks.look(altered, table("o", "b", "v int"))] == [{"k.o": 1}]
    assert looks.updater.problems == ["k.t: KeyError: 'odd'"]
    monkeypatch.undo()


def test_a_store_that_is_away_is_no_fault_of_a_table(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise UnavailableError("away")

    monkeypatch.setattr(schema_update, "version_of", away)
    with pytest.raises(UnavailableError):
        looks.look(T)


@pytest.mark.parametrize(
    "inside",
    ["vector<frozen<addr>, 2>", "frozen<list<addr>>", "tuple<addr, int>", "map<int, frozen<addr>>", "frozen<addr>"],
)
def test_a_column_that_had_been_dropped_lives_on_when_its_type_grows(looks: Looks, inside: str) -> None:
    def with_types(types: Types, since: int) -> TableSchema:
        return table("t", "a", f"v {inside}", dropped=[("v", inside, 1700000000000000)], types=types, since=since)

    before = {"addr": [["s", "text"]]}
    after = {"addr": [["s", "text"], ["z", "text"]]}
    looks.look(with_types(before, 1), types=before)
    assert looks.look(with_types(after, 2), types=after) == [("ALTER TYPE k.addr ADD z text;", {"k.t": 2})]


ADDED = table("t", "a", "v int; x int", since=2)
DROPPED = table("t", "a", "v int", dropped=[("x", "int", 3000)], since=3)
ADDED_AND_DROPPED = [
    ("ALTER TABLE k.t ADD x int;", {"k.t": 2}),
    ("ALTER TABLE k.t DROP x USING TIMESTAMP 3000;", {"k.t": 3}),
]


def test_what_came_and_went_is_told_if_messages_name_its_version(looks: Looks) -> None:
    looks.look(T)
    assert [version_of(looks.store, one).number for one in (ADDED, DROPPED)] == [2, 3]
    assert looks.look(DROPPED) == ADDED_AND_DROPPED
    assert looks.look(DROPPED) == []


def test_a_version_that_was_found_after_the_look_is_told_by_the_next(looks: Looks) -> None:
    looks.look(T)
    by_a_clock_behind = table("t", "a", "v int; x int", since=0)
    version_of(looks.store, by_a_clock_behind)
    assert looks.look(T) == []
    assert looks.look(by_a_clock_behind) == ADDED_AND_DROPPED[:1]


def test_a_key_that_got_its_name_again_is_told(looks: Looks) -> None:
    first, other, again = (
        table("t", "a", "v int", clustering=f"{name} int", since=at) for at, name in enumerate("aba", 1)
    )
    looks.look(first)
    for one in (other, again):
        version_of(looks.store, one)
    told = [("ALTER TABLE k.t RENAME a TO b;", {"k.t": 2}), ("ALTER TABLE k.t RENAME b TO a;", {"k.t": 3})]
    assert looks.look(again) == told
    looks.begin()
    assert looks.look(again) == []


def test_versions_are_told_of_a_table_that_is_gone_or_new(looks: Looks) -> None:
    looks.look(T)
    version_of(looks.store, ADDED)
    for one in (table("n", "c", "v int", since=3), table("n", "c", "v int; w int", since=4)):
        version_of(looks.store, one)
    found = looks.look(one)
    assert [(ddl.split(" (")[0], named) for ddl, named in found] == [
        ("ALTER TABLE k.t ADD x int;", {"k.t": 2}),
        ("CREATE TABLE k.n", {"k.n": 1}),
        ("DROP TABLE k.t;", None),
        ("ALTER TABLE k.n ADD w int;", {"k.n": 2}),
    ]


def test_a_kill_between_two_of_them_loses_and_repeats_nothing(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    looks.look(T)
    for one in (ADDED, DROPPED):
        version_of(looks.store, one)
    put, left = schema_changes.SchemaLog.add, [1]

    def killed(log: schema_changes.SchemaLog, *arguments: object, **named: object) -> bool:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return put(log, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(schema_changes.SchemaLog, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        looks.look(DROPPED)
    monkeypatch.setattr(schema_changes.SchemaLog, "add", put)
    looks.begin()
    looks.look(DROPPED)
    assert looks.messages()[-2:] == ADDED_AND_DROPPED


def test_what_was_told_is_known_to_a_reader_that_begins_in_the_middle(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_changes, "WHOLE_EVERY", 2)
    looks.look(T)
    for at in (2, 3):
        looks.look(T, table("o", "b", "v int" + "; w int" * (at - 2), since=at))
    for one in (ADDED, DROPPED):
        version_of(looks.store, one)
    looks.begin()
    found = looks.look(DROPPED, table("o", "b", "v int; w int", since=3))
    assert found == ADDED_AND_DROPPED


def test_a_type_of_two_tables_is_told_once_with_both(looks: Looks) -> None:
    def both(fields: list[list[str]], since: int, more: str = "") -> tuple[TableSchema, TableSchema]:
        kinds = {"k": fields}
        t = table("t", "a", "v frozen<k>" + more, types=kinds, since=since + bool(more))
        return t, table("o", "b", "v frozen<k>", types=kinds, since=since)

    one, two = [["a", "int"]], [["a", "int"], ["b", "int"]]
    looks.look(*both(one, 1), types={"k": one})
    version_of(looks.store, both(two, 2)[0])
    assert looks.look(*both(two, 2, "; w int"), types={"k": two}) == [
        ("ALTER TYPE k.k ADD b int;", {"k.t": 2}),
        ("ALTER TABLE k.t ADD w int;", {"k.o": 2, "k.t": 3}),
    ]


def test_another_form_of_messages_is_no_statement(looks: Looks) -> None:
    looks.look(T)
    next_version(looks.store, version_of(looks.store, T))
    assert looks.look(T) == []
    number = looks.updater.status()["changes"]
    assert looks.look(T) == []
    assert looks.updater.status()["changes"] == number
    assert looks.look(ADDED) == [("ALTER TABLE k.t ADD x int;", {"k.t": 3})]


def test_two_new_forms_of_messages_add_one_change(looks: Looks) -> None:
    """Each look added an empty one, for ever."""
    first = table("a", "1", "v int", since=1)
    looks.look(first)
    version = version_of(looks.store, first)
    for _ in range(2):
        version = next_version(looks.store, version)
    assert [looks.look(first) for _ in range(3)] == [[], [], []]
    assert (looks.updater._log.number, looks.updater._log.told) == (2, {"k.a": 3})


def test_a_damaged_version_in_between_is_left_out(looks: Looks) -> None:
    looks.look(T)
    for one in (ADDED, DROPPED):
        version_of(looks.store, one)
    looks.store.put("schemas/k.t/000002.json", b"{")
    after = table("t", "a", "v int; w int", dropped=[("x", "int", 3000)], since=4)
    assert looks.look(after) == [("ALTER TABLE k.t ADD w int;", {"k.t": 4})]


TYPES = {"inner": [["a", "int"]], "outer": [["i", "frozen<inner>"]]}
NESTED = table("t", "a", "v frozen<outer>", types=TYPES, since=1)
T2 = table("o", "b", "v int", since=1)
UNREADABLE = UnreadableTable("k", "t", "a" * 32, "has an unknown type")


def test_types_of_a_table_that_was_held_back_are_dropped_in_order(looks: Looks) -> None:
    looks.look(NESTED, T2, types=TYPES)
    assert [ddl for ddl, _ in looks.look(types=TYPES, unreadable=[UNREADABLE])] == ["DROP TABLE k.o;"]
    assert [ddl for ddl, _ in looks.look()] == ["DROP TABLE k.t;", "DROP TYPE k.outer;", "DROP TYPE k.inner;"]


def test_a_type_that_a_told_table_has_is_not_dropped(looks: Looks) -> None:
    """It was dropped and made again, while a table with it cannot be read. Who needs the new one waits."""
    looks.look(NESTED, types=TYPES)
    other = {**TYPES, "inner": [["a", "text"]]}
    waits, goes_on = table("w", "b", "v frozen<inner>", types=other), table("o", "c", "v int")
    found = looks.look(waits, goes_on, types=other, unreadable=[UNREADABLE])
    assert [(ddl.split(" (")[0], named) for ddl, named in found] == [("CREATE TABLE k.o", {"k.o": 1})]
    assert [problem.split(":")[0] for problem in looks.updater.problems] == ["k.t", "k.w"]
    looks.begin()
    again = table("t", "a", "v frozen<outer>", dropped=[("v", "blob", 5)], types=other, since=2)
    assert [ddl.split(" (")[0] for ddl, _ in looks.look(again, waits, goes_on, types=other)] == [
        "ALTER TABLE k.t DROP v USING TIMESTAMP 5;",
        "DROP TYPE k.outer;",
        "DROP TYPE k.inner;",
        "CREATE TYPE IF NOT EXISTS k.inner",
        "CREATE TYPE IF NOT EXISTS k.outer",
        "CREATE TABLE k.w",
        "ALTER TABLE k.t ADD v frozen<outer>;",
    ]
    assert looks.updater.problems == []
