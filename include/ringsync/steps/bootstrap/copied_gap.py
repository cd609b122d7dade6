"""What is said of a bootstrap in preparation, and the gap of a table that had no cdc for a while, and is bootstrapped
anew: nobody has to repair what is all copied.

The gap is noted before the copy begins, and is over when the copy is published. In between the status of the bootstrap
keeps it from being an alarm. If the bootstrap is cancelled, the gap is there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
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
from ringsync.status import ABANDONED_AFTER_S, BOOTSTRAPS, age_s, forget, read_status, read_statuses
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.holes import note_back
from ringsync.steps.loop import put_status
from ringsync.storage.port import ObjectStore

PREPARED = "in preparation"
"""In place of a bootstrap's id in its status."""


@contextmanager
def said_to_be_prepared(store: ObjectStore, table: TableSchema, run: str) -> Iterator[None]:
    """Say that a bootstrap is being prepared, and no more if that fails. It is said before the table may get cdc again:
    others look as soon as it has, and note its gap. If the run is killed once the bootstrap has begun, the stream
    waits, and this says for what.
    """
    key = f"{BOOTSTRAPS}{table.table_id}"
    if store.stat(f"status/{key}.json") is not None:
        yield
        return
    status = {"table": table.full_name, "table_id": table.table_id, "bootstrap": PREPARED, "run": run}
    put_status(store, BOOTSTRAPS.rstrip("/"), table.table_id, {**status, "step": "prepare", "fraction": 0.0})
    try:
        yield
    except BaseException:
        forget_said(store, table.table_id, bootstrap=PREPARED, run=run)
        raise


def forget_said(store: ObjectStore, table_id: str, **said: str) -> None:
    """Remove the status of a table's bootstrap if it says this, and not what another run says that has begun since."""
    status = read_status(store, f"{BOOTSTRAPS}{table_id}") or {}
    if said.items() <= status.items():
        forget(store, f"{BOOTSTRAPS}{table_id}")


def forget_preparations(store: ObjectStore, tables: Collection[str]) -> None:
    """Say no more that bootstraps of tables are being prepared: those runs were killed, and the tables may be gone.
    What a bootstrap says stays, and what was said a moment ago.

    :param tables: ``keyspace.name``
    """
    for key, status in read_statuses(store).items():
        is_prepared = key.startswith(BOOTSTRAPS) and status["bootstrap"] == PREPARED
        if is_prepared and status["table"] in tables and age_s(status, time.time()) > ABANDONED_AFTER_S:
            forget(store, key)


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
