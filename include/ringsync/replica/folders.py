"""Where a replica is in the object store. Whoever only looks whether it is there loads nothing more."""

from __future__ import annotations


def replica_folder(keyspace: str, table: str) -> str:
    """Return the key of the replica's folder."""
    return f"replica/{keyspace}/{table}"


def changes_folder(keyspace: str, table: str) -> str:
    """Return the key of the changes table's folder."""
    return f"{replica_folder(keyspace, table)}/changes"


def base_folder(keyspace: str, table: str) -> str:
    """Return the key of the base table's folder."""
    return f"{replica_folder(keyspace, table)}/base"
