"""The SSTables of a node's snapshot, where they are or as copies in the object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.source import LocalSource, Source
from ringsync.ledger.snapshots import NodeSnapshot, piece_key
from ringsync.sources.sstable_files import StoredSource
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class CopiedSource(StoredSource):
    """The files of an SSTable that was copied in pieces.

    :ivar sizes: bytes of each file, by component
    :ivar piece_bytes: bytes of a piece; the last one of a file has fewer
    """

    sizes: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    piece_bytes: int = field(default=1, repr=False, compare=False)

    def read(self, component: str) -> bytes | None:
        size = self.size(component)
        return None if size is None else self.read_range(component, 0, size)

    def size(self, component: str) -> int | None:
        return self.sizes.get(component)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        end = min(start + length, self.sizes[component])
        parts, path = [], self.descriptor.path(component)
        while start < end:
            inside = start % self.piece_bytes
            size = min(end - start, self.piece_bytes - inside)
            parts.append(self.store.get_range(piece_key(path, start - inside), inside, size))
            start += size
        return b"".join(parts)


@dataclass(frozen=True)
class SnapshotFiles:
    """What tasks need to know of the files of snapshots that they read.

    :ivar sizes: bytes of the files of each copied SSTable, by component; local ones are not among them
    """

    sizes: Mapping[Descriptor, Mapping[str, int]]
    piece_bytes: int

    def source(self, store: ObjectStore, url: str, descriptor: Descriptor) -> Source:
        """Return the files of an SSTable.

        :param url: URL of the store; empty: a local path
        """
        if not url:
            return LocalSource(descriptor)
        return CopiedSource(descriptor, store, self.sizes[descriptor], self.piece_bytes)


def sources_of(snapshot: NodeSnapshot, store: ObjectStore) -> list[Source]:
    """Return the SSTables of a node's snapshot."""
    files = files_of([snapshot])
    return [files.source(store, snapshot.url, sstable.descriptor) for sstable in snapshot.sstables]


def files_of(snapshots: list[NodeSnapshot]) -> SnapshotFiles:
    """Return what tasks need to know of snapshots, all of the same piece size."""
    sizes = {one.descriptor: one.files for snapshot in snapshots if snapshot.url for one in snapshot.sstables}
    return SnapshotFiles(sizes, snapshots[0].piece_bytes if snapshots else 1)
