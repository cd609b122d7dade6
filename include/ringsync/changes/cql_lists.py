"""Lists in CQL: entries have names (timeuuids) in the log that no statement can give, so their values stand for them.

An entry that is written or deleted again is removed by its value, ``l = l - [value]``, from all that have this value;
those of them that stay are put back with the times that they had. A dead entry that is put back is dead at once: what
killed it has a later timestamp. So the list ends up with the same entries, each with its own times, in another order
perhaps, if the log has the list from its beginning; and the same record twice does no harm.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringsync.changes.cql_rows import Cell
from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE

_UUID_EPOCH = 0x01B21DD213814000
"""100 ns from 1582-10-15, when timeuuids begin, to 1970."""
_MIRROR = 1262304000 * 10_000_000 + _UUID_EPOCH
"""2010-01-01: entries put before others have times as far before it as it is past (C: cql3/Lists.Prepender)."""


@dataclass
class ListChange:
    """What one change row does to a list.

    :ivar removed: values that leave the list: literal and the deletion's timestamp in µs
    :ivar back: cells that were removed with them and stay
    :ivar added: cells of new entries
    :ivar unknown: how many entries are deleted that this log has not put there
    """

    removed: list[tuple[str, int]] = field(default_factory=list)
    back: list[Cell] = field(default_factory=list)
    added: list[Cell] = field(default_factory=list)
    unknown: int = 0


class ListEntries:
    """The entries of all lists, as far as a log has told."""

    def __init__(self) -> None:
        self._lists: dict[object, dict[bytes, Cell]] = {}

    def forget(self, key: object, timestamp: int) -> None:
        """The list is deleted: entries of that time or before are dead, and nobody need know them.

        :param key: of the list
        :param timestamp: µs
        """
        entries = self._lists.get(key, {})
        for path in [path for path, cell in entries.items() if cell.times.timestamp <= timestamp]:
            del entries[path]

    def change(self, key: object, cells: Iterable[Cell]) -> ListChange:
        """What cells of a list's column do to it.

        :param key: of the list
        :param cells: in the order of the log
        """
        entries = self._lists.setdefault(key, {})
        found = ListChange()
        removed: dict[bytes, tuple[Cell, int]] = {}
        for cell in cells:
            path = cell.raw_path or b""
            known = entries.get(path)
            if known is not None and not _supersedes(cell, known):
                continue
            entries[path] = cell
            if known is None:
                found.unknown += cell.is_tombstone
            elif known.raw_value is not None:
                _, before = removed.get(known.raw_value, (known, cell.times.timestamp))
                removed[known.raw_value] = known, max(before, cell.times.timestamp)
            if not cell.is_tombstone:
                found.added.append(cell)
        for value, (cell, timestamp) in removed.items():
            if cell.value is not None:
                found.removed.append((cell.value, timestamp))
            found.back += [
                entry
                for entry in entries.values()
                if entry.raw_value == value and entry.times.timestamp <= timestamp and entry not in found.added
            ]
        return found


def is_prepended(cell: Cell) -> bool:
    """Whether an entry was put before the others."""
    return uuid.UUID(bytes=cell.raw_path).time < _MIRROR


def _supersedes(cell: Cell, known: Cell) -> bool:
    """Whether a cell wins against one of the same name (spec §3.8; C: db/rows/Cells.resolveRegular)."""
    return _rank(cell) > _rank(known)


def _rank(cell: Cell) -> tuple[int, int, int, bytes]:
    strength = {LIVE: 0, EXPIRING: 1, TOMBSTONE: 2}[cell.kind]
    return cell.times.timestamp, strength, cell.local_deletion_time or 0, cell.raw_value or b""
