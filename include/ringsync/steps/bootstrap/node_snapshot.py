"""A node's own snapshot of a table: taken through its management interface, found in its data directories, cleared.

A snapshot is a folder of hard links, ``<data directory>/<keyspace>/<table>-<table id>/snapshots/<tag>/``. First the
node writes its memtable. Last it writes ``manifest.json``, which lists the SSTables, and ``schema.cql`` (C:
db/ColumnFamilyStore.snapshotWithoutMemtable).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringsync.cluster.cluster import read_settings
from ringsync.config import Config
from ringsync.formats.sstable.compression import read_chunks
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import DATA, ROWS_NEED, Descriptor, find_sstables
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.source import LocalSource
from ringsync.ledger.snapshots import StoredSSTable
from ringsync.ring.ring import Host
from ringsync.ring.tokens import TokenSet
from ringsync.schema.table import TableSchema
from ringsync.sources.sstable_files import Opener
from ringsync.steps.application import StepError

_TAG = re.compile(r"ringsync_(\d{8}T\d{6}Z-[0-9a-f]{8})_.+")
_OWN_ID = re.compile(r"^ID\s*: *(\S+)", re.MULTILINE)
"""How ``nodetool info`` names the node that it has reached (C: tools/nodetool/Info)."""

_TABLE_FOLDER = re.compile(r"(\w+)-([0-9a-f]{32})")
_MANIFEST, _SCHEMA = "manifest.json", "schema.cql"


class NodeSnapshotError(StepError):
    """A node has no snapshot, or cannot be reached; the message names it."""


class IncompleteSnapshotError(NodeSnapshotError):
    """A snapshot lacks files, or has some that cannot be read: nothing may be left out silently."""


@dataclass(frozen=True)
class Node:
    """A node whose snapshots this process can take, and whose files it can read.

    :ivar nodetool: command that reaches its management interface
    :ivar directories: its data directories, each once, without symbolic links
    """

    host: Host
    nodetool: tuple[str, ...]
    timeout_s: float
    directories: tuple[Path, ...]

    def call(self, *arguments: str) -> str:
        """Run nodetool.

        :raises NodeSnapshotError: it cannot be run, takes too long, or fails
        """
        command = [*self.nodetool, *arguments]
        shown = f"{self.nodetool[0]} {' '.join(arguments)}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except OSError as error:
            raise NodeSnapshotError(
                f"node {self.host.endpoint}: {self.nodetool[0]} cannot be run ({error.strerror}): set sstable.nodetool "
                "to the path of the node's nodetool, also in sstable.nodes"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise NodeSnapshotError(
                f"node {self.host.endpoint}: {shown} did not end in {self.timeout_s:g} s (sstable.nodetool_timeout_s)"
            ) from error
        if done.returncode != 0:
            said = " | ".join((done.stderr + done.stdout).strip().splitlines()[-3:])
            raise NodeSnapshotError(
                f"node {self.host.endpoint}: {shown} failed with {done.returncode}: {said}. It must reach this very "
                "node (sstable.nodetool, sstable.nodes)"
            )
        return done.stdout


@dataclass(frozen=True)
class SnapshotOnDisk:
    """A snapshot that ringsync has taken of a table on a node, for a bootstrap.

    :ivar taken_s: when its folder was changed last, s since the epoch
    """

    keyspace: str
    table: str
    bootstrap: str
    taken_s: float


def tag_of(bootstrap: str, host: str) -> str:
    """Return the name of a bootstrap's snapshots on a node. Its id is in it, since data directories of several hosts
    have the same path: files of another node are never taken for its own, or cleared as such.

    :param host: host id
    """
    return f"ringsync_{bootstrap}_{host}"


def node_of(config: Config, session: Any, host: Host) -> Node:
    """Find out how a node is reached, and where its data are.

    :raises NodeSnapshotError: it does not say where, and the configuration does not either; or a folder is not here
    """
    settings = config.sstable
    named: Sequence[str] = settings.data_directories_of(host.address, host.id)
    if not named:
        said = read_settings(session, host.id, ["data_file_directories"]).get("data_file_directories", "")
        named = [one.strip() for one in said.strip("[]").split(",") if one.strip()]
    if not named:
        raise NodeSnapshotError(
            f"node {host.endpoint} does not say where its data are, maybe because it is down; "
            "sstable.data_directories can say it"
        )
    for folder in map(Path, named):
        if not folder.is_dir():
            raise NodeSnapshotError(
                f"node {host.endpoint}: its data directory {folder} is not on this machine: run this on the node's "
                "host (sync.queue_of_node), or set sstable.data_directories to where it is mounted"
            )
    # Two names of one folder are one: its SSTables would else be there twice.
    directories = dict.fromkeys(Path(folder).resolve() for folder in named)
    return Node(host, settings.nodetool_of(host.address, host.id), settings.nodetool_timeout_s, tuple(directories))


def take_snapshot(
    node: Node, table: TableSchema, bootstrap: str, free_space_factor: float, *, anew: bool = False
) -> list[StoredSSTable]:
    """Take a node's snapshot of a table, unless there is one that is complete, and find its files.

    :param free_space_factor: a snapshot is taken only if this multiple of the table's size is free
    :param anew: whether one that is there is cleared first: it may be damaged
    :returns: its SSTables, complete, with those files that reading rows needs; local files
    :raises NodeSnapshotError: it cannot be taken, or there is too little space
    :raises IncompleteSnapshotError: the one that was just taken lacks files, or has some that cannot be read
    """
    tag = tag_of(bootstrap, node.host.id)
    if _folders(node, table, tag):
        try:
            if not anew:
                return _sstables(node, table, tag)
            clear_snapshot(node, table.keyspace, tag)
        except IncompleteSnapshotError as error:  # its nodetool, or the node, was cut off; or somebody removed files
            print(f"ringsync: warning: {error}. It is taken again", flush=True)
            clear_snapshot(node, table.keyspace, tag)
    _check_space(node, table, free_space_factor)
    _check_reached(node)
    node.call("snapshot", "-t", tag, "-kt", f"{table.keyspace}.{table.name}")
    if not _folders(node, table, tag):
        clear_snapshot(
            node, table.keyspace, tag
        )  # in directories that are not named nobody would find it as an old one
        raise NodeSnapshotError(
            f"node {node.host.endpoint}: nodetool has taken snapshot {tag}, but it is not in "
            f"{', '.join(map(str, node.directories))}: nodetool must reach this very node (sstable.nodetool, "
            "sstable.nodes), and all of its data directories must be named"
        )
    return _sstables(node, table, tag)


def clear_snapshot(node: Node, keyspace: str, tag: str) -> None:
    """Remove a snapshot from a node, if it is there.

    :raises NodeSnapshotError: nodetool fails
    """
    node.call("clearsnapshot", "-t", tag, "--", keyspace)


def snapshots_on_disk(node: Node) -> Iterator[SnapshotOnDisk]:
    """Find the snapshots that ringsync has taken of a node, whole or not. A symbolic link is none.

    :raises OSError: a folder cannot be read
    """
    found = dict[tuple[str, str, str, str], float]()
    for directory in node.directories:
        for folder in directory.glob(f"*/*/snapshots/{tag_of('*', node.host.id)}"):
            tag, of_table = _TAG.fullmatch(folder.name), _TABLE_FOLDER.fullmatch(folder.parts[-3])
            if tag and of_table and folder.resolve() == folder:
                key = (folder.parts[-4], of_table[1], of_table[2], tag[1])
                found[key] = max(folder.stat().st_mtime, found.get(key, 0.0))
    for (keyspace, table, _, bootstrap), taken_s in sorted(found.items()):
        yield SnapshotOnDisk(keyspace, table, bootstrap, taken_s)


def read_outlines(
    node: Node,
    table: TableSchema,
    sstables: Sequence[StoredSSTable],
    held: TokenSet,
    pace: Callable[[int], None],
) -> list[Partitions]:
    """Read the indexes of a snapshot's SSTables, and check that each is one of the table: nobody else reads them.

    :param held: tokens that the node holds
    :param pace: is told how many bytes were read, and waits if they were many; it may raise
    :returns: where some partitions of each are
    :raises NodeSnapshotError: an SSTable is damaged, or not of this table
    """
    opener = Opener(table)

    def outline(sstable: StoredSSTable) -> Partitions:
        source = _Paced(sstable.descriptor, pace)
        try:
            opener.open(source)
            return read_partitions(source, read_chunks(source).length, held)
        except SSTableError as error:
            raise NodeSnapshotError(
                f"node {node.host.endpoint}: {error}. Run nodetool scrub {table.keyspace} {table.name} there, then run "
                "the bootstrap again: it takes this node's snapshot again"
            ) from error

    return [outline(sstable) for sstable in sstables]


@dataclass(frozen=True)
class _Paced(LocalSource):
    """The files of an SSTable, which are read no faster than allowed."""

    pace: Callable[[int], None]

    def read_range(self, component: str, start: int, length: int) -> bytes:
        content = super().read_range(component, start, length)
        self.pace(len(content))
        return content


def _table_folders(node: Node, table: TableSchema) -> list[Path]:
    name = f"{table.name}-{table.table_id.replace('-', '')}"
    return [directory / table.keyspace / name for directory in node.directories]


def _folders(node: Node, table: TableSchema, tag: str) -> list[Path]:
    """Return the folders of a snapshot: one in each data directory that has some of it.

    :raises NodeSnapshotError: one is elsewhere, by a symbolic link: whose files these are nobody knows
    """
    folders = [folder / "snapshots" / tag for folder in _table_folders(node, table)]
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        if folder.resolve() != folder:
            raise NodeSnapshotError(
                f"node {node.host.endpoint}: {folder} is {folder.resolve()}, by a symbolic link inside the data "
                "directory: only the data directory itself may be one (sstable.data_directories)"
            )
    return folders


def _check_reached(node: Node) -> None:
    """:raises NodeSnapshotError: nodetool reaches another node, whose files would be taken for this one's"""
    shown = f"node {node.host.endpoint}: {node.nodetool[0]} info"
    own = _OWN_ID.search(node.call("info"))
    if own is None:
        raise NodeSnapshotError(f"{shown} prints no ID: set sstable.nodetool to a command that reaches this very node")
    if own[1] != node.host.id:
        raise NodeSnapshotError(
            f"{shown} reaches node {own[1]}, not {node.host.id}: run this on the node's host (sync.queue_of_node), or "
            "set sstable.nodes, by its address, to a nodetool that reaches it and to its data directories"
        )


