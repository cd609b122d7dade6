"""Statistics.db of real servers, and damaged ones."""

from __future__ import annotations

import struct
import zlib
from random import Random

import pytest

from ringsync.cql.types import Native
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.source import LocalSource
from ringsync.formats.sstable.statistics import Header, parse_statistics, read_statistics
from ringsync.formats.sstable.versions import VERSIONS
from tests.formats.sstable.files import every_source, sources, sources_of
from tests.sstables.fixtures import FIXTURES, TAGS

OA = VERSIONS["big", "oa"]


def content_of(source: LocalSource) -> bytes:
    found = source.read("Statistics.db")
    assert found is not None
    return found


@pytest.mark.parametrize("name", FIXTURES)
def test_times_are_those_that_were_written(name: str) -> None:
    """`files.narrow` has one cell in each partition, with a timestamp of its own."""
    for tag in TAGS:
        found = [read_statistics(source) for source in sources_of(name, "files.narrow", tag)]
        assert len(found) == 1 if tag == "compacted" else len(found) >= 3
        selected = FIXTURES[name].selected["keyspaces"]["files"]["narrow"]
        times = [row["v"]["writetime"] for row in selected]
        assert min(times) == min(one.min_timestamp for one in found)
        for one in found:
            assert one.min_timestamp in times
            assert one.key == (Native("text"),)
            assert [column.name for column in one.regular] == [b"v"]


def test_a_ttl_beyond_2038_overflows_and_is_read() -> None:
    """20 years from now; only servers in mode NONE take such a TTL."""
    for name in ("5.0-oa", "5.0-da"):
        for source in sources_of(name, "shop.expiring", "flushed"):
            assert 0 <= read_statistics(source).min_local_deletion_time < 2**32


def test_rows_that_a_server_replayed_from_its_log_have_an_overflowed_base() -> None:
    """The header's least deletion time is that of 2046, though another cell expires in a year."""
    for name in ("5.0-oa", "5.0-da"):
        (source,) = sources_of(name, "files.replayed", "flushed")
        assert read_statistics(source).min_local_deletion_time > 2**31


@pytest.mark.parametrize("name", ["4.0-nb", "5.0-oa", "5.0-da"])
def test_any_changed_byte_is_noticed(name: str) -> None:
    source = sources_of(name, "shop.nested", "compacted")[0]
    content, version = content_of(source), source.descriptor.features
    whole = parse_statistics(content, version, "file")
    random = Random(1)
    problems = set()
    for _ in range(3000):
        changed = bytearray(content)
        changed[random.randrange(len(content))] ^= 1 << random.randrange(8)
        try:
            found = parse_statistics(bytes(changed), version, "file")
        except SSTableError as error:
            problems.add(error.problem.partition(" of bytes")[0])
            continue
        # Damage in other parts than HEADER does no harm.
        assert found == whole
    assert "the checksum" in problems


def test_cut_off_files_are_refused() -> None:
    content = content_of(sources_of("5.0-oa", "shop.nested", "compacted")[0])
    for length in range(0, len(content) - 1, 7):
        with pytest.raises(SSTableError, match="file"):
            parse_statistics(content[:length], OA, "file")


def without_checksums(content: bytes) -> bytes:
    """The same file without checksums, as Cassandra 3.11 writes it (me). STATS, which nobody reads, stays as it is."""
    (number,) = struct.unpack_from(">i", content)
    entries = [struct.unpack_from(">ii", content, 8 + 8 * i) for i in range(number)]
    ends = [offset for _, offset in entries[1:]] + [len(content)]
    parts = []
    for (_, offset), end in zip(entries, ends, strict=True):
        parts.append(content[offset : end - 4])
    made, place = struct.pack(">i", number), 4 + 8 * number
    for (kind, _), part in zip(entries, parts, strict=True):
        made += struct.pack(">ii", kind, place)
        place += len(part)
    return made + b"".join(parts)


def test_files_of_cassandra_3_have_no_checksums() -> None:
    me = VERSIONS["big", "me"]
    for source in sources("4.0-nb"):
        expected = read_statistics(source)
        found = parse_statistics(without_checksums(content_of(source)), me, "file")
        assert found == expected


def test_no_bytes_make_it_fail_otherwise() -> None:
    content = without_checksums(content_of(sources_of("4.0-nb", "shop.nested", "compacted")[0]))
    me, random = VERSIONS["big", "me"], Random(2)
    for _ in range(5000):
        changed = bytearray(content[: random.choice((len(content), random.randrange(len(content))))])
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(len(changed))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        try:
            found = parse_statistics(bytes(changed), me, "file")
        except SSTableError:
            continue
        assert isinstance(found, Header)


def with_header(content: bytes, header: bytes) -> bytes:
    """The file with another HEADER, which is its last part."""
    (number,) = struct.unpack_from(">i", content)
    kind, offset = struct.unpack_from(">ii", content, 8 + 8 * (number - 1))
    assert kind == 3
    return content[:offset] + header + struct.pack(">I", zlib.crc32(header))


def test_stray_zeros_behind_an_overflowed_header_are_read_over() -> None:
    """5.0.9 leaves four: the least deletion time -1 (2^32 - 1) has more bytes than were counted."""
    source = sources_of("5.0-oa", "shop.plain", "compacted")[0]
    content = content_of(source)
    expected = read_statistics(source)
    text = b"\x2eorg.apache.cassandra.db.marshal.Int32Type"[1:]
    names = bytes([len(text)]) + text
    # timestamp 0, deletion time -5 as nine bytes, TTL 0, key, no clustering, no columns
    header = b"\0" + b"\xff" + struct.pack(">q", -5 - 1442880000) + b"\0" + names + b"\0\0\0"
    for stray in range(5):
        found = parse_statistics(with_header(content, header + bytes(stray)), OA, "file")
        assert found.min_local_deletion_time == 2**32 - 5
        assert found.key == expected.key
    for stray_bytes in (bytes(5), b"\1"):
        with pytest.raises(SSTableError, match="left over behind the columns"):
            parse_statistics(with_header(content, header + stray_bytes), OA, "file")


def test_another_partitioner_is_refused() -> None:
    content = content_of(sources_of("5.0-oa", "shop.plain", "compacted")[0])
    start = content.index(b"org.apache.cassandra.dht.Murmur3Partitioner") - 2
    changed = content.replace(b"dht.Murmur3Partitioner", b"dht.RandomPartitionerX")
    part = changed[start : start + 2 + 43 + 8]
    changed = changed[: start + len(part)] + struct.pack(">I", zlib.crc32(part)) + changed[start + len(part) + 4 :]
    with pytest.raises(SSTableError, match=r"dht\.RandomPartitionerX; only tables of the Murmur3Partitioner"):
        parse_statistics(changed, OA, "file")


def test_every_header_of_every_server_is_read() -> None:
    assert sum(1 for source in every_source() if read_statistics(source).key) > 500
