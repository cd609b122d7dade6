"""What a deletion has spared is read at a level that is permitted, however late a node forbids one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cassandra import ConsistencyLevel, InvalidRequest

from ringsync.cluster.limits import Limiter
from ringsync.cluster.session import GuardrailError
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import RingSnapshot, parse_replication
from ringsync.sources.lookup.read import IN_FLIGHT
from ringsync.sources.scan.scan import scan_query
from ringsync.steps.passes import spared_rows
from ringsync.steps.passes.rows_after import AfterReader
from tests.reconciled import merged
from tests.sources.test_levels import HOSTS, Forbidding
from tests.sources.test_page_size import Refusal
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, TABLE, Lake, lake
from tests.steps.test_held_bytes import Partition

__all__ = ["lake"]
DELETIONS = 30


@dataclass
class Guarded(Partition):
    """A node that refuses what is asked at ALL.

    :ivar guardrail: by which it does
    :ivar permits: requests that it answers before
    :ivar asked: the level of each request
    """

    guardrail: str = "read_consistency_levels"
    permits: int = 0
    asked: list[str] = field(default_factory=list)
    plain: Any = field(default_factory=Forbidding)

    def execute_async(self, statement: Any, execution_profile: str, paging_state: bytes | None) -> Any:
        level = ConsistencyLevel.value_to_name[statement.consistency_level]
        self.asked.append(level)
        assert len(self.asked) <= 2 * DELETIONS, "it is asked over and over"
        if level == "ALL" and len(self.asked) > self.permits:
            return Refusal(InvalidRequest(f"Guardrail {self.guardrail} violated: not allowed"))
        return super().execute_async(statement, execution_profile, paging_state)


@pytest.fixture
def read(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads what is there under deletions of partitions, at ALL; gives their places, and the levels of lookups."""
    monkeypatch.setattr(spared_rows, "ControlClient", lambda _: contextlib.nullcontext(Limiter()))
    ring = ranked(RingSnapshot(HOSTS, parse_replication({"class": "SimpleStrategy", "replication_factor": "3"})))
    rows = [Write(n, None, None, NOW.start * 1000) for n in range(DELETIONS)]
    deletions = merged(change_rows(rows, TABLE), TABLE)
    reader: AfterReader = replace(lake.context(late=False).reader, ring=ring, disagreed=True)
    select = scan_query(TABLE, times=True, element_times=True).select

    def read_from(node: Guarded) -> tuple[list[int], set[str]]:
        lookups = list(spared_rows._lookups(reader, select, deletions))
        session: Any = node
        found = [lookup for lookup, _ in spared_rows._pages(reader, session, lookups, set())]
        return sorted({lookup.place for lookup in found}), {lookup.levels[0] for lookup in found}

    return read_from


@pytest.mark.parametrize("permits", [0, 10])
def test_a_forbidden_level_is_replaced_by_one_that_is_as_good(read: Any, permits: int) -> None:
    """Those on their way when the first is refused are asked again, too, and count as answered by all replicas."""
    node = Guarded([100], permits=permits)
    assert read(node) == ([*range(DELETIONS)], {"ALL"})
    refused = node.asked.count("ALL") - permits
    assert 1 <= refused <= (IN_FLIGHT if permits else 1)
    assert node.asked.count("THREE") == DELETIONS - permits == len(node.asked) - permits - refused


def test_where_no_level_is_as_good_it_is_told_at_once(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringsync.cluster.levels.levels_as_good", lambda *_: ())
    node = Guarded([100])
    with pytest.raises(GuardrailError, match=r"reads of shop\.t at ALL"):
        read(node)
    assert node.asked == ["ALL"]


def test_another_guardrail_is_told_at_once(read: Any) -> None:
    node = Guarded([100], guardrail="page_size")
    with pytest.raises(GuardrailError, match="page_size_fail_threshold"):
        read(node)
    assert node.asked == ["ALL"]
