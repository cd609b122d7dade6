"""The changes table of a replica, without Spark. The sync appends its passes here, each once and in order.

``<replica>/changes`` holds complete row images, as the base does. ``_version`` is the number of the pass that made the
image. For each key a reader takes the image with the greatest ``_version``; if there is none, it takes the base's.

The property ``ringsync.base`` names the base that the table belongs to. When a bootstrap replaces the base, images
computed from the old base no longer count, and the table starts again empty. The transaction ``ringsync-sync`` is the
last pass added. Images are computed from a :class:`ReplicaState` and added only while the replica has this state. So
repeating a pass adds nothing, and images computed from an older state are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.images.schema import row_image_schema
from ringsync.replica.base import MERGE, PROPERTY_PREFIX, check_columns, check_same_schema, identity, properties_of
from ringsync.replica.delta_log import (
    ConcurrentCommitError,
    DataFile,
    DeltaSnapshot,
    KnownSnapshots,
    append,
    file_identity,
    log_from_checkpoint,
    read_snapshot,
    remove,
    replace_all,
)
from ringsync.replica.features import writer_features
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

VERSION = "_version"
"""Name of the column that holds the number of the pass."""

SYNC = "ringsync-sync"
"""Application id of the Delta transaction whose version is the last pass added."""

CHECKPOINT_COMMITS = 10
"""Commits between two checkpoints of the log, so that readers need not read it from its beginning."""

ATTEMPTS = 50
"""Most attempts at one commit while other writers commit. There are few of them."""

REPAIR = "ringsync-repair"
"""Application id of the Delta transaction of the base whose version is the moment (µs) when its last repair began to
read. Delta notes beside it when the files were written: then it had read all."""

CLOCK_SKEW_US = 60_000_000
"""How far the clocks of writers may be ahead of ours, µs."""

_UNKNOWN_US = 2**61


class StaleStateError(ConcurrentCommitError):
    """The replica has changed since the images were computed: read its state again."""


@dataclass(frozen=True)
class ReplicaState:
    """A replica at one moment.

    :ivar base: id of the base; every bootstrap makes another
    :ivar changes_version: Delta version of the changes table; -1: there are no changes to this base
    :ivar applied: number of the last pass that the replica contains
    :ivar as_of_us: µs: the replica may or may not contain cells written later
    :ivar live_known_from_us: µs: all of the base was read before this, by a bootstrap or a repair; a liveness that it
        lacks is older
    :ivar deletions_known_from_us: µs: cells written before may be hidden by deletions that the replica does not know,
        because the SELECT that filled it did not show them
    :ivar whole: whether all rows and columns of the table were copied, not a selection
    :ivar changed_bytes: compressed size of the changes table's files
    :ivar base_rows: rows in the base, without those marked deleted
    :ivar base_bytes: compressed size of the base's files
    :ivar changed_since_ms: time when the oldest file of changes was written, ms since the epoch; None: no such file
    :ivar options: settings by which delta-rs reaches the store (:func:`ringsync.storage.delta_options`)
    """

    base_uri: str
    changes_uri: str
    base: str
    base_version: int
    changes_version: int
    applied: int
    as_of_us: int
    live_known_from_us: int
    deletions_known_from_us: int
    whole: bool
    changed_rows: int = 0
    changed_bytes: int = 0
    base_rows: int = 0
    base_bytes: int = 0
    changed_since_ms: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def changes_schema(table: TableSchema) -> pa.Schema:
    """Return the Arrow schema of the changes table: a row image and the number of the pass that made it."""
    return row_image_schema(table).append(pa.field(VERSION, pa.int64()))


def replica_state(
    store: ObjectStore,
    table: TableSchema,
    options: Mapping[str, str] | None = None,
    known: KnownSnapshots | None = None,
) -> ReplicaState | None:
    """Read the state of the replica; None: the table has no replica.

    :param options: settings by which delta-rs reaches the store (:func:`ringsync.storage.delta_options`)
    :param known: cache: an unchanged table is not read again
    :raises ReplicaMismatchError: the replica belongs to another table id
    :raises SchemaChangedError: base or changes have another version of the schema
    :raises ReplicaWaitsError: somebody has changed columns of base or changes, or switched on what is not honoured
    """
    base, changes = snapshots(store, table, known)
    return _state(store, table, base, changes, options or {}) if base.version >= 0 else None


def append_pass(
    store: ObjectStore,
    table: TableSchema,
    pass_number: int,
    files: Sequence[DataFile],
    now_ms: int,
    *,
    seen: ReplicaState,
) -> int:
    """Add a pass to the replica, in one commit; do nothing if the replica contains it.

    :param files: files in the changes folder with the schema :func:`changes_schema`, sorted by token; ``_version`` is
        the pass
    :param seen: state from which the images were computed
    :returns: the Delta version of the changes table
    :raises StaleStateError: something other than a merge or a repair has changed the replica; nothing was added
    :raises ReplicaMismatchError: the replica belongs to another table id or schema
    """
    folder = changes_folder(table.keyspace, table.name)
    for _ in _attempts(store, table):
        base, changes = snapshots(store, table)
        now = _state(store, table, base, changes, seen.options)
        if (now.base, now.applied) != (seen.base, seen.applied):
            if now.base == seen.base and now.applied >= pass_number:
                return now.changes_version
            raise StaleStateError(
                f"{now.changes_uri}: pass {pass_number} was made for base {seen.base} with pass {seen.applied}, but "
                f"the replica now has base {now.base} with pass {now.applied}: read its state and make the pass again"
            )
        if pass_number <= now.applied:
            return now.changes_version
        try:
            if now.changes_version < 0:
                _begin(store, table, base, changes, now_ms)
                continue
            version = append(
                store,
                folder,
                changes,
                files,
                transactions={SYNC: pass_number},
                now_ms=now_ms,
                constants={VERSION: pass_number},
            )
        except ConcurrentCommitError:
            continue
        if version % CHECKPOINT_COMMITS == 0:
            write_checkpoint(store, folder, now.options)
        return version
    raise AssertionError("the last attempt raises")


def begin_changes(store: ObjectStore, table: TableSchema, now_ms: int) -> None:
    """Start an empty changes table for the present base, unless the table belongs to this base already.

    Who wakes up late does nothing for a base of another version of the schema: that is for whoever has made it.
    """
    for _ in _attempts(store, table):
        base, changes = snapshots(store, table)
        if belong_together(base, changes) or properties_of(base).get("schema_digest") != table.digest:
            return
        with suppress(ConcurrentCommitError):
            _begin(store, table, base, changes, now_ms)


def empty_changes(store: ObjectStore, table: TableSchema, seen: DeltaSnapshot, now_ms: int) -> None:
    """Empty the changes table before a bootstrap replaces the replica of another table by this table's.

    The emptied table belongs to no base. So a reader that ignores the properties never sees rows of both tables.

    :param seen: the base that will be replaced
    :raises ConcurrentCommitError: another writer has changed the base since ``seen``; nothing was emptied
    """
    no_base = {"configuration": {f"{PROPERTY_PREFIX}base": f"none-{table.table_id}"}}
    for _ in _attempts(store, table):
        base, changes = snapshots(store, table)
        if base.version != seen.version:
            raise ConcurrentCommitError(
                f"{store.uri(base_folder(table.keyspace, table.name))} now has version {base.version}, not "
                f"{seen.version}: another writer has changed the replica; try again if the change is still wanted"
            )
        if properties_of(changes).get("table_id") == table.table_id:
            return
        with suppress(ConcurrentCommitError):
            _begin(store, table, replace(base, metadata=no_base), changes, now_ms)


def check_base(store: ObjectStore, table: TableSchema, seen: ReplicaState, *, same_version: bool = False) -> None:
    """Check that the replica still has the base and the schema of ``seen``, before its rows are changed.

    :param same_version: whether the base may have no later commit either
    :raises StaleStateError: a bootstrap or another version of the schema has replaced the base; or it has later commits
    :raises SchemaChangedError: the base has another version of the schema
    """
    base = read_snapshot(store, base_folder(table.keyspace, table.name))
    _check_same_base(base, seen, seen.base_uri)
    check_same_schema(seen.base_uri, properties_of(base), table)
    if same_version and base.version != seen.base_version:
        raise StaleStateError(
            f"{seen.base_uri} has version {base.version}, not {seen.base_version}: another writer has changed it "
            "meanwhile. Try again if the change is still wanted"
        )


def outdate_merges(store: ObjectStore, table: TableSchema, now_ms: int) -> None:
    """Let merges that were prepared before this commit nothing: a repair has changed the rows that they would write.

    :raises ConcurrentCommitError: others committed first, many times
    """
    folder = base_folder(table.keyspace, table.name)
    for _ in _attempts(store, table):
        base = read_snapshot(store, folder)
        with suppress(ConcurrentCommitError):
            append(store, folder, base, [], transactions={MERGE: base.version + 1}, now_ms=now_ms)
            return


def forget_merged(store: ObjectStore, table: TableSchema, seen: ReplicaState, now_ms: int) -> None:
    """Remove the files whose images have been merged into the base from the changes table: those of the state.

    If somebody has written some of them anew, perhaps together with later images, all stay for the next merge. If only
    some of a row's merged images went, an older one of them would be taken for its newest.

    The check of the base and the removal concern the same version of the table. So a caller that comes after a
    bootstrap has replaced the base removes nothing.

    :param seen: state that was merged
    :raises StaleStateError: a bootstrap has replaced the base; nothing was removed
    """
    folder = changes_folder(table.keyspace, table.name)
    merged = set(map(file_identity, read_snapshot(store, folder, version=seen.changes_version).files))
    for _ in _attempts(store, table):
        changes = read_snapshot(store, folder)
        _check_same_base(changes, seen, seen.changes_uri)
        there = [file for file in changes.files if file_identity(file) in merged]
        if not there or len(there) < len(merged):
            return
        with suppress(ConcurrentCommitError):
            remove(store, folder, changes, there, now_ms=now_ms)
            return


def _attempts(store: ObjectStore, table: TableSchema) -> Iterator[None]:
    """Let the caller try a commit to the changes table again while others commit.

    :raises ConcurrentCommitError: there were ``ATTEMPTS`` tries
    """
    yield from repeat(None, ATTEMPTS)
    uri = store.uri(changes_folder(table.keyspace, table.name))
    raise ConcurrentCommitError(f"{uri}: other writers committed first {ATTEMPTS} times: try again later")


def _check_same_base(table: DeltaSnapshot, seen: ReplicaState, uri: str) -> None:
    base = properties_of(table).get("base", "")
    if base != seen.base:
        raise StaleStateError(
            f"{uri} now belongs to base {base}, not to {seen.base}: a bootstrap or a change of the table's schema has "
            "replaced the replica. Try again if the change is still wanted"
        )


def write_checkpoint(
    store: ObjectStore, folder: str, options: Mapping[str, str], *, forget_old_commits: bool = False
) -> None:
    """Write a checkpoint of a Delta table's log. delta-rs makes it from a copy of the log, and the store puts it.

    :param folder: key of the table's folder in the store
    :param options: settings by which delta-rs reaches the store
    :param forget_old_commits: whether to remove commits older than the table's ``delta.logRetentionDuration``
    """
    from deltalake import DeltaTable

    with TemporaryDirectory(prefix="ringsync-") as scratch:
        copy = Path(scratch, "_delta_log")
        copy.mkdir()
        for key in log_from_checkpoint(store, folder):
            (copy / key.rpartition("/")[2]).write_bytes(store.get(key))
        before = set(copy.iterdir())
        DeltaTable(scratch).create_checkpoint()
        # "_last_checkpoint", which names the others, comes last.
        for made in sorted(set(copy.iterdir()) - before):
            store.put(f"{folder}/_delta_log/{made.name}", made.read_bytes())
    # After a feature was dropped, Delta's own tools know which commits may go.
    if forget_old_commits and "checkpointProtection" not in writer_features(read_snapshot(store, folder).protocol):
        DeltaTable(delta_path(store.uri(folder)), storage_options=dict(options)).cleanup_metadata()


def delta_path(uri: str) -> str:
    """Turn a store's URI into what delta-rs takes: local paths are no URLs there, since ours are not escaped."""
    return uri.removeprefix("file://")


