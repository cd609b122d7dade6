"""Mutations that servers seldom write, made by a writer: they decode to what was written, as the model has them too."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.kernels import padded
from ringsync.formats.commitlog.reader import Changes, read_changes
from ringsync.formats.commitlog.records import Records
from ringsync.formats.commitlog.state import Capacity
from tests.commitlog_model.mutation import partition_updates
from tests.commitlog_model.write import mutation
from tests.formats.commitlog.comparable import Change, of_model, of_package
from tests.formats.commitlog.synthetic import package_tables, tables, updates

TABLES = package_tables()
MODEL_TABLES = {table.id: table for table in tables().values()}
SMALL = Capacity(rows=2, cells=2, complex=1, bytes=64)


def decode(mutations: list[bytes], capacity: Capacity | None = None) -> list[Changes]:
    """The batches of mutations whose positions are 1, 2, 3 …"""
    sizes = np.array([len(one) for one in mutations], np.int64)
    ends = np.cumsum(sizes)
    count = np.arange(1, len(mutations) + 1)
    records = Records(ends - sizes, sizes, count, np.ones(len(mutations), np.bool_))
    return list(read_changes(padded(b"".join(mutations)), records, TABLES, "made.log", capacity))


def placed(changes: list[Change], position: int) -> list[Change]:
    return [change | {"position": position} for change in changes]


def by_model(content: bytes) -> list[Change]:
    found = [change for changes in partition_updates(content, MODEL_TABLES) for change in changes]
    return [of_model(change | {"source": {"position": 1}}) for change in found]


@settings(max_examples=400, deadline=None)
@given(st.lists(updates(), min_size=1, max_size=3))
def test_random_mutations_decode_to_what_was_written(written: list[tuple[list[Change], bytes]]) -> None:
    content = mutation([data for _, data in written])
    expected = placed([change for changes, _ in written for change in changes], 1)
    batches = decode([content])
    assert [batch.undecoded.num_rows for batch in batches] == [0]
    assert of_package(batches, TABLES) == expected
    assert by_model(content) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(updates(), min_size=1, max_size=12))
def test_small_batches_hold_the_same(written: list[tuple[list[Change], bytes]]) -> None:
    mutations = [mutation([data]) for _, data in written]
    expected = [one for i, (changes, _) in enumerate(written, 1) for one in placed(changes, i)]
    batches = decode(mutations, SMALL)
    assert of_package(batches, TABLES) == expected
    assert sum(batch.records for batch in batches) == len(mutations)
