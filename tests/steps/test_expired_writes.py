"""Writes with a TTL that has ended before their message is made, and both kinds of consumers of the stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ringsync.changes.schema import EXPIRING
from ringsync.config import load_config
from ringsync.schema.table import TableSchema
from ringsync.steps.passes import make, rows_after
from ringsync.steps.passes.make import PassContext, commit, make_outputs
from ringsync.steps.passes.rows_after import AfterReader, Seen
from ringsync.streams.files import FileStream
from tests.newest_model import NewestModel
from tests.steps.late_files import Write, change_rows
from tests.steps.test_close import NOW, RING, TABLE, VERSION, Lake
from tests.steps.test_hidden_rows import Expired, Source, Update
from tests.stream_model import StreamModel

AT = int(time.time() - 100) * 10**6


@dataclass(frozen=True)
class KeyOnly(Write):
    """An ``INSERT`` of a key and nothing else."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        return super().row(table, node) | {"cells": []}


@dataclass(frozen=True)
class KeyOnlyExpired(Expired):
    """The same ``USING TTL``, some seconds after it has expired."""

    inserted: bool = True

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        return super().row(table, node) | {"cells": []}


@dataclass(frozen=True)
class EndsSoon(Update):
    """An ``UPDATE USING TTL`` that expires in half a minute."""

    def row(self, table: TableSchema, node: str) -> dict[str, Any]:
        found = super().row(table, node)
        end = {"kind": EXPIRING, "ttl": 60, "local_deletion_time": int(time.time()) + 30}
        return found | {"cells": [found["cells"][0] | end]}


class Select(Source):
    """As a SELECT shows rows: nobody knows their liveness."""

    def read_keys(self, *arguments: Any, **others: Any) -> Seen:
        seen = super().read_keys(*arguments, **others)
        unknown = [row | {"_row": {**row["_row"], "live": None}, "_merge": None} for row in seen.images.to_pylist()]
        return replace(seen, images=pa.RecordBatch.from_pylist(unknown, seen.images.schema))


class Stream:
    """A table's stream with ``after_image: source``."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.lake, self.source, self.passes = Lake(folder), source, 0

    def publish(self, write: Write, there: list[Write]) -> None:
        """A pass of one write.

        :param there: what a SELECT shows when it is made
        """
        self.source.rows = there
        self.passes += 1
        reader = AfterReader(load_config(self.lake.conf), VERSION, "source", RING, control=None, replica=None)  # type: ignore[arg-type]
        name = f"{self.passes:08x}"
        context = PassContext(reader, "test.shop.t", self.passes, name, "", False, {}, 1)
        made = make_outputs(context, self.lake.store, {str(NOW): change_rows([write], TABLE)}, "0000").outputs
        assert made is not None
        one = commit(self.lake.store, context, [made], {"everywhere": 1})
        assert one is not None
        FileStream(self.lake.store, "test.shop.t").publish(one.folder, one.parts)

    def rows(self, after_s: int = 0) -> tuple[Any, Any]:
        """Values by key of who takes the newest, and of who keeps what was written last, some seconds later."""
        stream, now = FileStream(self.lake.store, "test.shop.t"), int(time.time()) + after_s
        messages = [message for bucket in stream.folders() for message in stream.read(bucket)]
        newest = NewestModel(TABLE).apply_all(messages).rows(now)
        last = StreamModel(TABLE, True).apply_all(messages).rows(now)
        return {key: row.get("v") for key, row in newest.items()}, {
            key: cells["v"][0] if "v" in cells else None for key, cells in last.items()
        }


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    source = Select()
    monkeypatch.setattr(rows_after, "read_keys", source.read_keys)
    return Stream(tmp_path, source)


@pytest.mark.parametrize("inserted", [True, False])
def test_a_row_that_was_there_for_ever_ends_with_what_was_written_over_it(stream: Stream, inserted: bool) -> None:
    first = (Write if inserted else Update)(1, 1, "for ever", AT)
    stream.publish(first, [first])
    stream.publish(Expired(1, 1, "short", AT + 1000, inserted), [])
    assert stream.rows() == ({}, {})
    newer = Update(1, 1, "newer", AT + 1001)
    stream.publish(newer, [newer])
    assert stream.rows() == ({(1, 1): "newer"},) * 2


def test_a_row_of_nothing_but_its_key_does_not_end_with_an_older_liveness(stream: Stream) -> None:
    there = KeyOnly(1, 1, "", AT + 1000)
    stream.publish(there, [there])
    stream.publish(KeyOnlyExpired(1, 1, "", AT), [there])
    assert stream.rows() == ({(1, 1): None},) * 2


def test_a_row_is_told_without_what_has_expired(stream: Stream) -> None:
    """It lives by its liveness, or by what another column holds."""
    stream.publish(Write(1, 1, "for ever", AT), [Write(1, 1, "for ever", AT)])
    stream.publish(Expired(1, 1, "short", AT + 1000), [KeyOnly(1, 1, "", AT)])
    assert stream.rows() == ({(1, 1): None},) * 2


def test_a_row_that_ends_before_its_message_is_made_is_told_with_its_end(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice is long: the row was told as one that is there, without the cell that had it end."""
    monkeypatch.setattr(make, "time", SimpleNamespace(time=lambda: time.time() + 60))
    row = EndsSoon(1, 1, "short", AT)
    stream.publish(row, [row])
    assert stream.rows() == ({(1, 1): "short"},) * 2
    assert stream.rows(60) == ({}, {})
