"""Partitions by token: those of real servers, against all keys of Data.db; and damaged indexes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ringsync.formats.sstable import tries
from ringsync.formats.sstable.data import DataFile, token_at
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.index import read_index
from ringsync.formats.sstable.partitions import Partitions, from_arrow, read_partitions, to_arrow
from ringsync.formats.sstable.source import LocalSource, Source
from ringsync.formats.sstable.tries import read_trie
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, TokenRange
from tests.commitlog_model import murmur3
from tests.formats.sstable.files import Changed, sources, sources_of
from tests.formats.sstable.trie_writer import random_trie
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstables.fixtures import FIXTURES

BIG, TRIE = "5.0-oa", "5.0-da"


def partitions_of(source: Source, step_bytes: int = 1) -> Partitions:
    return read_partitions(source, DataFile(source).length, step_bytes=step_bytes)


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
        expected, found, data = expected_of(source), partitions_of(source), DataFile(source)
        assert found.positions.tolist() == [position for _, position in expected]
        for (token, position), low, high in zip(expected, found.lowest.tolist(), found.highest.tolist(), strict=True):
            assert low <= token <= high
            assert token_at(data, position) == token
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
@pytest.mark.parametrize("step", [1, 5_000, 10**9])
def test_a_part_has_all_partitions_of_its_range_and_few_others(name: str, step: int) -> None:
    random = Random(1)
    for source in sources(name):
        expected, found = expected_of(source), partitions_of(source, step)
        ends = {position for _, position in expected} | {found.length}
        tokens = {position: token for token, position in expected}
        known = [token for token, _ in random.sample(expected, min(5, len(expected)))]
        unwrapped = [part for wanted in ranges(random, known) for part in wanted.unwrap()]
        starts, stops = (np.array([getattr(one, end) for one in unwrapped]) for end in ("start", "end"))
        for wanted, first, end in zip(unwrapped, *map(np.ndarray.tolist, found.between(starts, stops)), strict=True):
            inside = {position for position, token in tokens.items() if token in wanted}
            if first == end:
                assert not inside
                continue
            assert all(first <= position < end for position in inside)
            assert {first, end} <= ends
            assert first == 0 or tokens[first] <= wanted.start
            assert end == found.length or tokens[end] > wanted.end
            others = [size for at, size in sizes_of(expected, found.length).items() if first <= at < end]
            inner = sum(size for at, size in sizes_of(expected, found.length).items() if at in inside)
            assert sum(others) - inner <= 2 * (step + 2 * max(sizes_of(expected, found.length).values()))


@pytest.mark.parametrize("name", [BIG, TRIE])
def test_a_range_beside_all_partitions_has_no_part(name: str) -> None:
    """With leveled compaction, an SSTable has few of the tokens; else each task would read a little of each."""
    (source,) = sources_of(name, "files.narrow", "compacted")
    found = partitions_of(source, 10**9)
    assert len(found) == 1
    low, high = int(found.lowest[0]), found.last
    starts, ends = np.array([MIN_TOKEN, high, high + 5]), np.array([low - 1, high + 5, MAX_TOKEN])
    first, end = found.between(starts, ends)
    assert (first == end).all()


def sizes_of(expected: list[tuple[int, int]], length: int) -> dict[int, int]:
    """The bytes of each partition, by its position."""
    positions = [position for _, position in expected]
    return {first: end - first for first, end in pairwise([*positions, length])}


@pytest.mark.parametrize("name", [BIG, TRIE])
def test_what_is_remembered_is_the_same_elsewhere(name: str) -> None:
    """A node's worker reads the indexes, the driver what it has remembered."""
    every = [partitions_of(source, 20_000) for source in sources(name)[:20]]
    there = from_arrow(to_arrow(every))
    for one, other in zip(every, there, strict=True):
        assert one.last == other.last
        assert (one.length, one.is_within) == (other.length, other.is_within)
        for array in ("lowest", "highest", "positions"):
            assert getattr(one, array).tolist() == getattr(other, array).tolist()
    assert from_arrow(to_arrow([])) == []


