"""Tests of the fast merge: it finds what the merge of change rows finds, and the values are those that SELECT shows."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.changes.batch import concatenated
from ringsync.changes.plain import PlainRows, is_plain
from ringsync.changes.reconcile.plain import order_plain
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.reconcile.streams import MergedPart
from ringsync.cql.cells import Cells
from ringsync.cql.types import Native
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.sstables import SSTable, capacity_of, merged_rows, open_sstable
from ringsync.images.from_changes import images_of
from ringsync.images.from_streams import images_of_part
from ringsync.images.live import shown_rows
from ringsync.images.times import UnrepresentableValueError
from ringsync.images.values import shown_values
from ringsync.inspect.sstable import shown_schema
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import Column, TableSchema
from tests.formats.sstable.files import sources, sources_of, table_of
from tests.sstables.fixtures import FIXTURES


def refuse(loss: Loss) -> None:
    pytest.fail(f"lost: {loss}")


def merged(sstables: list[SSTable], table: TableSchema, memory: int, *, with_source: bool) -> list[MergedPart]:
    parts = [(one, part) for one in sstables for part in one.parts(WHOLE_RING)]
    return list(merged_rows(parts, table, refuse, memory, with_source=with_source))


def images(parts: list[MergedPart], table: TableSchema) -> pa.Table:
    return pa.Table.from_batches([images_of_part(part, table, "raw") for part in parts])


def shown(rows: pa.Table | pa.RecordBatch) -> str:
    """As text, in which NaN equals NaN, and a date may be of a year that Python does not have."""
    columns = [column.to_string(window=10**9, container_window=10**9) for column in _one_chunk(rows).columns]
    return "\n".join([str(rows.schema), *columns])


def with_bytes(rows: pa.Table) -> list[str]:
    """Columns with a value that its type in the lake cannot hold."""
    x = rows.combine_chunks()["_x"].chunk(0)
    return [field.name for field in x.type if pc.struct_field(x, [field.name, "raw"]).null_count < len(x)]


def _one_chunk(rows: pa.Table | pa.RecordBatch) -> pa.Table:
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    return pa.Table.from_batches(batches, rows.schema).combine_chunks()


@pytest.mark.parametrize("name", ["4.0-nb", "5.0-oa", "5.0-da"])
def test_images_and_values_are_those_of_the_slow_merge(name: str) -> None:
    compared = grids = 0
    for full_name in sorted({f"{one.descriptor.keyspace}.{one.descriptor.table}" for one in sources(name)}):
        # All that the server has ever written, flushed and compacted, overlaps.
        found = [source for tag in ("flushed", "compacted") for source in sources_of(name, full_name, tag)]
        table = table_of(found[0].descriptor)
        sstables = [open_sstable(source, table) for source in found]
        slow = images(merged(sstables, table, 2**28, with_source=True), table)
        for memory in (2**28, 2**16):
            parts = merged(sstables, table, memory, with_source=False)
            assert shown(images(parts, table)) == shown(slow), full_name
            grids += sum(part.grid is not None for part in parts)
            for moment in () if memory < 2**28 else (0, FIXTURES[name].selected["moment"], 2**31, 2**32):
                alive = pa.Table.from_batches(list(shown_rows(slow.to_batches(), table, moment)))
                if with_bytes(slow):
                    with pytest.raises(UnrepresentableValueError, match="with their times, which keep such values"):
                        list(shown_values(parts, table, moment))
                    continue
                values = pa.Table.from_batches(list(shown_values(parts, table, moment)))
                assert shown(values) == shown(alive.select(values.schema.names)), (full_name, moment)
                compared += len(values)
    assert compared > 500
    assert grids > 5


def plain_tables(name: str) -> list[tuple[TableSchema, list[SSTable]]]:
    found: dict[str, list[SSTable]] = {}
    for source in sources(name):
        table = table_of(source.descriptor)
        if is_plain(table):
            found.setdefault(table.full_name, []).append(open_sstable(source, table))
    return [(table_of(some[0].source.descriptor), some) for some in found.values()]


def shuffled(rows: PlainRows, chance: random.Random) -> PlainRows:
    """Give rows other times, of few different ones, and cells other kinds: everything ties with everything."""
    moments = np.array([chance.choice([5, 6, 7]) for _ in range(max(len(rows), len(rows.column), 1))], np.int64)
    kinds = np.array([chance.choice([1, 1, 2, 3]) for _ in range(len(rows.column))], np.int8)
    of_rows = moments[: len(rows)]
    return replace(
        rows,
        timestamp=moments[: len(rows.column)] + chance.choice([0, 1]),
        cell_kind=kinds,
        ttl=np.array([chance.choice([10, 20]) for _ in kinds], np.int32),
        local=np.array([chance.choice([100, 200]) for _ in kinds], np.int64),
        liveness=np.array([chance.choice([0, 1, 2]) for _ in of_rows], np.int8),
        liveness_timestamp=of_rows + chance.choice([0, 1]),
        liveness_ttl=np.array([chance.choice([10, 2**31 - 1]) for _ in of_rows], np.int32),
        liveness_expires=np.array([chance.choice([100, 200]) for _ in of_rows], np.int64),
        deletion=np.array([chance.choice([0, 0, 1]) for _ in of_rows], np.int8),
        deletion_timestamp=of_rows - chance.choice([0, 1]),
        deletion_local=np.array([chance.choice([100, 200]) for _ in of_rows], np.int64),
    )


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_decided_by_the_same_rules(seed: int) -> None:
    chance = random.Random(seed)
    compared = hidden = 0
    for table, sstables in plain_tables("5.0-oa"):
        batches = [
            batch.rows
            for one in sstables
            if one.layout.is_plain
            for part in one.parts(WHOLE_RING)
            for batch in one.plain_rows(part)
            if len(batch.rows) and not batch.rows.kind.any()
        ]
        if not batches:
            continue
        rows = batches[0]
        streams = [shuffled(rows, chance) for _ in range(chance.choice([1, 2, 3, 5]))]
        found = order_plain(streams, table)
        if found is None:  # too few of its cells are there
            continue
        slow = merge(concatenated([one.change_rows() for one in streams]), table)
        everything = np.arange(len(slow))
        rows, grid = found.merged()
        images = images_of(slow, table, "raw", everything)
        assert shown(images_of(rows, table, "raw", everything, grid)) == shown(images), table.full_name
        if not with_bytes(pa.Table.from_batches([images])):
            # Before, between and behind the moments at which something expires.
            for moment in (50, 100, 150, 200, 250):
                alive = pa.Table.from_batches(list(shown_rows([images], table, moment)), shown_schema(table))
                values = pa.Table.from_batches(list(shown_values([MergedPart(found, slow)], table, moment)))
                assert shown(values) == shown(alive.select(values.schema.names)), (table.full_name, moment)
                general = pa.Table.from_batches(list(shown_values([MergedPart(slow, slow)], table, moment)))
                assert shown(general) == shown(values), (table.full_name, moment)
                hidden += len(slow) - len(values)
        compared += len(slow)
    assert compared > 100
    assert hidden > 20


def test_rows_that_are_not_in_their_order_go_the_slow_way() -> None:
    for table, sstables in plain_tables("5.0-oa"):
        for one in sstables:
            for part in one.parts(WHOLE_RING):
                for batch in one.plain_rows(part, capacity_of(2**20)) if one.layout.is_plain else ():
                    if len(batch.rows) < 2 or batch.rows.kind.any():
                        continue
                    late = [batch.rows.part(1, 2), batch.rows.part(0, 1)]
                    backwards = replace(batch.rows.part(0, 2), token=batch.rows.token[:2][::-1].copy())
                    assert order_plain(late, table) is not None
                    if batch.rows.token[0] != batch.rows.token[1]:
                        assert order_plain([backwards], table) is None
                        return
    pytest.fail("there are no such rows")


def test_what_a_grid_does_not_suit_goes_the_slow_way() -> None:
    table, sstables = next(some for some in plain_tables("5.0-oa") if some[1][0].layout.is_plain)
    part = next(sstables[0].parts(WHOLE_RING))
    rows = next(batch.rows for batch in sstables[0].plain_rows(part) if not batch.rows.kind.any())
    assert order_plain([rows], table) is not None
    assert order_plain([rows.part(0, 1)] * 200, table) is None  # many streams
    huge = replace(rows, value=replace_lengths(rows.value, 2**30))  # offsets of 32 bits would wrap
    assert order_plain([huge, huge], table) is None
    none = np.zeros(len(rows) + 1, np.int32)
    columns = tuple(Column(f"c{i}", "regular", Native("int")) for i in range(500))
    sparse = replace(table, columns=(*table.key_columns, *columns))
    assert order_plain([replace(rows, cell_starts=none)], sparse) is None


def replace_lengths(cells: Cells, length: int) -> Cells:
    return Cells(cells.buffer, cells.offsets, np.full(len(cells), length, np.int32))
