"""Status of the sync's loops: each loop puts it every few seconds under ``status/`` of the object store.

All functions raise StorageError if the store cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringsync.storage.port import ObjectStore, get_json

STALE_AFTER_S = 40.0
"""Seconds without a status before a loop counts as dead."""

BOOTSTRAPS = "bootstrap/"
"""Prefix of the names of statuses that belong to unfinished bootstraps, not to loops."""

STOP_KEY = "control/stop.json"
"""Object that asks all loops to end after their present cycle."""

LATE_ROWS = "staging/late/"
"""Folder of late rows that are not published yet."""

Status = Mapping[str, Any]
"""A status object; ``at_ms`` is the time when it was put, ms since the epoch."""


def read_statuses(store: ObjectStore) -> dict[str, Status]:
    """Read the status of each loop, by ``<application>/<name>``, e.g. ``commitlog_stage/default``."""
    keys = (stat.key.removeprefix("status/").removesuffix(".json") for stat in store.list("status/"))
    # A status that was listed may have been removed since.
    return {key: status for key in keys if (status := read_status(store, key)) is not None}


def read_status(store: ObjectStore, key: str) -> Status | None:
    """Read the status of one loop, ``<application>/<name>``; None: there is none yet."""
    status: Status | None = get_json(store, f"status/{key}.json")
    return status


def age_s(status: Status, now_s: float) -> float:
    """Return the age of a status in seconds."""
    return max(0.0, now_s - float(status["at_ms"]) / 1000)


def forget(store: ObjectStore, key: str) -> None:
    """Remove the status of a loop that no longer exists, e.g. of a queue that the configuration no longer names."""
    store.delete(f"status/{key}.json")
