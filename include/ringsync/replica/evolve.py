"""How a replica follows its table's schema, without a new bootstrap.

A column or a field of a user-defined type that was added, and a column that was dropped, change only the schema of the
two Delta tables: one commit to each, the changes first. Files stay as they are: readers show null for what a file
lacks, and nothing of what the schema lacks. All else needs the data under another name, or without some of it: a key
column that was renamed, a column that was dropped and added again. Then the base is written again, with the changes, as
if a bootstrap had replaced it (:func:`rewrite`). Until then the replica takes no passes.

The properties of a Delta table have the digest of its schema; the table's history says which version that is. A process
that knows only an earlier version than the replica's changes nothing: it waits until it knows the newer one.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.images.conform import conformed_images
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.replica.base import PROPERTY_PREFIX, check_columns, check_table_id, identity, properties_of, replace_base
from ringsync.replica.changes import (
    ATTEMPTS,
    VERSION,
    ReplicaState,
    begin_changes,
    belong_together,
    changes_schema,
    replica_state,
    snapshots,
)
from ringsync.replica.data_files import ROW_GROUP_ROWS, DataFileWriter
from ringsync.replica.delta_log import ConcurrentCommitError, DataFile, DeltaSnapshot, set_schema
from ringsync.replica.errors import ReplicaWaitsError, SchemaChangedError
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.replica.lookup import images_between
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

ROWS_OF_A_PIECE = 100_000
BYTES_OF_A_PIECE = 16 * 2**20
"""About how much a task has in memory at once: the rows, and their size in the lake."""

Piece = tuple[int, int]
"""A token range (start, end]; none wraps."""


class RewriteNeededError(ReplicaWaitsError):
    """The base must be written again before the replica can follow the schema (:func:`rewrite`)."""


def follow_schema(
    store: ObjectStore, table: TableSchema, read_versions: Callable[[], Sequence[TableSchema]], now_ms: int
) -> None:
    """Give base and changes the schema of a table's version, if they have an earlier one.

    :param table: the version
    :param read_versions: function that reads all versions of the table, in their order. It is called after the replica
        was read: then it knows the replica's version
    :raises ReplicaMismatchError: the replica belongs to another table id
    :raises SchemaChangedError: the replica has a schema that the history does not know, or only some of the columns
    :raises ReplicaWaitsError: the replica has a later version
    :raises RewriteNeededError: only :func:`rewrite` can do it
    :raises ConcurrentCommitError: other writers committed first, many times
    """
    for _ in range(ATTEMPTS):
        base, changes = snapshots(store, table)
        if base.version < 0:
            return
        check_table_id(store.uri(base_folder(table.keyspace, table.name)), properties_of(base), table)
        behind = _behind(store, table, read_versions, base, changes)
        if not behind:
            return
        folder, before, schema = behind[0]
        properties = {PROPERTY_PREFIX + name: value for name, value in identity(table).items()}
        try:
            set_schema(
                store, folder, before, schema=from_arrow_schema(schema).json(), properties=properties, now_ms=now_ms
            )
        except ConcurrentCommitError:
            continue
    if _behind(store, table, read_versions, *snapshots(store, table)):
        raise ConcurrentCommitError(f"{store.uri(folder)}: other writers committed first {ATTEMPTS} times: try again")


def _behind(
    store: ObjectStore,
    table: TableSchema,
    read_versions: Callable[[], Sequence[TableSchema]],
    base: DeltaSnapshot,
    changes: DeltaSnapshot,
) -> list[tuple[str, DeltaSnapshot, pa.Schema]]:
    """Return the Delta tables that have an earlier version, with the schemas that they must get."""
    tables = [(base_folder(table.keyspace, table.name), base, row_image_schema(table))]
    if belong_together(base, changes):
        # First: whoever adds a pass of an earlier version to the changes meets this commit.
        tables.insert(0, (changes_folder(table.keyspace, table.name), changes, changes_schema(table)))
    behind = [entry for entry in tables if properties_of(entry[1]).get("schema_digest") != table.digest]
    if behind and json.loads(properties_of(base).get("selection", "{}")).get("columns"):
        raise SchemaChangedError(
            f"the replica {store.uri(base_folder(table.keyspace, table.name))} has only some columns of "
            f"{table.full_name}: it does not follow the schema; trigger bootstrap_table again"
        )
    versions = read_versions() if behind else ()
    for folder, found, wanted in behind:
        old = _place(store, folder, found, table, versions)
        # Else a column of somebody else would vanish, or become the source's.
        schema_of = changes_schema if VERSION in wanted.names else row_image_schema
        check_columns(store.uri(folder), found, versions[old], schema_of)
        if old >= (mine := _place_of(table.digest, versions)):
            raise _later_version(store.uri(folder), table)
        if reason := rewrite_reason(versions[: old + 1], versions[mine]):
            raise RewriteNeededError(
                f"the replica of {table.full_name} waits until replica_merge has written its base again: {reason}"
            )
    return behind


def _later_version(uri: str, table: TableSchema) -> ReplicaWaitsError:
    return ReplicaWaitsError(
        f"the replica {uri} has a later version of the schema of {table.full_name}: this process waits until it has "
        "read it, too"
    )


def _place(
    store: ObjectStore, folder: str, found: DeltaSnapshot, table: TableSchema, versions: Sequence[TableSchema]
) -> int:
    """Return the place of a Delta table's schema among the versions."""
    place = _place_of(properties_of(found).get("schema_digest", ""), versions)
    if place < 0:
        raise SchemaChangedError(
            f"{store.uri(folder)} has a schema of {table.full_name} that its history does not know: trigger "
            "bootstrap_table again"
        )
    return place


