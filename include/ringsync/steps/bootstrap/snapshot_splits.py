"""The SSTables of a bootstrap's snapshots, cut into splits for tasks.

Of each node only the tokens count that it holds by the ring: a node keeps rows of tokens that it has given away until
somebody cleans it up, and these may have been deleted elsewhere since.

The ring is divided by bytes, and not where its replicas change: with vnodes they change many thousand times, and a task
that reads many such ranges opens each SSTable once. What could not be read is cut where they change, so that a damaged
file costs only ranges for which it is read.

The driver reads the indexes of SSTables anew for each wave of tasks, and keeps nothing of them: a run may have hundreds
of tables, on hundreds of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ringsync.formats.sstable.errors import SSTableError
from ringsync.ledger.snapshots import NodeSnapshot
from ringsync.ring.consistency import cut_at_replicas, held_by
from ringsync.ring.ring import RingSnapshot
from ringsync.ring.tokens import TokenRange, TokenSet, intersection, subtract
from ringsync.schema.table import TableSchema
from ringsync.sources.sstable_files import Opener, OutlinedSSTable, Task, outlined, split_groups
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.bootstrap.rows_of_split import SnapshotRows
from ringsync.steps.bootstrap.snapshot import snapshots_of, snapshots_to_read
from ringsync.steps.bootstrap.snapshot_files import source_of
from ringsync.storage.port import ObjectStore

OPENED_AT_ONCE = 8


def check_ring(store: ObjectStore, plan: BootstrapPlan, now: RingSnapshot) -> None:
    """Check that the nodes hold the tokens that they held when their snapshots were taken.

    :param now: the present ring
    :raises StepError: they do not: a node may have cleaned up what it has given away before its snapshot was taken; or
        there are no snapshots
    """
    if now.digest != snapshots_of(store, plan).ring.digest:
        raise StepError(
            f"nodes have joined or left since the snapshots of {plan.scan.table.full_name} were begun, so they may "
            "lack rows: begin again with restart, once the ring has settled"
        )


def cut_snapshots(
    store: ObjectStore,
    plan: BootstrapPlan,
    table: TableSchema,
    left: TokenSet,
    failed: Iterable[TokenRange],
    least: int,
    most: int,
) -> tuple[list[SnapshotRows], float]:
    """Cut what is left of a table into the work of tasks, by the snapshots of its bootstrap.

    :param table: the whole table
    :param failed: ranges that could not be read: they get tasks of their own
    :param least: least number of tasks, if there are so many partitions; ``most``: greatest number, but for what failed
    :returns: what tasks read, and its bytes, uncompressed
    :raises StepError: too few nodes have a snapshot; or a file that describes an SSTable, or its index, is missing or
        damaged
    """
    about, snapshots = snapshots_to_read(store, plan)
    apart = intersection(left, failed)
    try:
        read = _Snapshots(store, about.ring, snapshots, table)
        tasks = read.cut(subtract(left, apart), least, most)
        again = [split for task in read.cut_at_replicas(apart) for split in task]
    except (SSTableError, OSError) as error:
        raise StepError(
            f"a snapshot of {table.full_name} cannot be read: {error}. Scrub the SSTable on its node, and begin again "
            "with restart"
        ) from error
    tasks += [(split,) for split in again if split.parts]
    if empty := tuple(split for split in again if not split.parts):
        tasks.append(empty)
    stored = {sstable.descriptor: sstable for one in snapshots for sstable in one.sstables}
    rows = [
        SnapshotRows(task, tuple(stored[name] for name in {name for one in task for _, name, _ in one.parts}), table)
        for task in tasks
    ]
    return rows, sum(part.end - part.first for task in tasks for split in task for _, _, part in split.parts)


class _Snapshots:
    """Snapshots of nodes, with outlines of their SSTables.

    :raises SSTableError: a file that describes an SSTable is missing or damaged
    :raises OSError: it cannot be read
    """

    def __init__(
        self, store: ObjectStore, ring: RingSnapshot, snapshots: Sequence[NodeSnapshot], table: TableSchema
    ) -> None:
        self._ring = ring
        opener = Opener(table)
        sources = [(one.host, source_of(store, sstable)) for one in snapshots for sstable in one.sstables]
        with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
            opened = list(pool.map(lambda one: opener.open(one[1]), sources))
        self._of_node: dict[str, list[OutlinedSSTable]] = {one.host: [] for one in snapshots}
        for (host, _), one in zip(sources, outlined(opened), strict=True):
            self._of_node[host].append(one)

    def cut(self, ranges: Sequence[TokenRange], least: int, most: int | None) -> list[Task]:
        """Cut ranges by bytes; see :func:`~ringsync.sources.sstable_files.split_groups`."""
        held = held_by(self._ring, ranges, self._of_node.keys())
        return split_groups([(self._of_node[node], tokens) for node, tokens in held.items()], ranges, least, most)

    def cut_at_replicas(self, ranges: TokenSet) -> list[Task]:
        """Cut ranges by bytes, and where the nodes change that hold them."""
        return self.cut(cut_at_replicas(self._ring, ranges, self._of_node.keys()), 1, None)
