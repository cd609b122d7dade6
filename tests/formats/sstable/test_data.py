"""Data.db of real servers: every byte, whatever is damaged, and how fast."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from ringsync.formats.sstable import compression
from ringsync.formats.sstable.compression import read_chunks
from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.source import LocalSource, Source
from tests.formats.sstable.files import Changed, every_source, places_of, sources, sources_of
from tests.sstable_model.data import data_of
from tests.sstables.fixtures import FIXTURES, TAGS
from tests.sstables.statements import COMPRESSION

COMPRESSORS = {
    "lz4": "LZ4Compressor",
    "lz4_small": "LZ4Compressor",
    "ratio": "LZ4Compressor",
    "snappy": "SnappyCompressor",
    "zstd": "ZstdCompressor",
    "deflate": "DeflateCompressor",
    "noop": "NoopCompressor",
    "plain": "",
}


def whole(file: DataFile) -> bytes:
    """All bytes, in one piece."""
    buffer = np.zeros(file.length + 3, np.uint8)
    assert file.read_into(buffer, 2, 0, file.length) is None
    assert buffer[0] == buffer[1] == buffer[-1] == 0
    return buffer[2:-1].tobytes()


def in_pieces(file: DataFile, size: Callable[[], int]) -> tuple[bytes, list[Loss]]:
    """All bytes in pieces from front to back, and what is lost, which is zeros."""
    buffer, position, losses = np.zeros(file.length, np.uint8), 0, []
    while position < file.length:
        wanted = min(size(), file.length - position)
        loss = file.read_into(buffer, position, position, wanted)
        if loss is None:
            position += wanted
            continue
        assert position <= loss.position + loss.length <= file.length
        buffer[max(position, loss.position) : loss.position + loss.length] = 0
        losses.append(loss)
        position = loss.position + loss.length
    return buffer.tobytes(), losses


@pytest.mark.parametrize("name", FIXTURES)
def test_every_byte_is_read(name: str) -> None:
    random = Random(3)
    for source in sources(name):
        expected = data_of(source.read)
        file = DataFile(source)
        assert file.length == len(expected)
        assert whole(file) == expected
        if len(expected) > 20_000:
            for read_bytes in (1, 5000, 1 << 20):
                pieces = in_pieces(DataFile(source, read_bytes), lambda: random.randrange(1, 30_000))
                assert pieces == (expected, [])


def test_any_range_can_be_read() -> None:
    random = Random(4)
    for table in COMPRESSION:
        (source,) = sources_of("5.0-oa", f"files.{table}", "compacted")
        file, expected = DataFile(source), data_of(source.read)
        for _ in range(200):
            start = random.randrange(len(expected))
            size = random.randrange(min(40_000, len(expected) - start) + 1)
            buffer = np.zeros(size, np.uint8)
            assert file.read_into(buffer, 0, start, size) is None
            assert buffer.tobytes() == expected[start : start + size]


@pytest.mark.parametrize("name", FIXTURES)
def test_each_compressor_is_there(name: str) -> None:
    """Flushed files have LZ4 where the compressor is slow, since 4.0; compaction writes the table's own."""
    for table, compressor in COMPRESSORS.items():
        (compacted,) = sources_of(name, f"files.{table}", "compacted")
        assert read_chunks(compacted).compressor == compressor
        fast = "LZ4Compressor" if compressor in ("ZstdCompressor", "DeflateCompressor") else compressor
        assert {read_chunks(one).compressor for one in sources_of(name, f"files.{table}", "flushed")} == {fast}
    chunks = read_chunks(sources_of(name, "files.ratio", "compacted")[0])
    stored = places_of(chunks).stored
    assert (stored > chunks.longest_packed).any()
    assert (stored <= chunks.longest_packed).any()


def test_compacted_files_have_an_empty_chunk_at_the_end() -> None:
    for source in every_source():
        info = source.read("CompressionInfo.db")
        if info is not None and source.descriptor.folder.endswith("compacted"):
            chunks = read_chunks(source)
            assert struct.unpack_from(">i", info, len(info) - 8 * (chunks.count + 1) - 4) == (chunks.count + 1,)


def test_each_chunk_is_unpacked_once() -> None:
    (source,) = sources_of("5.0-oa", "files.lz4", "compacted")
    file = DataFile(source, 1000)
    unpack, count = file.chunks.unpack, 0

    def counted(block: memoryview, length: int) -> bytes:
        nonlocal count
        count += 1
        assert unpack is not None
        return unpack(block, length)

    object.__setattr__(file.chunks, "unpack", counted)
    random = Random(6)
    in_pieces(file, lambda: random.randrange(1, 9000))
    assert count == file.chunks.count


