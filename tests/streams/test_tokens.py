"""Tokens cut out of messages, and the Kafka partitions that they choose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ringsync.streams.files import FileStream
from ringsync.streams.messages import Messages, envelope_schema, key_schema, message_schema
from ringsync.streams.tokens import partition_of, steps_to_token, tokens_of
from tests.steps.late_files import RangeDelete, Write
from tests.streams.outbox import NOTES, SERVER, changes, notes, outbox, publish, published

MESSAGE = message_schema(key_schema(NOTES, SERVER, "exact"), envelope_schema(NOTES, SERVER, "exact"))
EDGES = [-(2**63), -(2**63) + 1, -5, -1, 0, 1, 63, 64, 2**63 - 1]


def cut_out(messages: Messages) -> list[int]:
    data = b"".join(messages.values.to_pylist())
    ends = np.cumsum([len(value) for value in messages.values.to_pylist()])
    bounds = np.stack([np.append(0, ends[:-1]), ends], axis=1).ravel()
    found: list[int] = tokens_of(data, bounds, len(messages.values), steps_to_token(MESSAGE)).to_pylist()
    return found


@pytest.mark.parametrize("with_index", [True, False])
def test_blocks_have_the_tokens_that_their_messages_say(tmp_path: Path, with_index: bool) -> None:
    stream = outbox(tmp_path, "demo.shop.notes")
    writes = [Write(1, 1, "x", 5), Write(2, None, None, 6), RangeDelete(3, 1, 9, 7), Write(4, 1, None, 8)]
    publish(stream, "b", notes(0, 2500), changes(*writes), notes(7, 1))
    if not with_index:
        for file in tmp_path.rglob("*.index"):
            file.unlink()
    expected = [message["value"]["source"]["token"] for message in published(stream).values()]
    assert tokens_in(stream) == expected
    assert len(set(expected)) > 50


def tokens_in(stream: FileStream) -> list[int]:
    blocks = [block for part in stream.parts("b") or () for block in stream.blocks("b", part)]
    return [token for block in blocks for token in block.tokens.to_pylist()]


def test_the_least_and_the_greatest_token_are_read() -> None:
    assert cut_out(notes(0, len(EDGES), tokens=EDGES)) == EDGES


def test_a_message_that_ends_before_its_token_is_refused() -> None:
    (whole,) = notes(0, 1, tokens=[2**63 - 1]).values.to_pylist()
    steps = steps_to_token(MESSAGE)
    begins = whole.index(b"\xfe" + b"\xff" * 8 + b"\x01")
    for length in range(begins + 10):
        with pytest.raises(ValueError, match="message 0 of 1 does not follow its Avro schema"):
            tokens_of(whole[:length], np.array([0, length]), 1, steps)
    assert tokens_of(whole[: begins + 10], np.array([0, begins + 10]), 1, steps).to_pylist() == [2**63 - 1]


def test_a_stream_without_a_token_at_a_known_place_is_refused() -> None:
    (value,) = (field["type"] for field in MESSAGE["fields"] if field["name"] == "value")
    other = {**value, "fields": [field for field in value["fields"] if field["name"] != "source"]}
    with pytest.raises(ValueError, match=r"no source\.token at a known place"):
        steps_to_token(message_schema(key_schema(NOTES, SERVER, "exact"), other))


def test_a_partition_depends_on_the_token_alone_and_all_get_their_share() -> None:
    assert partition_of(pa.array([-3, -1, 0, 4, 2**63 - 1, -(2**63)], pa.int64()), 3) == [0, 2, 0, 1, 1, 1]
    tokens = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 60_000)
    shares = Counter(partition_of(pa.array(tokens), 6))
    assert sorted(shares) == list(range(6))
    assert all(9_500 < share < 10_500 for share in shares.values())
