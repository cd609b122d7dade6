"""A folder of segments is one node's: of nodes that name the same one none is read, and all are named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ringsync.ledger.staging import commit_keys, node_of
from ringsync.ring.ring import Host
from ringsync.service.workers import worker_reports
from ringsync.status import Status
from ringsync.steps.close.closing import progress
from ringsync.steps.folders import folder_id, put_shared_by_queues, shared_by_queues
from ringsync.steps.stage import commitlog_stage
from tests.steps.test_stager import HOST, TABLES, WELL, Cluster, Sync

OTHER = replace(HOST, id="c", address="127.0.0.3")
HOST_TELLS = {"up": True, "is_read": True, "error": None, "clear_at_ms": 0}


class Nodes(Sync):
    """Nodes that say themselves where their logs are."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, Cluster(TABLES, TABLES), patch)
        self.raw = self.segment.parent
        other = shutil.copytree(self.raw, folder / "other")
        self.says = {HOST.id: self.raw, WELL.id: self.raw, OTHER.id: other}
        self.idle: set[str] = set()  # those that capture nothing
        self.stager._config.sync.cdc_raw = None  # the default
        patch.setattr(
            *(commitlog_stage, "read_settings"),
            lambda session, host, names: (
                {"cdc_raw_directory": str(self.says[host]), "cdc_enabled": str(host not in self.idle).lower()}
                if host in self.says
                else {}
            ),
        )

    def logs_more(self) -> Path:
        """Have one more segment in the folder."""
        another = self.segment.with_name(self.segment.name.replace(".log", "9.log"))
        shutil.copy(self.says[OTHER.id] / self.segment.name, another)
        another.with_name(another.name.replace(".log", "_cdc.idx")).write_text(f"{another.stat().st_size}\nCOMPLETED")
        return another

    def staged(self) -> set[str]:
        return {node_of(key) for key in commit_keys(self.store)}

    def status(self) -> Status:
        return {"at_ms": int(self.now_s * 1000), "nodes": self.stager.status(), "error": None}

    def unread(self) -> set[str]:
        """What closing waits for, for one window."""
        now_ms = int(self.now_s * 1000)
        return set(progress(self.hosts, {"q": self.status()}, lambda host: "q", now_ms, 300_000, {}).unread)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def named(nodes: Nodes, host: Host) -> bool:
    both = f"nodes {HOST.endpoint}, {WELL.endpoint} name the same folder {nodes.raw}"
    return any(both in one and "sync.queue_of_node" in one for one in nodes.told(host))


def test_two_nodes_that_name_one_folder_are_not_read(nodes: Nodes) -> None:
    """As all packaged ones do: one log was staged as that of each, those of the others never, and all looked well."""
    nodes.hosts = (HOST, WELL, OTHER)
    for _ in range(3):
        nodes.cycle_once()
    assert (nodes.staged(), nodes.segment.exists()) == ({OTHER.id}, True)
    assert (named(nodes, HOST), named(nodes, WELL), nodes.told(OTHER)) == (True, True, [])
    assert nodes.unread() == {HOST.endpoint, WELL.endpoint}
    told = worker_reports({"commitlog_stage/default": nodes.status()}, ("default",), {})
    assert (len(told.refused), told.usable) == (2, (OTHER.endpoint,))