@pytest.mark.parametrize("table", COMPRESSION)
def test_a_damaged_chunk_is_lost_alone(table: str) -> None:
    random = Random(7)
    for tag in TAGS:
        source = max(sources_of("5.0-oa", f"files.{table}", tag), key=lambda one: one.size("Data.db") or 0)
        data, expected, chunks = source.read("Data.db"), data_of(source.read), read_chunks(source)
        places = places_of(chunks)
        assert data is not None
        for _ in range(40):
            number = random.randrange(chunks.count)
            changed = bytearray(data)
            place = int(places.starts[number]) + random.randrange(int(places.stored[number]))
            changed[place] ^= 1 << random.randrange(8)
            file = DataFile(Changed(source, {"Data.db": bytes(changed)}), random.choice((3000, 1 << 20)))
            content, losses = in_pieces(file, lambda: random.randrange(1, 50_000))
            start = number * chunks.chunk_length
            size = min(chunks.chunk_length, len(expected) - start)
            assert [(loss.position, loss.length) for loss in losses] == [(start, size)]
            at = (
                f"chunk {number:,} at byte {int(places.starts[number]):,} of the file is damaged: its checksum is wrong"
            )
            assert losses[0].reason == at
            assert losses[0].file.endswith("-Data.db")
            assert content == expected[:start] + bytes(size) + expected[start + size :]


@pytest.mark.parametrize("table", COMPRESSION)
def test_a_file_that_was_cut_off_is_read_to_its_end(table: str) -> None:
    random = Random(8)
    (source,) = sources_of("5.0-oa", f"files.{table}", "compacted")
    data, expected, chunks = source.read("Data.db"), data_of(source.read), read_chunks(source)
    places = places_of(chunks)
    assert data is not None
    for _ in range(30):
        size = random.randrange(len(data) - 20)
        file = DataFile(Changed(source, {"Data.db": data[:size]}), 3000)
        content, losses = in_pieces(file, lambda: random.randrange(1, 50_000))
        assert len(losses) == 1
        there = int((places.starts + places.stored + (4 if table != "plain" else 0) <= size).sum())
        assert losses[0].position == there * chunks.chunk_length
        assert losses[0].position + losses[0].length == file.length
        assert losses[0].reason.startswith(f"the file was cut off: it has {size:,} bytes") or (
            table == "plain" and there + 1 == chunks.count
        )
        assert content[: losses[0].position] == expected[: losses[0].position]


def test_a_block_that_does_not_fit_is_lost_though_its_checksum_is_right() -> None:
    random = Random(9)
    for table in COMPRESSION:
        (source,) = sources_of("5.0-oa", f"files.{table}", "compacted")
        data, chunks = source.read("Data.db"), read_chunks(source)
        places = places_of(chunks)
        assert data is not None
        if chunks.unpack is None:
            continue
        for _ in range(200):
            number = random.randrange(chunks.count)
            start, size = int(places.starts[number]), int(places.stored[number])
            block = bytearray(data[start : start + size])
            for _ in range(random.randrange(1, 4)):
                block[random.randrange(size)] = random.randrange(256)
            changed = data[:start] + block + struct.pack(">I", zlib.crc32(block)) + data[start + size + 4 :]
            content, losses = in_pieces(DataFile(Changed(source, {"Data.db": changed})), lambda: 1 << 20)
            assert len(content) == chunks.length
            assert [loss.position for loss in losses] in ([], [number * chunks.chunk_length])


@pytest.mark.parametrize("component", ["CompressionInfo.db", "CRC.db"])
def test_no_bytes_make_it_fail_otherwise(component: str) -> None:
    random = Random(10)
    for table in ("lz4_small", "snappy", "ratio", "noop") if component == "CompressionInfo.db" else ("plain",):
        (source,) = sources_of("5.0-da", f"files.{table}", "compacted")
        content = source.read(component)
        assert content is not None
        outcomes = set()
        for _ in range(1500):
            changed = bytearray(content[: random.choice((len(content), random.randrange(len(content))))])
            for _ in range(random.randrange(3)):
                if changed:
                    changed[random.randrange(len(changed))] = random.choice((0, 1, 0x7F, 0x80, random.randrange(256)))
            try:
                file = DataFile(Changed(source, {component: bytes(changed)}))
            except SSTableError:
                outcomes.add("refused")
                continue
            if file.length > 1 << 24:
                outcomes.add("long")
                continue
            losses = in_pieces(file, lambda: 20_000)[1]
            outcomes.add("lost" if losses else "whole")
        assert outcomes >= {"refused", "lost", "whole"}


