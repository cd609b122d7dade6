"""What the loops of the sync say of themselves, every few seconds, as objects under ``status/`` of the object store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ringsync.storage.port import NotFoundError, ObjectStore

STALE_AFTER_S = 40.0
"""A loop that has said nothing for so many seconds does not work."""

BOOTSTRAPS = "bootstrap/"
"""How the names of those statuses begin that are of unfinished bootstraps, and not of loops."""

STOP_KEY = "control/stop.json"
"""Whoever puts this object asks all loops to end after their present cycle."""

LATE_ROWS = "staging/late/"
"""Folder of change rows whose bucket was closed when they were read, until they are published."""

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
