"""A folder of segments is one node's: of nodes that claim the same one none is read, and all are named."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.ledger.staging import commit_keys, node_of
from ringsync.ring.ring import Host
from ringsync.service.workers import worker_reports
from ringsync.status import Status
from ringsync.steps.close.closing import progress
from ringsync.steps.stage import claims, commitlog_stage
from ringsync.steps.stage.commitlog_stage import Stager
from ringsync.storage.local import LocalStore
from ringsync.storage.port import UnavailableError
from tests.steps.node_logs import finished
from tests.steps.test_stager import HOST, TABLES, WELL, Cluster, OneByOne, Sync

OTHER = replace(HOST, id="c", address="127.0.0.3")


class Nodes(Sync):
    """Nodes that say themselves where their logs are. Each queue has a worker of its own.

    :ivar says: what each node answers when it is asked for its ``cdc_raw``; a node that is missing does not answer
    :ivar idle: nodes that capture nothing
    :ivar queues: queue of each node that is not in the default queue
    :ivar asked: how often each node was asked
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, Cluster(TABLES, TABLES), patch)
        self.raw = self.segment.parent
        self.other_raw, self.source = (shutil.copytree(self.raw, folder / name) for name in ("other", "source"))
        self.says = {HOST.id: self.raw, WELL.id: self.raw, OTHER.id: self.other_raw}
        self.idle: set[str] = set()
        self.queues: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self.config = self.stager._config
        self.config.sync.cdc_raw = None  # the default
        self.config.sync.queue_of = lambda address, host: self.queues.get(host, "default")  # type: ignore[method-assign]
        patch.setattr(commitlog_stage, "read_settings", self.says_where)

    def says_where(self, session: Any, host: str, names: list[str]) -> dict[str, str]:
        self.asked[host] += 1
        if host not in self.says:
            return {}
        return {"cdc_raw_directory": str(self.says[host]), "cdc_enabled": str(host not in self.idle).lower()}

    def worker(self, queue: str) -> Stager:
        """A worker that begins now."""
        options = SimpleNamespace(queue=queue)
        application: Any = SimpleNamespace(config=self.config, store=self.store, options=options)
        return Stager(application, self.stager._session, OneByOne(), lambda errors, node: None)

    def minute(self, *workers: Stager) -> None:
        self.now_s += 61
        for worker in workers:
            worker.cycle()

    def logs_more(self, folder: Path | None = None) -> Path:
        """Have one more segment in a folder."""
        another = (folder or self.raw) / self.segment.name.replace(".log", f"{int(self.now_s) % 100_000}.log")
        shutil.copy(self.source / self.segment.name, another)
        another.with_name(another.name.replace(".log", "_cdc.idx")).write_text(finished(another.read_bytes()))
        return another

    def staged(self) -> set[str]:
        return {node_of(key) for key in commit_keys(self.store)}

    def status(self) -> Status:
        return {"at_ms": int(self.now_s * 1000), "nodes": self.stager.status(), "error": None}

    def unread(self) -> set[str]:
        """What closing waits for, for one window."""
        now_ms = int(self.now_s * 1000)
        return set(progress(self.hosts, {"q": self.status()}, lambda host: "q", now_ms, 300_000, {}).unread)

    def why(self, worker: Stager, host: Host) -> str:
        """Why a worker does not read a node; empty: it does."""
        told = worker.status()[host.id]
        return "" if told["is_read"] else str(told["error"])


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def named(nodes: Nodes, host: Host) -> bool:
    both = f"nodes {HOST.endpoint}, {WELL.endpoint} claim the same folder {nodes.raw}"
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
    nodes.hosts = (HOST,)  # The other has left the ring.
    for _ in range(2):
        nodes.cycle_once(61)
    assert (another.exists(), nodes.unread(), nodes.told()) == (False, set(), [])


