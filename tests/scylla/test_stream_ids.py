"""Stream ids and generations: the values that Scylla's documents and the published readers' tests print."""

from __future__ import annotations

import pytest

from ringsync.scylla.generations import Generation, Interval, StreamRange, intervals, shard_of
from ringsync.scylla.stream_ids import StreamId, StreamIdError

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
        assert StreamId.of(stream.token, low >> 26, index) == stream


def test_what_is_no_id() -> None:
    for size in (0, 8, 15, 17):
        with pytest.raises(StreamIdError, match=f"has {size} bytes"):
            StreamId(bytes(size))
    for parts in ((2**63, 0, 0), (0, 2**38, 0), (0, 0, 2**22)):
        with pytest.raises(StreamIdError, match="do not fit"):
            StreamId.of(*parts)


VNODES = [  # end of the range, and the tokens of its streams in the order of three shards
    ("807ae73e07dbd411", ["8000000000000001", "8005555555555556", "7ffe0c687fcce86e"]),
    ("80838c6b76e19a1b", ["8080000000000000", "80838c6b76e19a1b", "807ae73e07dbd412"]),
    ("80c5343222b6eee5", ["80838c6b76e19a1c", "8085555555555556", "808aaaaaaaaaaaab"]),
    ("7ffe0c687fcce86d", ["d000000000000000", "d005555555555556", "d00aaaaaaaaaaaab"]),
]


def documented() -> Generation:
    ranges = [
        StreamRange(signed(end), tuple(StreamId.of(signed(token), 7, index) for token in tokens))
        for index, (end, tokens) in enumerate(VNODES)
    ]
    return Generation(1585573300000, tuple(sorted(ranges, key=lambda one: one.end)))


def test_the_shards_of_documented_streams() -> None:
    """Each stream's token is of its shard, but where a shard owns nothing of the range: then it is the range's end."""
    for end, tokens in VNODES:
        shards = [shard_of(signed(token), 3) for token in tokens]
        assert [shard for shard, token in zip(shards, tokens, strict=True) if token != end] == [
            shard for shard, token in enumerate(tokens) if token != end
        ]


def test_a_token_goes_to_the_stream_of_its_range_and_shard() -> None:
    generation = documented()
    for end, tokens in VNODES:
        for token in tokens:
            if token != end:
                assert generation.stream_of(signed(token)).token == signed(token)
        assert {one.token for one in generation.streams_of(signed(end))} == set(map(signed, tokens))
    # Behind the last end the first range goes on.
    last = max(signed(end) for end, _ in VNODES)
    assert generation.streams_of(last + 1) == generation.ranges[0].streams


@pytest.mark.parametrize(
    ("token", "stream", "shard"),
    [
        ("cfa0f7ddd84c76bc", "ced0000000000000", None),
        ("d2e9aeb38ba99790", "d2c8000000000000", 4),
        ("da1f26e0623f9efb", "d9ae000000000000", 7),
    ],
)
def test_shards_of_rows_that_a_server_wrote(token: str, stream: str, shard: int | None) -> None:
    if shard is None:
        assert shard_of(signed(stream), 3) == 0
    else:
        assert shard_of(signed(token), 8) == shard_of(signed(stream), 8) == shard


def test_tablets_have_a_stream_each() -> None:
    for ends in (
        ["ffffffffffffffff", "7fffffffffffffff"],
        ["bfffffffffffffff", "ffffffffffffffff", "3fffffffffffffff"],
    ):
        tokens = sorted(map(signed, [*ends, "7fffffffffffffff"] if len(ends) == 3 else ends))
        tablets = Generation(0, tuple(StreamRange(token, (StreamId.of(token, 1, 0),)) for token in tokens))
        assert tablets.stream_of(-3485513579396041028).token == -1
        assert [one.index for one in tablets.streams] == [0] * len(tokens)


def test_an_empty_generation_has_no_streams() -> None:
    empty = Generation(5, ())
    assert empty.streams_of(7) == ()
    with pytest.raises(LookupError, match="generation 5 has no stream"):
        empty.stream_of(7)
    with pytest.raises(ValueError, match="not in the order"):
        Generation(5, (StreamRange(3, ()), StreamRange(3, ())))


def test_generations_operate_until_the_next_one() -> None:
    found = intervals([1635882326384, 1635882224341, 1635882326384])
    assert found == [Interval(1635882224341, 1635882326384), Interval(1635882326384, None)]
    assert [moment in found[0] for moment in (1635882224340, 1635882224341, 1635882326383, 1635882326384)] == [
        *(False, True, True, False)
    ]
    assert 2**60 in found[1]
