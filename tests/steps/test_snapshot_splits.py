"""How the snapshots of many nodes with vnodes become tasks: few, each opens an SSTable once, and commits little."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ringsync.cql.murmur3 import tokens
from ringsync.formats.sstable.names import DATA, Descriptor
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import SSTable
from ringsync.ledger.snapshots import (
    COPIES,
    PIECE_BYTES,
    NodeSnapshot,
    SnapshotsOf,
    StoredSSTable,
    copied,
    get_failure,
    get_manifest,
    keep_snapshots_of,
    piece_key,
    put_manifest,
    put_partitions,
)
from ringsync.ring.consistency import held_by
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING, TokenRange, TokenSet, subtract, union
from ringsync.sources import sstable_files
from ringsync.sources.sstable_files import Opener
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap import scan
from ringsync.steps.bootstrap.node_snapshot import Node, read_outlines
from ringsync.steps.bootstrap.rows_of_split import SnapshotRows
from ringsync.steps.bootstrap.snapshot_splits import check_ring, cut_snapshots
from ringsync.steps.bootstrap.task import RangeWriter, write_split
from ringsync.steps.tables import Outcome
from ringsync.storage.local import LocalStore
from tests.formats.sstable.maker import TABLE_ID, int32, partition, row, sized, sstable, statistics, table_of
from tests.steps.test_range_writer import RecordedControl

BOOTSTRAP = "20261125T101500Z-0000000a"
KEYS = 600
TOKENS = tokens(pa.array([int32(key) for key in range(KEYS)], pa.binary())).tolist()
CHUNK = 65536
"""Bytes that one checksum covers."""
RANDOM = Random(1)
HOSTS = tuple(
    Host(
        f"id-{n}", f"10.0.0.{n}", 9042, "dc1", f"r{n % 3}", tuple(RANDOM.randrange(-(2**63), 2**63) for _ in range(32))
    )
    for n in range(6)
)
RING = RingSnapshot(HOSTS, Replication("NetworkTopologyStrategy", (("dc1", 3),)))
IDS = {host.id for host in HOSTS}
WHOLE: TokenSet = WHOLE_RING.unwrap()
UUID = "-".join((TABLE_ID[:8], TABLE_ID[8:12], TABLE_ID[12:16], TABLE_ID[16:20], TABLE_ID[20:]))
TABLE = table_of(f"p int, c text, v text, PRIMARY KEY (p, c)) WITH ID = {UUID}")
SELECTED = SimpleNamespace(ranges=WHOLE)
SCAN: Any = SimpleNamespace(
    table=TABLE, now=1, unrepresentable_values="error", consistency_level="LOCAL_QUORUM", selection=SELECTED
)
PLAN: Any = SimpleNamespace(bootstrap=SimpleNamespace(id=BOOTSTRAP), scan=SCAN)
CONFIG: Any = SimpleNamespace(sstable=SimpleNamespace(memory_mb=16))
PERMITS: Any = SimpleNamespace(ask=lambda rows: 1, answered=lambda rows, size: None)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with snapshots of all nodes; each has two SSTables with all rows, also those that it does not hold."""
    store = LocalStore(tmp_path / "store")
    keep_snapshots_of(store, SnapshotsOf(BOOTSTRAP, TABLE.keyspace, TABLE.name, RING, {}))
    for host in HOSTS:
        put(store, tmp_path / host.id, [int32(key) for key in range(KEYS)])
    return store


