"""The removal of what unfinished bootstraps have written: found by listing files, not by any recorded state.

A bootstrap's files are invisible until its pass ``rows`` names them, and only then does it replace the base. After a
later ``begin``, ``cutover`` or ``end`` no such pass can be put. So one of these marks comes first, and then the
removal, which may be repeated. Names are random and never used again, so it does not matter how late a file is removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ringsync.ledger.passes import Pass, get_pass, pass_folder, pass_numbers
from ringsync.ledger.topic_owners import topic_owners
from ringsync.replica.base import own_properties, transaction_of
from ringsync.replica.delta_log import DeltaSnapshot, read_snapshot
from ringsync.replica.folders import base_folder
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream

_FILE = re.compile(r"/(part-(\d{8}T\d{6}Z-[0-9a-f]+)-[^/]+)$")
"""A bootstrap's file in the base's folder; Spark's own have no time in their names."""

_PART = re.compile(r"/(pass-\d{12})/part-[^/]+$")
"""A bootstrap's part in its stream; parts of changes have other names."""


def remove_leftovers(
    store: ObjectStore,
    table: TableSchema,
    topic: str,
    fence: int,
    live: str = "",
    listed: Collection[str] | None = None,
) -> None:
    """Remove files of bootstraps that neither base nor passes name, also those of tables that had this name before.

    :param fence: number of the ``begin`` or ``cutover`` after which only the live bootstrap can publish rows
    :param live: id of the bootstrap that goes on; empty: none
    :param listed: names of its files in the base's folder, once no more come; None: all of them stay
    """
    base_key = base_folder(table.keyspace, table.name)
    there = [match.groups() for stat in store.list(f"{base_key}/part-") if (match := _FILE.search(stat.key))]
    parts = _unpublished_parts(store, topic, fence)
    base = read_snapshot(store, base_key)
    named = {str(file["path"]) for file in base.files} | set(listed or ())
    files = [
        (name, bootstrap)
        for name, bootstrap in there
        if name not in named
        # Files that were once in the base are Delta's to remove: it knows when no reader needs them any more.
        and (listed is not None if bootstrap == live else transaction_of(bootstrap) not in base.transactions)
    ]
    if not files and not parts:
        return
    # Read after the files were listed: no listed file belongs to a bootstrap that begins from here on.
    tables = [owner.table_id for owner in topic_owners(store, topic)]
    passes = [get_pass(store, table_id, number) for table_id in tables for number in pass_numbers(store, table_id)]
    begun = [made.number for made in passes if (made.table_id, made.kind) == (table.table_id, "begin")]
    if tables[-1:] != [table.table_id] or max(begun, default=0) > fence:
        return
    may_come = _may_become_base(base, passes)
    for name, bootstrap in files:
        if bootstrap not in may_come:
            store.delete(f"{base_key}/{name}")
    waiting = {made.folder for made in passes if made.kind in ("changes", "rows")}
    for folder, keys in parts.items():
        # Looked up again, after the passes: a folder stays published when its pass is forgotten.
        if folder not in waiting and FileStream(store, topic).parts(folder) is None:
            for key in keys:
                store.delete(key)


def _unpublished_parts(store: ObjectStore, topic: str, fence: int) -> dict[str, list[str]]:
    """Return keys of bootstraps' parts in folders before the fence that have no manifest, by folder."""
    keys = [stat.key for stat in store.list(f"streams/{topic}/")]
    published = {key.split("/")[-2] for key in keys if key.endswith("/manifest.json")}
    parts: dict[str, list[str]] = {}
    for key in keys:
        part = _PART.search(key)
        if part and part[1] not in published and part[1] < pass_folder(fence):
            parts.setdefault(part[1], []).append(key)
    return parts


def _may_become_base(base: DeltaSnapshot, passes: Sequence[Pass]) -> set[str]:
    """Return bootstraps that have published their rows and may yet replace the base: not those before the present base.

    :param passes: the passes in their order
    """
    rows = [made.bootstrap for made in passes if made.kind == "rows"]
    present = own_properties(base.metadata.get("configuration") or {}).get("bootstrap")
    return set(rows[rows.index(present) + 1 :] if present in rows else rows)
