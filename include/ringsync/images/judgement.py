"""What several looks at a row tell: whether the replica is wrong, or only behind, or ahead. No clock is asked.

Look 1 is at the source; then the replica takes what was logged until then; look 2 is at the replica, look 3 at the
source again. A cell only ever becomes newer (C: db/rows/Cells). So the replica's cell is at least that of look 1 and at
most that of look 3. If it is neither, it is wrong, whatever its write time says. What has changed between the looks in
a way that they cannot tell is open, and looked at again: then look 3 is the next look 1. Then the replica's cell is
also wrong if it is still the one of the round before, though the source had another one between these two looks.

Plain Python: only rows come here that equal neither look at the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ringsync.cql import types as cql
from ringsync.images.differences import Cell, Difference, Row, cell_of, elements_of, row_differences
from ringsync.images.schema import lake_names
from ringsync.schema.table import TableSchema

Outcome = Literal["equal", "different", "missing", "extra", "changed_after", "late", "not_judged"]
"""What becomes of a row. changed_after: written after the copy of a table that nobody follows; late: it waits as late;
not_judged: the looks do not tell."""

OUTCOMES: tuple[Outcome, ...] = ("equal", "different", "missing", "extra", "changed_after", "late", "not_judged")

DIFFERENT: tuple[Outcome, ...] = ("different", "missing", "extra")

Place = tuple[str, str]
"""Column, and identity of the element; the latter is empty for a column of one cell."""


@dataclass(frozen=True)
class Slack:
    """What the source cannot tell, so that it is no difference.

    :ivar expiry_s: so much may expiries differ, s
    :ivar no_element_times: whether it does not tell the times of elements of collections; the replica may know them
    """

    expiry_s: int = 0
    no_element_times: bool = False

    def same(self, one: Cell, other: Cell) -> bool:
        """Tell whether two cells have the same content."""
        if (one.exists, one.value, one.raw) != (other.exists, other.value, other.raw):
            return False
        return all(
            self._same_time(a, b, slack_s)
            for a, b, slack_s in (
                (one.writetime, other.writetime, 0),
                (one.expires_at, other.expires_at, self.expiry_s),
            )
        )

    def _same_time(self, one: Any, other: Any, slack_s: int) -> bool:
        if one == other:
            return True
        if isinstance(one, int) and isinstance(other, int):
            return abs(one - other) <= slack_s
        return self.no_element_times and (one is None or other is None)

    def covers(self, difference: Difference) -> bool:
        """Tell whether it explains a difference."""
        times = (difference.source, difference.replica)
        if difference.kind not in ("writetime", "ttl"):
            return False
        if self.no_element_times and difference.source == "null" and (difference.replica or "").startswith("["):
            return True
        numbers = [int(time) for time in times if time is not None and time.isdecimal()]
        is_close = len(numbers) == len(times) and abs(numbers[0] - numbers[1]) <= self.expiry_s
        return difference.kind == "ttl" and is_close


EXACT = Slack()


@dataclass(frozen=True)
class Copy:
    """A replica that nobody keeps in step: it shows its source as of its bootstrap.

    :ivar as_of_us: moment of the bootstrap, µs
    :ivar until_us: nothing can have been written later, µs: a later time was set by the writer
    """

    as_of_us: int
    until_us: int

    def is_later(self, written_us: Any) -> bool:
        """Tell whether a cell may have been written after the copy."""
        return isinstance(written_us, int) and self.as_of_us < written_us <= self.until_us


@dataclass(frozen=True)
class Looks:
    """The looks at a row; None: it is not there. Rows are as for :func:`row_differences`.

    :ivar source: look 1
    :ivar replica_then: look 2, with what had not expired at look 1
    :ivar replica: look 2, with what had not expired at look 3
    :ivar source_later: look 3
    :ivar before: the replica's row in the round before, as in ``replica``
    :ivar is_unchanged: whether the replica's image is still that of the round before, its deletions included
    :ivar has_image: whether the replica has anything of the row; it keeps the deletions of rows that are gone
    :ivar has_all: whether at look 2 the replica had all that was logged at look 1
    :ivar copy: the table is not followed; None: it is
    """

    source: Row | None
    replica_then: Row | None
    replica: Row | None
    source_later: Row | None
    before: Row | None = None
    is_unchanged: bool = False
    has_image: bool = True
    has_all: bool = True
    copy: Copy | None = None


def judge(table: TableSchema, looks: Looks, slack: Slack = EXACT) -> tuple[Outcome, list[Difference]]:
    """Judge a row.

    :returns: what became of it (``not_judged``: look again), and its differences
    """
    shown = looks.source_later or looks.source
    rows = (looks.source, looks.replica_then, looks.replica, looks.source_later, looks.before)
    # A row that is not shown does not show its partition's static cells either: that says nothing of them.
    kinds = ("regular",) if None in rows[:4] else ("regular", "static")
    parts = [_cells(table, row, kinds, slack) for row in rows]
    verdicts = {place: _judge_cell(looks, slack, [_cell(cells, place) for cells in parts]) for place in _places(parts)}
    row = _judge_row(table, looks, slack, parts)
    wrong = [place for place, verdict in verdicts.items() if verdict is False]
    if row is not False and not wrong:
        return ("equal" if row and None not in verdicts.values() else "not_judged"), []
    if looks.copy is not None and _is_later(looks.copy, parts[0], wrong):
        return "changed_after", []
    if looks.replica is None:
        return "missing", list(row_differences(table, shown, None))
    if row is False or shown is None:
        return "extra", list(row_differences(table, None, looks.replica))
    doubtful = [place for place, verdict in verdicts.items() if not verdict]
    return "different", list(_named(table, shown, looks.replica, doubtful, slack))


_Cells = Mapping[Place, Cell]
_ABSENT = Cell(cql.Native("blob"))


def _cell(cells: _Cells, place: Place) -> Cell:
    return cells.get(place, _ABSENT)


def _places(parts: list[_Cells]) -> dict[Place, None]:
    return {place: None for cells in parts[:4] for place in cells}


def _cells(table: TableSchema, row: Row | None, kinds: tuple[str, ...], slack: Slack) -> _Cells:
    """Return the cells of a row. An entry of a list is identified by its value, and by its time if the source tells it:
    its place may change."""
    cells: dict[Place, Cell] = {}
    if row is None:
        return cells
    names = lake_names(table)
    for column in table.value_columns:
        if column.kind not in kinds:
            continue
        cell = cell_of(column.type, row, names[column.name])
        if not column.is_multicell or cell.raw is not None:
            if cell.exists:
                cells[column.name, ""] = cell
            continue
        seen: Counter[str] = Counter()
        for identity, (_, element) in elements_of(cell).items():
            if isinstance(column.type, cql.ListType):
                time = None if slack.no_element_times else element.writetime
                identity = f"{time}:{element.value!r}"
                seen[identity] += 1
                identity = f"{identity}:{seen[identity]}"
            cells[column.name, identity] = element
    return cells


def _judge_cell(looks: Looks, slack: Slack, cells: list[Cell]) -> bool | None:
    """Tell whether the replica's cell can be right; None: the looks do not tell."""
    source, then, replica, later, before = cells
    if slack.same(then, source) or slack.same(replica, later):
        return True
    if _is_newer(replica, later):
        return False
    if not looks.has_all:
        return None
    if looks.copy is not None:
        return False
    is_constant = _has_stayed(slack, source, later)
    is_left = looks.is_unchanged or (before.exists and slack.same(before, replica))
    if is_constant or is_left or _is_newer(source, then):
        return False
    is_between = _is_newer(later, replica) and (not source.exists or _is_newer(replica, source))
    return True if is_between else None


