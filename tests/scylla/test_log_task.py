"""A task of the stage: what it takes of what it reads, and that a table's trouble is its own."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from ringsync.changes.identity import TableVersion
from ringsync.cluster.generations import Clocks
from ringsync.ledger.staging import Bucket, decode_rows, read_block
from ringsync.scylla.log_rows import decode_log
from ringsync.scylla.log_schema import EPOCH_100NS
from ringsync.scylla.progress import SLOT_MS, Kind, Piece, Rules, SlotSums
from ringsync.scylla.sweeps import late_ms
from ringsync.sources import cdc_log
from ringsync.sources.cdc_log import LogRead
from ringsync.steps.scylla import log_task
from ringsync.steps.scylla.log_task import FollowedLog, LogResult, LogTask, LogWork, add_sums, stage_logs
from ringsync.steps.stage.staged_files import StagedTable, Windows
from ringsync.storage.local import LocalStore
from tests.scylla.log_tables import STREAM, tables_of

ONE, OTHER = (tables_of("pk int, ck int, a int, b int", "pk, ck") for _ in range(2))
NOW = 1_790_000_000_000
CLOCKS = Clocks(0, 0, 0, "")
TTL_S = 86_400
HOUR = 3_600_000
RULES = Rules(30_000, 15_000, HOUR, 12_600_000, 43_200_000)
LATE_MS = late_ms(RULES)
Read = Callable[..., LogRead]


def moment(ms: int, extra: int = 0) -> UUID:
    ticks = ms * 10_000 + EPOCH_100NS + extra
    return UUID(fields=(ticks & 0xFFFFFFFF, ticks >> 32 & 0xFFFF, ticks >> 48 & 0xFFF | 0x1000, 0x80, 0, 1))


def log_row(ms: int, *, ck: int = 0, last: bool = True, arrived_ms: int | None = None, **more: Any) -> dict[str, Any]:
    left = TTL_S - (NOW - (ms if arrived_ms is None else arrived_ms)) // 1000
    row = {"cdc$time": moment(ms), "cdc$batch_seq_no": 0, "cdc$operation": 1, "pk": 0, "ck": ck, "a": 1}
    return row | {'TTL("cdc$operation")': left} | ({"cdc$end_of_batch": True} if last else {}) | more


def followed(tables: Any = ONE, table_id: str = "") -> FollowedLog:
    base = replace(tables.base, table_id=table_id or tables.base.table_id)
    return FollowedLog(StagedTable(TableVersion.first(base), False, None), replace(tables.log, base=base), TTL_S)


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LogResult]:
    """Stage what a function reads."""
    store = LocalStore(tmp_path)
    monkeypatch.setattr(log_task, "store_of", lambda _: store)
    monkeypatch.setattr(log_task, "cluster_settings", lambda _: None)

    def work(read: Read, works: Sequence[LogWork], tables: Sequence[FollowedLog] = (followed(),)) -> LogResult:
        monkeypatch.setattr(
            log_task, "LogReader", SimpleNamespace(open=lambda *_: SimpleNamespace(begin=partial(partial, read)))
        )
        windows = Windows(Bucket(NOW // 60_000 * 60_000, 60_000), 0)
        nothing: Any = None
        result = stage_logs(LogTask(nothing, tuple(tables), windows, nothing, 1, CLOCKS), works, nothing)
        result_rows = [row for block in result.blocks for row in read_block(store, block.place).to_pylist()]
        assert sum(block.rows for block in result.blocks) == len(result_rows)
        return result

    return work


def reads(*rows: dict[str, Any]) -> Read:
    return lambda *_, **__: LogRead([ONE.page(list(rows))], [NOW / 1000], 0.0)


def work(kind: Kind = "window", table: int = 0, **more: Any) -> LogWork:
    piece = Piece(NOW - 10**9, NOW - 10**8, NOW, kind, NOW - 2 * HOUR, NOW, late_ms=LATE_MS)
    return LogWork(table, piece, (STREAM,), **{"ttls_s": (TTL_S,)} | more)


def test_a_near_sweep_sums_up_and_takes_nothing(staged: Callable[..., LogResult]) -> None:
    rows = [log_row(NOW - 90_000, ck=1), log_row(NOW - 80_000, ck=2)]
    of_window, of_sweep = (staged(reads(*rows), [work(kind)]) for kind in ("window", "near"))
    (window,), (near,) = of_window.tables.values(), of_sweep.tables.values()
    assert window.sums["window"] == near.sums["near"]
    assert sum(sums[0] for sums in near.sums["near"].values()) == 2
    assert (window.counts["taken"], near.counts["taken"], near.counts["read_before"]) == (2, 0, 2)
    assert not of_sweep.files
    (fewer,) = staged(reads(rows[0]), [work()]).tables.values()
    assert fewer.sums["window"] != window.sums["window"]


def test_a_far_sweep_takes_what_arrived_hours_after_its_time(staged: Callable[..., LogResult]) -> None:
    late = log_row(NOW - 6 * HOUR, ck=1, arrived_ms=NOW - HOUR)
    in_time = log_row(NOW - 6 * HOUR + 1000, ck=2, arrived_ms=NOW - 6 * HOUR + 2000)
    before = log_row(NOW - 9 * HOUR, ck=3, arrived_ms=NOW - 4 * HOUR)
    (found,) = staged(reads(late, in_time, before), [work("far")]).tables.values()
    assert (found.counts["taken"], found.counts["read_before"]) == (1, 2)


def test_sweeps_make_no_groups_wait(staged: Callable[..., LogResult]) -> None:
    open_group = log_row(NOW - 90_000, last=False)
    found = {
        kind: next(iter(staged(reads(open_group), [work(kind)]).tables.values()))
        for kind in ("window", "near", "far", "again")
    }
    assert {kind: len(one.waiting) for kind, one in found.items()} == {"window": 1, "near": 0, "far": 0, "again": 1}
    assert found["again"].counts["taken"] == 0
    assert found["near"].sums["near"] == found["window"].sums["window"]
    group = found["window"].waiting[0]
    assert (group.stream, group.time) == (STREAM.hex(), moment(NOW - 90_000).hex)
    closed, other = log_row(NOW - 90_000), log_row(NOW - 90_000, ck=5, **{"cdc$time": moment(NOW - 90_000, 7)})
    (taken,) = staged(reads(closed, other), [work(only=moment(NOW - 90_000).bytes)]).tables.values()
    assert (taken.counts["taken"], taken.sums) == (1, {})


def test_too_many_rows_of_a_table_are_its_own_trouble(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_task, "MOST_ROWS", 50)
    asked: list[str] = []

    def read(log: Any, *_: Any, **__: Any) -> LogRead:
        asked.append(log.base.table_id)
        is_big = log.base.table_id == ONE.base.table_id
        one = ONE.page([log_row(NOW - 90_000)])[4:]
        return LogRead(
            [struct.pack(">i", 30) + one * 30 if is_big else ONE.page([log_row(NOW - 80_000)])], [NOW / 1000], 0.0
        )

    other = followed(OTHER, "6e" + ONE.base.table_id[2:])
    result = staged(read, [*(work() for _ in range(100)), work(table=1)], [followed(), other])
    big, small = (result.tables[one.table_id] for one in (followed(), other))
    assert (big.too_many, small.too_many, small.counts["taken"]) == ({"window"}, set(), 1)
    # What would be in vain is not asked for.
    assert asked.count(ONE.base.table_id) < 20


def test_a_window_of_one_ms_has_no_limit_of_rows(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch job may write any number with one timestamp, and nothing shorter can be read."""
    monkeypatch.setattr(log_task, "MOST_ROWS", 50)
    rows = [log_row(NOW - 90_000, ck=ck, **{"cdc$batch_seq_no": ck}) for ck in range(60)]
    for length_ms, too_many in ((2, {"window"}), (1, set())):
        piece = Piece(NOW - 10**9, NOW - 90_000, NOW - 90_000 + length_ms)
        (found,) = staged(reads(*rows), [LogWork(0, piece, (STREAM,), ttls_s=(TTL_S,))]).tables.values()
        assert found.too_many == too_many


