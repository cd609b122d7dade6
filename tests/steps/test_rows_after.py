"""Rows after changes that come from the replica: what passes before have deleted does not live again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ringsync.changes.identity import TableVersion
from ringsync.config import load_config
from ringsync.images.schema import row_image_schema
from ringsync.ledger.passes import deletions_key
from ringsync.ledger.staging import encode_rows
from ringsync.steps.passes.rows_after import AfterReader, images_after
from ringsync.storage.local import LocalStore
from tests.reconciled import merged, merged_batch
from tests.replica.bases import state_of, write_base
from tests.steps.late_files import RangeDelete, Write, change_rows
from tests.steps.test_close import RING, TABLE

T = 1_700_000_000_000_000


@pytest.fixture
def reader(tmp_path: Path) -> AfterReader:
    """Of a table whose replica has no row."""
    conf = tmp_path / "ringsync.yaml"
    conf.write_text(
        yaml.safe_dump({"server_name": "test", "cassandra": {"contact_points": ["nobody"]}, "store": {"url": "lake"}})
    )
    write_base(tmp_path / "lake", TABLE, row_image_schema(TABLE).empty_table())
    version, state = TableVersion.first(TABLE), state_of(tmp_path / "lake", TABLE)
    return AfterReader(load_config(conf), version, "replica", RING, control=None, replica=state)  # type: ignore[arg-type]


def test_a_row_that_a_pass_before_has_deleted_is_not_there(reader: AfterReader, tmp_path: Path) -> None:
    deleted, left = Write(1, 1, "deleted", T), Write(1, 2, "left", T + 20)
    in_range, outside, other = Write(2, 3, "deleted", T), Write(2, 5, "left", T), Write(3, 1, "left", T)
    before = change_rows([Write(1, None, None, T + 10), RangeDelete(2, 2, 4, T + 10)], TABLE)
    key = deletions_key(TABLE.table_id, 1, "x")
    LocalStore(tmp_path / "lake").put(key, encode_rows(reader.version.to_store(merged_batch(before, TABLE))))
    own = RangeDelete(3, 7, 9, T + 1)
    rows = merged(change_rows([deleted, left, in_range, outside, other, own], TABLE), TABLE)
    known = images_after(replace(reader, deletions=((key, T + 10),)), rows)
    shown = {
        (image["id"], image["seq"]): image["v"] if visible else None
        for image, visible, kind in zip(known.images.to_pylist(), known.visible, rows.kind.tolist(), strict=True)
        if kind == 0
    }
    assert shown == {(1, 1): None, (1, 2): "left", (2, 3): None, (2, 5): "left", (3, 1): "left"}
    assert images_after(reader, rows).visible.sum() == 5