def _place_of(digest: str, versions: Sequence[TableSchema]) -> int:
    """Return the last version with this schema, -1: none. An ADD and a DROP give the same schema again."""
    return max((place for place, version in enumerate(versions) if version.digest == digest), default=-1)


def rewrite_reason(earlier: Sequence[TableSchema], new: TableSchema) -> str | None:
    """Tell why the files of a replica cannot be read under a new version; None: they can.

    :param earlier: versions up to the replica's, which is the last
    """
    old = earlier[-1]
    old_names, names = lake_names(old), lake_names(new)
    for before, after in zip(old.key_columns, new.key_columns, strict=True):
        if before.name != after.name:
            return f"the key column {before.name} was renamed to {after.name}"
    known = {column.name: column for column in old.columns}
    drops = {gone.name: gone.dropped_at for gone in old.dropped}
    in_files = {name for version in earlier for name in lake_names(version).values()}
    for gone in new.dropped:
        if gone.name in known and gone.name in names and gone.dropped_at != drops.get(gone.name):
            return f"the column {gone.name} was dropped and added again"
    for column in new.columns:
        if column.name not in known:
            if names[column.name] in in_files:
                return f"files of the replica may have another column {names[column.name]}, which was dropped"
        elif names[column.name] != old_names[column.name]:
            return f"the column {old_names[column.name]} is {names[column.name]} in the lake now"
        elif not _extends(*(row_image_schema(version).field(names[column.name]).type for version in (old, new))):
            return f"the type of the column {column.name} has changed inside"
    return None


def _extends(old: pa.DataType, new: pa.DataType) -> bool:
    """Tell whether readers can read a type as another: only fields of structs are new, at their ends."""
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = [*zip(old, new, strict=False)]
        return old.num_fields <= new.num_fields and all(
            before.name == after.name and _extends(before.type, after.type) for before, after in fields
        )
    # delta-rs reads no maps in which structs have grown.
    if pa.types.is_list(old) and pa.types.is_list(new):
        return _extends(old.value_type, new.value_type)
    return bool(old.equals(new))


