"""The simulator of a ScyllaDB cluster keeps the rules that it was made by; the product's generations agree with it."""

from __future__ import annotations

import math
import random
from collections import Counter
from uuid import UUID

import pytest

from ringsync.scylla.generations import Generation, StreamRange, intervals
from ringsync.scylla.stream_ids import StreamId
from tests.scylla.generations import operates, streams_of
from tests.scylla_model.mutation import Bound, Cell, Mutation, RangeDeletion, Row
from tests.scylla_sim.arithmetic import LAST, RING, first_token, micros_of, shard_of, timeuuid, timeuuid_order
from tests.scylla_sim.base_model import Rows, Written, replay
from tests.scylla_sim.clock import SECOND, FakeClock
from tests.scylla_sim.cluster import CALM, ROUGH, Cluster, Disturbances
from tests.scylla_sim.load import Load
from tests.scylla_sim.log import Log
from tests.scylla_sim.metadata import LOCAL, STREAMS, STREAMS_V1, TABLET_STREAMS, TABLET_TIMESTAMPS, TIMESTAMPS
from tests.scylla_sim.queries import Cost, Shape, cost, each_range, each_stream, ranges_together
from tests.scylla_sim.streams import InvalidRequest, ServerError, StreamSet
from tests.scylla_sim.tables import CqlColumn, Descending, all_tables, narrow_table, wide_table

ENDS = ["7ffe0c687fcce86d", "807ae73e07dbd411", "80838c6b76e19a1b", "80c5343222b6eee5"]
STREAM_TOKENS = [
    ["8000000000000001", "8005555555555556", "7ffe0c687fcce86e"],
    ["8080000000000000", "80838c6b76e19a1b", "807ae73e07dbd412"],
    ["80838c6b76e19a1c", "8085555555555556", "808aaaaaaaaaaaab"],
]


