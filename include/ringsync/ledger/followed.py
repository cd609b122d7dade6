"""The tables that ``bucket_close`` follows to their end, planned or not: ``followed/<table id>.json``.

The object has content from before the table's first pass until the table is no longer planned and stream, replica and
Kafka have all its passes. Then it is emptied. So a run that begins after a table lost its ``cdc`` or was dropped knows
what is left to do.

It is emptied only if it still has the version that was read before the passes were read. Another process that makes
passes writes the object again after them, before it removes the rows that waited. So either these passes are seen, or
emptying fails.
"""

from __future__ import annotations

import json

from ringsync.storage.port import ObjectStore, VersionMismatchError, list_named

_FOLDER = "followed/"


def keep_following(store: ObjectStore, table_id: str) -> str:
    """Record that a table has or will have passes to publish everywhere. Repeating it is safe.

    :param table_id: 32 hexadecimal digits
    :returns: version of the object, for :func:`end_following`
    """
    return store.put(_key(table_id), json.dumps({"table_id": table_id}).encode()).version


def followed_tables(store: ObjectStore) -> dict[str, str]:
    """Read the versions of the followed tables' objects, by table id."""
    stats = list_named(store, _FOLDER, r"[^. ]+\.json")
    return {stat.key.removeprefix(_FOLDER).removesuffix(".json"): stat.version for stat in stats if stat.size}


def end_following(store: ObjectStore, table_id: str, version: str) -> bool:
    """Record that nothing is left to do for a table.

    :param version: version of the object, read before looking at the passes
    :returns: False: another process has made passes since
    """
    try:
        store.put(_key(table_id), b"", if_version=version)
    except VersionMismatchError:
        return False
    return True


def _key(table_id: str) -> str:
    return f"{_FOLDER}{table_id}.json"
