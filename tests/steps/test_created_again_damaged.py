"""A table that is created again while the version of the table before it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.steps.test_created_again import NEW, OLD, THIRD, Lake


def test_the_new_tables_passes_come_behind_the_old_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new table waited for ever, for the columns of rows that nobody writes any more."""
    lake = Lake(tmp_path)
    old = lake.process(OLD)
    old.publish(1)
    old.commit(2)
    key = "schemas/shop.t/000001.json"
    lake.store.put(key, b"{")
    new = lake.process(NEW)
    new.publish(3)
    expected = [(OLD.table_id, 1), (OLD.table_id, 2), (NEW.table_id, 3)]
    assert lake.messages() == expected
    assert f"{key} cannot be read" in capsys.readouterr().out
    lake.process(THIRD).publish(4)
    assert lake.messages() == [*expected, (THIRD.table_id, 4)]
