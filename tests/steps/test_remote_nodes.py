"""Nodes of another datacenter, which the driver does not try: a session that begins after one died knows nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import InvalidRequest, OperationTimedOut, Unauthorized

from ringsync.cluster.cluster import PARTITIONER
from ringsync.cluster.connection import ScyllaConnection
from ringsync.cluster.gossip import heartbeats
from ringsync.cluster.schema import NodeTables
from ringsync.ledger.staging import Bucket
from ringsync.schema.table import Schema
from ringsync.service.delays import Limits
from ringsync.service.expected import ARCHIVE, Expected
from ringsync.service.health import problems
from ringsync.service.problem import Kind
from ringsync.status import NODES, known_now, read_status
from ringsync.steps import sync_plan
from ringsync.steps.close.closing import progress
from ringsync.steps.sync_plan import SyncPlan, plan_of
from ringsync.storage.local import LocalStore

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
NEAR, FAR, BESIDE = "near", "far", "beside"
"""Nodes; the last two are in one datacenter."""
ADDRESSES = {NEAR: "10.0.0.1", FAR: "10.9.0.1", BESIDE: "10.9.0.2"}
CONFIG: Any = SimpleNamespace(sync=SimpleNamespace(datacenters=()), server_name="test")
EXPECTED = Expected.of_commit_logs([*ADDRESSES], archives=True)


class Answer(list[Any]):
    """Rows as the driver gives them."""

    response_future = SimpleNamespace(coordinator_host=None)

    def one(self) -> Any:
        return self[0]

    def all(self) -> list[Any]:
        return list(self)


class World:
    """A cluster of two datacenters, that is planned once in a minute by a session of its own. The log of a far node is
    staged, and its ``cdc_raw`` emptied, while it lives.

    :ivar shows: how the cluster shows its gossip
    :ivar is_linked: another far node is heard
    :ivar slow: answers of gossip that do not come; ``refusing``: those that refuse
    :ivar far_is_up: what the driver says of the far node in a session of its datacenter
    """

    def __init__(self, store: LocalStore, shows: str) -> None:
        self.store, self.shows, self.now_ms = store, shows, 1_000 * HOUR_MS
        self.is_alive = self.far_works = self.is_linked = True
        self.slow = self.refusing = self.asked = 0
        self.far_is_up: bool | None = None
        self.beats = self.beats_beside = 7
        self.plan = SyncPlan(Bucket(0, MINUTE_MS), (), {}, ())
        self.statuses: dict[str, Any] = {}
        self.unread_since_ms: dict[str, int] = {}

    def session(self, at: str = NEAR) -> Any:
        """A session that was opened just now, in the datacenter of a node."""
        hosts = []
        for name, address in ADDRESSES.items():
            is_local = (name == NEAR) == (at == NEAR)
            host = SimpleNamespace(address=address, broadcast_address=address, host_id=name)
            host.is_up = (self.far_is_up if name == FAR else True) if is_local else None
            host.endpoint = SimpleNamespace(address=address, port=9042)
            hosts.append(host)
        cluster = SimpleNamespace(
            metadata=SimpleNamespace(all_hosts=lambda: hosts),
            refresh_nodes=lambda: None,
            connection_class=ScyllaConnection if self.shows == "status" else None,
        )
        pools = [host for host in hosts if host.is_up] * 2
        return SimpleNamespace(get_pool_state=lambda: pools, cluster=cluster, execute=partial(self.execute, at))

    def execute(self, at: str, query: str, parameters: Any = None, host: Any = None) -> Answer:
        def row(name: str, **more: Any) -> Any:
            datacenter = "near" if name == NEAR else "far"
            tokens = [str([*ADDRESSES].index(name))]
            return SimpleNamespace(host_id=name, data_center=datacenter, rack="r", tokens=tokens, **more)

        if "system.local" in query:
            return Answer([row(at, partitioner=PARTITIONER)])
        if "system.peers" in query:
            return Answer([row(name) for name in ADDRESSES if name != at])
        self.asked += "gossip_info" in query
        if self.slow and "gossip_info" in query:
            self.slow -= 1
            raise OperationTimedOut
        if self.refusing and "gossip_info" in query:
            self.refusing -= 1
            raise Unauthorized("Cannot achieve consistency level QUORUM")
        if self.shows == "gossip" and "gossip_info" in query:
            beats = {NEAR: self.now_ms // 1000, FAR: self.beats, BESIDE: self.beats_beside}
            return Answer(
                [
                    SimpleNamespace(address=address, host_id=name, generation=9, heartbeat=beats[name])
                    for name, address in ADDRESSES.items()
                ]
            )
        if self.shows == "status" and "cluster_status" in query:
            up = {NEAR: True, FAR: self.is_alive, BESIDE: self.is_linked}
            return Answer([SimpleNamespace(peer="10.0.0.1", host_id=name, up=up) for name, up in up.items()])
        raise InvalidRequest("there is no such table")

    def pass_by(self, minutes: int, at: str = NEAR, before: SyncPlan | None = None) -> None:
        for _ in range(minutes):
            self.now_ms += MINUTE_MS
            self.beats += 60 * self.is_alive
            self.beats_beside += 60 * self.is_linked
            self.plan = plan_of(self.store, CONFIG, self.session(at), Bucket(self.now_ms, MINUTE_MS), before)
            assert SyncPlan.from_json(self.plan.to_json()) == self.plan
            for name in ADDRESSES:
                if name != FAR or (self.is_alive and self.far_works):
                    raw = {"endpoint": name, "free_bytes": 9, "total_bytes": 10}
                    self.statuses[f"{ARCHIVE}{name}"] = {"at_ms": self.now_ms, "nodes": {name: raw}}
                    log = {"clear_at_ms": self.now_ms, "is_read": True}
                    self.statuses[name] = {"at_ms": self.now_ms, "nodes": {name: log}}

    @property
    def nodes(self) -> Any:
        """The status that tells who is down."""
        return read_status(self.store, NODES)

    def down(self) -> dict[str, int]:
        """For how many minutes nodes are down."""
        return {host: (self.now_ms - down["since_ms"]) // MINUTE_MS for host, down in self.nodes["down"].items()}

    def kinds(self) -> set[Kind]:
        """What is told of nodes."""
        statuses = known_now({**self.statuses, NODES: self.nodes}, self.now_ms / 1000)
        found = problems(statuses, {}, EXPECTED, False, self.now_ms / 1000, limits=Limits())
        return {problem.kind for problem in found} & {Kind.ARCHIVE_SILENT, Kind.NODE_PAST_HINTS}

    def behind_ms(self) -> int:
        """How far closing is behind."""
        asked = self.plan.hosts, self.statuses, lambda host: host.id, self.now_ms, 5 * MINUTE_MS, self.unread_since_ms
        found = progress(*asked)
        self.unread_since_ms = dict(found.since_ms)
        return self.now_ms - found.staged_until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> World:
    monkeypatch.setattr(sync_plan, "read_tables", lambda session: Schema(()))
    monkeypatch.setattr(sync_plan, "read_node_tables", lambda node: NodeTables(frozenset(), frozenset(), {}))
    monkeypatch.setattr(sync_plan, "ask_one", lambda session, read: read(session))
    monkeypatch.setattr(sync_plan, "read_hint_window", lambda session, of_scylla: 5 * MINUTE_MS)
    return World(LocalStore(tmp_path), request.param)


@pytest.mark.parametrize("world", ["gossip", "status"], indirect=True)
def test_a_dead_node_of_another_datacenter_is_down(world: World) -> None:
    """It counted as up: a critical alarm for its archive and buckets that closed late, for as long as it was down."""
    world.pass_by(3)
    assert (world.behind_ms(), world.kinds()) == (0, set())
    world.is_alive = False
    world.pass_by(3)
    assert (world.behind_ms(), world.kinds()) == (0, set())
    world.pass_by(8)
    assert (world.behind_ms(), world.kinds()) == (0, {Kind.NODE_PAST_HINTS})
    world.is_alive = True
    world.pass_by(1)
    assert all(host.up for host in world.plan.hosts)
    assert not world.kinds()


@pytest.mark.parametrize("world", ["gossip", "status", "nothing"], indirect=True)
def test_a_worker_that_is_dead_while_its_node_lives_is_critical(world: World) -> None:
    world.pass_by(3)
    world.far_works = False
    world.pass_by(8)
    assert Kind.ARCHIVE_SILENT in world.kinds()
    assert world.behind_ms() > 0


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_a_look_at_a_node_that_is_behind_makes_nobody_dead(world: World) -> None:
    world.pass_by(3)
    for _ in range(3):
        beats, world.beats = world.beats, 3  # as a node tells that has just been started
        world.pass_by(1)
        assert all(host.up for host in world.plan.hosts)
        world.beats = beats + 120
        world.pass_by(1)
        assert all(host.up for host in world.plan.hosts)


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_after_a_stop_a_node_is_as_gossip_tells(world: World) -> None:
    world.pass_by(3)
    world.now_ms += 50 * HOUR_MS
    world.beats += 180_000
    world.pass_by(1)
    assert all(host.up for host in world.plan.hosts)
    world.is_alive = False
    world.pass_by(3)
    world.now_ms += 50 * HOUR_MS
    world.pass_by(1)
    assert [host.id for host in world.plan.hosts if not host.up] == [FAR]


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_one_slow_answer_makes_no_dead_node_alive(world: World) -> None:
    """It was up for an interval, and from then on had been down since a moment only: its hints were there again."""
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(12)
    assert (world.behind_ms(), world.kinds()) == (0, {Kind.NODE_PAST_HINTS})
    world.slow = 1
    world.pass_by(1)
    assert not world.slow  # another node is asked
    assert world.down() == {FAR: 12}
    assert (world.behind_ms(), world.kinds()) == (0, {Kind.NODE_PAST_HINTS})


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_plans_of_both_datacenters_know_of_all_nodes(world: World) -> None:
    """Who planned in the far one forgot what the near one had heard of it."""
    world.is_alive = False
    for _ in range(6):
        world.pass_by(1, at=NEAR)
        world.pass_by(1, at=BESIDE)
    world.pass_by(1, at=NEAR)
    assert [host.id for host in world.plan.hosts if not host.up] == [FAR]


@pytest.mark.parametrize("world", ["gossip", "status"], indirect=True)
def test_a_datacenter_that_is_cut_off_may_still_be_written_to(world: World) -> None:
    """None of its nodes is heard, and its workers do not reach the store: its cdc_raw may fill."""
    world.pass_by(3)
    world.is_alive = world.is_linked = False
    world.pass_by(8)
    assert (world.behind_ms(), world.kinds()) == (0, {Kind.ARCHIVE_SILENT, Kind.NODE_PAST_HINTS})


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_while_nobody_tells_of_gossip_a_node_counts_as_alive(world: World) -> None:
    world.pass_by(3)
    world.shows = "nothing"
    asked = world.asked
    world.pass_by(3)
    assert world.asked - asked == 3 * 2, "all nodes that are connected"
    assert all(host.up for host in world.plan.hosts)


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_a_node_that_was_dead_counts_as_alive_once_nobody_has_told_of_gossip_for_long(world: World) -> None:
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(6)
    world.shows = "nothing"
    world.pass_by(5)
    assert world.down() == {FAR: 10}
    world.pass_by(1)
    assert world.down() == {}


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_one_who_refuses_makes_no_dead_node_alive(world: World) -> None:
    """A node of an earlier version does not know of gossip, or cannot read our rights at this moment."""
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(12)
    for refusals in (1, 3):
        world.refusing = refusals
        world.pass_by(1)
        world.refusing = 0
        assert world.kinds() == {Kind.NODE_PAST_HINTS}
    assert world.down() == {FAR: 13}


@pytest.mark.parametrize("error", [InvalidRequest("there is no such table"), OperationTimedOut()])
def test_not_many_are_asked_who_do_not_tell(error: Exception) -> None:
    asked: list[int] = []

    class Refusing:
        session = None

        def execute(self, query: str) -> Any:
            asked.append(1)
            raise error

    nodes: Any = [Refusing() for _ in range(300)]
    assert heartbeats(nodes, 0) == {}
    assert len(asked) == 3


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_a_plan_that_somebody_has_held_for_long_makes_no_dead_node_alive(world: World) -> None:
    """What the node had said between that plan and its end was news to who had held it."""
    world.pass_by(1)
    old = world.plan
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(12)
    world.pass_by(1, before=old)
    assert world.down() == {FAR: 12}


@pytest.mark.parametrize("world", ["nothing"], indirect=True)
def test_a_session_that_has_just_begun_makes_no_dead_node_alive(world: World) -> None:
    """Its driver has not tried to connect to the node yet. Each loop has a new session every ten minutes."""
    world.far_is_up = False
    world.pass_by(10, at=BESIDE)
    world.far_is_up = None
    world.pass_by(1, at=BESIDE)
    assert [host.id for host in world.plan.hosts if not host.up] == [FAR]
    assert (world.down(), world.kinds()) == ({FAR: 10}, {Kind.NODE_PAST_HINTS})
    world.far_is_up = True
    world.pass_by(1, at=BESIDE)
    assert all(host.up for host in world.plan.hosts)


@pytest.mark.parametrize("world", ["gossip", "status"], indirect=True)
def test_a_node_that_restarts_at_the_first_look_after_a_stop_is_not_down_since_then(world: World) -> None:
    world.pass_by(3)
    world.now_ms += 50 * HOUR_MS
    world.beats_beside += 180_000
    world.is_alive = False
    world.pass_by(2)
    assert world.down() == {FAR: 1}
    assert world.kinds() == set()


@pytest.mark.parametrize("world", ["status"], indirect=True)
def test_a_silence_before_a_stop_is_over(world: World) -> None:
    """ScyllaDB tells only who is up now: the node was, all the time, and restarts at the first look after it."""
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(4)
    assert world.down() == {FAR: 3}
    world.now_ms += 50 * HOUR_MS
    world.pass_by(2)
    assert world.down() == {FAR: 1}


@pytest.mark.parametrize("world", ["gossip"], indirect=True)
def test_a_worker_whose_clock_is_far_behind_tells_nobody_who_is_down(world: World) -> None:
    """Each of its plans made the status one of the past: a dead node counted as alive, its archive as silent."""
    world.pass_by(3)
    world.is_alive = False
    world.pass_by(110)
    assert world.down() == {FAR: 109}
    assert world.kinds() == {Kind.NODE_PAST_HINTS}
    plan_of(world.store, CONFIG, world.session(), Bucket(world.now_ms - 3 * HOUR_MS, MINUTE_MS))
    assert world.kinds() == {Kind.NODE_PAST_HINTS}


@pytest.mark.parametrize("world", ["nothing"], indirect=True)
def test_who_wakes_up_behind_its_plan_removes_none_that_was_made_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.far_is_up = False
    monkeypatch.setattr(sync_plan, "store_ms", lambda *_: world.now_ms)
    world.pass_by(120, at=BESIDE)
    told = sync_plan.put_status

    def paused(*status: Any) -> None:
        monkeypatch.setattr(sync_plan, "put_status", told)
        world.pass_by(10, at=BESIDE)

    monkeypatch.setattr(sync_plan, "put_status", paused)
    world.pass_by(1, at=BESIDE)
    world.pass_by(1, at=BESIDE)
    assert world.down() == {FAR: 131}


def test_of_two_rows_of_a_host_the_newest_counts() -> None:
    """It has changed its address: the old row stays for some minutes."""
    rows = [("10.0.0.1", 9, 70), ("10.0.0.9", 8, 4000)]
    answer = [SimpleNamespace(address=one, host_id="h", generation=two, heartbeat=beat) for one, two, beat in rows]
    cluster = SimpleNamespace(connection_class=None)
    node: Any = SimpleNamespace(session=SimpleNamespace(cluster=cluster), execute=lambda query: answer)
    assert heartbeats([node], 0) == {"h": (9, 70), "10.0.0.1": (9, 70), "10.0.0.9": (8, 4000)}


@pytest.mark.parametrize("world", ["nothing"], indirect=True)
def test_who_was_down_before_a_stop_is_not_down_since_then(world: World) -> None:
    world.far_is_up = False
    world.pass_by(10, at=BESIDE)
    world.now_ms += 50 * HOUR_MS
    assert Kind.NODE_PAST_HINTS not in world.kinds()
    world.pass_by(1, at=BESIDE)
    assert world.down() == {FAR: 0}
