"""The emergency exit: cdc goes off at once, though nodes disagree about the schema (servers: test_enable_cdc.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ringsync.cluster import shared as shared_module
from ringsync.cluster.session import ClusterError
from ringsync.cluster.shared import Shared
from ringsync.schema.table import UnreadableTable
from ringsync.service import leave
from ringsync.steps.bootstrap import enable_cdc
from ringsync.steps.bootstrap.enable_cdc import disable_cdc
from ringsync.storage.local import LocalStore

TABLES = [UnreadableTable("shop", name, str(number) * 32, "") for number, name in enumerate(("orders", "items"))]


class Cluster:
    """Tables with cdc, as a node has them; what was done is noted."""

    down = frozenset[str]()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = {table.name: [True, 7] for table in TABLES}
        self.done: list[str] = []
        self.behind: Callable[[], set[str]] = set
        for module in (enable_cdc, leave):
            monkeypatch.setattr(module, "one_node", lambda session: session)
        monkeypatch.setattr(shared_module, "nodes_behind", lambda _: self.waits())

    def waits(self) -> frozenset[str]:
        self.done.append("waited")
        return frozenset(self.behind())

    def execute(self, query: str, values: Any = None) -> Any:
        if query.startswith("SELECT cdc"):
            cdc, grace = self.options[values[1]]
            row: Any = SimpleNamespace(cdc=cdc, gc_grace_seconds=grace)
            return SimpleNamespace(one=lambda: row)
        name, change = query.removeprefix("ALTER TABLE shop.").split(" WITH ")
        self.done.append(f"{name}: {change}")
        for option in change.split(" AND "):
            key, value = option.split(" = ")
            self.options[name][key != "cdc"] = int(value) if value.isdecimal() else value == "true"
        return SimpleNamespace(response_future=SimpleNamespace(warnings=None))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.mark.parametrize("since", ["before", "the first ALTER", "the end"])
def test_cdc_goes_off_at_once_and_who_does_not_know_of_it_is_named(
    cluster: Cluster, tmp_path: Path, since: str
) -> None:
    """No ALTER was sent, while production refused writes; or ``gc_grace_seconds`` stayed as in the moment."""
    needed = {"before": 0, "the first ALTER": 1, "the end": 3}[since]
    cluster.behind = lambda: {"10.0.0.9"} if sum(" = " in what for what in cluster.done) >= needed else set()
    store, missed = LocalStore(tmp_path), set[str]()
    assert disable_cdc(Shared(cluster), store, TABLES, missed) == ["disabled now"] * 2
    assert cluster.options == {table.name: [False, 7] for table in TABLES}
    assert ("cdc = false" in cluster.done[0], missed, store.list()) == (True, {"10.0.0.9"}, [])


@pytest.mark.parametrize("tables", [TABLES, []], ids=["cdc is on", "cdc is off"])
def test_it_is_not_done_while_a_node_may_go_on_to_capture(cluster: Cluster, tmp_path: Path, tables: Any) -> None:
    cluster.behind = lambda: {"10.0.0.9"}
    shared, store, console = Shared(cluster), LocalStore(tmp_path), Console(quiet=True)
    (left,) = leave._switch_off(shared, store, tables, console, at_once=True)
    assert left.startswith("nodes are down or do not know of it (10.0.0.9): they may go on to capture")
    cluster.behind = set
    assert not list(leave._switch_off(Shared(cluster), store, tables, console, at_once=True))


def test_in_time_all_nodes_agree_first(cluster: Cluster, tmp_path: Path) -> None:
    cluster.behind = lambda: {"10.0.0.9"}
    with pytest.raises(ClusterError, match=r"do not agree on the schema \(10.0.0.9\)"):
        disable_cdc(Shared(cluster), LocalStore(tmp_path), TABLES)
    assert cluster.done == ["waited"]


def test_the_first_table_waits_for_no_record_of_the_others(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand puts came before the first ALTER."""
    store = LocalStore(tmp_path)
    put = store.put
    monkeypatch.setattr(store, "put", lambda key, *given: (cluster.done.append("record"), put(key, *given))[1])
    disable_cdc(Shared(cluster), store, TABLES, set())
    moment = "cdc = false AND gc_grace_seconds = 8"
    assert cluster.done[:4] == ["record", f"orders: {moment}", "record", f"items: {moment}"]


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b"7"])
def test_a_damaged_record_keeps_no_table_from_losing_cdc(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    """One of them was an error of all tables."""
    store = LocalStore(tmp_path)
    store.put(enable_cdc.record_key(TABLES[1].table_id), damage)
    assert disable_cdc(Shared(cluster), store, TABLES, set()) == ["disabled now"] * 2
    assert (cluster.options["items"], store.list()) == ([False, 7], [])
    assert "gc_grace_seconds of shop.items may be one second too long, and stays 7" in capsys.readouterr().out
