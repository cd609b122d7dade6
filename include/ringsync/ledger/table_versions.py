"""The history of each table, and the ids of its columns: ``schemas/<keyspace>.<table>/<number>.json``, each put once.

Whoever finds a table changed puts its next version. Versions are numbered by the table's name: a table that is dropped
and created again goes on counting. Messages name their version, and so do the schemas of their topic.
``schemas/<table id>.json``, which is put first, says under which name a table's history is. If a followed table has no
cdc any more, there is also ``cdc_ended/<table id>.json``. ``cdc_begun/<table id>.json`` says that it was followed.

Column ids are never used twice in a table, so rows of all versions are read correctly. Nodes learn of an ``ALTER
TABLE`` at different moments: a node that is behind shows an earlier version, which it is then known by.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ringsync.changes.columns import columns_of
from ringsync.changes.identity import TableVersion
from ringsync.cql.identifiers import portable_name
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import TableSchema
from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, StorageError, get_json, list_named

_BEGUN = "cdc_begun/"
_VERSION = re.compile(r"/[0-9]{6,}\.json$")
"""Of other objects beside versions, e.g. a damaged one that somebody has set aside, nothing is read."""


Places = dict[str, int]
"""The histories of a table by their names, the latest last, and the first number that a version of it may have there: a
damaged version of an earlier table of this name is then not read. Mostly there is one."""


class TableVersionError(StorageError):
    """A table's version is damaged, so its columns are unknown; the message says what to do."""


@dataclass(frozen=True)
class HistoryEntry:
    """A version in the history of a table.

    :ivar found_ms: when ringsync found it, ms since the epoch
    :ivar form_of: number of the version whose messages got another form, if that made this version; 0: not so
    """

    version: TableVersion
    found_ms: int
    form_of: int = 0

    @property
    def since_us(self) -> int:
        """Since when the table has this schema, µs since the epoch; if nobody knows, when it was found."""
        return self.version.table.since_us or self.found_ms * 1000


def history_named(store: ObjectStore, name: str, first: int = 1) -> Iterator[HistoryEntry | TableVersionError]:
    """Read the versions of a history, in their order; of one that is damaged, what is wrong with it.

    :param name: one of :func:`names_of_histories`
    :param first: number of the first one
    """
    for key in _since(_history(store, name), first):
        try:
            yield _read(store, key)
        except TableVersionError as error:
            yield error


def names_of_histories(store: ObjectStore) -> list[str]:
    """List the tables that have a history, by the names of its folders (:func:`portable_name`)."""
    return sorted(names_of_versions(store))


def names_of_versions(store: ObjectStore) -> dict[str, list[int]]:
    """List the numbers of all versions, by the names of the histories' folders (:func:`portable_name`)."""
    found: dict[str, list[int]] = {}
    for stat in store.list("schemas/"):
        name = stat.key.split("/")[1]
        if "." in name and _VERSION.search(stat.key):
            found.setdefault(name, []).append(_number(stat.key))
    return {name: sorted(numbers) for name, numbers in found.items()}


def version_entries(store: ObjectStore, name: str, first: int) -> list[HistoryEntry]:
    """Read the versions in a history's folder from this number on.

    :raises TableVersionError: a version is damaged
    """
    return [_read(store, key) for key in _since(_history(store, name), first)]


def versions_of(store: ObjectStore, table: TableSchema) -> list[TableSchema]:
    """Read all versions of a table, in their order.

    :raises TableVersionError: a version is damaged, which is not of an earlier table of this name
    """
    places = _places(store, table.table_id) or {_name(table): 1}
    entries = (entry for name, first in places.items() for entry in version_entries(store, name, first))
    return [entry.version.table for entry in entries if entry.version.table_id == table.table_id]


def latest_version(store: ObjectStore, table_id: str) -> TableVersion | None:
    """Read the newest version of a table; None: the table has none yet.

    :param table_id: 32 hexadecimal digits
    :raises TableVersionError: the version is damaged
    """
    return _newest(store, table_id, _places(store, table_id))


def lost_version(store: ObjectStore, table_id: str) -> TableVersion | None:
    """Find the newest version of a table whose place was lost. It may read all histories.

    :raises TableVersionError: a version is damaged, which may be this table's
    """
    histories = (_newest_first(store, _history(store, name), table_id) for name in names_of_histories(store))
    return next((version for history in histories for version in history), None)


