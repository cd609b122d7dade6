"""The history of tables: one gap-free count for each name, whoever writes it at once, is killed, or is behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ringsync.cql.types import Native
from ringsync.ledger.schema_changes import change_numbers
from ringsync.ledger.table_versions import (
    CdcBegun,
    TableVersionError,
    latest_version,
    lost_version,
    names_of_versions,
    next_version,
    version_document,
    version_of,
)
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.storage.local import LocalStore
from tests.ledger.histories import history_of
from tests.mortal_store import IMMORTAL, Killed, MortalStore

INT = Native("int")
FIRST, SECOND = "a" * 32, "b" * 32


def table(*columns: str, table_id: str = FIRST, since_us: int = 0, dropped: tuple[str, ...] = ()) -> TableSchema:
    return TableSchema(
        "shop",
        "t",
        table_id,
        (Column("id", "partition_key", INT), *(Column(name, "regular", INT) for name in columns)),
        tuple(DroppedColumn(name, "regular", INT, 5) for name in dropped),
        since_us,
    )


def numbers(store: LocalStore) -> list[int]:
    return [entry.version.number for entry in history_of(store, "shop", "t")]


def test_a_table_that_is_created_again_goes_on_counting(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    tables = [table("v"), table("v", "w"), table("v", table_id=SECOND), table("v", "x", table_id=SECOND)]
    versions = [version_of(store, one) for one in tables]
    assert [version.number for version in versions] == [1, 2, 3, 4]
    assert [version.names for version in versions] == [("v",), ("v", "w"), ("v",), ("v", "x")]
    assert [entry.version for entry in history_of(store, "shop", "t")] == versions
    assert (latest_version(store, FIRST), latest_version(store, SECOND)) == (versions[1], versions[3])
    # Somebody still learns of a change of the table that is gone.
    late = version_of(store, table("v", "w", "y"))
    assert (late.number, latest_version(store, FIRST), latest_version(store, SECOND)) == (5, late, versions[3])


def test_the_history_tells_since_when_and_when_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 17.5)
    store = LocalStore(tmp_path)
    version_of(store, table("v", since_us=16_000_001))
    (entry,) = history_of(store, "shop", "t")
    assert (entry.version.table.since_us, entry.found_ms) == (16_000_001, 17_500)


def test_a_node_that_is_behind_adds_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = version_of(store, table("v", since_us=1))
    second = version_of(store, table("v", "w", since_us=2))
    assert version_of(store, table("v", since_us=1)) == first
    assert version_of(store, table("v", "w", since_us=2)) == second
    # The table was changed back: that is newer than both.
    third = version_of(store, table("v", since_us=3))
    assert (third.number, third.names) == (3, ("v", "w"))
    # A change between the two, which nobody saw in time.
    assert version_of(store, table("u", since_us=1)).number == 4
    assert numbers(store) == [1, 2, 3, 4]


def test_many_at_once_write_one_history_without_gaps(tmp_path: Path) -> None:
    changes = [table(*"abcdefgh"[: 1 + n % 8], since_us=1 + n % 8) for n in range(80)]

    def learn(change: TableSchema) -> tuple[int, TableSchema]:
        version = version_of(LocalStore(tmp_path), change)
        return version.number, version.table

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(learn, changes))
    assert [known for _, known in found] == changes
    entries = history_of(LocalStore(tmp_path), "shop", "t")
    assert [entry.version.number for entry in entries] == list(range(1, len(entries) + 1))
    last = entries[-1].version
    assert sorted(last.names) == sorted(set(last.names)) == list("abcdefgh")
    assert all(entry.version.names == last.names[: len(entry.version.names)] for entry in entries), "ids stay"


def live(store: LocalStore) -> None:
    version_of(store, table("v", since_us=1))
    second = version_of(store, table("v", "w", since_us=2))
    next_version(store, replace(second, number=2))
    version_of(store, table("v", table_id=SECOND, since_us=3))


def everything(store: LocalStore) -> tuple[object, ...]:
    entries = [version_document(entry.version) for entry in history_of(store, "shop", "t")]
    return entries, latest_version(store, FIRST), latest_version(store, SECOND)


def test_who_is_killed_anywhere_comes_to_the_same_history(tmp_path: Path) -> None:
    live(whole := LocalStore(tmp_path / "whole"))
    assert numbers(whole) == [1, 2, 3, 4]
    for writes in range(100):
        store = MortalStore(tmp_path / f"{writes}")
        store.left = writes
        try:
            live(store)
            break
        except Killed:
            store.left = IMMORTAL
            live(store)
        assert everything(store) == everything(whole)
    assert writes == 6, "four versions, and the places of two tables"


def test_who_sleeps_while_others_write_comes_to_the_same_history(tmp_path: Path) -> None:
    live(whole := LocalStore(tmp_path / "whole"))
    for writes in range(6):
        store = MortalStore(folder := tmp_path / f"{writes}")
        store.left, store.others = writes, partial(live, LocalStore(folder))
        live(store)
        assert everything(store) == everything(whole)


def test_the_form_of_messages_changes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = version_of(store, table("v"))
    second = next_version(store, first)
    assert (second.number, second.table, second.names) == (2, first.table, first.names)
    assert next_version(store, first) == second, "another process needs the same one"
    assert version_of(store, table("v")) == second
    version_of(store, table("v", "w"))
    assert next_version(store, second).number == 4, "a process that does not know of the change"


def test_a_selection_of_columns_is_no_version(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    whole = version_of(store, table("v", "w", since_us=1))
    some = version_of(store, table("v", "w", since_us=1).only(["w"]))
    assert (some.number, some.names, some.table) == (1, ("v", "w"), whole.table.only(["w"]))
    # Its messages have another form.
    other = next_version(store, some)
    assert (other.number, other.table) == (2, some.table)
    assert [entry.version.table for entry in history_of(store, "shop", "t")] == [whole.table, whole.table]
    assert next_version(store, some) == other
    again = version_of(store, whole.table)
    assert (again.number, again.table, latest_version(store, FIRST)) == (2, whole.table, again)


def test_an_id_that_comes_again_under_another_name_keeps_its_columns_ids(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v", "w"))
    other = version_of(store, replace(table("a", "w"), name="u"))
    assert (other.number, other.names) == (2, ("v", "w", "a"))
    assert latest_version(store, FIRST) == other


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    odd = replace(table("v"), keyspace="../..", name='a"/b')
    assert version_of(store, odd) == latest_version(store, FIRST)
    assert [entry.version.table for entry in history_of(store, "../..", 'a"/b')] == [odd]
    assert history_of(store, "..", '..a"/b') == []


def test_a_damaged_version_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v"))
    store.put("schemas/shop.t/000001.json", b"{")
    for read in (lambda: latest_version(store, FIRST), lambda: version_of(store, table("w"))):
        with pytest.raises(TableVersionError, match=r"schemas/shop\.t/000001\.json cannot be read .* restore it"):
            read()


def test_a_damaged_version_of_a_dropped_table_holds_up_nobody(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v"))
    store.put("schemas/shop.t/000001.json", b"{")
    again = version_of(store, table("v", table_id=SECOND, since_us=3))
    assert (again.number, again.names) == (2, ("v",))
    assert version_of(store, table("w", table_id=SECOND, since_us=1)).number == 3
    assert latest_version(LocalStore(tmp_path), SECOND) == version_of(store, table("w", table_id=SECOND))


def test_who_knows_only_an_earlier_plan_changes_no_version(tmp_path: Path) -> None:
    """Its table came back as the latest, without the column that was added meanwhile."""
    store = LocalStore(tmp_path)
    first = version_of(store, table("v", since_us=1))
    form = next_version(store, first)
    altered = version_of(store, table("v", "w", since_us=2))
    assert next_version(store, first) == form
    other = next_version(store, form)
    assert (other.number, other.table) == (4, form.table)
    latest = latest_version(store, FIRST)
    assert (latest and latest.number, latest and latest.table) == (4, altered.table)


def test_a_table_that_only_has_a_history_was_never_followed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v"))
    version_of(store, table("v", table_id=SECOND))
    CdcBegun(store).begins(SECOND, 0)
    begun = CdcBegun(store)
    assert [one in begun for one in (FIRST, SECOND)] == [False, True]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"histories": []}', b'{"histories": {"shop.t": "one"}}'])
def test_a_damaged_place_is_named_and_made_again_when_it_is_removed(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v", table_id=SECOND))
    version_of(store, table("v", "w"))
    store.put(f"schemas/{FIRST}.json", content)
    with pytest.raises(TableVersionError, match=f"schemas/{FIRST}.json cannot be read .* remove it"):
        version_of(store, table("v"))
    store.delete(f"schemas/{FIRST}.json")
    assert version_of(store, table("a")).names == ("v", "w", "a")


def test_who_knows_only_an_earlier_plan_gets_one_number_for_its_form(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = version_of(store, table("v", since_us=1))
    version_of(store, table("v", "w", since_us=2))
    assert [next_version(store, first).number for _ in range(3)] == [3, 3, 3]


def test_a_schema_in_between_that_a_node_shows_late_gets_no_number(tmp_path: Path) -> None:
    """It became the latest version, and rows with the newest column could not be published until the next ALTER."""
    store = LocalStore(tmp_path)
    version_of(store, table("v", since_us=1))
    latest = version_of(store, table("u", "v", "w", since_us=3))
    behind = version_of(store, table("u", "v", since_us=2))
    assert (behind.number, behind.names, behind.table) == (2, latest.names, table("u", "v"))
    assert latest_version(store, FIRST) == latest
    assert numbers(store) == [1, 2]


def test_a_version_is_found_when_its_place_is_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, table("v", table_id=SECOND))
    version = version_of(store, table("v", "w"))
    (tmp_path / f"schemas/{FIRST}.json").unlink()
    assert lost_version(store, FIRST) == version
    assert lost_version(store, "0" * 32) is None


def test_objects_beside_versions_are_no_versions(tmp_path: Path) -> None:
    """Somebody set a damaged version aside: no table of the cluster had a plan, and no log was staged."""
    store = LocalStore(tmp_path)
    version_of(store, table("v"))
    for name in ("000001.json.damaged", "000001.json~", "notes.json", "1.json"):
        store.put(f"schemas/shop.t/{name}", b"{}")
        store.put(f"schema_changes/{name.replace('1.json', 'x.json')}", b"{}")
    assert version_of(store, table("v", "w")).number == 2
    assert names_of_versions(store) == {"shop.t": [1, 2]}
    assert change_numbers(store) == []
