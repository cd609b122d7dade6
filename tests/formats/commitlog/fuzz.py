"""Damage segments at random and read them, in a process of its own: a crash, a hang or a loss that is not told ends it.

``python -m tests.formats.commitlog.fuzz SEED COUNT``
"""

from __future__ import annotations

import faulthandler
import struct
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from ringsync.changes.columns import LoggedTables
from ringsync.formats.commitlog.reader import SegmentChanges, read_log
from ringsync.formats.commitlog.records import find_records
from ringsync.formats.commitlog.segment import SegmentError, Wanted, read_segment
from ringsync.formats.rows.state import Capacity
from tests.commitlog_model.mutation import MalformedError, UnknownColumnError, UnknownTableError, partition_updates
from tests.commitlog_model.types import Table
from tests.commitlog_model.write import record, segment
from tests.commitlogs.fixtures import fixtures
from tests.formats.commitlog import guarded
from tests.formats.commitlog.sources import Source, model_tables_of, sources, tables_of

SECONDS = 20
"""Most time for a file of some kilobytes on a busy machine."""
_CAPACITIES = (Capacity(), Capacity(rows=64, cells=256, complex=16, bytes=2048))

Digests = Counter[bytes]


@dataclass(frozen=True)
class Sound:
    """A segment before it is damaged.

    :param records: start and end of each, logical, the number of its section, and the digests of its rows; without
        those of unknown tables
    :param sections: start and end of each section's bytes in the file
    :param end: logical position behind the last section
    """

    source: Source
    data: bytes
    records: tuple[tuple[int, int, int, Digests], ...]
    sections: tuple[tuple[int, int], ...]
    end: int

    @property
    def is_plain(self) -> bool:
        return self.source.fixture.codec == "plain"

    @property
    def tables(self) -> LoggedTables:
        return tables_of(self.source.fixture.name)

    def read(self, data: bytes, capacity: Capacity) -> SegmentChanges:
        return read_log(
            data,
            self.source.name,
            self.tables,
            Wanted(completed_at=self.end),
            key_of=self.source.key_of,
            capacity=capacity,
        )


def digests(read: SegmentChanges) -> tuple[dict[int, Digests], set[int]]:
    """Return the digests of rows by their record's position, and the positions of undecoded records."""
    found: dict[int, Digests] = {}
    undecoded: set[int] = set()
    for batch in read.batches:
        positions, its_digests = (batch.rows.column(name).to_pylist() for name in ("position", "digest"))
        for position, digest in zip(positions, its_digests, strict=True):
            found.setdefault(position, Counter())[digest] += 1
        undecoded.update(batch.undecoded.column("position").to_pylist())
    return found, undecoded


def sound(source: Source, data: bytes) -> Sound:
    """Describe an undamaged segment, which the other tests compare with the model."""
    plain = read_segment(data, source.name, key_of=source.key_of)
    records, damages = find_records(plain.buffer, plain.sections, plain.file_end)
    assert damages == []
    assert plain.damages == []
    about = Sound(source, data, (), _file_sections(data), plain.end)
    found, _ = digests(about.read(data, Capacity()))
    spans = zip(records.positions.tolist(), records.sizes.tolist(), strict=True)
    starts = [section.position for section in plain.sections]
    its_records = [
        (end - size - 12, end, bisect(starts, end - 1) - 1, found[end]) for end, size in spans if end in found
    ]
    return Sound(source, data, tuple(its_records), about.sections, plain.end)


def _file_sections(data: bytes) -> tuple[tuple[int, int], ...]:
    found, at = [], 18 + int.from_bytes(data[12:14], "big")
    while (end := int.from_bytes(data[at : at + 4], "big")) > 0:
        found.append((at + 8, end))
        at = end
    return tuple(found)


def sound_segments() -> list[Sound]:
    """Return the small segments of all fixtures, and small ones with records of the large ones: some kilobytes each."""
    found = []
    for fixture in fixtures():
        small = sources(fixture.name)[-1]
        data = small.data
        if fixture.codec == "plain":
            # Zeros behind, as in the file, but not a megabyte of them.
            data = data[: _file_sections(data)[-1][1]] + bytes(100)
        found.append(sound(small, data))
        if fixture.codec == "plain":
            found += [sound(small, data) for data in _mixed(fixture.name)]
    return found


def _mixed(name: str) -> Iterator[bytes]:
    """Make plain segments of mixed small records from the fixture's large segments."""
    random = Random(name)
    contents = []
    for source in sources(name)[:-1]:
        plain = read_segment(source.data, source.name)
        records, _ = find_records(plain.buffer, plain.sections, plain.file_end)
        spans = zip(records.offsets, records.sizes, strict=True)
        contents += [bytes(plain.buffer[at : at + size]) for at, size in spans]
    contents = [content for content in contents if len(content) < 1500]
    number = int(sources(name)[-1].name.split("-")[2].removesuffix(".log"))
    version = int(sources(name)[-1].name.split("-")[1])
    for _ in range(6):
        chosen = [record(content) for content in random.sample(contents, 30)]
        sections = [b"".join(chosen[i : i + 6]) for i in range(0, 30, 6)]
        yield segment(version, number, sections, zeros=100)


def flip(data: bytearray, random: Random) -> None:
    for _ in range(random.choice([1, 1, 1, 2, 8, 50])):
        data[random.randrange(len(data))] ^= random.randrange(1, 256)