def version_of(store: ObjectStore, table: TableSchema, known: TableVersion | None = None) -> TableVersion:
    """Return the version of a table with this schema; put it if it is new.

    A selection of columns belongs to the table's latest version.

    :param known: version that the caller knows; if the table still matches it, the store is not read
    :raises TableVersionError: a version of the table is damaged
    """
    if known is not None and known.table == table:
        return known
    places = _open_history(store, table)
    while True:
        keys = _history(store, _name(table))
        latest = _latest(store, table, keys, places)
        found = latest and replace(latest, table=latest.with_past(table)) if table.is_selection else latest
        if found is None or found.table != table:
            found = (
                _earlier(store, _since(keys, places[_name(table)]), table, latest)
                or _in_between(table, latest)
                or _put_next(store, keys, table, latest)
            )
        if found is not None:
            return found


def as_recorded(store: ObjectStore, table: TableSchema) -> TableSchema:
    """Return a table as the cluster shows it with the names of columns that it had before, if it has a history.

    :raises TableVersionError: the version is damaged
    """
    latest = latest_version(store, table.table_id)
    return table if latest is None else latest.with_past(table)


def next_version(store: ObjectStore, version: TableVersion) -> TableVersion:
    """Return a later version for messages of this schema, which have another form now; put it if there is none.

    It repeats the table's latest schema, even if the caller does not know that yet.
    """
    places = _open_history(store, version.table)
    while True:
        keys = _history(store, _name(version.table))
        latest = _latest(store, version.table, keys, places) or version
        later = (_read(store, key) for key in reversed(_since(keys, version.number + 1)))
        found = next((entry.version for entry in later if _is_form_of(entry, version)), None)
        found = found or _put(store, keys, latest.followed_by(latest.table), form_of=version.number)
        if found is not None:
            return replace(found, table=version.table)


def _is_form_of(entry: HistoryEntry, version: TableVersion) -> bool:
    """Tell whether a later version can be named by messages of a version."""
    if entry.version.table_id != version.table_id:
        return False
    return entry.form_of == version.number or entry.version.table == version.table


def _open_history(store: ObjectStore, table: TableSchema) -> Places:
    """Make the history of a table known by the table's id, before its first version is put there."""
    places = _places(store, table.table_id)
    if _name(table) in places:
        return places
    keys = _history(store, _name(table))
    # If the place was lost, the table has versions. One that is damaged may be another table's.
    own = [key for key in keys if _is_of(store, key, table.table_id)]
    first = own[0] if own else None
    return _add_place(store, table, _number(first) if first else _number(keys[-1]) + 1 if keys else 1)


def _is_of(store: ObjectStore, key: str, table_id: str) -> bool:
    try:
        return _read(store, key).version.table_id == table_id
    except TableVersionError:
        return False


def _add_place(store: ObjectStore, table: TableSchema, first: int) -> Places:
    places = _places(store, table.table_id)
    if _name(table) not in places:
        places[_name(table)] = first
        store.put(_place(table.table_id), json.dumps({"histories": places}).encode())
    return places


def _places(store: ObjectStore, table_id: str) -> Places:
    key = _place(table_id)
    try:
        place = get_json(store, key)
        return {} if place is None else {str(name): int(first) for name, first in place["histories"].items()}
    except (ChecksumError, AttributeError, ValueError, KeyError, TypeError) as error:
        raise TableVersionError(
            f"{key} cannot be read ({type(error).__name__}: {error}): remove it, it is made again from the history"
        ) from error


def _latest(store: ObjectStore, table: TableSchema, keys: Sequence[str], places: Places) -> TableVersion | None:
    """Return the latest version of a table: of its present name, or else of an earlier one."""
    name = _name(table)
    found = next(_newest_first(store, _since(keys, places[name]), table.table_id), None)
    return found or _newest(store, table.table_id, {other: places[other] for other in places if other != name})


def _newest(store: ObjectStore, table_id: str, places: Places) -> TableVersion | None:
    histories = (_since(_history(store, name), places[name]) for name in reversed(places))
    return next((version for keys in histories for version in _newest_first(store, keys, table_id)), None)


def _since(keys: Sequence[str], number: int) -> list[str]:
    return [key for key in keys if _number(key) >= number]


def _earlier(
    store: ObjectStore, keys: Iterable[str], table: TableSchema, latest: TableVersion | None
) -> TableVersion | None:
    """Return the version that a node shows which is behind; None: the schema is new."""
    if latest is None or not 0 < table.since_us < latest.table.since_us:
        return None
    return next((version for version in _newest_first(store, keys, table.table_id) if version.table == table), None)


def _in_between(table: TableSchema, latest: TableVersion | None) -> TableVersion | None:
    """Return the latest version for a schema that nobody has seen in its time, which a node shows that is behind: it is
    no later version. None: the schema is new, or has a column that the latest version does not know."""
    if latest is None or not 0 < table.since_us < latest.table.since_us:
        return None
    knows_all = all(column.name in latest.names for column in columns_of(table))
    return replace(latest, table=latest.with_past(table)) if knows_all else None


