"""Which buckets of a file stream a Kafka topic has: the object ``streams/<topic>/kafka.json``.

Exactly which, not "all up to this name": versions before published bootstraps under names that come before those of all
passes. Numbered buckets are kept as runs, so that a million passes are one entry.

Only who has claimed the cursor last can move it. Two cursors are never united: what one process has sent, another may
have begun to repeat, and must then repeat to its end, or the topic would end with something old.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, VersionMismatchError
from ringsync.streams.kafka.errors import AnotherRelayError, CursorError

_NUMBERED = re.compile(r"(.*-)([0-9]{6,18})")
"""Buckets that are counted: ``pass-000000000001``."""

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cursor:
    """How far a relay has come.

    :ivar kafka_topic: where it relays to
    :ivar runs: per series of numbered buckets (its name with zeros for digits) the first and last number of each run
    :ivar names: relayed buckets without a number
    :ivar bucket: in the middle of which it is; empty: of none
    :ivar parts: of this bucket that it has relayed
    :ivar messages: of the part behind them that it has relayed, where Kafka is slow
    """

    kafka_topic: str
    runs: dict[str, Runs] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    bucket: str = ""
    parts: int = 0
    messages: int = 0

    def __contains__(self, bucket: str) -> bool:
        """Whether the whole bucket was relayed."""
        series, number = _series(bucket)
        return bucket in self.names or any(first <= number <= last for first, last in self.runs.get(series, ()))

    @property
    def newest(self) -> str:
        """The last bucket, by name, that was relayed; empty: none."""
        series = ((*name.rpartition("-"), runs[-1][1]) for name, runs in self.runs.items())
        numbered = (f"{name}-{last:0{len(digits)}}" for name, _, digits, last in series)
        return max((*numbered, *self.names), default="")

    def is_next(self, bucket: str) -> bool:
        """Whether no bucket of its series is left out if this one is relayed now; True for one without a number."""
        series, number = _series(bucket)
        return number <= 1 or any(first < number <= last + 1 for first, last in self.runs.get(series, ()))

    def parts_of(self, bucket: str) -> int:
        """Parts of a bucket, from its first, that were relayed."""
        return self.parts if bucket == self.bucket else 0

    def messages_of(self, bucket: str, part: int) -> int:
        """Messages of a part of a bucket (number, from 0), from its first, that were relayed."""
        return self.messages if (bucket, part) == (self.bucket, self.parts) else 0

    def within(self, bucket: str, parts: int, messages: int = 0) -> Cursor:
        """The cursor after some parts of a bucket, and some messages of the part behind them."""
        return replace(self, bucket=bucket, parts=parts, messages=messages)

    def behind(self, bucket: str) -> Cursor:
        """The cursor after a whole bucket."""
        series, number = _series(bucket)
        if not series:
            return replace(self, names=self.names | {bucket}, bucket="", parts=0, messages=0)
        runs = {**self.runs, series: _merged((*self.runs.get(series, ()), (number, number)))}
        return replace(self, runs=runs, bucket="", parts=0, messages=0)


class CursorObject:
    """The cursor of a topic in the object store; one relay's at a time.

    :param topic: the file stream's
    """

    def __init__(self, store: ObjectStore, topic: str, kafka_topic: str) -> None:
        self._store = store
        self._key = f"streams/{topic}/kafka.json"
        self._kafka_topic = kafka_topic
        self._version: str | None = None

    def load(self) -> Cursor:
        """The cursor as it is stored; an empty one if nothing was relayed yet.

        :raises CursorError: it is damaged, or of another Kafka topic
        """
        stat = self._store.stat(self._key)
        if stat is None:
            self._version = None
            return Cursor(self._kafka_topic)
        # Of the version that was looked up or of a later one: then the next save finds the conflict.
        self._version = stat.version
        where = self._store.uri(self._key)
        try:
            found = cursor_from_json(self._store.get(self._key))
        except NotFoundError as error:
            raise CursorError(f"{where} was removed meanwhile: begin again") from error
        except (ChecksumError, ValueError, KeyError, TypeError) as error:
            raise CursorError(f"{where} is damaged ({error}): remove it, and everything is relayed again") from error
        if found.kafka_topic != self._kafka_topic:
            raise CursorError(
                f"{where} is about the Kafka topic {found.kafka_topic!r}, not {self._kafka_topic!r}: "
                "remove it, and everything is relayed to the new topic"
            )
        return found

    def claim(self) -> Cursor:
        """The cursor as it is stored; whoever has loaded it before cannot save it any more.

        :raises CursorError: it is damaged, or of another Kafka topic
        """
        while True:
            cursor = self.load()
            try:
                self._put(cursor)
                return cursor
            except (AlreadyExistsError, VersionMismatchError):
                continue

    def save(self, cursor: Cursor) -> None:
        """Store the cursor, if nobody has saved, claimed or removed it since it was loaded or claimed here.

        :raises AnotherRelayError: somebody has
        """
        try:
            self._put(cursor)
        except (AlreadyExistsError, VersionMismatchError) as error:
            raise AnotherRelayError(
                f"{self._store.uri(self._key)} was changed meanwhile: another process relays "
                f"{self._kafka_topic} too; this one begins anew from what is stored"
            ) from error

    def _put(self, cursor: Cursor) -> None:
        data = cursor_to_json(cursor)
        if self._version is None:
            self._version = self._store.put(self._key, data, if_absent=True).version
        else:
            self._version = self._store.put(self._key, data, if_version=self._version).version


def cursor_to_json(cursor: Cursor) -> bytes:
    """A cursor as it is stored."""
    document = {
        "kafka_topic": cursor.kafka_topic,
        "runs": {series: [list(run) for run in runs] for series, runs in sorted(cursor.runs.items())},
        "names": sorted(cursor.names),
        "bucket": cursor.bucket,
        "parts": cursor.parts,
        "messages": cursor.messages,
    }
    return json.dumps(document, indent=1).encode()


def cursor_from_json(data: bytes) -> Cursor:
    """What :func:`cursor_to_json` wrote.

    :raises ValueError, KeyError, TypeError: something else
    """
    document = json.loads(data)
    runs = {series: tuple((int(a), int(b)) for a, b in runs) for series, runs in document["runs"].items()}
    return Cursor(
        document["kafka_topic"],
        runs,
        frozenset(document["names"]),
        document["bucket"],
        int(document["parts"]),
        int(document.get("messages", 0)),  # versions before confirmed whole parts
    )


def _series(bucket: str) -> tuple[str, int]:
    """The series of a numbered bucket and its number; of another ``""`` and -1."""
    found = _NUMBERED.fullmatch(bucket)
    return (found[1] + "0" * len(found[2]), int(found[2])) if found else ("", -1)


def _merged(runs: Runs) -> Runs:
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)
