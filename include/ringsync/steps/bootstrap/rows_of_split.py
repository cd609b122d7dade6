"""Where the rows of a split come from: SELECTs by token ranges, or the SSTables of snapshots.

All else of a task is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Protocol

from ringsync.changes.reconcile.streams import MergedPart
from ringsync.cluster.limits import Permits
from ringsync.config import Config
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import DATA, Descriptor
from ringsync.formats.sstable.sstables import SSTable
from ringsync.images.from_streams import images_of_part
from ringsync.images.times import UnrepresentableValueError
from ringsync.ledger.snapshots import StoredSSTable, void_snapshot
from ringsync.ring.tokens import TokenRange
from ringsync.schema.table import TableSchema
from ringsync.sources.scan.images import ImagePages, read_images
from ringsync.sources.scan.plan import ScanPlan, split_from_json
from ringsync.sources.scan.scan import Unread
from ringsync.sources.scan.shown import Shown
from ringsync.sources.sstable_files import Opener, SSTableSplit, merged_split
from ringsync.steps.bootstrap.snapshot_files import source_of
from ringsync.storage.port import ObjectStore

SPLITS_IN_ONE = 4
"""A task gives the rest of its split back once it has read this multiple of a split's wanted size."""

_NAMED = 5
"""Files that an error names at most."""

RowsOfRange = tuple[TokenRange, Iterator[ImagePages | Unread]]
"""A range, and its rows in token order."""


class RowsOfSplit(Protocol):
    """What one task reads."""

    def read(self, config: Config, plan: ScanPlan, store: ObjectStore, permits: Permits) -> Iterator[RowsOfRange]:
        """Read the rows, in the order of ranges."""

    def most_bytes(self, config: Config) -> float:
        """Return the bytes after which the task gives the rest back."""

    @property
    def count(self) -> int:
        """Number of ranges, or of parts of SSTables, that are read."""


@dataclass(frozen=True)
class SelectedRows:
    """The rows that SELECTs show.

    :ivar split: :func:`ringsync.sources.scan.plan.split_to_json`
    """

    split: Mapping[str, Any]

    def read(self, config: Config, plan: ScanPlan, store: ObjectStore, permits: Permits) -> Iterator[RowsOfRange]:
        """Read the rows; the errors are those of :func:`ringsync.sources.scan.images.read_images`."""
        for part, pages in read_images(config, plan, split_from_json(self.split), permits):
            yield part.range, pages

    def most_bytes(self, config: Config) -> float:
        """Return a multiple of a split's wanted size, which is only an estimate."""
        return SPLITS_IN_ONE * config.scan.split_size_mb * 2**20

    @property
    def count(self) -> int:
        """Number of ranges."""
        return len(self.split["ranges"])


