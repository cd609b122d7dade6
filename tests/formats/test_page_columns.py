"""Tests of result pages decoded to Arrow in one pass. Decoding cell by cell is the oracle."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringsync.cql.codec.decode import decode
from ringsync.cql.types import CqlType, ListType, Native
from ringsync.formats.page_columns import decode_pages
from ringsync.formats.result_page import join_pages, page_cells
from tests.own_process import output_of

WIDTHS = {
    "int": 4,
    "float": 4,
    "date": 4,
    "bigint": 8,
    "double": 8,
    "time": 8,
    "timestamp": 8,
    "uuid": 16,
    "boolean": 1,
}
TYPES: list[CqlType] = [*map(Native, WIDTHS), *map(Native, ("text", "ascii", "blob", "inet")), ListType(Native("int"))]


def usual_value(kind: CqlType) -> st.SearchStrategy[bytes | None]:
    """Generate bytes of this type, or null."""
    match str(kind):
        case "text" | "ascii":
            values = st.text(st.characters(codec="ascii"), max_size=40).map(str.encode)
        case "blob":
            values = st.binary(max_size=40)
        case "boolean":
            values = st.sampled_from([b"\0", b"\1"])
        case "inet":
            values = st.binary(min_size=4, max_size=4)
        case "timestamp":
            values = st.integers(-(2**50), 2**50).map(lambda number: struct.pack(">q", number))
        case "list<int>":
            values = st.just(struct.pack(">iii", 1, 4, 7))
        case name:
            values = st.binary(min_size=WIDTHS[name], max_size=WIDTHS[name])
    return st.none() | values


def body(rows: list[list[bytes | None]]) -> bytes:
    cells = [value for row in rows for value in row]
    return struct.pack(">i", len(rows)) + b"".join(
        struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value for value in cells
    )


def check(kinds: list[CqlType], pages: list[bytes]) -> bool:
    """Compare with decoding cell by cell. Tell whether one pass was enough."""
    found = decode_pages(pages, kinds)
    rows, cells = page_cells(join_pages(pages), len(kinds))
    assert found.rows == rows
    for kind, column, raw in zip(kinds, found.decoded, cells, strict=True):
        expected = decode(kind, raw)
        column.values.validate(full=True)
        # NaN differs from itself, its bits do not.
        bits = {"double": pa.int64(), "float": pa.int32()}.get(str(kind))
        ours, theirs = [array.view(bits) if bits else array for array in (column.values, expected.values)]
        assert ours.equals(theirs)
        masks = [None if mask is None else mask.tolist() for mask in (column.misfits, expected.misfits)]
        assert masks[0] == masks[1]
    return found.cells is None


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.sampled_from(TYPES), max_size=5))
def test_usual_values_need_one_pass(data: st.DataObject, kinds: list[CqlType]) -> None:
    rows = st.lists(st.tuples(*map(usual_value, kinds)).map(list), max_size=20)
    assert check(kinds, [body(page) for page in data.draw(st.lists(rows, min_size=1, max_size=4))])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
def test_any_value_is_decoded_or_a_misfit(data: st.DataObject, kinds: list[CqlType]) -> None:
    cell = st.sampled_from([None, b"", b"\0", b"\xff" * 8, b"\x80" + b"\0" * 7]) | st.binary(max_size=20)
    rows = st.lists(st.tuples(*[usual_value(kind) | cell for kind in kinds]).map(list), max_size=9)
    check(kinds, [body(page) for page in data.draw(st.lists(rows, min_size=1, max_size=3))])


@given(st.integers(-(2**63), 2**63 - 1))
@example(2**63 // 1000)
@example(2**63 // 1000 + 1)
@example(-(2**63 // 1000) - 1)
def test_timestamps_beyond_microseconds_are_misfits(number: int) -> None:
    usual = check([Native("timestamp")], [body([[struct.pack(">q", number)]])])
    assert usual == (abs(number) <= (2**63 - 1) // 1000)


def test_text_that_is_none_is_a_misfit() -> None:
    assert check([Native("text")], [body([["é".encode()], [b"b"]])])
    assert not check([Native("ascii")], [body([["é".encode()], [b"b"]])])
    assert not check([Native("text")], [body([[b"a"]]), body([[b"\xff"], [b"b"]])])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (body([[b"abc", b"\0\0\0\1"]])[:-1], "the cell at byte 11 runs past the end at byte 18"),
        (body([[b"abcdefgh", b""]])[:14], "the cell at byte 4 runs past the end at byte 14"),
        (body([[b"abc", b"\0\0\0\1"]]) + b"\0", "1 bytes are left at byte 19"),
        (struct.pack(">i", 2**31 - 1), "2147483647 rows"),
        (b"\0\0", "byte 0"),
    ],
)
def test_a_page_of_another_shape_is_refused(second: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_pages([body([[b"a", None]]), second], [Native("text"), Native("int")])


FUZZ = """
import ctypes, mmap, random
import pyarrow as pa
from ringsync.cql.types import Native
from ringsync.formats.page_columns import decode_pages

# The page ends where memory ends: a kernel that reads a byte too many ends the process.
room = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(room))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
dice = random.Random(7)
kinds = [Native(name) for name in ("text", "int", "uuid", "timestamp", "bigint", "date", "blob", "inet", "double")]
widths = {"int": 4, "uuid": 16, "timestamp": 8, "bigint": 8, "date": 4, "double": 8, "inet": 4}
decoded = 0
for _ in range(30000):
    types = [dice.choice(kinds) for _ in range(dice.randrange(1, 4))]
    rows = dice.randrange(5)
    body = bytearray(rows.to_bytes(4, "big"))
    for _ in range(rows):
        for kind in types:
            size = widths.get(kind.name, dice.randrange(20)) if dice.random() < 0.98 else dice.randrange(-1, 20)
            body += size.to_bytes(4, "big", signed=True) + bytes(dice.randrange(128) for _ in range(size))
    if dice.random() < 0.3:
        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
    if dice.random() < 0.3:
        del body[dice.randrange(len(body)):]
    place = mmap.PAGESIZE - len(body)
    room[place : mmap.PAGESIZE] = bytes(body)
    try:
        found = decode_pages([memoryview(room)[place : mmap.PAGESIZE]], types)
    except ValueError:
        continue
    for column in found.decoded:
        column.values.validate(full=True)
    decoded += found.cells is None
print("survived", decoded > 10000)
"""


def test_no_byte_behind_a_page_is_read() -> None:
    assert output_of(FUZZ) == "survived True"
