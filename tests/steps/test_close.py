"""Publishing of settled rows: what is published once is known for as long as its digests are kept, in any bucket."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ringsync.changes.batch import ChangeRows
from ringsync.changes.identity import TableVersion, UnresolvedRowsError
from ringsync.config import load_config
from ringsync.cql.cells import raw_values
from ringsync.cql.types import Native
from ringsync.ledger.passes import LATE, Pass, are_published, digest_halves, read_digests
from ringsync.ledger.staging import Bucket, decode_rows, encode_blocks, rows_key
from ringsync.ring.ranks import ranked
from ringsync.ring.ring import Host, Replication, RingSnapshot
from ringsync.ring.tokens import WHOLE_RING
from ringsync.schema.table import Column, TableSchema
from ringsync.status import LATE_ROWS
from ringsync.steps.application import StepError
from ringsync.steps.close.agreement import Reading, Settled
from ringsync.steps.close.bucket_close import REPEATED_MS, count, published_before, published_elsewhere
from ringsync.steps.close.close_task import SliceOfBucket, SliceResult, StagedFiles, close_slice, forget_waiting
from ringsync.steps.late.late_pass import by_bucket
from ringsync.steps.passes import make as passes
from ringsync.steps.passes.make import PassContext, commit, make_outputs
from ringsync.steps.passes.rows_after import After, AfterReader
from ringsync.storage.port import NotFoundError
from ringsync.streams.files import FileStream
from ringsync.streams.messages import envelope_schema, key_schema
from tests.mortal_store import MortalStore
from tests.steps.late_files import Write, change_rows

INT = Native("int")
TABLE = TableSchema(
    "shop",
    "t",
    "5" * 32,
    (
        Column("id", "partition_key", INT),
        Column("seq", "clustering", INT),
        Column("v", "regular", Native("text")),
    ),
)
VERSION = TableVersion.first(TABLE)
RING = ranked(
    RingSnapshot((Host("a", "127.0.0.1", 9042, "dc", "r1", (0,), True),), Replication("SimpleStrategy", (("", 1),)))
)
HOUR_MS = 3_600_000
NOW = Bucket(4_000_000_000_000 // HOUR_MS * HOUR_MS, 60_000)
"""Long after any base that a test makes: of rows that are older the source would be asked, which most tests lack."""
LATER = Bucket(NOW.start + HOUR_MS, 60_000)
SHORT = Bucket(NOW.start + 20_000, 10_000)


class Lake:
    """A store, and the passes that were made in it."""

    def __init__(self, folder: Path) -> None:
        document = {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
        self.conf = folder / "ringsync.yaml"
        self.conf.write_text(yaml.safe_dump(document))
        self.store = MortalStore(folder / "lake")
        self.passes: list[Pass] = []
        self.tries = 0
        schemas = (make(TABLE, "test", "exact") for make in (key_schema, envelope_schema))
        FileStream(self.store, "test.shop.t").put_schemas(1, *schemas)

    def publish(
        self, bucket: Bucket, writes: list[Write], *, by_arrival: bool, everywhere: bool = False
    ) -> SliceResult:
        """Publish what these writes have left in a bucket.

        :param everywhere: all replicas have them
        """
        number = len(self.passes) + 1
        self.tries += 1
        data, places = encode_blocks([VERSION.to_store(change_rows(writes, TABLE))], rows_key("a", number, "file"))
        self.store.put(places[0].key, data)
        reading = Reading(((places[0], "a"),), WHOLE_RING.unwrap(), len(writes))
        settled = settled_in(bucket, everywhere=everywhere)
        published = published_before(self.passes, settled, by_arrival)
        elsewhere = published_elsewhere(self.passes, settled, published)
        context = self.context(late=False)
        slices = [SliceOfBucket(str(bucket), (reading,), published, elsewhere)]
        self.last_task = (context, self.store, StagedFiles(self.store, VERSION), "0000", slices, by_arrival)
        found = close_slice(*self.last_task)
        if found.outputs:
            made = commit(self.store, context, found.outputs, {})
            assert made is not None
            self.passes.append(made)
        return found

    def publish_late(self, writes: list[Write], closed_until_ms: int) -> Pass:
        """Publish what these writes have left as late rows, without a look at what was published before."""
        self.tries += 1
        rows = VERSION.to_store(change_rows(writes, TABLE))
        context = self.context(late=True)
        outputs = make_outputs(context, self.store, by_bucket(rows, NOW.length, closed_until_ms), "late").outputs
        assert outputs is not None
        made = commit(self.store, context, [outputs], {})
        assert made is not None
        self.passes.append(made)
        return made

    def context(self, *, late: bool) -> PassContext:
        reader = AfterReader(load_config(self.conf), VERSION, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
        return PassContext(reader, "test.shop.t", len(self.passes) + 1, f"{self.tries:08x}", "", late, {}, 1)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def settled_in(bucket: Bucket, *, everywhere: bool, readings: tuple[tuple[int, Reading], ...] = ()) -> Settled:
    return Settled(bucket, readings, np.zeros((1, 3), np.uint64), frozenset(), everywhere)


def outcome(found: SliceResult) -> tuple[int, int]:
    return (sum(output.rows for output in found.outputs), found.published_before)


OF_ITS_TIME = Write(1, 1, "x", NOW.start * 1000 + 5)
LONG_AGO, AHEAD = Write(1, 2, "x", 1000), Write(2, 1, "x", LATER.start * 1000 + 7)
FRESH = Write(3, 1, "x", LATER.start * 1000 + 8)


def test_a_copy_that_comes_hours_later_is_known(lake: Lake) -> None:
    """The bucket of arrival of each node's copy is another one."""
    assert outcome(lake.publish(NOW, [OF_ITS_TIME, LONG_AGO, AHEAD], by_arrival=True)) == (3, 0)
    assert outcome(lake.publish(NOW, [OF_ITS_TIME, LONG_AGO], by_arrival=True)) == (0, 2)
    assert outcome(lake.publish(LATER, [OF_ITS_TIME, LONG_AGO, AHEAD, FRESH], by_arrival=True)) == (1, 3)
    assert [list(one.digests) for one in lake.passes] == [[LATE], [LATE]]


