"""What the schema updater tells of what it finds, without a server."""

from __future__ import annotations

import pytest

from ringsync.schema.table import TableSchema
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
