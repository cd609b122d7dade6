"""Tests of row images of changes, and of images after later changes. The plain-Python model is the oracle."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringsync.changes.keys.order import clustering_keys
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import (
    CHANGE_ROWS,
    EXPIRING,
    LIVE,
    PARTITION_DELETION,
    RANGE_DELETION,
    ROW,
    STATIC,
    TOMBSTONE,
)
from ringsync.cql.cells import cells_of, raw_values
from ringsync.cql.types import ListType, Native, SetType
from ringsync.images.after import RowsAfter, rows_after, seen_instead
from ringsync.images.digests import canonical
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import NO_LIVENESS, row_image_schema
from ringsync.images.times import UnrepresentableValueError
from ringsync.images.to_changes import change_rows_of, image_keys
from ringsync.schema.table import Column, TableSchema
from tests.changes.images_of_logs import LoggedTable, logged, selected
from tests.reconciled import merged

FIXTURE = "5.0-v8-plain"
MOMENTS = (1_000_000_000, 1_795_259_290, 2_000_000_000)
SCAN = 1_000
"""µs: the replica began with a scan at this time."""
INT = Native("int")
TABLE = TableSchema(
    "shop",
    "things",
    "0" * 32,
    (
        Column("p", "partition_key", INT),
        Column("c", "clustering", INT),
        Column("s", "static", INT),
        Column("l", "regular", ListType(INT)),
        Column("v", "regular", INT),
        Column("z", "regular", SetType(INT)),
    ),
)
S, L, V, Z = range(4)


@pytest.fixture(scope="module")
def tables() -> list[LoggedTable]:
    return logged(FIXTURE)


def nothing(table: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=row_image_schema(table))


def after(previous: pa.RecordBatch, changes: pa.RecordBatch, table: TableSchema, **others: Any) -> RowsAfter:
    return rows_after(previous, merged(changes, table), table, live_known_from_us=SCAN, misfits="raw", **others)


def overlaid(before: pa.RecordBatch, newer: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """The newest image of each key."""
    both = pa.concat_batches([newer, before])
    partition, clustering = image_keys(both, table)
    order = raw_values(clustering_keys(cells_of(clustering), table)).to_pylist()
    keys = list(zip(partition.to_pylist(), order, strict=True))
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    return both.take(pa.array(sorted(first.values())))


def halves(rows: pa.RecordBatch, seed: int) -> list[pa.RecordBatch]:
    """Split rows into halves. Deletions of partitions and ranges are in both: no image keeps them for later rows."""
    chosen = np.random.default_rng(seed).random(len(rows)) < 0.5
    both = np.isin(rows["kind"].to_numpy(), (PARTITION_DELETION, RANGE_DELETION))
    return [rows.take(pa.array(np.flatnonzero(mask))) for mask in (chosen | both, ~chosen | both)]


def test_images_of_a_log_show_what_the_model_shows(tables: list[LoggedTable]) -> None:
    for one in tables:
        found = after(nothing(one.table), one.rows, one.table).images
        found.validate(full=True)
        for moment in MOMENTS:
            assert one.shown(found, moment) == one.expected(moment), one.table.name


def test_images_of_one_half_and_changes_of_the_other_show_the_whole(tables: list[LoggedTable]) -> None:
    for seed, one in enumerate(tables):
        if not any(column.is_counter for column in one.table.columns):
            first, second = halves(one.rows, seed)
            before = after(nothing(one.table), first, one.table).images
            found = after(before, second, one.table)
            assert not found.unknown.any()
            images = overlaid(before, found.images, one.table)
            assert one.shown(images, MOMENTS[1]) == one.expected(MOMENTS[1]), one.table.name


def test_images_say_all_that_the_rows_say(tables: list[LoggedTable]) -> None:
    for one in tables:
        if not any(column.is_counter for column in one.table.columns):
            images = row_images_of(merged(one.rows, one.table), one.table, "raw")
            again = row_images_of(merge(change_rows_of(images, one.table), one.table), one.table, "raw")
            assert as_bits(again).equals(as_bits(images)), one.table.name


def as_bits(images: pa.RecordBatch) -> pa.Array:
    """Return values that are equal if their bits are."""
    return canonical(pa.StructArray.from_arrays(images.columns, fields=list(images.schema)))


def int_bytes(number: int) -> bytes:
    return number.to_bytes(4, "big")


def cell(column: int, value: int | None, at: int, path: bytes | None = None, expires_at: int | None = None) -> Any:
    kind = TOMBSTONE if value is None else LIVE if expires_at is None else EXPIRING
    return {
        "column": column,
        "path": path,
        "value": None if value is None else b"" if column == Z else int_bytes(value),
        "timestamp": at,
        "ttl": None if expires_at is None else 60,
        "local_deletion_time": 0 if value is None else expires_at,
        "kind": kind,
    }


def changes(*rows: dict[str, Any]) -> pa.RecordBatch:
    """Make change rows of partition 1; ``c`` None: a static row."""
    found = []
    for number, row in enumerate(rows):
        c = row.pop("c", 1)
        clustering = None if c is None else b"\1\0\0\0\4\0\0\0" + int_bytes(c)
        base = {"table_id": bytes(16), "schema_version": 0, "token": 7, "partition_key": int_bytes(1), "write_time": 0}
        base |= {"kind": STATIC if c is None else ROW, "clustering": clustering, "cells": [], "complex_deletions": []}
        found.append(base | {"digest": bytes(15) + bytes([number + 1]), "file": "f", "position": number} | row)
    return pa.RecordBatch.from_pylist(found, schema=CHANGE_ROWS)


def image(c: int | None = 1, **columns: Any) -> dict[str, Any]:
    """Make an image like that of a scan, with cells written at 900."""
    return {"token": 7, "p": 1, "c": c, "_row": {"writetime": 900}, **columns}


def images(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=row_image_schema(TABLE))


def deletion(at: int) -> dict[str, Any]:
    return {"deletion": {"timestamp": at, "local_deletion_time": 1}}


def insertion(at: int, expires_at: int | None = None) -> dict[str, Any]:
    return {"liveness": {"timestamp": at, "ttl": expires_at and 60, "expires_at": expires_at}}


def of_row(found: RowsAfter, c: int = 1) -> tuple[dict[str, Any], bool]:
    place = found.images["c"].to_pylist().index(c)
    return found.images.slice(place, 1).to_pylist()[0], bool(found.unknown[place])


def shown(found: pa.RecordBatch, now_s: int = 50) -> list[dict[str, int]]:
    """Return keys and values of the integer columns."""
    rows = selected(found, TABLE, now_s)
    return [{n: int.from_bytes(raw, "big") for n, (raw, *_) in row.items() if n not in "lz"} for row in rows]


def test_a_row_that_a_scan_showed_lives_by_a_liveness_that_is_not_known() -> None:
    previous = images(image(v=5))
    row, unknown = of_row(after(previous, changes({"cells": [cell(V, None, 1500)]}), TABLE))
    assert (row["v"], row["_row"]["live"], unknown) == (None, None, True)
    # A deletion after the scan settles it, one before does not, and a new INSERT does.
    row, unknown = of_row(after(previous, changes(deletion(1500)), TABLE))
    assert (row["v"], row["_row"]["live"], row["_row"]["deleted_at"], unknown) == (None, NO_LIVENESS, 1500, False)
    row, unknown = of_row(after(previous, changes(deletion(950)), TABLE))
    assert (row["v"], row["_row"]["live"], unknown) == (None, None, True)
    row, unknown = of_row(after(previous, changes({**insertion(1600), "cells": [cell(V, None, 1500)]}), TABLE))
    assert (row["_row"]["live"], unknown) == (1600, False)
    row, unknown = of_row(after(previous, changes({"cells": [cell(V, 6, 1500)]}), TABLE))
    assert (row["v"], row["_row"]["live"], unknown) == (6, None, False)


def test_a_row_made_by_update_dies_with_its_last_cell() -> None:
    made = after(nothing(TABLE), changes({"cells": [cell(V, 6, 1500)]}), TABLE)
    row, _ = of_row(made)
    assert (row["_row"]["live"], shown(made.images)) == (NO_LIVENESS, [{"p": 1, "c": 1, "v": 6}])
    gone = after(made.images, changes({"cells": [cell(V, None, 1600)]}), TABLE)
    assert (shown(gone.images), gone.unknown.any()) == ([], False)
    # A write that comes late and is older than the tombstone stays deleted.
    late = after(gone.images, changes({"cells": [cell(V, 5, 1550)]}), TABLE)
    assert shown(late.images) == []


def test_a_liveness_expires() -> None:
    found = after(nothing(TABLE), changes({**insertion(1500, 100), "cells": []}), TABLE).images
    assert [shown(found, now) for now in (99, 100)] == [[{"p": 1, "c": 1}], []]


def test_entries_of_a_list_that_a_scan_showed_have_no_identity() -> None:
    previous = images(image(l=[7, 8]))
    path = uuid.UUID("50554d6e-29bb-11e5-b345-feff819cdc9f").bytes
    row, unknown = of_row(after(previous, changes({"cells": [cell(V, 1, 1500)]}), TABLE))
    assert (row["l"], row["_merge"], unknown) == ([7, 8], None, False)
    row, unknown = of_row(after(previous, changes({"cells": [cell(L, 9, 1500, path)]}), TABLE))
    assert (row["l"], unknown) == ([7, 8, 9], True)
    row, unknown = of_row(after(previous, changes({"cells": [cell(L, None, 1500, path)]}), TABLE))
    assert unknown
    overwritten = {"column": L, "timestamp": 1499, "local_deletion_time": 1}
    replaced = changes({"cells": [cell(L, 9, 1500, path)], "complex_deletions": [overwritten]})
    row, unknown = of_row(after(previous, replaced, TABLE))
    assert (row["l"], row["_merge"]["entries"], unknown) == ([9], [{"column": "l", "paths": [path]}], False)


def test_elements_of_unknown_times_are_not_compared() -> None:
    previous = images(image(z=[1, 2], v=5, _x={"z": {"d": [], "e": []}}))
    row, unknown = of_row(after(previous, changes({"cells": [cell(V, 1, 1500)]}), TABLE))
    assert (row["z"], row["_x"]["z"]["d"], unknown) == ([1, 2], [], False)
    row, unknown = of_row(after(previous, changes({"cells": [cell(Z, 0, 1500, int_bytes(3))]}), TABLE))
    assert (row["z"], row["_x"]["z"]["d"], unknown) == ([1, 2, 3], [], True)
    row, unknown = of_row(after(previous, changes(deletion(1500)), TABLE))
    assert (row["z"], unknown) == (None, False)


def test_static_cells_are_on_every_row_and_deletions_hit_what_is_there() -> None:
    previous = images(image(1, v=1, s=3), image(2, v=2, s=3))
    found = after(previous, changes({"c": None, "cells": [cell(S, 4, 1500)]}), TABLE)
    assert [(row["c"], row["s"], row["v"]) for row in found.images.to_pylist()] == [
        (None, 4, None),
        (1, 4, 1),
        (2, 4, 2),
    ]
    assert found.of_change.tolist() == [0]
    # A new row shows the static cells, though the change does not have them; untouched rows are not given.
    one = after(overlaid(previous, found.images, TABLE), changes({"c": 3, "cells": [cell(V, 9, 1600)]}), TABLE)
    assert [(row["c"], row["s"]) for row in one.images.to_pylist()] == [(None, 4), (3, 4)]
    assert one.of_change.tolist() == [1]
    gone = after(
        overlaid(previous, found.images, TABLE),
        changes({"kind": PARTITION_DELETION, "clustering": None, **deletion(1700)}),
        TABLE,
    )
    assert [row["_row"]["deleted_at"] for row in gone.images.to_pylist()] == [1700] * 3
    assert (shown(gone.images), gone.of_change.tolist()) == ([], [-1])
    # The image without clustering knows of the deletion, so that a row written before it stays dead.
    late = after(gone.images, changes({"c": 5, **insertion(1650), "cells": [cell(V, 9, 1650)]}), TABLE)
    assert shown(late.images) == []
    bounds = {"clustering": b"\1\0\0\0\4\0\0\0" + int_bytes(2) + b"\1", "range_end": b"\0\0\0\0\1"}
    hit = after(previous, changes({"kind": RANGE_DELETION, **bounds, **deletion(1700)}), TABLE)
    assert [(row["c"], row["_row"]["deleted_at"]) for row in hit.images.to_pylist()] == [(None, None), (2, 1700)]


def test_what_may_be_hidden_is_not_certain() -> None:
    """Static cells are on all rows of their partition."""
    previous = images(image(1, v=1, s=3), image(2, v=2, s=3))
    bounds = {"clustering": b"\1\0\0\0\4\0\0\0" + int_bytes(8) + b"\1", "range_end": b"\0\0\0\0\1"}
    rows = [{"c": 1, "cells": [cell(V, 4, 1500)]}, {"c": 2, "cells": [cell(V, 5, 1500)]}]
    both = changes(*rows, {"kind": RANGE_DELETION, **bounds, **deletion(1400)})

    def unknown(made: pa.RecordBatch, doubtful: list[bool]) -> dict[int | None, bool]:
        rows = merged(made, TABLE)
        mask = np.array(doubtful, np.bool_)
        found = rows_after(previous, rows, TABLE, live_known_from_us=SCAN, misfits="raw", doubtful=mask)
        return dict(zip(found.images["c"].to_pylist(), found.unknown.tolist(), strict=True))

    assert merged(both, TABLE).kind.tolist() == [RANGE_DELETION, ROW, ROW]
    assert unknown(both, [False, False, True]) == {None: False, 1: False, 2: True}
    static = changes({"c": None, "cells": [cell(S, 4, 1500)]})
    assert unknown(static, [True]) == {None: True, 1: True, 2: True}
    assert unknown(static, [False]) == {None: False, 1: False, 2: False}


def test_what_was_seen_replaces_a_guess() -> None:
    previous = images(image(1, v=5), image(2, v=5), image(3, v=5))
    guess = after(
        previous, changes(*({"c": c, "cells": [cell(V, None, 1500)], **deletion(950)} for c in (1, 2, 3))), TABLE
    )
    assert guess.unknown.tolist() == [False, True, True, True]
    seen = images(image(1, s=4), image(3, v=8, s=4))
    found = seen_instead(guess.images, seen, 2_000, TABLE)
    assert found.schema == guess.images.schema
    found.validate(full=True)
    assert shown(found) == [{"p": 1, "c": 1, "s": 4}, {"p": 1, "c": 3, "s": 4, "v": 8}]
    nameless, one, two, three = found.to_pylist()
    assert (nameless["s"], one["_row"]["live"], three["_row"]["live"]) == (4, None, None)
    assert (two["_row"]["live"], two["_merge"]["unseen_at"]) == (NO_LIVENESS, 2_000)
    assert [row["_row"]["deleted_at"] for row in (one, two, three)] == [950] * 3
    assert one["_merge"]["tombstones"][0]["timestamp"] == 1500
    # Whatever comes next finds the tombstones, and knows that the row that was not seen has no liveness.
    later = after(found, changes(*({"c": c, "cells": [cell(V, 1, 1400)]} for c in (1, 2, 3))), TABLE)
    assert shown(later.images) == [{"p": 1, "c": 1, "s": 4}, {"p": 1, "c": 3, "s": 4}]


def expiring() -> pa.RecordBatch:
    """Images of three rows whose cells expire at 100, and of their static cell, which does so, too."""
    cells = [cell(V, 5, 1500, expires_at=100)]
    cells += [cell(Z, 0, 1500, int_bytes(element), expires_at=100) for element in (1, 2)]
    rows = ({**insertion(1500, 100), "c": c, "cells": list(cells)} for c in (1, 2, 3))
    static = {"c": None, "cells": [cell(S, 3, 1500, expires_at=100)]}
    return after(nothing(TABLE), changes(static, *rows), TABLE).images


@pytest.mark.parametrize("read_at_s", [200, 99])
def test_what_expires_and_was_not_seen_hides_what_is_older(read_at_s: int) -> None:
    """Also where the read was begun before it expired, or its node's clock is ahead."""
    seen = images(image(3, v=7, _row={"writetime": 1600}, z=[2], _x={"z": {"d": [-100], "e": [100]}}))
    found = seen_instead(expiring(), seen, read_at_s * 10**6, TABLE)
    found.validate(full=True)
    assert shown(found, read_at_s) == [{"p": 1, "c": 3, "v": 7}]
    tombstones = {
        row["c"]: [(one["column"], one["path"], one["timestamp"], one["local_deletion_time"]) for one in told]
        for row in found.to_pylist()
        if (told := row["_merge"]["tombstones"]) is not None
    }
    of_set = [("z", int_bytes(element), 1500, 100) for element in (1, 2)]
    of_row = [("v", None, 1500, 100), *of_set]
    assert tombstones == {None: [("s", None, 1500, 100)], 1: of_row, 2: of_row, 3: of_set[:1]}
    lives = {row["c"]: (row["_row"]["live"], row["_merge"]["live_expires_at"]) for row in found.to_pylist()}
    ended = 1500, min(100, read_at_s)
    assert lives == {None: (None, None), 1: ended, 2: ended, 3: (1500, 100)}
    older = [cell(V, 4, 1400), *(cell(Z, 0, 1400, int_bytes(element)) for element in (1, 2))]
    rows = [{**insertion(1400), "c": c, "cells": list(older)} for c in (1, 3)]
    later = after(found, changes({"c": None, "cells": [cell(S, 4, 1400)]}, *rows), TABLE)
    assert shown(later.images, read_at_s + 1) == [{"p": 1, "c": 3, "v": 7}]
    assert later.images["z"].to_pylist()[-1] == [2]
    newer = after(later.images, changes({"cells": [cell(V, 6, 1501)]}), TABLE)
    assert shown(newer.images, 200)[0] == {"p": 1, "c": 1, "v": 6}


