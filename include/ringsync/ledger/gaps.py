"""Gaps: segments that were removed from a node before all of them was staged or archived. And parts of Scylla's CDC
logs that have expired before they were read, and times in which a table was not followed.

Cassandra does that with ``cdc_block_writes: false`` when ``cdc_raw`` is full, and so does whoever wipes the folder.
Which segments wait to be read is kept in ``staging/unread/<node>.json``; a gap is ``gaps/<node>/<segment>.json`` until
each of its tables was verified since (``verified/<table id>/<ms>.json``), or somebody has acknowledged it: then it is
``acknowledged/<node>/<segment>.json``, with the reason.

The stage only notes gaps. Whoever tells of them judges all of them in one look: :class:`Gaps` reads each once, and
:class:`Judge` lists once what was verified and what was dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.dropped_tables import all_dropped
from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, get_json, list_named

_GAPS, _VERIFIED, _UNREAD, _ACKNOWLEDGED = "gaps/", "verified/", "staging/unread/", "acknowledged/"

TABLES_NAMED = 5
"""Tables that the text of a gap names at most."""

NOT_FOLLOWED = "tables"
"""In place of a node's id in gaps of tables that were not followed for a time."""


@dataclass(frozen=True)
class Gap:
    """A segment that is gone unread, a part of a CDC log (``node``: :data:`ringsync.ledger.database.CDC_LOGS`), or a
    time in which a table was not followed (``node``: :data:`NOT_FOLLOWED`).

    :ivar node: host id
    :ivar segment: its name; of a CDC log or a table, a name of the part
    :ivar since_ms: all that the node had synced at this moment was staged, ms since the epoch; 0: unknown
    :ivar found_ms: when it was missed; of a CDC log or a table, the first write time that is there
    :ivar tables: names of the tables whose changes may have been in it, by id
    :ivar ranges: token ranges (start, end] that the node had replicas of; none: it has left the ring
    """

    node: str
    endpoint: str
    segment: str
    since_ms: int
    found_ms: int
    tables: Mapping[str, str]
    ranges: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """Key of the gap in the object store."""
        return f"{_GAPS}{self.node}/{self.segment}.json"

    @property
    def loss(self) -> str:
        """Say what is missing, without a full stop."""
        since = _time(self.since_ms) if self.since_ms else "an unknown time"
        if self.node == CDC_LOGS:
            (name,) = self.tables.values()
            return (
                f"what was written from {since} to {_time(self.found_ms)} cannot be read from the CDC log of {name} "
                f"({self.key}): its TTL is over, or ScyllaDB describes no streams of that time"
            )
        if self.node == NOT_FOLLOWED:
            (name,) = self.tables.values()
            return (
                f"what was written to {name} from {since} to {_time(self.found_ms)} is in no stream ({self.key}): the "
                "table had no cdc then, or sync.include and sync.exclude left it out"
            )
        where = f"{len(self.ranges):,} token ranges" if self.ranges else "its token ranges"
        return (
            f"{self.segment} was removed from its cdc_raw before it was read: changes that only this node had logged "
            f"from {since} to {_time(self.found_ms)}, in {where} ({self.key}), are missing"
        )

    def describe(self, unverified: Collection[str]) -> str:
        """Say what is missing, and what to do.

        :param unverified: names of the tables whose replicas were not verified since
        """
        tables, command = sorted(unverified), "cdcservice verify --repair --table"
        commands = "; ".join(f"{command} {name}" for name in tables[:TABLES_NAMED])
        if more := len(tables[TABLES_NAMED:]):
            commands += f"; and so on for {more:,} more tables. {command} '*.*' corrects all"
        remedy = (
            f"Correct the replicas: {commands}"
            if commands
            else "No replica of its tables is known, so there is nothing to correct: bootstrap them, or take note of "
            f'it: cdcservice gaps acknowledge {self.key} --reason "…"'
        )
        return f"{self.loss}. {remedy}"


