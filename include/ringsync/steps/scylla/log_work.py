"""What a cycle reads of a table's CDC log, and the position after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args
from uuid import UUID

from ringsync.scylla.log_schema import EPOCH_100NS
from ringsync.scylla.progress import (
    ARRIVAL_MARGIN_MS,
    WANTED_ROWS,
    Kind,
    Piece,
    Position,
    Rules,
    Sweep,
    Waiting,
    advanced,
    again_end,
    again_pieces,
    noticed,
    was_read_again,
    window_end,
    window_pieces,
)
from ringsync.scylla.sweeps import compared_until, due, far_end, near_end, summed, sweep_pieces, swept_far, swept_near
from ringsync.steps.scylla.followed_logs import FollowedTable
from ringsync.steps.scylla.log_task import MOST_BYTES, LogWork, TableResult

PATIENCE_MS = 300_000
"""Time for which a group of log rows that is not complete waits; then what is there of it is taken."""

SHORTER = 8
"""How many times shorter the next step is after one with too many rows."""

_SEARCHES: frozenset[Kind] = frozenset({"near", "far", "again"})

WANTED_BYTES = MOST_BYTES // 4
"""Bytes that the largest request of a step should have: more make the next one shorter."""


@dataclass(frozen=True)
class Planned:
    """What is read of a table's log.

    :ivar position: the position before, with the sweeps that have begun
    :ivar end_ms: end of the window; None: none is read
    :ivar works: the requests
    :ivar resting: kinds that are not read now
    """

    table: FollowedTable
    position: Position
    rules: Rules
    end_ms: int | None
    works: tuple[LogWork, ...]
    resting: frozenset[Kind] = frozenset()

    @property
    def is_due(self) -> bool:
        """Whether something is to be done."""
        return self.end_ms is not None or bool(self.works)

    def taken(self, found: TableResult) -> Position:
        """Return the position once all that was found is committed. Kinds of works that were not all done are read once
        more, those with too many rows in shorter steps."""
        if self.table.log is None:
            return self._ended()
        missed = found.missed | self.resting
        load: dict[Kind, int] = {
            kind: max(found.counts[f"{kind}_rows"], WANTED_ROWS * found.largest[kind] // WANTED_BYTES)
            for kind in get_args(Kind)
        }
        if "window" in missed:  # nothing of the table was kept
            return self._shortened(self.position, found.too_many)
        position = self.position
        if "again" not in missed:
            position = was_read_again(position, load["again"])
        if "near" not in missed:
            position = swept_near(position, found.sums.get("near", {}), load["near"])
        if "far" not in missed:
            position = swept_far(position, load["far"])
        position = self._shortened(position, found.too_many)
        position = replace(position, waiting=self._still_waiting(found.waiting))
        if self.end_ms is not None:
            position = replace(position, log_id=self.table.log_id, keys=self.table.keys, has_keys_only=False)
        position = summed(position, found.sums.get("window", {}), self.rules)
        return position if self.end_ms is None else advanced(position, self.end_ms, load["window"], self.rules)

    def _ended(self) -> Position:
        """Return the position of a table that has no log any more."""
        until_ms = max(self.position.until_ms, self.end_ms or 0)
        over = Sweep(until_ms + 2 * ARRIVAL_MARGIN_MS, until_ms)
        near, far = over, over
        left = replace(self.position, until_ms=until_ms, ends_ms=self.end_ms, waiting=(), again=())
        return replace(left, near=near, far=far)

    def _still_waiting(self, found: Iterable[Waiting]) -> tuple[Waiting, ...]:
        known = {(one.stream, one.time): one for one in self.position.waiting}
        still = {(one.stream, one.time): known.get((one.stream, one.time), one) for one in found}
        asked = {(work.streams[0].hex(), work.only.hex()) for work in self.works if work.only is not None}
        return tuple(({key: one for key, one in known.items() if key not in asked} | still).values())

    def unread(self, now_ms: int, found: TableResult) -> list[tuple[int, int]]:
        """Return the times, ms, of which rows may be missing, though all was read.

        :param now_ms: when the reading was over
        """
        if "window" in found.missed:
            return []
        lost = self._unread_of_window(now_ms)
        for kind in _SEARCHES - found.missed - self.resting if self.table.log is not None else ():
            lost += self._expired_before(kind, now_ms)
        return [(first, last) for first, last in lost if first < last]

    def _unread_of_window(self, now_ms: int) -> list[tuple[int, int]]:
        """Return what may have expired; what a generation had that has no streams, and never got any, as a later one is
        known; and all of it if the log is gone, or is another one, or had keys only."""
        if self.end_ms is None:
            return []
        start_ms = self.position.until_ms
        first_ms = min([start_ms, *(one.arrived_ms for one in self.position.waiting)])
        if self.table.log is None or self.is_other_log or self.position.has_keys_only:
            return [(self.position.unread_from_ms, self.end_ms if self.table.log is None else now_ms)]
        expired_ms, kept_from_ms = self.position.expired(first_ms, now_ms)
        begin_ms = self.table.intervals[0].start_ms
        if begin_ms > first_ms:  # its generation is not described any more
            expired_ms, kept_from_ms = first_ms, max(begin_ms, kept_from_ms)
        found = [(expired_ms, min(kept_from_ms, self.end_ms))]
        for generation, interval in zip(self.table.generations, self.table.intervals, strict=True):
            if not generation.ranges:
                end_ms = self.end_ms if interval.end_ms is None else min(self.end_ms, interval.end_ms)
                found.append((max(interval.start_ms, found[-1][1], start_ms), end_ms))
        return found

    def _expired_before(self, kind: Kind, now_ms: int) -> list[tuple[int, int]]:
        """Return when rows arrived, or which were written, that may have expired before they were searched: by the
        sweep that ends now, or the step of what is read again."""
        position = self.position
        if kind == "again":
            if not position.again:
                return []
            part = position.again[0]
            first_ms, behind_ms = position.expired(part.since_ms, now_ms)
            # Of streams that were never read all is missing, of other parts what came late.
            is_new = part.since_ms <= part.start_ms
            return [(first_ms, min(behind_ms, again_end(position)) if is_new else behind_ms)]
        sweep = position.near if kind == "near" else position.far
        end = near_end if kind == "near" else far_end
        until_ms = compared_until(position) if kind == "near" else position.until_ms
        is_over = sweep.next_ms is not None and end(position) >= until_ms
        return [position.expired(sweep.before_ms - ARRIVAL_MARGIN_MS, now_ms)] if is_over else []

    @property
    def is_other_log(self) -> bool:
        """Whether the log was dropped and made again since it was read."""
        return bool(self.position.log_id) and self.position.log_id != self.table.log_id

    def _shortened(self, position: Position, too_many: Collection[Kind]) -> Position:
        read_ms = {"window": position.window_ms if self.end_ms is None else self.end_ms - position.until_ms}
        for work in self.works:
            length_ms = work.piece.end_ms - work.piece.start_ms
            if work.piece.kind != "window":
                read_ms[work.piece.kind] = max(length_ms, read_ms.get(work.piece.kind, 0))
        shorter = {kind: max(1, read_ms[kind] // SHORTER) for kind in too_many}
        return replace(
            position,
            window_ms=shorter.get("window", position.window_ms),
            again_ms=shorter.get("again", position.again_ms),
            near=replace(position.near, window_ms=shorter.get("near", position.near.window_ms)),
            far=replace(position.far, window_ms=shorter.get("far", position.far.window_ms)),
        )


def plan_work(
    table: FollowedTable,
    position: Position,
    place: int,
    now_ms: int,
    rules: Rules,
    *,
    resting: Collection[Kind] = (),
) -> Planned:
    """Plan what a cycle reads of a table's log.

    :param place: the table's place among those of the task
    :param resting: kinds that are not read now, since they have failed a moment ago
    """
    position = due(noticed(position, table.described), now_ms, rules, table.intervals[0].start_ms)
    end_ms = _described(window_end(position, now_ms, rules), position, table)
    sweeps = (*sweep_pieces(position, table.intervals, rules), *again_pieces(position, table.intervals))
    pieces = window_pieces(position, end_ms, table.intervals) if end_ms is not None else []
    pieces += [piece for piece in sweeps if piece.kind not in resting]
    works = [work for piece in pieces for work in _works(table, place, piece)]
    if end_ms is not None or table.ends_ms is not None:
        works += [_of_waiting(one, place, now_ms) for one in position.waiting]
    works = [replace(work, ttls_s=position.ttls_s) for work in works]
    return Planned(table, position, rules, end_ms, tuple(works), frozenset(resting))


def plan_end(table: FollowedTable, position: Position, rules: Rules) -> Planned:
    """Plan the end of a table that has lost its log, with all that was not read of it."""
    return Planned(table, position, rules, table.ends_ms, ())


def affordable(due: Sequence[Planned], most: int, first: int) -> list[Planned]:
    """Return the tables that are read in one cycle: as many as fit, one at least.

    :param most: number of requests
    :param first: number of the cycle: the next one begins with another table
    """
    first %= max(1, len(due))
    chosen: list[Planned] = []
    for planned in (*due[first:], *due[:first]):
        if chosen and len(planned.works) > most:
            break
        chosen.append(planned)
        most -= len(planned.works)
    return chosen


def _described(end_ms: int | None, position: Position, table: FollowedTable) -> int | None:
    """Return the end of a window without the time of a last generation whose streams are not described."""
    if end_ms is None or table.generations[-1].ranges:
        return end_ms
    end_ms = min(end_ms, table.generations[-1].time_ms)
    return end_ms if end_ms > position.until_ms else None


def _works(table: FollowedTable, place: int, piece: Piece) -> Iterator[LogWork]:
    for streams, endpoints in table.requests[piece.generation_ms]:
        yield LogWork(place, piece, streams, endpoints)


def _of_waiting(one: Waiting, place: int, now_ms: int) -> LogWork:
    moment = bytes.fromhex(one.time)
    at_ms = timeuuid_ms(moment)
    piece = Piece(one.generation_ms, at_ms, at_ms + 1)
    patient = now_ms - one.since_ms < PATIENCE_MS
    return LogWork(place, piece, (bytes.fromhex(one.stream),), only=moment, patient=patient)


def timeuuid_ms(value: bytes) -> int:
    """Return the moment of a timeuuid, ms since the epoch."""
    return (UUID(bytes=value).time - EPOCH_100NS) // 10_000
