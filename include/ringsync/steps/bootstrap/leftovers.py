"""Remove what bootstraps have written that came to nothing: by what is there, not by what a state says of it.

Nobody sees a bootstrap's files before its pass ``rows`` names them, and only then it replaces the base. Behind a later
``begin``, ``cutover`` or ``end`` no such pass can be put. So first comes one of these, and then the removal, which may
be repeated by whoever goes on. Names are random: what is garbage once remains garbage, however late it is removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ringsync.ledger.passes import Pass, get_pass, pass_bucket, pass_numbers
from ringsync.ledger.topic_owners import topic_owners
from ringsync.replica.base import base_folder, own_properties, transaction_of
from ringsync.replica.delta_log import DeltaSnapshot, read_snapshot
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream

_FILE = re.compile(r"/(part-(\d{8}T\d{6}Z-[0-9a-f]+)-[^/]+)$")
"""Of a bootstrap in the base's folder; Spark's own have no moment in their names."""

_PART = re.compile(r"/(pass-\d{12}|bootstrap-[^/]+)/part-[^/]+$")
"""Of a bootstrap in its stream; those of changes have other names. Versions before had a bucket with its name, which
sorts before all passes."""


def remove_leftovers(
    store: ObjectStore,
    table: TableSchema,
    topic: str,
    fence: int,
    live: str = "",
    listed: Collection[str] | None = None,
) -> None:
    """Remove what bootstraps of this table, and of those that had its name before, have written and nothing names.

    :param topic: topic of the table's changes
    :param fence: number of the ``begin`` or ``cutover`` behind which only the live one can publish rows
    :param live: id of the bootstrap that goes on; empty: none
    :param listed: names of its files in the base's folder, once no more come; None: all of them stay
    """
    folder = base_folder(table.keyspace, table.name)
    there = [found.groups() for stat in store.list(f"{folder}/part-") if (found := _FILE.search(stat.key))]
    parts = _unpublished_parts(store, topic, fence)
    base = read_snapshot(store, folder)
    named = {str(file["path"]) for file in base.files} | set(listed or ())
    files = [
        (name, bootstrap)
        for name, bootstrap in there
        if name not in named
        # Of what the base had once Delta knows when no reader needs it any more.
        and (listed is not None if bootstrap == live else transaction_of(bootstrap) not in base.transactions)
    ]
    if not files and not parts:
        return
    # Asked after the files were listed: those of a bootstrap that begins from here on are not among them.
    tables = [one.table_id for one in topic_owners(store, topic)]
    passes = [get_pass(store, one, number) for one in tables for number in pass_numbers(store, one)]
    own = [one for one in passes if one.table_id == table.table_id]
    if tables[-1:] != [table.table_id] or any(one.kind == "begin" and one.number > fence for one in own):
        return
    may_come = _may_become_base(base, passes)
    for name, bootstrap in files:
        if bootstrap not in may_come:
            store.delete(f"{folder}/{name}")
    waiting = {one.bucket for one in passes if one.kind in ("changes", "rows")}
    for bucket, keys in parts.items():
        # Asked again, after the passes: it stays published when its pass is forgotten.
        if bucket not in waiting and FileStream(store, topic).parts(bucket) is None:
            for key in keys:
                store.delete(key)


def _unpublished_parts(store: ObjectStore, topic: str, fence: int) -> dict[str, list[str]]:
    """Return keys of bootstraps' parts in buckets before the fence that have no manifest, by bucket."""
    keys = [stat.key for stat in store.list(f"streams/{topic}/")]
    published = {key.split("/")[-2] for key in keys if key.endswith("/manifest.json")}
    parts: dict[str, list[str]] = {}
    for key in keys:
        found = _PART.search(key)
        if found and found[1] not in published and found[1] < pass_bucket(fence):
            parts.setdefault(found[1], []).append(key)
    return parts


def _may_become_base(base: DeltaSnapshot, passes: Sequence[Pass]) -> set[str]:
    """Bootstraps that have published their rows and may yet replace the base: whoever has done that since lets no
    commit of an earlier one through.

    :param passes: the passes in their order
    """
    rows = [one.bootstrap for one in passes if one.kind == "rows"]
    present = own_properties(base.metadata.get("configuration") or {}).get("bootstrap")
    return set(rows[rows.index(present) + 1 :] if present in rows else rows)
