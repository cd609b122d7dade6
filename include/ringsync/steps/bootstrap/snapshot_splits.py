"""The SSTables of a bootstrap's snapshots, cut into splits for tasks.

Of each node only the tokens count that it holds by the ring: a node keeps rows of tokens that it has given away until
somebody cleans it up, and these may have been deleted elsewhere since.

The ring is divided by bytes, and not where its replicas change: with vnodes they change many thousand times, and a task
that reads many such ranges opens each SSTable once.

The driver reads no file of an SSTable. It reads anew for each wave what the nodes' workers have remembered of the
indexes, and keeps nothing of that: a run may have hundreds of tables, on hundreds of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ringsync.ledger.snapshots import NodeSnapshot, get_partitions
from ringsync.ring.consistency import held_by
from ringsync.ring.ring import RingSnapshot
from ringsync.ring.tokens import TokenSet
from ringsync.schema.table import TableSchema
from ringsync.sources.sstable_files import OutlinedSSTable, Task, split_groups
from ringsync.steps.application import StepError
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.bootstrap.rows_of_split import SnapshotRows
from ringsync.steps.bootstrap.snapshot import snapshots_of, snapshots_to_read
from ringsync.storage.port import ObjectStore

READ_AT_ONCE = 8


def check_ring(store: ObjectStore, plan: BootstrapPlan, now: RingSnapshot) -> None:
    """Check that the nodes hold the tokens that they held when their snapshots were taken.

    :param now: the present ring
    :raises StepError: they do not: a node may have cleaned up what it has given away before its snapshot was taken; or
        there are no snapshots
    """
    if now.ownership != snapshots_of(store, plan).ring.ownership:
        raise StepError(
            f"nodes have joined or left since the snapshots of {plan.scan.table.full_name} were begun, so they may "
            "lack rows: begin again with restart, once the ring has settled"
        )


def cut_snapshots(
    store: ObjectStore, plan: BootstrapPlan, table: TableSchema, left: TokenSet, least: int, most: int
) -> tuple[list[SnapshotRows], float]:
    """Cut what is left of a table into the work of tasks, by the snapshots of its bootstrap.

    :param table: the whole table
    :param least: least number of tasks, if there are so many partitions; ``most``: greatest number
    :returns: what tasks read, and its bytes, uncompressed
    :raises StepError: too few nodes have a snapshot
    :raises StorageError: what is recorded of a snapshot cannot be read
    """
    about, snapshots = snapshots_to_read(store, plan)
    tasks = _cut(store, plan.bootstrap.id, about.ring, snapshots, left, least, most)
    stored = {sstable.descriptor: (one.host, sstable) for one in snapshots for sstable in one.sstables}
    rows = [
        SnapshotRows(
            plan.bootstrap.id,
            task,
            tuple(stored[name] for name in {name for split in task for _, name, _ in split.parts}),
            table,
        )
        for task in tasks
    ]
    return rows, sum(part.end - part.first for task in tasks for split in task for _, _, part in split.parts)


def _cut(
    store: ObjectStore,
    bootstrap: str,
    ring: RingSnapshot,
    snapshots: Sequence[NodeSnapshot],
    left: TokenSet,
    least: int,
    most: int,
) -> list[Task]:
    def outlined(snapshot: NodeSnapshot) -> list[OutlinedSSTable]:
        found = zip(snapshot.sstables, get_partitions(store, bootstrap, snapshot), strict=True)
        return [OutlinedSSTable(snapshot.url, sstable.descriptor, partitions) for sstable, partitions in found]

    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        of_node = dict(zip([one.host for one in snapshots], pool.map(outlined, snapshots), strict=True))
    held = held_by(ring, left, of_node.keys())
    return split_groups([(of_node[node], tokens) for node, tokens in held.items()], left, least, most)
