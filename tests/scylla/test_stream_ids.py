"""Stream ids and generations: the values that Scylla's documents and the published readers' tests print."""

from __future__ import annotations

import pytest

from ringsync.scylla.generations import Generation, Interval, StreamRange, intervals
from ringsync.scylla.stream_ids import StreamId, StreamIdError
from tests.scylla_sim.arithmetic import id_of

SIGN, RING = 2**63, 2**64


def signed(text: str) -> int:
    number = int(text, 16)
    return number - RING if number >= SIGN else number


@pytest.mark.parametrize(
    ("text", "token", "index", "version"),
    [
        ("ced00000000000009663c8dc500005a1", "ced0000000000000", 90, 1),
        ("d2c80000000000009eeeef5ea40014e1", "d2c8000000000000", 334, 1),
        ("d9ae000000000000c7bf768f08001681", "d9ae000000000000", 360, 1),
        ("7fb9f781956cea08c651295720000001", "7fb9f781956cea08", 0, 1),
        ("7fc0000000000000c298b9f168000001", "7fc0000000000000", 0, 1),
        ("80838c6b76e19a1b0123456789abcde0", "80838c6b76e19a1b", None, 0),
    ],
)
def test_parts_of_documented_ids(text: str, token: str, index: int | None, version: int) -> None:
    stream = StreamId(bytes.fromhex(text))
    assert (stream.token, stream.index, stream.version) == (signed(token), index, version)
    assert str(stream) == f"0x{text}"
    if index is not None:
        low = int(text[16:], 16)
        assert id_of(stream.token, low >> 26, index) == stream.data


def test_what_is_no_id() -> None:
    for size in (0, 8, 15, 17):
        with pytest.raises(StreamIdError, match=f"has {size} bytes"):
            StreamId(bytes(size))


def test_ranges_are_in_the_order_of_their_ends() -> None:
    with pytest.raises(ValueError, match="not in the order"):
        Generation(5, (StreamRange(3, ()), StreamRange(3, ())))


def test_generations_operate_until_the_next_one() -> None:
    found = intervals([1635882326384, 1635882224341, 1635882326384])
    assert found == [Interval(1635882224341, 1635882326384), Interval(1635882326384, None)]
