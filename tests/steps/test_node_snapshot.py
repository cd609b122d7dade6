"""A node's snapshot in its data directories: all of them, complete, and nothing that a link leads to."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.config import load_config
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.sstables import merged_rows, open_sstable
from ringsync.ring.ring import Host
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import TableSchema
from ringsync.steps.bootstrap.node_snapshot import (
    IncompleteSnapshotError,
    Node,
    NodeSnapshotError,
    node_of,
    read_outlines,
    snapshots_on_disk,
    tag_of,
    take_snapshot,
)
from tests.formats.sstable.files import sources_of, table_of, unpacked
from tests.steps.snapshot_folders import calls, nodetool

HOST = Host("0b3e9f0a-0000-4000-8000-000000000001", "10.0.0.1", 9042, "dc1", "r1", (0,))
OTHER = replace(HOST, id="0b3e9f0a-0000-4000-8000-000000000002", address="10.0.0.2")
BOOTSTRAP = "20261125T101500Z-0000000a"
FIXTURE = "5.0-nb"


@dataclass(frozen=True)
class World:
    """A table of a real server, its SSTables in turn in one and the other data directory."""

    folder: Path
    node: Node
    table: TableSchema
    names: frozenset[str]

    @property
    def tables(self) -> list[Path]:
        """The table's folder in each data directory."""
        name = f"{self.table.name}-{self.table.table_id.replace('-', '')}"
        return [directory / self.table.keyspace / name for directory in self.node.directories]

    @property
    def snapshots(self) -> list[Path]:
        """The snapshot's folder in each data directory."""
        return [folder / "snapshots" / tag_of(BOOTSTRAP, HOST.id) for folder in self.tables]

    def take(self) -> list[Any]:
        return take_snapshot(self.node, self.table, BOOTSTRAP, 0.0)

    def taken(self) -> set[str]:
        return {one.descriptor.name for one in self.take()}

    def calls(self) -> list[str]:
        return calls(self.folder)


@pytest.fixture
def world(tmp_path: Path) -> World:
    names = {f"{one.parts[-4]}.{one.parts[-3][:-33]}" for one in unpacked(FIXTURE).glob("*/*/snapshots/flushed")}
    name = max(sorted(names), key=lambda one: len(sources_of(FIXTURE, one, "flushed")))
    sources = sources_of(FIXTURE, name, "flushed")
    assert len(sources) > 1
    table = table_of(sources[0].descriptor)
    directories = tuple(tmp_path / one for one in ("data1", "data2", "data3"))
    node = Node(HOST, nodetool(tmp_path, *directories[:2], host_id=HOST.id), 30.0, directories)
    found = World(tmp_path, node, table, frozenset(source.descriptor.name for source in sources))
    for folder in found.tables[:2]:
        folder.mkdir(parents=True)
    directories[2].mkdir()  # has nothing of the table
    for number, source in enumerate(sources):
        for file in Path(source.descriptor.folder).glob(f"{source.descriptor.name}-*"):
            shutil.copy(file, found.tables[number % 2])
    return found


def test_sstables_of_all_data_directories_are_found(world: World) -> None:
    sstables = world.take()
    assert {one.descriptor.name for one in sstables} == world.names
    assert {Path(one.descriptor.folder) for one in sstables} == set(world.snapshots[:2])
    opened = [open_sstable(LocalSource(one.descriptor), world.table) for one in sstables]
    parts = [(one, part) for one in opened for part in one.parts(WHOLE_RING)]
    assert sum(len(part.rows) for part in merged_rows(parts, world.table, lambda loss: None)) > 0
    for one in sstables:
        assert all(Path(one.descriptor.path(name)).stat().st_size == size for name, size in one.files.items())
    assert world.taken() == world.names
    assert world.calls() == ["snapshot"]


