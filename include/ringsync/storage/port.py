"""What ringsync asks of the place that holds its bulk data: a local folder and a GCS bucket answer alike.

A key names an object, as a path without a leading slash: ``plans/2026-01-01T00:00/plan.json``. An object is
there as a whole or not at all, and its bytes never change: a put replaces it by another with another version.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Protocol

MAX_KEY_BYTES = 1024
"""What GCS allows for a name (https://cloud.google.com/storage/docs/objects#naming)."""
MAX_PART_BYTES = 255
"""What file systems allow for one part of a path (NAME_MAX)."""
HIDDEN_FOLDER = ".ringsync"
"""The local store's own folder, so that no key may name it."""


class StorageError(Exception):
    """An object store did not do what was asked; the message names the object and the reason."""


class NotFoundError(StorageError):
    """The object to read is not there."""


class AlreadyExistsError(StorageError):
    """A put with ``if_absent`` found an object of that key: somebody else's."""


class VersionMismatchError(StorageError):
    """A put with ``if_version`` found another version of the object, or none."""


class ChecksumError(StorageError):
    """The bytes are not those that were written: damaged on the way or where they lie."""


class UnavailableError(StorageError):
    """The store cannot be used: unreachable, no rights, full, read-only. The message says what to do."""


@dataclass(frozen=True)
class Stat:
    """What is known of an object without reading it.

    :param key: the object's key
    :param size: bytes
    :param crc32c: CRC-32C (Castagnoli) of its bytes, as GCS computes it
    :param version: opaque; equal only for the very same object, never used again
    """

    key: str
    size: int
    crc32c: int
    version: str


class ObjectStore(Protocol):
    """Where plans, staging, streams, replicas and reports lie.

    Every method raises :class:`UnavailableError` when the store cannot be used, and ``ValueError`` for a key
    that :func:`check_key` refuses. After a put or delete has returned, every reader sees its effect.
    """

    @property
    def url(self) -> str:
        """The store's root: ``file:///…`` or ``gs://bucket/prefix``, without a trailing slash."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None) -> Stat:
        """Write an object, replacing what is there; it is durable and its checksum verified when this returns.

        :param if_absent: only if there is no object of that key; of many that try, exactly one succeeds
        :param if_version: only if the object is there and still has this version; exactly one of many succeeds
        :raises AlreadyExistsError: ``if_absent`` was asked and it is there
        :raises VersionMismatchError: ``if_version`` was asked and it has another version or is not there
        :raises ChecksumError: what arrived is not what was sent; it was refused or removed: put it again
        :raises ValueError: both conditions were asked
        """

    def get(self, key: str) -> bytes:
        """Read an object.

        :raises NotFoundError: it is not there
        :raises ChecksumError: its bytes are not those that were written
        """

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Read some bytes of an object. What its checksum says of the whole is not looked at: keep one of the part.

        :param start: byte at which they begin
        :param size: how many; fewer come where the object ends
        :raises NotFoundError: it is not there
        """

    def stat(self, key: str) -> Stat | None:
        """Look an object up; None when it is not there."""

    def list(self, prefix: str = "", start: str = "") -> list[Stat]:
        """All complete objects whose keys start with these characters (a folder or not), sorted by key.

        :param start: only keys from this one on; what comes before it costs nothing
        """

    def delete(self, key: str) -> bool:
        """Remove an object.

        :returns: False when it was not there, which is no error: deletion may be repeated
        """

    def uri(self, key: str) -> str:
        """The object's or folder's address for Spark, Delta and pyarrow: ``file:///…`` or ``gs://…``."""


def check_key(key: str) -> str:
    """Give the key back if every store can hold it.

    :raises ValueError: the key is empty or too long, has an empty part, ``.``, ``..``, a control character,
        a part reserved for the local store, or is not valid Unicode
    """
    _check_text(key)
    for part in key.split("/"):
        if part in ("", ".", "..", HIDDEN_FOLDER):
            raise ValueError(
                f"object key {key!r} has the part {part!r}: use name/name/…, no '.', '..' or '{HIDDEN_FOLDER}'"
            )
        if len(part.encode()) > MAX_PART_BYTES:
            raise ValueError(f"object key {key!r} has a part of more than {MAX_PART_BYTES} bytes")
    return key


def is_legal_key(name: str) -> bool:
    """Whether :func:`check_key` accepts a name, for names that others made."""
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Give a prefix or start for :meth:`ObjectStore.list` back if a legal key can start with it.

    :raises ValueError: no legal key starts so
    """
    if prefix:
        _check_text(prefix)
        folder, slash, _ = prefix.rpartition("/")
        if slash:
            check_key(folder)
    return prefix


def check_conditions(if_absent: bool, if_version: str | None) -> None:
    """Refuse the two conditions of a put together.

    :raises ValueError: both are asked
    """
    if if_absent and if_version is not None:
        raise ValueError("a put takes if_absent or if_version, not both")


def _check_text(key: str) -> None:
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in key):
        raise ValueError(f"object key {key!r} has a control character or half a surrogate pair")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"object key {key[:40]!r}… has more than {MAX_KEY_BYTES} bytes")
