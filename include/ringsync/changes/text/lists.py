"""Lists in CQL. In the log an entry has a name (a timeuuid). No statement can name it, so its value stands for it.

If an entry is written again or deleted, ``l = l - [value]`` removes all entries with its value. Those that should stay
are then put back with their old times. A dead entry that is put back is dead at once, because its deletion has a later
timestamp. If the log has the list from its beginning, the list ends up with the same entries and times, though perhaps
in another order. Repeated records do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ringsync.changes.flat import FlatCells
from ringsync.changes.schema import EXPIRING, LIVE, TOMBSTONE
from ringsync.compiled.arrow import Integers
from ringsync.cql.cells import cells_of_values


@dataclass(frozen=True)
class Entry:
    """A cell of a list (:class:`ringsync.changes.flat.FlatCells`)."""

    column: int
    timestamp: int
    local: int
    ttl: int
    kind: int
    path: bytes
    value: bytes | None

    @staticmethod
    def of(cells: FlatCells, place: int) -> Entry:
        """Return the cell at a place."""
        numbers = (cells.column, cells.timestamp, cells.local, cells.ttl, cells.kind)
        column, timestamp, local, ttl, kind = (int(values[place]) for values in numbers)
        return Entry(column, timestamp, local, ttl, kind, cells.path.value(place) or b"", cells.value.value(place))


def cells_of_entries(rows: Integers, entries: Sequence[Entry]) -> FlatCells:
    """Make cells of entries, each in its row."""
    numbers = np.array([(e.column, e.timestamp, e.local, e.ttl, e.kind) for e in entries], np.int64).reshape(-1, 5)
    values = cells_of_values([entry.value or b"" for entry in entries])
    gone = np.array([entry.value is None for entry in entries], np.bool_)
    column, timestamp, local, ttl, kind = numbers.T
    paths = cells_of_values([entry.path for entry in entries])
    return FlatCells(rows, column, timestamp, local, ttl, kind, paths, values.without(gone))


@dataclass
class ListChange:
    """The effect of one change row on a list.

    :ivar removed: values that are removed, each with the deletion's timestamp in µs
    :ivar back: entries with these values that should stay, so they are put back
    :ivar unknown: number of deleted entries that this log did not add
    """

    removed: list[tuple[bytes, int]] = field(default_factory=list)
    back: list[Entry] = field(default_factory=list)
    added: list[Entry] = field(default_factory=list)
    unknown: int = 0


class ListEntries:
    """The known entries of all lists, from the part of the log that has been read."""

    def __init__(self) -> None:
        self._lists: dict[object, dict[bytes, Entry]] = {}

    def forget(self, key: object, timestamp: int) -> None:
        """Forget the entries that the deletion of a list removed: those of its time or before.

        :param timestamp: time of the deletion, µs
        """
        entries = self._lists.get(key, {})
        for path in [path for path, entry in entries.items() if entry.timestamp <= timestamp]:
            del entries[path]

    def change(self, key: object, cells: Iterable[Entry]) -> ListChange:
        """Apply cells of a list's column to the known entries, and return what changes.

        :param cells: cells in the order of the log
        """
        entries = self._lists.setdefault(key, {})
        effect = ListChange()
        removed: dict[bytes, int] = {}
        for cell in cells:
            known = entries.get(cell.path)
            if known is not None and _rank(cell) <= _rank(known):
                continue
            entries[cell.path] = cell
            if known is None:
                effect.unknown += cell.kind == TOMBSTONE
            elif known.value is not None:
                removed[known.value] = max(removed.get(known.value, cell.timestamp), cell.timestamp)
            if cell.kind != TOMBSTONE:
                effect.added.append(cell)
        for value, timestamp in removed.items():
            effect.removed.append((value, timestamp))
            effect.back += [
                entry
                for entry in entries.values()
                if entry.value == value and entry.timestamp <= timestamp and entry not in effect.added
            ]
        return effect


def _rank(cell: Entry) -> tuple[int, int, int, bytes]:
    """Return a sort key: of two cells the greater one wins (docs/formats.md, 3.1; C: db/rows/Cells.resolveRegular)."""
    strength = {LIVE: 0, EXPIRING: 1, TOMBSTONE: 2}[cell.kind]
    return cell.timestamp, strength, cell.local, cell.value or b""
