"""What a bootstrap has copied of replicas that lacked a change comes no later in the stream than that change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.images import row_images_of
from ringsync.replica.base import base_folder
from ringsync.replica.data_files import DataFileWriter
from ringsync.ring.tokens import TokenRange
from ringsync.schema.row_image import row_image_schema
from ringsync.state.bootstrap import CommittedRange
from ringsync.steps.bootstrap_publish import Outputs, file_prefix
from ringsync.steps.follow_ups import FollowUps
from ringsync.streams.files import FileStream, StreamConflictError
from ringsync.streams.messages import snapshot_messages
from ringsync.streams.pass_log import get_pass, pass_bucket, pass_numbers
from tests.newest_model import NewestModel
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import follow_ups, rows_of_replica
from tests.steps.test_bootstrap_marks import TOPIC, Lake, now_ms
from tests.steps.test_close import NOW, TABLE
from tests.stream_model import StreamModel

AT = NOW.start * 1000
OLD = [Write(1, 1, "old", AT), Write(2, 1, "old", AT), Write(3, 1, "old", AT), Write(4, 1, "old", AT)]
CHANGES = [
    Write(1, 1, "new", AT + 500),
    Write(2, 1, None, AT + 600),
    Write(3, None, None, AT + 700),
    Write(5, 1, "not copied", AT + 800),
]
"""Only one replica had these when they were published; the scan has read others."""
RIGHT = {(1, 1): "new", (4, 1): "old", (5, 1): "not copied"}


def copied(lake: Lake, name: str, begin: int, writes: Sequence[Write]) -> list[CommittedRange]:
    """What the tasks of a scan write that has read these."""
    images = row_images_of(change_rows(writes, TABLE), TABLE, "raw")
    part = FileStream(lake.store, TOPIC).open_part(pass_bucket(begin), f"{name}-x", 1)
    told: dict[str, Any] = {"hostname": "b", "processed_at_ms": now_ms(), "schema_version": 1, "version": "0"}
    part.add(snapshot_messages(images, TABLE, "test", "exact", queries=None, **told))
    writer = DataFileWriter(row_image_schema(TABLE))
    writer.add(images)
    file, data = writer.finish(f"{file_prefix(name)}0.parquet", now_ms())
    lake.store.put(f"{base_folder(TABLE.keyspace, TABLE.name)}/{file.name}", data)
    outputs = Outputs((file,), (part.finish(),)).to_json()
    whole = TokenRange(-(2**63), 2**63 - 1)
    return [CommittedRange(whole, 1, len(writes), len(writes), 1, 1, outputs)]


def bootstrap(lake: Lake, name: str, writes: Sequence[Write]) -> None:
    """Copy the table; who follows it has not seen that yet."""
    begin = lake.begin(name)
    lake.publish_scan(name, begin, copied(lake, name, begin, writes))
    lake.cutover(name)


def messages(lake: Lake) -> list[dict[str, Any]]:
    stream = FileStream(lake.store, TOPIC)
    return [message for bucket in stream.buckets() for message in stream.read(bucket)]


def newest(lake: Lake) -> dict[tuple[int, int], str]:
    """What a consumer has that takes the newest."""
    rows = NewestModel(TABLE).apply_all(messages(lake)).rows(int(time.time()))
    return {(key[0], key[1]): row["v"] for key, row in rows.items()}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path)
    bootstrap(lake, "b1", OLD)
    lake.close.catch_up()
    lake.write(CHANGES)
    assert rows_of_replica(lake) == newest(lake) == RIGHT
    return lake


def test_whoever_takes_the_newest_keeps_what_the_scan_has_missed(lake: Lake) -> None:
    bootstrap(lake, "b2", OLD)
    lake.close.catch_up()
    assert rows_of_replica(lake) == newest(lake) == RIGHT
    everything = StreamModel(TABLE, True).apply_all(messages(lake)).rows(int(time.time()))
    assert len(everything) == len(RIGHT)
    ids = [one["value"]["source"]["event_id"] for one in messages(lake) if one["value"]["op"] != "r"]
    assert len(ids) == len(set(ids)), "who drops repeats drops none of them"


def test_it_is_told_once(lake: Lake) -> None:
    bootstrap(lake, "b2", OLD)
    lake.close.catch_up()
    there = messages(lake)
    for close in (lake.close, follow_ups(lake)):
        close.catch_up()
    assert messages(lake) == there
    bootstrap(lake, "b3", OLD)
    lake.close.catch_up()
    assert newest(lake) == RIGHT


def test_what_was_copied_as_it_is_is_not_told_again(lake: Lake) -> None:
    bootstrap(lake, "b2", [Write(1, 1, "new", AT + 500), *OLD[3:], CHANGES[3]])
    before = len(messages(lake))
    lake.close.catch_up()
    assert len(messages(lake)) == before
    assert newest(lake) == RIGHT


def test_another_process_is_faster(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has told them: its pass has the number, and there is no other."""
    bootstrap(lake, "b2", OLD)
    made = FollowUps._told_again

    def slower(self: FollowUps, *arguments: Any) -> bool:
        monkeypatch.setattr(FollowUps, "_told_again", made)
        lake.change(6, follow_ups(lake))
        return made(self, *arguments)

    monkeypatch.setattr(FollowUps, "_told_again", slower)
    with pytest.raises(StreamConflictError):
        lake.close.catch_up()
    lake.close.catch_up()
    assert newest(lake) == {**RIGHT, (6, 6): "c"}
    told = [get_pass(lake.store, TABLE.table_id, one).counts for one in pass_numbers(lake.store, TABLE.table_id)]
    assert sum("told_again" in counts for counts in told) == 1
