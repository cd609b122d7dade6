"""What has expired before its message is made: who keeps what was written last learns that it was written."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pytest

from ringsync.changes.batch import ChangeRows
from ringsync.images.after import rows_after
from tests.changes.test_after import (
    SCAN,
    TABLE,
    L,
    S,
    V,
    Z,
    cell,
    changes,
    image,
    images,
    insertion,
    int_bytes,
    nothing,
)
from tests.newest_model import NewestModel
from tests.reconciled import merged
from tests.stream_model import StreamModel
from tests.streams.test_change_messages import Change, decoded_messages, messages_of

NOW_S = 200
ENTRY = uuid.UUID("50554d6e-29bb-11e5-b345-feff819cdc9f").bytes


def written(at: int, expires_at: int | None, value: int, *, inserted: bool) -> ChangeRows:
    """A row and the static cell of its partition, with cells in all columns."""
    cells = [cell(L, value, at, ENTRY, expires_at), cell(V, value, at, None, expires_at)]
    cells.append(cell(Z, value, at, int_bytes(7), expires_at))
    row = {"cells": cells, "write_time": at} | (insertion(at, expires_at) if inserted else {})
    static = {"c": None, "cells": [cell(S, value, at, None, expires_at)], "write_time": at}
    return merged(changes(static, row), TABLE)


def told(rows: ChangeRows, after: pa.RecordBatch, *, visible: bool, now_s: int = NOW_S) -> list[Change]:
    """The messages of a static cell and a row."""
    shown = [visible] * len(rows)
    return decoded_messages(messages_of(rows, after, shown, TABLE, processed_at_ms=now_s * 1000), TABLE)


def first_messages(*, inserted: bool) -> list[Change]:
    """Of what was written for ever."""
    rows = written(1_000, None, 1, inserted=inserted)
    after = rows_after(nothing(TABLE), rows, TABLE, live_known_from_us=SCAN, misfits="raw").images
    return told(rows, after, visible=True)


def last_written(messages: list[Change]) -> Any:
    """Values, as who keeps what was written last has them."""
    rows = StreamModel(TABLE, True).apply_all(messages).rows(NOW_S)
    return {key: {name: one[0] for name, one in cells.items()} for key, cells in rows.items()}


@pytest.mark.parametrize("ends_s", [100, NOW_S + 2])
@pytest.mark.parametrize("inserted", [True, False])
def test_what_nothing_is_left_of_is_told_by_its_times(*, inserted: bool, ends_s: int) -> None:
    """Also where the node's clock is ahead of ours, and it has expired only there."""
    first = first_messages(inserted=inserted)
    assert last_written(first) == {(1, 1): {"s": 1, "v": 1, "z": [7], "l": [1]}}
    again = told(
        written(2_000, ends_s, 2, inserted=inserted), pa.concat_batches([images(image(), image())]), visible=False
    )
    assert [one["value"]["op"] for one in again] == ["d", "d"]
    assert last_written(first + again) == last_written(again + first + again) == {}
    assert last_written(again + first) == {(1, 1): {"l": [1]}}, "of lists the newest message has the whole"
    assert NewestModel(TABLE).apply_all(first + again).rows(NOW_S) == {}
    row = again[1]["value"]["cells"]
    assert row["_row"] == (
        {"writetime": 2_000, "expires_at": min(ends_s, NOW_S), "deleted_at": None} if inserted else None
    )
    assert row["v"] == {"writetime": None, "expires_at": None, "deleted_at": 2_000, "raw": None}


@pytest.mark.parametrize("inserted", [True, False])
def test_what_was_read_instead_hides_no_time(*, inserted: bool) -> None:
    """Another has written one column again; of the others nothing is left."""
    first = first_messages(inserted=inserted)
    seen = images(image(None), image(1, v=9, _row={"writetime": 3_000}))
    again = told(written(2_000, 100, 2, inserted=inserted), seen, visible=True)
    row = again[1]["value"]
    assert (row["after"]["v"], row["cells"]["v"]["deleted_at"]) == (9, None)
    assert row["cells"]["_row"] is None, "it has ended, and the row is there all the same"
    assert last_written(first + again) == {(1, 1): {"v": 9}}
    assert last_written(again + first)[1, 1] == {"v": 9, "l": [1]}, "of lists the newest message has the whole"


def test_what_is_held_is_not_told_as_deleted() -> None:
    rows = written(2_000, 100, 2, inserted=True)
    after = rows_after(nothing(TABLE), rows, TABLE, live_known_from_us=SCAN, misfits="raw").images
    static, row = (one["value"]["cells"] for one in told(rows, after, visible=True))
    times = {"writetime": 2_000, "expires_at": 100, "deleted_at": None, "raw": None}
    assert (static["s"], row["v"]) == (times, times)
    assert [one["deleted_at"] for name in "lz" for one in row[name]["elements"]] == [None, None]


def test_what_has_not_expired_and_is_hidden_is_not_told() -> None:
    """What hides it is."""
    (static, row) = told(written(2_000, NOW_S + 3_600, 2, inserted=True), images(image(), image()), visible=False)
    for message in (static, row):
        assert set(message["value"]["cells"].values()) == {None}
