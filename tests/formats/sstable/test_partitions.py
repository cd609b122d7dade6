"""Partitions by token: those of real servers, against all keys of Data.db; and damaged indexes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.index import read_index
from ringsync.formats.sstable.partitions import Partitions, read_partitions
from ringsync.formats.sstable.source import LocalSource, Source
from ringsync.formats.sstable.tries import read_trie
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, TokenRange
from tests.commitlog_model import murmur3
from tests.formats.sstable.files import Changed, sources, sources_of
from tests.formats.sstable.trie_writer import TrieWriter
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstables.fixtures import FIXTURES

BIG, TRIE = "5.0-oa", "5.0-da"


def partitions_of(source: Source) -> Partitions:
    return read_partitions(source, DataFile(source))


@cache
def expected_of(source: LocalSource) -> list[tuple[int, int]]:
    """Token and position of each partition, by the model, which reads all of Data.db."""
    descriptor = source.descriptor
    table = table_beside(Path(descriptor.folder), descriptor.table_id)
    found = list(read_sstable(source.read, table, descriptor.version))
    return [(murmur3.token(partition.key), partition.position) for partition in found]


@pytest.mark.parametrize("name", FIXTURES)
def test_all_partitions_are_found(name: str) -> None:
    count = 0
    for source in sources(name):
        expected, found = expected_of(source), partitions_of(source)
        assert found.positions.tolist() == [position for _, position in expected]
        for (token, position), low, high in zip(expected, found.lowest.tolist(), found.highest.tolist(), strict=True):
            assert low <= token <= high
            assert found.token_at(position) == token
        assert name != BIG or (found.lowest == found.highest).all()
        count += len(found)
    assert count > 4000


def ranges(random: Random, known: list[int]) -> Iterator[TokenRange]:
    """Ranges that begin and end anywhere, many just at the tokens of partitions, some of them wrapping."""
    bounds = [*known, *(token - 1 for token in known), *(token + 1 for token in known), MIN_TOKEN, MAX_TOKEN]
    bounds += [random.randrange(MIN_TOKEN, MAX_TOKEN) for _ in range(10)]
    for _ in range(60):
        yield TokenRange(*(min(max(random.choice(bounds), MIN_TOKEN), MAX_TOKEN) for _ in range(2)))


@pytest.mark.parametrize("name", [BIG, TRIE])
def test_a_token_range_has_exactly_its_partitions(name: str) -> None:
    random = Random(1)
    for source in sources(name):
        expected, found = expected_of(source), partitions_of(source)
        for wanted in ranges(random, [token for token, _ in random.sample(expected, min(5, len(expected)))]):
            parts = found.positions_of(wanted)
            inside = {position for token, position in expected if token in wanted}
            assert inside == {p for _, p in expected if any(first <= p < end for first, end in parts)}
            ends = {position for _, position in expected} | {found.length}
            assert all(first < end and end in ends for first, end in parts)


@pytest.mark.parametrize("name", [BIG, TRIE])
def test_ranges_that_cover_the_ring_cover_the_file(name: str) -> None:
    for source in sources(name):
        found = partitions_of(source)
        parts = [part for one in TokenRange(17, 17).split(7) for part in found.positions_of(one)]
        assert sum(end - first for first, end in parts) == found.length
        assert sorted(parts) == sorted(set(parts))


def test_the_partition_behind_a_position() -> None:
    for name in (BIG, TRIE):
        (source,) = sources_of(name, "files.narrow", "compacted")
        found = partitions_of(source)
        positions = found.positions.tolist()
        assert found.behind(0) == 0
        assert found.behind(1) == positions[1]
        assert found.behind(positions[7]) == positions[7]
        assert found.behind(positions[-1] + 1) == found.length


def test_an_index_is_read_in_any_windows() -> None:
    """The last window begins with the longest entry that there could be."""
    for table in ("files.narrow", "files.plain", "workload.keyed"):
        (source,) = sources_of(BIG, table, "compacted")
        content = source.read("Index.db")
        assert content is not None
        whole = read_index(source)
        many = Changed(source, {"Index.db": content * 40})
        found = read_index(many, 70_000)
        assert len(content) * 40 > 70_000 or table != "files.narrow"
        assert (found[0] == np.tile(whole[0], 40)).all()
        assert (found[2] == np.tile(whole[2], 40)).all()


def test_a_partition_that_cannot_be_read_belongs_to_both_sides() -> None:
    """A trie knows only the first bits of a token; the others are in Data.db, which is damaged here."""
    (source,) = sources_of(TRIE, "files.plain", "compacted")
    data = bytearray(source.read("Data.db") or b"")
    expected, found = expected_of(source), partitions_of(source)
    unsure = next(i for i in range(len(expected)) if found.lowest[i] < expected[i][0] < found.highest[i])
    token, position = expected[unsure]
    end = expected[unsure + 1][1] if unsure + 1 < len(expected) else found.length
    data[position + 3] ^= 1
    damaged = partitions_of(Changed(source, {"Data.db": bytes(data)}))
    assert damaged.token_at(position) is None
    below, above = TokenRange(MIN_TOKEN, token - 1), TokenRange(token - 1, MAX_TOKEN)
    assert not any(first <= position < stop for first, stop in found.positions_of(below))
    assert damaged.positions_of(below)[-1][1] == end
    assert damaged.positions_of(above)[0][0] == position


def changed(random: Random, content: bytes) -> bytes:
    """Some bytes changed, often near the end, where a trie begins; sometimes cut off."""
    made = bytearray(content[: random.choice((len(content), len(content), random.randrange(1, len(content))))])
    for _ in range(random.randrange(1, 4)):
        near = len(made) - min(random.randrange(1, 30), len(made))
        place = random.choice((random.randrange(len(made)), near))
        made[place] = random.choice((0, 1, 0x40, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(made)


@pytest.mark.parametrize(("name", "component"), [("4.1-nb", "Index.db"), (TRIE, "Partitions.db"), (TRIE, "Rows.db")])
def test_no_bytes_make_it_fail_otherwise(name: str, component: str) -> None:
    random = Random(2)
    refused = 0
    for table in ("files.narrow", "files.plain", "workload.natives"):
        for source in sources_of(name, table, "flushed"):
            content, data = source.read(component), DataFile(source)
            if not content:
                continue
            for _ in range(1200):
                try:
                    found = read_partitions(Changed(source, {component: changed(random, content)}), data)
                except SSTableError:
                    refused += 1
                    continue
                assert found.positions[0] == 0
                assert (np.diff(found.positions) > 0).all()
    assert refused > 500


def test_every_type_of_node_is_read() -> None:
    """No server writes all of them for tables of some thousand partitions."""
    random, seen = Random(3), set()
    for count in (1, 2, 300, 20_000):
        writer = TrieWriter(random)
        tokens = {random.randrange(MIN_TOKEN, MAX_TOKEN) for _ in range(-(-count // 2))}
        near = list(tokens)[:50]
        while len(tokens) < count:  # neighbours have long prefixes in common
            tokens.add(random.choice(near) ^ random.randrange(1 << 12))
        known = sorted(tokens)
        keys = [b"\x40" + (token + 2**63).to_bytes(8, "big") + b"\x40" for token in known]
        prefixes = [key[: common(key, keys[i - 1 : i] + keys[i + 1 : i + 2]) + 1] for i, key in enumerate(keys)]
        prefixes = prefixes if count > 1 else [b""]
        positions = sorted(random.sample(range(1, 1 << random.choice((20, 39))), count - 1))
        values = [~position for position in [0, *positions]]
        hashes = [random.choice((None, random.randbytes(1))) for _ in keys]
        root = writer.write(list(zip(prefixes, hashes, values, strict=True)))
        footer = b"".join(number.to_bytes(8, "big") for number in (len(writer.data), count, root))
        (source,) = sources_of(TRIE, "files.narrow", "compacted")
        lowest, highest, found = read_trie(Changed(source, {"Partitions.db": bytes(writer.data) + footer}))
        assert found.tolist() == [0, *positions]
        for token, prefix, low, high in zip(known, prefixes, lowest.tolist(), highest.tolist(), strict=True):
            bits = prefix[1:9]
            assert (low + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\0")
            assert (high + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\xff")
            assert low <= token <= high
        seen |= writer.types.keys()
    assert seen == set(range(16))


def common(key: bytes, others: list[bytes]) -> int:
    """The bytes that a key has in common with the one of the others that is most like it."""
    return max((next(i for i, byte in enumerate(key) if byte != other[i]) for other in others), default=-1)


def test_a_trie_that_shares_nodes_ends() -> None:
    """Each node has the one before it as both of its children: 2^60 ways, and no end without a limit."""
    (source,) = sources_of(TRIE, "files.narrow", "compacted")
    nodes = bytearray([0x01, 0x00])
    previous = 0
    for _ in range(60):
        place = len(nodes)
        distance = place - previous
        nodes += bytes([0x50, 2, 0x40, 0x41, distance, distance])
        previous = place
    place = len(nodes)
    nodes += bytes([0x20, 0x40, place - previous])
    footer = b"".join(number.to_bytes(8, "big") for number in (len(nodes), 100, place))
    with pytest.raises(SSTableError, match="more nodes or partitions than the file can hold"):
        partitions_of(Changed(source, {"Partitions.db": bytes(nodes) + footer}))


def test_missing_files_are_named() -> None:
    for name, component in ((BIG, "Index.db"), (TRIE, "Partitions.db"), (TRIE, "Rows.db")):
        (source,) = sources_of(name, "files.plain", "compacted")
        with pytest.raises(SSTableError, match=rf"{component}: there is no such file"):
            partitions_of(Changed(source, {component: None}))