def note_gap(store: ObjectStore, gap: Gap) -> None:
    """Record a gap. What was recorded first stays."""
    with suppress(AlreadyExistsError):
        store.put(gap.key, json.dumps(asdict(gap)).encode(), if_absent=True)


class Gaps:
    """The gaps of all nodes. Each is read once: it never changes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, tuple[str, Gap]] = {}

    def look(self) -> dict[str, Gap | None]:
        """Return the gaps that there are, by their keys; None: the object is damaged.

        :raises StorageError: the store cannot be used
        """
        there = {stat.key: stat.version for stat in list_named(self._store, _GAPS, r"[^/ ]+/[^/ ]+\.json")}
        self._known = {key: known for key, known in self._known.items() if known[0] == there.get(key)}
        found: dict[str, Gap | None] = {}
        for key, version in there.items():
            if key in self._known:
                found[key] = self._known[key][1]
                continue
            try:
                if (document := get_json(self._store, key)) is None:
                    continue  # it was closed just now
                gap = Gap(**{**document, "ranges": tuple(map(tuple, document["ranges"]))})
                # What cannot be told of, or judged, is damaged, whatever fields it has.
                gap.describe([".".join(parse_table_name(name)) for name in gap.tables.values()])
            except (ChecksumError, ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError):
                found[key] = None
            else:
                found[key], self._known[key] = gap, (version, gap)
        return found


@dataclass(frozen=True)
class Followed:
    """A table that is followed now.

    :ivar has_replica: whether it certainly has one; False: maybe not
    """

    table_id: str
    has_replica: bool


class Judge:
    """Tells what gaps wait for. It asks the store once for all gaps, and once for a table of which nobody has told.

    :param followed: the tables that are followed now, by name
    :param has_replica: looks up whether there is a replica of a table of this name
    :raises StorageError: the store cannot be used; so do the methods
    """

    def __init__(
        self,
        store: ObjectStore,
        followed: Mapping[str, Followed],
        has_replica: Callable[[str], bool],
    ) -> None:
        self._followed, self._look_up = followed, has_replica
        self._there: dict[str, bool] = {}
        self._verified_ms = _verified(store)
        self._dropped = all_dropped(store)

    def unverified(self, gap: Gap) -> list[str] | None:
        """Return the names of the tables whose replicas were not verified since a gap was found; None: it is over.

        Without any verification it is not over, though there be no replica: somebody has to take note of it.
        """
        since = {table_id for table_id in gap.tables if self._verified_ms.get(table_id, 0) > gap.found_ms}
        late = {
            name for table_id, name in gap.tables.items() if table_id not in since and not self._is_gone(table_id, name)
        }
        waiting = [name for name in sorted(late) if self._has_replica(name)]
        if not waiting and since:
            waiting = [name for name in sorted(late) if self._is_there(name)]  # one may have been made just now
            return waiting or None
        return waiting

    def are_gone(self, gap: Gap) -> bool:
        """Tell whether all tables of a gap were dropped: it is no problem, until one of them is created again with its
        id."""
        return bool(gap.tables) and all(self._is_gone(table_id, name) for table_id, name in gap.tables.items())

    def _is_gone(self, table_id: str, name: str) -> bool:
        """Tell whether a table was dropped: it was found so, or its name is that of a table that was created later."""
        now = self._followed.get(name)
        return table_id in self._dropped or (now is not None and 0 < _created(table_id) < _created(now.table_id))

    def _has_replica(self, name: str) -> bool:
        return self._followed[name].has_replica if name in self._followed else self._is_there(name)

    def _is_there(self, name: str) -> bool:
        if name in self._followed and self._followed[name].has_replica:
            return True
        if name not in self._there:
            self._there[name] = self._look_up(name)
        return self._there[name]


def close_copied(store: ObjectStore, table_id: str, begun_ms: Callable[[], int]) -> None:
    """Forget the times in which a table was not followed, now that all of it was copied. A gap stays that was found
    after the copy began, which may lack what was written until then; and one that is damaged.

    :param begun_ms: function that finds out when the copy began, ms since the epoch; 0: nobody knows
    """
    stats = list_named(store, f"{_GAPS}{NOT_FOLLOWED}/", rf"{re.escape(table_id)}-\d+-\d+\.json")
    began_ms = begun_ms() if stats else 0
    for stat in stats:
        with suppress(ChecksumError, ValueError, TypeError, KeyError):
            if (document := get_json(store, stat.key)) is not None and document["found_ms"] <= began_ms:
                close_gap(store, stat.key)


def close_gap(store: ObjectStore, key: str) -> None:
    """Forget a gap that is over."""
    store.delete(key)


@dataclass(frozen=True)
class Acknowledged:
    """A gap of which somebody has taken note, and which stays as it is.

    :ivar by: name of the user; empty: unknown
    :ivar at_ms: when that was, ms since the epoch
    :ivar gap: the gap as JSON values; None: its object was damaged
    """

    key: str
    reason: str
    by: str
    at_ms: int
    gap: Mapping[str, Any] | None


def acknowledge(store: ObjectStore, noted: Acknowledged) -> None:
    """Keep a gap with the reason why it is not repaired. :func:`close_gap` comes after that."""
    store.put(f"{_ACKNOWLEDGED}{noted.key.removeprefix(_GAPS)}", json.dumps(asdict(noted)).encode())


def acknowledged(store: ObjectStore) -> list[Acknowledged]:
    """Read the gaps that were acknowledged; those that are damaged are left out."""
    found = []
    for stat in list_named(store, _ACKNOWLEDGED, r"[^/]+/[^/]+\.json"):
        with suppress(ChecksumError, ValueError, TypeError):
            found.append(Acknowledged(**(get_json(store, stat.key) or {})))
    return sorted(found, key=lambda noted: noted.at_ms)


def gap_key(name: str) -> str:
    """Return the key of a gap's object, of which a part may be left out: ``<node>/<segment>`` is enough."""
    return f"{_GAPS}{name.removeprefix(_GAPS).removesuffix('.json')}.json"


