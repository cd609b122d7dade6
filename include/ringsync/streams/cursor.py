"""The cursor of a relay: which folders of a file stream a sink's topic has, e.g. in ``streams/<topic>/kafka.json``.

The cursor lists all these folders. It keeps numbered folders as runs, so that a million passes are one entry.

Only the process that claimed the cursor last can move it. Two cursors are never united: one process may have begun to
repeat messages that another has sent. It must repeat them to the end, or the topic would end with old messages.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, VersionMismatchError
from ringsync.streams.sink import KAFKA, AnotherRelayError, CursorError

_NUMBERED = re.compile(r"(.*-)([0-9]{6,18})")
"""Names of numbered folders: ``pass-000000000001``."""

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cursor:
    """The progress of a relay.

    :ivar sink_topic: topic of the sink that gets the messages
    :ivar runs: first and last number of each run, by series of numbered folders (the name with zeros for digits)
    :ivar names: relayed folders without a number
    :ivar folder: folder that is partly relayed; empty: none
    :ivar parts: number of this folder's parts that are relayed
    :ivar messages: number of relayed messages of the next part, if the sink is slow
    """

    sink_topic: str
    runs: dict[str, Runs] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    folder: str = ""
    parts: int = 0
    messages: int = 0

    def __contains__(self, folder: str) -> bool:
        """Tell whether the whole folder was relayed."""
        series, number = _series(folder)
        return folder in self.names or any(first <= number <= last for first, last in self.runs.get(series, ()))

    @property
    def newest(self) -> str:
        """Last relayed folder, by name; empty: none."""
        series = ((*name.rpartition("-"), runs[-1][1]) for name, runs in self.runs.items())
        numbered = (f"{name}-{last:0{len(digits)}}" for name, _, digits, last in series)
        return max((*numbered, *self.names), default="")

    def before_newest(self, count: int) -> str:
        """Name the folder so many numbers before the last relayed one; empty: there is none, or it has no number."""
        series, number = _series(self.newest)
        if number <= count:
            return ""
        name, _, digits = series.rpartition("-")
        return f"{name}-{number - count:0{len(digits)}}"

    def is_next(self, folder: str) -> bool:
        """Tell whether relaying this folder now leaves no gap in its series; True for a folder without a number."""
        series, number = _series(folder)
        return number <= 1 or any(first < number <= last + 1 for first, last in self.runs.get(series, ()))

    def parts_of(self, folder: str) -> int:
        """Return how many of a folder's first parts were relayed."""
        return self.parts if folder == self.folder else 0

    def messages_of(self, folder: str, part: int) -> int:
        """Return how many messages of a folder's part (its number, from 0) are relayed, counted from the first."""
        return self.messages if (folder, part) == (self.folder, self.parts) else 0

    def within(self, folder: str, parts: int, messages: int = 0) -> Cursor:
        """Return the cursor after some parts of a folder, and some messages of the next part."""
        return replace(self, folder=folder, parts=parts, messages=messages)

    def behind(self, folder: str) -> Cursor:
        """Return the cursor after a whole folder."""
        series, number = _series(folder)
        if not series:
            return replace(self, names=self.names | {folder}, folder="", parts=0, messages=0)
        runs = {**self.runs, series: _merged((*self.runs.get(series, ()), (number, number)))}
        return replace(self, runs=runs, folder="", parts=0, messages=0)


class CursorObject:
    """The cursor of a topic in the object store. One relay holds it at a time.

    :param topic: topic of the file stream
    :param sink_topic: topic of the sink
    :param sink: name of the sink
    """

    def __init__(self, store: ObjectStore, topic: str, sink_topic: str, sink: str = KAFKA) -> None:
        self._store = store
        self._key = f"streams/{topic}/{sink}.json"
        self._sink_topic = sink_topic
        self._version: str | None = None

    def load(self) -> Cursor:
        """Read the stored cursor; an empty one if nothing was relayed yet.

        :raises CursorError: the cursor is damaged or belongs to another topic
        """
        stat = self._store.stat(self._key)
        if stat is None:
            self._version = None
            return Cursor(self._sink_topic)
        # The content read below may be newer than this version; the next save then finds the conflict.
        self._version = stat.version
        where = self._store.uri(self._key)
        try:
            cursor = cursor_from_json(self._store.get(self._key))
        except NotFoundError as error:
            raise CursorError(f"{where} was removed meanwhile: start the relay again") from error
        except (ChecksumError, ValueError, KeyError, TypeError) as error:
            raise CursorError(f"{where} is damaged ({error}): remove it, and everything is relayed again") from error
        if cursor.sink_topic != self._sink_topic:
            raise CursorError(
                f"{where} is about the topic {cursor.sink_topic!r}, not {self._sink_topic!r}: "
                "remove it, and everything is relayed to the new topic"
            )
        return cursor

    def claim(self) -> Cursor:
        """Read and claim the stored cursor: processes that loaded it before can no longer save it.

        :raises CursorError: the cursor is damaged or belongs to another topic
        """
        while True:
            cursor = self.load()
            try:
                self._put(cursor)
                return cursor
            except (AlreadyExistsError, VersionMismatchError):
                continue

    def save(self, cursor: Cursor) -> None:
        """Store the cursor, unless another process saved, claimed or removed it since it was loaded or claimed here.

        :raises AnotherRelayError: another process did
        """
        try:
            self._put(cursor)
        except (AlreadyExistsError, VersionMismatchError) as error:
            raise AnotherRelayError(
                f"{self._store.uri(self._key)} was changed meanwhile: another process relays "
                f"{self._sink_topic} too; this one starts again from the stored cursor"
            ) from error

    def _put(self, cursor: Cursor) -> None:
        data = cursor_to_json(cursor)
        if self._version is None:
            self._version = self._store.put(self._key, data, if_absent=True).version
        else:
            self._version = self._store.put(self._key, data, if_version=self._version).version


def cursor_to_json(cursor: Cursor) -> bytes:
    """Write a cursor in the stored form."""
    document = {
        "kafka_topic": cursor.sink_topic,
        "runs": {series: [list(run) for run in runs] for series, runs in sorted(cursor.runs.items())},
        "names": sorted(cursor.names),
        "bucket": cursor.folder,
        "parts": cursor.parts,
        "messages": cursor.messages,
    }
    return json.dumps(document, indent=1).encode()


def cursor_from_json(data: bytes) -> Cursor:
    """Read a cursor in the stored form (:func:`cursor_to_json`).

    :raises ValueError, KeyError, TypeError: the data are not a cursor
    """
    document = json.loads(data)
    runs = {series: tuple((int(a), int(b)) for a, b in runs) for series, runs in document["runs"].items()}
    return Cursor(
        document["kafka_topic"],
        runs,
        frozenset(document["names"]),
        document["bucket"],
        int(document["parts"]),
        int(document["messages"]),
    )


def _series(folder: str) -> tuple[str, int]:
    """Return the series of a numbered folder and its number; ``""`` and -1 for other folders."""
    match = _NUMBERED.fullmatch(folder)
    return (match[1] + "0" * len(match[2]), int(match[2])) if match else ("", -1)


def _merged(runs: Runs) -> Runs:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
