"""The base table of a replica, without Spark: which table it mirrors, and how a bootstrap's files replace it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

import ringsync
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.replica.delta_log import DataFile, DeltaSnapshot, replace_all
from ringsync.replica.errors import ReplicaMismatchError, ReplicaWaitsError, SchemaChangedError
from ringsync.replica.features import columns_differ, is_on, restored, writer_features
from ringsync.replica.folders import base_folder
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

PROPERTY_PREFIX = "ringsync."

MERGE = "ringsync-merge"
"""Application id of the Delta transaction of the base whose version is the Delta version of the last merge, or of the
last commit that replaced or repaired the base. A merge that was prepared for an earlier version commits nothing."""


_OURS: set[int] = set()
"""Schemas that were compared and are ringsync's: for 100 columns that takes 7 ms."""


def transaction_of(bootstrap_id: str) -> str:
    """Name the Delta transaction of a bootstrap's commit. The base takes it only once and keeps the version it made."""
    return f"bootstrap-{bootstrap_id}"


def identity(table: TableSchema) -> dict[str, str]:
    """Return the properties that identify a replica, without their prefix."""
    return {
        "table": table.full_name,
        "table_id": table.table_id,
        "schema_digest": table.digest,
        "key_columns": json.dumps([column.name for column in table.key_columns]),
        "dropped": json.dumps({gone.name: gone.dropped_at for gone in table.dropped}),
        "version": ringsync.__version__,
    }


def own_properties(configuration: Mapping[str, str]) -> dict[str, str]:
    """Pick ringsync's properties from those of a Delta table, and drop their prefix."""
    return {k.removeprefix(PROPERTY_PREFIX): v for k, v in configuration.items() if k.startswith(PROPERTY_PREFIX)}


def properties_of(table: DeltaSnapshot) -> dict[str, str]:
    """Return ringsync's properties of a Delta table, without their prefix."""
    return own_properties(table.metadata.get("configuration") or {})


def check_table_id(uri: str, found: Mapping[str, str], table: TableSchema) -> None:
    """Check that ``uri`` holds a replica of this very table, of any schema.

    :param found: ringsync's properties of the Delta table
    :raises ReplicaMismatchError: the replica belongs to another table
    """
    if "table_id" not in found:
        raise ReplicaMismatchError(
            f"{uri} has none of ringsync's properties any more: somebody has replaced it. Trigger bootstrap_table to "
            "rebuild the replica"
        )
    if found["table_id"] != table.table_id:
        raise ReplicaMismatchError(
            f"{uri} is the replica of table id {found['table_id']}, but {table.full_name} now has {table.table_id}: "
            "the table was dropped and created again. Trigger bootstrap_table to rebuild the replica"
        )


def check_same_schema(uri: str, found: Mapping[str, str], table: TableSchema) -> None:
    """Check that ``uri`` holds the replica of this table with this schema.

    :param found: ringsync's properties of the Delta table
    :raises ReplicaMismatchError: the replica belongs to another table
    :raises SchemaChangedError: it has another version of the schema
    """
    check_table_id(uri, found, table)
    if found.get("schema_digest") != table.digest:
        raise SchemaChangedError(
            f"the schema of {table.full_name} changed since the replica {uri} was made: it follows with the next pass, "
            "or with the next run of replica_merge; a replica of selected columns needs bootstrap_table again"
        )


def check_columns(
    uri: str, found: DeltaSnapshot, table: TableSchema, schema_of: Callable[[TableSchema], pa.Schema]
) -> None:
    """Check that a Delta table has the columns that ringsync has given it, in any order.

    :param table: the version of the table's schema that the Delta table has
    :param schema_of: function that gives the columns: of base or changes
    :raises ReplicaWaitsError: somebody has changed the columns
    """
    theirs = found.metadata["schemaString"]
    checked = hash((theirs, properties_of(found).get("schema_digest"), schema_of))
    if checked in _OURS:
        return
    if name := columns_differ(theirs, from_arrow_schema(schema_of(table)).json()):
        raise ReplicaWaitsError(
            f"{uri}: somebody has changed the column {name}: the columns of a replica are those of its table, so keep "
            f"your own in another table (docs/replica.md). Passes wait. Run in Spark: {restored(f'delta.`{uri}`')}"
        )
    _OURS.add(checked)