def put(store: LocalStore, folder: Path, keys: list[bytes], *, copy: bool = False) -> None:
    """Put the snapshot of a node: two SSTables with all of some partitions; or copies of them."""
    folder.mkdir(exist_ok=True)
    stored, copies = [], []
    for number in (1, 2):
        rows = {key: [row(b"\0" + sized(b"c"), [sized(b"x" * 2000)], number)] for key in keys}
        stats = statistics("Int32Type", ["UTF8Type"], [("v", "UTF8Type")])
        made = sstable({key: partition(key, some) for key, some in rows.items()}, stats, number, folder.as_posix())
        for component, content in made.files.items():
            Path(made.descriptor.path(component)).write_bytes(content)
        stored.append(StoredSSTable(made.descriptor, {name: len(some) for name, some in made.files.items()}))
        descriptor = replace(made.descriptor, keyspace=TABLE.keyspace, table=TABLE.name, table_id=TABLE_ID)
        copies.append(copied(BOOTSTRAP, folder.name, replace(stored[-1], descriptor=descriptor), PIECE_BYTES))
        for component, content in made.files.items() if copy else ():
            store.put(piece_key(copies[-1].descriptor.path(component), 0), content)
    snapshot = NodeSnapshot(folder.name, store.url if copy else "", 1, tuple(copies if copy else stored))
    held = held_by(RING, WHOLE, {folder.name})[folder.name]
    node = Node(HOSTS[0], (), 1.0, ())
    put_partitions(store, BOOTSTRAP, snapshot, read_outlines(node, TABLE, stored, held, lambda _: None))
    put_manifest(store, BOOTSTRAP, snapshot)


class Files:
    """Counts rows where the real ones write them."""

    are_full = False

    def __init__(self) -> None:
        self.count = 0

    def write(self, batch: Any, shown: Any) -> int:
        self.count += batch.num_rows
        return 0

    def close(self) -> None:
        pass

    def take(self) -> Any:
        count, self.count = self.count, 0
        return SimpleNamespace(to_json=lambda: count)

    def discard(self) -> None:
        self.count = 0


class Control(RecordedControl):
    def __init__(self) -> None:
        super().__init__()
        self.unread: dict[TokenRange, str] = {}

    def call(self, name: str, /, **content: Any) -> dict[str, Any]:
        if name == "unread":
            self.unread[TokenRange(content["start"], content["end"])] = content["reason"]
        return super().call(name, **content)


def scanned(store: LocalStore, tasks: list[SnapshotRows]) -> Control:
    """Read tasks as Spark does."""
    control = Control()
    for number, task in enumerate(tasks):
        files: Any = Files()
        writer = RangeWriter(files, control.call, str(number), 1e9)
        write_split(task.read(CONFIG, SCAN, store, PERMITS), task.most_bytes(CONFIG), writer, control.call)
    return control


def cut(store: LocalStore, left: TokenSet, least: int = 1, most: int = 4096) -> list[SnapshotRows]:
    return cut_snapshots(store, PLAN, TABLE, left, least, most)[0]


@pytest.mark.parametrize(("least", "most", "tasks"), [(1, 4096, 1), (4, 4096, 4), (4, 2, 2)])
def test_tasks_open_each_sstable_once_and_commit_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, least: int, most: int, tasks: int
) -> None:
    assert len(held_by(RING, WHOLE, IDS)[HOSTS[0].id]) > 10
    found = cut(store, WHOLE, least, most)
    assert len(found) == tasks
    opened: Counter[Descriptor] = Counter()

    def counted(self: Opener, source: Any) -> SSTable:
        opened[source.descriptor] += 1
        return open_sstable(self, source)

    open_sstable = Opener.open
    monkeypatch.setattr(Opener, "open", counted)
    control = scanned(store, found)
    assert len(opened) == 2 * len(HOSTS)
    assert max(opened.values()) <= tasks
    assert control.unread == {}
    assert len(control.commits) == tasks
    assert union(tokens for tokens, _, _ in control.commits) == WHOLE
    assert sum(rows for _, _, rows in control.commits) == KEYS


def test_a_table_that_is_large_is_cut_by_bytes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sstable_files, "PART_BYTES", 200_000)
    found = cut(store, WHOLE)
    assert 20 < len(found) < 100
    control = scanned(store, found)
    assert len(control.commits) == len(found)
    assert sum(rows for _, _, rows in control.commits) == KEYS