def test_two_queues_that_read_one_folder_stop_whoever_is_silent(nodes: Nodes) -> None:
    """What was known of the other was forgotten when a loop was silent, and the segments were staged and deleted."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    one, two = nodes.worker("default"), nodes.worker("two")
    nodes.minute(one)
    assert nodes.staged() == {HOST.id}
    another = nodes.logs_more()
    nodes.minute(two, one)
    for worker, host in ((one, HOST), (two, WELL)):
        assert "claim the same folder" in nodes.why(worker, host)
    nodes.now_s += 86_400
    one = nodes.worker("default")  # A new run; the other worker has not begun yet, and its host was restarted.
    nodes.minute(one)
    assert "claim the same folder" in nodes.why(one, HOST)
    assert (nodes.staged(), another.exists()) == ({HOST.id}, True)
    nodes.says[WELL.id] = nodes.other_raw  # It has got its own folder.
    two = nodes.worker("two")
    nodes.minute(two)
    nodes.minute(one)
    assert (nodes.why(one, HOST), nodes.why(two, WELL)) == ("", "")
    assert (nodes.staged(), another.exists()) == ({HOST.id, WELL.id}, False)


def test_one_silent_worker_holds_up_only_who_reads_where_it_did(nodes: Nodes, tmp_path: Path) -> None:
    """Of ten nodes that had shared a folder none was read until the last one's worker had begun elsewhere."""
    nodes.hosts = (HOST, WELL, OTHER)
    nodes.says[OTHER.id] = nodes.raw
    nodes.minute(nodes.stager)
    nodes.queues = {WELL.id: "two", OTHER.id: "three"}
    nodes.says |= {WELL.id: shutil.copytree(nodes.other_raw, tmp_path / "moved")}
    one, two = nodes.worker("default"), nodes.worker("two")
    for _ in range(3):
        nodes.minute(one, two)
    assert nodes.why(two, WELL) == ""
    assert f"{HOST.endpoint}, {OTHER.endpoint} claim the same folder" in nodes.why(one, HOST)
    (nodes.raw / f"ringsync-claim.{OTHER.id}").unlink()  # As the message says.
    nodes.minute(one)
    assert (nodes.why(one, HOST), nodes.segment.exists()) == ("", False)


