"""Names of SSTables' files, and the complete SSTables among files (docs/formats.md, 9.1).

The files of an SSTable are ``<version>-<id>-<format>-<component>``, in
``<keyspace>/<table>-<32 hex digits>/[snapshots/<tag>/|backups/][.<index>/]`` (C: io/sstable/Descriptor).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.versions import VERSIONS, Version

DATA, STATISTICS, COMPRESSION, CHECKSUMS = "Data.db", "Statistics.db", "CompressionInfo.db", "CRC.db"
INDEX, PARTITIONS, ROWS = "Index.db", "Partitions.db", "Rows.db"
REQUIRED = {"big": (DATA, STATISTICS, INDEX), "bti": (DATA, STATISTICS, PARTITIONS)}
"""What is read of each SSTable; also one of ``COMPRESSION`` and ``CHECKSUMS``, and ``ROWS`` of some. ``TOC.txt`` is not
needed: an SSTable that another node has streamed as a whole has none, and it may list indexes that were dropped
(C: CassandraEntireSSTableStreamReader, SSTableIndex.release)."""

ROWS_NEED = (DATA, STATISTICS, COMPRESSION, CHECKSUMS)
"""What of these is there is all that reading rows needs, once it is known where to begin."""

_NAME = re.compile(
    r"(?P<version>[a-z]{2})-(?P<id>\d{1,19}|[0-9a-z]{4}_[0-9a-z]{4}_[0-9a-z]{18})-(?P<format>[a-z]+)-(?P<part>[\w.+-]+)"
)
_OLD_NAME = re.compile(r"(?:tmp(?:link)?-)?(?:\w+-\w+-)?[a-l][a-z]-\d+-(?:big-)?\w+\.\w+")
_TABLE_FOLDER = re.compile(r"(?P<table>\w+)-(?P<id>[0-9a-f]{32})")
_TRANSACTION = re.compile(r"[a-z]{2}_txn_\w+_[0-9a-z_-]+\.log")
_OTHERS = ("snapshots", "backups")


@dataclass(frozen=True)
class Descriptor:
    """What the path of an SSTable says.

    :ivar version: version of the files, ``nb`` for example
    :ivar id: a number, or from Cassandra 4.1 on 28 characters that stand for a UUID
    :ivar format: ``big`` or ``bti``
    :ivar folder: path of the folder, ``/`` between its parts; empty: the current one
    :ivar keyspace: name of the keyspace; empty: the path does not say it
    :ivar table: name of the table; empty: as above
    :ivar table_id: 32 hexadecimal digits; empty: as above
    """

    version: str
    id: str
    format: str
    folder: str = ""
    keyspace: str = ""
    table: str = ""
    table_id: str = ""

    @property
    def name(self) -> str:
        """What all its files begin with, without the folder."""
        return f"{self.version}-{self.id}-{self.format}"

    @property
    def features(self) -> Version:
        """In what its files differ from those of other versions."""
        return VERSIONS[self.format, self.version]  # type: ignore[index]

    def path(self, component: str) -> str:
        """Return the path of a file."""
        name = f"{self.name}-{component}"
        return f"{self.folder}/{name}" if self.folder else name


@dataclass(frozen=True)
class LeftOut:
    """A folder or a set of files that is not read.

    :ivar path: path of the folder, or of one of the files
    :ivar reason: why, and what to do if it should be read
    :ivar is_lost: whether it may have rows that nothing else has
    """

    path: str
    reason: str
    is_lost: bool


@dataclass(frozen=True)
class FoundSSTables:
    """The SSTables among some files.

    :ivar sstables: each with the names of its components; in the order of folder and id
    :ivar left_out: what was not taken
    """

    sstables: Mapping[Descriptor, frozenset[str]]
    left_out: tuple[LeftOut, ...]


def parse_path(path: str) -> tuple[Descriptor, str] | None:
    """Read the path of a file.

    :param path: path with ``/`` between its parts, absolute or not
    :returns: the SSTable, and the component's name; None: it is no file of an SSTable
    :raises SSTableError: the file belongs to an SSTable of an unknown version
    """
    parts = PurePosixPath(path)
    match = _NAME.fullmatch(parts.name)
    if match is None:
        if _OLD_NAME.fullmatch(parts.name):
            raise _unknown(path, "is of Cassandra 2 or older")
        return None
    if (match["format"], match["version"]) not in VERSIONS:
        raise _unknown(path, f"has the unknown version {match['version']} of format {match['format']}")
    location = _text(parts.parent), *_table_of(parts.parent)
    return Descriptor(match["version"], match["id"], match["format"], *location), match["part"]


def find_sstables(paths: Iterable[str]) -> FoundSSTables:
    """Find the complete SSTables among files.

    Left out are: secondary indexes; ``snapshots`` and ``backups`` below a folder with SSTables, because they hold the
    same files again; sets that lack a file that is read; and folders in which Cassandra was just writing SSTables, or
    replacing them by others.

    :param paths: paths of all files, with ``/`` between their parts
    :raises SSTableError: a set is of an unknown version
    """
    sets: dict[Descriptor, set[str]] = {}
    left_out: dict[str, str] = {}
    changing: dict[str, str] = {}
    for path in sorted(paths):
        parts = PurePosixPath(path)
        if reason := _skipped_folder(parts.parent):
            left_out.setdefault(*reason)
        elif _TRANSACTION.fullmatch(parts.name):
            changing.setdefault(_text(parts.parent), parts.name)
        elif found := parse_path(path):
            sets.setdefault(found[0], set()).add(found[1])
    copies = _copies({one.folder for one in sets})
    outer = sorted(set(copies.values()))
    left_out = {path: reason for path, reason in left_out.items() if not _is_below(path, outer)}
    left_out |= dict.fromkeys(
        outer, "holds SSTables of the folder above it again: name this folder itself to read them"
    )
    repeated = set(left_out)
    whole: dict[Descriptor, frozenset[str]] = {}
    for one in sorted((one for one in sets if one.folder not in copies), key=_order):
        log = changing.get(one.folder)
        reason_out = f"{log} says that the node was just replacing SSTables here: read a snapshot" if log else None
        reason_out = reason_out or _incomplete(one, sets[one])
        if reason_out:
            left_out[one.path(min(sets[one]))] = reason_out
        else:
            whole[one] = frozenset(sets[one])
    return FoundSSTables(whole, tuple(LeftOut(*one, one[0] not in repeated) for one in left_out.items()))


def _unknown(path: str, problem: str) -> SSTableError:
    known = ", ".join(version.name for version in VERSIONS.values())
    advice = f"known are {known} (Cassandra 3.0 to 5.0): run nodetool upgradesstables on the node, and copy them again"
    return SSTableError(path, None, f"the SSTable {problem}", advice)


def _table_of(folder: PurePosixPath) -> tuple[str, str, str]:
    """Return keyspace, table and table id; empty where the path does not have them."""
    while folder.name.startswith(".") and folder.name not in (".", ".."):
        folder = folder.parent
    if folder.name == "backups":
        folder = folder.parent
    elif folder.parent.name == "snapshots":
        folder = folder.parent.parent
    match = _TABLE_FOLDER.fullmatch(folder.name)
    return (folder.parent.name, match["table"], match["id"]) if match else ("", "", "")


def _skipped_folder(folder: PurePosixPath) -> tuple[str, str] | None:
    """Return the hidden folder that a path lies in and why it is left out."""
    for parent in (folder, *folder.parents):
        if parent.name.startswith(".") and parent.name not in (".", "..") and _is_table(parent.parent):
            return str(parent), "holds a secondary index, whose rows are made of the table's"
    return None


def _is_table(folder: PurePosixPath) -> bool:
    return bool(_table_of(folder)[1]) or folder.name in _OTHERS or folder.parent.name == "snapshots"


def _copies(folders: set[str]) -> dict[str, str]:
    """Return the folders that lie in ``snapshots`` or ``backups`` beside SSTables; and these two, for each."""
    found = {}
    for folder in folders:
        for parent in (PurePosixPath(folder), *PurePosixPath(folder).parents):
            if parent.name in _OTHERS and _text(parent.parent) in folders:
                found[folder] = str(parent)
    return found


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _text(folder: PurePosixPath) -> str:
    return "" if str(folder) == "." else str(folder)


def _order(descriptor: Descriptor) -> tuple[str, int, str, str]:
    number = int(descriptor.id) if descriptor.id.isdecimal() else -1
    return descriptor.folder, number, descriptor.id, descriptor.name


def _incomplete(descriptor: Descriptor, there: set[str]) -> str | None:
    """Return why a set of files is no whole SSTable; None: it is."""
    missing = sorted(set(REQUIRED[descriptor.format]) - there)
    if not there & {COMPRESSION, CHECKSUMS}:
        missing.append(f"{COMPRESSION} or {CHECKSUMS}")
    return (
        f"{', '.join(missing)} is missing, though an SSTable has it: copy all files of the SSTable" if missing else None
    )