def test_what_was_written_in_the_future_is_known_when_its_time_has_come(lake: Lake) -> None:
    assert outcome(lake.publish(NOW, [OF_ITS_TIME, AHEAD], by_arrival=False)) == (2, 0)
    assert outcome(lake.publish(LATER, [AHEAD, FRESH], by_arrival=False)) == (1, 1)
    assert [sorted(one.digests) for one in lake.passes] == [[str(NOW), LATE], [str(LATER)]]


def test_what_was_published_long_ago_need_not_be_read_where_all_replicas_agree(lake: Lake) -> None:
    lake.publish(NOW, [LONG_AGO, OF_ITS_TIME], by_arrival=False)
    lake.publish(LATER, [Write(1, 2, "x", 2000)], by_arrival=False)
    first, second = lake.passes
    bucket = Bucket(LATER.start + HOUR_MS, 60_000)
    for quiet_ms in (0, HOUR_MS):  # the sync may have stood still meanwhile
        last_ms = bucket.start - 1 - quiet_ms
        known = [replace(first, created_at_ms=last_ms - REPEATED_MS - 1), replace(second, created_at_ms=last_ms)]
        expected = {False: (*first.digests[LATE], *second.digests[LATE]), True: second.digests[LATE]}
        for everywhere, keys in expected.items():
            assert published_before(known, settled_in(bucket, everywhere=everywhere), False) == keys


