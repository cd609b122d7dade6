"""Tests of visible rows, by the plain-Python model: a SELECT shows the same after them as before."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.schema import ROW, STATIC, TOMBSTONE
from ringsync.cql.types import ListType
from ringsync.images.from_changes import row_images_of
from ringsync.images.visible import same_keys, visible
from ringsync.schema.table import TableSchema
from tests.changes.test_merge import joined, logged, shown
from tests.reconciled import merged

LOG = "5.0-v8-plain"
MOMENTS = (0, 1_800_000_000, 2**31)


@cache
def tables() -> list[tuple[TableSchema, object, pa.RecordBatch]]:
    return [one for one in logged(LOG) if len(one[2])]


def rows_only(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.filter(pc.is_in(rows["kind"], value_set=pa.array([ROW, STATIC], pa.int8())))


def test_everything_is_visible_where_everything_is_there() -> None:
    """But that a list has lost an entry, where it has older ones: which it has is not known."""
    for table, _, rows in tables():
        whole = merged(rows, table)
        images = row_images_of(whole, table, "raw")
        for moment in MOMENTS:
            unseen = whole.where(~visible(whole, images, table, moment)).to_arrow()
            assert all(lost_entries(one, table) for one in unseen.to_pylist()), table.full_name


def lost_entries(row: dict[str, Any], table: TableSchema) -> bool:
    lists = [isinstance(column.type, ListType) for column in table.value_columns]
    return any(cell["kind"] == TOMBSTONE and cell["path"] and lists[cell["column"]] for cell in row["cells"])


def test_nothing_is_visible_where_nothing_is_there_but_deletions() -> None:
    for table, _, rows in tables():
        whole = merged(rows, table)
        nothing = row_images_of(whole, table, "raw").slice(0, 0)
        seen = visible(whole, nothing, table, 0)
        batch = whole.to_arrow()
        cells = batch["cells"]
        kinds = np.asarray(cells.flatten().field("kind"))
        ends = np.asarray(cells.offsets)
        alive = np.array([(kinds[start:end] != 3).any() for start, end in pairwise(ends)])
        alive |= np.asarray(batch["liveness"].is_valid())
        assert (seen == ~alive).all(), table.full_name


def test_what_a_select_would_show_otherwise_is_not_visible() -> None:
    """Half of a log is there. Each row of the log, whichever half it is of, changes nothing of what is shown if it is
    visible."""
    chance = random.Random(LOG)
    said = {True: 0, False: 0}
    for table, model, rows in tables():
        there = np.array([chance.random() < 0.5 for _ in range(len(rows))])
        whole = merged(rows.filter(pa.array(there)), table)
        images, before = row_images_of(whole, table, "raw"), whole.to_arrow()
        expected = shown(before, table, model, 0)  # type: ignore[arg-type]
        late = rows_only(rows)
        found = visible(ChangeRows.of(late), images, table, 0)
        for place in chance.sample(range(len(late)), min(15, len(late))):
            said[bool(found[place])] += 1
            if found[place]:
                after = shown(joined([before, late.slice(place, 1)]), table, model, 0)  # type: ignore[arg-type]
                assert after == expected, (table.full_name, late.slice(place, 1).to_pylist())
    assert min(said.values()) > 20, said


def test_rows_find_the_merged_row_of_their_key() -> None:
    for table, _, rows in tables():
        whole = merged(rows, table)
        places = same_keys(ChangeRows.of(rows), whole, table)
        for name in ("partition_key", "kind"):
            found = whole.to_arrow()[name].take(pa.array(np.maximum(places, 0)))
            assert pc.all(pc.or_(pc.equal(found, rows[name]), pa.array(places < 0))).as_py()
        one_each = whole.where(whole.of_row)
        assert (same_keys(one_each, one_each, table) == np.arange(len(one_each))).all()