@pytest.mark.parametrize("listed", [None, "SI_by_v_idx.db", "SAI+aa+GroupComplete.db"])
def test_a_list_of_components_decides_nothing(world: World, listed: str | None) -> None:
    """An SSTable that was streamed as a whole has no TOC.txt; in others it names a SASI index that was dropped, or a
    new SAI: a snapshot's TOC.txt is the very file to which Cassandra adds it."""
    for path in (path for folder in world.tables[:2] for path in folder.glob("*-TOC.txt")):
        path.unlink() if listed is None else path.write_text(f"{path.read_text()}{listed}\n")
    assert world.taken() == world.names
    assert world.taken() == world.names
    assert world.calls() == ["snapshot"]


@pytest.mark.parametrize("unnamed", [0, 1])
def test_a_data_directory_that_is_not_named_is_missed(world: World, unnamed: int) -> None:
    """Half of the rows would be left out; taking it again does not help, so that is tried once only."""
    some = tuple(one for number, one in enumerate(world.node.directories) if number != unnamed)
    less = replace(world, node=replace(world.node, directories=some))
    for attempt in (1, 2):
        with pytest.raises(IncompleteSnapshotError, match="are all data directories named"):
            less.take()
        assert world.calls().count("snapshot") == attempt
    assert world.taken() == world.names


def _lacks_manifest(world: World) -> None:
    (world.snapshots[0] / "manifest.json").unlink()


def _lacks_schema(world: World) -> None:
    (world.snapshots[0] / "schema.cql").unlink()


def _has_part_of_a_manifest(world: World) -> None:
    (world.snapshots[0] / "manifest.json").write_text('{"files": ["nb-1')


def _has_no_list(world: World) -> None:
    (world.snapshots[0] / "manifest.json").write_text("[]")


def _lacks_a_component(world: World) -> None:
    min(world.snapshots[1].glob("*-Statistics.db")).unlink()


def _lacks_an_sstable(world: World) -> None:
    name = min(world.snapshots[1].glob("*-Data.db")).name.removesuffix("Data.db")
    for file in world.snapshots[1].glob(f"{name}*"):
        file.unlink()


def _lacks_a_directory(world: World) -> None:
    shutil.rmtree(world.snapshots[1])


def _lists_more(world: World) -> None:
    path = world.snapshots[0] / "manifest.json"
    path.write_text(json.dumps({"files": [*json.loads(path.read_text())["files"], "nb-99-big-Data.db"]}))


def _has_a_link(world: World) -> None:
    file = min(world.snapshots[1].glob("*-Data.db"))
    target = world.folder / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


