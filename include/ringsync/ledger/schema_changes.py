"""The log of schema changes: ``schema_changes/<number>.json``, each put once, without gaps.

A change has what differs from the schema after the change before, and the statements that make it. The messages of the
topic ``<server>`` are made of it and of nothing else, so whoever makes them makes the same. Every
:data:`WHOLE_EVERY` changes, one has the whole schema, so that a reader begins there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringsync.schema.whole import WholeSchema, applied, difference
from ringsync.schema.whole_to_cql import Statement, whole_statements
from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, StorageError

_FOLDER = "schema_changes/"
WHOLE_EVERY = 100


class SchemaChangeError(StorageError):
    """A schema change is damaged; the message says what to do."""


@dataclass(frozen=True)
class SchemaChange:
    """A change of the schema, or its first reading.

    :ivar number: from 1
    :ivar found_ms: when it was found, ms since the epoch
    :ivar snapshot: whether it is the schema that was there at first
    :ivar hostname: node that was asked
    :ivar ringsync: version of ringsync that found it
    :ivar statements: what changed, in an order in which it can be executed
    :ivar versions: newest version of each changed table, by keyspace and full name
    """

    number: int
    found_ms: int
    snapshot: bool
    hostname: str
    ringsync: str
    statements: tuple[Statement, ...]
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class SchemaLog:
    """The log, read to its end by :meth:`catch_up`.

    :ivar number: number of the last change that was read; 0: none
    :ivar schema: schema after it
    :ivar told: newest version of each table that a change named, by full name
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.number = 0
        self.schema = WholeSchema()
        self.told: dict[str, int] = {}

    def catch_up(self) -> None:
        """Read the changes that were added since, by whomever.

        :raises SchemaChangeError: a change is damaged
        """
        if self.number == 0:
            numbers = change_numbers(self._store)
            self.number = max(0, (len(numbers) - 1) // WHOLE_EVERY * WHOLE_EVERY)
        while (document := _document(self._store, self.number + 1)) is not None:
            try:
                base = WholeSchema() if "whole" in document else self.schema
                schema = applied(base, document.get("whole", document["changed"]))
                told = {**self.told, **document.get("told", {}), **_by_name(document["versions"])}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise _damaged(self.number + 1, error) from error
            self.number, self.schema, self.told = self.number + 1, schema, told

    def add(
        self,
        schema: WholeSchema,
        versions: Mapping[str, Mapping[str, int]],
        *,
        found_ms: int,
        hostname: str,
        ringsync: str,
    ) -> bool:
        """Add the change to a schema that was read after the log was caught up with.

        :param versions: :attr:`SchemaChange.versions`
        :returns: False: another process has added one: catch up, and read the schema anew
        """
        number, told = self.number + 1, {**self.told, **_by_name(versions)}
        whole = {"whole": difference(WholeSchema(), schema), "told": told}
        document = {
            "number": number,
            "found_ms": found_ms,
            "snapshot": number == 1,
            "hostname": hostname,
            "ringsync": ringsync,
            "statements": [[one.keyspace, one.ddl] for one in whole_statements(self.schema, schema)],
            "versions": versions,
            "changed": difference(self.schema, schema),
            **(whole if number % WHOLE_EVERY == 1 else {}),
        }
        try:
            self._store.put(_key(number), json.dumps(document).encode(), if_absent=True)
        except AlreadyExistsError:
            return False
        self.number, self.schema, self.told = number, schema, told
        return True


def _by_name(versions: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: number for tables in versions.values() for name, number in tables.items()}


def change_numbers(store: ObjectStore) -> list[int]:
    """List the numbers of all changes."""
    names = (stat.key.removeprefix(_FOLDER).removesuffix(".json") for stat in store.list(_FOLDER))
    return sorted(int(name) for name in names if name.isdecimal())


def schema_change(store: ObjectStore, number: int) -> SchemaChange | None:
    """Read a change; None: there is none yet.

    :raises SchemaChangeError: it is damaged
    """
    document = _document(store, number)
    if document is None:
        return None
    try:
        names = ("number", "found_ms", "snapshot", "hostname", "ringsync")
        statements = tuple(Statement(keyspace, ddl) for keyspace, ddl in document["statements"])
        facts = {name: document[name] for name in names}
        return SchemaChange(**facts, statements=statements, versions=document["versions"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(number, error) from error


def _document(store: ObjectStore, number: int) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(store.get(_key(number)))
    except NotFoundError:
        return None
    except (ChecksumError, ValueError) as error:
        raise _damaged(number, error) from error
    return document


def _damaged(number: int, error: Exception) -> SchemaChangeError:
    return SchemaChangeError(
        f"{_key(number)} cannot be read ({type(error).__name__}: {error}): restore it. The versions of tables go on, "
        "but no schema change is published until then"
    )


def _key(number: int) -> str:
    return f"{_FOLDER}{number:012}.json"