def check_readable(uri: str, found: Mapping[str, str], columns: Collection[str], table: TableSchema) -> None:
    """Check that rows of one version of a table can be read under another by the names of their columns.

    :param found: ringsync's properties of the Delta table
    :param columns: names of the Delta table's columns
    :raises SchemaChangedError: a key column was renamed, a column was dropped and added again, or columns have other
        names
    """
    names = lake_names(table)
    has_keys = all(names[column.name] in columns for column in table.key_columns)
    missing = [name for name in names.values() if name not in columns]
    reason = "its properties ringsync.key_columns and ringsync.dropped are gone"
    if found.get("schema_digest") == table.digest:
        if not missing:
            return
        reason = f"there is no column {missing[0]}: the table's history knows its name in the lake (as_recorded)"
    elif {"key_columns", "dropped"} <= found.keys():
        drops, had = {gone.name: gone.dropped_at for gone in table.dropped}, json.loads(found["dropped"])
        there = [name for name, in_lake in names.items() if in_lake in columns]
        again = [name for name in there if drops.get(name) != had.get(name)]
        if not has_keys or json.loads(found["key_columns"]) != [column.name for column in table.key_columns]:
            reason = "a key column was renamed"
        elif again:
            reason = f"the column {again[0]} was dropped and added again"
        else:
            return
    raise SchemaChangedError(
        f"{uri} has another version of the schema of {table.full_name} than the one given, and cannot be read as that "
        f"one: {reason}. Read the table's schema again, or wait until replica_merge has written the base again; a "
        "replica of selected columns needs bootstrap_table again"
    )


def replaced_table(before: DeltaSnapshot, table: TableSchema) -> dict[str, Any] | None:
    """Find the former table of the same name, if the base is still the replica of that table.

    :returns: ``table_id`` of the former table, and the Delta ``version`` under which its replica stays readable until
        its files are removed; None: there is no base, or it is this table's own
    """
    found = properties_of(before)
    if before.version < 0 or found.get("table_id") == table.table_id:
        return None
    return {"table_id": found.get("table_id", "unknown"), "version": before.version}


def replace_base(
    store: ObjectStore,
    table: TableSchema,
    before: DeltaSnapshot,
    files: Sequence[DataFile],
    *,
    as_of_us: int,
    properties: Mapping[str, str],
    transaction: str,
    now_ms: int,
    from_pass: int = 1,
    deletion_vectors: bool = True,
) -> int:
    """Replace the base's files by these, in one commit. Readers see the old version until then.

    :param before: the base as :func:`ringsync.replica.delta_log.read_snapshot` gave it
    :param as_of_us: µs; the files may or may not contain cells written later
    :param properties: further properties, stored as ``ringsync.<name>``
    :param transaction: application id of the Delta transaction; the base takes each only once
    :param from_pass: number of the first pass whose changes may be missing from these files
    :param deletion_vectors: whether later writers may mark rows deleted, unless somebody has forbidden it in the table;
        if not, repairs rewrite whole files
    :returns: the Delta version
    :raises ConcurrentCommitError: another writer has committed since ``before``
    """
    ours = {
        **identity(table),
        "as_of_us": str(as_of_us),
        "from_pass": str(from_pass),
        "base": transaction,
        "read_until_us": str(now_ms * 1000),
        **properties,
    }
    if before.version >= 0:  # DROP FEATURE unsets the property
        deletion_vectors &= is_on(before.configuration, "delta.enableDeletionVectors")
        deletion_vectors &= "deletionVectors" in writer_features(before.protocol)
    return replace_all(
        store,
        base_folder(table.keyspace, table.name),
        before,
        files,
        schema=from_arrow_schema(row_image_schema(table)).json(),
        properties={PROPERTY_PREFIX + name: value for name, value in ours.items()}
        | ({} if deletion_vectors else {"delta.enableDeletionVectors": "false"}),
        defaults={"delta.enableDeletionVectors": "true", "delta.dataSkippingStatsColumns": "token"},
        transaction=transaction,
        now_ms=now_ms,
        deletion_vectors=deletion_vectors,
        also={MERGE: before.version + 1},
    )
