"""Tests of a ``_cdc.idx`` at any moment while Cassandra writes it."""

from __future__ import annotations

import pytest

from ringsync.formats.commitlog.index import SegmentIndex, parse_index
from ringsync.formats.commitlog.segment import Wanted


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", None),
        (b"1047868", SegmentIndex(1047868, False)),
        (b"104", SegmentIndex(104, False)),
        (b"1047868\n", None),
        (b"1047868\nCOMP", None),
        (b"1047868\nCOMPLETED", SegmentIndex(1047868, True)),
        (b"0", SegmentIndex(0, False)),
    ],
)
def test_what_cassandra_writes(content: bytes, expected: SegmentIndex | None) -> None:
    assert parse_index(content) == expected


@pytest.mark.parametrize(
    "content", [b"x", b"-1", b"12 ", b"12\r\n", b"12\nFINISHED", b"12\nCOMPLETED\n", b"\nCOMPLETED", b"\0\0", b"9" * 20]
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not what Cassandra writes: an offset, and COMPLETED in a second line"):
        parse_index(content)


def test_only_an_unfinished_segment_is_read_up_to_the_offset() -> None:
    assert SegmentIndex(7, False).wanted == Wanted(until=7)
    assert SegmentIndex(7, True).wanted == Wanted(completed_at=7)
