"""Holes: a table that loses cdc, or is left out by the configuration, and comes back lacks what was written meanwhile.

Whoever makes a plan notes which tables have left, and the gap of one that is planned again. A table that is planned for
the first time has none: what was written before is the bootstrap's. ScyllaDB's logs have gaps of their own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from ringsync.config import Config
from ringsync.ledger.gaps import NOT_FOLLOWED, Gap, note_gap
from ringsync.ledger.left_tables import LeftTable, forget_left, left_tables, note_left
from ringsync.ledger.staging import Bucket
from ringsync.ledger.table_versions import CdcBegun
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.status import read_statuses
from ringsync.storage.port import ObjectStore


def note_holes(
    store: ObjectStore,
    config: Config,
    tables: Iterable[TableSchema | UnreadableTable],
    with_cdc: Collection[str],
    begun: CdcBegun,
    interval: Bucket,
) -> None:
    """Note which tables have left, and which are back.

    :param tables: all that are there
    :param with_cdc: ids of those with cdc
    :param begun: those that were followed before, or are now
    :param interval: interval of the plan in the making
    """
    known = left_tables(store)
    until_ms: int | None = None
    for table in tables:
        table_id, name, has_cdc = table.table_id, table.full_name, table.table_id in with_cdc
        if has_cdc and config.sync.follows(name):
            if table_id in known:
                note_gap(store, _gap(table_id, name, known[table_id], interval, config))
                forget_left(store, table_id)
        elif table_id in begun and table_id not in known:
            until_ms = _captured_until_ms(store, interval) if until_ms is None else until_ms
            note_left(store, table_id, LeftTable(until_ms, has_cdc))


def _captured_until_ms(store: ObjectStore, interval: Bucket) -> int:
    """Return the moment until which all that followed tables were written is captured: it was planned in the interval
    before, and what the stage has not read by now it may not read any more."""
    clear_ms = [
        int(node.get("clear_at_ms") or 0)
        for loop, status in read_statuses(store).items()
        if loop.startswith("commitlog_stage/")
        for node in status.get("nodes", {}).values()
        if node.get("up")
    ]
    return max(0, min([interval.start - interval.length, *clear_ms]))


def _gap(table_id: str, name: str, left: LeftTable | None, interval: Bucket, config: Config) -> Gap:
    """Return the gap of a table that is planned again.

    A loop follows the configuration that it has read when its run began: until that ends, it may leave the table out.
    """
    since_ms = left.since_ms if left else 0
    back_ms = min(int(time.time() * 1000), interval.end)
    if left is None or left.has_cdc:
        back_ms += int(config.sync.run_s * 1000)
    return Gap(NOT_FOLLOWED, "", f"{table_id}-{since_ms}", since_ms, back_ms, {table_id: name}, (), is_whole=True)
