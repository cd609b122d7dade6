"""What the loops of the sync say of themselves, every few seconds, as objects under ``status/`` of the object store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringsync.storage.port import NotFoundError, ObjectStore

STALE_AFTER_S = 40.0
"""A loop that has said nothing for so many seconds does not work."""

STOP_KEY = "control/stop.json"
"""Whoever puts this object asks all loops to end after their present cycle."""

LATE_ROWS = "staging/late/"
"""Folder of change rows whose bucket was closed when they were read, until they are published."""

_ROUNDS = 3
"""From a loop to the next: staged rows go to ``bucket_close`` or ``out_of_sequence``, whose passes go to the former."""

Status = Mapping[str, Any]
"""One such object; ``at_ms`` says when it was put, in ms since the epoch."""


def read_statuses(store: ObjectStore) -> dict[str, Status]:
    """The status of each loop by ``<application>/<name>``, e.g. ``commitlog_stage/default``.

    :raises StorageError: the store cannot be read
    """
    found: dict[str, Status] = {}
    for stat in store.list("status/"):
        try:
            document = json.loads(store.get(stat.key))
        except NotFoundError:
            continue  # removed since it was listed
        found[stat.key.removeprefix("status/").removesuffix(".json")] = document
    return found


def read_status(store: ObjectStore, key: str) -> Status | None:
    """The status of one loop; None: it has said nothing yet.

    :param key: ``<application>/<name>``
    :raises StorageError: the store cannot be read
    """
    try:
        document: Status = json.loads(store.get(f"status/{key}.json"))
    except NotFoundError:
        return None
    return document


def age_s(status: Status, now_s: float) -> float:
    """Seconds since a loop has said this.

    :param now_s: seconds since the epoch
    """
    return max(0.0, now_s - float(status["at_ms"]) / 1000)


def forget(store: ObjectStore, key: str) -> None:
    """Remove the status of a loop that is no more, e.g. of a queue that the configuration no longer names."""
    store.delete(f"status/{key}.json")


def what_is_left(store: ObjectStore, since_ms: int) -> str:
    """What of the changes in the commit logs the loops have not published and given to the replicas, as they tell.

    What one loop hands to another between two looks is seen by neither: :func:`wait_until_published` looks again.

    :param since_ms: ms since the epoch: only what a loop has found out after that counts
    :returns: a sentence; empty: nothing
    :raises StorageError: the store cannot be read
    """
    statuses = read_statuses(store)
    nodes = [one for status in statuses.values() for one in status.get("nodes", {}).items()]
    if not nodes:
        return "no log of a node has been read yet"
    for node, one in nodes:
        if int(one["clear_at_ms"]) < since_ms:
            return f"the log of node {one.get('endpoint', node)} is not staged: " + (
                one.get("error") or f"{one.get('backlog_bytes', 0):,} bytes are left"
            )
    close, late = statuses.get("bucket_close/close", {}), statuses.get("out_of_sequence/queue", {})
    if close.get("error") or late.get("error"):
        return str(close.get("error") or late.get("error"))
    if int(close.get("began_ms", 0)) < since_ms:
        return "bucket_close has not looked yet"
    for table, one in close["tables"].items():
        if one["open_buckets"]:
            return f"{table} has {one['open_buckets']} open buckets"
        if one["replica_pass"] not in (None, one["last_pass"]):
            return f"the replica of {table} has pass {one['replica_pass']} of {one['last_pass']}"
    if files := len(store.list(LATE_ROWS)):
        return f"{files} files of late rows"
    if int(late.get("at_ms", 0)) < since_ms:
        return "out_of_sequence has not looked yet"
    return f"{late['waiting']} late rows wait" if late.get("waiting") else ""


def wait_until_published(
    store: ObjectStore,
    written_until_ms: int,
    timeout_s: float,
    tell: Callable[[str], None] = lambda left: None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until all that the nodes had synced to their commit logs by a moment is in the streams and the replicas.

    :param written_until_ms: ms since the epoch: of the last write, and their ``commitlog_sync_period``
    :param timeout_s: seconds
    :param tell: is told what is left, again and again
    :returns: what is left when the time is over; empty: everything is published
    :raises StorageError: the store cannot be read
    """
    end = clock() + timeout_s
    since_ms = written_until_ms
    for _ in range(_ROUNDS):
        while left := what_is_left(store, since_ms):
            if clock() >= end:
                return left
            tell(left)
            sleep(0.5)
        since_ms = int(clock() * 1000)
    return ""