@pytest.mark.parametrize("name", [BIG, TRIE])
def test_partitions_that_a_node_does_not_hold_are_noticed(name: str) -> None:
    (source,) = sources_of(name, "files.narrow", "compacted")
    expected, length = expected_of(source), DataFile(source).length
    first, middle, last = expected[0][0], expected[len(expected) // 2][0], expected[-1][0]
    below, above = TokenRange(first - 1, middle - 2), TokenRange(middle + 1, last)
    assert read_partitions(source, length, (TokenRange(first - 1, middle), TokenRange(middle, last))).is_within
    assert not read_partitions(source, length, (below, above)).is_within
    assert not read_partitions(source, length).is_within


def joined(batches: Iterator[tuple[Any, ...]]) -> list[Any]:
    """All that an index has, in one."""
    return [np.concatenate(arrays) for arrays in zip(*batches, strict=True)]


def test_an_index_is_read_in_any_windows() -> None:
    """The last window begins with the longest entry that there could be."""
    for table in ("files.narrow", "files.plain", "workload.keyed"):
        (source,) = sources_of(BIG, table, "compacted")
        content = source.read("Index.db")
        assert content is not None
        whole = joined(read_index(source))
        many = Changed(source, {"Index.db": content * 40})
        found = joined(read_index(many, 70_000))
        assert len(content) * 40 > 70_000 or table != "files.narrow"
        assert (found[0] == np.tile(whole[0], 40)).all()
        assert (found[2] == np.tile(whole[2], 40)).all()


def test_an_entry_that_ends_behind_the_file_is_refused() -> None:
    """In the last window, and in one before it."""
    (source,) = sources_of(BIG, "files.narrow", "compacted")
    inside = bytes(80_000)
    entry = b"\0\1k" + b"\0" + b"\xc1\x38\x80" + inside  # 0x13880 bytes of an index inside the partition
    whole = joined(read_index(Changed(source, {"Index.db": entry + b"\0\1l\5\0"}), 70_000))
    assert whole[2].tolist() == [0, 5]
    for size, window in ((len(entry) - 1, 70_000), (len(entry) - 1, 1 << 20), (len(entry) + 3, 70_000)):
        with pytest.raises(SSTableError, match="what follows is not whole entries"):
            joined(read_index(Changed(source, {"Index.db": (entry + b"\0\1l\5\0")[:size]}), window))


def test_damaged_indexes_end_no_process() -> None:
    """In a process of its own, where each byte beyond a buffer is forbidden memory."""
    command = [sys.executable, "-m", "tests.formats.sstable.fuzz_indexes", "1", "6000"]
    environment = {**os.environ, "PYTHONPATH": "include:."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts.keys() == {"Index.db", "Partitions.db", "Rows.db", "all_types_of_nodes"}
    assert all(int(refused) > 300 for refused in counts.values())


def test_every_type_of_node_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server writes all of them for tables of some thousand partitions."""
    monkeypatch.setattr(tries, "_PAGES_KEPT", 2)
    random, seen = Random(3), set()
    (source,) = sources_of(TRIE, "files.narrow", "compacted")
    for count in (1, 2, 300, 20_000, 150_000):  # the last one has more pages than are kept, and some batches
        trie = random_trie(random, count)
        lowest, highest, positions = joined(read_trie(Changed(source, {"Partitions.db": trie.content})))
        assert positions.tolist() == trie.positions
        for token, prefix, low, high in zip(trie.tokens, trie.prefixes, lowest.tolist(), highest.tolist(), strict=True):
            bits = prefix[1:9]
            assert (low + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\0")
            assert (high + 2**63).to_bytes(8, "big") == bits.ljust(8, b"\xff")
            assert low <= token <= high
        seen |= trie.types
    assert len(trie.content) > 3 * tries.PAGE_BYTES
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
