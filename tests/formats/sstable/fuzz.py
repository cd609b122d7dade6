"""Damage SSTables at random and read them, in a process of its own: a crash, a hang or a loss that is not told ends it.

``python -m tests.formats.sstable.fuzz SEED COUNT``
"""

from __future__ import annotations

import faulthandler
import json
import resource
import struct
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from ringsync.changes.columns import logged_tables
from ringsync.changes.schema import RANGE_DELETION
from ringsync.formats.rows.state import Capacity
from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.partitions import read_partitions
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.sstables import Part, SSTable, merged_rows, open_sstable
from ringsync.images.from_streams import images_of_part
from ringsync.images.times import UnrepresentableValueError
from ringsync.images.values import shown_values
from ringsync.ring.tokens import WHOLE_RING, TokenRange
from ringsync.schema.table import TableSchema
from tests.commitlog_model.mutation import MalformedError
from tests.formats.commitlog import guarded
from tests.formats.commitlog.comparable import of_model, of_package
from tests.formats.commitlog.fuzz import DAMAGES, attack
from tests.formats.sstable.files import Changed, every_source, places_of, table_of
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstables.fixtures import FIXTURES

SECONDS = 20
"""Most time for a file of some kilobytes on a busy machine."""
MEMORY_BYTES = 3 << 30
"""Most memory that the process may get beyond what it has once all kernels are compiled."""
MOST_BYTES = 12_000
CHUNK = 512
CAPACITIES = (
    Capacity(rows=512, cells=4096, complex=512, bytes=2**19),
    Capacity(rows=8, cells=64, complex=8, bytes=2**19),
)
SMALL_FILES = ("Statistics.db", "CompressionInfo.db", "CRC.db", "Index.db", "Partitions.db", "Rows.db")
PLACES = ("CompressionInfo.db", "CRC.db")
"""Files that say where the chunks of Data.db are, and how long it is."""

Digests = Counter[tuple[bytes, bytes]]
"""Rows by partition key and digest."""


@dataclass(frozen=True)
class Sound:
    """An SSTable before it is damaged.

    :ivar source: its files
    """

    source: Changed
    table: TableSchema
    version: str

    @cached_property
    def content(self) -> bytes:
        """The uncompressed data."""
        data = DataFile(self.source)
        buffer = np.zeros(data.length, np.uint8)
        assert data.read_into(buffer, 0, 0, data.length) is None
        return buffer.tobytes()

    @cached_property
    def starts(self) -> list[int]:
        """Positions of the partitions, and of the end."""
        length = DataFile(self.source).length
        return [*read_partitions(self.source, length, step_bytes=1).positions.tolist(), length]

    @cached_property
    def rows(self) -> list[Digests]:
        """The rows of each partition."""
        found = read_all(self.source, self.table, CAPACITIES[0])
        assert not found.losses
        rows: list[Digests] = [Counter() for _ in self.starts[1:]]
        for position, row in found.rows():
            rows[bisect_right(self.starts, position) - 1][row] += 1
        return rows

    @cached_property
    def all_rows(self) -> Digests:
        return sum(self.rows, Counter())

    @property
    def name(self) -> str:
        return self.source.descriptor.path("Data.db")

    def missing(self, found: Digests) -> Iterator[tuple[int, int]]:
        """Yield first position and end of each partition of which rows are missing."""
        for start, end, its in zip(self.starts, self.starts[1:], self.rows, strict=False):
            if its - found:
                yield start, end

    def with_content(self, content: bytes) -> Changed:
        """Return the SSTable with other data, without compression, and with the right checksums."""
        chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        sums = struct.pack(f">i{len(chunks)}I", CHUNK, *map(zlib.crc32, chunks))
        digest = str(zlib.crc32(content)).encode()
        files = {"Data.db": content, "CompressionInfo.db": None, "CRC.db": sums, "Digest.crc32": digest}
        return Changed(self.source, files)


