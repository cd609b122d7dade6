"""The whole history of a table."""

from __future__ import annotations

from ringsync.cql.identifiers import portable_name
from ringsync.ledger.table_versions import HistoryEntry, version_entries
from ringsync.storage.port import ObjectStore


def history_of(store: ObjectStore, keyspace: str, table: str) -> list[HistoryEntry]:
    """All versions of the tables that have, or had, this name, in their order."""
    return version_entries(store, portable_name(keyspace, table), 1)
