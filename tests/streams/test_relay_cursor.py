"""The relay's cursor: exactly the folders that were relayed, in any order; only who claimed it last can move it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.storage.local import LocalStore
from ringsync.streams.cursor import Cursor, CursorObject, cursor_from_json, cursor_to_json
from ringsync.streams.sink import AnotherRelayError, CursorError

NAMES = [
    *(f"pass-{n:012}" for n in range(1, 9)),
    *(f"late-{n:06}" for n in (1, 2, 999_999)),
    *("pass-000001", "pass-000000000005-late", "bootstrap-6f1c", "bootstrap-20260101T000000", "schemas2", "000001"),
]
names = st.lists(st.sampled_from(NAMES))


def cursor_of(folders: list[str]) -> Cursor:
    cursor = Cursor("t")
    for folder in folders:
        cursor = cursor.within(folder, 1).behind(folder)
    return cursor


@given(names)
def test_a_cursor_has_what_was_relayed_and_nothing_else(one: list[str]) -> None:
    cursor = cursor_of(one)
    assert [name for name in NAMES if name in cursor] == [name for name in NAMES if name in one]
    assert cursor_from_json(cursor_to_json(cursor)) == cursor == cursor_of(sorted(one))
    assert cursor.newest == max(one, default="")


def test_a_cursor_in_the_middle_of_a_part_is_read_again() -> None:
    cursor = Cursor("t").within("late-000001", 2, 700)
    assert cursor_from_json(cursor_to_json(cursor)) == cursor
    assert [cursor.messages_of("late-000001", part) for part in (1, 2, 3)] == [0, 700, 0]
    assert cursor.messages_of("late-000002", 2) == 0
    assert cursor.behind("late-000001").messages == 0


def test_the_folder_so_many_numbers_before_the_newest() -> None:
    cursor = cursor_of([f"pass-{n:012}" for n in (*range(1, 100), 150)])
    assert [cursor.before_newest(n) for n in (1, 149)] == ["pass-000000000149", "pass-000000000001"]
    assert [cursor.before_newest(n) for n in (150, 10**6)] == ["", ""]
    assert [Cursor("t").before_newest(0), cursor_of(["bootstrap-6f1c"]).before_newest(0)] == ["", ""]


def test_many_passes_are_one_entry() -> None:
    cursor = cursor_of([f"pass-{n:012}" for n in [*range(500, 0, -1), *range(502, 600)]])
    assert cursor.runs == {"pass-000000000000": ((1, 500), (502, 599))}


def test_what_is_left_out_before_a_bucket_is_seen() -> None:
    cursor = cursor_of(["pass-000000000001", "pass-000000000002", "pass-000000000005"])
    assert [n for n in range(1, 9) if cursor.is_next(f"pass-{n:012}")] == [1, 2, 3, 6]
    assert cursor.is_next("bootstrap-6f1c")
    assert not cursor.is_next("late-000003")


def test_who_loaded_a_cursor_before_it_was_claimed_cannot_save_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    old, new = (CursorObject(store, "topic", "t") for _ in range(2))
    ours = old.claim().behind("pass-000001")
    old.save(ours)
    assert new.claim() == ours
    with pytest.raises(AnotherRelayError, match=r"kafka.json was changed meanwhile: another process relays t too"):
        old.save(ours.behind("pass-000002"))
    theirs = ours.within("pass-000002", 3)
    new.save(theirs)
    new.save(theirs.behind("pass-000002"))
    assert CursorObject(store, "topic", "t").load() == theirs.behind("pass-000002")


def test_a_cursor_that_was_removed_is_not_stored_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    relay = CursorObject(store, "topic", "t")
    relay.save(relay.claim().behind("a"))
    store.delete("streams/topic/kafka.json")
    with pytest.raises(AnotherRelayError):
        relay.save(cursor_of(["a", "b"]))
    assert relay.claim() == Cursor("t")


def test_a_cursor_that_is_none_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("streams/topic/kafka.json", b"{}")
    with pytest.raises(CursorError, match=r"kafka.json is damaged .*remove it"):
        CursorObject(store, "topic", "t").load()
