"""Which generations of CDC streams are read and kept, while the list of them is away, lags, or grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import ConsistencyLevel, OperationTimedOut, Unavailable

from ringsync.cluster.generations import Streams
from ringsync.config.sections import Scylla
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema
from ringsync.scylla.generations import Generation, intervals
from ringsync.scylla.progress import (
    Position,
    Rules,
    advanced,
    window_end,
    window_pieces,
)
from ringsync.scylla.sweeps import due, sweep_pieces, swept_far, swept_near
from ringsync.steps.scylla import known_generations
from ringsync.steps.scylla.followed_logs import FollowedLogs, _ByName
from ringsync.steps.scylla.known_generations import KnownGenerations, Needed
from ringsync.storage.local import LocalStore
from tests.scylla.log_tables import log_text
from tests.scylla.test_log_stager import MINUTE, NOW, generation
from tests.scylla.test_log_sweeps import ONLY
from tests.scylla.test_log_task import HOUR, followed

DAY = 24 * HOUR


class TestGenerations:
    """The list of generations cannot be read: another datacenter is cut off."""

    @pytest.fixture(autouse=True)
    def _logs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_down, self.found, self.asked = False, [ONLY], 0

        def read_times(_: Any, streams: Streams) -> list[int]:
            if self.is_down:
                raise Unavailable("Cannot achieve consistency level", ConsistencyLevel.QUORUM, 2, 1)
            return [one.time_ms for one in self.found]

        def read_generation(_: Any, streams: Streams, time_ms: int) -> Generation:
            read_times(_, streams)
            return next((one for one in self.found if one.time_ms == time_ms), Generation(time_ms, ()))

        monkeypatch.setattr(known_generations, "read_times", read_times)
        monkeypatch.setattr(known_generations, "read_generation", read_generation)
        self.known, self.generations = frozenset[int](), KnownGenerations(None)

    def look(self) -> tuple[Generation, ...]:
        self.generations.look({Streams(): Needed(NOW - DAY, self.known)})
        return self.generations.of(Streams())

    def test_what_is_known_goes_on_to_be_read(self) -> None:
        assert self.look() == (ONLY,)
        self.is_down = True
        assert self.look() == (ONLY,)
        assert "cannot be read at QUORUM" in self.generations.problem
        self.is_down, second = False, generation(NOW)
        self.found.append(second)
        assert self.look() == (ONLY, second)
        assert self.generations.problem == ""

    def test_nothing_is_known_yet(self) -> None:
        self.is_down = True
        with pytest.raises(Unavailable):
            self.look()

    def test_streams_that_cannot_be_read_are_not_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Windows and sweeps would pass over them. What nobody has noticed yet may wait."""
        self.found, real = [ONLY, generation(NOW - HOUR), generation(NOW)], known_generations.read_generation

        def read_generation(_: Any, streams: Streams, time_ms: int) -> Generation:
            if time_ms == NOW - HOUR and self.is_slow:
                self.asked += 1
                raise OperationTimedOut
            return real(_, streams, time_ms)

        self.is_slow = True
        monkeypatch.setattr(known_generations, "read_generation", read_generation)
        self.known = frozenset({ONLY.time_ms})
        assert self.look() == (ONLY,)
        assert self.generations.problem
        self.known = frozenset({ONLY.time_ms, NOW})
        with pytest.raises(OperationTimedOut):
            self.look()
        for _ in range(3):
            with pytest.raises(OperationTimedOut):
                self.generations.of(Streams())
        assert self.asked == 2, "once in a look, not for each table"
        self.is_slow = False
        assert self.look() == tuple(self.found)

    def test_a_known_generation_stays_whatever_a_node_lists(self) -> None:
        """The lists of tablets' generations are each node's own, and a node may lag: windows would pass over what was
        logged to the second generation. A new process knows of it by the position alone."""
        second = generation(NOW)
        self.found = [ONLY, second]
        assert self.look() == (ONLY, second)
        self.found = [ONLY]
        assert self.look() == (ONLY, second)
        self.generations, self.known = KnownGenerations(None), frozenset({ONLY.time_ms, NOW})
        assert [one.time_ms for one in self.look()] == [ONLY.time_ms, NOW]
        self.found = [ONLY, second]
        assert self.look() == (ONLY, second)

    def test_only_what_may_still_be_read_is_read_and_kept(self) -> None:
        """Of a generation for every ten days of three years; the list only grows, in Scylla."""
        self.found = [generation(NOW - days * DAY) for days in range(1000, 0, -10)]
        self.known = frozenset(one.time_ms for one in self.found)
        assert self.look() == tuple(self.found[-1:]), "the one before has ended nine days ago"
        assert len(self.generations._generations) == 1
        own = Streams(("ks", "t"))
        self.generations.look({own: Needed(NOW - DAY, self.known)})
        assert len(self.generations.of(own)) == 100, "with tablets Scylla forgets them itself"


def test_what_is_needed_of_generations_follows_the_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, sweeps, what waits and what is read again: nothing of it is older than what is said to be needed."""
    config: Any = SimpleNamespace(scylla=Scylla())
    logs = FollowedLogs(config, LocalStore(tmp_path), None, {}, None)
    base = followed().log.base
    (log,) = parse_schema(log_text(base), "log").tables
    logs._schema = _ByName.of(Schema((base, log)))
    monkeypatch.setattr(FollowedLogs, "_streams_of", lambda *_: Streams())
    plan: Any = SimpleNamespace(tables=())
    rules = Rules(30_000, 15_000, HOUR, 12_600_000, 43_200_000)
    position = replace(Position.begin(NOW - 2 * DAY, [ONLY.time_ms], 15_000), ttl_s=86_400)
    interval, now_ms = intervals([ONLY.time_ms]), NOW - 2 * DAY
    for _ in range(200):
        now_ms += 20 * MINUTE
        position = due(position, now_ms, rules, interval[0].start_ms)
        needed = logs._needed(plan, {base.table_id: position}, now_ms)[Streams()]
        end_ms = window_end(position, now_ms, rules)
        assert end_ms is not None
        pieces = [*window_pieces(position, end_ms, interval), *sweep_pieces(position, interval, rules)]
        assert all(one.start_ms >= needed.from_ms for one in pieces if one.kind != "far")
        assert all(one.arrived_from_ms >= needed.from_ms for one in pieces if one.kind == "far")
        assert needed.from_ms >= now_ms - 30 * HOUR, "it moves on"
        position = swept_far(swept_near(advanced(position, end_ms, 100, rules), {}, 100), 100)
        position = replace(position, again=())
