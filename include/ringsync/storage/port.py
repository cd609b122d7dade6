"""The interface of the object store for bulk data. A local folder and a GCS bucket behave alike.

A key names an object, as a path without a leading slash: ``plans/2026-01-01T00:00/plan.json``. An object exists as a
whole or not at all, and its bytes never change: a put replaces it by another object with another version.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_KEY_BYTES = 1024
"""Longest name in GCS (https://cloud.google.com/storage/docs/objects#naming)."""
MAX_PART_BYTES = 255
"""Longest part of a path in file systems (NAME_MAX)."""
HIDDEN_FOLDER = ".ringsync"
"""Folder of the local store itself. No part of a key begins with a dot, so hidden files of others are no objects."""


class StorageError(Exception):
    """An operation of an object store failed; the message names the object and the reason."""


class NotFoundError(StorageError):
    """The object to read is not there."""


class AlreadyExistsError(StorageError):
    """A put with ``if_absent`` found another writer's object of this key."""


class VersionMismatchError(StorageError):
    """A put with ``if_version`` found another version of the object, or none."""


class ChecksumError(StorageError):
    """The bytes differ from those that were written: they were damaged in transfer or in the store."""


class UnavailableError(StorageError):
    """The store cannot be used: unreachable, no rights, full, read-only. The message says what to do."""


@dataclass(frozen=True)
class Stat:
    """The facts about an object that need no reading.

    :ivar size: bytes
    :ivar crc32c: CRC-32C (Castagnoli) of the bytes, as GCS computes it
    :ivar version: opaque version; equal only for the very same object, never used again
    :ivar written_ms: when it was written, by the clock of the store (of a folder: of the machine that has the disk), ms
        since the epoch
    """

    key: str
    size: int
    crc32c: int
    version: str
    written_ms: int = field(default=0, compare=False)


class ObjectStore(Protocol):
    """A store for plans, staging, streams, replicas and reports.

    Every method raises :class:`UnavailableError` if the store cannot be used, and ``ValueError`` for a key that
    :func:`check_key` refuses. After a put or delete has returned, every reader sees its effect.
    """

    @property
    def url(self) -> str:
        """Root of the store: ``file:///…`` or ``gs://bucket/prefix``, without a trailing slash."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None) -> Stat:
        """Write or replace an object. When this returns, the object is durable and its checksum verified.

        :param if_absent: write only if there is no object of this key; of many writers exactly one succeeds
        :param if_version: write only if the object still has this version; of many writers exactly one succeeds
        :raises AlreadyExistsError: ``if_absent`` is set and the object exists
        :raises VersionMismatchError: ``if_version`` is set, and the object has another version or does not exist
        :raises ChecksumError: the bytes were damaged on the way; they were refused or removed: put them again
        :raises ValueError: both conditions are set
        """

    def say(self, key: str, data: bytes) -> None:
        """Write or replace a small object that only reports a status, and that is never put with a condition.

        Unlike a put, it never waits for another writer, which may hang. The last write wins.
        """

    def get(self, key: str) -> bytes:
        """Read an object.

        :raises NotFoundError: there is no such object
        :raises ChecksumError: the bytes differ from those that were written
        """

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Read some bytes of an object. They are not verified: keep a checksum of the part if you need one.

        :param size: number of bytes; fewer are returned if the object ends before
        :raises NotFoundError: there is no such object
        """

    def stat(self, key: str) -> Stat | None:
        """Look up an object; None: it does not exist."""

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        """List all complete objects whose keys start with these characters (a folder or not), sorted by key.

        :param start: first key of the list; earlier keys cost nothing
        """

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Whether it was cannot be told: the answer of a service may be lost."""

    def uri(self, key: str) -> str:
        """Return the address of an object or folder for Spark, Delta and pyarrow: ``file:///…`` or ``gs://…``."""


def check_key(key: str) -> str:
    """Return the key if every store can hold it.

    :raises ValueError: the key is empty or too long, has an empty part, one that begins with a dot, or a control
        character, or is not valid Unicode
    """
    _check_text(key)
    for part in key.split("/"):
        if not part or part.startswith("."):
            raise ValueError(
                f"object key {key!r} has the part {part!r}: use name/name/…, none of which begins with '.'"
            )
        if len(part.encode()) > MAX_PART_BYTES:
            raise ValueError(f"object key {key!r} has a part of more than {MAX_PART_BYTES} bytes")
    return key


def get_json(store: ObjectStore, key: str) -> Any:
    """Read a JSON document; None: there is no such object."""
    try:
        return json.loads(store.get(key))
    except NotFoundError:
        return None


def list_named(store: ObjectStore, folder: str, form: str, start: str = "") -> list[Stat]:
    """List the objects of a folder whose names have a form. All others are not ours: somebody has put them there.

    :param folder: with a slash at its end
    :param form: regular expression of the whole name below the folder
    :param start: first key that is listed
    """
    return [stat for stat in store.list(folder, start) if re.fullmatch(form, stat.key.removeprefix(folder))]


def is_legal_key(name: str) -> bool:
    """Tell whether :func:`check_key` accepts a name that others made."""
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Return a prefix or start for :meth:`ObjectStore.list` if a legal key can start with it.

    :raises ValueError: no legal key can start with it
    """
    if prefix:
        _check_text(prefix)
        folder, slash, _ = prefix.rpartition("/")
        if slash:
            check_key(folder)
    return prefix


def check_conditions(if_absent: bool, if_version: str | None) -> None:
    """Refuse a put with both conditions by a ValueError."""
    if if_absent and if_version is not None:
        raise ValueError("a put takes if_absent or if_version, not both")


def _check_text(key: str) -> None:
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in key):
        raise ValueError(f"object key {key!r} has a control character or half a surrogate pair")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"object key {key[:40]!r}… has more than {MAX_KEY_BYTES} bytes")
