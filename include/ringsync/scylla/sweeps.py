"""The sweeps over what was read of a CDC log, for rows that came late (:mod:`ringsync.scylla.progress`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringsync.scylla.generations import Interval
from ringsync.scylla.progress import (
    ARRIVAL_ERROR_MS,
    ARRIVAL_MARGIN_MS,
    NO_SUMS,
    OVERLAP_MS,
    SLOT_MS,
    Again,
    Piece,
    Position,
    Rules,
    SlotSums,
    Sums,
    Sweep,
    added,
    grown,
    last_ms,
)


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
            last = last_ms(one, near_end(position))
            if first < last:
                pieces.append(Piece(one.start_ms, first, last, "near"))
    if far.next_ms is None:
        return pieces
    for one in generations:
        operated = one.end_ms is None or one.end_ms + OVERLAP_MS >= far.before_ms
        if not operated and not rules.far_of_all:
            continue  # a generation takes no rows after its end
        first, last = max(one.start_ms, far.next_ms), last_ms(one, far_end(position))
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


def _slots(known: Mapping[int, SlotSums]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((slot, *sums) for slot, sums in sorted(known.items()) if any(sums))
