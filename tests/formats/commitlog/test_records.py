"""Tests of the records of a section: their positions, and clear reports of places without a record."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from ringsync.compiled.crc32 import CRC_TABLES, crc32_continue
from ringsync.compiled.memory import address, padded
from ringsync.formats.commitlog.records import Records, find_records
from ringsync.formats.commitlog.segment import Damage, Section
from tests.commitlog_model.write import record

address_of_tables = address(CRC_TABLES)
START = 1000
"""Logical position of the first byte."""


def found(content: bytes, may_end_in_zeros: bool = False) -> tuple[Records, list[Damage]]:
    return find_records(padded(content), [Section(0, len(content), START)], len(content) if may_end_in_zeros else -1)


@njit
def crc(p: int, length: int, before: int) -> int:
    return crc32_continue(address_of_tables, p, length, before)


@settings(deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_checksums_are_those_of_zlib(first: bytes, second: bytes) -> None:
    one, other = padded(first), padded(second)
    assert crc(address(one), len(first), 0) == zlib.crc32(first)
    assert crc(address(other), len(second), zlib.crc32(first)) == zlib.crc32(second, zlib.crc32(first))


@settings(deadline=None)
@given(st.lists(st.lists(st.binary(min_size=10, max_size=40), max_size=5), max_size=4))
def test_all_records_of_all_sections(sections: list[list[bytes]]) -> None:
    data, spans, expected = b"", [], []
    for number, contents in enumerate(sections):
        begin, shift = len(data), START + 8 * number
        for content in contents:
            data += record(content)
            expected.append((content, len(data) + shift))
        spans.append(Section(begin, len(data), begin + shift))
    buffer = padded(data)
    records, damages = find_records(buffer, spans)
    assert damages == []
    assert records.sound.all()
    pieces = [bytes(buffer[at : at + size]) for at, size in zip(records.offsets, records.sizes, strict=True)]
    assert list(zip(pieces, records.positions.tolist(), strict=True)) == expected


GOOD, BAD = record(b"a good mutation"), bytearray(record(b"a bad mutation"))


def sized(size: int) -> bytes:
    """Encode a size with the right checksum."""
    data = struct.pack(">i", size)
    return data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"\0\0\0\0" + b"x" * 30, "zeros or other bytes where a record should be"),
        (bytes(40), "zeros or other bytes where a record should be"),
        (bytes(3), "zeros or other bytes where a record should be"),
        (b"xyz", "zeros or other bytes where a record should be"),
        (struct.pack(">iI", 20, 1) + bytes(30), "the checksum of a record's size is wrong"),
        (struct.pack(">i", 20), "the checksum of a record's size is wrong"),
        (struct.pack(">i", 20) + b"abc", "the checksum of a record's size is wrong"),
        (sized(9) + bytes(40), "a record of less than 10 bytes"),
        (sized(-1) + bytes(40), "a record runs past the end of its section"),
        (sized(0x7FFFFFFF) + bytes(40), "a record runs past the end of its section"),
        (sized(29) + bytes(32), "a record runs past the end of its section"),
        (sized(20), "a record runs past the end of its section"),
    ],
)
def test_what_is_no_record_ends_the_section(bad: bytes, reason: str) -> None:
    data = GOOD + bad
    buffer = padded(data + GOOD)
    sections = [Section(0, len(data), START), Section(len(data), len(data) + len(GOOD), START + len(data) + 8)]
    records, (damage,) = find_records(buffer, sections)
    assert records.positions.tolist() == [START + len(GOOD), START + len(data) + 8 + len(GOOD)]
    assert (damage.position, damage.length) == (START + len(GOOD), len(bad))
    assert reason in damage.reason


@pytest.mark.parametrize("zeros", [1, 3, 4, 7, 8, 9, 100])
def test_zeros_at_the_end_are_room_only_where_a_file_was_made_with_them(zeros: int) -> None:
    records, damages = found(GOOD + bytes(zeros), may_end_in_zeros=True)
    assert len(records) == 1
    assert damages == []
    assert len(found(GOOD + bytes(zeros))[1]) == 1
    later = [Section(0, len(GOOD) + zeros, START), Section(len(GOOD) + zeros, 2 * len(GOOD) + zeros, 5000)]
    records, damages = find_records(padded(GOOD + bytes(zeros) + GOOD), later, later[-1].end)
    assert len(records) == 2
    assert [damage.length for damage in damages] == [zeros]


@pytest.mark.parametrize("at", range(8, len(BAD)))
def test_a_wrong_checksum_is_of_one_record_only(at: int) -> None:
    bad = bytearray(BAD)
    bad[at] ^= 0x10
    records, damages = found(GOOD + bytes(bad) + GOOD)
    assert records.sound.tolist() == [True, False, True]
    assert damages == []


def test_no_section_and_an_empty_one() -> None:
    assert len(found(b"")[0]) == 0
    assert find_records(padded(b""), [])[1] == []