def test_what_was_seen_at_its_own_time_or_at_an_unknown_one_leaves_no_tombstone() -> None:
    """Written again with the same timestamp it lives longer; Cassandra 4 does not tell the times of elements."""
    times = {"z": {"d": [], "e": []}}
    seen = images(*(image(c, v=5, _row={"writetime": 1500, "expires_at": 300}, z=[1, 2], _x=times) for c in (1, 2, 3)))
    found = seen_instead(expiring(), seen, 200 * 10**6, TABLE)
    assert [row["_merge"]["tombstones"] for row in found.to_pylist()[1:]] == [None] * 3
    again = after(found, changes({"cells": [cell(V, 4, 1400)]}), TABLE)
    assert shown(again.images, 200)[0] == {"p": 1, "c": 1, "v": 5}
    assert again.images["z"].to_pylist()[-1] == [1, 2]


def test_entries_of_a_list_that_expire_and_are_not_there_leave_tombstones_where_they_have_an_identity() -> None:
    path = uuid.UUID("50554d6e-29bb-11e5-b345-feff819cdc9f").bytes
    entry = {"cells": [cell(L, 9, 1500, path, expires_at=100)]}
    known = after(nothing(TABLE), changes(entry), TABLE).images
    found = seen_instead(known, nothing(TABLE), 200 * 10**6, TABLE)
    told = found.to_pylist()[-1]["_merge"]["tombstones"]
    assert [(one["column"], one["path"], one["timestamp"]) for one in told] == [("l", path, 1500)]
    nameless = images(image(l=[9], _row={"writetime": 1500, "expires_at": 100}))
    found = seen_instead(nameless, nothing(TABLE), 200 * 10**6, TABLE)
    assert found.to_pylist()[0]["_merge"]["tombstones"] is None