def test_what_is_left_is_read_by_few_tasks(store: LocalStore) -> None:
    left = tuple(part for number, part in enumerate(WHOLE[0].split(300)) if number % 3 == 0)
    found = cut(store, left, 4)
    assert len(found) == 4
    control = scanned(store, found)
    assert union(tokens for tokens, _, _ in control.commits) == left
    rest = scanned(store, cut(store, subtract(WHOLE, left)))
    assert sum(rows for _, _, rows in [*control.commits, *rest.commits]) == KEYS


def test_a_node_without_a_snapshot_and_rows_that_a_node_does_not_hold_do_not_count(store: LocalStore) -> None:
    store.delete(f"snapshots/{BOOTSTRAP}/{HOSTS[0].id}.json")
    found = cut(store, WHOLE, 3)
    for task in found:
        for split in task.splits:
            for _, descriptor, part in split.parts:
                node = Path(descriptor.folder).name
                assert node != HOSTS[0].id
                assert all(node in holders(token) for one in part.only for token in (one.start + 1, one.end))
                assert any(node not in holders(one.end + 1) for one in part.only)
    assert sum(rows for _, _, rows in scanned(store, found).commits) == KEYS


def holders(token: int) -> set[str]:
    """The nodes that hold a token, found by going around the ring."""
    owners = RING.owners
    first = next((at for at, (end, _) in enumerate(owners) if end >= token), 0)
    found: dict[str, Host] = {}
    for at in range(len(owners)):
        host = owners[(first + at) % len(owners)][1]
        found.setdefault(host.rack, host)
    return {host.id for host in found.values()}


def test_ranges_between_which_an_sstable_has_nothing_are_one_part(store: LocalStore, tmp_path: Path) -> None:
    """As in any SSTable of a node that has not given tokens away: one read, and one stream to merge."""
    keys = [int32(key) for key in range(KEYS)]
    held = {
        host.id: [key for key, token in zip(keys, TOKENS, strict=True) if host.id in holders(token)] for host in HOSTS
    }
    for node, own in held.items():
        put(store, tmp_path / node, own)
    tasks = cut(store, WHOLE, 4)
    assert [task.count for task in tasks] == [2 * len(HOSTS)] * 4
    assert sum(rows for _, _, rows in scanned(store, tasks).commits) == KEYS


