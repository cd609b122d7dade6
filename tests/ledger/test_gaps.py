"""What a gap waits for, and what a look at all gaps costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ringsync.ledger.dropped_tables import mark_dropped, unmark_dropped
from ringsync.ledger.gaps import Followed, Gap, Gaps, Judge, close_gap, note_gap, note_verified
from ringsync.service.lost import look_for_lost
from ringsync.storage.local import LocalStore

ORDERS, ITEMS = "a" * 32, "b" * 32
BOTH = {ORDERS: "shop.orders", ITEMS: "shop.items"}


def gap(tables: Mapping[str, str], segment: int = 1, found_ms: int = 1000) -> Gap:
    return Gap("n", "h:9042", f"CommitLog-7-{segment}.log", 0, found_ms, tables, ())


def waits_for(store: LocalStore, one: Gap, *there: str, **more: Any) -> list[str] | None:
    """Judge a gap where these tables have replicas, as the store shows."""
    return Judge(store, more.get("followed", {}), lambda name: name in there).unverified(one)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_gap_waits_until_each_of_its_tables_was_verified_since(store: LocalStore) -> None:
    one = gap(BOTH)
    assert waits_for(store, one, *BOTH.values()) == ["shop.items", "shop.orders"]
    note_verified(store, ORDERS, 1001)
    note_verified(store, ITEMS, 1000)
    assert waits_for(store, one, *BOTH.values()) == ["shop.items"]
    note_verified(store, ITEMS, 1001)
    assert waits_for(store, one, *BOTH.values()) is None


def test_the_latest_verification_counts_and_is_one_object(store: LocalStore) -> None:
    for moment_ms in (3000, 2500):  # of two at once, the one that saw less may end last
        note_verified(store, ORDERS, moment_ms)
        assert [stat.key for stat in store.list("verified/")] == [f"verified/{ORDERS}/0000000003000.json"]
    assert waits_for(store, gap(BOTH), *BOTH.values()) == ["shop.items"]


def test_what_others_have_put_beside_a_verification_stays_and_says_nothing(store: LocalStore) -> None:
    strays = [
        f"verified/{ORDERS}/notes.txt",
        f"verified/{ORDERS}/9.json",
        f"verified/{ORDERS}.json",
        "verified/x/y.json",
    ]
    for key in strays:
        store.put(key, b"{")
    note_verified(store, ORDERS, 500)
    note_verified(store, ORDERS, 600)
    assert {stat.key for stat in store.list("verified/")} == {*strays, f"verified/{ORDERS}/0000000000600.json"}
    assert waits_for(store, gap(BOTH), *BOTH.values()) == ["shop.items", "shop.orders"]


def test_tables_that_are_gone_or_have_no_replica_keep_no_gap_open(store: LocalStore) -> None:
    dropped, plain = "c" * 32, "d" * 32
    tables = {ORDERS: "shop.orders", dropped: "shop.dropped", plain: "shop.plain"}
    mark_dropped(store, "shop", "dropped", dropped, 5)
    with_replica = ("shop.orders", "shop.dropped")
    assert waits_for(store, gap(tables), *with_replica) == ["shop.orders"]
    note_verified(store, ORDERS, 2000)
    assert waits_for(store, gap(tables), *with_replica) is None
    # Where there is nothing to verify, somebody has to take note of the gap.
    alone = gap({plain: "shop.plain"})
    assert waits_for(store, alone) == []
    assert f"cdcservice gaps acknowledge {alone.key} --reason" in alone.describe([])


def test_a_table_that_was_dropped_unseen_is_known_by_the_later_one_of_its_name(store: LocalStore) -> None:
    """The schema updater was away while it was created and dropped, so nobody marks it."""
    first, second = (UUID(fields=(n, 0, 0x1000, 0x80, 0, 1)).hex for n in (1, 2))
    one = gap({ORDERS: "shop.orders", first: "shop.again"})
    note_verified(store, ORDERS, 2000)
    there = ("shop.orders", "shop.again")
    assert waits_for(store, one, *there) == ["shop.again"]
    assert waits_for(store, one, *there, followed={"shop.again": Followed(second, True)}) is None
    again = gap({ORDERS: "shop.orders", second: "shop.again"})
    assert waits_for(store, again, *there, followed={"shop.again": Followed(first, True)}) == ["shop.again"]


def test_a_replica_that_nobody_has_told_of_yet_keeps_a_gap_open(store: LocalStore) -> None:
    note_verified(store, ORDERS, 2000)
    followed = {name: Followed(one, has_replica=False) for one, name in BOTH.items()}
    assert waits_for(store, gap(BOTH), *BOTH.values(), followed=followed) == ["shop.items"]
    assert waits_for(store, gap(BOTH), "shop.orders", followed=followed) is None


def test_what_a_look_costs_does_not_grow_with_gaps_times_tables(store: LocalStore, monkeypatch: Any) -> None:
    """10 gaps of 1,000 tables were 30,011 requests, one after the other."""
    tables = {f"{n:032x}": f"shop.t{n}" for n in range(200)}
    for n in range(20):
        note_gap(store, gap(tables, n))
    for table_id in list(tables)[:100]:
        note_verified(store, table_id, 2000)
    asked: Counter[str] = Counter()
    for name in ("get", "stat", "list"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *given, _real=real, _name=name: asked.update([_name]) or _real(*given))
    followed = {name: Followed(one, True) for one, name in tables.items()}
    gaps = Gaps(store)

    def look() -> dict[str, int]:
        asked.clear()
        judge = Judge(store, followed, lambda name: pytest.fail(f"{name} is known"))
        waiting = [judge.unverified(one) for one in gaps.look().values() if one is not None]
        assert [len(names or ()) for names in waiting] == [100] * 20
        return dict(asked)

    assert look() == {"list": 3, "get": 20}
    assert look() == {"list": 3}, "a gap never changes"
    close_gap(store, gap(tables, 7).key)
    store.put(gap(tables, 8).key, b"{")
    assert [one for one in gaps.look().values() if one is None] == [None]
    assert len(gaps.look()) == 19


@pytest.mark.parametrize(
    "field", [{"found_ms": "x"}, {"since_ms": "x"}, {"tables": []}, {"found_ms": 1e30}, {"since_ms": 10**19}]
)
def test_a_gap_of_another_form_is_damaged_and_hides_no_other(store: LocalStore, field: dict[str, Any]) -> None:
    """One of them ended the whole look, and with it all alarms."""
    note_gap(store, gap(BOTH))
    other = gap(BOTH, segment=2)
    store.put(other.key, json.dumps({**asdict(other), **field}).encode())
    assert Gaps(store).look() == {gap(BOTH).key: gap(BOTH), other.key: None}


def test_a_gap_whose_tables_were_all_dropped_waits_in_case_they_come_back(store: LocalStore) -> None:
    """DROP, then CREATE … WITH ID from the snapshot's schema.cql."""
    note_gap(store, gap(BOTH))
    for table_id, name in BOTH.items():
        assert len(look_for_lost(store, {}, Gaps(store))) == 1
        mark_dropped(store, *name.split("."), table_id, 5)
    assert look_for_lost(store, {}, Gaps(store)) == []
    unmark_dropped(store, *BOTH[ORDERS].split("."), ORDERS)
    (lost,) = look_for_lost(store, {}, Gaps(store))
    assert lost.unverified is not None


@pytest.mark.parametrize("name", ["nonsense", 5, "a.b.c", None])
def test_a_gap_of_a_table_whose_name_is_none_is_damaged(store: LocalStore, name: Any) -> None:
    """Whether it has a replica could not be looked up: that ended the whole look."""
    store.put(gap(BOTH).key, json.dumps({**asdict(gap(BOTH)), "tables": {"t": name}}).encode())
    (lost,) = look_for_lost(store, {}, Gaps(store))
    assert lost.gap is None
    assert "cannot be read" in lost.problem(store).text