def test_one_wrong_place_loses_two_chunks() -> None:
    (source,) = sources_of("5.0-oa", "files.lz4_small", "compacted")
    content, chunks, expected = source.read("CompressionInfo.db"), read_chunks(source), data_of(source.read)
    assert content is not None
    place = len(content) - 8 * (chunks.count + 1 - 5)
    changed = content[:place] + struct.pack(">q", 1 << 40) + content[place + 8 :]
    read, losses = in_pieces(DataFile(Changed(source, {"CompressionInfo.db": changed})), lambda: 9000)
    assert [loss.position // 4096 for loss in losses] == [4, 5]
    assert read == expected[: 4 * 4096] + bytes(2 * 4096) + expected[6 * 4096 :]


def test_files_that_are_missing_are_named() -> None:
    (source,) = sources_of("5.0-oa", "files.plain", "compacted")
    with pytest.raises(SSTableError, match=r"CompressionInfo\.db: there is no such file, nor a CRC\.db beside it"):
        DataFile(Changed(source, {"CRC.db": None}))
    with pytest.raises(SSTableError, match=r"Data\.db: there is no such file"):
        DataFile(Changed(source, {"Data.db": None}))


def test_an_unknown_compressor_is_named() -> None:
    (source,) = sources_of("5.0-oa", "files.snappy", "compacted")
    content = source.read("CompressionInfo.db")
    assert content is not None
    changed = content.replace(b"SnappyCompressor", b"BrotliCompressor")
    with pytest.raises(SSTableError, match=r"the compressor BrotliCompressor is unknown; .*upgradesstables"):
        DataFile(Changed(source, {"CompressionInfo.db": changed}))


def test_bytes_beyond_the_end_are_refused() -> None:
    file = DataFile(sources_of("5.0-oa", "files.snappy", "compacted")[0])
    buffer = np.zeros(100, np.uint8)
    for at, position, size in [(0, file.length - 5, 6), (96, 0, 5), (0, -1, 5), (-1, 0, 5)]:
        with pytest.raises(ValueError, match="do not fit"):
            file.read_into(buffer, at, position, size)


def test_files_of_cassandra_3_name_no_longest_block() -> None:
    (source,) = sources_of("4.0-nb", "files.snappy", "compacted")
    content = source.read("CompressionInfo.db")
    assert content is not None
    place = 2 + len("SnappyCompressor") + 4 + 4

    class Old(Changed):
        @property
        def descriptor(self) -> Descriptor:
            return replace(self.source.descriptor, version="me")

    old = read_chunks(Old(source, {"CompressionInfo.db": content[:place] + content[place + 4 :]}))
    new = read_chunks(source)
    assert (old.chunk_length, old.length, old.longest_packed) == (new.chunk_length, new.length, 2**31 - 2)
    assert (places_of(old).starts == places_of(new).starts).all()


class Counted(Changed):
    """A source that notes what is read of each file."""

    read_bytes: Counter[str]

    def read(self, component: str) -> bytes | None:
        raise AssertionError(f"{component} is read as a whole")

    def size(self, component: str) -> int | None:
        return super().size(component) if component in self.files else self.source.size(component)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        content = self.source.read_range(component, start, length)
        self.read_bytes[component] += len(content)
        return content


@pytest.mark.parametrize(("table", "component"), [("lz4_small", "CompressionInfo.db"), ("plain", "CRC.db")])
def test_only_the_places_of_chunks_that_are_read_are_read(
    table: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an SSTable of 100 GB they are 50 MB, for each task and SSTable."""
    monkeypatch.setattr(compression, "CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(compression, "_HEAD_BYTES", 64)
    source = max(sources_of("5.0-oa", f"files.{table}", "compacted"), key=lambda one: one.size("Data.db") or 0)
    expected = data_of(source.read)
    counted = Counted(source, {})
    counted.__dict__["read_bytes"] = Counter[str]()
    file = DataFile(counted)
    assert file.chunks.count > 4
    buffer = np.zeros(100, np.uint8)
    middle = file.length // 2
    assert file.read_into(buffer, 0, middle, 100) is None
    assert buffer.tobytes() == expected[middle : middle + 100]
    assert 0 < counted.read_bytes[component] <= 64 + 2 * 3 * 8
    content, losses = in_pieces(file, lambda: 3000)
    assert (content, losses) == (expected, [])


def test_a_local_source_is_a_source() -> None:
    source: Source = LocalSource(Descriptor("nb", "1", "big"))
    assert source.size("Data.db") is None