@dataclass(frozen=True)
class RewriteTask:
    """Writes a piece of a replica again, as another version shows it. Spark calls it in its tasks.

    :ivar open_store: function that opens the object store
    :ivar state: the replica, base and changes, of version ``old``
    """

    open_store: Callable[[], ObjectStore]
    state: ReplicaState
    old: TableSchema
    new: TableSchema

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[DataFile]:
        """Write one file for each piece that has rows."""
        store, schema = self.open_store(), row_image_schema(self.new)
        for start, end in pieces:
            batches = images_between(self.state, self.old, start, end)
            rows = pa.Table.from_batches((conformed_images(batch, self.old, self.new) for batch in batches), schema)
            if not rows.num_rows:
                continue
            writer = DataFileWriter(schema)
            for batch in rows.take(pc.sort_indices(rows["token"])).to_batches(max_chunksize=ROW_GROUP_ROWS):
                writer.add(batch)
            name = f"version-{secrets.token_hex(12)}.zstd.parquet"
            file, data = writer.finish(name, int(time.time() * 1000))
            store.put(f"{base_folder(self.new.keyspace, self.new.name)}/{name}", data)
            yield file


def rewrite(
    store: ObjectStore,
    table: TableSchema,
    read_versions: Callable[[], Sequence[TableSchema]],
    run: Callable[[RewriteTask, Sequence[Piece]], Sequence[DataFile]],
    open_store: Callable[[], ObjectStore],
    options: Mapping[str, str],
    now_ms: int,
) -> dict[str, int]:
    """Replace the base by the newest images of all rows under another version of the schema, in one commit.

    The changes then belong to no base, and begin empty. Passes that are added meanwhile are added again.

    :param read_versions: as for :func:`follow_schema`
    :param run: function that runs the task for all pieces, and returns the files
    :param options: settings by which delta-rs reaches the store
    :returns: numbers of rows and files; 0 if the replica has this version already
    :raises ReplicaWaitsError: the replica has a later version
    :raises ConcurrentCommitError: another writer has changed the base meanwhile: nothing was done, try again
    """
    folder = base_folder(table.keyspace, table.name)
    both = snapshots(store, table)
    versions = read_versions()
    found = both if belong_together(*both) else both[:1]
    place = max(_place(store, folder, one, table, versions) for one in found)
    if _place_of(table.digest, versions) < place:
        raise _later_version(store.uri(folder), table)
    old = versions[place]
    follow_schema(store, old, read_versions, now_ms)  # a process may have ended after the first of the two commits
    if old.digest == table.digest:
        begin_changes(store, table, now_ms)  # likewise
        return {"rows": 0, "files": 0}
    base, _ = snapshots(store, table)
    state = replica_state(store, old, options)
    if state is None or state.base_version != base.version:
        raise ConcurrentCommitError(f"{store.uri(folder)} is being changed: try again")
    files = run(RewriteTask(open_store, state, old, table), _pieces(state))
    had = properties_of(base)
    never = str(2**61)  # as replica_state has it
    kept = {
        "read_until_us": never,
        "deletions_from_us": had.get("read_until_us", had.get("as_of_us", "0")),
        **{name: value for name, value in had.items() if name not in {*identity(table), "base", "from_pass"}},
    }
    replace_base(
        store,
        table,
        base,
        files,
        as_of_us=int(had.get("as_of_us", "0")),
        properties=kept,
        transaction=f"schema-{secrets.token_hex(8)}",
        now_ms=now_ms,
        from_pass=state.applied + 1,
    )
    begin_changes(store, table, now_ms)
    return {"rows": sum(file.rows for file in files), "files": len(files)}


def _pieces(state: ReplicaState) -> list[Piece]:
    rows, size = state.base_rows + state.changed_rows, state.base_bytes + state.changed_bytes
    ranges = WHOLE_RING.split(1 + max(rows // ROWS_OF_A_PIECE, size // BYTES_OF_A_PIECE))
    edges = [ranges[0].start, *(token_range.end for token_range in ranges[:-1]), 2**63 - 1]
    return [*itertools.pairwise(edges)]
