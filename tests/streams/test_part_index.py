"""Indexes of parts: messages cut out by them are those that were written, and a wrong index is never believed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from ringsync.streams.files import FileStream, StreamDamagedError
from ringsync.streams.part_index import MessageBlock, PartIndex
from tests.streams.outbox import notes, outbox, publish


@pytest.fixture
def stream(tmp_path: Path) -> FileStream:
    found = outbox(tmp_path, "demo.shop.notes")
    publish(found, "b", notes(0, 4500), notes(4500, 1))
    return found


def blocks(stream: FileStream) -> list[MessageBlock]:
    return [block for part in stream.parts("b") or () for block in stream.blocks("b", part)]


def index_files(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("*.index"))


def test_messages_are_cut_out_as_they_were_written(stream: FileStream, tmp_path: Path) -> None:
    written = [notes(0, 4500), notes(4500, 1)]
    found = blocks(stream)
    assert [datum for block in found for datum in block.keys] == pa.chunked_array([m.keys for m in written]).to_pylist()
    values = pa.chunked_array([m.values for m in written]).to_pylist()
    assert [datum for block in found for datum in block.values] == values
    event_ids = [event_id.hex().encode() for m in written for event_id in m.event_ids.to_pylist()]
    assert [event_id for block in found for event_id in block.event_ids] == event_ids
    assert {block.schema_version for block in found} == {1}
    for file in index_files(tmp_path):
        file.unlink()
    assert blocks(stream) == found


def test_another_part_s_index_is_refused(stream: FileStream) -> None:
    first, second = (f"streams/{stream.topic}/b/{part.name}.index" for part in stream.parts("b") or ())
    stream.store.put(first, stream.store.get(second))
    with pytest.raises(StreamDamagedError, match=r"part-000-.*\.index: it is not the index of this part; remove it"):
        blocks(stream)


@pytest.mark.parametrize(
    "messages", [notes(0, 4499), notes(0, 4501), notes(1000, 4500)], ids=["fewer", "more", "others"]
)
def test_an_index_of_other_messages_is_refused(stream: FileStream, messages: object) -> None:
    part = (stream.parts("b") or [])[0]
    index = PartIndex(1)
    index.add(messages)  # type: ignore[arg-type]
    stream.store.put(f"streams/{stream.topic}/b/{part.name}.index", index.finish(part.crc32c))
    with pytest.raises(StreamDamagedError, match=r"\.index: it has \d+ messages"):
        blocks(stream)


def test_a_damaged_index_is_named(stream: FileStream, tmp_path: Path) -> None:
    file = index_files(tmp_path)[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(StreamDamagedError, match=r"the index of part part-000-.* is damaged, remove it"):
        blocks(stream)


def test_messages_without_event_ids_are_refused(stream: FileStream) -> None:
    messages = notes(0, 3)
    nulls = pa.nulls(3, pa.binary(16))
    with pytest.raises(ValueError, match="3 of 3 messages have no event id"):
        stream.open_part("c", "part", 1).add(type(messages)(messages.keys, messages.values, nulls))
