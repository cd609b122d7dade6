"""What a cycle reads of a table's CDC log, and the position after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args
from uuid import UUID

from ringsync.scylla.log_schema import EPOCH_100NS
from ringsync.scylla.progress import (
    Kind,
    Piece,
    Position,
    Rules,
    Waiting,
    advanced,
    again_pieces,
    due,
    noticed,
    summed,
    sweep_pieces,
    swept_far,
    swept_near,
    was_read_again,
    window_end,
    window_pieces,
)
from ringsync.steps.scylla.followed_logs import FollowedTable
from ringsync.steps.scylla.log_task import LogWork, Summed

PATIENCE_MS = 300_000
"""Time for which a group of log rows that is not complete waits; then what is there of it is taken."""

SHORTER = 8
"""How many times shorter the next step is after one with too many rows."""


@dataclass(frozen=True)
class Planned:
    """What is read of a table's log.

    :ivar position: the position before, with the sweeps that have begun
    :ivar end_ms: end of the window; None: none is read
    :ivar works: the requests
    """

    table: FollowedTable
    position: Position
    rules: Rules
    end_ms: int | None
    works: tuple[LogWork, ...]

    @property
    def is_due(self) -> bool:
        """Whether something is to be done."""
        return self.end_ms is not None or bool(self.works)

    def taken(
        self,
        counts: Mapping[str, int],
        waiting: Iterable[Waiting],
        sums: Summed,
        missed: Collection[Kind] = (),
        too_many: Collection[Kind] = (),
    ) -> Position:
        """Return the position once all of it is committed.

        :param waiting: groups that are not complete
        :param sums: what windows and near sweep have found
        :param missed: kinds of works that were not all done: they are read once more. Those that had ``too_many`` rows
            for a task are then read in shorter steps
        """
        rows: dict[Kind, int] = {kind: counts[f"{kind}_rows"] for kind in get_args(Kind)}
        known = {(one.stream, one.time): one for one in self.position.waiting}
        still = {(one.stream, one.time): known.get((one.stream, one.time), one) for one in waiting}
        asked = {(work.streams[0].hex(), work.only.hex()) for work in self.works if work.only is not None}
        left = {key: one for key, one in known.items() if key not in asked} | still
        if "window" in missed:  # nothing of the table was kept
            return self._shortened(self.position, too_many)
        position = self.position
        if "again" not in missed:
            position = was_read_again(position, rows["again"])
        if "near" not in missed:
            position = swept_near(position, sums.get("near", {}), rows["near"])
        if "far" not in missed:
            position = swept_far(position, rows["far"])
        position = self._shortened(position, too_many)
        position = replace(position, waiting=tuple(left.values()))
        position = summed(position, sums.get("window", {}), self.rules)
        if self.end_ms is None:
            return position
        return advanced(position, self.end_ms, rows["window"], self.rules)

    def undescribed(self) -> list[tuple[int, int]]:
        """Return the parts of the window, ms, in which a generation operated that has no streams, and never got any:
        a later one is known."""
        if self.end_ms is None:
            return []
        found = []
        for generation, interval in zip(self.table.generations, self.table.intervals, strict=True):
            start_ms = max(interval.start_ms, self.position.until_ms)
            end_ms = self.end_ms if interval.end_ms is None else min(self.end_ms, interval.end_ms)
            if not generation.ranges and start_ms < end_ms:
                found.append((start_ms, end_ms))
        return found

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


def plan_work(table: FollowedTable, position: Position, place: int, now_ms: int, rules: Rules) -> Planned:
    """Plan what a cycle reads of a table's log.

    :param place: the table's place among those of the task
    """
    position = due(noticed(position, table.described), now_ms, rules, table.intervals[0].start_ms)
    end_ms = _described(window_end(position, now_ms, rules), position, table)
    sweeps = (sweep_pieces(position, table.intervals, rules), again_pieces(position, table.intervals))
    pieces = window_pieces(position, end_ms, table.intervals) if end_ms is not None else []
    works = [work for piece in chain(pieces, *sweeps) for work in _works(table, place, piece)]
    if end_ms is not None or table.ends_ms is not None:
        works += [_of_waiting(one, place, now_ms) for one in position.waiting]
    return Planned(table, position, rules, end_ms, tuple(works))


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
