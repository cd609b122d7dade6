"""Commit logs of real servers, decoded: the same change rows as the plain-Python model has, however they are read."""

from __future__ import annotations

from typing import Any

import pytest

from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.outcomes import REASONS, UNKNOWN_TABLE
from ringsync.formats.commitlog.reader import SegmentChanges, read_log
from ringsync.formats.commitlog.segment import Wanted
from ringsync.formats.commitlog.state import Capacity
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
