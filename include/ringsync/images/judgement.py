"""What several looks at a row tell: whether the replica is wrong, or only behind, or ahead. No clock is asked.

Look 1 is at the source; then the replica takes what was logged until then; look 2 is at the replica, look 3 at the
source again. A cell only ever becomes newer (C: db/rows/Cells). So the replica's cell is at least that of look 1 and at
most that of look 3. If it is neither, it is wrong, whatever its write time says. What has changed between the looks in
a way that they cannot tell is open, and looked at again: then look 3 is the next look 1. Then the replica's cell is
also wrong if it is still the one of the round before, though the source had another one between these two looks. If
both sides have moved from round to round, the replica follows: a collection that is replaced every second can show no
more.

Plain Python: only rows come here that equal neither look at the source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ringsync.cql import types as cql
from ringsync.images.differences import Cell, Difference, Row, cell_of, elements_of, row_differences
from ringsync.images.schema import lake_names
from ringsync.schema.table import TableSchema

Outcome = Literal["equal", "different", "missing", "extra", "moving", "changed_after", "late", "not_judged"]
"""What becomes of a row. moving: it is written all the time, and the replica follows; changed_after: written after the
copy of a table that nobody follows; late: it waits as late; not_judged: the looks do not tell."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

DIFFERENT: tuple[Outcome, ...] = ("different", "missing", "extra")

Place = tuple[str, str]
"""Column, and identity of the element; the latter is empty for a column of one cell."""

ORDER = "order"
"""In place of an identity: the order of a list's entries."""


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
    columns = {name: [part.get(name, {}) for part in parts] for part in parts[:4] for name in part}
    lists = {column.name for column in table.value_columns if isinstance(column.type, cql.ListType)}
    verdicts = {
        (name, identity): verdict
        for name, seen in columns.items()
        for identity, verdict in _judge_column(looks, slack, seen, name in lists).items()
    }
    row = _judge_row(table, looks, slack, parts)
    wrong = [place for place, verdict in verdicts.items() if verdict is False]
    if row is not False and not wrong:
        left: dict[str, list[str]] = defaultdict(list)
        for name, identity in (place for place, verdict in verdicts.items() if verdict is None):
            left[name].append(identity)
        if row and not left:
            return "equal", []
        is_again = looks.has_all and looks.before is not None
        moves = row and is_again and all(_moves(slack, columns[name], cells) for name, cells in left.items())
        return ("moving" if moves else "not_judged"), []
    if looks.copy is not None and _is_later(looks.copy, parts[0], wrong):
        return "changed_after", []
    if looks.replica is None:
        return "missing", list(row_differences(table, shown, None))
    if row is False or shown is None:
        return "extra", list(row_differences(table, None, looks.replica))
    doubtful = [place for place, verdict in verdicts.items() if not verdict]
    return "different", list(_named(table, shown, looks.replica, doubtful, slack))


_Cells = Mapping[str, Cell]
"""The cells of a column, by identity."""

_ABSENT = Cell(cql.Native("blob"))


def _cells(table: TableSchema, row: Row | None, kinds: tuple[str, ...], slack: Slack) -> dict[str, dict[str, Cell]]:
    """Return the cells of a row, by column. An entry of a list is identified by its value, and by its time if the
    source tells it: its place may change."""
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    if row is None:
        return cells
    names = lake_names(table)
    for column in table.value_columns:
        if column.kind not in kinds:
            continue
        cell = cell_of(column.type, row, names[column.name])
        if not column.is_multicell or cell.raw is not None:
            if cell.exists:
                cells[column.name][""] = cell
            continue
        seen: Counter[str] = Counter()
        for identity, (_, element) in elements_of(cell).items():
            if isinstance(column.type, cql.ListType):
                time = None if slack.no_element_times else element.writetime
                identity = f"{time}:{element.value!r}"
                seen[identity] += 1
                identity = f"{identity}:{seen[identity]}"
            cells[column.name][identity] = element
    return cells


def _judge_column(looks: Looks, slack: Slack, seen: Sequence[_Cells], is_list: bool) -> dict[str, bool | None]:
    """Judge the cells of a column, as the five rows show them."""
    source, then, replica, later, _ = seen
    identities = dict.fromkeys(identity for cells in seen[:4] for identity in cells)
    verdicts = {
        identity: _judge_cell(looks, slack, [cells.get(identity, _ABSENT) for cells in seen]) for identity in identities
    }
    has_only_less = all(slack.same(cell, source.get(identity, _ABSENT)) for identity, cell in then.items())
    if has_only_less and not _are_same(slack, replica, later):
        # What only look 1 shows was deleted, or has never come: the replica has nothing that is newer.
        is_wrong = looks.has_all and (looks.is_unchanged or looks.copy is not None)
        lost = source.keys() - then.keys() - replica.keys() - later.keys()
        verdicts |= dict.fromkeys(lost, False if is_wrong else None)
    if is_list:
        verdicts[ORDER] = _judge_order(looks, slack, seen)
    return verdicts


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


def _judge_order(looks: Looks, slack: Slack, seen: Sequence[_Cells]) -> bool | None:
    """Tell whether the entries of a list can be in order; None: the looks do not tell. Which of two entries comes first
    never changes, unless others of the same value and time have come and gone."""
    source, then, replica, later, before = seen
    if _agree(source, then) or _agree(replica, later):
        return True
    # Without times, an entry that is back may have been elsewhere in between.
    is_left = looks.is_unchanged or not (slack.no_element_times or _agree(before, source))
    return False if looks.has_all and is_left else None


def _agree(one: _Cells, other: _Cells) -> bool:
    """Tell whether the entries that both lists have are in the same order."""
    return [entry for entry in one if entry in other] == [entry for entry in other if entry in one]


def _moves(slack: Slack, seen: Sequence[_Cells], left: Iterable[str]) -> bool:
    """Tell whether the source has changed a column between the looks, and the replica since the round before.

    :param left: cells that are not judged: none may stand still, but those that are gone on both sides
    """
    source, _, replica, later, before = seen
    if _are_same(slack, source, later) or _are_same(slack, before, replica):
        return False
    there = (identity for identity in left if identity in replica or identity in later)
    return not any(slack.same(before.get(one, _ABSENT), replica.get(one, _ABSENT)) for one in there)


def _are_same(slack: Slack, one: _Cells, other: _Cells) -> bool:
    """Tell whether two columns have the same cells."""
    return one.keys() == other.keys() and all(slack.same(cell, other[identity]) for identity, cell in one.items())


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


def _judge_row(table: TableSchema, looks: Looks, slack: Slack, parts: Sequence[Mapping[str, _Cells]]) -> bool | None:
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
        stays = any(
            _has_stayed(slack, cell, parts[3].get(column.name, {}).get(identity, _ABSENT))
            for column in table.of_kind("regular")
            for identity, cell in parts[0].get(column.name, {}).items()
        )
        return False if stays or not looks.has_image else None
    return None


def _is_later(copy: Copy, source: Mapping[str, _Cells], wrong: list[Place]) -> bool:
    """Tell whether all that is wrong in a copy may have been written, or deleted, after it."""
    is_later = {
        (name, identity): copy.is_later(cell.writetime)
        for name, cells in source.items()
        for identity, cell in cells.items()
    }
    return any(is_later.values()) and all(is_later.get(place, True) for place in wrong)


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