def test_an_entry_that_was_read_and_is_named_by_its_change_is_one() -> None:
    """Only a read of the source makes it certain; where none is to be had it is there once."""
    path = uuid.UUID("50554d6e-29bb-11e5-b345-feff819cdc9f").bytes
    read = images(image(l=[8, 9, 9], _row={"writetime": 1500}))
    found = after(read, changes({"cells": [cell(L, 9, 1500, path)]}), TABLE)
    assert (found.images["l"].to_pylist()[-1], found.unknown.tolist()[-1]) == ([8, 9], True)
    older = after(read, changes({"cells": [cell(L, 9, 1501, path)]}), TABLE)
    assert older.images["l"].to_pylist()[-1] == [8, 9, 9, 9]


def test_a_value_that_no_lake_type_holds_is_refused_or_kept() -> None:
    rows = merged(changes({"cells": [cell(V, 1, 1500) | {"value": b""}]}), TABLE)
    with pytest.raises(UnrepresentableValueError, match=r"column v, partition key 0x00000001, clust.*empty"):
        row_images_of(rows, TABLE, "error")
    kept = row_images_of(rows, TABLE, "raw")
    assert kept.to_pylist()[0]["_x"]["v"]["raw"] == b""
    again = change_rows_of(kept, TABLE).to_arrow()
    assert again["cells"].to_pylist() == rows.to_arrow()["cells"].to_pylist()


