"""Archived commit logs: segments that left their node, and what is known of them.

``cdc/<node>/`` has the segments that are still to be read, ``cdc_archive/<node>/`` those that were read. A segment is
three objects: the segment and its index under their own names, and last ``<segment>.json``, its entry. Without an entry
a segment is not archived: the upload goes on, or begins anew. Names of segments are never used twice by a node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

import google_crc32c

from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import INDEX_SUFFIX, index_name, segment_id
from ringsync.formats.commitlog.segment import SegmentError, why_short
from ringsync.ledger import waiting_segments
from ringsync.ledger.staging import Written
from ringsync.ledger.waiting_segments import ENTRY, waiting_keys
from ringsync.storage.port import AlreadyExistsError, ChecksumError, NotFoundError, ObjectStore, StorageError

WAITING, READ = waiting_segments.WAITING, "cdc_archive/"
"""Folders of segments that are to be read, and of those that were read."""

_OTHER = (
    "{} has other bytes than the node's file of this name: is another cluster's archive in this store? Give each "
    "cluster a store of its own, or move the object away"
)

_PART = re.compile(rf"[^/]+/([^/]+)/(CommitLog-[^/]+?)(\.log|{re.escape(INDEX_SUFFIX)})")
"""A segment, or its index."""


class ShortSegmentError(StorageError):
    """A segment does not reach what its index says, or may not: it is damaged, or its node crashed, or a mounted folder
    shows old pages of it."""


@dataclass(frozen=True)
class ArchivedSegment:
    """The entry of an archived segment.

    :ivar node: host id
    :ivar name: file name
    :ivar index: content of its ``_cdc.idx``
    :ivar size: bytes
    :ivar began_ms: time from which its writes may be, by the node's clock: when the segment before it was written last;
        0: unknown
    :ivar ended_ms: when Cassandra wrote to it last, ms since the epoch
    :ivar first_us: least write time of its rows of followed tables, µs; None: it was not read yet, or not all of it
        could be; greater than ``last_us``: it has no such rows
    :ivar last_us: greatest write time of these rows, µs
    """

    node: str
    name: str
    index: str
    size: int
    crc32c: int
    began_ms: int
    ended_ms: int
    archived_ms: int
    first_us: int | None = None
    last_us: int | None = None

    @property
    def segment_id(self) -> int:
        """The number in its name."""
        identity = segment_id(self.name)
        assert identity is not None, self.name
        return identity

    def touches(self, start_ms: int, end_ms: int) -> bool:
        """Tell whether some of its rows may have been written in [start, end), ms since the epoch. Where they were not
        seen, that may be any time until it ended: hints, late writes and ``USING TIMESTAMP`` come later."""
        first = 0 if self.first_us is None else self.first_us // 1000
        last = self.ended_ms if self.last_us is None else self.last_us // 1000
        return first < end_ms and last >= start_ms


def archive_segment(
    store: ObjectStore,
    node: str,
    file: Path,
    index: str,
    began_ms: int,
    now_ms: int,
    folder: str = WAITING,
    written: Written | None = None,
    *,
    even_short: bool = False,
) -> ArchivedSegment:
    """Put a finished segment into the archive. When this returns, all of it is durable; repeating it is safe.

    :param index: content of its ``_cdc.idx``
    :param began_ms: when the segment before it was written last; 0: unknown
    :param folder: WAITING or READ
    :param written: write times of its rows; None: unknown
    :param even_short: whether it is archived though it may not reach what its index says
    :raises OSError: the file cannot be read
    :raises ShortSegmentError: it does not reach what its index says, or may not
    :raises StorageError: the archive has another segment of this name
    """
    ended_ms = int(file.stat().st_mtime * 1000)
    data = file.read_bytes()
    if not even_short and (reason := _why_short(data, file.name, index)) is not None:
        raise ShortSegmentError(f"{file}: {reason}")
    entry = ArchivedSegment(
        *(node, file.name, index, len(data), google_crc32c.value(data), began_ms, ended_ms, now_ms),
        *(written or (None, None)),
    )
    if (there := find(store, node, file.name)) is None:
        _put_all(store, folder, entry, data)
        return entry
    if (there.size, there.crc32c) != (entry.size, entry.crc32c):
        raise StorageError(_OTHER.format(store.uri(f"{folder}{node}/{file.name}")))
    return there  # Cassandra has linked it again after a crash


def completed_at(index: str) -> int | None:
    """Return the position that a segment reaches by its ``_cdc.idx``; None: it does not say so."""
    parsed = parse_index(index.encode())
    return parsed.offset if parsed is not None and parsed.completed else None


def _why_short(data: bytes, name: str, index: str) -> str | None:
    """Tell why a segment is not what its index says; None: it is."""
    if (offset := completed_at(index)) is None:
        return "its index does not say that it is complete"
    try:
        return why_short(data, name, offset)
    except SegmentError as error:
        return str(error)


def _put_all(store: ObjectStore, folder: str, entry: ArchivedSegment, data: bytes) -> None:
    path = f"{folder}{entry.node}/"
    put_same(store, f"{path}{entry.name}", data, entry.crc32c)
    store.put(f"{path}{index_name(entry.name)}", entry.index.encode())
    with suppress(AlreadyExistsError):
        store.put(_entry_key(folder, entry), json.dumps(asdict(entry)).encode(), if_absent=True)


def put_same(store: ObjectStore, key: str, data: bytes, crc32c: int) -> None:
    """Put an object that only ever has this content, and check that the store has it.

    :raises StorageError: it has another content
    """
    with suppress(AlreadyExistsError):
        store.put(key, data, if_absent=True)
    there = store.stat(key)
    if there is None or (there.size, there.crc32c) != (len(data), crc32c):
        raise StorageError(_OTHER.format(store.uri(key)))


def find(store: ObjectStore, node: str, name: str) -> ArchivedSegment | None:
    """Return the entry of a node's segment, read or not; None: it is not archived.

    :raises ChecksumError: the entry cannot be read
    """
    for folder in (WAITING, READ):
        with suppress(NotFoundError):
            return _entry(store, f"{folder}{node}/{name}.json")
    return None


def archived(
    store: ObjectStore, folder: str, damaged: list[str] | None = None, but_for: Collection[str] = ()
) -> Iterator[ArchivedSegment]:
    """Yield the archived segments in a folder, by node and name.

    :param folder: WAITING or READ
    :param damaged: takes a sentence for each entry that cannot be read; None: the first one is raised
    :param but_for: ``<node>/<name>`` of segments that are left out
    :raises ChecksumError: an entry cannot be read
    """
    for stat in store.list(folder):
        found = ENTRY.fullmatch(stat.key)
        if found and f"{found[1]}/{found[2]}" not in but_for:
            try:
                yield _entry(store, stat.key)
            except NotFoundError:
                continue  # another process has moved it meanwhile
            except ChecksumError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))


def _entry(store: ObjectStore, key: str) -> ArchivedSegment:
    try:
        return ArchivedSegment(**json.loads(store.get(key)))
    except (ChecksumError, ValueError, TypeError) as error:
        raise ChecksumError(
            f"{store.uri(key)} is no entry of an archived segment ({type(error).__name__}: {error}): restore it"
        ) from error


def read_segment(store: ObjectStore, folder: str, entry: ArchivedSegment) -> bytes:
    """Read an archived segment, its checksum verified.

    :raises ChecksumError: it has other bytes than were archived
    """
    data = store.get(f"{folder}{entry.node}/{entry.name}")
    if google_crc32c.value(data) != entry.crc32c:
        raise ChecksumError(f"{store.uri(f'{folder}{entry.node}/{entry.name}')} has other bytes than were archived")
    return data


def is_moved(store: ObjectStore, entry: ArchivedSegment) -> bool:
    """Tell whether all of a segment that waits is in ``cdc_archive/``, too: moving it was cut off."""
    path = f"{READ}{entry.node}/{entry.name}"
    there = store.stat(path) if store.stat(f"{path}.json") is not None else None
    return there is not None and (there.size, there.crc32c) == (entry.size, entry.crc32c)


def mark_read(store: ObjectStore, entry: ArchivedSegment, data: bytes, written: Written | None) -> None:
    """Move a segment that was read to ``cdc_archive/``. A kill in between leaves it in both folders: repeat it.

    :param written: write times of its rows; None: unknown
    """
    first_us, last_us = written or (None, None)
    _put_all(store, READ, replace(entry, first_us=first_us, last_us=last_us), data)
    remove(store, WAITING, entry)


def remove(store: ObjectStore, folder: str, entry: ArchivedSegment) -> None:
    """Remove a segment from a folder of the archive, its entry last: after a kill, that is done again."""
    path = f"{folder}{entry.node}/"
    for key in (f"{path}{entry.name}", f"{path}{index_name(entry.name)}", _entry_key(folder, entry)):
        store.delete(key)


def _entry_key(folder: str, entry: ArchivedSegment) -> str:
    return f"{folder}{entry.node}/{entry.name}.json"


def is_waiting(store: ObjectStore) -> bool:
    """Tell whether archived segments are to be read."""
    return bool(waiting_keys(store))


def tidy(
    store: ObjectStore, oldest_ms: float, is_finished: Callable[[str, int], bool], seen: Collection[str] = ()
) -> tuple[int, frozenset[str]]:
    """Remove segments that were read and written long ago, and what uploads have left that came to nothing.

    :param oldest_ms: those written later stay, ms since the epoch
    :param is_finished: tells whether a segment was read whole, by host id and segment id
    :param seen: keys that a call long ago has returned
    :returns: number of removed segments, and the keys of objects without an entry. They may be uploaded just now: a
        later call, which is told of them, removes those that are still without
    """
    removed = 0
    keys = [stat.key for stat in store.list(READ)]
    entries = [key for key in keys if ENTRY.fullmatch(key)]
    for _, of_node in groupby(entries, lambda key: key.split("/")[1]):
        for key in of_node:  # the oldest first
            try:
                entry = _entry(store, key)
            except (ChecksumError, NotFoundError):
                continue  # archive_reprocess reports it
            if entry.ended_ms >= oldest_ms:
                break
            remove(store, READ, entry)
            removed += 1
    keys += [stat.key for stat in store.list(WAITING)]
    there, left = frozenset(keys), set()
    for key in keys:
        part = _PART.fullmatch(key)
        identity = segment_id(f"{part[2]}.log") if part else None
        if part is None or identity is None or f"{key.removesuffix(part[3])}.log.json" in there:
            continue  # it has an entry, or is not ours
        if key in seen and is_finished(part[1], identity):
            store.delete(key)
        else:
            left.add(key)
    return removed, frozenset(left)