def test_what_a_writer_has_repeated_is_known_to_a_run_that_begins_later(lake: Lake) -> None:
    """The repetition arrives in a later bucket, after the row was published. A run that begins minutes later reads that
    bucket again: it published the row a second time."""
    assert outcome(lake.publish(NOW, [OF_ITS_TIME], by_arrival=True, everywhere=True)) == (1, 0)
    lake.passes = [replace(lake.passes[0], created_at_ms=lake.passes[0].created_at_ms - REPEATED_MS - 1)]
    started_ms = lake.passes[0].created_at_ms + 5_000
    bucket = Bucket(started_ms // NOW.length * NOW.length + NOW.length, NOW.length)
    assert outcome(lake.publish(bucket, [OF_ITS_TIME], by_arrival=True, everywhere=True)) == (0, 1)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("by_arrival", [False, True])
def test_what_was_published_as_late_while_it_waited_in_an_open_bucket_is_known(
    lake: Lake, by_arrival: bool, everywhere: bool
) -> None:
    """A backfill reads it again; or a close was killed after it had the row wait. The close looked only at its own
    bucket, and the late row's digest is kept with the bucket of its write time: the row was published twice."""
    began_ms = int(time.time() * 1000)
    bucket = Bucket(began_ms // NOW.length * NOW.length, NOW.length)
    own = Write(1, 1, "x", bucket.start * 1000 + 5)
    ahead = Write(2, 1, "x", (bucket.start + 60 * NOW.length) * 1000)
    past = Write(3, 1, "x", (bucket.start - 20 * NOW.length) * 1000)  # by arrival; or it was until lately
    fresh = [replace(write, seq=2) for write in (own, ahead, past)]
    made = lake.publish_late([own, ahead, past], bucket.start - 4 * NOW.length)
    assert len(made.digests) == 3
    found = lake.publish(bucket, [own, ahead, past, *fresh], by_arrival=by_arrival, everywhere=everywhere)
    assert outcome(found) == (3, 3)
    assert outcome(lake.publish(bucket, [own, ahead, past, *fresh], by_arrival=by_arrival)) == (0, 6)


def test_late_digests_of_other_buckets_are_read_only_for_rows_outside_of_their_bucket(lake: Lake) -> None:
    """Most slices have none: their close makes no request more."""
    made = lake.publish_late([AHEAD], NOW.start)
    ((_, keys),) = made.digests.items()
    bucket = Bucket(int(time.time() * 1000), 60_000)
    settled = settled_in(bucket, everywhere=True)
    assert published_elsewhere([made], settled, ()) == keys
    assert published_elsewhere([made], settled, keys) == ()
    assert published_elsewhere([replace(made, late=False)], settled, ()) == ()
    before = replace(made, created_at_ms=bucket.start - REPEATED_MS - 2)
    assert published_elsewhere([before], settled, ()) == keys, "the sync may have stood still since"
    assert published_elsewhere([before, replace(made, created_at_ms=bucket.start - 1, digests={})], settled, ()) == ()
    for key in keys:
        lake.store.delete(key)
    in_time = Write(5, 1, "x", bucket.start * 1000)
    assert outcome(lake.publish(bucket, [in_time], by_arrival=True, everywhere=True)) == (1, 0)
    with pytest.raises(NotFoundError):
        lake.publish(bucket, [AHEAD], by_arrival=True, everywhere=True)


def test_copies_are_known_after_the_table_was_told_to_go_by_arrival(lake: Lake) -> None:
    assert outcome(lake.publish(NOW, [OF_ITS_TIME], by_arrival=False)) == (1, 0)
    assert outcome(lake.publish(LATER, [OF_ITS_TIME, FRESH], by_arrival=True)) == (1, 1)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("before", "after"), [(NOW, SHORT), (SHORT, NOW)])
def test_copies_are_known_when_buckets_have_another_length(
    lake: Lake, before: Bucket, after: Bucket, everywhere: bool
) -> None:
    """``commitlog_processor_window_interval_ms`` was changed between the copies of two nodes."""
    write = Write(1, 1, "x", SHORT.start * 1000)
    assert outcome(lake.publish(before, [write], by_arrival=False, everywhere=everywhere)) == (1, 0)
    assert outcome(lake.publish(after, [write], by_arrival=False, everywhere=everywhere)) == (0, 1)


def test_of_buckets_that_are_over_nothing_is_asked(lake: Lake) -> None:
    lake.publish(NOW, [OF_ITS_TIME], by_arrival=False)
    for everywhere in (False, True):
        behind = settled_in(Bucket(NOW.end, 10_000), everywhere=everywhere)
        assert published_before(lake.passes, behind, False) == ()


def test_a_block_of_a_version_that_is_not_known_is_told_with_its_file(lake: Lake) -> None:
    newer = VERSION.followed_by(replace(TABLE, columns=(*TABLE.columns, Column("w", "regular", INT))))
    rows = newer.to_store(change_rows([OF_ITS_TIME], TABLE))
    at = rows.schema.get_field_index("cells")
    cells = pa.array([[{**cell, "column": 1} for cell in row] for row in rows["cells"].to_pylist()], rows["cells"].type)
    data, (place,) = encode_blocks([rows.set_column(at, rows.schema.field(at), cells)], rows_key("a", 1, "newer"))
    lake.store.put(place.key, data)
    with pytest.raises(UnresolvedRowsError, match=rf"{place.key}: .* follow version 2 .* later than version 1"):
        StagedFiles(lake.store, VERSION).rows_of(Reading(((place, "a"),), WHOLE_RING.unwrap(), 1))


def test_rows_that_must_wait_replace_no_others_that_wait(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows wait there is no pass, and the next one has its number: its file was put in place of the first."""
    real = passes.images_after

    def nobody_knows(reader: AfterReader, merged: pa.RecordBatch) -> After:
        found = real(reader, merged)
        return replace(found, open=found.visible)

    monkeypatch.setattr(passes, "images_after", nobody_knows)
    writes = [Write(1, seq, "x", NOW.start * 1000 + seq) for seq in (1, 2)]
    for write in writes:
        assert lake.publish(NOW, [write], by_arrival=False).open == 1
    waiting = [decode_rows(lake.store.get(stat.key)) for stat in lake.store.list(LATE_ROWS)]
    assert sorted(rows["digest"][0].as_py() for rows in waiting) == sorted(write.digest for write in writes)
    reader = AfterReader(load_config(lake.conf), VERSION, "none", RING, control=None, replica=None)  # type: ignore[arg-type]
    context = PassContext(reader, "test.shop.t", 1, f"{1:08x}", "", False, {}, 1)
    forget_waiting(lake.store, context)
    (left,) = lake.store.list(LATE_ROWS)
    assert decode_rows(lake.store.get(left.key))["digest"][0].as_py() == writes[1].digest, "it is of another try"


def test_a_task_that_was_thought_dead_replaces_nothing_that_a_pass_names(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read while all replicas were up, and said of a row that waits by now that it was published."""
    real = passes.images_after
    down: set[int] = {FRESH.id}

    def look(reader: AfterReader, merged: ChangeRows) -> After:
        keys = raw_values(merged.partition_key).to_pylist()
        return replace(real(reader, merged), open=np.array([int.from_bytes(key) in down for key in keys]))

    monkeypatch.setattr(passes, "images_after", look)
    found = lake.publish(NOW, [OF_ITS_TIME, replace(FRESH, at=OF_ITS_TIME.at)], by_arrival=False)
    assert (found.open, outcome(found)) == (1, (1, 0))
    (made,) = lake.passes
    (waiting,) = (stat.key for stat in lake.store.list(LATE_ROWS))
    named = [waiting, *made.changes, *(key for keys in made.digests.values() for key in keys)]
    before = {key: lake.store.get(key) for key in named}
    for others in (set(), {OF_ITS_TIME.id}):
        down = others
        close_slice(*lake.last_task)
    assert {key: lake.store.get(key) for key in named} == before
    late = [decode_rows(lake.store.get(stat.key)) for stat in lake.store.list(LATE_ROWS)]
    known = [read_digests(lake.store, key) for keys in made.digests.values() for key in keys]
    assert sorted(any(are_published(digest_halves(rows["digest"]), known)) for rows in late) == [False, True]


def test_counts_of_rows_on_which_all_agreed() -> None:
    reading = Reading((("key", "a"),), WHOLE_RING.unwrap(), 5)
    settled = settled_in(NOW, everywhere=True, readings=((0, reading),))
    counts = count([settled], [SliceResult((), read=5, repeated=2, published_before=3, only_one=0)])
    assert (counts["agreed"], counts["at_close"], counts["rows"]) == (5, 0, 0)
    with pytest.raises(StepError, match="5 rows are staged, 4 were read, 4 accounted for"):
        count([settled], [SliceResult((), read=4, repeated=1, published_before=3, only_one=0)])
