"""The agreement of all nodes on the schema: nodes that are simulated, and when each learns of a change."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra.cluster import NoHostAvailable

from ringsync.cluster.agreement import nodes_behind
from ringsync.cluster.shared import Together


@dataclass(eq=False)
class Host:
    """A node: since when it has the new schema, since when its gossip tells it, and whether it answers us."""

    address: str
    since_s: float
    told_s: float = 0.0
    answers: bool = True
    is_up: bool | None = True

    @property
    def broadcast_address(self) -> str:
        return self.address


@dataclass
class Nodes:
    """Some nodes, as the driver shows them; time passes while somebody sleeps.

    :ivar hosts: those to which we are connected
    :ivar others: those of which only others tell
    :ivar asked: how often a node was asked for its own version
    :ivar viewers: nodes that were asked for the versions of the others, at random
    """

    hosts: list[Host]
    others: list[Host] = field(default_factory=list)
    now_s: float = 0.0
    asked: int = 0
    viewers: list[str] = field(default_factory=list)

    @property
    def cluster(self) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(all_hosts=lambda: [*self.hosts, *self.others]))

    def get_pool_state(self) -> dict[Host, Any]:
        return dict.fromkeys(self.hosts)

    def execute(self, query: str, parameters: Any, host: Host) -> Any:
        if not host.answers:
            raise NoHostAvailable("no answer", {})
        if "system.local" in query:
            row = SimpleNamespace(schema_version=self.version(host.since_s), broadcast_address=host.address)
            return SimpleNamespace(one=lambda: row)
        self.viewers.append(host.address)
        return [
            SimpleNamespace(peer=one.address, schema_version=self.version(one.told_s))
            for one in (*self.hosts, *self.others)
            if one is not host
        ]

    def execute_async(self, query: str, host: Host) -> Future[Any]:
        self.asked += 1
        future: Future[Any] = Future()
        try:
            future.set_result(self.execute(query, None, host))
        except NoHostAvailable as error:
            future.set_exception(error)
        return future

    def version(self, since_s: float) -> str:
        return "new" if self.now_s >= since_s else "old"

    def behind(self, wait_s: float = 10.0) -> frozenset[str]:
        def sleep(pause_s: float) -> None:
            self.now_s += pause_s

        return nodes_behind(self, wait_s, lambda: self.now_s, sleep)


def test_what_nodes_say_of_themselves_counts_before_gossip() -> None:
    nodes = Nodes([Host("a", 0.0, 1.0), Host("b", 0.1, 1.5), Host("c", 0.05, 2.0)])
    assert nodes.behind() == frozenset()
    assert 0.1 <= nodes.now_s < 0.2


@pytest.mark.parametrize("turn", range(20))
def test_nodes_that_agree_on_the_old_schema_do_not_hide_the_one_that_was_altered(turn: int) -> None:
    """The node that is asked, at random, may not know of the change, and its gossip neither."""
    nodes = Nodes([Host("a", 0.0, 9.0), *(Host(f"b{number}", 3.0, 9.0) for number in range(4))])
    assert nodes.behind() == frozenset()
    assert 3.0 <= nodes.now_s < 3.3


def test_of_a_node_that_does_not_answer_us_the_others_tell() -> None:
    nodes = Nodes([Host("a", 0.0), Host("b", 0.1, 1.0, answers=False)], [Host("c", 0.1, 2.0, is_up=None)])
    assert nodes.behind() == frozenset()
    assert 2.0 <= nodes.now_s < 2.3


def test_nodes_that_are_down_are_not_waited_for() -> None:
    nodes = Nodes([Host("a", 0.0)], [Host("b", 99.0, 99.0, is_up=False)])
    assert (nodes.behind(), nodes.now_s) == (frozenset(), 0.0)


def test_nodes_that_stay_behind_are_named_after_some_time() -> None:
    nodes = Nodes([Host("a", 0.0, 0.0)], [Host("b", 99.0, 99.0, is_up=None)])
    assert nodes.behind(wait_s=5.0) == {"b"}
    assert 5.0 <= nodes.now_s < 5.3
    silent = Nodes([Host("a", 0.0, answers=False)])
    assert silent.behind(wait_s=1.0) == {"a"}


@pytest.mark.parametrize("turn", range(20))
def test_who_has_the_schema_is_not_asked_again(turn: int) -> None:
    nodes = Nodes([*(Host(f"a{number}", 0.0) for number in range(30)), Host("b", 2.0, 2.0)])
    assert nodes.behind() == frozenset()
    # At first all; then the last one, and the others only where it was asked for their versions.
    looks, by_the_last = len(nodes.viewers), nodes.viewers.count("b")
    assert looks > 10
    assert nodes.asked <= 31 + looks + 30 * by_the_last


def test_what_waits_is_done_together_by_one_at_a_time() -> None:
    groups: list[int] = []
    working = [0]

    def work(numbers: Any) -> list[int | Exception]:
        working[0] += 1
        assert working[0] == 1
        groups.append(len(numbers))
        started.result(10) if len(groups) == 1 else None
        working[0] -= 1
        return [ValueError("odd") if number % 2 else 10 * number for number in numbers]

    def do(number: int) -> int | str:
        try:
            return shared.do(number)
        except ValueError as error:
            return str(error)

    started: Future[None] = Future()
    shared: Together[int, int] = Together(work)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(do, 0)
        while not groups:
            pass
        others = [pool.submit(do, number) for number in range(1, 8)]
        while len(shared._waiting) < 7:
            pass
        started.set_result(None)
        found = [one.result(10) for one in (first, *others)]
    assert found == [0, "odd", 20, "odd", 40, "odd", 60, "odd"]
    assert groups == [1, 7]


def test_an_error_of_the_work_is_that_of_all_it_was_for() -> None:
    def work(numbers: Any) -> list[int | Exception]:
        raise KeyboardInterrupt

    shared: Together[int, int] = Together(work)
    for _ in range(2):  # the next one is not held up
        with pytest.raises(KeyboardInterrupt):
            shared.do(1)
