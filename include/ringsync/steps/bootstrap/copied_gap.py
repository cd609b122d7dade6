"""What is said of a bootstrap in preparation, and the gap of a table that had no cdc for a while, and is bootstrapped
anew: nobody has to repair what is all copied.

The gap is noted before the copy begins, and is over when the copy is published. In between the status of the bootstrap
keeps it from being an alarm. If the bootstrap is cancelled, the gap is there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ringsync.cluster.node import one_node
from ringsync.cluster.schema import read_node_tables
from ringsync.config import Config
from ringsync.ledger.gaps import close_copied
from ringsync.ledger.left_tables import left_tables
from ringsync.ledger.passes import marks_of_latest, pass_numbers
from ringsync.ledger.table_versions import CdcBegun
from ringsync.ring.tokens import fraction
from ringsync.schema.table import TableSchema
from ringsync.status import ABANDONED_AFTER_S, BOOTSTRAPS, Status, age_s, forget, read_status, read_statuses
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.holes import note_back
from ringsync.steps.loop import put_status
from ringsync.storage.port import ObjectStore

PREPARED = "in preparation"
"""In place of a bootstrap's id in its status."""


@contextmanager
def said_before_cdc(store: ObjectStore, table: TableSchema, run: str) -> Iterator[None]:
    """Say that the bootstrap of a table that had cdc is being prepared, and no more if that fails. Others look at the
    table as soon as it has cdc again, and note its gap."""
    key = f"{BOOTSTRAPS}{table.table_id}"
    if table.table_id not in left_tables(store) or store.stat(f"status/{key}.json") is not None:
        yield
        return
    said = {"bootstrap": PREPARED, "run": run}
    status = {"table": table.full_name, "table_id": table.table_id, **said, "step": "prepare", "fraction": 0.0}
    put_status(store, BOOTSTRAPS.rstrip("/"), table.table_id, status)
    try:
        yield
    except BaseException:
        if said.items() <= (read_status(store, key) or {}).items():
            forget(store, key)
        raise


def abandoned_bootstraps(store: ObjectStore, tables: Collection[str]) -> dict[str, list[str]]:
    """List the statuses of bootstraps of tables on which nobody works, by table.

    :param tables: ``keyspace.name``; a table may be gone, or another have its name
    """
    found: dict[str, list[str]] = {table: [] for table in tables}
    for key, status in read_statuses(store).items():
        if key.startswith(BOOTSTRAPS) and status["table"] in found and _is_abandoned(status):
            found[status["table"]].append(key)
    return found


def forget_abandoned(store: ObjectStore, keys: Iterable[str]) -> None:
    """Remove statuses on which nobody has worked since they were listed."""
    for key in keys:
        if (status := read_status(store, key)) is not None and _is_abandoned(status):
            forget(store, key)


def _is_abandoned(status: Status) -> bool:
    return age_s(status, time.time()) > ABANDONED_AFTER_S


def note_before_copy(store: ObjectStore, config: Config, session: Any, table: TableSchema) -> None:
    """Note the gap of a table that all nodes know to have cdc again."""
    if table.table_id in left_tables(store):
        note_back(store, config, table, read_node_tables(one_node(session)), CdcBegun(store))


def close_behind_copy(store: ObjectStore, plan: BootstrapPlan) -> None:
    """Close what was missing before the copy of a whole table began. What the copy missed, verification finds."""
    table, selection = plan.scan.table, plan.scan.selection

    def begun_ms() -> int:
        marks = marks_of_latest(store, table.table_id, pass_numbers(store, table.table_id))
        begun = [mark for mark in marks if (mark.kind, mark.bootstrap) == ("begin", plan.bootstrap.id)]
        return begun[0].created_at_ms if begun else 0

    if not (table.is_selection or selection.where) and fraction(selection.ranges) == 1:
        close_copied(store, table.table_id, begun_ms)
