"""Alarms in the object store: those that are raised now, and the history of all.

``alarms/active.json`` has what the loop of alarms must know when it starts again. ``alarms/history/<day>/`` has an
object for each alarm: it is written when the alarm is raised, and again when it is cleared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from ringsync.storage.port import ChecksumError, ObjectStore, get_json, list_named

_ACTIVE, _HISTORY = "alarms/active.json", "alarms/history/"
_NAME = r"[\d-]{10}/[^ /]+\.json"


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
    :ivar owner: who alone can say that it is over
    """

    kind: str
    where: str
    text: str
    is_critical: bool
    since_ms: int
    seen_ms: int
    raised_ms: int | None = None
    cleared_ms: int | None = None
    owner: str = ""

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
class Active:
    """What the loop of alarms must know when it starts again.

    :ivar alarms: the problems that are seen now
    :ivar untold: what each notifier was not told yet, by its place in the configuration
    :ivar unnoted: what is not in the history yet
    """

    alarms: tuple[Alarm, ...] = ()
    untold: tuple[tuple[int, Alarm], ...] = ()
    unnoted: tuple[Alarm, ...] = ()


def get_active(store: ObjectStore) -> Active:
    """Read what was put last; nothing if that is damaged.

    :raises UnavailableError: the store cannot be used
    """
    with suppress(ChecksumError, ValueError, TypeError, KeyError, AttributeError):
        document = get_json(store, _ACTIVE) or {}
        return Active(
            tuple(map(_alarm, document.get("alarms", ()))),
            tuple((int(number), _alarm(one)) for number, one in document.get("untold", ())),
            tuple(map(_alarm, document.get("unnoted", ()))),
        )
    print(
        f"ringsync: warning: {store.uri(_ACTIVE)} is damaged: alarms that were raised are looked up again", flush=True
    )
    return Active()


def put_active(store: ObjectStore, active: Active) -> None:
    """Record what must be known after a restart.

    :raises StorageError: the store cannot be used
    """
    store.say(_ACTIVE, json.dumps(asdict(active)).encode())


def raised_now(store: ObjectStore) -> list[Alarm]:
    """Read the alarms that are raised.

    :raises UnavailableError: the store cannot be used
    """
    return [alarm for alarm in get_active(store).alarms if alarm.raised_ms is not None]


def _alarm(document: Mapping[str, Any]) -> Alarm:
    """Make an alarm of what was recorded, maybe by another version."""
    return Alarm(**{one.name: document[one.name] for one in fields(Alarm) if one.name in document})


def note(store: ObjectStore, alarm: Alarm) -> None:
    """Record in the history that an alarm was raised or cleared.

    :raises StorageError: the store cannot be used
    """
    store.put(alarm.key, json.dumps(asdict(alarm)).encode())


def history(store: ObjectStore, since_ms: int) -> Iterator[Alarm]:
    """Read the alarms that were raised since a moment, the oldest first.

    :raises UnavailableError: the store cannot be used
    """
    for stat in list_named(store, _HISTORY, _NAME, f"{_HISTORY}{_day(since_ms)}"):
        try:
            document = get_json(store, stat.key)
            # One that is listed may have been forgotten since.
            alarm = None if document is None else _alarm(document)
        except (ChecksumError, ValueError, TypeError, AttributeError) as error:
            print(f"ringsync: warning: {store.uri(stat.key)} is damaged ({error}), and left out", flush=True)
            continue
        if alarm is not None and (alarm.raised_ms or 0) >= since_ms:
            yield alarm


def forget_before(store: ObjectStore, moment_ms: int) -> int:
    """Remove alarms from the history that were raised before the day of a moment, and return how many.

    :raises StorageError: the store cannot be used
    """
    first = f"{_HISTORY}{_day(moment_ms)}"
    old = [stat.key for stat in list_named(store, _HISTORY, _NAME) if stat.key < first]
    for key in old:
        store.delete(key)
    return len(old)


def _day(moment_ms: int) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, UTC).strftime("%Y-%m-%d")
