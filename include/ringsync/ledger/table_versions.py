"""The versions of each table, and the ids of its columns: ``schemas/<table id>/<number>.json``, each put once.

If a table that was followed has no cdc any more, there is also ``cdc_ended/<table id>.json``.

A process that finds a table changed since its latest version puts the next version. Nodes learn of an ``ALTER TABLE``
at different moments, so a table may get more versions than it had. Column ids are never used twice, so rows of all
versions are read correctly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ringsync.changes.identity import TableVersion
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import TableSchema
from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, StorageError

_ENDED = "cdc_ended/"


class TableVersionError(StorageError):
    """A table's version is damaged, so its columns are unknown; the message says what to do."""


def latest_version(store: ObjectStore, table_id: str) -> TableVersion | None:
    """Read the newest version of a table; None: the table has none yet.

    :param table_id: 32 hexadecimal digits
    :raises TableVersionError: the version is damaged
    """
    keys = [stat.key for stat in store.list(_folder(table_id))]
    if not keys:
        return None
    try:
        return version_from(json.loads(store.get(keys[-1])))
    except (ChecksumError, AttributeError, ValueError, KeyError, TypeError) as error:
        raise TableVersionError(
            f"{keys[-1]} cannot be read ({type(error).__name__}: {error}): restore it; or, if the table was dropped, "
            f"remove {_folder(table_id)}, which gives up its unpublished rows"
        ) from error


def version_of(store: ObjectStore, table: TableSchema, known: TableVersion | None = None) -> TableVersion:
    """Return the version of a table's present schema; put it if it is new.

    :param known: version that the caller knows; if the table still matches it, the store is not read
    :raises TableVersionError: the table's newest version is damaged
    """
    if known is not None and known.table == table:
        return known
    while True:
        latest = latest_version(store, table.table_id)
        if latest is not None and latest.table == table:
            return latest
        following = latest.followed_by(table) if latest else TableVersion.first(table)
        try:
            key = f"{_folder(table.table_id)}{following.number:06}.json"
            store.put(key, json.dumps(version_document(following)).encode(), if_absent=True)
        except AlreadyExistsError:
            continue
        return following


def version_document(version: TableVersion) -> dict[str, Any]:
    """Write a version as JSON values, for :func:`version_from`."""
    return {"number": version.number, "columns_by_id": version.names, "table": describe(version.table)}


def version_from(document: Mapping[str, Any]) -> TableVersion:
    """Read a version from JSON values (:func:`version_document`)."""
    number, names, table = (document[name] for name in ("number", "columns_by_id", "table"))
    return TableVersion(from_description(table), number, tuple(names))


class CdcEnded:
    """The times when followed tables were first seen without cdc. Rows logged before are still published."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._followed = {stat.key.split("/")[1] for stat in store.list("schemas/")}
        self._ended: dict[str, int] = {
            stat.key.removeprefix(_ENDED).removesuffix(".json"): int(json.loads(store.get(stat.key))["at_ms"])
            for stat in store.list(_ENDED)
        }

    def begins(self, table_id: str) -> None:
        """Record that the table has cdc."""
        self._followed.add(table_id)
        if self._ended.pop(table_id, None) is not None:
            self._store.delete(f"{_ENDED}{table_id}.json")

    def at_ms(self, table_id: str, now_ms: int) -> int | None:
        """Return when a table was first seen without cdc, ms since the epoch; None: it was never followed."""
        if table_id not in self._followed:
            return None
        if table_id not in self._ended:
            key = f"{_ENDED}{table_id}.json"
            with suppress(AlreadyExistsError):
                self._store.put(key, json.dumps({"at_ms": now_ms}).encode(), if_absent=True)
            self._ended[table_id] = int(json.loads(self._store.get(key))["at_ms"])
        return self._ended[table_id]


def _folder(table_id: str) -> str:
    return f"schemas/{table_id}/"