def test_a_table_that_cannot_be_read_fails_alone(staged: Callable[..., LogResult]) -> None:
    def read(log: Any, *_: Any, **__: Any) -> LogRead:
        if log.base.table_id == ONE.base.table_id:
            raise ValueError("no such log")
        return LogRead([ONE.page([log_row(NOW - 80_000)])], [NOW / 1000], 0.0)

    other = followed(OTHER, "6e" + ONE.base.table_id[2:])
    result = staged(read, [work(), work(table=1), work()], [followed(), other])
    assert "no such log" in result.tables[ONE.base.table_id].failures["window"]
    assert result.tables[other.table_id].counts["taken"] == 1


def test_rows_that_cannot_be_used_have_keys_of_their_own(staged: Callable[..., LogResult]) -> None:
    rows = [log_row(NOW - 90_000, ck=ck, **{"cdc$operation": 77, "cdc$batch_seq_no": ck}) for ck in range(3)]
    result = staged(reads(*rows), [work()])
    errors = decode_rows(result.errors).to_pylist()
    later = [row | {'TTL("cdc$operation")': 5} for row in rows]
    once_more = decode_rows(staged(reads(*later), [work("far")]).errors).to_pylist()
    assert [error["position"] for error in once_more] == [error["position"] for error in errors]
    assert not staged(reads(*rows), [work("near")]).error_count
    assert len({error["position"] for error in errors}) == 3
    assert {error["table_id"].hex() for error in errors} == {ONE.base.table_id}
    assert min(error["position"] for error in errors) >= 0


