"""Tests of finding the cells of result pages. The driver's own parser is the oracle."""

from __future__ import annotations

import io
import struct

import pytest
from cassandra.protocol import read_int, read_value
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.formats.result_page import join_pages, page_cells
from tests.own_process import output_of


def page(*rows: list[bytes | None]) -> bytes:
    cells = [value for row in rows for value in row]
    return struct.pack(">i", len(rows)) + b"".join(
        struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value for value in cells
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(0, 4))
def test_every_cell_is_where_the_driver_finds_it(data: st.DataObject, columns: int) -> None:
    cell = st.one_of(st.none(), st.binary(max_size=20))
    rows = data.draw(st.lists(st.lists(cell, min_size=columns, max_size=columns), max_size=20))
    body = page(*rows)
    count, found = page_cells(body, columns)
    stream = io.BytesIO(body)
    assert count == read_int(stream) == len(rows)
    driver = [[read_value(stream) for _ in range(columns)] for _ in range(count)]
    assert [[column.value(row) for column in found] for row in range(count)] == driver == rows
    assert all(len(column) == count for column in found)


def test_pages_are_joined() -> None:
    pages = [page([b"ab", None], [b"", b"c"]), page(), page([None, b"d"])]
    count, found = page_cells(join_pages(pages), 2)
    rows = [[column.value(row) for column in found] for row in range(count)]
    assert rows == [[b"ab", None], [b"", b"c"], [None, b"d"]]


def test_any_negative_length_is_null() -> None:
    _, (column,) = page_cells(struct.pack(">iii", 2, -2, -1), 1)
    assert column.lengths.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "byte 0"),
        (b"\0\0\0", "byte 0"),
        (struct.pack(">i", -1), "-1 rows"),
        (struct.pack(">i", 2**31 - 1), "2147483647 rows"),
        (page([b"abc", b"de"])[:-1], "the cell at byte 11 runs past the end at byte 16"),
        (page([b"abc", b"de"])[:13], "the cell at byte 11"),
        (struct.pack(">iii", 1, 2**31 - 1, 0), "the cell at byte 4"),
        (page([b"abc", b"de"]) + b"\0", "1 bytes are left at byte 17"),
    ],
)
def test_a_page_of_another_shape_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page_cells(body, 2)


FUZZ = """
import random
from ringsync.formats.result_page import page_cells
dice = random.Random(7)
for _ in range(20000):
    body = bytearray(dice.choice([b"\\0", b"\\0", b"\\x01", b"\\xff", b"\\x7f"])[0] for _ in range(dice.randrange(80)))
    body[:4] = dice.randrange(6).to_bytes(4, "big")
    try:
        rows, columns = page_cells(bytes(body), 3)
    except ValueError:
        continue
    for column in columns:
        assert all(0 <= offset and offset + length <= len(body)
                   for offset, length in zip(column.offsets.tolist(), column.lengths.tolist()))
print("survived")
"""


def test_random_pages_never_crash() -> None:
    assert output_of(FUZZ) == "survived"
