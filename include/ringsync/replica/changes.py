"""The table of changes of a replica, without Spark: passes of the sync are added to it, each once and in order.

``<replica>/changes`` holds complete row images as the base does, and in ``_version`` the number of the pass that made
each. Whoever reads takes the image of a key with the greatest ``_version``, else the base's.

It belongs to one base and says so in its property ``ringsync.base``: when a bootstrap has replaced the base, what was
merged with the old one no longer counts, and the table begins anew. Its transaction ``ringsync-sync`` is the last pass
added; images are computed from a :class:`ReplicaState` and added only to this very state. So a repetition of a pass
adds nothing, and what somebody computed from an older state is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.images.schema import row_image_schema
from ringsync.replica.base import (
    PROPERTY_PREFIX,
    base_folder,
    changes_folder,
    check_same_schema,
    identity,
    own_properties,
)
from ringsync.replica.delta_log import (
    ConcurrentCommitError,
    DataFile,
    DeltaSnapshot,
    KnownSnapshots,
    append,
    read_snapshot,
    remove,
    replace_all,
)
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

VERSION = "_version"
"""The column with the number of the pass."""

SYNC = "ringsync-sync"
"""Application id of the Delta transaction whose version is the last pass added."""
AS_OF = "ringsync-as-of"
"""The same, for the moment (µs) that the passes added so far show."""

CHECKPOINT_COMMITS = 10
"""Every so many commits the log is summed up, so that nobody has to read it from its beginning."""

ATTEMPTS = 50
"""So often a commit is tried again when others commit meanwhile; they are few."""


REPAIR = "ringsync-repair"
"""Application id of the Delta transaction of the base whose version is the moment (µs) of its last repair."""

CLOCK_SKEW_US = 60_000_000
"""So far ahead of ours the clocks of those who write may be."""

_UNKNOWN_US = 2**61


class StaleStateError(ConcurrentCommitError):
    """The replica is no longer what the images were computed from: take its state anew."""


@dataclass(frozen=True)
class ReplicaState:
    """What a replica consists of, at one moment.

    :ivar base: id of the base; every bootstrap makes another
    :ivar base_version: Delta version
    :ivar changes_version: Delta version; -1: there are no changes to this base
    :ivar applied: number of the last pass in it
    :ivar as_of_us: µs: cells written later may or may not be in it
    :ivar live_known_from_us: µs: the base was read before; livenesses that it does not know are older
    :ivar deletions_known_from_us: µs: what was written before may be hidden by deletions of which it shows nothing, as
        the SELECT did that it was made from
    :ivar whole: all rows and columns of the table were copied, and not a selection
    :ivar changed_rows: rows in the table of changes
    :ivar changed_bytes: compressed size of its files
    :ivar base_rows: rows in the base, without those marked deleted
    :ivar base_bytes: compressed size of its files
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
    """Row images with the number of the pass that made them."""
    return row_image_schema(table).append(pa.field(VERSION, pa.int64()))


def replica_state(
    store: ObjectStore,
    table: TableSchema,
    options: Mapping[str, str] | None = None,
    known: KnownSnapshots | None = None,
) -> ReplicaState | None:
    """What the replica is now; None: the table has none.

    :param options: settings by which delta-rs reaches the store (:func:`ringsync.storage.delta_options`)
    :param known: cache: an unchanged table is not read again
    :raises ReplicaMismatchError: it is the replica of another table id or schema
    """
    base, changes = _snapshots(store, table, known)
    return _state(store, table, base, changes, options or {}) if base.version >= 0 else None


def applied_pass(store: ObjectStore, table: TableSchema) -> int:
    """The number of the last pass that the replica contains; 0: none, or no replica."""
    state = replica_state(store, table)
    return state.applied if state else 0


def append_pass(
    store: ObjectStore,
    table: TableSchema,
    pass_number: int,
    files: Sequence[DataFile],
    now_ms: int,
    *,
    seen: ReplicaState,
    as_of_us: int | None = None,
) -> int:
    """Add a pass to the replica, in one commit; one that it contains is passed over.

    :param files: files in the folder of changes, of :func:`changes_schema`, sorted by token; ``_version`` is the pass
    :param now_ms: ms since the epoch
    :param seen: the state from which the images were computed
    :param as_of_us: µs: all that was written until then is in this pass and those before
    :returns: the Delta version of the table of changes
    :raises StaleStateError: the replica has changed otherwise than by a merge or a repair; nothing was added
    :raises ReplicaMismatchError: it is the replica of another table id or schema
    """
    folder = changes_folder(table.keyspace, table.name)
    for _ in range(ATTEMPTS):
        base, changes = _snapshots(store, table)
        now = _state(store, table, base, changes, seen.options)
        if (now.base, now.applied) != (seen.base, seen.applied):
            if now.base == seen.base and now.applied >= pass_number:
                return now.changes_version
            raise StaleStateError(
                f"{now.changes_uri}: pass {pass_number} was made for base {seen.base} with pass {seen.applied}, but "
                f"this is base {now.base} with pass {now.applied} by now: read the replica's state and make it anew"
            )
        if pass_number <= now.applied:
            return now.changes_version
        try:
            if now.changes_version < 0:
                _begin(store, table, base, changes, now_ms)
                continue
            transactions = {SYNC: pass_number, AS_OF: max(now.as_of_us, as_of_us or 0)}
            version = append(
                store,
                folder,
                changes,
                files,
                transactions=transactions,
                now_ms=now_ms,
                constants={VERSION: pass_number},
            )
        except ConcurrentCommitError:
            continue
        if version % CHECKPOINT_COMMITS == 0:
            write_checkpoint(now.changes_uri, now.options)
        return version
    raise ConcurrentCommitError(f"{store.uri(folder)}: others committed {ATTEMPTS} times in a row; try again later")


