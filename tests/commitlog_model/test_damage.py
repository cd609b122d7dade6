"""The model's reader on parts of segments and on damaged ones: nothing is made up, and no loss is silent."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.murmur3 import murmur3
from tests.commitlog_model.segment import Segment, UnreadableSegmentError, read_segment
from tests.commitlog_model.types import Table
from tests.commitlogs.fixtures import Fixture, fixtures, unpacked

FLIPS, CUTS = 8, 3


ONE_OF_EACH_CODEC = [one for one in fixtures() if one.mode == "5.0-v8" and not one.killed]


@pytest.fixture(params=ONE_OF_EACH_CODEC, ids=lambda one: one.name)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return request.param


@pytest.fixture
def tables(fixture: Fixture) -> dict[str, Table]:
    return parse_schema(fixture.schema + fixture.dropped)


@pytest.fixture
def key(fixture: Fixture) -> bytes | None:
    return bytes.fromhex(fixture.keystore.key_file.read_text()) if fixture.keystore else None


@pytest.fixture
def data(fixture: Fixture, tmp_path: Path) -> bytes:
    """A segment without the zeros at its end, but for a marker's."""
    return unpacked(fixture, tmp_path)[1].read_bytes().rstrip(b"\0") + bytes(16)


def damages(segment: Segment) -> list[dict[str, Any]]:
    return [problem for problem in segment.problems if problem["reason"] != "unknown table"]


def found(segment: Segment) -> list[tuple[int, str]]:
    return [(change["source"]["position"], change["digest"]) for change in segment.changes]


def test_any_part_of_a_segment_can_be_read(data: bytes, tables: dict[str, Table], key: bytes | None) -> None:
    whole = read_segment(data, tables, key=key)
    assert damages(whole) == []
    positions = sorted({position for position, _ in found(whole)})
    for at in [whole.header_length, *random.Random(1).sample(positions, 10), whole.position]:
        later = read_segment(data, tables, start=at, key=key)
        earlier = read_segment(data, tables, end=at, key=key)
        assert found(earlier) + found(later) == found(whole)
        assert damages(earlier) == damages(later) == []


def test_a_segment_shorter_than_its_index_says_is_truncated(
    data: bytes, tables: dict[str, Table], key: bytes | None
) -> None:
    whole = read_segment(data, tables, key=key)
    (problem,) = damages(read_segment(data, tables, end=whole.position + 100, key=key))
    assert problem["reason"] == "truncated"


def test_no_flipped_byte_is_a_silent_loss(data: bytes, tables: dict[str, Table], key: bytes | None) -> None:
    whole = found(read_segment(data, tables, key=key))
    rng = random.Random(2)
    for _ in range(FLIPS):
        at = rng.randrange(len(data) - 16)
        byte = rng.choice((0, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        if byte != data[at]:
            check_loss(data[:at] + bytes([byte]) + data[at + 1 :], whole, tables, key, f"byte {at} is {byte}")


def test_no_cut_is_a_silent_loss(data: bytes, tables: dict[str, Table], key: bytes | None) -> None:
    complete = read_segment(data, tables, key=key)
    rng = random.Random(3)
    for _ in range(CUTS):
        at = rng.randrange(len(data) - 16)
        check_loss(data[:at], found(complete), tables, key, f"cut at {at}", complete.position)


def check_loss(
    damaged: bytes,
    whole: list[tuple[int, str]],
    tables: dict[str, Table],
    key: bytes | None,
    what: str,
    end: int | None = None,
) -> None:
    try:
        segment = read_segment(damaged, tables, key=key, end=end)
    except UnreadableSegmentError:
        return
    left = found(segment)
    assert set(left) <= set(whole), f"{what}: changes are made up"
    assert left == whole or damages(segment), f"{what}: {len(whole) - len(left)} changes are lost without a word"


# A byte of a compressed or encrypted section damages all of it.
@pytest.mark.parametrize("fixture", [one for one in ONE_OF_EACH_CODEC if one.codec == "plain"], ids=["plain"])
def test_a_damaged_record_is_skipped(data: bytes, tables: dict[str, Table]) -> None:
    whole = found(read_segment(data, tables))
    position = whole[len(whole) // 2][0]
    damaged = bytearray(data)
    damaged[position - 6] ^= 0xFF
    segment = read_segment(bytes(damaged), tables)
    (problem,) = damages(segment)
    assert (problem["position"], problem["reason"]) == (position, "damaged record: wrong CRC")
    assert found(segment) == [one for one in whole if one[0] != position]


def test_records_with_an_unknown_column_are_kept_as_bytes(
    data: bytes, tables: dict[str, Table], key: bytes | None
) -> None:
    whole = read_segment(data, tables, key=key)
    change = next(change for change in whole.changes if change["kind"] == "row" and change.get("cells"))
    table, column = tables[change["table_id"]], change["cells"][0]["column"]
    without = {name: text for name, text in table.regular.items() if name != column}
    segment = read_segment(data, tables | {table.id: replace(table, regular=without, dropped={})}, key=key)
    unknown = [problem for problem in segment.problems if problem["reason"] == "unknown column"]
    assert unknown[0]["position"] == change["source"]["position"]
    assert (unknown[0]["table_id"], unknown[0]["column"]) == (table.id, column)
    assert change["cells"][0]["raw"] in unknown[0]["raw"]
    positions = {problem["position"] for problem in unknown}
    assert found(segment) == [one for one in found(whole) if one[0] not in positions]


def test_murmur3_is_the_published_one() -> None:
    assert murmur3(b"") == (0, 0)
    assert murmur3(b"hello") == (0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19)
    assert murmur3(b"The quick brown fox jumps over the lazy dog") == (0xE34BBC7BBC071B6C, 0x7A433CA9C49A9347)
