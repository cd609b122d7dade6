"""Alarms in the object store: those that are raised now, and the history of all.

``alarms/active.json`` has what the loop of alarms must know when it starts again. ``alarms/history/<day>/`` has an
object for each alarm: it is written when the alarm is raised, and again when it is cleared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import blake2b

from ringsync.storage.port import ChecksumError, ObjectStore, get_json

_ACTIVE, _HISTORY = "alarms/active.json", "alarms/history/"


@dataclass(frozen=True)
class Alarm:
    """A problem that has lasted. All times are ms since the epoch.

    :ivar kind: section of docs/runbook.md
    :ivar where: loop, node, table or DAG
    :ivar text: what is wrong: the last text of the problem
    :ivar is_critical: whether the source is in danger, or changes are missing
    :ivar since_ms: when the problem was first seen
    :ivar seen_ms: when it was last seen
    :ivar raised_ms: when it had lasted long enough; None: not yet
    :ivar cleared_ms: when it was over; None: it is not
    """

    kind: str
    where: str
    text: str
    is_critical: bool
    since_ms: int
    seen_ms: int
    raised_ms: int | None = None
    cleared_ms: int | None = None

    @property
    def page(self) -> str:
        """What to do about it."""
        return f"docs/runbook.md#{self.kind}"

    @property
    def key(self) -> str:
        """Key of a raised alarm in the history."""
        assert self.raised_ms is not None
        name = blake2b(self.where.encode(), digest_size=6).hexdigest()
        return f"{_HISTORY}{_day(self.raised_ms)}/{self.raised_ms:013d}-{self.kind}-{name}.json"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its metric."""
        return {"kind": self.kind, "where": self.where, "severity": "critical" if self.is_critical else "warning"}

    def summary(self) -> str:
        """Return a sentence for a notification."""
        state = "raised" if self.cleared_ms is None else "cleared"
        urgency = "CRITICAL " if self.is_critical else ""
        return f"{urgency}{state}: {self.kind} at {self.where}: {self.text} ({self.page})"


@dataclass(frozen=True)
class Untold:
    """A notification that is not sent yet.

    :ivar notifier: its place in the configuration
    """

    notifier: int
    alarm: Alarm


def get_active(store: ObjectStore) -> tuple[list[Alarm], list[Untold]]:
    """Read the problems that were seen last, and what is not sent yet; nothing if that is not known.

    :raises StorageError: the store cannot be used
    """
    with suppress(ChecksumError, ValueError, TypeError, KeyError, AttributeError):
        document = get_json(store, _ACTIVE) or {}
        untold = [Untold(int(one["notifier"]), Alarm(**one["alarm"])) for one in document.get("untold", ())]
        return [Alarm(**one) for one in document.get("alarms", ())], untold
    return [], []


def put_active(store: ObjectStore, alarms: Iterable[Alarm], untold: Iterable[Untold]) -> None:
    """Record the problems that are seen now, and what is not sent yet.

    :raises StorageError: the store cannot be used
    """
    document = {"alarms": [asdict(alarm) for alarm in alarms], "untold": [asdict(one) for one in untold]}
    store.say(_ACTIVE, json.dumps(document).encode())


def note(store: ObjectStore, alarm: Alarm) -> None:
    """Record in the history that an alarm was raised or cleared.

    :raises StorageError: the store cannot be used
    """
    store.put(alarm.key, json.dumps(asdict(alarm)).encode())


def history(store: ObjectStore, since_ms: int) -> Iterator[Alarm]:
    """Read the alarms that were raised since a moment, the oldest first.

    :raises StorageError: the store cannot be used, or an object is damaged
    """
    for stat in store.list(_HISTORY, f"{_HISTORY}{_day(since_ms)}"):
        # One that is listed may have been forgotten since.
        if (document := get_json(store, stat.key)) is not None:
            alarm = Alarm(**document)
            if (alarm.raised_ms or 0) >= since_ms:
                yield alarm


def forget_before(store: ObjectStore, moment_ms: int) -> int:
    """Remove alarms from the history that were raised before the day of a moment, and return how many.

    :raises StorageError: the store cannot be used
    """
    first = f"{_HISTORY}{_day(moment_ms)}"
    old = [stat.key for stat in store.list(_HISTORY) if stat.key < first]
    for key in old:
        store.delete(key)
    return len(old)


def _day(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).strftime("%Y-%m-%d")
