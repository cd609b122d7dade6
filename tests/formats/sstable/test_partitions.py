"""Partitions by token: those of real servers, against all keys of Data.db; and damaged indexes."""

from __future__ import annotations

import os
import subprocess
import sys
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
from tests.formats.sstable.trie_writer import random_trie
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstables.fixtures import FIXTURES

BIG, TRIE = "5.0-oa", "5.0-da"


MANY = 2**20


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
    assert count > 3000


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
        whole = read_index(source, MANY)
        many = Changed(source, {"Index.db": content * 40})
        found = read_index(many, MANY, 70_000)
        assert len(content) * 40 > 70_000 or table != "files.narrow"
        assert (found[0] == np.tile(whole[0], 40)).all()
        assert (found[2] == np.tile(whole[2], 40)).all()


def test_an_entry_that_ends_behind_the_file_is_refused() -> None:
    """In the last window, and in one before it."""
    (source,) = sources_of(BIG, "files.narrow", "compacted")
    inside = bytes(80_000)
    entry = b"\0\1k" + b"\0" + b"\xc1\x38\x80" + inside  # 0x13880 bytes of an index inside the partition
    whole = read_index(Changed(source, {"Index.db": entry + b"\0\1l\5\0"}), MANY, 70_000)
    assert whole[2].tolist() == [0, 5]
    for size, window in ((len(entry) - 1, 70_000), (len(entry) - 1, 1 << 20), (len(entry) + 3, 70_000)):
        with pytest.raises(SSTableError, match="what follows is not whole entries"):
            read_index(Changed(source, {"Index.db": (entry + b"\0\1l\5\0")[:size]}), MANY, window)


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


def test_damaged_indexes_end_no_process() -> None:
    """In a process of its own, where each byte beyond a buffer is forbidden memory."""
    command = [sys.executable, "-m", "tests.formats.sstable.fuzz_indexes", "1", "6000"]
    environment = {**os.environ, "PYTHONPATH": "include:."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts.keys() == {"Index.db", "Partitions.db", "Rows.db", "all_types_of_nodes"}
    assert all(int(refused) > 300 for refused in counts.values())


def test_every_type_of_node_is_read() -> None:
    """No server writes all of them for tables of some thousand partitions."""
    random, seen = Random(3), set()
    (source,) = sources_of(TRIE, "files.narrow", "compacted")
    for count in (1, 2, 300, 20_000):
        trie = random_trie(random, count)
        lowest, highest, positions, _ = read_trie(Changed(source, {"Partitions.db": trie.content}), MANY)
        assert positions.tolist() == trie.positions
        for token, prefix, low, high in zip(trie.tokens, trie.prefixes, lowest.tolist(), highest.tolist(), strict=True):
            bits = prefix[1:9]
            assert (low + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\0")
            assert (high + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\xff")
            assert low <= token <= high
        seen |= trie.types
    assert seen == set(range(16))


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
