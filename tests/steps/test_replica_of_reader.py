"""The replica that messages are made with has all that was published before: a bootstrap, or another process, may be
behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from ringsync.ledger.passes import mark, pass_numbers
from tests.steps.late_files import Write
from tests.steps.test_bootstrap_begins_back import bootstrap, follow_ups
from tests.steps.test_close import NOW, TABLE, Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    found = Lake(tmp_path)
    told = {"after_image": "replica", "tables": {"shop.t": {"expand_deletions": True}}}
    found.conf.write_text(yaml.safe_dump({**yaml.safe_load(found.conf.read_text()), "sync": told}))
    return found


def applied(lake: Lake, *, caught_up: bool = True) -> int | None:
    """The last pass of the replica that the next pass is made with; None: it is made without."""
    ours = follow_ups(lake)
    if caught_up:
        ours.catch_up()
    reader = ours.reader("replica")
    assert (reader.before, reader.expand) == (True, True)
    return reader.replica.applied if reader.replica else None


def write(lake: Lake, seq: int) -> None:
    lake.publish(NOW, [Write(1, seq, "x", NOW.start * 1000 + seq)], by_arrival=False)


def test_the_replica_is_taken_when_it_has_every_pass(lake: Lake) -> None:
    write(lake, 1)
    assert applied(lake) is None
    bootstrap(lake, "b1")
    there = applied(lake)
    numbers = pass_numbers(lake.store, TABLE.table_id)
    assert there == numbers[-1]
    lake.passes += [lake.passes[0]] * (len(numbers) - 1)
    write(lake, 2)
    assert applied(lake, caught_up=False) is None
    assert applied(lake) == numbers[-1] + 1


def test_it_is_not_taken_while_a_bootstrap_goes_on(lake: Lake) -> None:
    bootstrap(lake, "b1")
    assert applied(lake) is not None
    mark(lake.store, TABLE.table_id, "begin", "b2", int(time.time() * 1000))
    assert applied(lake) is None
    bootstrap(lake, "b2")
    assert applied(lake) is not None
