"""What requests for a CDC log bring: joined, and decoded with the moment at which each page was asked for."""

from __future__ import annotations

import pytest

from ringsync.sources import cdc_log
from ringsync.sources.cdc_log import LogRead, joined
from tests.scylla.test_log_task import CLOCKS, HOUR, NOW, ONE, TTL_S, log_row, moment


def test_reads_are_joined_if_they_are_of_one_thing_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdc_log, "JOINED_BYTES", 100)
    sizes = [
        ("a", 40, 0.2),
        ("a", 60, 0.9),
        ("a", 1, 0.1),
        ("b", 1, 0.1),
        ("b", 300, 0.1),
        ("b", 7, 2.5),
        ("b", 8, 2.1),
    ]
    reads = [(of, LogRead([bytes(size)], [float(place)], took_s)) for place, (of, size, took_s) in enumerate(sizes)]
    found = [(of, [*map(len, read.pages)], [*read.at_s], read.took_s) for of, read in joined(iter(reads))]
    assert found == [
        ("a", [40, 60], [0.0, 1.0], 0.9),
        ("a", [1], [2.0], 0.1),
        ("b", [1], [3.0], 0.1),
        ("b", [300], [4.0], 0.1),
        ("b", [7, 8], [5.0, 6.0], 2.5),
    ]
    assert [*joined([])] == []


def test_each_page_has_been_asked_for_at_a_time_of_its_own() -> None:
    """One had to be asked for again, after a timeout of 20 s."""
    rows = [
        log_row(NOW - 9 * HOUR, ck=ck, arrived_ms=NOW - HOUR - later_ms, **{"cdc$ttl": 7200, "cdc$batch_seq_no": ck})
        for ck, later_ms in enumerate((0, 0, 20_000, 20_000))
    ]
    rows[2]["cdc$time"] = rows[3]["cdc$time"] = moment(NOW - 9 * HOUR, 3)
    read = LogRead([ONE.page([]), ONE.page(rows[:2]), ONE.page(rows[2:])], [NOW / 1000] * 2 + [NOW / 1000 + 20], 1.0)
    found = read.decoded(ONE.log, [TTL_S], clocks=CLOCKS)
    assert found.arrivals_s[0].tolist() == [(NOW - HOUR) // 1000] * 4
    cells = [cell for row in found.rows.to_pylist() for cell in row["cells"]]
    assert {cell["local_deletion_time"] for cell in cells} == {(NOW - HOUR) // 1000 + 7200}


def test_a_write_that_is_cut_by_pages_has_one_arrival() -> None:
    """Pages of a large batch may be asked for seconds after each other."""
    pages = []
    for first, asked_ms in ((0, NOW), (3, NOW + 4000), (6, NOW + 8000)):
        left = {'TTL("cdc$operation")': TTL_S - (asked_ms - NOW + 60_000) // 1000, "cdc$ttl": 3600}
        rows = [
            log_row(NOW - 60_000, ck=ck, last=ck == 8, **{"cdc$batch_seq_no": ck} | left)
            for ck in range(first, first + 3)
        ]
        pages.append(ONE.page(rows))
    found = LogRead(pages, [NOW / 1000, NOW / 1000 + 4, NOW / 1000 + 8], 0.3).decoded(ONE.log, [TTL_S], clocks=CLOCKS)
    assert found.arrivals_s[0].tolist() == [(NOW - 60_000) // 1000] * 9
    assert len(found.groups) == 1
    expiries = {row["cells"][0]["local_deletion_time"] for row in found.rows.to_pylist()}
    assert expiries == {(NOW - 60_000) // 1000 + 3600}
