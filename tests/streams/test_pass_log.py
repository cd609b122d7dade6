"""Passes that are forgotten: whatever a kill leaves behind, a pass that is there has its digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringsync.ledger.passes import (
    LATE,
    Pass,
    deletions_key,
    digests_key,
    forget_pass,
    get_pass,
    pass_numbers,
    put_pass,
    read_digests,
)
from tests.mortal_store import Killed, MortalStore

TABLE_ID = "6" * 32


def made(store: Any, number: int) -> Pass:
    """A pass with two files of digests, committed."""
    digests = {place: (digests_key(TABLE_ID, place, number, "x"),) for place in (LATE, "1790000000000-60000")}
    for keys in digests.values():
        store.put(keys[0], bytes(16))
    deletions = deletions_key(TABLE_ID, number, "x")
    store.put(deletions, b"")
    one = Pass(number, "changes", TABLE_ID, 1, deletions=(deletions,), digests=digests)
    assert put_pass(store, one)
    return one


@pytest.mark.parametrize("deletions", range(4))
def test_a_pass_that_is_there_has_its_digests_wherever_forgetting_is_killed(tmp_path: Path, deletions: int) -> None:
    store = MortalStore(tmp_path)
    first, last = made(store, 1), made(store, 2)
    store.left = deletions
    with pytest.raises(Killed):
        forget_pass(store, first)
    for number in pass_numbers(store, TABLE_ID):
        for keys in get_pass(store, TABLE_ID, number).digests.values():
            assert len(read_digests(store, keys[0])) == 1
    store.left = 10
    forget_pass(store, first)
    assert pass_numbers(store, TABLE_ID) == [last.number]
    assert len([*store.list(f"sync/{TABLE_ID}/published/")]) == 2
