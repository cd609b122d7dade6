"""The SSTables of a bootstrap's snapshots, cut into splits for tasks.

Of each node only the tokens count that it holds by the ring: a node keeps rows of tokens that it has given away until
somebody cleans it up, and these may have been deleted elsewhere since.

The index of an SSTable takes up to 24 MB. So the driver reads it anew for each wave of tasks, and keeps only a little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.sstables import open_sstable
from ringsync.ledger.snapshots import StoredSSTable
from ringsync.ring.consistency import by_replicas
from ringsync.ring.tokens import TokenRange, TokenSet, intersection, subtract
from ringsync.schema.table import TableSchema
from ringsync.sources.sstable_files import OutlinedSSTable, SSTableSplit, outlined, split_groups
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.bootstrap.rows_of_split import SnapshotRows
from ringsync.steps.bootstrap.snapshot import snapshots_to_read
from ringsync.steps.bootstrap.snapshot_files import source_of
from ringsync.storage.port import ObjectStore

OPENED_AT_ONCE = 8


class SnapshotSplits:
    """The snapshots of a bootstrap.

    :param table: the whole table
    :raises StepError: too few nodes have one, or a file that describes an SSTable is missing or damaged
    """

    def __init__(self, store: ObjectStore, plan: BootstrapPlan, table: TableSchema) -> None:
        self._about, self._snapshots = snapshots_to_read(store, plan)
        self._table = table
        self._stored = {sstable.descriptor: sstable for one in self._snapshots for sstable in one.sstables}
        sources = [(one.host, source_of(store, sstable)) for one in self._snapshots for sstable in one.sstables]
        try:
            with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
                opened = list(pool.map(lambda one: open_sstable(one[1], table), sources))
            tables = outlined(opened)
        except (SSTableError, OSError) as error:
            raise StepError(
                f"a snapshot of {table.full_name} cannot be read: {error}. Scrub the SSTable on its node, and begin "
                "again with restart"
            ) from error
        self._of_node: dict[str, list[OutlinedSSTable]] = {one.host: [] for one in self._snapshots}
        for (host, _), one in zip(sources, tables, strict=True):
            self._of_node[host].append(one)

    @property
    def ring_digest(self) -> str:
        """Digest of the ring of which the snapshots are."""
        return self._about.ring.digest

    def cut(self, left: TokenSet, failed: Iterable[TokenRange], least: int) -> tuple[list[SnapshotRows], float]:
        """Cut what is left into splits.

        :param failed: ranges that could not be read: they get splits of their own
        :param least: least number of splits, if there are so many partitions
        :returns: the splits, and their bytes, uncompressed
        :raises StepError: an index is missing or damaged
        """
        apart = intersection(left, failed)
        splits = [*self._splits(subtract(left, apart), least), *self._splits(apart, 1)]
        empty = subtract(left, [split.tokens for split in splits])
        rows = [SnapshotRows((split,), self._read_by(split), self._table) for split in splits]
        if empty:
            nothing = tuple(SSTableSplit(tokens, ()) for tokens in empty)
            rows.append(SnapshotRows(nothing, (), self._table))
        return rows, sum(part.end - part.first for split in splits for _, _, part in split.parts)

    def _splits(self, ranges: TokenSet, least: int) -> list[SSTableSplit]:
        groups = by_replicas(self._about.ring, ranges, self._of_node.keys())
        each = -(-least // max(1, sum(len(tokens) for _, tokens in groups)))
        try:
            return split_groups([(self._sstables(nodes), tokens) for nodes, tokens in groups], each)
        except SSTableError as error:
            raise StepError(f"a snapshot of {self._table.full_name} cannot be read: {error}") from error

    def _sstables(self, nodes: Sequence[str]) -> list[OutlinedSSTable]:
        return [sstable for node in nodes for sstable in self._of_node[node]]

    def _read_by(self, split: SSTableSplit) -> tuple[StoredSSTable, ...]:
        return tuple(self._stored[descriptor] for descriptor in {descriptor for _, descriptor, _ in split.parts})
