"""Levels that are read at in place of forbidden ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def read_at_all(session: Any, replicas: int) -> str:
    """Read at ALL with some replicas; gives the level that the read was done at."""
    strategy = {"class": "org.apache.cassandra.locator.SimpleStrategy", "replication_factor": str(replicas)}
    ring = ranked(RingSnapshot(HOSTS, parse_replication(strategy)))

    def read(level: str) -> str:
        if level == "ALL":
            raise GuardrailError("forbidden", LEVELS)
        return level

    return at_permitted(session, TABLE, "ALL", ring, read)


def test_a_substitute_is_one_of_the_replication_as_it_is() -> None:
    """With one replica LOCAL_ONE is as good as ALL. With three it is not, whatever was asked before."""
    session = SimpleNamespace(plain=Forbidding(), facts={})
    assert [read_at_all(session, replicas) for replicas in (1, 3, 2, 1)] == [
        *("LOCAL_ONE", "THREE", "LOCAL_QUORUM", "LOCAL_ONE"),
    ]