def note_verified(store: ObjectStore, table_id: str, began_ms: int) -> None:
    """Record that a verification of a whole table, which began then, has found it equal."""
    folder = f"{_VERIFIED}{table_id}/"
    store.put(f"{folder}{began_ms:013}.json", b"{}")
    for key in sorted(stat.key for stat in list_named(store, folder, r"\d{13}\.json"))[:-1]:
        store.delete(key)


def _verified(store: ObjectStore) -> dict[str, int]:
    """List when tables were last found equal, ms since the epoch, by their ids."""
    keys = sorted(stat.key for stat in list_named(store, _VERIFIED, r"[0-9a-f]{32}/\d{13}\.json"))
    names = (key.removesuffix(".json").split("/") for key in keys)
    return {table_id: int(moment) for _, table_id, moment in names}  # the latest of each comes last


def _created(table_id: str) -> int:
    """Return when a table was created, as its id tells; 0: it does not (``WITH ID``)."""
    with suppress(ValueError):
        if (identity := UUID(table_id)).version == 1:
            return identity.time
    return 0


def put_unread(store: ObjectStore, node: str, segments: Mapping[int, str]) -> None:
    """Record which segments of a node wait to be read, so that their loss is noticed later."""
    store.put(
        f"{_UNREAD}{node}.json", json.dumps({str(identity): name for identity, name in segments.items()}).encode()
    )


def get_unread(store: ObjectStore, node: str) -> dict[int, str]:
    """Read which segments of a node waited to be read; nothing if that is not known."""
    with suppress(ChecksumError, ValueError, AttributeError):
        return {int(identity): str(name) for identity, name in (get_json(store, f"{_UNREAD}{node}.json") or {}).items()}
    return {}


def _time(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
