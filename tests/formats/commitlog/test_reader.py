"""Tests of commit logs of real servers: all ways of reading give the change rows of the plain-Python model."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.columns import logged_tables
from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.reader import SegmentChanges, read_log
from ringsync.formats.commitlog.segment import Wanted, read_descriptor, read_segment, read_wanted
from ringsync.formats.rows.state import REASONS, UNKNOWN_TABLE, Capacity
from tests.commitlogs.fixtures import fixtures
from tests.formats.commitlog.comparable import of_package
from tests.formats.commitlog.sources import Source, expected, modelled, sources, tables_of

NAMES = [fixture.name for fixture in fixtures()]
SMALL = "5.0-v8-plain"


def read(source: Source, capacity: Capacity | None = None, **wanted: Any) -> SegmentChanges:
    tables = tables_of(source.fixture.name)
    return read_log(source.data, source.name, tables, Wanted(**wanted), key_of=source.key_of, capacity=capacity)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_model(name: str) -> None:
    tables = tables_of(name)
    for source in sources(name):
        segment, model = read(source), modelled(source)
        batches = list(segment.batches)
        assert of_package(batches, tables) == expected(source)
        assert segment.damages == []
        assert segment.end == model.position
        undecoded = [one for batch in batches for one in batch.undecoded.to_pylist()]
        assert [(one["position"], one["raw"].hex()) for one in undecoded] == [
            (one["position"], one["raw"]) for one in model.problems
        ]
        assert {one["reason"] for one in undecoded} <= {REASONS[UNKNOWN_TABLE]}
        assert segment.records == sum(batch.records for batch in batches)
        assert {one["table_id"].hex() for one in undecoded} == {
            one["table_id"].replace("-", "") for one in model.problems
        }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_behind_the_index_is_not_read(name: str) -> None:
    for source in sources(name):
        index = parse_index(source.index)
        assert index is not None
        segment = read(source, until=index.offset)
        found = of_package(segment.batches, tables_of(name))
        assert found == [change for change in expected(source) if change["position"] <= index.offset]
        assert segment.damages == []
        assert segment.end == index.offset
        assert len(found) == len(expected(source)) or not index.completed


@pytest.mark.parametrize("name", ["4.0-plain", "4.1-lz4", "5.0-v8-jceks", "5.0-v8-plain-killed"])
def test_reading_goes_on_at_any_position(name: str) -> None:
    source, tables = sources(name)[-1], tables_of(name)
    model, rows = modelled(source), expected(source)
    ends = sorted({change["position"] for change in rows} | {one["position"] for one in model.problems})
    for position in [0, model.header_length, *ends, ends[-1] + 100]:
        for after in (position, position + 1):
            segment = read(source, after=after)
            assert of_package(segment.batches, tables) == [row for row in rows if row["position"] > after]
            assert segment.records == sum(end > after for end in ends)


class Counting(io.FileIO):
    """A file that counts the bytes that are read."""

    read_bytes = 0

    def readinto(self, buffer: Any) -> int:
        self.read_bytes += (found := super().readinto(buffer) or 0)
        return found


@pytest.mark.parametrize("name", ["4.0-plain", "4.1-lz4", "5.0-v8-jceks", "5.0-v8-plain-killed"])
def test_only_what_is_wanted_is_read_of_a_file(name: str, tmp_path: Path) -> None:
    """Each cycle of the stage read all of each segment, which Cassandra makes 32 MiB long, for what was new in it."""
    source, tables = sources(name)[-1], tables_of(name)
    descriptor = read_descriptor(source.data, source.name)
    found = read_segment(source.data, source.name, key_of=source.key_of)
    ends = [found.descriptor.size, *(one.position + one.end - one.start for one in found.sections)]
    is_plain = descriptor.codec == "plain"
    path = tmp_path / source.name
    path.write_bytes(source.data + bytes(2**22 if is_plain else 0))
    for after, until in itertools.combinations([0, *ends, ends[-1] - 9], 2):
        wanted = Wanted(after=after, until=max(until, after))
        with io.BufferedReader(file := Counting(str(path))) as buffered:
            data = read_wanted(buffered, source.name, wanted)
        part = read_log(data, source.name, tables, wanted, key_of=source.key_of)
        expected_part = read(source, after=after, until=wanted.until)
        assert of_package(part.batches, tables) == of_package(expected_part.batches, tables)
        assert (part.records, part.end, part.damages) == (expected_part.records, expected_part.end, [])
        if is_plain and (begin := after or ends[0]) in ends and until > begin:
            assert file.read_bytes <= 90_000 + until - begin


@pytest.mark.parametrize("name", ["4.0-lz4", "5.0-v8-plain"])
def test_small_batches_hold_the_same(name: str) -> None:
    source = sources(name)[1]
    batches = list(read(source, capacity=Capacity(rows=2, cells=2, complex=1, bytes=64)).batches)
    assert len(batches) > 15
    assert of_package(batches, tables_of(name)) == expected(source)


def test_a_record_that_is_larger_than_a_batch() -> None:
    source = sources(SMALL)[0]
    capacity = Capacity(rows=100, cells=1000, complex=100, bytes=4096)
    sizes = [len(row["raw"]) // 2 for change in expected(source) for row in change.get("cells", []) if "raw" in row]
    assert max(sizes) > 8 * capacity.bytes
    assert of_package(read(source, capacity=capacity).batches, tables_of(SMALL)) == expected(source)


def test_records_of_tables_that_are_not_known_keep_their_bytes() -> None:
    source, model = sources(SMALL)[1], modelled(sources(SMALL)[1])
    assert len({row["table_id"] for row in expected(source)}) > 10
    known = tables_of(SMALL).tables
    some = logged_tables([table for table in known if table.name in ("many", "plain")])
    ids = {table.table_id for table in some.tables}
    segment = read_log(source.data, source.name, some)
    batches = list(segment.batches)
    rows = of_package(batches, some)
    several = {row["position"] for row in expected(source) if row["table_id"].replace("-", "") not in ids}
    assert rows == [
        row for row in expected(source) if row["table_id"].replace("-", "") in ids and row["position"] not in several
    ]
    assert rows
    undecoded = [one for batch in batches for one in batch.undecoded.to_pylist()]
    assert {one["position"] for one in undecoded} == several | {one["position"] for one in model.problems}
    # Once the schema is known the kept bytes are what the segment holds.
    for one in undecoded:
        end = one["position"] - 4
        assert source.data[end - one["length"] : end] == one["raw"]


def test_no_table_at_all() -> None:
    source = sources(SMALL)[2]
    batches = list(read_log(source.data, source.name, logged_tables([])).batches)
    assert sum(batch.rows.num_rows for batch in batches) == 0
    assert sum(batch.undecoded.num_rows for batch in batches) == sum(batch.records for batch in batches) > 50


def test_what_an_offset_in_the_middle_of_a_section_covers() -> None:
    source, rows = sources(SMALL)[1], expected(sources(SMALL)[1])
    for position in (rows[50]["position"], rows[50]["position"] - 1, rows[50]["position"] + 1):
        segment = read(source, until=position)
        assert of_package(segment.batches, tables_of(SMALL)) == [row for row in rows if row["position"] <= position]
        assert segment.end == position
        assert segment.damages == []


@pytest.mark.parametrize("name", ["4.0-plain", "4.0-zstd"])
def test_an_offset_behind_the_end_is_a_damage(name: str) -> None:
    source = sources(name)[-1]
    end = modelled(source).position
    for option in ("until", "completed_at"):
        segment = read(source, **{option: end + 1000})
        assert of_package(segment.batches, tables_of(name)) == expected(source)
        assert [(one.position, one.length) for one in segment.damages] == [(end, 1000)]
        assert "cut off or overwritten" in segment.damages[0].reason
    # After a crash Cassandra writes the size of the file.
    assert read(source, completed_at=len(source.data)).damages == []