@dataclass(frozen=True)
class Found:
    """What was read.

    :ivar batches: change rows
    """

    batches: list[pa.RecordBatch]
    losses: list[Loss]

    def rows(self) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Yield position, and key and digest, of each row, without range deletions: the end of a batch cuts these."""
        for batch in self.batches:
            names = ("kind", "position", "partition_key", "digest")
            for kind, position, *row in zip(*(batch[name].to_pylist() for name in names), strict=True):
                if kind != RANGE_DELETION:
                    yield position, (row[0], row[1])

    @property
    def digests(self) -> Digests:
        return Counter(row for _, row in self.rows())

    def covers(self, start: int, end: int) -> bool:
        """Tell whether something between two positions is reported as lost."""
        return any(one.position < end and start < one.position + one.length for one in self.losses)


def read(sstable: SSTable, parts: Sequence[Part], capacity: Capacity) -> Found:
    """Read parts of an SSTable."""
    found = Found([], [])
    for part in parts:
        position = part.first
        for batch in sstable.rows(part, capacity):
            assert batch.end > position, "the reader stands still"
            position = batch.end
            batch.rows.validate(full=True)
            found.batches.append(batch.rows)
            for loss in batch.losses:
                assert loss.file == sstable.source.descriptor.path("Data.db")
                assert loss.length > 0
                assert loss.reason
                found.losses.append(loss)
        assert position == part.end, "the reader ends before the end"
    return found


def read_all(source: Changed, table: TableSchema, capacity: Capacity) -> Found:
    """Read all partitions, with the index only where something is lost."""
    return read(open_sstable(source, table), [whole(source)], capacity)


def whole(source: Source) -> Part:
    """Return the part that is all of an SSTable."""
    return Part(*WHOLE_RING.unwrap(), 0, DataFile(source).length)


def sound_sstables() -> list[Sound]:
    """Return the small SSTables of all fixtures, and those that have indexes inside partitions."""
    found = []
    for source in every_source():
        size, rows = source.size("Data.db") or 0, source.size("Rows.db") or 0
        if size <= MOST_BYTES or (rows and size <= 4 * MOST_BYTES):
            (name,) = [name for name in FIXTURES if f"/{name}/" in source.descriptor.folder]
            kept = (*SMALL_FILES, "Data.db", "Digest.crc32")
            files = {component: source.read(component) for component in kept}
            found.append(Sound(Changed(source, files), table_of(source.descriptor), FIXTURES[name].sstable_version))
    return found


def damaged(data: bytes, random: Random) -> bytes:
    """Damage a file."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2])):
        if changed:
            random.choice(DAMAGES)(changed, random)
    return bytes(changed)


def check_data(about: Sound, random: Random) -> None:
    """Damage Data.db. Checksums tell where: the partitions of other chunks must be there, and nothing else may be."""
    data = about.source.read("Data.db") or b""
    changed = damaged(data, random)
    source = Changed(about.source, {"Data.db": changed})
    try:
        found = read_all(source, about.table, random.choice(CAPACITIES))
    except SSTableError as error:
        if len(changed) > len(data):
            return  # there are no checksums for so much
        raise AssertionError("a file of the right size, or a shorter one, is refused") from error
    assert not found.digests - about.all_rows, "rows appear that were not there"
    for start, end in about.missing(found.digests):
        assert found.covers(start, end), f"rows of the partition at {start} are missing, and nobody says so"
    if len(changed) == len(data):
        chunks = DataFile(source).chunks
        known = places_of(chunks)
        for start, end in about.missing(found.digests):
            first, last = start // chunks.chunk_length, (end - 1) // chunks.chunk_length
            places = range(int(known.starts[first]), int(known.starts[last] + known.stored[last]) + 4)
            whole = data[places.start : places.stop] == changed[places.start : places.stop]
            assert not whole or about.source.read("CRC.db") is not None, f"the partition at {start} is not damaged"


def check_small_file(about: Sound, random: Random) -> None:
    """Damage another file. Statistics.db has checksums; others have none, but no row may come out of nothing."""
    component = random.choice([name for name in SMALL_FILES if about.source.read(name)])
    source = Changed(about.source, {component: damaged(about.source.read(component) or b"", random)})
    capacity = random.choice(CAPACITIES)
    try:
        sstable = open_sstable(source, about.table)
        found = read_all(source, about.table, capacity)
        tokens = sorted(random.randrange(-(2**63), 2**63) for _ in range(2))
        parts = list(sstable.parts(TokenRange(*tokens)))
        some = read(sstable, parts, capacity)
    except SSTableError as error:
        if component in str(error) or "by the index" in str(error) or component in PLACES:
            return
        raise AssertionError(f"{component} is damaged, and this names another file") from error
    if component in PLACES:
        return  # it says where the chunks are: two of them can change places, each with its checksum
    assert not found.losses
    assert found.digests == about.all_rows, f"{component} is damaged, and the rows are others"
    assert not some.digests - about.all_rows, "rows appear that were not there"


