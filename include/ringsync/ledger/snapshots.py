"""Snapshots of the nodes' SSTables, from which a bootstrap of mode ``sstable`` reads a table.

========================================================  ==========================================================
key
========================================================  ==========================================================
``snapshots/<bootstrap>/bootstrap.json``                  the table, the ring of which the snapshots are, and the queue
                                                          of each node
``snapshots/<bootstrap>/begun.json``                      when a snapshot of a node was begun, or used, last
``snapshots/<bootstrap>/<host id>.json``                  manifest: the files of a node's snapshot. It is put last: all
                                                          of them are there
``snapshots/<bootstrap>/<host id>.failed.json``           why a node has none yet
``snapshots/<bootstrap>/<host id>.damaged/<name>.json``   what is damaged in an SSTable: its node has none any more
``snapshots/<bootstrap>/<host id>.<ms>.arrow``            where some partitions of its SSTables are
``snapshot_files/<bootstrap>/<host id>/…/<file>/<place>`` a piece of a file that was copied
========================================================  ==========================================================

A file may be larger than what an object store's put takes at once, and a copy that was cut off goes on where it
stopped. So it is copied in pieces. They have a folder of their own, since they are many: who looks for old snapshots
lists only the other one.
"""

from __future__ import annotations

import json
import re
import time
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import pyarrow as pa

from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.partitions import Partitions, from_arrow, to_arrow
from ringsync.ledger.staging import decode_rows, encode_rows
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.storage.port import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    ObjectStore,
    Stat,
    StorageError,
    get_json,
    list_named,
)

FOLDER, COPIES = "snapshots/", "snapshot_files/"

_BOOTSTRAP = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")

PIECE_BYTES = 64 * 2**20
"""Bytes of a piece; the last one of a file has fewer."""

_DELETED_AT_ONCE, _DELETED_UNSEEN = 10, 1000
"""Requests at once, as many as a client of a bucket keeps connections; and pieces between two looks whether the copies
are needed again."""

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class SnapshotsOf:
    """Whose snapshots a bootstrap has.

    :ivar bootstrap: its id
    :ivar ring: the ring after the bootstrap's begin: its replicas have what was written before
    :ivar queues: by host id the queue whose workers take the snapshot
    """

    bootstrap: str
    keyspace: str
    table: str
    ring: RingSnapshot
    queues: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class StoredSSTable:
    """An SSTable of a snapshot.

    :ivar files: bytes of each of its files that are read, by component
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
    """Put whose snapshots a bootstrap has, or read what another task has put before: all agree on the ring.

    :raises StorageError: that cannot be read
    """
    about = {"keyspace": found.keyspace, "table": found.table, "ring": _describe(found.ring)}
    document = {**about, "queues": dict(found.queues)}
    with suppress(AlreadyExistsError):
        store.put(_about_key(found.bootstrap), json.dumps(document).encode(), if_absent=True)
    there = get_snapshots_of(store, found.bootstrap)
    assert there is not None, "it was just put"
    return there


def get_snapshots_of(store: ObjectStore, bootstrap: str) -> SnapshotsOf | None:
    """Read whose snapshots a bootstrap has; None: it has none.

    :raises StorageError: that cannot be read
    """

    def read(document: Any) -> SnapshotsOf:
        keyspace, table = document["keyspace"], document["table"]
        if not (isinstance(keyspace, str) and isinstance(table, str)):
            raise ValueError("keyspace and table are no texts")
        queues = {str(host): str(queue) for host, queue in document["queues"].items()}
        return SnapshotsOf(bootstrap, keyspace, table, _ring(document["ring"]), queues)

    return _read(
        *(store, _about_key(bootstrap), read),
        f"begin that bootstrap again with restart if it is not finished, and remove the folder {FOLDER}{bootstrap}",
    )


def say_begun(store: ObjectStore, bootstrap: str, now_ms: int) -> None:
    """Record, before a node's snapshot is taken, copied, used again or read, that it is begun: nobody removes it as an
    old one then.

    :param now_ms: ms since the epoch
    """
    store.put(_begun_key(bootstrap), json.dumps({"begun_ms": now_ms}).encode())


def last_begun_ms(store: ObjectStore, bootstrap: str) -> int:
    """Return when a bootstrap's snapshots were begun, or used, last, ms since the epoch; if none was, when it began.

    :raises StorageError: that cannot be read, or this is no id of a bootstrap
    """
    begun: int | None = _read(
        *(store, _begun_key(bootstrap), lambda document: int(document["begun_ms"])),
        "remove it; the age of the snapshots then counts from the begin of the bootstrap",
    )
    if begun is not None:
        return begun
    try:
        return timegm(time.strptime(bootstrap.partition("-")[0], "%Y%m%dT%H%M%SZ")) * 1000
    except ValueError as error:
        raise StorageError(
            f"{bootstrap} is no bootstrap's id: {error}: remove the folder {store.uri(FOLDER + bootstrap)}, if it is "
            "there, and the nodes' snapshots of this name"
        ) from error


def put_manifest(store: ObjectStore, bootstrap: str, snapshot: NodeSnapshot) -> None:
    """Put the manifest of a node's snapshot: all of its files are there. Putting it again is safe."""
    with suppress(AlreadyExistsError):
        store.put(_manifest_key(bootstrap, snapshot.host), json.dumps(asdict(snapshot)).encode(), if_absent=True)
    store.delete(_failure_key(bootstrap, snapshot.host))
    for key in _damages(store, bootstrap, snapshot.host):
        store.delete(key)


