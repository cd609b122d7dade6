"""The base table of a replica, without Spark: which table it mirrors, and how it is replaced by a bootstrap's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.pandas.types import from_arrow_schema

import ringsync
from ringsync.images.schema import row_image_schema
from ringsync.replica.delta_log import DataFile, DeltaSnapshot, replace_all
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

PROPERTY_PREFIX = "ringsync."


class ReplicaMismatchError(Exception):
    """What lies in the replica's folder is not the replica of this table with this schema."""


def replica_folder(keyspace: str, table: str) -> str:
    """Key of the replica's folder in the object store."""
    return f"replica/{keyspace}/{table}"


def changes_folder(keyspace: str, table: str) -> str:
    """Key of the folder of the table of changes in the object store."""
    return f"{replica_folder(keyspace, table)}/changes"


def base_folder(keyspace: str, table: str) -> str:
    """Key of the base table's folder in the object store."""
    return f"{replica_folder(keyspace, table)}/base"


def transaction_of(bootstrap_id: str) -> str:
    """The transaction of a bootstrap's commit: the base takes each only once, and tells which version it made."""
    return f"bootstrap-{bootstrap_id}"


def identity(table: TableSchema) -> dict[str, str]:
    """The properties by which a replica is recognised, without their prefix."""
    return {
        "table": table.full_name,
        "table_id": table.table_id,
        "schema_digest": table.digest,
        "version": ringsync.__version__,
    }


def own_properties(configuration: Mapping[str, str]) -> dict[str, str]:
    """Our own of a Delta table's properties, without their prefix."""
    return {k.removeprefix(PROPERTY_PREFIX): v for k, v in configuration.items() if k.startswith(PROPERTY_PREFIX)}


def check_table_id(uri: str, found: Mapping[str, str], table: TableSchema) -> None:
    """Look whether what lies at ``uri`` is a replica of this very table, whatever schema it had.

    :param found: the properties that the table has
    :raises ReplicaMismatchError: it is not
    """
    if found.get("table_id") != table.table_id:
        raise ReplicaMismatchError(
            f"{uri} is the replica of table id {found.get('table_id', 'unknown')}, but {table.full_name} has "
            f"{table.table_id} now: it was dropped and created again. Trigger bootstrap_table, which makes the replica "
            "anew"
        )


def check_same_schema(uri: str, found: Mapping[str, str], table: TableSchema) -> None:
    """Look whether what lies at ``uri`` is the replica of this table with this schema.

    :param found: the properties that the table has
    :raises ReplicaMismatchError: it is not
    """
    check_table_id(uri, found, table)
    if found.get("schema_digest") != table.digest:
        raise ReplicaMismatchError(
            f"the schema of {table.full_name} changed since the replica {uri} was made: trigger bootstrap_table again"
        )


def replaced_table(before: DeltaSnapshot, table: TableSchema) -> dict[str, Any] | None:
    """Which table had this table's name before, if the base still is its replica, and the Delta version under which it
    stays readable until its files are removed.

    :returns: ``table_id`` and ``version``; None: there is no base, or it is this table's own
    """
    found = own_properties(before.metadata.get("configuration") or {})
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
    """Make the base consist of these files, in one commit; readers see the old version until then.

    :param before: what the base was, see :func:`ringsync.replica.delta_log.read_snapshot`
    :param as_of_us: µs; cells written later may or may not be in the files
    :param properties: further properties, stored as ``ringsync.<name>``
    :param transaction: the base takes each only once
    :param now_ms: ms since the epoch
    :param from_pass: the first pass of the sync that these files may lack something of
    :param deletion_vectors: off for readers that do not know them; repairs then rewrite whole files
    :returns: the Delta version
    :raises ConcurrentCommitError: somebody has committed since ``before``
    """
    own = {
        **identity(table),
        "as_of_us": str(as_of_us),
        "from_pass": str(from_pass),
        "base": transaction,
        "read_until_us": str(now_ms * 1000),
        **properties,
    }
    return replace_all(
        store,
        base_folder(table.keyspace, table.name),
        before,
        files,
        schema=from_arrow_schema(row_image_schema(table)).json(),
        properties={
            "delta.enableDeletionVectors": str(deletion_vectors).lower(),
            "delta.dataSkippingStatsColumns": "token",
            **{PROPERTY_PREFIX + name: value for name, value in own.items()},
        },
        transaction=transaction,
        now_ms=now_ms,
        deletion_vectors=deletion_vectors,
    )
