"""Nodes with another schema of which the driver does not know whether they are alive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import InvalidRequest

from ringsync.cluster.node import node_schema, one_node
from ringsync.cluster.whole_schema import SILENT_S, UNKNOWN_S, Silence

NEAR, FAR = "10.0.0.1", "10.9.0.1"


class Session:
    """A session of a cluster of two datacenters, as the driver knows it; both nodes have a schema of their own.

    :ivar beats: heartbeats of the far node; None: Cassandra 4.0
    """

    def __init__(self) -> None:
        self.beats: int | None = 5
        self.near = SimpleNamespace(is_up=True, address=NEAR, broadcast_address=NEAR)
        self.far = SimpleNamespace(is_up=None, address=FAR, broadcast_address=FAR)
        self.cluster = SimpleNamespace(metadata=SimpleNamespace(all_hosts=lambda: [self.near, self.far]))
        self.connected = {self.near.address: self.near}

    def get_pool_state(self) -> list[Any]:
        return list(self.connected.values())

    def execute(self, query: str, parameters: Any = None, host: Any = None) -> Any:
        if "system.local" in query:
            return SimpleNamespace(one=lambda: SimpleNamespace(schema_version="new", broadcast_address=NEAR))
        if "system.peers" in query:
            return [SimpleNamespace(peer=FAR, schema_version="old")]
        if self.beats is None:
            raise InvalidRequest("table gossip_info does not exist")
        return [
            SimpleNamespace(address=NEAR, host_id="n", generation=1, heartbeat=900),
            SimpleNamespace(address=FAR, host_id="f", generation=1, heartbeat=self.beats),
        ]


class Watched:
    """A session that is looked at every ten seconds."""

    def __init__(self) -> None:
        self.session, self.now = Session(), 1000.0
        self.silence = Silence(lambda: self.now)

    def agrees(self) -> bool:
        node = one_node(self.session)
        return self.silence.ignored(node, node_schema(node)).agrees

    def agree_after(self, seconds: float, *, beats: int = 0) -> bool:
        """Whether the nodes agree at the last look.

        :param beats: heartbeats of the far node between two looks
        """
        for _ in range(int(seconds / 10)):
            self.agrees()
            self.now += 10
            if self.session.beats is not None:
                self.session.beats += beats
        return self.agrees()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_node_elsewhere_that_is_down_is_not_waited_for(watched: Watched) -> None:
    assert not watched.agree_after(SILENT_S)
    assert watched.agree_after(10)


def test_a_node_elsewhere_that_is_up_is_waited_for(watched: Watched) -> None:
    assert not watched.agree_after(2 * UNKNOWN_S, beats=1)
    assert watched.agree_after(SILENT_S + 10)
    assert not watched.agree_after(10, beats=1)


def test_a_node_asked_later_that_knows_less_is_no_heartbeat(watched: Watched) -> None:
    watched.agrees()
    watched.session.beats = 3
    assert not watched.agree_after(SILENT_S)
    watched.session.beats = 5
    assert watched.agree_after(10)


def test_without_gossip_a_node_elsewhere_is_waited_for_longer(watched: Watched) -> None:
    watched.session.beats = None
    assert not watched.agree_after(UNKNOWN_S)
    assert watched.agree_after(10)


def test_a_process_knows_what_one_before_it_has_heard(watched: Watched) -> None:
    """Else each run of a loop would wait anew for a node that is dead."""
    watched.session.beats = None
    assert watched.agree_after(UNKNOWN_S + 10)
    watched.silence = Silence(lambda: watched.now, watched.silence.since_s)
    assert watched.agrees()
    watched.silence = Silence(lambda: watched.now)
    assert not watched.agrees()


def test_a_node_to_which_the_driver_is_connected_is_waited_for(watched: Watched) -> None:
    watched.session.far.is_up = True
    watched.session.connected[FAR] = watched.session.far
    assert not watched.agree_after(2 * UNKNOWN_S)
