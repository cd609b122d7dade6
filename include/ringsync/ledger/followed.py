"""Which tables ``bucket_close`` follows to their end, planned or not: ``followed/<table id>.json``.

The object has content from before the first pass of a table until the table is not planned any more, and stream,
replica and Kafka have all its passes; then it is emptied. So a run that begins when a table has no ``cdc`` any more, or
is gone, knows what is left to do.

It is emptied only in the version that was seen before the passes were looked at. Whoever else has made passes writes it
anew behind them, and before the rows leave the place where they were: either that is seen, or the end is taken back.
"""

from __future__ import annotations

import json

from ringsync.storage.port import ObjectStore, VersionMismatchError

_FOLDER = "followed/"


def keep_following(store: ObjectStore, table_id: str) -> str:
    """Say that a table has passes that are to be followed up, or will have; again is fine.

    :param table_id: 32 hexadecimal digits
    :returns: the version of the object, for :func:`end_following`
    """
    return store.put(_key(table_id), json.dumps({"table_id": table_id}).encode()).version


def followed_tables(store: ObjectStore) -> dict[str, str]:
    """The versions of the objects of those that are followed, by table id."""
    return {
        stat.key.removeprefix(_FOLDER).removesuffix(".json"): stat.version for stat in store.list(_FOLDER) if stat.size
    }


def end_following(store: ObjectStore, table_id: str, version: str) -> bool:
    """Nothing is left to do for a table.

    :param version: the object's version before that was found
    :returns: False: somebody has made passes since
    """
    try:
        store.put(_key(table_id), b"", if_version=version)
    except VersionMismatchError:
        return False
    return True


def _key(table_id: str) -> str:
    return f"{_FOLDER}{table_id}.json"
