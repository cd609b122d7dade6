"""Gaps: segments that were removed from a node before all of them was staged or archived.

Cassandra does that with ``cdc_block_writes: false`` when ``cdc_raw`` is full, and so does whoever wipes the folder.
Which segments wait to be read is kept in ``staging/unread/<node>.json``; a gap is ``gaps/<node>/<segment>.json`` until
each of its tables was verified since (``verified/<table id>.json``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, get_json

_GAPS, _VERIFIED, _UNREAD = "gaps/", "verified/", "staging/unread/"


@dataclass(frozen=True)
class Gap:
    """A segment that is gone unread.

    :ivar node: host id
    :ivar since_ms: all that the node had synced at this moment was staged, ms since the epoch; 0: unknown
    :ivar found_ms: when it was missed
    :ivar tables: names of the tables that were followed then, by id
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

    def describe(self, unverified: Collection[str]) -> str:
        """Say what is missing, and what to do.

        :param unverified: names of the tables whose replicas were not verified since
        """
        since = _time(self.since_ms) if self.since_ms else "an unknown time"
        commands = "; ".join(f"cdcservice verify --repair --table {name}" for name in sorted(unverified))
        remedy = (
            f"Correct the replicas: {commands}" if commands else "There is no replica to correct: remove this object"
        )
        where = f"{len(self.ranges):,} token ranges" if self.ranges else "its token ranges"
        return (
            f"{self.segment} was removed from its cdc_raw before it was read: changes that only this node had logged "
            f"from {since} to {_time(self.found_ms)}, in {where} ({self.key}), are missing. {remedy}"
        )


def note_gap(store: ObjectStore, gap: Gap) -> None:
    """Record a gap. What was recorded first stays."""
    with suppress(AlreadyExistsError):
        store.put(gap.key, json.dumps(asdict(gap)).encode(), if_absent=True)


def open_gaps(store: ObjectStore, has_replica: Callable[[str, str], bool]) -> dict[str, list[str]]:
    """Read the gaps of all nodes, and forget those whose replicas were all verified since.

    :param has_replica: tells whether a table, by id and name, is there and has a replica
    :returns: sentences by host id
    """
    found: dict[str, list[str]] = {}
    for key, gap in all_gaps(store):
        node = key.split("/")[1]
        if gap is None:
            found.setdefault(node, []).append(f"{store.uri(key)} cannot be read: restore it")
            continue
        verified_ms = {table_id: _verified_ms(store, table_id) for table_id in gap.tables}
        late = [table_id for table_id, at_ms in verified_ms.items() if at_ms <= gap.found_ms]
        unverified = [gap.tables[table_id] for table_id in late if has_replica(table_id, gap.tables[table_id])]
        if unverified or len(late) == len(gap.tables):
            found.setdefault(node, []).append(gap.describe(unverified))
        else:
            store.delete(key)
    return found


def all_gaps(store: ObjectStore) -> Iterator[tuple[str, Gap | None]]:
    """Read the gaps of all nodes by their keys; None: the object is damaged.

    :raises StorageError: the store cannot be used
    """
    for stat in store.list(_GAPS):
        try:
            document = get_json(store, stat.key)
            if document is not None:
                yield stat.key, Gap(**{**document, "ranges": tuple(map(tuple, document["ranges"]))})
        except (ChecksumError, ValueError, TypeError, KeyError):
            yield stat.key, None


def note_verified(store: ObjectStore, table_id: str, began_ms: int) -> None:
    """Record that a verification of a whole table, which began then, has found it equal."""
    store.put(f"{_VERIFIED}{table_id}.json", json.dumps({"at_ms": began_ms}).encode())


def _verified_ms(store: ObjectStore, table_id: str) -> int:
    with suppress(ChecksumError, ValueError, TypeError, KeyError):
        if (document := get_json(store, f"{_VERIFIED}{table_id}.json")) is not None:
            return int(document["at_ms"])
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