def test_sums_tell_groups_apart() -> None:
    rows = [log_row(NOW - 90_000, ck=1), log_row(NOW - 80_000, ck=2), log_row(NOW - 80_000 + SLOT_MS, ck=3)]
    groups = decode_log([ONE.page(rows)], ONE.log, read_at_s=NOW // 1000, log_ttls_s=[TTL_S]).groups
    every: dict[int, tuple[int, int, int]] = {}
    add_sums(every, groups)
    assert [sums[0] for _, sums in sorted(every.items())] == [2, 1]
    one_by_one: dict[int, tuple[int, int, int]] = {}
    for row in rows:
        add_sums(one_by_one, decode_log([ONE.page([row])], ONE.log, read_at_s=NOW // 1000, log_ttls_s=[TTL_S]).groups)
    assert one_by_one == every


@pytest.mark.parametrize("place", [0, 1])
def test_the_rest_of_a_group_changes_its_sums(staged: Callable[..., LogResult], place: int) -> None:
    """Also if it comes when the group was taken without it, or was not missed."""
    rows = [log_row(NOW - 90_000, ck=0, last=False), log_row(NOW - 90_000, ck=1, **{"cdc$batch_seq_no": 1})]
    (whole,), (part,) = (staged(reads(*some), [work("near")]).tables.values() for some in (rows, [rows[place]]))
    assert whole.sums["near"] != part.sums["near"]


def test_what_is_older_than_the_reading_is_for_far_sweeps_alone(staged: Callable[..., LogResult]) -> None:
    row = log_row(NOW - 10 * 60_000, arrived_ms=NOW - 5 * 60_000)
    for compared_ms, taken in ((NOW - HOUR, 0), (NOW - 9 * 60_000, 1)):
        piece = Piece(NOW - 10**9, NOW - HOUR, NOW, "far", NOW - 6 * 60_000, NOW, compared_ms, LATE_MS)
        (found,) = staged(reads(row), [LogWork(0, piece, (STREAM,), ttls_s=(TTL_S,))]).tables.values()
        assert found.counts["taken"] == taken


def test_a_sweep_that_fails_is_no_trouble_of_the_window(staged: Callable[..., LogResult]) -> None:
    def read(log: Any, streams: Any, start_ms: int, *_: Any, **__: Any) -> LogRead:
        if start_ms < NOW - 10**8:
            raise ValueError("an old file is damaged")
        return LogRead([ONE.page([log_row(NOW - 80_000)])], [NOW / 1000], 0.0)

    far = LogWork(0, Piece(NOW - 10**9, NOW - 2 * 10**8, NOW, "far"), (STREAM,))
    (found,) = staged(read, [far, work()]).tables.values()
    assert (found.missed, found.counts["taken"]) == ({"far"}, 1)
    assert "damaged" in found.failures["far"]


def test_a_far_sweep_makes_a_late_group_wait_for_its_last_row(staged: Callable[..., LogResult]) -> None:
    """It is not taken in part: what would come then has the same arrival, and later sweeps do not look for that."""
    late = [log_row(NOW - 6 * HOUR, ck=ck, arrived_ms=NOW - HOUR, last=False) for ck in range(2)]
    on_time = log_row(NOW - 7 * HOUR, last=False)
    (found,) = staged(reads(on_time, *late), [work("far")]).tables.values()
    assert [one.time for one in found.waiting] == [moment(NOW - 6 * HOUR).hex]
    assert found.counts["taken"] == 0
    alone = work(only=moment(NOW - 6 * HOUR).bytes, patient=False)
    (taken,) = staged(reads(on_time, *late), [alone]).tables.values()
    assert (taken.counts["taken"], taken.waiting) == (2, [])


def test_half_of_a_range_deletion_is_no_error_of_a_far_sweep(staged: Callable[..., LogResult]) -> None:
    half = log_row(NOW - 6 * HOUR, arrived_ms=NOW - HOUR, last=False, a=None, **{"cdc$operation": 5})
    result = staged(reads(half), [work("far")])
    assert (result.error_count, [len(one.waiting) for one in result.tables.values()]) == (0, [1])


@pytest.mark.parametrize(("arrived_ms", "taken"), [(-1, 1), (70_000, 0)])
def test_what_arrives_while_a_far_sweep_runs_is_for_the_next_one(
    staged: Callable[..., LogResult], arrived_ms: int, taken: int
) -> None:
    row = log_row(NOW - 6 * HOUR, arrived_ms=NOW - HOUR + arrived_ms)
    (first, second) = (
        next(iter(staged(reads(row), [LogWork(0, piece, (STREAM,), ttls_s=(TTL_S,))]).tables.values()))
        for piece in (
            Piece(NOW - 10**9, NOW - 10**8, NOW, "far", NOW - 5 * HOUR, NOW - HOUR + 5_000, 0, LATE_MS),
            Piece(NOW - 10**9, NOW - 10**8, NOW, "far", NOW - HOUR + 5_000, NOW, 0, LATE_MS),
        )
    )
    assert (first.counts["taken"], second.counts["taken"]) == (taken, 1 - taken)


@pytest.mark.parametrize("took_s", [0.0, 8.0, 75.0])
def test_a_slow_answer_changes_neither_expiry_nor_sweeps(
    staged: Callable[..., LogResult], tmp_path: Path, took_s: float
) -> None:
    """What is left of a TTL is of the moment when a page was made, which is anywhere between request and answer."""
    on_time = log_row(NOW - 100_000, arrived_ms=NOW - 100_000 - int(1000 * took_s), **{"cdc$ttl": 3600})

    def read(row: dict[str, Any]) -> Read:
        return lambda *_, **__: LogRead([ONE.page([row])], [NOW / 1000], took_s)

    result = staged(read(on_time), [work()])
    (block,) = result.blocks
    (cell,) = read_block(LocalStore(tmp_path), block.place)["cells"].to_pylist()[0]
    assert cell["local_deletion_time"] == (NOW - 100_000) // 1000 + 3600
    late = log_row(NOW - 9 * HOUR, arrived_ms=NOW - 2 * HOUR + 1000 - int(1000 * took_s))
    (found,) = staged(read(late), [work("far")]).tables.values()
    assert found.counts["taken"] == 1


def test_a_task_writes_what_it_holds_before_it_is_too_much(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_task, "HELD_BYTES", 1000)
    monkeypatch.setattr(cdc_log, "JOINED_BYTES", 1000)
    rows = [log_row(NOW - 90_000, ck=ck, **{"cdc$batch_seq_no": ck}) for ck in range(30)]
    result = staged(reads(*rows), [work() for _ in range(5)])
    (found,) = result.tables.values()
    assert len(result.files) == 5
    assert result.counts["staged"] == result.counts["rows"] == found.counts["taken"] == 150


def test_requests_that_are_decoded_together_are_taken_as_if_each_were_alone(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a group is cut off at the end of one, and if most have nothing."""

    def read(log: Any, of: Sequence[bytes], *_: Any, **__: Any) -> LogRead:
        number = of[0][0]
        rows = [
            log_row(NOW - 90_000, ck=ck, **{"cdc$stream_id": of[0], "cdc$batch_seq_no": ck}) for ck in range(number)
        ]
        if number == 3:
            del rows[-1]["cdc$end_of_batch"]
        return LogRead([ONE.page(rows)] * (number < 5), [NOW / 1000] * (number < 5), 0.0)

    found = []
    for most_bytes in (1, 10**6):
        monkeypatch.setattr(cdc_log, "JOINED_BYTES", most_bytes)
        works = [replace(work(), streams=(bytes([number]) * 16,)) for number in (1, 0, 3, 2, 5, 4)]
        result = staged(read, works)
        (one,) = result.tables.values()
        found.append((one.counts, [(waits.stream, waits.time) for waits in one.waiting], one.sums, result.counts))
    assert found[0] == found[1]
    assert (found[0][0]["taken"], [stream[:2] for stream, _ in found[0][1]]) == (7, ["03"])


def test_a_ms_that_is_too_large_is_read_stream_by_stream(staged: Callable[..., LogResult]) -> None:
    asked: list[tuple[int, int]] = []
    streams = tuple(bytes([number]) * 16 for number in range(3))

    def read(log: Any, of: Sequence[bytes], *_: Any, most_bytes: int, **__: Any) -> LogRead:
        asked.append((len(of), most_bytes))
        rows = [log_row(NOW - 80_000, **{"cdc$stream_id": stream}) for stream in of]
        return LogRead([ONE.page(rows)], [NOW / 1000], 0.0, is_too_large=len(of) > 1 or of[0] == streams[0])

    piece = Piece(NOW - 10**9, NOW - 80_000, NOW - 79_999)
    (found,) = staged(read, [LogWork(0, piece, streams[1:])]).tables.values()
    assert asked == [(2, log_task.MOST_BYTES), (1, log_task.MOST_BYTES), (1, log_task.MOST_BYTES)]
    assert (found.counts["taken"], found.missed) == (2, set())


def stream_of(rows: Sequence[dict[str, Any]], page_rows: int) -> Read:
    """Reads of one stream with these rows."""

    def read(log: Any, of: Sequence[bytes], *_: Any, most_bytes: int, from_time: bytes | None, **__: Any) -> LogRead:
        asked = [row for row in rows if from_time is None or _order(row["cdc$time"]) >= _order(UUID(bytes=from_time))]
        pages, size = [], 0
        while asked and size <= most_bytes:
            pages.append(ONE.page(asked[:page_rows]))
            asked, size = asked[page_rows:], size + len(pages[-1])
        return LogRead(pages, [NOW / 1000] * len(pages), 0.0, is_too_large=size > most_bytes)

    return read


def _order(time: UUID) -> tuple[int, bytes]:
    return time.time, bytes(byte ^ 0x80 for byte in time.bytes[8:])


@pytest.mark.parametrize("kind", ["window", "again", "near"])
@pytest.mark.parametrize("rows_of_write", [1, 3, 17])
def test_one_stream_with_too_much_of_a_ms_is_read_in_parts(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch, kind: Kind, rows_of_write: int
) -> None:
    """As of a bulk load with one timestamp. A write may be cut by pages and parts."""
    monkeypatch.setattr(log_task, "MOST_BYTES", 5000)
    rows = []
    for ck in range(500):
        write, place = divmod(ck, rows_of_write)
        of = {"cdc$time": moment(NOW - 80_000, write), "cdc$batch_seq_no": place}
        rows.append(log_row(NOW - 80_000, ck=ck, last=place == rows_of_write - 1 or ck == 499, **of))
    rows.sort(key=lambda row: (_order(row["cdc$time"]), row["cdc$batch_seq_no"]))
    piece = Piece(NOW - 10**9, NOW - 80_000, NOW - 79_999, kind)
    result = staged(stream_of(rows, 7), [LogWork(0, piece, (STREAM,))])
    (found,) = result.tables.values()
    assert (found.missed, found.waiting) == (set(), [])
    assert found.counts["taken"] == result.counts["staged"] == (0 if kind == "near" else 500)
    assert found.sums.get(kind, {}) == whole_sums(rows, kind)


def whole_sums(rows: Sequence[dict[str, Any]], kind: Kind) -> dict[int, SlotSums]:
    sums: dict[int, SlotSums] = {}
    if kind != "again":
        log_task.add_sums(sums, ONE.decode(ONE.page(rows)).groups)
    return sums


def test_one_large_write_is_read_as_a_whole(staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be divided. Others around it are read in parts."""
    monkeypatch.setattr(log_task, "MOST_BYTES", 5000)
    sizes = [*[1] * 100, 300, *[1] * 100]
    rows = [
        log_row(NOW - 80_000, ck=1000 * write + place, last=place == size - 1, **_of(write, place))
        for write, size in enumerate(sizes)
        for place in range(size)
    ]
    piece = Piece(NOW - 10**9, NOW - 80_000, NOW - 79_999)
    result = staged(stream_of(rows, 7), [LogWork(0, piece, (STREAM,))])
    (found,) = result.tables.values()
    assert (found.missed, found.waiting) == (set(), [])
    assert found.counts["taken"] == result.counts["staged"] == 500


def _of(write: int, place: int) -> dict[str, Any]:
    return {"cdc$time": moment(NOW - 80_000, write), "cdc$batch_seq_no": place}


@pytest.mark.parametrize("patient", [False, True])
def test_half_a_range_at_the_end_of_a_part_is_no_error(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    monkeypatch.setattr(log_task, "MOST_BYTES", 5000)
    rows = []
    for write in range(200):
        for place, operation in enumerate((5, 7)):
            row = log_row(NOW - 80_000, ck=write, last=place == 1, **_of(write, place))
            rows.append({name: value for name, value in row.items() if name not in "ab"} | {"cdc$operation": operation})
    piece = Piece(NOW - 10**9, NOW - 80_000, NOW - 79_999)
    result = staged(stream_of(rows, 3), [LogWork(0, piece, (STREAM,), patient=patient)])
    assert (result.error_count, result.counts["staged"]) == (0, 200)


def test_one_write_that_is_too_large_is_a_failure(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again at once."""
    monkeypatch.setattr(log_task, "MOST_BYTES", 5000)
    monkeypatch.setattr(log_task, "DECODED_BYTES", 20_000)
    rows = [log_row(NOW - 80_000, ck=ck, last=ck == 499, **{"cdc$batch_seq_no": ck}) for ck in range(500)]
    piece = Piece(NOW - 10**9, NOW - 80_000, NOW - 79_999)
    (failed,) = staged(stream_of(rows, 7), [LogWork(0, piece, (STREAM,))]).tables.values()
    assert "of one write" in failed.failures["window"]
    assert not failed.too_many


def test_too_many_rows_that_cannot_be_decoded_make_windows_shorter(
    staged: Callable[..., LogResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go to the driver."""
    monkeypatch.setattr(log_task, "MOST_ERROR_BYTES", 1000)
    rows = [log_row(NOW - 90_000, ck=ck, **{"cdc$operation": 77, "cdc$batch_seq_no": ck}) for ck in range(30)]
    (found,) = staged(reads(*rows), [work()]).tables.values()
    assert found.too_many == {"window"}
    shortest = LogWork(0, Piece(NOW - 10**9, NOW - 90_000, NOW - 89_999), (STREAM,))
    result = staged(reads(*rows), [shortest])
    assert (result.error_count, [one.too_many for one in result.tables.values()]) == (30, [set()])


def test_a_group_whose_patience_is_over_does_not_wait_for_another_of_its_ms(staged: Callable[..., LogResult]) -> None:
    old, new = (
        log_row(NOW - 90_000, ck=extra, last=False, **{"cdc$time": moment(NOW - 90_000, extra)}) for extra in (1, 2)
    )
    works = [
        work(only=old["cdc$time"].bytes, patient=False),
        work(only=new["cdc$time"].bytes),
    ]
    (found,) = staged(reads(old, new), works).tables.values()
    assert [one.time for one in found.waiting] == [new["cdc$time"].hex]
    assert found.counts["taken"] == 1


def test_rows_of_before_a_longer_ttl_came_when_they_came(staged: Callable[..., LogResult]) -> None:
    """A far sweep does not take them for a day older."""
    before_s = TTL_S // 2
    late = log_row(NOW - 9 * HOUR, **{'TTL("cdc$operation")': before_s - 600})
    of_now = log_row(NOW - 9 * HOUR, ck=1, arrived_ms=NOW - 8 * HOUR)
    for ttls_s, taken in (((TTL_S,), 0), ((TTL_S, before_s), 1)):
        (found,) = staged(reads(late, of_now), [work("far", ttls_s=ttls_s)]).tables.values()
        assert found.counts["taken"] == taken


def test_one_request_that_is_too_large_is_given_up(staged: Callable[..., LogResult]) -> None:
    limits: list[int] = []

    def read(*_: Any, most_bytes: int, **__: Any) -> LogRead:
        limits.append(most_bytes)
        return LogRead([ONE.page([log_row(NOW - 80_000)])], [NOW / 1000], 0.0, is_too_large=True)

    (found,) = staged(read, [work("near"), work()]).tables.values()
    assert (found.too_many, found.counts["taken"], found.sums) == ({"near", "window"}, 0, {})
    assert limits == [log_task.MOST_BYTES] * 2


def decoded(row: dict[str, Any], *, read_at_s: int = NOW // 1000, took_s: int = 0) -> dict[str, Any]:
    found = decode_log([ONE.page([row])], ONE.log, read_at_s=read_at_s, log_ttls_s=[TTL_S], took_s=took_s)
    (change,) = found.rows.to_pylist()
    return dict(change)


def test_deletions_are_dated_by_their_arrival() -> None:
    """One with an old timestamp must be kept for gc_grace from now on, not from then."""
    month_ms = 30 * 24 * HOUR
    change = decoded(log_row(NOW - month_ms, arrived_ms=NOW - 60_000, **{"cdc$operation": 3, "a": None}))
    assert change["deletion"] == {
        "timestamp": (NOW - month_ms) * 1000,
        "local_deletion_time": NOW // 1000 - 60,
    }
    cell = decoded(log_row(NOW - month_ms, arrived_ms=NOW - 60_000, **{"a": None, "cdc$deleted_a": True}))["cells"][0]
    assert cell["local_deletion_time"] == NOW // 1000 - 60
    on_time = decoded(log_row(NOW - 60_000, **{"cdc$operation": 3, "a": None}))
    assert on_time["deletion"]["local_deletion_time"] == NOW // 1000 - 60


def test_expiry_is_of_the_arrival_unless_that_cannot_be() -> None:
    def expiry(row: dict[str, Any], **more: Any) -> int:
        return int(decoded(row, **more)["cells"][0]["local_deletion_time"]) - NOW // 1000

    ttl = {"cdc$ttl": 3600}
    assert expiry(log_row(NOW - 60_000, **ttl)) == 3540
    assert expiry(log_row(NOW - 10 * HOUR, arrived_ms=NOW - 60_000, **ttl)) == 3540
    # The log's TTL was an hour when this was written: it would have come a day before its time.
    assert expiry(log_row(NOW - 60_000, **ttl, **{'TTL("cdc$operation")': 3540})) == 3540
    # It was asked for 20 s before it came: the server's clock was anywhere between.
    assert expiry(log_row(NOW - 60_000, **ttl), read_at_s=NOW // 1000 - 20, took_s=20) == 3540