def signed(text: str) -> int:
    return (int(text, 16) + RING // 2) % RING - RING // 2


def product(one: StreamSet) -> Generation:
    """The generation as the product has it."""
    ranges = (StreamRange(entry.end, tuple(map(StreamId, entry.streams))) for entry in one.entries)
    return Generation(one.time_ms, tuple(ranges))


def load(seed: int, disturbances: Disturbances = ROUGH) -> Load:
    rng, clock = random.Random(seed), FakeClock()
    cluster = Cluster.of(rng, clock, shards=(3, 1, 5), skews_s=(0, 1.5, -2), disturbances=disturbances)
    return Load(cluster, all_tables(), rng)


def advance(made: Load, seconds: float) -> None:
    assert isinstance(made.cluster.clock, FakeClock)
    made.cluster.clock.advance(seconds)


def replayed(made: Load, name: str) -> Rows:
    """A table as all rows of its log, in any order, give it."""
    end, found = made.end_us(), Rows(made.tables[name])
    rows = made.logs[name].select(None, 0, end, end)
    made.rng.shuffle(rows)
    replay(found, rows)
    return found


class TestArithmetic:
    def test_documented_streams(self) -> None:
        ends = list(map(signed, ENDS))
        for after, end, tokens in zip(ends, ends[1:], STREAM_TOKENS, strict=False):
            found = [first_token(after, end, shard, 3, 12) for shard in range(3)]
            assert found == list(map(signed, tokens))

    def test_a_stream_has_the_token_of_its_shard(self) -> None:
        rng = random.Random(5)
        for _ in range(2000):
            shards, bits = rng.randint(1, 70), rng.choice((0, 1, 12, 20))
            after, width = rng.randrange(-RING // 2 + 1, RING // 2), 2 ** rng.randint(1, 60)
            end = (after + width + RING // 2) % RING - RING // 2
            for shard in range(shards):
                token = first_token(after, end, shard, shards, bits)
                assert 0 < (token - after) % RING <= width
                assert token == end or shard_of(token, shards, bits) == shard
                before = token - 1
                assert token in (end, after + 1, -RING // 2 + 1) or shard_of(before, shards, bits) != shard

    def test_shards_of_rows_that_a_server_wrote(self) -> None:
        rows = [("d2e9aeb38ba99790", "d2c8000000000000", 4), ("da1f26e0623f9efb", "d9ae000000000000", 7)]
        for token, stream, shard in rows:
            assert shard_of(signed(token), 8, 12) == shard_of(signed(stream), 8, 12) == shard
        assert shard_of(signed("ced0000000000000"), 3, 12) == 0

    def test_documented_time(self) -> None:
        time = UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9")
        assert micros_of(time) == 1584969040910883
        assert timeuuid(random.Random(), 1584969040910883).fields[:3] == time.fields[:3]
        new, old = (
            [timeuuid(random.Random(seed), 1584969040910883, old=old) for seed in range(40)] for old in (False, True)
        )
        assert {one.variant for one in new} == {"specified in RFC 4122"}
        assert len({one.variant for one in old}) > 1
        assert timeuuid_order(UUID("b223c55e-6d07-11ea-8000-000000000000")) < timeuuid_order(time)


def test_every_row_is_in_a_stream_of_the_generation_that_the_product_names() -> None:
    made = load(1)
    made.cluster.new_generation()
    for number in range(4):
        made.write(150)
        if number == 1:
            made.cluster.add_node(shards=4)
        if number == 2:
            made.cluster.new_generation(1)
    assert len(made.cluster.generations) == 3
    known = {one.time_ms: product(one) for one in made.cluster.generations}
    operating = intervals(list(known))
    used = set()
    for written in made.written:
        for time_us, stream in written.streams.items():
            (start,) = (one.start_ms for one in operating if operates(one, time_us // 1000))
            assert streams_of(known[start]).count(stream) == 1
            assert sum(stream in one.streams for one in made.cluster.generations) == 1
            used.add(start)
        assert {delivery.stream for delivery in written.deliveries} == set(written.streams.values())
        for row in (row for delivery in written.deliveries for row in delivery.rows):
            assert row["cdc$stream_id"] == written.streams[micros_of(row["cdc$time"])]
    assert used == set(known)


@pytest.mark.parametrize("seed", range(6))
def test_the_log_gives_the_base_tables(seed: int) -> None:
    made = load(seed)
    made.cluster.new_generation()
    for _ in range(3):
        made.write(200)
        made.cluster.new_generation()
    assert len(made.written) > 500
    for name in made.tables:
        expected = made.expected(name)
        assert replayed(made, name).living() == expected
        assert len(expected) > 3
    assert made.refused


def test_columns_come_and_go() -> None:
    made = load(8)
    made.cluster.new_generation()
    made.write(200)
    assert made.add_column("sim.wide", CqlColumn("x", "int", "map", key="int")).endswith("ADD x map<int, int>")
    made.write(200)
    assert made.drop_column("sim.wide", "tags") == "ALTER TABLE sim.wide DROP tags"
    made.write(200)
    columns = {column for cells in made.expected("sim.wide").values() for column, _ in cells}
    assert "x" in columns
    assert "tags" not in columns
    assert replayed(made, "sim.wide").living() == made.expected("sim.wide")


def test_which_of_two_writes_at_one_time_wins() -> None:
    """Section 3.2: tombstone, then what expires, then what expires later, then the greater bytes."""
    ordered = [
        (Written(2, 5, None), b"\2"),
        (Written(200, 5, None), b"\xc8"),
        (Written(1, 5, 10), b"\1"),
        (Written(0, 5, 11), b"\0"),
        (Written(None, 5, None), b""),
        (Written(1, 6, None), b"\1"),
    ]
    keys = [one.order(data) for one, data in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_a_range_of_a_descending_column_starts_with_the_greatest() -> None:
    table = wide_table()
    cluster = Cluster.of(random.Random(1), FakeClock())
    cluster.new_generation()
    deletion = RangeDeletion(Bound(table.clustering(1, "z"), False), Bound(table.clustering(1, "a")), cluster.now_us())
    assert not deletion.degenerate
    assert RangeDeletion(deletion.end, deletion.start, deletion.timestamp).degenerate
    written = cluster.write(table, Mutation(table.model, (1, "k"), range_deletions=(deletion,)))
    rows = [row for one in written.deliveries for row in one.rows]
    assert [(row["c1"], row["c2"], row["cdc$operation"]) for row in rows] == [(1, "z", 6), (1, "a", 7)]


def test_every_kind_of_log_row_comes() -> None:
    made = load(7)
    made.cluster.new_generation()
    made.write(1500)
    rows = [(one.table, row) for one in made.written for delivery in one.deliveries for row in delivery.rows]
    wide = made.tables["sim.wide"]
    assert {row["cdc$operation"] for table, row in rows if table == wide} == set(range(1, 9))
    assert {row["cdc$operation"] for table, row in rows if table.name == "narrow"} == {1, 2, 4}
    for column in wide.columns:
        filled = [row for table, row in rows if table == wide and row[column.name] is not None]
        assert filled, column
        assert any(row[f"cdc$deleted_{column.name}"] for table, row in rows if table == wide), column
        if column.kind != "atomic":
            assert any(row[f"cdc$deleted_elements_{column.name}"] for table, row in rows if table == wide), column
    assert not any(isinstance(value, Descending) for _, row in rows for value in row.values())
    ttls = {row["cdc$ttl"] for _, row in rows}
    assert {None, 1, 60, 86_400, 3600} <= ttls


def test_groups_end_once_and_are_cut_late_or_written_twice() -> None:
    made = load(3)
    made.cluster.new_generation()
    made.write(600)
    groups: dict[tuple[bytes, UUID], list[tuple[int, bool | None]]] = {}
    moments: dict[tuple[bytes, UUID], set[int]] = {}
    for written in made.written:
        times = {row["cdc$time"] for one in written.deliveries for row in one.rows}
        assert written.groups <= len(times) <= 2 * written.groups
        for one in written.deliveries:
            for row in one.rows:
                group = one.stream, row["cdc$time"]
                groups.setdefault(group, []).append((row["cdc$batch_seq_no"], row["cdc$end_of_batch"]))
                moments.setdefault(group, set()).add(one.visible_us)
    for numbers in groups.values():
        assert sorted(numbers, key=lambda one: one[0]) == [
            (number, True if number == len(numbers) - 1 else None) for number in range(len(numbers))
        ]
    assert {len(one) for one in moments.values()} == {1, 2}
    assert len(groups) > sum(written.groups for written in made.written)
    delays = [one.visible_us - written.at_us for written in made.written for one in written.deliveries]
    assert max(delays) > 2 * SECOND


def test_late_writes_and_equal_times_of_two_coordinators() -> None:
    made = load(11, CALM)
    made.cluster.new_generation()
    advance(made, 700)
    made.write(800)
    ages = [written.at_us - time for written in made.written for time in written.streams]
    assert max(ages) > 300 * SECOND
    times = Counter((written.table, written.mutation.key, time) for written in made.written for time in written.streams)
    assert max(times.values()) > 1
    assert all(row["cdc$stream_id"] for written in made.written for one in written.deliveries for row in one.rows)


class TestAcceptance:
    """Section 2.6."""

    def setup_method(self) -> None:
        self.clock = FakeClock()
        self.table = narrow_table()
        self.cluster = Cluster.of(random.Random(2), self.clock, skews_s=(0, 10))
        self.token = self.table.token((1,))

    def at(self, seconds: float, coordinator: int = 0) -> bytes:
        """The stream of a write that many seconds from the coordinator's now."""
        now = self.cluster.now_us(coordinator)
        return self.cluster.stream_of(self.table, self.token, now + round(seconds * SECOND), now)

    def test_without_a_generation(self) -> None:
        with pytest.raises(ServerError, match="could not find any CDC stream"):
            self.at(0)
        with pytest.raises(InvalidRequest, match="from the past"):
            self.at(-5)

    def test_future(self) -> None:
        self.cluster.new_generation()
        assert self.at(5)
        with pytest.raises(InvalidRequest, match="from the future"):
            self.at(5.000001)
        written = self.clock.now_us() + 12 * SECOND
        mutation = Mutation(self.table.model, (1,), (Row((), (Cell("v", 1, written),)),))
        with pytest.raises(InvalidRequest):
            self.cluster.write(self.table, mutation, 0)
        assert self.cluster.write(self.table, mutation, 1).deliveries

    def test_past(self) -> None:
        first = self.cluster.new_generation()
        second = self.cluster.new_generation()
        assert (first.time_ms, second.time_ms) == (self.clock.now_us() // 1000, self.clock.now_us() // 1000 + 65_000)
        self.clock.advance(64)
        assert self.at(-60) in first.streams
        assert self.at(1) in second.streams
        self.clock.advance(2)
        assert self.at(-4) in first.streams
        assert self.at(0) in second.streams
        self.clock.advance(5)
        with pytest.raises(InvalidRequest, match="from the past"):
            self.at(-7)
        self.clock.advance(3600)
        assert self.at(-3600) in second.streams

    def test_a_batch_is_refused_as_a_whole(self) -> None:
        self.cluster.new_generation()
        now = self.clock.now_us()
        cells = Cell("v", 1, now), Cell("flag", True, now + 6 * SECOND)
        with pytest.raises(InvalidRequest):
            self.cluster.write(self.table, Mutation(self.table.model, (1,), (Row((), cells),)))

    def test_empty_generation(self) -> None:
        made = self.cluster.new_generation(empty=True)
        with pytest.raises(ServerError, match="empty"):
            self.at(0)
        metadata = self.cluster.metadata
        assert [row["time"] for row in metadata.rows(TIMESTAMPS)] == [made.time_ms]
        assert not metadata.rows(STREAMS)


def complete(cluster: Cluster) -> bool:
    """Whether all streams are told of every time that is."""
    known = {one.time_ms: one for one in cluster.generations}
    tables = cluster.metadata
    for row in tables.rows(TIMESTAMPS):
        told = {stream for one in tables.rows(STREAMS, time=row["time"]) for stream in one["streams"]}
        if told != known[row["time"]].streams:
            return False
    return True


class TestPublication:
    def test_part_of_a_generation_is_never_told_of(self) -> None:
        """After each single change of the tables: what has a time has all its streams."""
        clock = FakeClock()
        cluster = Cluster.of(random.Random(4), clock)
        made = cluster.new_generation(publish=False)
        for rows in range(len(made.entries) + 1):
            cluster.publish_streams(made, rows)
            assert len(cluster.metadata.rows(STREAMS)) == rows
            assert not cluster.metadata.rows(TIMESTAMPS)
        cluster.publish_time(made)
        cluster.new_generation()
        clock.advance(1000)
        cluster.new_generation()
        cluster.expire(clock.now_us() // 1000)
        assert len(cluster.generations) == 2
        assert complete(cluster)
        seen: dict[str, dict[int, set[int]]] = {TIMESTAMPS: {}, STREAMS: {}}
        for change in cluster.metadata.drain():
            where = change.row.get("range_end", 0)
            times = seen[change.table].setdefault(change.row["time"], set())
            (times.add if type(change).__name__ == "Put" else times.discard)(where)
            for time, known in seen[TIMESTAMPS].items():
                assert not known or len(seen[STREAMS][time]) == len(made.entries)

    def test_legacy(self) -> None:
        cluster = Cluster.of(random.Random(4), FakeClock(), legacy=True)
        old = cluster.new_generation()
        tables = cluster.metadata
        assert tables.rows(STREAMS_V1) == [{"time": old.time_ms, "streams": old.streams, "expired": None}]
        cluster.upgrade()
        new = cluster.new_generation()
        assert [row["time"] for row in tables.rows(TIMESTAMPS)] == [new.time_ms]
        assert not tables.rows(LOCAL)
        cluster.rewrite()
        assert [row["time"] for row in tables.rows(TIMESTAMPS)] == [old.time_ms, new.time_ms]
        assert tables.rows(LOCAL)[0]["key"] == "rewritten"
        assert complete(cluster)


class TestTablets:
    def test_the_log_gives_the_base_tables(self) -> None:
        made = load(21)
        advance(made, 60)
        tablets, wide = made.cluster.tablets, made.tables["sim.wide"]
        for table in made.tables.values():
            tablets.create(table, 2, made.cluster.clock.now_us())
        sets = [*tablets.sets[wide.full_name]]
        for resize in (tablets.split, tablets.split, tablets.merge):
            made.write(250)
            sets.append(resize(wide, made.cluster.clock.now_us()))
        made.write(250)
        assert [len(one.entries) for one in sets] == [2, 4, 8, 4]
        known = {one.time_ms: product(one) for one in sets}
        operating, used = intervals(list(known)), set()
        for written in made.written:
            if written.table != wide:
                continue
            for time_us, stream in written.streams.items():
                (start,) = (one.start_ms for one in operating if operates(one, time_us // 1000))
                assert streams_of(known[start]).count(stream) == 1
                used.add(start)
        assert used == set(known)
        for name in made.tables:
            assert replayed(made, name).living() == made.expected(name)

    def test_documented_tablets(self) -> None:
        table, clock = wide_table(), FakeClock()
        tablets = Cluster.of(random.Random(1), clock).tablets
        first = tablets.create(table, 2, clock.now_us())
        assert [entry.end for entry in first.entries] == [-1, LAST]
        second = tablets.split(table, clock.now_us())
        ends = ("bfffffffffffffff", "ffffffffffffffff", "3fffffffffffffff", "7fffffffffffffff")
        assert [entry.end for entry in second.entries] == list(map(signed, ends))
        assert {StreamId(stream).index for stream in first.streams | second.streams} == {0}
        for one in (first, second):
            assert StreamId(one.stream_of(-3485513579396041028)).token == -1

    def test_states_and_collection(self) -> None:
        table, clock = wide_table(), FakeClock()
        cluster = Cluster.of(random.Random(1), clock)
        tablets = cluster.tablets
        first = tablets.create(table, 2, clock.now_us())
        second = tablets.split(table, clock.now_us())
        assert (first.time_ms, second.time_ms) == (clock.now_us() // 1000 - 5000, clock.now_us() // 1000 + 65_000)
        assert self.states(cluster) == {
            first.time_ms: {0: first.streams, 2: first.streams},
            second.time_ms: {0: second.streams, 1: first.streams, 2: second.streams},
        }
        clock.advance(65 + 99)
        assert tablets.collect(table, clock.now_us(), 0) == tablets.collect(table, clock.now_us(), 100) == 0
        clock.advance(1)
        assert tablets.collect(table, clock.now_us(), 100) == 1
        assert self.states(cluster) == {second.time_ms: {0: second.streams, 2: second.streams}}
        assert [row["timestamp"] for row in cluster.metadata.rows(TABLET_TIMESTAMPS)] == [second.time_ms]
        with pytest.raises(ServerError, match="could not find"):
            tablets.stream_of(table, 0, second.time_ms * 1000 - 1)
        tablets.drop(table)
        assert not cluster.metadata.rows(TABLET_TIMESTAMPS)
        assert not cluster.metadata.rows(TABLET_STREAMS)

    def test_the_past_is_open_and_the_future_is_not(self) -> None:
        table, clock = wide_table(), FakeClock()
        cluster = Cluster.of(random.Random(1), clock)
        first = cluster.tablets.create(table, 2, clock.now_us())
        cluster.tablets.split(table, clock.now_us())
        clock.advance(500)
        now = clock.now_us()
        assert cluster.stream_of(table, 0, now - 504 * SECOND, now) in first.streams
        with pytest.raises(InvalidRequest, match="future"):
            cluster.stream_of(table, 0, now + 6 * SECOND, now)

    @staticmethod
    def states(cluster: Cluster) -> dict[int, dict[int, set[bytes]]]:
        found: dict[int, dict[int, set[bytes]]] = {}
        for row in cluster.metadata.rows(TABLET_STREAMS):
            found.setdefault(row["timestamp"], {}).setdefault(row["stream_state"], set()).add(row["stream_id"])
        return found


class TestLog:
    def test_a_row_is_visible_until_its_ttl_is_over(self) -> None:
        clock, table = FakeClock(), narrow_table()
        cluster = Cluster.of(random.Random(1), clock, disturbances=Disturbances((3, 3)))
        cluster.new_generation()
        now = clock.now_us()
        written = cluster.write(table, Mutation(table.model, (1,), (Row((), (Cell("v", 1, now),)),)))
        log = Log(ttl_s=10)
        log.add(*written.deliveries)
        (stream,) = written.streams.values()

        def shown(after_s: float, start: int = now, end: int = now + 1, streams: list[bytes] | None = None) -> int:
            return len(log.select(streams or [stream], start, end, now + round(after_s * SECOND)))

        assert [shown(after) for after in (0, 2.9, 3, 9.9, 10)] == [0, 0, 1, 1, 0]
        assert [shown(5, now - 1, now), shown(5, now + 1, now + 2), shown(5, streams=[bytes(16)])] == [0, 0, 0]
        assert log.deliveries[0].ttl_left(10, now + 3 * SECOND) == 7
        log.ttl_s = 0
        assert shown(10**6) == 1


class TestQueries:
    def test_counts(self) -> None:
        small = Shape(2, 3, 4, tables=5, rows_per_s=0)
        assert cost(each_stream, small, 30) == Cost(24 * 120 * 5, 1, 24 * 20 * 5 / 30, 1.0)
        assert cost(each_range, small, 60).selects_per_hour == 8 * 60 * 5
        assert cost(ranges_together(7), small, 60) == Cost(4 * 60 * 5, 6, 24 * 20 * 5 / 60, 1.0)
        assert cost(ranges_together(2), small, 60).most_streams == 3
        assert cost(each_stream, Shape(tablets=16), 3600).selects_per_hour == 16 * math.ceil(10_000 * 3600 / 16 / 5000)
        busy = cost(each_range, Shape(2, 3, 4, rows_per_s=0.8), 10)
        assert busy.empty == pytest.approx(math.exp(-1))
        with pytest.raises(ValueError, match="name 8 streams of 24"):
            cost(lambda ranges: [1 for _ in ranges], small, 30)

    def test_a_big_cluster(self) -> None:
        big = Shape()
        assert sum(big.ranges) == 1_638_400
        assert cost(each_stream, big, 30).selects_per_hour == 1_638_400 * 120
        assert cost(each_range, big, 30).selects_per_hour == 25_600 * 120
