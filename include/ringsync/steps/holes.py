"""Holes: a table that loses cdc, or is left out by the configuration, and comes back lacks what was written meanwhile.

Whoever makes a plan, or sees that the schema has changed, notes which tables have left, and the gap of one that is
followed again. A table that is followed for the first time has none: what was written before is the bootstrap's.
ScyllaDB's logs have gaps of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ringsync.cluster.node import Node
from ringsync.cluster.schema import NodeTables, read_node_tables, read_tables
from ringsync.config import Config
from ringsync.ledger.archive import archived
from ringsync.ledger.dropped_tables import all_dropped
from ringsync.ledger.gaps import NOT_FOLLOWED, Gap, note_gap
from ringsync.ledger.left_tables import LeftTable, forget_left, left_tables, note_left, when_left
from ringsync.ledger.table_versions import CdcBegun
from ringsync.ledger.waiting_segments import WAITING
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.status import STALE_AFTER_S, age_s, read_status, read_statuses
from ringsync.storage.port import NotFoundError, ObjectStore

OLD_CONFIG_S = 600.0
"""So long after a change of the configuration a loop may work by the one before, s: a cycle that takes long, on a host
whose file changes later."""


def note_holes(
    store: ObjectStore,
    config: Config,
    tables: Iterable[TableSchema | UnreadableTable],
    told: NodeTables,
    begun: CdcBegun,
    before_ms: int,
) -> None:
    """Note which tables have left, and which are back.

    :param tables: all that are there
    :param told: what a node says of them
    :param begun: those that were followed before, or are now
    :param before_ms: when somebody looked before, and tables that have left since were followed, ms since the epoch
    """
    known = left_tables(store)
    # Each look asks another node: while they disagree, tables would leave and come back all the time.
    may_be_back = bool(known) and not _nodes_disagree(store)
    until_ms: int | None = None
    there = list(tables)
    if gone := known - {table.table_id for table in there}:
        for table_id in gone & all_dropped(store):
            forget_left(store, table_id)
    for table in there:
        table_id, name, has_cdc = table.table_id, table.full_name, table.table_id in told.with_cdc
        if has_cdc and config.sync.follows(name):
            if table_id in known and may_be_back:
                note_back(store, config, table, told, begun)
        elif table_id in begun and table_id not in known and (has_cdc or not _is_behind(told, begun, table_id)):
            until_ms = _captured_until_ms(store, before_ms) if until_ms is None else until_ms
            note_left(store, table_id, LeftTable(until_ms, has_cdc))


def note_back(
    store: ObjectStore, config: Config, table: TableSchema | UnreadableTable, told: NodeTables, begun: CdcBegun
) -> None:
    """Note the gap of a table that is back.

    :param told: what a node says of it
    """
    try:
        left = when_left(store, table.table_id)
    except NotFoundError:  # another process has noted it just now
        return
    note_gap(store, _gap(table.table_id, table.full_name, left, config))
    begun.begins_again(table.table_id, told.altered_ms.get(table.table_id, 0))
    forget_left(store, table.table_id)


def note_holes_of(store: ObjectStore, config: Config, node: Node) -> None:
    """Note which tables have left, and which are back, by the schema of a node that has changed just now: a plan, made
    once in an interval, may miss that a table had no cdc for some seconds.

    :raises ChangingSchemaError: it changes all the time
    """
    before_ms = int(time.time() * 1000) - config.commitlog_processor_window_interval_ms
    schema, told = read_tables(node), read_node_tables(node)
    note_holes(store, config, (*schema.tables, *schema.unreadable), told, CdcBegun(store), before_ms)


def _is_behind(told: NodeTables, begun: CdcBegun, table_id: str) -> bool:
    """Tell whether a node does not know yet of the statement that has given a table cdc: it was altered before."""
    return 0 < told.altered_ms.get(table_id, 0) < begun.altered_ms(table_id)


def _nodes_disagree(store: ObjectStore) -> bool:
    """Tell whether the schema updater finds now that nodes have different schemas."""
    status = read_status(store, "schema_update/schema") or {"at_ms": 0}
    return age_s(status, time.time()) <= STALE_AFTER_S and bool(status.get("disagreement_since_ms"))


def _captured_until_ms(store: ObjectStore, before_ms: int) -> int:
    """Return the moment until which all that was written to followed tables is captured: what is not read by now, of
    nodes that are up or down, or archived, may not be read any more. 0: nobody knows."""
    damaged: list[str] = []
    waiting_ms = [segment.began_ms for segment in archived(store, WAITING, damaged)]
    clear_ms = [
        int(node.get("clear_at_ms") or 0)
        for loop, status in read_statuses(store).items()
        if loop.startswith("commitlog_stage/")
        for node in status.get("nodes", {}).values()
        if node.get("up") or node.get("clear_at_ms")
    ]
    return 0 if damaged else max(0, min([before_ms, *clear_ms, *waiting_ms]))


def _gap(table_id: str, name: str, left: LeftTable | None, config: Config) -> Gap:
    """Return the gap of a table that is planned again.

    A loop follows the configuration that it has read when its run began: until that ends, which the change makes it do,
    it may leave the table out.
    """
    since_ms = left.since_ms if left else 0
    back_ms = int(time.time() * 1000)
    if left is None or left.has_cdc:
        back_ms += int(min(config.sync.run_s, OLD_CONFIG_S) * 1000)
    # It may leave twice with nothing captured in between.
    part = f"{table_id}-{since_ms}-{left.noted_ms if left else back_ms}"
    return Gap(NOT_FOLLOWED, "", part, since_ms, back_ms, {table_id: name}, ())