def get_manifest(store: ObjectStore, bootstrap: str, host: str) -> NodeSnapshot | None:
    """Read the manifest of a node's snapshot; None: it has none.

    :raises StorageError: it cannot be read
    """

    def read(document: Any) -> NodeSnapshot:
        sstables = [
            StoredSSTable(**{**one, "descriptor": Descriptor(**one["descriptor"])}) for one in document.pop("sstables")
        ]
        found = NodeSnapshot(**document, sstables=tuple(sstables))
        if found.bytes < 0:  # adds up all sizes, which are numbers then
            raise ValueError("files have sizes below 0")
        return found

    return _read(
        *(store, _manifest_key(bootstrap, host), read),
        "remove it and run the bootstrap again, which takes the snapshot of this node again",
    )


def put_partitions(store: ObjectStore, bootstrap: str, snapshot: NodeSnapshot, found: Sequence[Partitions]) -> None:
    """Put where some partitions of a snapshot's SSTables are, before the manifest.

    :param found: of each SSTable, in their order
    """
    store.put(_partitions_key(bootstrap, snapshot), encode_rows(to_arrow(found)))


def get_partitions(store: ObjectStore, bootstrap: str, snapshot: NodeSnapshot) -> list[Partitions]:
    """Read what :func:`put_partitions` has put.

    :raises StorageError: it cannot be read
    """
    key = _partitions_key(bootstrap, snapshot)
    try:
        found = from_arrow(decode_rows(store.get(key)))
        if len(found) != len(snapshot.sstables):
            raise ValueError(f"{len(found)} SSTables instead of {len(snapshot.sstables)}")
        return found
    except (pa.ArrowException, ValueError, LookupError, NotFoundError, ChecksumError) as error:
        remedy = f"remove {store.uri(_manifest_key(bootstrap, snapshot.host))} and run the bootstrap again"
        raise StorageError(f"{store.uri(key)} cannot be read ({error}): {remedy}") from error


def void_snapshot(store: ObjectStore, bootstrap: str, host: str, sstable: StoredSSTable, reason: str) -> None:
    """Note that an SSTable of a node's snapshot is damaged: it has none from now on, and the next run takes it again.

    Its files stay: other tasks are still reading what is not damaged, and may note further SSTables.

    :param reason: it names the damaged file, which is copied again (:func:`remove_damaged`)
    """
    store.say(_damage_key(bootstrap, host, sstable), json.dumps({"reason": reason}).encode())
    remove_manifest(store, bootstrap, host)


def remove_damaged(store: ObjectStore, bootstrap: str, host: str, copies: Iterable[StoredSSTable]) -> None:
    """Remove the copies of the SSTables for whose damage a node has no snapshot. The rest may be used again.

    :param copies: the SSTables of the node, as :func:`copied` names them
    """
    damages = set(_damages(store, bootstrap, host))
    for sstable in copies:
        if (key := _damage_key(bootstrap, host, sstable)) in damages:
            for stat in store.list(sstable.descriptor.path("")):
                store.delete(stat.key)
            store.delete(key)


def remove_manifest(store: ObjectStore, bootstrap: str, host: str) -> None:
    """Remove the manifest of a node's snapshot: the node has none then."""
    store.delete(_manifest_key(bootstrap, host))


def missing_file(store: ObjectStore, bootstrap: str, snapshot: NodeSnapshot) -> str | None:
    """Find a file of a node's snapshot, or a piece of a copy, that is not there as a whole.

    :returns: its path or key; None: all are there
    """
    sizes = {stat.key: stat.size for stat in copies_of(store, bootstrap, snapshot.host)}
    for sstable in snapshot.sstables:
        for component, size in sstable.files.items():
            path = sstable.descriptor.path(component)
            if not sstable.piece_bytes:
                if not Path(path).is_file() or Path(path).stat().st_size != size:
                    return path
                continue
            for position, part in pieces(size, sstable.piece_bytes):
                if sizes.get(piece_key(path, position)) != part:
                    return piece_key(path, position)
    return None


def put_failure(store: ObjectStore, bootstrap: str, host: str, reason: str) -> None:
    """Note why a node has no snapshot yet."""
    store.say(_failure_key(bootstrap, host), json.dumps({"reason": reason}).encode())