def test_a_folder_is_known_by_any_path(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(nodes.raw)
    nodes.says[WELL.id] = tmp_path / "link"
    nodes.hosts = (HOST, WELL)
    nodes.cycle_once()
    assert (nodes.staged(), nodes.segment.exists()) == (set(), True)
    assert nodes.unread() == {HOST.endpoint, WELL.endpoint}


@pytest.mark.parametrize("damaged", [False, True])
def test_who_comes_later_stops_both(nodes: Nodes, damaged: bool) -> None:
    """Nobody knows whose folder it was from the beginning; so it is where the other cannot be staged anyway."""
    nodes.hosts = (HOST,)
    nodes.cycle_once()
    assert nodes.staged() == {HOST.id}
    another = nodes.logs_more()
    if damaged:
        nodes.store.put(f"staging/log/{WELL.id}/000000000007.json", b'{"node')
    nodes.hosts = (HOST, WELL)
    nodes.cycle_once(61)
    for _ in range(3):
        nodes.cycle_once(61)
        assert another.exists()
        assert named(nodes, HOST)
        assert nodes.unread() == {HOST.endpoint, WELL.endpoint}
    nodes.hosts = (HOST,)  # The other has left the ring, or has a queue of its own.
    for _ in range(2):
        nodes.cycle_once(61)
    assert (another.exists(), nodes.unread(), nodes.told()) == (False, set(), [])


def test_a_worker_of_another_queue_that_reads_the_folder_stops_both(nodes: Nodes) -> None:
    """One of them runs on the other's host: what it reads there is not its node's log."""
    nodes.hosts = (HOST,)

    def pass_minute(folder: str) -> None:
        """``bucket_close`` knows what the workers of both queues say."""
        for _ in range(3):
            now_ms = int(nodes.now_s * 1000)
            place = {"endpoint": WELL.endpoint, "folder": str(nodes.raw), "folder_id": folder, "is_found": True}
            other = {"at_ms": now_ms, "nodes": {WELL.id: HOST_TELLS | place}}
            statuses = {HOST.id: nodes.status(), **({WELL.id: other} if folder else {})}
            before = shared_by_queues(nodes.store)
            found = progress((HOST, WELL), statuses, lambda host: host.id, now_ms, 300_000, {}, before)
            put_shared_by_queues(nodes.store, found.shared)
            nodes.cycle_once(20)

    nodes.cycle_once()
    own = str(folder_id(nodes.raw))
    pass_minute(own)
    another = nodes.logs_more()
    for folder, is_read in ((own, False), ("", False), (own, False), ("elsewhere", True)):
        pass_minute(folder)
        assert (another.exists(), named(nodes, HOST)) == (not is_read, not is_read)
        assert (nodes.unread() == set()) == is_read


def test_folders_that_are_not_there_are_nobodys(nodes: Nodes, tmp_path: Path) -> None:
    nodes.says |= {HOST.id: tmp_path / "gone", WELL.id: tmp_path / "gone"}
    nodes.hosts = (HOST, WELL, OTHER)
    nodes.cycle_once()
    assert "cdc_raw cannot be read" in nodes.told()[0]
    assert nodes.staged() == {OTHER.id}


def test_what_was_found_outlives_all_who_know_it(nodes: Nodes) -> None:
    """All loops were silent for a minute: then the segments were staged, and deleted, as those of one node."""
    nodes.hosts = (HOST,)  # WELL is of another queue.
    put_shared_by_queues(nodes.store, [{HOST.id: "same folder", WELL.id: "same folder"}])
    for _ in range(3):
        nodes.cycle_once(86_400)
    assert (nodes.staged(), nodes.segment.exists()) == (set(), True)
    assert "same folder" in nodes.told()[0]


@pytest.mark.parametrize("own_path", [False, True])
def test_a_node_that_captures_nothing_owns_no_folder(nodes: Nodes, own_path: bool) -> None:
    """It names the packaged one, too: nobody was read."""
    if own_path:
        nodes.stager._config.sync.cdc_raw = str(nodes.raw)
    nodes.hosts, nodes.idle = (HOST, WELL), {WELL.id}
    nodes.cycle_once()
    assert (nodes.staged(), nodes.segment.exists(), nodes.told()) == ({HOST.id}, False, [])
    assert "the node captures nothing (cdc_enabled: false)" in nodes.told(WELL)[0]
    nodes.idle = {HOST.id}  # What it has left is read all the same.
    another = nodes.logs_more()
    nodes.cycle_once()
    assert (nodes.staged(), another.exists()) == ({HOST.id}, True)
    assert named(nodes, HOST)
    assert named(nodes, WELL)
    del nodes.stager._logs[HOST.id]
    nodes.hosts = (HOST,)
    nodes.cycle_once(61)
    assert (another.exists(), nodes.told()) == (False, [])