def snapshots(
    store: ObjectStore, table: TableSchema, known: KnownSnapshots | None = None
) -> tuple[DeltaSnapshot, DeltaSnapshot]:
    """Read the snapshots of base and changes, the changes first.

    If a merge moves images to the base in between, they are seen twice rather than not at all. If a bootstrap replaces
    the base in between, the changes still name the old base, and so do not count.
    """
    changes = read_snapshot(store, changes_folder(table.keyspace, table.name), known)
    return read_snapshot(store, base_folder(table.keyspace, table.name), known), changes


def _begin(store: ObjectStore, table: TableSchema, base: DeltaSnapshot, before: DeltaSnapshot, now_ms: int) -> None:
    """Empty or create the changes table for this base. Its first pass is the one that the base names."""
    own = {**identity(table), "base": properties_of(base).get("base", "")}
    replace_all(
        store,
        changes_folder(table.keyspace, table.name),
        before,
        [],
        schema=from_arrow_schema(changes_schema(table)).json(),
        properties={PROPERTY_PREFIX + name: value for name, value in own.items()},
        defaults={
            "delta.dataSkippingStatsColumns": f"token,{VERSION}",
            # Every merge empties the table: older versions serve only queries that are still running.
            "delta.logRetentionDuration": "interval 6 hours",
            "delta.deletedFileRetentionDuration": "interval 24 hours",
        },
        # Somebody may have restored the table to a version before it belonged to this base.
        transaction=f"base-{own['base']}-{before.version}",
        now_ms=now_ms,
        deletion_vectors=False,
        also={SYNC: _last_pass_of(base)},
    )