def begin_changes(store: ObjectStore, table: TableSchema, now_ms: int) -> None:
    """Make the table of changes that of the base as it is now: empty, unless it is that already.

    :param now_ms: ms since the epoch
    """
    for _ in range(ATTEMPTS):
        base, changes = _snapshots(store, table)
        if _belong_together(base, changes):
            return
        try:
            _begin(store, table, base, changes, now_ms)
        except ConcurrentCommitError:
            continue
    raise ConcurrentCommitError(
        f"{store.uri(changes_folder(table.keyspace, table.name))}: others committed {ATTEMPTS} times in a row"
    )


def empty_changes(store: ObjectStore, table: TableSchema, seen: DeltaSnapshot, now_ms: int) -> None:
    """Make the table of changes that of no base, before the replica of another table is replaced by this one's: whoever
    reads both without a look at their properties never sees rows of both tables.

    :param seen: the base that is to be replaced
    :param now_ms: ms since the epoch
    :raises ConcurrentCommitError: another writer has changed the base since; nothing was emptied
    """
    no_base = {"configuration": {f"{PROPERTY_PREFIX}base": f"none-{table.table_id}"}}
    for _ in range(ATTEMPTS):
        base, changes = _snapshots(store, table)
        if base.version != seen.version:
            raise ConcurrentCommitError(
                f"{store.uri(base_folder(table.keyspace, table.name))} has version {base.version} by now, and not "
                f"{seen.version}: another writer has changed the replica; do it again, if it is still wanted"
            )
        if own_properties(changes.metadata.get("configuration") or {}).get("table_id") == table.table_id:
            return
        try:
            _begin(store, table, replace(base, metadata=no_base), changes, now_ms)
        except ConcurrentCommitError:
            continue
    raise ConcurrentCommitError(
        f"{store.uri(changes_folder(table.keyspace, table.name))}: others committed {ATTEMPTS} times in a row"
    )


def check_base(store: ObjectStore, table: TableSchema, seen: ReplicaState) -> None:
    """Look whether the replica still has the base that somebody has seen, before its rows are changed.

    :raises StaleStateError: a bootstrap has replaced it
    """
    base = read_snapshot(store, base_folder(table.keyspace, table.name))
    _check_same_base(own_properties(base.metadata.get("configuration") or {}), seen, seen.base_uri)


def forget_merged(store: ObjectStore, table: TableSchema, seen: ReplicaState, now_ms: int) -> None:
    """Take the files out of the table of changes whose images have been merged into the base that they belong to.

    Whoever does that an hour later, when a bootstrap has replaced the base and the passes are added to the new one
    again, takes nothing out: it is one commit, to the very version whose base was looked at.

    :param seen: the state that was merged
    :param now_ms: ms since the epoch
    :raises StaleStateError: a bootstrap has replaced the base; nothing was taken out
    """
    folder = changes_folder(table.keyspace, table.name)
    for _ in range(ATTEMPTS):
        changes = read_snapshot(store, folder)
        _check_same_base(own_properties(changes.metadata.get("configuration") or {}), seen, seen.changes_uri)
        merged = [file for file in changes.files if _last_pass_in(file) <= seen.applied]
        if not merged:
            return
        try:
            remove(store, folder, changes, merged, now_ms=now_ms)
        except ConcurrentCommitError:
            continue
        return
    raise ConcurrentCommitError(f"{seen.changes_uri}: others committed {ATTEMPTS} times in a row; try again later")


def _check_same_base(found: Mapping[str, str], seen: ReplicaState, uri: str) -> None:
    if found.get("base", "") != seen.base:
        raise StaleStateError(
            f"{uri} is of base {found.get('base', '')} by now, and not of {seen.base}: a bootstrap has replaced the "
            "replica. Do it again, if it is still wanted"
        )