def _has_stayed(slack: Slack, source: Cell, later: Cell) -> bool:
    """Tell whether the source had this cell all the time. Without its time it may have had another in between."""
    return source.exists and source.writetime is not None and slack.same(source, later)


def _is_newer(one: Cell, other: Cell) -> bool:
    """Tell whether both cells are there, and one was certainly written after the other."""
    times = [_newest(cell.writetime) for cell in (one, other) if cell.exists]
    return len(times) == 2 and None not in times and times[0] > times[1]


def _newest(times: Any) -> Any:
    """Return the newest of the times of a column that has several, as only its bytes are known."""
    return max((time for time in times if time is not None), default=None) if isinstance(times, list) else times


def _judge_row(table: TableSchema, looks: Looks, slack: Slack, parts: list[_Cells]) -> bool | None:
    """Tell whether it can be right that the replica has the row, or has it not."""
    replica, then = looks.replica is not None, looks.replica_then is not None
    source, later = looks.source is not None, looks.source_later is not None
    if then == source or replica == later:
        return True
    if not looks.has_all:
        return None
    if looks.copy is not None or looks.is_unchanged:
        return False
    if source and later and not replica:
        # A cell that has stayed was not deleted with its row, and what the replica has never heard of, neither.
        regular = {column.name for column in table.of_kind("regular")}
        stays = any(
            place[0] in regular and _has_stayed(slack, cell, _cell(parts[3], place)) for place, cell in parts[0].items()
        )
        return False if stays or not looks.has_image else None
    return None


def _is_later(copy: Copy, source: _Cells, wrong: list[Place]) -> bool:
    """Tell whether all that is wrong in a copy may have been written, or deleted, after it."""
    later = {place for place, cell in source.items() if copy.is_later(cell.writetime)}
    return bool(later) and all(place in later or place not in source for place in wrong)


def _named(table: TableSchema, source: Row, replica: Row, wrong: list[Place], slack: Slack) -> Iterator[Difference]:
    """Name the differences of some cells; of a list, all that differ."""
    types = {column.name: column.type for column in table.value_columns}
    names = lake_names(table)
    whole = {name for name, identity in wrong if not identity or isinstance(types[name], cql.ListType)}
    elements: set[tuple[str, str]] = set()
    for name, identity in wrong:
        for row in (source, replica):
            parts = elements_of(cell_of(types[name], row, names[name])) if identity and name not in whole else {}
            elements |= {(name, parts[identity][0])} if identity in parts else set()
    for difference in row_differences(table, source, replica):
        column, element = str(difference.column), difference.element
        is_wrong = column in whole or element is None or (column, element) in elements
        if is_wrong and column in {name for name, _ in wrong} and not slack.covers(difference):
            yield difference