def cut(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


def zero(data: bytearray, random: Random) -> None:
    at, size = random.randrange(len(data)), random.choice([1, 4, 16, 100, 512, 4096])
    data[at : at + size] = bytes(len(data[at : at + size]))


def swap(data: bytearray, random: Random) -> None:
    size = random.choice([1, 8, 64, 512])
    first, second = sorted(random.randrange(max(1, len(data) - size)) for _ in range(2))
    if second - first >= size:
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )


def overwrite(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    number = random.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, random.getrandbits(32), len(data)])
    data[at : at + 4] = struct.pack(">I", number & 0xFFFFFFFF)[: len(data) - at]


def insert(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.randbytes(random.choice([1, 4, 30]))


DAMAGES: tuple[Callable[[bytearray, Random], None], ...] = (flip, flip, cut, zero, swap, overwrite, insert)
_NASTY = (b"\xff" * 9, b"\xff\x7f" + b"\xff" * 7, b"\x80", b"\xfe", b"\x00", b"\xf0\x80\x00\x00\x00", b"\xc0\xff\xff")


def attack(content: bytes, random: Random) -> bytes:
    """Damage a mutation before its checksum is made."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5])):
        kind, at = random.randrange(5), random.randrange(len(data) + 1)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << random.randrange(8)
        elif kind == 1 and data:
            data[min(at, len(data) - 1)] = random.choice([0, 0xFF, 0x7F, 0x80, 0xFE, random.randrange(256)])
        elif kind == 2:
            del data[at : at + random.choice([1, 1, 2, 20])]
        elif kind == 3:
            data[at:at] = random.choice(_NASTY)
        else:
            del data[at:]
    return bytes(data).ljust(10, random.choice([b"\0", b"\xff"]))


def check_damaged(about: Sound, random: Random) -> None:
    """Damage the file. All records that are not reported as damaged must be unchanged, and none may be added."""
    data = bytearray(about.data)
    for _ in range(random.choice([1, 1, 2])):
        if data:
            random.choice(DAMAGES)(data, random)
    try:
        read = about.read(bytes(data), random.choice(_CAPACITIES))
    except SegmentError:
        return
    found, undecoded = digests(read)
    was = sum((one for *_, one in about.records), Counter())
    now = sum(found.values(), Counter())
    assert now.keys() <= was.keys(), "rows appear that were not there"
    lost = was - now
    if lost:
        assert read.damages or undecoded, "rows are lost, and nobody says so"
    if about.is_plain:
        spans = [(one.position - 12 - one.length, one.position + one.length) for one in read.damages]
        for start, end, _, its in about.records:
            if its & lost and found.get(end) != its and end not in undecoded:
                assert any(first < end and start < last for first, last in spans), f"the record at {end} is lost"
        return
    # Positions behind a damaged section may be wrong, so sections are counted.
    if any("nothing behind it can be read" in one.reason for one in read.damages):
        return
    touched = {i for i, (start, end) in enumerate(about.sections) if data[start:end] != about.data[start:end]}
    homes = {digest: {section for *_, section, its in about.records if digest in its} for digest in lost}
    assert all(sections & touched for sections in homes.values()), "rows of a section are lost that was not damaged"
    losers = {min(sections) for sections in homes.values() if len(sections) == 1}
    assert len(losers) <= len(read.damages) + len(undecoded)


def check_attacked(about: Sound, random: Random, tables: dict[str, Table]) -> None:
    """Damage mutations under right checksums. The others must be unchanged; all that decode must equal the model's."""
    plain = read_segment(about.data, about.source.name)
    records, _ = find_records(plain.buffer, plain.sections, plain.file_end)
    spans = zip(records.offsets, records.sizes, strict=True)
    contents = [bytes(plain.buffer[at : at + size]) for at, size in spans]
    wanted = {index for index in range(len(contents)) if random.random() < 0.4}
    contents = [attack(one, random) if i in wanted else one for i, one in enumerate(contents)]
    data = segment(plain.descriptor.version, plain.descriptor.segment_id, [b"".join(map(record, contents))])
    read = read_log(data, about.source.name, about.tables, capacity=random.choice(_CAPACITIES))
    found, undecoded = digests(read)
    assert read.damages == []
    position = plain.descriptor.size + 8
    for content in contents:
        position += len(content) + 12
        try:
            changes = [change for some in partition_updates(content, tables) for change in some]
        except (MalformedError, UnknownTableError, UnknownColumnError, LookupError, ValueError, struct.error):
            continue
        if position in undecoded:
            # The kernels are stricter than the model in a few things that servers do not write.
            continue
        its = Counter(bytes.fromhex(change["digest"]) for change in changes)
        assert found.get(position, Counter()) == its, f"the record at {position}: {content.hex()}"


def main(seed: int, count: int) -> None:
    """Damage and read ``count`` files."""
    faulthandler.enable()
    guarded.guard_the_kernels()
    faulthandler.dump_traceback_later(600, exit=True)
    segments = sound_segments()
    plain = [about for about in segments if about.is_plain]
    for about in segments:
        faulthandler.dump_traceback_later(600, exit=True)
        digests(about.read(about.data, _CAPACITIES[1]))
    for number in range(count):
        random = Random(f"{seed} {number}")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            if number % 3:
                check_damaged(random.choice(segments), random)
            else:
                about = random.choice(plain)
                check_attacked(about, random, model_tables_of(about.source.fixture.name))
        except Exception:
            print(f"seed {seed}, number {number}", file=sys.stderr)
            raise
    faulthandler.cancel_dump_traceback_later()
    print(f"{count} files")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