def test_a_row_that_was_seen_with_cells_is_not_proven_to_have_an_old_liveness() -> None:
    rows = [{**insertion(at, ends), "c": c, "cells": [cell(V, 5, 1500)]} for c, at, ends in LIVENESSES]
    known = after(nothing(TABLE), changes(*rows), TABLE).images
    seen = images(*(image(c, v=5, _row={"writetime": 1500}) for c, *_ in LIVENESSES), image(9))
    found = seen_instead(known, seen, 200 * 10**6, TABLE)
    lives = [row["_row"]["live"] for row in found.to_pylist() if row["c"] is not None]
    assert lives == [1100, 1200, 1100], "it stays when the cells expire"
    for value, expected in ((None, [True, False, True]), (6, [False] * 3)):
        ours = changes(*({"c": c, "cells": [cell(V, value, 1600)]} for c, *_ in LIVENESSES))
        later = after(found, ours, TABLE, deletions_known_from_us=1200)
        assert [u for c, u in zip(later.images["c"].to_pylist(), later.unknown, strict=True) if c] == expected
    without_cells = images(*(image(c) for c, *_ in LIVENESSES))
    found = seen_instead(known, without_cells, 200 * 10**6, TABLE)
    assert [row["_row"]["live"] for row in found.to_pylist() if row["c"] is not None] == [1100, 1200, None]


LIVENESSES = ((1, 1100, None), (2, 1200, None), (3, 1100, 100))