def check_content(about: Sound, random: Random) -> None:
    """Damage the data under right checksums. What the model can read must be the same; the rest must be told."""
    content, changed = about.content, attacked(about.content, random)
    source = about.with_content(changed)
    capacity = random.choice(CAPACITIES)
    found = read_all(source, about.table, capacity)
    expected, ended_at = of_the_model(source, about)
    batches = [SimpleNamespace(rows=batch) for batch in found.batches]
    read_by_us = of_package(batches, logged_tables([about.table]))  # type: ignore[arg-type]
    # Small batches cut range deletions. A partition's deletion at this time deletes nothing, so we leave it out.
    ours, theirs = (
        Counter(
            text_of(one)
            for one in side
            if (capacity == CAPACITIES[0] or one["kind"] != "range_deletion")
            and (one["kind"] != "partition_deletion" or one["deletion"]["timestamp"] > -(2**63))
        )
        for side in (read_by_us, expected)
    )
    if not found.losses and ended_at == len(changed):
        assert ours == theirs, "the model reads other rows"
    if ended_at < len(changed):
        assert found.losses or theirs != ours, "the model sees damage, we do not"
    if len(content) == len(changed):
        changes = np.flatnonzero(np.frombuffer(content, np.uint8) != np.frombuffer(changed, np.uint8))
        first_change = int(changes[0]) if len(changes) else len(content)
        lost_from = max((loss.position for loss in found.losses), default=-1)
        for start, end in about.missing(found.digests):
            assert end > first_change, f"the partition at {start} is before the damage"
            # What is damaged may seem to go on, and end in a later partition.
            if content[start:end] == changed[start:end] and start > lost_from >= 0:
                assert found.covers(start, end), f"the partition at {start} is not damaged, and is not there"


def check_merge(about: Sound, random: Random) -> None:
    """Merge a damaged SSTable with a sound copy: all rows are there."""
    source = Changed(about.source, {"Data.db": damaged(about.source.read("Data.db") or b"", random)})
    lost: list[Loss] = []
    try:
        sstables = [open_sstable(one, about.table) for one in (source, about.source)]
        parts = [(one, whole(one.source)) for one in sstables]
        with_source = random.random() < 0.5
        merged = []
        for part in merged_rows(parts, about.table, lost.append, with_source=with_source):
            images_of_part(part, about.table, "raw")
            merged.append(part.rows.to_arrow())
            # What a damaged value is may be no value of its type.
            with suppress(UnrepresentableValueError):
                list(shown_values([part], about.table, random.choice([0, 2**31, 2**33])))
    except SSTableError:
        return
    keys = {key for batch in merged for key in batch["partition_key"].to_pylist()}
    assert keys >= {key for key, _ in about.all_rows}


def attacked(content: bytes, random: Random) -> bytes:
    """Damage uncompressed data: mostly within a partition, sometimes all over."""
    if random.random() < 0.5:
        return attack(content, random)
    changed = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5])):
        changed[random.randrange(len(changed))] = random.choice([0, 0xFF, 0x7F, 0x80, 0xFE, 1, random.randrange(256)])
    return bytes(changed)


def of_the_model(source: Changed, about: Sound) -> tuple[list[dict[str, object]], int]:
    """Read with the model. Return its changes, and the position of the partition in which it failed, or the end."""
    folder = Path(source.descriptor.folder)
    table = table_beside(folder, source.descriptor.table_id)
    changes: list[dict[str, object]] = []
    position = 0
    try:
        for partition in read_sstable(source.read, table, about.version):
            if not partition.key:
                return changes, partition.position  # Cassandra refuses it
            changes += map(of_model_at(partition.position), partition.changes)
            position = partition.position
    except (MalformedError, LookupError, ValueError, AssertionError, struct.error, OverflowError, MemoryError):
        return changes, position
    return changes, len(source.read("Data.db") or b"")


def of_model_at(position: int) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda change: of_model({"source": {"position": position}, **change})


def text_of(change: dict[str, object]) -> str:
    """Return a change row without what only one side has, as a text that can be counted."""
    content = {name: value for name, value in change.items() if name not in ("digest", "position")}
    return json.dumps(content, sort_keys=True)


CHECKS = (check_data, check_small_file, check_small_file, check_content, check_content, check_merge)


def main(seed: int, count: int) -> None:
    """Damage and read ``count`` SSTables."""
    faulthandler.enable()
    guarded.guard_the_kernels()
    faulthandler.dump_traceback_later(600, exit=True)
    sstables = sound_sstables()
    for about in sstables[::10]:
        assert read_all(about.source, about.table, CAPACITIES[1]).digests == about.all_rows
        check_merge(about, Random(0))  # compiles what merges
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in range(count):
        random = Random(f"{seed} {number}")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        about = random.choice(sstables)
        check = random.choice(CHECKS)
        try:
            check(about, random)
        except Exception:
            print(f"seed {seed}, number {number}: {check.__name__}, {about.name}", file=sys.stderr)
            raise
    faulthandler.cancel_dump_traceback_later()
    print(f"{count} SSTables")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