@dataclass(frozen=True)
class SnapshotRows:
    """The rows of SSTables of snapshots, merged. Each SSTable is opened once.

    :ivar bootstrap: id of the bootstrap
    :ivar splits: parts of SSTables by token ranges, in token order; without parts: the SSTables have nothing there
    :ivar sstables: the SSTables, each with the id of its host
    :ivar table: the whole table
    """

    bootstrap: str
    splits: tuple[SSTableSplit, ...]
    sstables: tuple[tuple[str, StoredSSTable], ...]
    table: TableSchema

    def read(self, config: Config, plan: ScanPlan, store: ObjectStore, permits: Permits) -> Iterator[RowsOfRange]:
        """Read the rows. Where any SSTable cannot be read, or merged with others, the rest of the range is unread; if
        it is damaged, its node has no snapshot from now on.

        Files that are read in place are the nodes': the limits of reading from the cluster hold for them, too.

        :raises UnrepresentableValueError: an Arrow type cannot hold a value, and the plan refuses such values
        :raises StorageError: the object store cannot be used
        """
        opener = Opener(self.table)
        known = {sstable.descriptor: sstable for _, sstable in self.sstables}

        @cache
        def opened(_: str, descriptor: Descriptor) -> SSTable:
            return opener.open(source_of(store, known[descriptor]))

        for split in self.splits:
            yield split.tokens, self._rows(config, plan, store, split, opened, permits)

    def most_bytes(self, config: Config) -> float:
        """Return infinity: the indexes have told the sizes."""
        return inf

    @property
    def count(self) -> int:
        """Number of parts of SSTables, and of their ranges."""
        return sum(1 + len(part.only) for split in self.splits for _, _, part in split.parts)

    def _rows(
        self,
        config: Config,
        plan: ScanPlan,
        store: ObjectStore,
        split: SSTableSplit,
        opened: Callable[[str, Descriptor], SSTable],
        permits: Permits,
    ) -> Iterator[ImagePages | Unread]:
        shown = Shown(plan.table, plan.now)
        in_place = any(not url for url, _, _ in split.parts)

        def merged(some: SSTableSplit) -> Iterator[MergedPart]:
            memory_bytes = config.sstable.memory_mb * 2**20
            parts = merged_split(some, opened, self.table, _refuse, memory_bytes=memory_bytes, with_source=False)
            return parts if not in_place else _permitted(parts, permits)

        try:
            for part in merged(split):
                images = images_of_part(part, plan.table, plan.unrepresentable_values)
                yield ImagePages(images, 1, images.nbytes, shown.of(images))
        except UnrepresentableValueError:
            raise
        except (LostRowsError, SSTableError, OSError) as error:
            if not isinstance(error, OSError):
                self._void(store, error.file, str(error))
                for one in split.parts:
                    self._void_if_damaged(store, merged(replace(split, parts=(one,))))
            yield Unread(split.tokens, f"{plan.table.full_name}, {split.tokens}: {error}")
            return
        except (ValueError, LookupError) as error:  # a damage that no check of the files has found
            yield Unread(split.tokens, f"{plan.table.full_name}, {split.tokens}: {_cannot_be_merged(split, error)}")
            return
        rest = shown.end()
        if rest.num_rows:
            yield ImagePages(rest.slice(0, 0), 0, 0, rest)

    def _void_if_damaged(self, store: ObjectStore, parts: Iterator[MergedPart]) -> None:
        """Read a part of one SSTable for its damages: if each were found in a run of its own, each would cost one."""
        try:
            for _ in parts:
                pass
        except (LostRowsError, SSTableError) as error:
            self._void(store, error.file, str(error))
        except (ValueError, LookupError, OSError) as error:
            print(f"ringsync: warning: an SSTable cannot be checked ({type(error).__name__}: {error})", flush=True)

    def _void(self, store: ObjectStore, file: str, reason: str) -> None:
        """Note that the snapshot to which a file belongs is damaged. The others are read without it, if they suffice.

        :raises StorageError: the object store cannot be used
        """
        for host, sstable in self.sstables:
            if file.startswith(sstable.descriptor.path("")):
                reason = f"the snapshot of node {host} is damaged: {reason}"
                void_snapshot(store, self.bootstrap, host, sstable, reason)


def _permitted(parts: Iterator[MergedPart], permits: Permits) -> Iterator[MergedPart]:
    """Read no faster than the limits allow: a part that was large makes the next one wait."""
    while True:
        permits.ask(1)
        rows = size = 0
        try:
            part = next(parts, None)
            if part is not None:
                rows, size = len(part.rows), part.nbytes
        finally:
            permits.answered(rows, size)
        if part is None:
            return
        yield part


def _cannot_be_merged(split: SSTableSplit, error: Exception) -> str:
    files = dict.fromkeys(descriptor.path(DATA) for _, descriptor, _ in split.parts)
    named = ", ".join([*list(files)[:_NAMED], *([f"and {len(files) - _NAMED} more"] if len(files) > _NAMED else [])])
    return (
        f"rows of {named} cannot be merged ({type(error).__name__}: {error}): is one of these files damaged? Scrub "
        "them on their nodes, and begin again with restart"
    )


class LostRowsError(Exception):
    """A part of an SSTable cannot be read; the message says where and why.

    :ivar file: path of its Data.db
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__(
            f"{loss.file}, {loss.length:,} bytes at {loss.position:,} (uncompressed) cannot be read: {loss.reason}. "
            "Nothing is left out: other replicas are read instead, if there are enough. Else scrub the SSTable on its "
            "node, and run the bootstrap again: it takes this node's snapshot again"
        )
        self.file = loss.file


def _refuse(loss: Loss) -> None:
    raise LostRowsError(loss)
