"""Snapshots of the nodes' SSTables, from which a bootstrap of mode ``sstable`` reads a table.

========================================================  ==========================================================
key
========================================================  ==========================================================
``snapshots/<bootstrap>/bootstrap.json``                  the table, and the ring of which the snapshots are
``snapshots/<bootstrap>/<host id>.json``                  manifest: the files of a node's snapshot. It is put last: all
                                                          of them are there
``snapshots/<bootstrap>/<host id>.failed.json``           why a node has none yet
``snapshots/<bootstrap>/<host id>/…/<file>/<position>``   a piece of a file that was copied
========================================================  ==========================================================

A file may be larger than what an object store's put takes at once, and a copy that was cut off goes on where it
stopped. So it is copied in pieces, each put if absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ringsync.formats.sstable.names import Descriptor
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.storage.port import AlreadyExistsError, ObjectStore, get_json

FOLDER = "snapshots/"

_BOOTSTRAP = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")

PIECE_BYTES = 64 * 2**20
"""Bytes of a piece; the last one of a file has fewer."""


@dataclass(frozen=True)
class SnapshotsOf:
    """Whose snapshots a bootstrap has.

    :ivar bootstrap: its id
    :ivar ring: the ring after the bootstrap's begin: its replicas have what was written before
    """

    bootstrap: str
    keyspace: str
    table: str
    ring: RingSnapshot


@dataclass(frozen=True)
class StoredSSTable:
    """An SSTable of a snapshot.

    :ivar files: bytes of each of its files, by component
    :ivar piece_bytes: bytes of a piece of a copy, the last one of a file has fewer; 0: these are local files
    """

    descriptor: Descriptor
    files: Mapping[str, int] = field(hash=False)
    piece_bytes: int = 0


@dataclass(frozen=True)
class NodeSnapshot:
    """The manifest of a node's snapshot.

    :ivar host: host id
    :ivar url: URL of the store that has the copies, their folders are prefixes of keys; empty: they are local files
    :ivar taken_ms: ms since the epoch
    """

    host: str
    url: str
    taken_ms: int
    sstables: tuple[StoredSSTable, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for sstable in self.sstables for size in sstable.files.values())


def keep_snapshots_of(store: ObjectStore, found: SnapshotsOf) -> SnapshotsOf:
    """Put whose snapshots a bootstrap has, or read what another task has put before: all agree on the ring."""
    document = {"keyspace": found.keyspace, "table": found.table, "ring": _describe(found.ring)}
    with suppress(AlreadyExistsError):
        store.put(f"{FOLDER}{found.bootstrap}/bootstrap.json", json.dumps(document).encode(), if_absent=True)
    there = get_snapshots_of(store, found.bootstrap)
    assert there is not None, "it was just put"
    return there


def get_snapshots_of(store: ObjectStore, bootstrap: str) -> SnapshotsOf | None:
    """Read whose snapshots a bootstrap has; None: it has none."""
    document = get_json(store, f"{FOLDER}{bootstrap}/bootstrap.json")
    if document is None:
        return None
    return SnapshotsOf(bootstrap, document["keyspace"], document["table"], _ring(document["ring"]))


def put_manifest(store: ObjectStore, bootstrap: str, snapshot: NodeSnapshot) -> None:
    """Put the manifest of a node's snapshot: all of its files are there. Putting it again is safe."""
    with suppress(AlreadyExistsError):
        store.put(_manifest_key(bootstrap, snapshot.host), json.dumps(asdict(snapshot)).encode(), if_absent=True)
    store.delete(_failure_key(bootstrap, snapshot.host))


def get_manifest(store: ObjectStore, bootstrap: str, host: str) -> NodeSnapshot | None:
    """Read the manifest of a node's snapshot; None: it has none."""
    document = get_json(store, _manifest_key(bootstrap, host))
    if document is None:
        return None
    sstables = [
        StoredSSTable(**{**one, "descriptor": Descriptor(**one["descriptor"])}) for one in document.pop("sstables")
    ]
    return NodeSnapshot(**document, sstables=tuple(sstables))


def put_failure(store: ObjectStore, bootstrap: str, host: str, reason: str) -> None:
    """Note why a node has no snapshot yet."""
    store.say(_failure_key(bootstrap, host), json.dumps({"reason": reason}).encode())


def get_failure(store: ObjectStore, bootstrap: str, host: str) -> str | None:
    """Return why a node has no snapshot; None: nobody has tried, or it has one."""
    found = get_json(store, _failure_key(bootstrap, host))
    return None if found is None else str(found["reason"])


def copy_folder(bootstrap: str, host: str, descriptor: Descriptor) -> str:
    """Return the prefix of the keys of a copied SSTable's files."""
    return f"{FOLDER}{bootstrap}/{host}/{descriptor.keyspace}/{descriptor.table}-{descriptor.table_id}"


def copied(bootstrap: str, host: str, sstable: StoredSSTable, piece_bytes: int) -> StoredSSTable:
    """Return an SSTable as its copy is named."""
    descriptor = replace(sstable.descriptor, folder=copy_folder(bootstrap, host, sstable.descriptor))
    return StoredSSTable(descriptor, sstable.files, piece_bytes)


def pieces(size: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of each piece of a file, bytes; an empty file has one."""
    for position in range(0, max(size, 1), piece_bytes):
        yield position, min(piece_bytes, size - position)


def piece_key(path: str, position: int) -> str:
    """Return the key of a piece.

    :param path: key of the file's copy
    """
    return f"{path}/{position:015d}"


def bootstraps_with_snapshots(store: ObjectStore) -> list[str]:
    """List the ids of bootstraps of which the store has anything."""
    names = {stat.key.removeprefix(FOLDER).partition("/")[0] for stat in store.list(FOLDER)}
    return sorted(name for name in names if _BOOTSTRAP.fullmatch(name))


def remove_snapshots(store: ObjectStore, bootstrap: str, *, wholly: bool) -> int:
    """Remove the copies and manifests of a bootstrap's snapshots. What a kill leaves is removed by the next call.

    :param wholly: also what tells that they were ours; False: nodes may still have the snapshots themselves
    :returns: bytes
    """
    about = f"{FOLDER}{bootstrap}/bootstrap.json"
    size = 0
    for stat in store.list(f"{FOLDER}{bootstrap}/"):
        if stat.key != about:
            store.delete(stat.key)
            size += stat.size
    if wholly:
        store.delete(about)
    return size


def _manifest_key(bootstrap: str, host: str) -> str:
    return f"{FOLDER}{bootstrap}/{host}.json"


def _failure_key(bootstrap: str, host: str) -> str:
    return f"{FOLDER}{bootstrap}/{host}.failed.json"


def _describe(ring: RingSnapshot) -> dict[str, Any]:
    return {"hosts": [asdict(host) for host in ring.hosts], "replication": asdict(ring.replication)}


def _ring(document: Any) -> RingSnapshot:
    hosts = tuple(Host(**{**host, "tokens": tuple(host["tokens"])}) for host in document["hosts"])
    factors = tuple(map(tuple, document["replication"]["factors"]))
    return RingSnapshot(hosts, Replication(document["replication"]["strategy"], factors))