def _check_space(node: Node, table: TableSchema, factor: float) -> None:
    """:raises NodeSnapshotError: compactions may need more space than there is, while a snapshot keeps the old files"""
    for folder in _table_folders(node, table):
        if not folder.is_dir():
            continue
        size = 0
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # a compaction has removed it just now
                size += file.stat().st_size if file.is_file() else 0
        free = shutil.disk_usage(folder).free
        if free < factor * size:
            raise NodeSnapshotError(
                f"node {node.host.endpoint}: {folder} has {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free. "
                "A snapshot would keep files that compactions replace: make room, or set sstable.free_space_factor"
            )


def _sstables(node: Node, table: TableSchema, tag: str) -> list[StoredSSTable]:
    """Find the SSTables of a snapshot, and check that these are all that the node's manifest lists.

    :raises IncompleteSnapshotError: they are not
    """
    folders, found, listed = _folders(node, table, tag), dict[Descriptor, Mapping[str, int]](), set[str]()
    where = f"node {node.host.endpoint}, snapshot {tag} of {table.full_name}"
    for name in (_MANIFEST, _SCHEMA):
        if not any((folder / name).exists() for folder in folders):
            raise IncompleteSnapshotError(
                f"{where} is not complete: it has no {name}, which the node writes at the end: are all data "
                "directories named?"
            )
    for folder in folders:
        for file in folder.iterdir():
            if file.is_symlink():
                raise IncompleteSnapshotError(f"{where}: {file} is a symbolic link, which a node never makes there")
        paths = [file.as_posix() for file in sorted(folder.iterdir()) if file.is_file()]
        try:
            inside = find_sstables(paths)
        except SSTableError as error:
            raise IncompleteSnapshotError(f"{where}: {error}") from error
        if inside.left_out:
            reasons = "; ".join(f"{one.path} {one.reason}" for one in inside.left_out[:3])
            raise IncompleteSnapshotError(f"{where} is not complete: {reasons}")
        for descriptor, components in inside.sstables.items():
            needed = [name for name in ROWS_NEED if name in components]
            found[descriptor] = {name: Path(descriptor.path(name)).stat().st_size for name in needed}
        listed |= _listed(folder / _MANIFEST, where)
    names = {f"{descriptor.name}-{DATA}" for descriptor in found}
    if names != listed:
        missing, more = sorted(listed - names), sorted(names - listed)
        raise IncompleteSnapshotError(
            f"{where} is not complete: its manifest.json lists {', '.join(missing) or 'no more files'}, which are not "
            f"there; there are {', '.join(more) or 'no others'}: are all data directories named?"
        )
    return [StoredSSTable(descriptor, files) for descriptor, files in found.items()]


def _listed(manifest: Path, where: str) -> set[str]:
    """Return the names of the Data.db that a manifest lists; none, if there is no manifest.

    :raises IncompleteSnapshotError: it was not written to its end
    """
    if not manifest.exists():
        return set()
    try:
        names = [str(name).lstrip("/") for name in json.loads(manifest.read_bytes()).get("files", ())]
    except (ValueError, AttributeError, TypeError) as error:
        raise IncompleteSnapshotError(f"{where}: {manifest} cannot be read ({error})") from error
    return {name for name in names if "/" not in name}  # those of secondary indexes have a folder