def test_a_store_that_cannot_tell_whose_a_claim_is_lets_nobody_read(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed read was enough to read, and delete, for an interval."""
    nodes.hosts = (HOST, WELL)
    nodes.minute(nodes.stager)
    del nodes.says[WELL.id]
    nodes.queues = {WELL.id: "two"}
    get = LocalStore.get

    def fails(store: LocalStore, key: str) -> Any:
        if key == f"staging/nodes/{WELL.id}":
            raise UnavailableError("503")
        return get(store, key)

    worker = nodes.worker("default")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", fails)
        for _ in range(3):
            nodes.minute(worker)
            assert "503" in nodes.why(worker, HOST)
    nodes.minute(worker)
    assert "claim the same folder" in nodes.why(worker, HOST)
    assert (nodes.staged(), nodes.segment.exists()) == (set(), True)


def test_a_failing_node_that_shares_a_folder_does_not_keep_others_from_their_turn(nodes: Nodes) -> None:
    """Of those that fail one is tried at a time: it was always the one that is not read."""
    nodes.hosts, nodes.says[WELL.id] = (HOST, OTHER), nodes.raw
    for host in (HOST, OTHER):
        nodes.store.put(f"staging/log/{host.id}/000000000007.json", b'{"node')
    nodes.minute(nodes.stager)
    assert nodes.stager.is_failing
    nodes.hosts, nodes.queues = (HOST, OTHER, WELL), {WELL.id: "two"}
    nodes.minute(nodes.worker("two"))
    for host in (HOST, OTHER):
        nodes.store.delete(f"staging/log/{host.id}/000000000007.json")
    for _ in range(6):
        nodes.minute(nodes.stager)
    assert nodes.staged() == {OTHER.id}
    assert "claim the same folder" in nodes.why(nodes.stager, HOST)


def test_a_claim_that_cannot_be_made_is_named_and_nothing_is_read(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def denied(path: Path, *given: Any, **named: Any) -> int:
        if path.parent == nodes.raw:
            raise PermissionError(13, "Permission denied")
        return write(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", denied)
        for _ in range(3):
            nodes.cycle_once()
            assert f"{nodes.raw} is not claimed for the node: Permission denied" in nodes.told()[0]
    assert nodes.segment.exists()
    nodes.cycle_once()
    assert (nodes.told(), nodes.segment.exists()) == ([], False)
    (nodes.raw / f"ringsync-claim.{HOST.id}").unlink()
    for _ in range(2):
        nodes.cycle_once()
    assert nodes.told() == []


def test_folders_that_are_not_there_are_nobodys(nodes: Nodes, tmp_path: Path) -> None:
    nodes.says |= {HOST.id: tmp_path / "gone", WELL.id: tmp_path / "gone"}
    nodes.hosts = (HOST, WELL, OTHER)
    nodes.cycle_once()
    assert "cdc_raw cannot be read" in nodes.told()[0]
    assert nodes.staged() == {OTHER.id}


@pytest.mark.parametrize("own_path", [False, True])
def test_a_node_that_captures_nothing_claims_no_folder(nodes: Nodes, own_path: bool) -> None:
    """It names the packaged one, too: nobody was read."""
    if own_path:
        nodes.config.sync.cdc_raw = str(nodes.raw)
    nodes.hosts, nodes.idle = (HOST, WELL), {WELL.id}
    nodes.cycle_once()
    assert (nodes.staged(), nodes.segment.exists(), nodes.told()) == ({HOST.id}, False, [])
    assert "captures nothing (cdc_enabled: false)" in nodes.told(WELL)[0]
    nodes.asked.clear()
    for _ in range(30):
        nodes.cycle_once()
    assert nodes.asked[WELL.id] <= 1, "it is asked once in an interval"
    another = nodes.logs_more()
    del nodes.says[WELL.id]  # It does not answer for a moment, when a new run begins.
    worker = nodes.worker("default")
    nodes.minute(worker)
    assert (nodes.why(worker, HOST), another.exists()) == ("", False)
    nodes.idle = {HOST.id}  # What it has left is read all the same.
    another, worker = nodes.logs_more(), nodes.worker("default")
    nodes.minute(worker)
    assert (nodes.why(worker, HOST), another.exists()) == ("", False)


def test_a_node_that_captures_again_meets_the_claim_of_who_reads_there(nodes: Nodes) -> None:
    """What was known of it was forgotten while it captured nothing, and it staged and deleted the other's segments."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    one, two = nodes.worker("default"), nodes.worker("two")
    nodes.minute(one, two)
    assert nodes.staged() == {HOST.id}
    for idle, is_read in (({WELL.id}, True), (set[str](), False)):
        nodes.idle = idle
        another, one, two = nodes.logs_more(), nodes.worker("default"), nodes.worker("two")
        for _ in range(2):
            nodes.minute(two, one)
        assert (nodes.why(one, HOST) == "", another.exists()) == (is_read, not is_read)
        assert WELL.id not in nodes.staged()


def test_a_node_that_captures_nothing_any_more_is_read_where_its_claim_is(nodes: Nodes, tmp_path: Path) -> None:
    """It named the folder of the host of another worker, and blocked the node there for good."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    nodes.says[WELL.id] = nodes.other_raw
    one, two = nodes.worker("default"), nodes.worker("two")
    nodes.minute(one, two)
    assert nodes.staged() == {HOST.id, WELL.id}
    nodes.idle = {WELL.id}
    left, two = nodes.logs_more(nodes.other_raw), nodes.worker("two")
    nodes.minute(two)
    assert (nodes.why(two, WELL), left.exists()) == ("", False)
    nodes.says[WELL.id], nodes.queues = nodes.raw, {}  # Its worker is gone: it falls to that of the other's host.
    another, one = nodes.logs_more(), nodes.worker("default")
    nodes.minute(one)
    assert (nodes.why(one, HOST), another.exists()) == ("", False)
    assert f"{nodes.raw} is not claimed for the node: it has no claim there" in nodes.why(one, WELL)


def test_a_folder_that_is_mounted_late_keeps_its_claim(nodes: Nodes, tmp_path: Path) -> None:
    """The empty folder was claimed instead: the claim on the disk was old, and another node's worker removed it."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    one = nodes.worker("default")
    nodes.minute(one)
    nodes.raw.rename(tmp_path / "disk")
    nodes.raw.mkdir()
    one = nodes.worker("default")
    nodes.minute(one)
    assert "has no segment" in nodes.why(one, HOST)
    nodes.raw.rmdir()
    (tmp_path / "disk").rename(nodes.raw)
    another, two = nodes.logs_more(), nodes.worker("two")
    nodes.minute(two)
    assert "claim the same folder" in nodes.why(two, WELL)
    nodes.minute(one)
    assert "claim the same folder" in nodes.why(one, HOST)
    assert another.exists()


def test_a_folder_whose_path_is_spelled_anew_keeps_its_claim(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two effects made a valid claim an old one."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    nodes.minute(nodes.worker("default"))
    (tmp_path / "link").symlink_to(nodes.raw)
    nodes.says[HOST.id] = tmp_path / "link"
    with monkeypatch.context() as patch:
        patch.setattr(claims, "put_place", lambda *_: (_ for _ in ()).throw(UnavailableError("killed")))
        nodes.minute(nodes.worker("default"))
    another, two = nodes.logs_more(), nodes.worker("two")
    nodes.minute(two)
    assert ("claim the same folder" in nodes.why(two, WELL), another.exists()) == (True, True)


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_node_that_was_never_asked_is_read_where_the_configuration_says(nodes: Nodes, is_configured: bool) -> None:
    """It was taken for one that captures nothing: a node that this worker cannot ask was not read at all."""
    nodes.hosts = (HOST,)
    del nodes.says[HOST.id]
    nodes.config.sync.cdc_raw = str(nodes.raw) if is_configured else None
    for _ in range(2):
        nodes.minute(nodes.stager)
    assert nodes.segment.exists() != is_configured
    assert ("sync.cdc_raw can name it" in nodes.why(nodes.stager, HOST)) != is_configured


def test_a_node_that_cannot_be_asked_is_claimed_where_the_mended_configuration_says(nodes: Nodes) -> None:
    """It had its one claim in the wrong folder, and was never read again."""
    nodes.hosts = (HOST,)
    del nodes.says[HOST.id]
    nodes.logs_more(nodes.other_raw)
    nodes.config.sync.cdc_raw = str(nodes.other_raw)
    nodes.minute(nodes.worker("default"))
    nodes.config.sync.cdc_raw = str(nodes.raw)
    assert nodes.segment.exists()
    worker = nodes.worker("default")
    for _ in range(2):
        nodes.minute(worker)
    assert (nodes.why(worker, HOST), nodes.segment.exists()) == ("", False)


def test_who_has_lost_the_claim_of_a_node_that_cannot_be_asked_is_told_what_to_do(nodes: Nodes) -> None:
    nodes.hosts = (HOST,)
    del nodes.says[HOST.id]
    nodes.config.sync.cdc_raw = str(nodes.raw)
    nodes.minute(nodes.worker("default"))
    (nodes.raw / f"ringsync-claim.{HOST.id}").unlink()
    another, worker = nodes.logs_more(), nodes.worker("default")
    for _ in range(2):
        nodes.minute(worker)
    told = nodes.why(worker, HOST)
    assert (f"remove staging/nodes/{HOST.id} from the object store" in told, another.exists()) == (True, True)
    nodes.store.delete(f"staging/nodes/{HOST.id}")
    worker = nodes.worker("default")
    for _ in range(2):
        nodes.minute(worker)
    assert (nodes.why(worker, HOST), another.exists()) == ("", False)


@pytest.mark.parametrize("mine", [True, False])
def test_a_claim_whose_writing_was_cut_off_is_made_again(nodes: Nodes, mine: bool) -> None:
    """By a kill, or a full disk: it was taken for a claim, and its node was not read any more."""
    nodes.hosts, nodes.queues = (HOST, WELL), {WELL.id: "two"}
    (nodes.raw / f"ringsync-claim.{HOST.id if mine else WELL.id}").touch()
    one = nodes.worker("default")
    for _ in range(2):
        nodes.minute(one)
    assert (nodes.why(one, HOST) == "", nodes.segment.exists()) == (mine, not mine)


def test_what_another_store_reads_is_left_to_it(nodes: Nodes, tmp_path: Path) -> None:
    """A store that is not mounted looks like a new one. Segments were read into it, and removed."""
    nodes.hosts = (HOST,)
    nodes.cycle_once()
    segment, claimed = nodes.logs_more(), (nodes.raw / f"ringsync-claim.{HOST.id}").read_text()
    before, nodes.store = nodes.store, LocalStore(tmp_path / "where it was mounted")
    worker = nodes.worker("default")
    for _ in range(3):
        nodes.minute(worker)
    assert "made for another object store" in nodes.why(worker, HOST)
    assert "is the store mounted, and store.url right?" in nodes.why(worker, HOST)
    assert (segment.exists(), nodes.staged()) == (True, set())
    assert (nodes.raw / f"ringsync-claim.{HOST.id}").read_text() == claimed

    nodes.store = before
    worker = nodes.worker("default")
    for _ in range(3):
        nodes.minute(worker)
    assert (nodes.why(worker, HOST), segment.exists()) == ("", False)
