"""How far a table's CDC log is read, and what to read of it next.

A log is read in windows of write times, ``[start, end)``, each once its end is so old that nothing more comes (the
*confidence*). All streams of a table are read up to one moment, so a position is small however many streams there are.
What differs is listed: groups of rows that are not complete yet, with their streams. A window ends between two ms, so
no group (one ``cdc$time``) is ever cut.

Rows may come later all the same: a coordinator was slow, a hint or a repair brought what only one replica had, or a
writer set an old timestamp, which Scylla takes if that time's generation operates still (S: cdc/metadata.cc).
So *sweeps* read again what was read. The near one compares the last hours with what was read of them, by the sums of
all log rows in slots of some minutes; a slot that differs is staged once more, and what was published of it is known by
its digests. The far one is for what comes later than that; it keeps what its own TTL says has come so.
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
    :ivar ttl_s: the log's TTL, s; 0: none. ``former_ttls``: those before it that rows may have which are not read yet,
        each with the moment when it was noticed that the log has another one, and since when that may have been, ms
    :ivar log_id: id of the log table
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
        left = tuple(one for one in former if not self._has_all_of(one[1]))
        return replace(self, ttl_s=ttl_s, former_ttls=left, far=far)

    def _has_all_of(self, moment_ms: int) -> bool:
        """Tell whether all is read that had arrived until a moment, rows with old timestamps included."""
        return self.until_ms >= moment_ms and _is_behind(self.far, moment_ms)

    @property
    def ttls_s(self) -> tuple[int, ...]:
        """The TTLs that log rows may have which are not read yet, s, the present one first; without it if it is 0."""
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
    found = ((one.start_ms, max(one.start_ms, position.until_ms), _last_ms(one, end_ms)) for one in generations)
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
        and (first := max(one.start_ms, position.begin_ms)) < (last := _last_ms(one, position.until_ms))
    ]
    return replace(position, known=tuple(one.start_ms for one in described), again=(*position.again, *late))


def _last_ms(generation: Interval, end_ms: int) -> int:
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
    found = ((one.start_ms, max(one.start_ms, start_ms), _last_ms(one, end_ms)) for one in generations)
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


def due(position: Position, now_ms: int, rules: Rules, first_ms: int) -> Position:
    """Begin the sweeps that are due.

    :param first_ms: time of the first generation
    """
    # One that began by a clock that was ahead began before.
    near, far = (
        replace(one, began_ms=one.before_ms) if one.began_ms > now_ms + ARRIVAL_MARGIN_MS else one
        for one in (position.near, position.far)
    )
    if near.next_ms is None and now_ms - near.began_ms >= rules.near_ms:
        # Of the first slot that part is compared that was read.
        begin_ms = max(_near_from_ms(position, rules), position.begin_ms // SLOT_MS * SLOT_MS)
        next_ms = begin_ms if begin_ms < compared_until(position) else None
        near = Sweep(now_ms, near.began_ms, next_ms, near.window_ms, ended_ms=near.ended_ms)
    if far.next_ms is None and rules.far_ms and now_ms - far.began_ms >= rules.far_ms:
        far = Sweep(now_ms, far.began_ms, first_ms, far.window_ms)
    return replace(position, near=near, far=far)


def late_ms(rules: Rules) -> int:
    """Return how long after its write time a row comes at least that is for far sweeps, ms: near ones find all that
    come sooner."""
    return max(0, rules.reach_ms - 2 * rules.near_ms - ARRIVAL_MARGIN_MS - rules.skew_ms)


def _near_from_ms(position: Position, rules: Rules) -> int:
    """Return where the next near sweep begins, ms: also after a long stop it has all that came since the one before
    began, and all that was never compared."""
    missed_ms = position.near.began_ms - late_ms(rules)
    return min(position.until_ms - rules.reach_ms, missed_ms, position.near.ended_ms) // SLOT_MS * SLOT_MS


def compared_until(position: Position) -> int:
    """Return the end of the last slot that was read to its end, ms."""
    return position.until_ms // SLOT_MS * SLOT_MS


def near_end(position: Position) -> int:
    """Return the end of the next step of the near sweep, ms: it ends with a slot, or lies in one."""
    near = position.near
    assert near.next_ms is not None
    end_ms = near.next_ms + near.window_ms
    whole_ms, slot_end_ms = end_ms // SLOT_MS * SLOT_MS, (near.next_ms // SLOT_MS + 1) * SLOT_MS
    return min(whole_ms if whole_ms >= slot_end_ms else end_ms, compared_until(position))


def far_end(position: Position) -> int:
    """Return the end of the next step of the far sweep, ms."""
    assert position.far.next_ms is not None
    return min(position.far.next_ms + position.far.window_ms, position.until_ms)


def sweep_pieces(position: Position, generations: Sequence[Interval], rules: Rules) -> list[Piece]:
    """Return what the next steps of both sweeps read; nothing: none is going on."""
    pieces, near, far = [], position.near, position.far
    if near.next_ms is not None:
        for one in generations:
            first = max(one.start_ms, near.next_ms, position.begin_ms)
            last = _last_ms(one, near_end(position))
            if first < last:
                pieces.append(Piece(one.start_ms, first, last, "near"))
    if far.next_ms is None:
        return pieces
    for one in generations:
        operated = one.end_ms is None or one.end_ms + OVERLAP_MS >= far.before_ms
        if not operated and not rules.far_of_all:
            continue  # a generation takes no rows after its end
        first, last = max(one.start_ms, far.next_ms), _last_ms(one, far_end(position))
        if first < last:
            # What came while the sweep runs is for the next one, all of it: so nothing is taken twice.
            since_ms, until_ms = (at_ms - ARRIVAL_MARGIN_MS for at_ms in (far.before_ms, far.began_ms))
            error_ms = ARRIVAL_ERROR_MS + rules.skew_ms
            arrived = since_ms - error_ms, until_ms + error_ms
            pieces.append(Piece(one.start_ms, first, last, "far", *arrived, position.begin_ms, late_ms(rules)))
    return pieces


def swept_far(position: Position, rows: int) -> Position:
    """Return the position after a step of the far sweep, which has read so many rows."""
    if position.far.next_ms is None:
        return position
    return replace(position, far=_stepped(position.far, far_end(position), position.until_ms, rows))


def swept_near(position: Position, found: Sums, rows: int) -> Position:
    """Return the position after a step of the near sweep. Slots that have other log rows than were read are read again.

    :param found: what the step has found
    :param rows: rows that it has read
    """
    near = position.near
    if near.next_ms is None:
        return position
    end_ms, begun = near_end(position), near.next_ms // SLOT_MS * SLOT_MS
    found = {**found, begun: added(near.part, found.get(begun, NO_SUMS))}
    is_whole = end_ms % SLOT_MS == 0
    known: dict[int, SlotSums] = {slot: (count, first, second) for slot, count, first, second in position.slots}
    compared = range(begun, end_ms, SLOT_MS) if is_whole else ()
    other = [slot for slot in compared if known.get(slot, NO_SUMS) != found.get(slot, NO_SUMS)]
    known |= {slot: found.get(slot, NO_SUMS) for slot in other}
    stepped = _stepped(near, end_ms, compared_until(position), rows)
    ended_ms = near.ended_ms if stepped.next_ms is not None else end_ms
    since_ms = near.before_ms - ARRIVAL_MARGIN_MS
    return replace(
        position,
        near=replace(stepped, part=NO_SUMS if is_whole else found[begun], ended_ms=ended_ms),
        slots=_slots(known),
        again=(*position.again, *(Again(slot, slot + SLOT_MS, max(slot, since_ms)) for slot in other)),
    )


def _stepped(sweep: Sweep, end_ms: int, until_ms: int, rows: int) -> Sweep:
    assert sweep.next_ms is not None
    window_ms = grown(end_ms - sweep.next_ms, rows, min(sweep.window_ms, 60_000))
    return replace(sweep, next_ms=None if end_ms >= until_ms else end_ms, window_ms=window_ms)


def summed(position: Position, found: Sums, rules: Rules) -> Position:
    """Add what a window has read to the slots, and forget those that no near sweep compares any more."""
    near = position.near
    kept_from_ms = min(_near_from_ms(position, rules), position.until_ms if near.next_ms is None else near.next_ms)
    known: dict[int, SlotSums] = {
        slot: (count, first, second) for slot, count, first, second in position.slots if slot + SLOT_MS > kept_from_ms
    }
    for slot, sums in found.items():
        known[slot] = added(known.get(slot, NO_SUMS), sums)
    return replace(position, slots=_slots(known))


NO_SUMS: SlotSums = (0, 0, 0)


def added(one: SlotSums, other: SlotSums) -> SlotSums:
    """Return the sums of two parts of a slot."""
    return one[0] + other[0], (one[1] + other[1]) % 2**64, (one[2] + other[2]) % 2**64


def _slots(known: Mapping[int, SlotSums]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((slot, *sums) for slot, sums in sorted(known.items()) if any(sums))