def test_damage_costs_the_snapshot_of_its_node(store: LocalStore) -> None:
    """The other replicas are read in the next wave; a second damage leaves too few."""

    def damage(host: str) -> tuple[Path, Any]:
        split, part = next(
            (split, part)
            for task in cut(store, left, 20)
            for split in task.splits
            for _, name, part in split.parts
            if name.folder.endswith(host)
        )
        path = Path(next(name.path(DATA) for _, name, some in split.parts if some is part))
        content = bytearray(path.read_bytes())
        content[(part.first + part.end) // 2] ^= 1
        path.write_bytes(content)
        return path, split

    left: TokenSet = WHOLE
    path, _ = damage(HOSTS[0].id)
    first = scanned(store, cut(store, left, 20))
    assert first.unread
    assert all(str(path) in reason for reason in first.unread.values())
    assert get_manifest(store, BOOTSTRAP, HOSTS[0].id) is None
    assert f"node {HOSTS[0].id} is damaged: {path}" in (get_failure(store, BOOTSTRAP, HOSTS[0].id) or "")
    left = subtract(WHOLE, [tokens for tokens, _, _ in first.commits])
    path, _ = damage(HOSTS[1].id)
    second = scanned(store, cut(store, left, 20))
    assert second.unread
    left = subtract(left, [tokens for tokens, _, _ in second.commits])
    with pytest.raises(StepError, match=rf"too few replicas have a snapshot.*{path}.*run the bootstrap again"):
        cut(store, left, 20)
    put(store, path.parent, [int32(key) for key in range(KEYS)])  # it is taken again
    third = scanned(store, cut(store, left))
    assert not third.unread
    commits = [*first.commits, *second.commits, *third.commits]
    assert union(tokens for tokens, _, _ in commits) == WHOLE
    assert sum(rows for _, _, rows in commits) == KEYS


def test_a_damaged_copy_costs_the_ranges_of_its_damage_only(store: LocalStore, tmp_path: Path) -> None:
    """All other tasks of the wave still read its other parts: scan.max_failed_ranges allows some unread ranges only."""
    store.delete(f"snapshots/{BOOTSTRAP}/{HOSTS[0].id}.json")
    put(store, tmp_path / HOSTS[0].id, [int32(key) for key in range(KEYS)], copy=True)
    tasks = cut(store, WHOLE, 20)
    key = next(stat.key for stat in store.list(COPIES) if DATA in stat.key)
    content = bytearray(store.get(key))
    content[len(content) // 10] ^= 1
    store.put(key, bytes(content))
    first = scanned(store, tasks)
    assert 1 <= len(first.unread) <= 2
    assert get_manifest(store, BOOTSTRAP, HOSTS[0].id) is None
    left = subtract(WHOLE, [tokens for tokens, _, _ in first.commits])
    second = scanned(store, cut(store, left))
    assert not second.unread
    assert sum(rows for _, _, rows in [*first.commits, *second.commits]) == KEYS


def test_the_driver_reads_no_file_of_an_sstable(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a task read an index: those of hundreds of tables and nodes would be read in each wave."""
    monkeypatch.setattr(LocalSource, "read", pytest.fail)
    monkeypatch.setattr(LocalSource, "read_range", pytest.fail)
    found = cut(store, WHOLE, 4)
    monkeypatch.undo()
    for host in HOSTS:
        for path in Path(store.url.removeprefix("file://")).parent.glob(f"{host.id}/*-Index.db"):
            path.unlink()
    assert sum(rows for _, _, rows in scanned(store, found).commits) == KEYS


def test_a_node_with_another_address_is_the_same_node(store: LocalStore) -> None:
    """As after a restart in Kubernetes; but another rack, or other tokens, are another ring."""
    moved = replace(RING, hosts=(replace(HOSTS[0], address="10.9.9.9", port=19042), *HOSTS[1:]))
    check_ring(store, PLAN, moved)
    for other in (replace(HOSTS[0], rack="r9"), replace(HOSTS[0], tokens=(1,)), replace(HOSTS[0], id="id-9")):
        with pytest.raises(StepError, match="nodes have joined or left"):
            check_ring(store, PLAN, replace(RING, hosts=(other, *HOSTS[1:])))


@pytest.mark.parametrize(("most", "planned"), [(10**6, 20), (240, 8), (241, 16)])
def test_a_wave_has_no_more_tables_than_the_driver_can_hold(
    monkeypatch: pytest.MonkeyPatch, most: int, planned: int
) -> None:
    def plan_pieces(_: Any, __: int, one: Any, *rest: Any) -> tuple[list[Any], float]:
        if one.name[1] == "t3":
            raise OSError("its index is gone")
        return [SimpleNamespace(name="0", split=SimpleNamespace(count=30 if one.name[1] != "t2" else 60))], 10.0

    monkeypatch.setattr(scan, "MOST_IN_A_WAVE", most)
    monkeypatch.setattr(scan, "plan_pieces", plan_pieces)
    failed: list[str] = []

    def table(number: int) -> Any:
        name = "k", f"t{number}"
        collector = SimpleNamespace(failed={}, begin=list, fail=lambda: failed.append(name[1]))
        return SimpleNamespace(name=name, collector=collector)

    this: Any = SimpleNamespace(
        application=SimpleNamespace(run="r", config=SimpleNamespace(scan=SimpleNamespace(min_splits=4)))
    )
    tables, outcome = [table(number) for number in range(20)], Outcome()
    begun, sized = scan._plan(this, 0, tables, {one.name: WHOLE for one in tables}, 2, outcome)
    assert begun == tables[:planned]
    assert len(sized) == planned - 1
    assert failed == ["t3"]
    assert list(outcome.failures) == ["k.t3"]