def _last_pass_in(file: Mapping[str, Any]) -> float:
    """The newest pass that has an image in a file; where the file does not say, one that is still to come."""
    return float(json.loads(file.get("stats") or "{}").get("maxValues", {}).get(VERSION, math.inf))


def write_checkpoint(uri: str, options: Mapping[str, str], *, forget_old_commits: bool = False) -> None:
    """Sum the log of a Delta table up.

    :param options: settings by which delta-rs reaches the store
    :param forget_old_commits: remove commits older than the table's ``delta.logRetentionDuration``
    """
    from deltalake import DeltaTable

    table = DeltaTable(delta_path(uri), storage_options=dict(options))
    table.create_checkpoint()
    if forget_old_commits:
        table.cleanup_metadata()


def delta_path(uri: str) -> str:
    """A store's URI as delta-rs wants it: a local path is no URL, since ours are not escaped."""
    return uri.removeprefix("file://")


def _snapshots(
    store: ObjectStore, table: TableSchema, known: KnownSnapshots | None = None
) -> tuple[DeltaSnapshot, DeltaSnapshot]:
    """Base and changes, the changes read first.

    What a merge moves from there to the base in between is then seen twice rather than not at all; and changes that
    belong to the base that was read do not belong to an older one.
    """
    changes = read_snapshot(store, changes_folder(table.keyspace, table.name), known)
    return read_snapshot(store, base_folder(table.keyspace, table.name), known), changes


def _begin(store: ObjectStore, table: TableSchema, base: DeltaSnapshot, before: DeltaSnapshot, now_ms: int) -> None:
    """Empty the table of changes, or create it, for this base: its passes begin where the base says."""
    found = own_properties(base.metadata.get("configuration") or {})
    own = {**identity(table), "base": found.get("base", "")}
    replace_all(
        store,
        changes_folder(table.keyspace, table.name),
        before,
        [],
        schema=from_arrow_schema(changes_schema(table)).json(),
        properties={
            "delta.dataSkippingStatsColumns": f"token,{VERSION}",
            # The table is emptied with every merge: what it was before serves only queries that run.
            "delta.logRetentionDuration": "interval 6 hours",
            "delta.deletedFileRetentionDuration": "interval 24 hours",
            **{PROPERTY_PREFIX + name: value for name, value in own.items()},
        },
        transaction=f"base-{own['base']}",
        now_ms=now_ms,
        deletion_vectors=False,
        also={SYNC: _from_pass(base) - 1, AS_OF: _as_of_us(base)},
    )


def _state(
    store: ObjectStore,
    table: TableSchema,
    base: DeltaSnapshot,
    changes: DeltaSnapshot,
    options: Mapping[str, str],
) -> ReplicaState:
    uri = store.uri(base_folder(table.keyspace, table.name))
    found = own_properties(base.metadata.get("configuration") or {})
    check_same_schema(uri, found, table)
    theirs = _belong_together(base, changes)
    written = [int(file["modificationTime"]) for file in changes.files] if theirs else []
    return ReplicaState(
        base_uri=uri,
        changes_uri=store.uri(changes_folder(table.keyspace, table.name)),
        base=found.get("base", ""),
        base_version=base.version,
        changes_version=changes.version if theirs else -1,
        applied=changes.transactions[SYNC] if theirs else _from_pass(base) - 1,
        as_of_us=changes.transactions.get(AS_OF, _as_of_us(base)) if theirs else _as_of_us(base),
        live_known_from_us=int(found.get("read_until_us", _UNKNOWN_US)) + CLOCK_SKEW_US,
        deletions_known_from_us=max(_deletions_from_us(base), base.transactions.get(REPAIR, 0)) + CLOCK_SKEW_US,
        whole=not any(json.loads(found.get("selection", "{}")).values()),
        changed_rows=changes.rows if theirs else 0,
        changed_bytes=changes.bytes if theirs else 0,
        base_rows=base.rows,
        base_bytes=base.bytes,
        changed_since_ms=min(written, default=None),
        options=options,
    )


def _belong_together(base: DeltaSnapshot, changes: DeltaSnapshot) -> bool:
    theirs, own = (own_properties(one.metadata.get("configuration") or {}) for one in (changes, base))
    wanted = ("table_id", "schema_digest", "base")
    return changes.version >= 0 and all(theirs.get(name, "") == own.get(name, "") for name in wanted)


def _from_pass(base: DeltaSnapshot) -> int:
    return int(own_properties(base.metadata.get("configuration") or {}).get("from_pass", "1"))


def _as_of_us(base: DeltaSnapshot) -> int:
    return int(own_properties(base.metadata.get("configuration") or {}).get("as_of_us", "0"))


def _deletions_from_us(base: DeltaSnapshot) -> int:
    """Of a base that a version before has made the moment until which it was read."""
    found = own_properties(base.metadata.get("configuration") or {})
    return int(found.get("deletions_from_us") or found.get("read_until_us") or _as_of_us(base))
