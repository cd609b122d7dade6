"""A bootstrap whose marks are put again, or too late: it ends once, and ends no other."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringsync.changes.batch import ChangeRows
from ringsync.changes.identity import TableVersion
from ringsync.config import load_config
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.ledger.passes import BootstrapReplacedError, Pass, get_pass, mark, pass_folder, pass_numbers, put_pass
from ringsync.ledger.table_versions import version_of
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import read_snapshot
from ringsync.replica.folders import base_folder
from ringsync.ring.tokens import TokenRange
from ringsync.state.bootstrap import PUBLISHING, SCANNING, Bootstrap, CommittedRange
from ringsync.steps.application import Application, StepError
from ringsync.steps.bootstrap.cancel import end
from ringsync.steps.bootstrap.prepare import begin_pass
from ringsync.steps.bootstrap.publish import Outputs, publish
from ringsync.steps.passes.follow_ups import FollowUps
from ringsync.steps.passes.make import PassContext, commit, make_outputs
from ringsync.steps.passes.rows_after import AfterReader
from ringsync.steps.sync_plan import SyncTable
from ringsync.streams.files import FileStream, StreamDamagedError, StreamError
from tests.bounded import as_long_as
from tests.steps.late_files import Write, change_rows
from tests.steps.test_bootstrap_begins_back import OneByOne, follow_ups, rows_of_replica
from tests.steps.test_close import NOW, RING, TABLE
from tests.steps.test_close import Lake as Store

TOPIC = "test.shop.t"
COPIED = 900
"""``id`` of the row that a bootstrap copies."""


def now_ms() -> int:
    return int(time.time() * 1000)


def cycle(close: FollowUps) -> None:
    """What ``bucket_close`` does for a table of which no rows are settled, in as many cycles as the replica needs."""
    for _ in as_long_as(lambda: close.catch_up() is False):
        pass
    close.tell_missed()


class Lake(Store):
    """A table that is followed and copied, without cluster and Spark."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config = load_config(self.conf)
        version_of(self.store, TABLE)
        self.close = follow_ups(self)

    def change(self, number: int, close: FollowUps | None = None) -> None:
        """A pass of one row."""
        self.write([Write(number, number, "c", NOW.start * 1000 + number)], close)

    def write(self, writes: Sequence[Write], close: FollowUps | None = None) -> None:
        """A pass as ``bucket_close`` makes it, and what follows from it."""
        close = close or self.close
        close.catch_up()
        reader = AfterReader(load_config(self.conf), close._table.version, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
        name = f"{close.last:08x}"
        context = PassContext(
            reader, close.topic, close.last + 1, name, close.bootstrap, False, {}, close.schema_version
        )
        rows = change_rows(writes, close._table.schema)
        made = make_outputs(context, self.store, {str(NOW): rows}, "0000").outputs
        assert made is not None
        committed = commit(self.store, context, [made], {})
        assert committed is not None
        close.made(committed)
        cycle(close)

    def plan(self, name: str, state: str = SCANNING) -> Any:
        bootstrap = Bootstrap(TABLE.keyspace, TABLE.name, name, state, "{}", "run", int(time.time()))
        scan = SimpleNamespace(table=TABLE, selection=SimpleNamespace(to_json=lambda: "{}"), element_times=True)
        return SimpleNamespace(scan=scan, bootstrap=bootstrap, run="run", topic=TOPIC)

    def begin(self, name: str, state: str = SCANNING) -> int:
        """What ``prepare`` and ``scan`` do, of whom others take nothing."""
        plan = self.plan(name, state)
        return begin_pass(self.store, plan, plan.bootstrap, lambda: None)

    def scan(self, name: str, begin: int) -> list[CommittedRange]:
        """What the tasks of a scan have written: one range of one row."""
        rows = change_rows([Write(COPIED, 1, "base", NOW.start * 1000)], TABLE)
        version = TableVersion.first(TABLE)
        reader = AfterReader(load_config(self.conf), version, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
        context = PassContext(reader, TOPIC, begin, "part-0001", "", False, {}, 1)
        made = make_outputs(context, self.store, {str(NOW): rows}, name).outputs
        assert made is not None
        for key in (made.changes, *made.digests.values()):
            self.store.delete(key)
        writer = DataFileWriter(row_image_schema(TABLE))
        writer.add(row_images_of(ChangeRows.of(rows), TABLE, "raw"))
        file, data = writer.finish(f"part-{name}-0.parquet", now_ms())
        self.store.put(f"{base_folder(TABLE.keyspace, TABLE.name)}/{file.name}", data)
        outputs = Outputs((file,), (made.part,)).to_json()
        return [CommittedRange(TokenRange(-(2**63), 2**63 - 1), 1, 1, 1, 1, 1, outputs)]

    def publish_scan(self, name: str, begin: int, ranges: list[CommittedRange]) -> None:
        publish(self.store, self.config, self.plan(name), lambda: None, ranges, begin, RING.ring.digest)

    def cutover(self, name: str) -> int:
        return mark(self.store, TABLE.table_id, "cutover", name, now_ms())

    def kinds(self) -> list[str]:
        return [get_pass(self.store, TABLE.table_id, n).kind for n in pass_numbers(self.store, TABLE.table_id)]

    def messages(self) -> list[int]:
        """The rows' ``id``, in the order of the stream."""
        stream = FileStream(self.store, TOPIC)
        return [one["key"]["id"] for bucket in stream.folders() for one in stream.read(bucket)]

    def base_version(self) -> int | None:
        return read_snapshot(self.store, base_folder(TABLE.keyspace, TABLE.name)).version


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_a_drain_that_was_killed_behind_its_cutover_is_repeated(lake: Lake) -> None:
    """``bucket_close`` has gone on meanwhile; the DAG is triggered again and goes on with the same bootstrap."""
    lake.change(1)
    begin = lake.begin("b1")
    lake.change(2)
    ranges = lake.scan("b1", begin)
    lake.publish_scan("b1", begin, ranges)
    ended = lake.cutover("b1")
    lake.change(3)
    assert lake.begin("b1", PUBLISHING) == begin
    lake.change(4)
    lake.publish_scan("b1", begin, ranges)
    assert lake.cutover("b1") == ended
    lake.change(5)
    # After the cut-over one says that nothing was missed.
    assert lake.kinds() == ["changes", "begin", "changes", "rows", "cutover", *["changes"] * 4]
    assert lake.messages() == [1, COPIED, 2, 3, 4, 5]
    assert {row for row, _ in rows_of_replica(lake)} == {1, COPIED, 2, 3, 4, 5}


def test_a_drain_that_is_repeated_when_the_marks_are_forgotten_begins_nothing(lake: Lake) -> None:
    lake.change(1)
    assert lake.begin("b1", PUBLISHING) == 0
    assert lake.kinds() == ["changes"]


def test_rows_that_are_not_in_their_bucket_are_not_published(lake: Lake) -> None:
    """A pass whose bucket cannot be made would hold up all passes behind it."""
    begin = lake.begin("b1")
    ranges = lake.scan("b1", begin + 1)
    before = lake.base_version()
    with pytest.raises(StepError, match=r"is not there.*nothing was published: bootstrap anew with restart"):
        lake.publish_scan("b1", begin, ranges)
    parts = Outputs.from_json(ranges[0].outputs).parts
    with pytest.raises(StreamDamagedError, match="is not there"):
        mark(lake.store, TABLE.table_id, "rows", "b1", now_ms(), parts, topic=TOPIC)
    assert (lake.kinds(), lake.base_version()) == (["begin"], before)


def test_who_is_slow_to_cancel_a_bootstrap_does_not_end_the_next(lake: Lake) -> None:
    lake.begin("b1")
    lake.change(1)
    begin = 0

    def latest_is_still_b1() -> None:
        """What the state says: the next has begun meanwhile."""
        nonlocal begin
        begin = lake.begin("b2")
        raise BootstrapReplacedError("b2 has begun")

    with pytest.raises(BootstrapReplacedError):
        end(lake.config, lake.store, TABLE, "b1", latest_is_still_b1)
    lake.change(2)
    assert lake.close.bootstrap == "b2"
    lake.publish_scan("b2", begin, lake.scan("b2", begin))
    lake.cutover("b2")
    lake.change(3)
    assert lake.messages() == [1, COPIED, 2, 3]


def test_what_was_cancelled_replaces_no_base(lake: Lake) -> None:
    begin = lake.begin("b1")
    ranges = lake.scan("b1", begin)
    before = lake.base_version()
    mark(lake.store, TABLE.table_id, "cutover", "b1", now_ms(), check=lambda: None)
    with pytest.raises(BootstrapReplacedError, match="b1 was cancelled"):
        lake.publish_scan("b1", begin, ranges)
    assert lake.base_version() == before


def again(lake: Lake) -> FollowUps:
    """Who serves the table that was dropped and created again."""
    table = SyncTable(version_of(lake.store, replace(TABLE, table_id="b" * 32)), TOPIC, False)
    application = Application("close", str(lake.conf), lake.config, lake.store, None, "run", argparse.Namespace())
    made = FollowUps(application, table, OneByOne(), None)  # type: ignore[arg-type]
    made.ring = RING
    return made


def test_a_damaged_bucket_of_a_table_that_is_gone_holds_up_nobody(
    lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.change(1)
    begin = lake.begin("b1")
    for number in (2, 3):
        lake.change(number)
    bucket = lake.store.list(f"streams/bootstrap.{TOPIC}/{pass_folder(begin + 1)}/")
    lake.store.delete(next(stat.key for stat in bucket if stat.key.endswith(".avro")))
    mark(lake.store, TABLE.table_id, "cutover", "b1", now_ms(), check=lambda: None)
    with pytest.raises(StreamDamagedError):
        lake.close.catch_up()
    lake.change(4, again(lake))
    assert lake.messages() == [1, 3, 4]
    told = capsys.readouterr().out
    assert f"shop.t (table id {TABLE.table_id}) is gone" in told
    assert pass_folder(begin + 1) in told


def test_a_table_that_was_created_again_and_whose_topics_owners_are_lost_says_what_to_do(lake: Lake) -> None:
    """The passes of both count from 1."""
    for number in range(1, 7):
        lake.change(number)
    new = "b" * 32
    assert put_pass(lake.store, Pass(1, "begin", new, now_ms(), "b9"))
    for stat in lake.store.list(f"streams/{TOPIC}/tables/"):
        lake.store.delete(stat.key)
    close = again(lake)
    lake.change(9, close)
    mark(lake.store, new, "cutover", "b9", now_ms(), check=lambda: None)
    for _ in range(2):
        with pytest.raises(StepError, match="drop the table and create it again"):
            close.catch_up()
    assert lake.store.list(f"streams/bootstrap.{TOPIC}/{pass_folder(2)}/"), "nothing is removed"

    table = SyncTable(version_of(lake.store, replace(TABLE, table_id="c" * 32)), TOPIC, False)
    third = FollowUps(close._application, table, OneByOne(), None)  # type: ignore[arg-type]
    third.ring = RING
    lake.change(7, third)
    assert lake.messages() == [1, 2, 3, 4, 5, 6, 7]


def test_the_bucket_of_another_table_does_not_count_as_published(lake: Lake) -> None:
    lake.change(1)
    part = FileStream(lake.store, TOPIC).open_part(pass_folder(9), "x", 1).finish()
    assert put_pass(lake.store, Pass(1, "changes", "b" * 32, now_ms(), parts=(part,)))
    lake.store.delete(f"streams/{TOPIC}/tables/000001.json")
    close = again(lake)
    with pytest.raises(StreamError):
        close.catch_up()
    assert close.status()["published_pass"] == 0
