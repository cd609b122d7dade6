"""What alarms say of a gap can be read, however many tables it has."""

from __future__ import annotations

import pytest

from ringsync.ledger.gaps import Gap

COMMAND = "cdcservice verify --repair --table"


@pytest.mark.parametrize("tables", [1, 5, 6, 1000])
def test_a_few_tables_are_named_and_a_command_for_all(tables: int) -> None:
    names = [f"shop.t{number:04}" for number in range(tables)]
    gap = Gap("h", "10.0.0.1:9042", "CommitLog-7-1.log", 1, 2, {name: name for name in names}, ())
    told = gap.describe(names)
    assert len(told) < 1000
    assert told.count(f"{COMMAND} shop.") == min(tables, 5)
    if tables > 5:
        assert told.endswith(f"; and so on for {tables - 5:,} more tables. {COMMAND} '*.*' corrects all")
    else:
        assert told.endswith("; ".join(f"{COMMAND} {name}" for name in names))
