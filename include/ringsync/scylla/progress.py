"""How far a table's CDC log is read, and what to read of it next.

A log is read in windows of write times, ``[start, end)``, each once its end is so old that nothing more comes (the
*confidence*). All streams of a table are read up to one moment, so a position is small however many streams there are.
What differs is listed: groups of rows that are not complete yet, with their streams. A window ends between two ms, so
no group (one ``cdc$time``) is ever cut.

Rows may come later all the same: a coordinator was slow, a hint or a repair brought what only one replica had, or a
writer set an old timestamp, which Scylla takes if that time's generation operates still (S: cdc/metadata.cc).
So *sweeps* (:mod:`ringsync.scylla.sweeps`) read again what was read. The near one compares the last hours with what was
read of them, by the sums of all log rows in slots of some minutes; a slot that differs is staged once more, and what
was published of it is known by its digests. The far one is for what comes later than that; it keeps what its own TTL
says has come so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from uuid import UUID

from ringsync.scylla.generations import Interval
from ringsync.scylla.log_schema import EPOCH_100NS

OVERLAP_MS = 60_000
"""Time after its end for which a generation is read: a coordinator that does not know the next one yet, or whose clock
is behind, goes on writing to it."""

KEPT_GENERATIONS = 100
"""So many generations that are not described any more are remembered."""

WANTED_ROWS = 200_000
"""Rows that a window should have: the next one is longer if this one had few."""
LONGEST_WINDOW_MS = 30 * 86_400_000
GROWTH_OF_EMPTY, GROWTH_OF_SMALL = 4, 2

SLOT_MS = 300_000
"""Length of the slots of write time whose rows are summed up."""

ARRIVAL_MARGIN_MS, ARRIVAL_ERROR_MS = 60_000, 5_000
"""So long after a row has arrived at a coordinator it can be read. And so wrong may its arrival be: clocks differ."""


@dataclass(frozen=True)
class Waiting:
    """A group of log rows that lacks its last one.

    :ivar generation_ms: time of the generation of its stream
    :ivar stream: the stream's id, hexadecimal; ``time``: the group's ``cdc$time``, likewise
    :ivar since_ms: when it was found
    :ivar arrived_ms: it has arrived at this moment or later
    """

    generation_ms: int
    stream: str
    time: str
    since_ms: int
    arrived_ms: int


@dataclass(frozen=True)
class Sweep:
    """A search for rows that came late.

    :ivar began_ms: when the present or the last one began, ms since the epoch
    :ivar before_ms: when the one before began: what arrived earlier was found by it
    :ivar next_ms: write time from which the present one goes on; None: it is over
    :ivar window_ms: length of its next window
    :ivar part: of a near one that has summed up a part of a slot: the sums of this part
    :ivar ended_ms: of a near one: write time up to which the last one that is over has compared
    """

    began_ms: int
    before_ms: int
    next_ms: int | None = None
    window_ms: int = 600_000
    part: SlotSums = (0, 0, 0)
    ended_ms: int = 0


@dataclass(frozen=True)
class Again:
    """A part of the write time that is to be read again.

    :ivar since_ms: rows that have arrived since then may be unread, ms since the epoch
    """

    start_ms: int
    end_ms: int
    since_ms: int


SlotSums = tuple[int, int, int]
"""Log rows of a slot, and two sums of the ids of their groups, without overflow."""

Sums = Mapping[int, SlotSums]
"""Sums by the begin of a slot, ms."""


@dataclass(frozen=True)
class Position:
    """How far a table's log is read.

    :ivar until_ms: all earlier write times are read, ms since the epoch
    :ivar known: times of the generations whose streams were read
    :ivar waiting: groups that are not complete
    :ivar window_ms: length of the next window
    :ivar near: the sweep of the last hour or so; ``far``: that of all that the generations have
    :ivar ends_ms: the table has lost its log at this moment, and is read up to it; None: it has one
    :ivar begin_ms: write time from which on all was read
    :ivar ttl_s: the log's TTL, s; 0: none. ``former_ttls``: those before it that rows may have, or had that have
        expired unread, each with the moment when it was noticed that the log has another one, and since when that may
        have been, ms
    :ivar log_id: id of the log table; ``keys``: names of the base table's key columns
    :ivar has_keys_only: whether the log lacks the values of what was logged lately
    :ivar slots: what was read of the last hours: begin of the slot, and its sums
    :ivar again: what is to be read again, as a whole: late rows are in it. ``again_ms``: length of its steps
    """

    until_ms: int
    known: tuple[int, ...]
    near: Sweep
    far: Sweep
    window_ms: int
    waiting: tuple[Waiting, ...] = ()
    ends_ms: int | None = None
    begin_ms: int = 0
    slots: tuple[tuple[int, int, int, int], ...] = ()
    again: tuple[Again, ...] = ()
    again_ms: int = SLOT_MS
    ttl_s: int = 0
    former_ttls: tuple[tuple[int, int, int], ...] = ()
    log_id: str = ""
    keys: tuple[str, ...] = ()
    has_keys_only: bool = False

    @property
    def waiting_from_ms(self) -> int | None:
        """Write time of the oldest group that is not complete, ms since the epoch; None: there is none."""
        ticks = (UUID(one.time).time - EPOCH_100NS for one in self.waiting)
        return min((tick // 10_000 for tick in ticks), default=None)

    def to_document(self) -> dict[str, Any]:
        """Return the position as a JSON object; :meth:`of` gives an equal one back."""
        return asdict(self)

    @staticmethod
    def of(document: dict[str, Any]) -> Position:
        """Read what :meth:`to_document` wrote."""
        parts = {
            "known": tuple(document["known"]),
            "near": _sweep_of(document["near"]),
            "far": _sweep_of(document["far"]),
            "waiting": tuple(Waiting(**one) for one in document["waiting"]),
            "slots": tuple((slot, rows, first, second) for slot, rows, first, second in document["slots"]),
            "again": tuple(Again(**one) for one in document["again"]),
            "keys": tuple(document["keys"]),
            "former_ttls": tuple((ttl_s, until_ms, next_ms) for ttl_s, until_ms, next_ms in document["former_ttls"]),
        }
        return Position(**{**document, **parts})

    @staticmethod
    def begin(start_ms: int, known: Collection[int], window_ms: int, kept_from_ms: int = 0) -> Position:
        """Begin to read a log at a write time, or a little earlier: so the first slot is whole, if the log has all of
        it. Older write times that arrive from then on are found by far sweeps."""
        start_ms = max(start_ms // SLOT_MS * SLOT_MS, min(start_ms, kept_from_ms))
        sweep = Sweep(start_ms, start_ms, ended_ms=start_ms)
        return Position(start_ms, tuple(sorted(known)), sweep, sweep, window_ms, begin_ms=start_ms)

    def with_ttl(self, ttl_s: int, now_ms: int) -> Position:
        """Return the position of a log that has a TTL now: rows that were written before keep theirs.

        :param ttl_s: s; 0: none
        """
        former, far = self.former_ttls, self.far
        if ttl_s != self.ttl_s and self.ttl_s:
            former = (*former, (self.ttl_s, now_ms, min(self.until_ms, now_ms)))
        if ttl_s and not self.ttl_s and not former:
            # Nothing older has a TTL: it has not expired, and no far sweep could tell when it came.
            far = replace(far, began_ms=max(far.began_ms, min(self.until_ms, now_ms)))
        # Rows are read again as long as they are there, with the TTL that they have.
        left = tuple(one for one in former if now_ms < one[1] + 1000 * one[0] or not self._has_all_of(one[1]))
        return replace(self, ttl_s=ttl_s, former_ttls=left, far=far)

    def _has_all_of(self, moment_ms: int) -> bool:
        """Tell whether all is read that had arrived until a moment, rows with old timestamps included."""
        if self.until_ms < moment_ms or self.waiting or self.again:
            return False
        return _is_behind(self.near, moment_ms) and _is_behind(self.far, moment_ms)

    @property
    def ttls_s(self) -> tuple[int, ...]:
        """The TTLs that log rows may have, s, the present one first; without it if it is 0."""
        former = (ttl_s for ttl_s, *_ in reversed(self.former_ttls))
        return tuple(dict.fromkeys(filter(None, (self.ttl_s, *former))))

    def expired(self, since_ms: int, now_ms: int) -> tuple[int, int]:
        """Return when rows must have arrived to be forgotten by now, of those that have arrived since a moment: from
        then on, and before. Both are equal: none are."""
        found, from_ms = [], since_ms
        for ttl_s, noticed_ms, next_from_ms in self.former_ttls:
            found.append((from_ms, min(noticed_ms, now_ms - 1000 * ttl_s)))
            from_ms = max(since_ms, next_from_ms)
        if self.ttl_s:
            found.append((from_ms, now_ms - 1000 * self.ttl_s))
        lost = [(first, behind) for first, behind in found if first < behind]
        return (lost[0][0], max(behind for _, behind in lost)) if lost else (since_ms, since_ms)

    @property
    def has_ended(self) -> bool:
        """Whether all of a log that was lost is read: no sweep can find anything more."""
        ends_ms = self.ends_ms
        if ends_ms is None or self.until_ms < ends_ms or self.waiting or self.again:
            return False
        return _is_behind(self.near, ends_ms) and (not self.ttls_s or _is_behind(self.far, ends_ms))

    @property
    def searched_ms(self) -> int:
        """What had arrived before this moment was searched by sweeps, ms since the epoch."""
        sweeps = (self.near, self.far) if self.ttls_s else (self.near,)
        began_ms = min(one.began_ms if one.next_ms is None else one.before_ms for one in sweeps)
        return max(began_ms - ARRIVAL_MARGIN_MS, self.begin_ms)

    @property
    def unread_from_ms(self) -> int:
        """What was written, and had arrived, before this moment is read, ms since the epoch."""
        waiting, again = (one.arrived_ms for one in self.waiting), (one.start_ms for one in self.again)
        return min([self.until_ms, self.searched_ms, *waiting, *again])


def _is_behind(sweep: Sweep, moment_ms: int) -> bool:
    """Tell whether a sweep is over that has found all that had arrived until a moment."""
    return sweep.next_ms is None and sweep.began_ms >= moment_ms + 2 * ARRIVAL_MARGIN_MS


def _sweep_of(document: dict[str, Any]) -> Sweep:
    rows, first, second = document["part"]
    return Sweep(**{**document, "part": (rows, first, second)})


Kind = Literal["window", "near", "far", "again"]


@dataclass(frozen=True)
class Piece:
    """What to read of one generation: the streams' rows with a write time in ``[start_ms, end_ms)``.

    :ivar kind: a ``window``; a step of a ``near`` sweep, whose rows are only summed up, or of a ``far`` one; or what is
        read ``again``
    :ivar arrived_from_ms: of a far sweep: only rows that arrived then or later; ``arrived_until_ms``: and before this
    :ivar compared_from_ms: of a far sweep: write time from which on near sweeps look; ``late_ms``: so long after its
        write time a row there must have arrived at least
    """

    generation_ms: int
    start_ms: int
    end_ms: int
    kind: Kind = "window"
    arrived_from_ms: int = 0
    arrived_until_ms: int = 0
    compared_from_ms: int = 0
    late_ms: int = 0


@dataclass(frozen=True)
class Rules:
    """How a log is read. All times are in ms.

    :ivar confidence_ms: age at which nothing more of a write time is expected
    :ivar window_ms: shortest window
    :ivar near_ms: time between two sweeps of the last ``reach_ms``; ``far_ms``: of everything
    :ivar far_of_all: whether rows may come late in any generation (tablets); False: only where it operated lately
    :ivar skew_ms: how far a node's clock may be from the others'
    """

    confidence_ms: int
    window_ms: int
    near_ms: int
    reach_ms: int
    far_ms: int
    far_of_all: bool = False
    skew_ms: int = 0


def window_end(position: Position, now_ms: int, rules: Rules) -> int | None:
    """Return where the next window ends, ms; None: it is too early for one."""
    newest = now_ms - rules.confidence_ms
    if position.ends_ms is not None:
        newest = min(newest, position.ends_ms)
        return min(newest, position.until_ms + position.window_ms) if newest > position.until_ms else None
    # A window that had too many rows for a task is shorter than agreed.
    if newest < position.until_ms + min(position.window_ms, rules.window_ms):
        return None
    return min(newest, position.until_ms + position.window_ms)


def window_pieces(position: Position, end_ms: int, generations: Sequence[Interval]) -> list[Piece]:
    """Return what to read for a window: from where the position is up to ``end_ms``.

    :param generations: intervals of all that are known, in the order of their times
    """
    found = ((one.start_ms, max(one.start_ms, position.until_ms), last_ms(one, end_ms)) for one in generations)
    return [Piece(time_ms, first, last) for time_ms, first, last in found if first < last]


def noticed(position: Position, described: Sequence[Interval]) -> Position:
    """Return the position once these generations have streams. What was read without the streams of a new one is to be
    read again.

    :param described: intervals of all that have streams
    """
    late = [
        Again(first, last, first)
        for one in described
        if one.start_ms not in position.known
        and (first := max(one.start_ms, position.begin_ms)) < (last := last_ms(one, position.until_ms))
    ]
    times = {one.start_ms for one in described}
    # Nodes forget an old generation at different moments: it is not new if another one still has it.
    gone = [time_ms for time_ms in position.known if time_ms not in times][-KEPT_GENERATIONS:]
    return replace(position, known=tuple(sorted([*gone, *times])), again=(*position.again, *late))


def last_ms(generation: Interval, end_ms: int) -> int:
    """Return up to which write time a generation is read, ms."""
    return end_ms if generation.end_ms is None else min(end_ms, generation.end_ms + OVERLAP_MS)


def again_end(position: Position) -> int:
    """Return how far the first part that is read again is read in one step, ms."""
    first = position.again[0]
    return min(first.end_ms, first.start_ms + position.again_ms)


def again_pieces(position: Position, generations: Sequence[Interval]) -> list[Piece]:
    """Return what to read again in one step: the begin of the first part."""
    if not position.again:
        return []
    start_ms, end_ms = position.again[0].start_ms, again_end(position)
    found = ((one.start_ms, max(one.start_ms, start_ms), last_ms(one, end_ms)) for one in generations)
    return [Piece(time_ms, first, last, "again") for time_ms, first, last in found if first < last]


def was_read_again(position: Position, rows: int) -> Position:
    """Return the position after a step of what is read again, which had so many rows."""
    if not position.again:
        return position
    first, reached_ms = position.again[0], again_end(position)
    left = (Again(reached_ms, first.end_ms, max(first.since_ms, reached_ms)),) if reached_ms < first.end_ms else ()
    again_ms = grown(reached_ms - first.start_ms, rows, min(position.again_ms, SLOT_MS))
    return replace(position, again=(*left, *position.again[1:]), again_ms=again_ms)


def advanced(position: Position, end_ms: int, rows: int, rules: Rules) -> Position:
    """Return the position after a window, which had so many rows."""
    return replace(
        position,
        until_ms=end_ms,
        # Not from what was agreed: a table whose windows are all of the shortest kind must not agree on days.
        window_ms=grown(end_ms - position.until_ms, rows, min(position.window_ms, rules.window_ms)),
    )


def grown(window_ms: int, rows: int, least_ms: int) -> int:
    """Return the length of the window after one with so many rows."""
    if rows == 0:
        longer = GROWTH_OF_EMPTY * window_ms
    elif rows < WANTED_ROWS // 4:
        longer = GROWTH_OF_SMALL * window_ms
    else:
        longer = window_ms if rows <= WANTED_ROWS else window_ms // 2
    return max(least_ms, min(longer, LONGEST_WINDOW_MS))


NO_SUMS: SlotSums = (0, 0, 0)


def added(one: SlotSums, other: SlotSums) -> SlotSums:
    """Return the sums of two parts of a slot."""
    return one[0] + other[0], (one[1] + other[1]) % 2**64, (one[2] + other[2]) % 2**64