def _put_next(
    store: ObjectStore, keys: Sequence[str], table: TableSchema, latest: TableVersion | None
) -> TableVersion | None:
    """Put the next version of a table; None: another process was faster.

    :param keys: history of the table's name, read before ``latest``
    :param latest: latest version of the table, maybe under another name
    """
    return _put(store, keys, latest.followed_by(table) if latest else TableVersion.first(table))


def _put(store: ObjectStore, keys: Sequence[str], version: TableVersion, form_of: int = 0) -> TableVersion | None:
    """Put a version at the end of a history, with a number that is no lower than its own."""
    version = replace(version, number=max(_number(keys[-1]) + 1 if keys else 1, version.number))
    document = {**version_document(version), "found_ms": int(time.time() * 1000), "form_of": form_of}
    try:
        store.put(_key(_name(version.table), version.number), json.dumps(document).encode(), if_absent=True)
    except AlreadyExistsError:
        return None
    return version


def _newest_first(store: ObjectStore, keys: Iterable[str], table_id: str) -> Iterator[TableVersion]:
    """Read the versions of one table in a history, each when it is asked for."""
    entries = (_read(store, key).version for key in sorted(keys, reverse=True))
    return (version for version in entries if version.table_id == table_id)


def _read(store: ObjectStore, key: str) -> HistoryEntry:
    try:
        document = json.loads(store.get(key))
        return HistoryEntry(version_from(document), int(document.get("found_ms", 0)), int(document.get("form_of", 0)))
    except (ChecksumError, AttributeError, ValueError, KeyError, TypeError) as error:
        raise TableVersionError(
            f"{key} cannot be read ({type(error).__name__}: {error}): restore it; or, if its table was dropped, remove "
            "it, which gives up the table's unpublished rows. Of a table that is there it has the ids of its columns"
        ) from error


def _history(store: ObjectStore, name: str) -> list[str]:
    return [stat.key for stat in store.list(f"schemas/{name}/") if _VERSION.search(stat.key)]


def _key(name: str, number: int) -> str:
    return f"schemas/{name}/{number:06}.json"


def _number(key: str) -> int:
    return int(key.rpartition("/")[2].removesuffix(".json"))


def _name(table: TableSchema) -> str:
    return portable_name(table.keyspace, table.name)


def _place(table_id: str) -> str:
    return f"schemas/{table_id}.json"


def version_document(version: TableVersion) -> dict[str, Any]:
    """Write a version as JSON values, for :func:`version_from`."""
    return {"number": version.number, "columns_by_id": version.names, "table": describe(version.table)}


def version_from(document: Mapping[str, Any]) -> TableVersion:
    """Read a version from JSON values (:func:`version_document`)."""
    number, names, description = (document[name] for name in ("number", "columns_by_id", "table"))
    return TableVersion(from_description(description), number, tuple(names))


class CdcBegun:
    """The tables that the sync has seen with cdc. What nodes have logged of others was written before that."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        keys = (stat.key for stat in list_named(store, _BEGUN, r"[^./ ]+\.json"))
        self._begun = {key.removeprefix(_BEGUN).removesuffix(".json") for key in keys}

    def __contains__(self, table_id: str) -> bool:
        return table_id in self._begun

    def begins(self, table_id: str, altered_ms: int) -> None:
        """Record that the table has cdc.

        :param altered_ms: when it was altered last, ms since the epoch
        """
        if table_id not in self._begun:
            with suppress(AlreadyExistsError):
                self._put(table_id, altered_ms, if_absent=True)
            self._begun.add(table_id)

    def begins_again(self, table_id: str, altered_ms: int) -> None:
        """Record that the table has cdc again, and that the gap of the time before is noted."""
        self._put(table_id, altered_ms)

    def altered_ms(self, table_id: str) -> int:
        """Return when the table was altered last before it got cdc, or got it again, ms since the epoch. What it had
        before is no gap, or is one that was noted. 0: that is damaged, so nobody knows."""
        with suppress(ChecksumError, ValueError, TypeError, KeyError):
            return int((get_json(self._store, f"{_BEGUN}{table_id}.json") or {})["altered_ms"])
        return 0

    def _put(self, table_id: str, altered_ms: int, *, if_absent: bool = False) -> None:
        data = json.dumps({"altered_ms": altered_ms}).encode()
        self._store.put(f"{_BEGUN}{table_id}.json", data, if_absent=if_absent)
