"""The SSTables of a node's snapshot, where they are or as copies in the object store."""

from __future__ import annotations

from dataclasses import dataclass

from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.source import LocalSource, Source
from ringsync.ledger.snapshots import StoredSSTable, piece_key
from ringsync.sources.sstable_files import StoredSource
from ringsync.storage.port import NotFoundError, ObjectStore


@dataclass(frozen=True)
class CopiedSource(StoredSource):
    """The files of an SSTable that was copied in pieces.

    :ivar sstable: the SSTable, whose descriptor this is
    """

    sstable: StoredSSTable

    def read(self, component: str) -> bytes | None:
        size = self.size(component)
        return None if size is None else self.read_range(component, 0, size)

    def size(self, component: str) -> int | None:
        return self.sstable.files.get(component)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        """Read bytes of a file.

        :raises SSTableError: a piece is gone
        """
        end, piece_bytes = min(start + length, self.sstable.files[component]), self.sstable.piece_bytes
        parts, path = [], self.descriptor.path(component)
        while start < end:
            inside = start % piece_bytes
            size = min(end - start, piece_bytes - inside)
            try:
                parts.append(self.store.get_range(piece_key(path, start - inside), inside, size))
            except NotFoundError as error:
                raise SSTableError(path, start, f"its copy is gone ({error})", "run the bootstrap again") from error
            start += size
        return b"".join(parts)


def source_of(store: ObjectStore, sstable: StoredSSTable) -> Source:
    """Return the files of an SSTable of a snapshot: local ones, or the copies in the store."""
    if not sstable.piece_bytes:
        return LocalSource(sstable.descriptor)
    return CopiedSource(sstable.descriptor, store, sstable)
