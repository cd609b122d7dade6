"""Levels that are read at in place of forbidden ones."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import ConsistencyLevel, InvalidRequest

from ringsync.cluster.guardrails import LEVELS
from ringsync.cluster.levels import at_permitted
from ringsync.cluster.session import GuardrailError
from ringsync.cql.types import Native
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, RingSnapshot, parse_replication
from ringsync.schema.table import Column, TableSchema

TABLE = TableSchema("k", "t", "0" * 32, (Column("id", "partition_key", Native("int")),))
HOSTS = tuple(Host(f"h{number}", f"10.0.0.{number}", 9042, "dc1", f"r{number}", (number,), True) for number in range(3))


class Forbidding:
    """A driver's session with a node that forbids reads at ALL."""

    def execute(self, statement: Any, host: Any = None) -> None:
        if statement.consistency_level == ConsistencyLevel.ALL:
            raise InvalidRequest("Guardrail read_consistency_levels violated: Provided values [ALL] are not allowed")


def read_at_all(session: Any, replicas: int, together: threading.Barrier | None = None) -> str:
    """Read at ALL with some replicas; gives the level that the read was done at.

    :param together: where reads at ALL wait for each other before they are refused
    """
    strategy = {"class": "org.apache.cassandra.locator.SimpleStrategy", "replication_factor": str(replicas)}
    ring = ranked(RingSnapshot(HOSTS, parse_replication(strategy)))

    def read(level: str) -> str:
        if level == "ALL":
            if together is not None:
                together.wait(10)
            raise GuardrailError("forbidden", LEVELS)
        return level

    return at_permitted(session, TABLE, "ALL", ring, read)


def test_a_substitute_is_one_of_the_replication_as_it_is() -> None:
    """With one replica LOCAL_ONE is as good as ALL. With three it is not, whatever was asked before."""
    session = SimpleNamespace(plain=Forbidding(), facts={})
    assert [read_at_all(session, replicas) for replicas in (1, 3, 2, 1)] == [
        *("LOCAL_ONE", "THREE", "LOCAL_QUORUM", "LOCAL_ONE"),
    ]


def test_what_another_thread_has_chosen_meanwhile_is_asked() -> None:
    for _ in range(20):
        session, together, levels = SimpleNamespace(plain=Forbidding(), facts={}), threading.Barrier(2), list[str]()
        threads = [
            threading.Thread(target=lambda: levels.append(read_at_all(session, 3, together)))  # noqa: B023
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert levels == ["THREE", "THREE"]


def test_a_substitute_that_is_refused_is_an_error_and_the_next_read_chooses_again() -> None:
    """Nodes permit different levels. Each read is refused twice at most."""
    ring = ranked(RingSnapshot(HOSTS, parse_replication({"class": "SimpleStrategy", "replication_factor": "3"})))
    session, asked = SimpleNamespace(plain=Forbidding(), facts={}), list[str]()

    def read(level: str) -> str:
        asked.append(level)
        raise GuardrailError("forbidden", LEVELS)

    for _ in range(3):
        with pytest.raises(GuardrailError, match=r"^forbidden$"):
            at_permitted(session, TABLE, "ALL", ring, read)
    assert asked == ["ALL", "THREE", "THREE", "ALL", "THREE"]
