"""Lists in CQL: entries have names (timeuuids) in the log that no statement can give, so their values stand for them.

An entry that is written or deleted again is removed by its value, ``l = l - [value]``, from all that have this value;
those of them that stay are put back with the times that they had. A dead entry that is put back is dead at once: what
killed it has a later timestamp. So the list ends up with the same entries, each with its own times, in another order
perhaps, if the log has the list from its beginning; and the same record twice does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE


@dataclass(frozen=True)
class Entry:
    """A cell of a list: the fields of ``CELL`` (:mod:`ringsync.changes.schema`)."""

    column: int
    path: bytes
    value: bytes | None
    timestamp: int
    ttl: int | None
    local_deletion_time: int | None
    kind: int


@dataclass
class ListChange:
    """What one change row does to a list.

    :ivar removed: values that leave the list, and the deletion's timestamp in µs
    :ivar back: entries that were removed with them and stay
    :ivar added: new entries
    :ivar unknown: how many entries are deleted that this log has not put there
    """

    removed: list[tuple[bytes, int]] = field(default_factory=list)
    back: list[Entry] = field(default_factory=list)
    added: list[Entry] = field(default_factory=list)
    unknown: int = 0


class ListEntries:
    """The entries of all lists, as far as a log has told."""

    def __init__(self) -> None:
        self._lists: dict[object, dict[bytes, Entry]] = {}

    def forget(self, key: object, timestamp: int) -> None:
        """The list is deleted: entries of that time or before are dead, and nobody need know them.

        :param key: of the list
        :param timestamp: µs
        """
        entries = self._lists.get(key, {})
        for path in [path for path, entry in entries.items() if entry.timestamp <= timestamp]:
            del entries[path]

    def change(self, key: object, cells: Iterable[Entry]) -> ListChange:
        """What cells of a list's column do to it.

        :param key: of the list
        :param cells: in the order of the log
        """
        entries = self._lists.setdefault(key, {})
        found = ListChange()
        removed: dict[bytes, int] = {}
        for cell in cells:
            known = entries.get(cell.path)
            if known is not None and not _supersedes(cell, known):
                continue
            entries[cell.path] = cell
            if known is None:
                found.unknown += cell.kind == TOMBSTONE
            elif known.value is not None:
                removed[known.value] = max(removed.get(known.value, cell.timestamp), cell.timestamp)
            if cell.kind != TOMBSTONE:
                found.added.append(cell)
        for value, timestamp in removed.items():
            found.removed.append((value, timestamp))
            found.back += [
                entry
                for entry in entries.values()
                if entry.value == value and entry.timestamp <= timestamp and entry not in found.added
            ]
        return found


def _supersedes(cell: Entry, known: Entry) -> bool:
    """Whether a cell wins against one of the same name (docs/formats.md, 3.1; C: db/rows/Cells.resolveRegular)."""
    return _rank(cell) > _rank(known)


def _rank(cell: Entry) -> tuple[int, int, int, bytes]:
    strength = {LIVE: 0, EXPIRING: 1, TOMBSTONE: 2}[cell.kind]
    return cell.timestamp, strength, cell.local_deletion_time or 0, cell.value or b""
