"""Tests of segment files: descriptors, sync markers, sections of all codecs, and all kinds of damage."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

from ringsync.formats.commitlog import segment as segments
from ringsync.formats.commitlog.reader import SegmentChanges, read_log
from ringsync.formats.commitlog.segment import SegmentError, Wanted, read_descriptor, read_segment
from tests.commitlog_model.write import UpdateWriter, descriptor, mutation, record, segment
from tests.formats.commitlog.comparable import of_package
from tests.formats.commitlog.sources import expected, sources, tables_of
from tests.formats.commitlog.synthetic import package_tables, tables

TABLES = package_tables()
ID = (7 << 32) + 12345
NAME = f"CommitLog-7-{ID}.log"
KEY, IV = bytes(range(16)), bytes(range(50, 66))
ENCRYPTED = {"encCipher": "AES/CBC/PKCS5Padding", "encKeyAlias": "test:1", "encIV": IV.hex()}


def insert(number: int) -> bytes:
    """Make a record that inserts a row with the number as its timestamp."""
    row = {"kind": "row", "raw_clustering": [], "liveness": {"timestamp": number}}
    return record(mutation([UpdateWriter(tables()["flat"], _Never()).write(b"%d" % number, [row])]))


class _Never:
    """Instead of a random number: every record of a kind has the same bytes but for its values."""

    choice = staticmethod(lambda options: options[0])
    random = staticmethod(lambda: 1.0)


SECTIONS = [b"".join(insert(10 * i + k) for k in range(3)) for i in range(3)]


def lz4(data: bytes) -> bytes:
    return struct.pack("<i", len(data)) + pa.Codec("lz4_raw").compress(data, asbytes=True)


def encrypted(data: bytes) -> bytes:
    """In blocks of 40 bytes, so that records lie across their borders."""
    out = struct.pack(">i", len(data))
    for at in range(0, len(data), 40):
        raw = data[at : at + 40]
        plain = struct.pack(">i", len(raw)) + lz4(raw)
        padder, encryptor = PKCS7(128).padder(), Cipher(algorithms.AES(KEY), modes.CBC(IV)).encryptor()
        block = encryptor.update(padder.update(plain) + padder.finalize()) + encryptor.finalize()
        out += struct.pack(">ii", len(block), len(plain)) + block
    return out


def compressed(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: struct.pack(">i", len(data)) + compress(data)


PACKS: dict[str, tuple[dict[str, Any], Callable[[bytes], bytes]]] = {
    "plain": ({}, bytes),
    "lz4": ({"compressionClass": "LZ4Compressor"}, compressed(lz4)),
    "snappy": (
        {"compressionClass": "org.apache.cassandra.io.compress.SnappyCompressor", "compressionParameters": None},
        compressed(lambda data: bytes(pa.Codec("snappy").compress(data, asbytes=True))),
    ),
    "zstd": (
        {"compressionClass": "ZstdCompressor", "compressionParameters": {"compression_level": "3"}},
        compressed(lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True))),
    ),
    "deflate": (
        {"compressionClass": "DeflateCompressor"},
        compressed(lambda data: zlib.compress(data) if data else b""),
    ),
    "noop": ({"compressionClass": "NoopCompressor"}, compressed(bytes)),
    "encrypted": (ENCRYPTED | {"compressionClass": "SnappyCompressor"}, encrypted),
}


def made(codec: str = "plain", sections: list[bytes] = SECTIONS, version: int = 7, zeros: int = 64) -> bytes:
    parameters, pack = PACKS[codec]
    return segment(version, ID, sections, parameters, pack, zeros)


def read(data: bytes, **wanted: Any) -> SegmentChanges:
    return read_log(data, NAME, TABLES, Wanted(**wanted), key_of=lambda alias: {"test:1": KEY}[alias])


def timestamps(found: SegmentChanges) -> list[int]:
    return [row["liveness"]["timestamp"] for row in of_package(found.batches, TABLES)]


ALL = [0, 1, 2, 10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize("codec", PACKS)
@pytest.mark.parametrize("version", [6, 7, 8])
def test_every_version_and_codec(codec: str, version: int) -> None:
    data = made(codec, [*SECTIONS, b""], version)
    found = read(data)
    assert timestamps(found) == ALL
    assert found.damages == []
    assert found.descriptor.version == version
    assert found.descriptor.segment_id == ID
    assert found.end == found.descriptor.size + 4 * 8 + sum(map(len, SECTIONS))


def test_a_segment_of_cassandra_3() -> None:
    """No fixture is of version 6: one of version 7 with another descriptor; the bytes of mutations are the same."""
    source = sources("4.0-plain")[-1]
    size = read_descriptor(source.data, source.name).size
    number = int(source.name.split("-")[2].removesuffix(".log"))
    old = descriptor(6, number) + source.data[size:]
    assert len(old) == len(source.data)
    found = read_log(old, "CommitLog-6-1.log", tables_of("4.0-plain"))
    assert found.descriptor.version == 6
    assert of_package(found.batches, tables_of("4.0-plain")) == expected(source)
    assert found.damages == []


def test_what_is_in_a_descriptor() -> None:
    about = read_descriptor(made("snappy"), NAME)
    assert about.codec == "SnappyCompressor"
    assert read_descriptor(made("encrypted"), NAME).codec == "encrypted"
    assert read_descriptor(made(), NAME).codec == "plain"
    slashed = descriptor(7, ID, b'{"encCipher":"AES\\/CBC\\/PKCS5Padding"}')
    assert read_descriptor(slashed, NAME).parameters == {"encCipher": "AES/CBC/PKCS5Padding"}


def broken_descriptor(at: int) -> bytes:
    data = bytearray(made("lz4"))
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few for a commit log segment: it was cut off, or is being created"),
        (b"\0" * 13, "13 bytes are too few"),
        (bytes(1000), "commit log version 0 is unknown; known are 6, 7, 8"),
        (b"PAR1" + bytes(1000), "so this is not a commit log segment, or its first bytes are damaged"),
        (descriptor(9, ID), "commit log version 9 is unknown"),
        (made("lz4")[:30], r"the file ends at byte 30 within its descriptor of 55 bytes"),
        (broken_descriptor(8), r"the checksum of the descriptor \(bytes 0 to 55\) is wrong"),
        (broken_descriptor(20), "look for the same writes in the segments of another replica"),
        (broken_descriptor(53), "the checksum of the descriptor"),
        (descriptor(7, ID, b"{nothing"), "the descriptor's parameters are not JSON"),
        (
            descriptor(7, ID, {"compressionClass": "com.example.BrotliCompressor"}),
            r"the compressor com\.example\.BrotliCompressor is unknown; known are LZ4Compressor, ",
        ),
        (
            descriptor(7, ID, ENCRYPTED | {"encCipher": "Blowfish"}),
            "encrypted by Blowfish, which is not known; known is AES",
        ),
        (descriptor(7, ID, ENCRYPTED | {"encIV": "00"}), "Invalid IV size"),
    ],
)
def test_files_that_cannot_be_read_at_all(data: bytes, message: str) -> None:
    with pytest.raises(SegmentError, match=message) as raised:
        read(data)
    assert str(raised.value).startswith(f"{NAME}: ")


def test_an_encrypted_segment_needs_its_key() -> None:
    with pytest.raises(SegmentError, match="encrypted by the key test:1, and no keystore or key was given"):
        read_log(made("encrypted"), NAME, TABLES)
    found = read_log(made("encrypted"), NAME, TABLES, key_of=lambda _alias: bytes(16))
    assert timestamps(found) == []
    assert len(found.damages) == 3
    assert "damaged, or the key given for test:1 is not the one that encrypted them" in found.damages[0].reason
    assert KEY.hex() not in found.damages[0].reason


@pytest.mark.parametrize("codec", PACKS)
def test_a_file_cut_anywhere(codec: str) -> None:
    """What is there is read, and what is missing is told, given what the index said of the whole file."""
    data = made(codec, zeros=0)
    whole = read(data)
    for size in range(read_descriptor(data, NAME).size, len(data), 1 if codec == "plain" else 3):
        found = read(data[:size], completed_at=whole.end)
        rows = timestamps(found)
        assert rows == ALL[: len(rows)]
        if codec == "plain":
            assert len(rows) == sum(end <= size for end in _record_ends(data))
        last = max(damage.position + damage.length for damage in found.damages)
        assert last >= whole.end, size
        found = read(data[:size], until=whole.end)
        assert timestamps(found) == rows
        assert max(damage.position + damage.length for damage in found.damages) == whole.end
        # The index had another offset when less was synced.
        found = read(data[:size], until=found.descriptor.size + 8 + len(SECTIONS[0]))
        assert (timestamps(found) == ALL[:3]) == (found.damages == [])


def _record_ends(data: bytes) -> list[int]:
    ends, at = [], 20
    for section in SECTIONS:
        at += 8
        ends += [at + len(section) * (k + 1) // 3 for k in range(3)]
        at += len(section)
    return ends


@pytest.mark.parametrize("codec", PACKS)
def test_a_byte_flipped_anywhere(codec: str) -> None:
    """It costs what is told and nothing else; in a plain segment one record, but for sizes and markers."""
    data = made(codec, zeros=16)
    whole = read(data)
    for at in range(read_descriptor(data, NAME).size, len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x41
        found = read(bytes(changed), completed_at=whole.end)
        rows = timestamps(found)
        assert set(rows) <= set(ALL), at
        assert len(set(rows)) == len(rows)
        assert len(rows) == len(ALL) or found.damages, at
        if codec == "plain":
            lost = [end for end, number in zip(_record_ends(data), ALL, strict=True) if number not in rows]
            spans = [(one.position - one.length - 12, one.position + one.length) for one in found.damages]
            assert all(any(first < end <= last for first, last in spans) for end in lost)


def marker_at(data: bytes, number: int) -> int:
    at = read_descriptor(data, NAME).size
    for _ in range(number):
        at = int.from_bytes(data[at : at + 4], "big")
    return at


def with_marker(data: bytes, number: int, end: int) -> bytes:
    """Another end in a sync marker, with the right checksum."""
    at = marker_at(data, number)
    crc = zlib.crc32(struct.pack(">III", ID & 0xFFFFFFFF, ID >> 32, at))
    return data[:at] + struct.pack(">iI", end, crc) + data[at + 8 :]


def test_damaged_sync_markers() -> None:
    data = made()
    at = marker_at(data, 1)
    wrong = data[: at + 4] + b"\xff" + data[at + 5 :]
    found = read(wrong)
    assert timestamps(found) == ALL[:3]
    (damage,) = found.damages
    assert (damage.position, damage.length) == (at, len(data) - at)
    assert damage.reason == (
        f"the sync marker at byte {at} of the file has a wrong checksum; nothing behind it can be read"
    )
    for end in (0, at, at + 7, -1):
        (damage,) = read(with_marker(data, 1, end)).damages
        assert f"points back to byte {end}" in damage.reason
        assert damage.position == at + 8
    found = read(with_marker(data, 2, len(data) + 5))
    assert "the file was cut off: it has " in found.damages[-1].reason
    assert found.damages[-1].length == 5
    assert timestamps(found) == ALL
    zeroed = data[:at] + bytes(8) + data[at + 8 :]
    (damage,) = read(zeroed).damages
    assert damage.position == at
    assert damage.reason.startswith("zeros, and then bytes that belong to no section, at byte ")


def test_what_a_node_had_not_synced_when_it_crashed_is_no_damage() -> None:
    """Each crash of a node left an entry in ``processor_error``, and an alarm, until somebody discarded it."""
    data = made()
    at = marker_at(data, 2)
    crashed = data[:at] + bytes(8) + data[at + 8 :]
    found = read(crashed, completed_at=len(crashed))
    assert (found.damages, timestamps(found)) == ([], ALL[:6])
    assert f"no sync marker is behind position {at}" in found.unsure
    assert read(crashed).damages
    assert read(crashed, completed_at=len(crashed) - 1).damages
    # An intact marker behind it tells that this one was there once.
    at = marker_at(data, 1)
    zeroed = data[:at] + bytes(8) + data[at + 8 :]
    found = read(zeroed, completed_at=len(zeroed))
    (damage,) = found.damages
    assert (damage.position, found.unsure) == (at, "")


@pytest.mark.parametrize("behind", [b"", b"never synced"])
def test_what_an_earlier_index_said_of_a_crashed_segment_must_be_there(behind: bytes) -> None:
    """The last section has no marker behind it: without its own, it looked as if it had never been synced."""
    data = made()
    first, at, end = marker_at(data, 1), marker_at(data, 2), marker_at(data, 3)
    crashed = (data[:at] + bytes(8) + behind).ljust(len(data), b"\0")
    for reached in (0, first, at):
        found = read(crashed, completed_at=len(crashed), reached=reached)
        assert (found.damages, found.unsure != "", timestamps(found)) == ([], True, ALL[:6])
    for wanted in ({"reached": at + 1}, {"reached": end}, {"after": end}):
        found = read(crashed, completed_at=len(crashed), **wanted)
        (damage,) = found.damages
        assert (damage.position, damage.position + damage.length >= end, found.unsure) == (at, True, "")
        assert f"by an earlier index the segment reaches {max(wanted.values())}" in damage.reason
    assert read(data, completed_at=len(data), reached=end).damages == []


def test_an_index_that_no_crash_has_changed_leaves_nothing_unsure() -> None:
    data = made()
    assert read(data, completed_at=marker_at(data, 3), reached=1).unsure == ""
    assert read(data, until=marker_at(data, 2)).unsure == ""
    full = made(zeros=7)
    assert read(full, completed_at=len(full)).unsure == ""


def test_a_marker_is_found_wherever_it_is_and_takes_no_memory() -> None:
    """It took 25 bytes for each byte of the segment, and a quarter of a minute."""
    data = bytearray(made(zeros=0))
    size, end = 4 * 2**20 + 5, len(data)
    noise = np.random.default_rng(1).integers(0, 256, size - end, np.uint8)
    noise[::4], noise[1::4], noise[:8] = 0, 1, 0  # many places look like the end that a marker names
    data += noise.tobytes()

    def found(place: int | None) -> SegmentChanges:
        changed = bytearray(data)
        if place is not None:
            crc = zlib.crc32(struct.pack(">III", ID & 0xFFFFFFFF, ID >> 32, place))
            changed[place : place + 8] = struct.pack(">iI", size, crc)
        return read(bytes(changed), completed_at=size)

    for place in (end + 8, 65535, 65536, 65537, 131071 - 7, 3 * 65536 - 1, 3 * 65536 - 8, 2**21 + 2, size - 8):
        (damage,) = found(place).damages
        assert damage.position == end, place
    assert found(None).damages == []
    view = memoryview(bytes(data))
    tracemalloc.start()
    assert not segments._has_marker(view, end + 1, read_descriptor(view, NAME))
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("length", [1, 3, 7])
def test_bytes_behind_the_end_that_are_no_marker(length: int) -> None:
    assert read(made(zeros=length)).damages == []
    (damage,) = read(made(zeros=0) + b"\1" * length).damages
    assert damage.length == length


@pytest.mark.parametrize("codec", [codec for codec in PACKS if codec != "plain"])
def test_a_section_that_cannot_be_unpacked(codec: str) -> None:
    data = bytearray(made(codec))
    start, end = marker_at(data, 1) + 8, marker_at(data, 2)
    data[start + 4 : end] = bytes(end - start - 4)
    found = read(bytes(data))
    if codec != "noop":
        (damage,) = found.damages
        assert (damage.position, damage.length) == (found.descriptor.size + 16 + len(SECTIONS[0]), len(SECTIONS[1]))
        assert damage.reason.startswith(f"the section in bytes {start} to {end} of the file cannot be unpacked: ")
    assert timestamps(found) == ALL[:3] + ALL[6:]
    # Its length may be wrong, and with it every position behind: so those are read again.
    behind = read(bytes(data), after=found.end)
    assert timestamps(behind) == (ALL[6:] if codec != "noop" else [])
    # Nobody can tell what of the rest was synced.
    live = read(bytes(data), until=found.end)
    assert timestamps(live) == ALL[:3] + (ALL[6:] if codec == "noop" else [])
    assert live.damages[-1].position + live.damages[-1].length >= (0 if codec == "noop" else found.end)
    assert live.end == found.end


@pytest.mark.parametrize("codec", [codec for codec in PACKS if codec not in ("plain", "noop")])
@pytest.mark.parametrize("length", [-1, 0, 1, 10**6, 0x7FFFFFFF])
def test_a_section_with_a_wrong_length(codec: str, length: int) -> None:
    data = bytearray(made(codec))
    start = marker_at(data, 1) + 8
    data[start : start + 4] = struct.pack(">i", length)
    found = read(bytes(data))
    assert timestamps(found) == ALL[:3] + ALL[6:]
    assert len(found.damages) == 1
    for after in (0, found.end, found.end + 10**9):
        assert set(timestamps(read(bytes(data), after=after))) >= set(ALL[6:])


def test_an_lz4_block_that_is_shorter_than_it_says() -> None:
    """Arrow would leave the memory behind it as it was: with records of another segment."""
    section = SECTIONS[0]
    short = struct.pack("<i", len(section)) + pa.Codec("lz4_raw").compress(section[:-20], asbytes=True)
    data = segment(7, ID, [section], PACKS["lz4"][0], lambda _: struct.pack(">i", len(section)) + short)
    found = read(data)
    assert timestamps(found) == []
    assert f"{len(short)} bytes do not decompress to {len(section)}" in found.damages[0].reason


def test_zeros_inside_of_a_section() -> None:
    """A block that the file system has lost, from one record to the end of the section: nothing else would tell."""
    data = bytearray(made(zeros=64))
    start = marker_at(data, 1) + 8
    ends = [end for end in _record_ends(bytes(data)) if end > start]
    data[ends[0] : ends[2]] = bytes(ends[2] - ends[0])
    found = read(bytes(data))
    assert timestamps(found) == [0, 1, 2, 10, 20, 21, 22]
    (damage,) = found.damages
    assert (damage.position, damage.length) == (ends[0], ends[2] - ends[0])


def test_a_damaged_section_is_told_again_to_who_goes_on_behind_it() -> None:
    data = bytearray(made())
    ends = _record_ends(bytes(data))
    data[ends[3]] ^= 0x80
    (damage,) = read(bytes(data)).damages
    assert (damage.position, damage.length) == (ends[3], ends[5] - ends[3])
    for after in (0, ends[3], ends[4]):
        assert read(bytes(data), after=after).damages == [damage]
    assert read(bytes(data), after=ends[5]).damages == []


def test_sections_know_their_logical_positions() -> None:
    for codec in PACKS:
        found = read_segment(made(codec), NAME, key_of=lambda _alias: KEY)
        size = found.descriptor.size
        positions = [size + 8 * (i + 1) + sum(map(len, SECTIONS[:i])) for i in range(3)]
        assert [section.position for section in found.sections] == positions
        assert found.certain >= found.sections[-1].end
        assert bytes(found.buffer[found.sections[1].start : found.sections[1].end]) == SECTIONS[1]