def _state(
    store: ObjectStore,
    table: TableSchema,
    base: DeltaSnapshot,
    changes: DeltaSnapshot,
    options: Mapping[str, str],
) -> ReplicaState:
    uri = store.uri(base_folder(table.keyspace, table.name))
    found = properties_of(base)
    changes_uri = store.uri(changes_folder(table.keyspace, table.name))
    check_same_schema(uri, found, table)
    belongs = belong_together(base, changes)
    if belongs:
        check_same_schema(changes_uri, properties_of(changes), table)
        check_columns(changes_uri, changes, table, changes_schema)
    check_columns(uri, base, table, row_image_schema)
    deletions_from_us = int(found.get("deletions_from_us", found.get("read_until_us", "0")))
    repaired_from_us, repaired_until_us = base.transactions.get(REPAIR, 0), base.updated_ms.get(REPAIR, 0) * 1000
    read_until_us = max(int(found.get("read_until_us", _UNKNOWN_US)), repaired_from_us, repaired_until_us)
    written = [int(file["modificationTime"]) for file in changes.files] if belongs else []
    return ReplicaState(
        base_uri=uri,
        changes_uri=changes_uri,
        base=found.get("base", ""),
        base_version=base.version,
        changes_version=changes.version if belongs else -1,
        applied=(changes.transactions if belongs else {}).get(SYNC, _last_pass_of(base)),
        as_of_us=int(found.get("as_of_us", "0")),
        live_known_from_us=read_until_us + CLOCK_SKEW_US,
        deletions_known_from_us=max(deletions_from_us, repaired_from_us) + CLOCK_SKEW_US,
        whole=not any(json.loads(found.get("selection", "{}")).values()),
        changed_rows=changes.rows if belongs else 0,
        changed_bytes=changes.bytes if belongs else 0,
        base_rows=base.rows,
        base_bytes=base.bytes,
        changed_since_ms=min(written, default=None),
        options=options,
    )


def belong_together(base: DeltaSnapshot, changes: DeltaSnapshot) -> bool:
    """Tell whether there are changes of this base. Their schemas may differ while the replica follows a new one."""
    of_changes, of_base = properties_of(changes), properties_of(base)
    names = ("table_id", "base")
    return changes.version >= 0 and all(of_changes.get(name, "") == of_base.get(name, "") for name in names)


def _last_pass_of(base: DeltaSnapshot) -> int:
    """Return the last pass that a base contains; the base names the first one that it may lack."""
    return int(properties_of(base).get("from_pass", "1")) - 1
