"""The dropped tables: ``dropped_tables/<keyspace>.<table>/<table id>.json``, as the schema updater found them gone."""

from __future__ import annotations

import json
from contextlib import suppress

from ringsync.cql.identifiers import portable_name
from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, list_named

_FOLDER = "dropped_tables/"


def mark_dropped(store: ObjectStore, keyspace: str, table: str, table_id: str, found_ms: int) -> None:
    """Record that a table is gone. What was recorded first stays.

    :param found_ms: when that was found, ms since the epoch
    """
    with suppress(AlreadyExistsError):
        store.put(_key(keyspace, table, table_id), json.dumps({"found_ms": found_ms}).encode(), if_absent=True)


def unmark_dropped(store: ObjectStore, keyspace: str, table: str, table_id: str) -> None:
    """Record that a table is there: it was created again with its old id."""
    store.delete(_key(keyspace, table, table_id))


def dropped_of(store: ObjectStore, keyspace: str, table: str) -> dict[str, int]:
    """Read which tables of this name were found dropped: times, ms since the epoch, by table id; 0: unreadable."""
    folder = _key(keyspace, table, "").removesuffix(".json")
    keys = [stat.key for stat in list_named(store, folder, r"[^./ ]+\.json")]
    return {key.rpartition("/")[2].removesuffix(".json"): _found_ms(store, key) for key in keys}


def all_dropped(store: ObjectStore) -> frozenset[str]:
    """List the ids of all tables that were found dropped."""
    stats = list_named(store, _FOLDER, r"[^/]+/[^./ ]+\.json")
    return frozenset(stat.key.rpartition("/")[2].removesuffix(".json") for stat in stats)


def _found_ms(store: ObjectStore, key: str) -> int:
    try:
        return int(json.loads(store.get(key))["found_ms"])
    except (ChecksumError, ValueError, KeyError, TypeError):
        return 0


def _key(keyspace: str, table: str, table_id: str) -> str:
    return f"{_FOLDER}{portable_name(keyspace, table)}/{table_id}.json"
