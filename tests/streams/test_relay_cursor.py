"""The relay's cursor: exactly the buckets that were relayed, in any order, however many relays share it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.storage.local import LocalStore
from ringsync.streams.relay_cursor import Cursor, CursorObject, cursor_from_json, cursor_to_json
from ringsync.streams.relay_errors import CursorError

NAMES = [
    *(f"pass-{n:012}" for n in range(1, 9)),
    *(f"late-{n:06}" for n in (1, 2, 999_999)),
    *("pass-000001", "pass-000000000005-late", "bootstrap-6f1c", "bootstrap-20260101T000000", "schemas2", "000001"),
]
names = st.lists(st.sampled_from(NAMES))


def cursor_of(buckets: list[str]) -> Cursor:
    cursor = Cursor("t")
    for bucket in buckets:
        cursor = cursor.within(bucket, 1).behind(bucket)
    return cursor


@given(names, names)
def test_a_cursor_has_what_was_relayed_and_nothing_else(one: list[str], other: list[str]) -> None:
    cursor = cursor_of(one)
    assert [name for name in NAMES if name in cursor] == [name for name in NAMES if name in one]
    assert cursor_from_json(cursor_to_json(cursor)) == cursor == cursor_of(sorted(one))
    assert cursor.united(cursor_of(other)) == cursor_of(one + other)


def test_many_passes_are_one_entry() -> None:
    cursor = cursor_of([f"pass-{n:012}" for n in [*range(500, 0, -1), *range(502, 600)]])
    assert cursor.runs == {"pass-000000000000": ((1, 500), (502, 599))}


def test_relays_that_share_a_cursor_lose_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second = (CursorObject(store, "topic", "t") for _ in range(2))
    ours, theirs = first.load().behind("a"), second.load().behind("pass-000001")
    assert first.save(ours) == ours
    united = second.save(theirs)
    assert "a" in united
    assert "pass-000001" in united
    again = first.save(ours.within("b", 3))
    assert (again.parts_of("b"), again.parts_of("a")) == (3, 0)
    assert CursorObject(store, "topic", "t").load() == again == united.within("b", 3)


def test_a_cursor_that_is_none_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("streams/topic/kafka.json", b"{}")
    with pytest.raises(CursorError, match=r"kafka.json is damaged .*remove it"):
        CursorObject(store, "topic", "t").load()