@pytest.mark.parametrize("harm", [
    _lacks_manifest, _lacks_schema, _has_part_of_a_manifest, _has_no_list, _lacks_a_component, _lacks_an_sstable,
    _lacks_a_directory, _lists_more, _has_a_link,
])  # fmt: skip
def test_a_snapshot_that_is_not_complete_is_taken_again(
    world: World, harm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process was killed between the links and the manifest, or files have gone since."""
    assert world.taken() == world.names
    harm(world)
    assert world.taken() == world.names
    assert world.calls() == ["snapshot", "clearsnapshot", "snapshot"]
    assert "taken again" in capsys.readouterr().out
    assert world.taken() == world.names
    assert world.calls() == ["snapshot", "clearsnapshot", "snapshot"]


@pytest.mark.parametrize("component", ["Index.db", "Statistics.db", "CompressionInfo.db"])
def test_a_damaged_small_file_is_found_before_anything_is_copied(world: World, component: str) -> None:
    """Only this node's worker reads the indexes; what it reads counts for the speed limit."""
    sstables, read = world.take(), list[int]()
    assert all(set(one.files) == {"Data.db", "Statistics.db", "CompressionInfo.db"} for one in sstables)
    outlines = read_outlines(world.node, world.table, sstables, WHOLE_RING.unwrap(), read.append)
    assert [one.length > 0 and one.is_within for one in outlines] == [True] * len(sstables)
    assert sum(read) >= sum(Path(one.descriptor.path("Index.db")).stat().st_size for one in sstables)
    path = Path(sstables[1].descriptor.path(component))
    content = path.read_bytes()
    path.unlink()  # the node's own file is the same one
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(NodeSnapshotError, match=rf"node 10\.0\.0\.1:9042: {path}.* nodetool scrub .* again"):
        read_outlines(world.node, world.table, sstables, WHOLE_RING.unwrap(), read.append)
    assert len(take_snapshot(world.node, world.table, BOOTSTRAP, 0.0, anew=True)) == len(sstables)
    assert world.calls() == ["snapshot", "clearsnapshot", "snapshot"]


def test_a_link_among_the_nodes_own_files_fails(world: World) -> None:
    secret = world.folder / "secret"
    secret.write_text("of somebody else")
    name = min(world.tables[0].glob("*-Data.db")).name.removesuffix("Data.db")
    program = world.node.nodetool[1]
    Path(program).write_text(
        Path(program).read_text()
        + f"\nif command == 'snapshot':\n    os.symlink({str(secret)!r}, first / '{name}Secret.db')\n"
    )
    with pytest.raises(IncompleteSnapshotError, match=f"{name}Secret.db is a symbolic link"):
        world.take()


@pytest.mark.parametrize("level", range(4), ids=["tag", "snapshots", "table", "keyspace"])
def test_a_folder_that_a_link_leads_to_is_refused(world: World, level: int) -> None:
    world.take()
    linked = [world.snapshots[1], *world.snapshots[1].parents][level]
    moved = world.folder / "elsewhere"
    linked.rename(moved)
    linked.symlink_to(moved)
    with pytest.raises(NodeSnapshotError, match="by a symbolic link inside the data directory"):
        world.take()
    assert moved.is_dir()


def test_a_data_directory_may_be_a_link_and_be_named_twice(world: World, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(world.node.directories[0])
    named = [str(link), *map(str, world.node.directories), f"{world.node.directories[1]}/"]
    path = tmp_path / "ringsync.yaml"
    document = {"server_name": "s", "cassandra": {"contact_points": ["10.0.0.1"]}, "store": {"url": "lake"}}
    settings = {"data_directories": named, "nodetool": list(world.node.nodetool)}
    path.write_text(json.dumps({**document, "sstable": settings}))
    node = node_of(load_config(path), SimpleNamespace(), HOST)
    assert node.directories == world.node.directories
    found = take_snapshot(node, world.table, BOOTSTRAP, 0.0)
    assert sorted(one.descriptor.name for one in found) == sorted(world.names)


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("there", [False, True], ids=["cleared", "still there"])
def test_files_of_a_node_are_not_taken_for_another_ones(world: World, anew: bool, there: bool) -> None:
    """Nodes on several hosts name the same directory, and the default nodetool reaches the one of this host."""
    if there:
        world.take()
    other = replace(world.node, host=OTHER)
    with pytest.raises(NodeSnapshotError, match=rf"10\.0\.0\.2:9042: .* info .* {HOST.id}, not {OTHER.id}: .*queue_of"):
        take_snapshot(other, world.table, BOOTSTRAP, 0.0, anew=anew)
    assert list(snapshots_on_disk(other)) == []
    assert len(list(snapshots_on_disk(world.node))) == there


@pytest.mark.parametrize("anew", [False, True])
def test_files_of_a_node_are_not_taken_for_those_of_a_node_elsewhere(world: World, anew: bool) -> None:
    """nodetool reaches the other node over the network, but the directories are this host's."""
    world.take()
    elsewhere = world.folder / "elsewhere"
    shutil.copytree(world.tables[0].parent, elsewhere / world.table.keyspace)
    command = nodetool(world.folder, elsewhere, host_id=OTHER.id)
    other = replace(world.node, host=OTHER, nodetool=command)
    with pytest.raises(NodeSnapshotError, match=r"10\.0\.0\.2:9042: nodetool has taken .* not in "):
        take_snapshot(other, world.table, BOOTSTRAP, 0.0, anew=anew)
    assert not list(elsewhere.glob(f"*/*/snapshots/{tag_of(BOOTSTRAP, OTHER.id)}"))  # nobody would look for it there
    assert world.taken() == world.names


def test_a_nodetool_without_an_id_reaches_no_node(world: World) -> None:
    silent = replace(world.node, nodetool=("true",))
    with pytest.raises(NodeSnapshotError, match=r"true info prints no ID"):
        take_snapshot(silent, world.table, BOOTSTRAP, 0.0)