def get_failure(store: ObjectStore, bootstrap: str, host: str) -> str | None:
    """Return why a node has no snapshot; None: nobody has tried, or it has one.

    :raises StorageError: that cannot be read
    """
    keys = (_failure_key(bootstrap, host), *_damages(store, bootstrap, host))
    remedy = "remove it; the next run of the bootstrap finds the reason again"
    reasons = [_read(store, key, lambda document: str(document["reason"]), remedy) for key in keys]
    return "; ".join(filter(None, reasons)) or None


def copy_folder(bootstrap: str, host: str, descriptor: Descriptor) -> str:
    """Return the prefix of the keys of a copied SSTable's files."""
    return f"{COPIES}{bootstrap}/{host}/{descriptor.keyspace}/{descriptor.table}-{descriptor.table_id}"


def copies_of(store: ObjectStore, bootstrap: str, host: str) -> list[Stat]:
    """List the pieces of a node's snapshot that were copied."""
    return store.list(f"{COPIES}{bootstrap}/{host}/")


def copied(bootstrap: str, host: str, sstable: StoredSSTable, piece_bytes: int) -> StoredSSTable:
    """Return an SSTable as its copy is named."""
    descriptor = replace(sstable.descriptor, folder=copy_folder(bootstrap, host, sstable.descriptor))
    return StoredSSTable(descriptor, sstable.files, piece_bytes)


def put_piece(store: ObjectStore, key: str, data: bytes) -> None:
    """Put a piece, unless it is there. One with other bytes is replaced: it belongs to a snapshot that was taken again.

    :raises StorageError: another process puts it just now
    """
    there = store.stat(key)
    if there is None or (there.size, there.crc32c) != (len(data), google_crc32c.value(data)):
        store.put(key, data, if_absent=there is None, if_version=None if there is None else there.version)


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


def remove_snapshots(store: ObjectStore, bootstrap: str, *, wholly: bool) -> None:
    """Remove the manifests and copies of a bootstrap's snapshots. What a kill leaves is removed by the next call.

    It ends as soon as another process has begun a snapshot of the bootstrap: that one goes on with the copies.

    :param wholly: also what tells that they were ours; False: nodes may still have the snapshots themselves
    :raises StorageError: it cannot be read when the newest snapshot was begun
    """
    begun_key, about_key = _begun_key(bootstrap), _about_key(bootstrap)
    begun_ms = last_begun_ms(store, bootstrap)
    keys = [stat.key for stat in store.list(f"{FOLDER}{bootstrap}/") if stat.key not in (begun_key, about_key)]
    keys += [stat.key for stat in store.list(f"{COPIES}{bootstrap}/")]
    with ThreadPoolExecutor(_DELETED_AT_ONCE) as pool:
        for start in range(0, len(keys), _DELETED_UNSEEN):
            if last_begun_ms(store, bootstrap) != begun_ms:
                return
            for _ in pool.map(store.delete, keys[start : start + _DELETED_UNSEEN]):
                pass
    if last_begun_ms(store, bootstrap) != begun_ms:
        return
    store.delete(begun_key)
    if wholly:
        store.delete(about_key)


def _read(store: ObjectStore, key: str, read: Callable[[Any], _Record], remedy: str) -> _Record | None:
    """Read a record; None: there is none.

    :raises StorageError: it cannot be read
    """
    try:
        document = get_json(store, key)
        return None if document is None else read(document)
    except (ValueError, LookupError, TypeError, AttributeError, ChecksumError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StorageError(f"{store.uri(key)} cannot be read ({problem}): {remedy}") from error


def _about_key(bootstrap: str) -> str:
    return f"{FOLDER}{bootstrap}/bootstrap.json"


def _begun_key(bootstrap: str) -> str:
    return f"{FOLDER}{bootstrap}/begun.json"


def _manifest_key(bootstrap: str, host: str) -> str:
    return f"{FOLDER}{bootstrap}/{host}.json"


def _partitions_key(bootstrap: str, snapshot: NodeSnapshot) -> str:
    return f"{FOLDER}{bootstrap}/{snapshot.host}.{snapshot.taken_ms}.arrow"


def _failure_key(bootstrap: str, host: str) -> str:
    return f"{FOLDER}{bootstrap}/{host}.failed.json"


def _damage_key(bootstrap: str, host: str, sstable: StoredSSTable) -> str:
    return f"{FOLDER}{bootstrap}/{host}.damaged/{sstable.descriptor.name}.json"


def _damages(store: ObjectStore, bootstrap: str, host: str) -> list[str]:
    """List the keys of what is noted of a node's damaged SSTables."""
    return [stat.key for stat in list_named(store, f"{FOLDER}{bootstrap}/{host}.damaged/", r"[^/]+\.json")]


def _describe(ring: RingSnapshot) -> dict[str, Any]:
    return {"hosts": [asdict(host) for host in ring.hosts], "replication": asdict(ring.replication)}


def _ring(document: Any) -> RingSnapshot:
    hosts = tuple(Host(**{**host, "tokens": tuple(host["tokens"])}) for host in document["hosts"])
    factors = tuple(map(tuple, document["replication"]["factors"]))
    return RingSnapshot(hosts, Replication(document["replication"]["strategy"], factors))
