"""Suspects between their looks: real replicas, read by their keys, and a source that the test writes itself."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringsync.changes.schema import PARTITION_DELETION, ROW
from ringsync.cql.types import MapType, Native
from ringsync.images.judgement import Slack
from ringsync.images.live import selected_rows, shown_rows
from ringsync.images.schema import NO_LIVENESS, row_image_schema
from ringsync.images.to_changes import image_keys
from ringsync.ledger.staging import STAGED_ROWS
from ringsync.replica.compare import compare_rows
from ringsync.replica.lookup import images_between, previous_images
from ringsync.replica.suspects import Judged, Round, WaitingRows, judge_suspects, suspects
from ringsync.ring.tokens import MAX_TOKEN
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.lookup.keys import row_keys
from ringsync.steps.replica.kept import few_together, folder_of, get_suspects, put_suspects, tidy
from ringsync.storage.local import LocalStore
from tests.replica.bases import replica_uri, state_of, write_base, write_pass

INT = Native("int")
TABLE = TableSchema(
    "shop",
    "lines",
    "5" * 32,
    (
        Column("id", "partition_key", INT),
        Column("c", "clustering", INT),
        Column("m", "regular", MapType(Native("text"), INT)),
        Column("s", "static", INT),
        Column("v", "regular", INT),
    ),
)
NOW, AHEAD = 1_900_000_000, 4 * 10**18


def image(number: int, c: int | None = 1, *, v: int | None = 1, s: int | None = None, at: int = 5, **row: Any) -> Any:
    unknown = {"d": None, "e": None, "raw": None}
    x = {one.name: {"raw": None} if one.is_key else unknown for one in TABLE.columns}
    times = {"writetime": at, "expires_at": None, "deleted_at": None, "live": None, **row}
    return {"token": 10 * number, "id": number, "c": c, "m": None, "s": s, "v": v, "_row": times, "_x": x}


def dead(number: int, at: int) -> Any:
    return image(number, v=None, at=at, writetime=None, deleted_at=at, live=NO_LIVENESS)


def batch(rows: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, row_image_schema(TABLE))


class Case:
    """A replica in a folder, and the rows of its source."""

    def __init__(self, folder: Path, replica: list[Any]) -> None:
        self.folder, self.passes, self.tokens = folder, 0, (-1, 10**6)
        write_base(folder, TABLE, pa.Table.from_batches([batch(sorted(replica, key=lambda row: row["token"]))]))

    def take(self, *rows: Any) -> None:
        """Add a pass to the replica."""
        self.passes += 1
        write_pass(self.folder, TABLE, pa.Table.from_batches([batch(list(rows))]), self.passes)

    def first(self, source: list[Any]) -> tuple[int, pa.RecordBatch]:
        """Compare all rows: the number of equal ones, and the suspects, by way of their files."""
        ours = shown_rows(images_between(state_of(self.folder, TABLE), TABLE, *self.tokens), TABLE, NOW)
        equal, found = compare_rows([selected_rows(batch(source), TABLE, NOW)], ours, TABLE)
        store = LocalStore(self.folder)
        (read,) = get_suspects(store, put_suspects(store, "verify/r/", suspects(found, NOW)))
        return equal, read

    def look(self, found: pa.RecordBatch, source: list[Any], **more: Any) -> Judged:
        """Look at them at the replica, and at a source that has these rows then."""

        def rows(keys: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
            wanted = row_keys(keys, TABLE)
            whole = set(keys.filter(keys["whole_partition"])["token"].to_pylist())
            there = batch(source)
            known = {*zip(*(one.to_pylist() for one in (keys["partition_key"], keys["clustering"])), strict=True)}
            pairs = zip(*(one.to_pylist() for one in image_keys(there, TABLE)), there["token"].to_pylist(), strict=True)
            assert len(wanted.places)
            return there.filter(pa.array([(p, c) in known or t in whole for p, c, t in pairs], pa.bool_())), NOW + 60

        state = state_of(self.folder, TABLE)
        return judge_suspects(found, TABLE, Round(partial(previous_images, state, TABLE), rows, **more))


def test_what_is_on_its_way_and_what_never_comes(tmp_path: Path) -> None:
    """Dated ahead or not: what the replica takes meanwhile is equal, the rest is named."""
    source = [image(1), image(2, v=2, at=AHEAD), image(3, v=2, at=AHEAD), image(4, at=7), image(5, at=AHEAD)]
    case = Case(tmp_path, [image(1), image(2), image(3), image(6)])
    equal, found = case.first(source)
    assert (equal, len(found)) == (1, 5)
    case.take(image(2, v=2, at=AHEAD), image(4, at=7), dead(6, 9))
    judged = case.look(found, source)
    assert judged.outcomes == Counter(equal=3, different=1, missing=1)
    assert (judged.tokens, judged.left) == ({30, 50}, None)


def test_a_busy_row_is_equal_and_a_wrong_cell_in_it_is_found(tmp_path: Path) -> None:
    """Cell v is written all the time; a static cell of the second row never came."""

    def written(v: int, *statics: int) -> list[Any]:
        return [of_static(image(n, v=v, s=s, at=10 * v)) for n, s in enumerate(statics, 1)]

    def of_static(row: Any) -> Any:
        d = {"d": row["s"] - row["_row"]["writetime"], "e": None, "raw": None}
        return {**row, "_x": {**row["_x"], "s": d}}

    case = Case(tmp_path, written(1, 3, 7))
    _, found = case.first(written(2, 3, 8))
    case.take(*written(3, 3, 7))
    judged = case.look(found, written(4, 3, 8))
    assert (judged.outcomes, judged.tokens) == (Counter(equal=1, different=1), {20})
    assert {one.column for one in judged.listed} == {"s"}


def test_a_collection_that_is_replaced_all_the_time(tmp_path: Path) -> None:
    """No look at the source equals the replica, which follows; if it does not, that is a difference."""

    def replaced(at: int) -> list[Any]:
        return [{**image(number, at=at), "m": [(f"k{at}", 1)]} for number in (1, 2)]

    case = Case(tmp_path, replaced(5))
    _, found = case.first(replaced(6))
    case.take(*replaced(7))
    first = case.look(found, replaced(8))
    assert (first.outcomes, first.left is not None and len(first.left)) == (Counter(), 2)
    assert first.left is not None
    case.take(replaced(9)[0])
    second = case.look(first.left, replaced(10))
    assert (second.outcomes, second.tokens, second.left) == (Counter(moving=1, different=1), {20}, None)


def test_a_row_that_the_source_does_not_have_is_looked_at_twice(tmp_path: Path) -> None:
    case = Case(tmp_path, [image(1), image(2), image(3)])
    _, found = case.first([])
    first = case.look(found, [])
    assert (first.outcomes, first.left is not None and len(first.left)) == (Counter(), 3)
    assert first.left is not None
    case.take(dead(2, 9))
    second = case.look(first.left, [image(3)])
    assert second.outcomes == Counter(equal=2, extra=1)


@pytest.mark.parametrize("row", [{"id": 7, "c": 1, "v": 5}, {"id": 2, "c": 1, "v": 1}])
def test_a_row_without_a_token_is_extra(tmp_path: Path, row: dict[str, Any]) -> None:
    """Somebody has inserted it with the table's own columns alone: it belongs to the range that ends the ring."""
    case = Case(tmp_path, [image(1), image(2)])
    base = Path(replica_uri(tmp_path, TABLE)) / "base"
    pq.write_table(pa.Table.from_pylist([row], row_image_schema(TABLE)), base / "theirs.parquet")
    add = {"path": "theirs.parquet", "partitionValues": {}, "size": (base / "theirs.parquet").stat().st_size}
    actions = [{"commitInfo": {"operation": "WRITE"}}, {"add": {**add, "modificationTime": 1, "dataChange": True}}]
    (base / f"_delta_log/{1:020}.json").write_text("\n".join(map(json.dumps, actions)))
    source = [image(1), image(2)]
    case.tokens = (20, MAX_TOKEN)
    equal, found = case.first([])
    assert (equal, len(found)) == (0, 1)
    first = case.look(found, source)
    assert (first.outcomes, first.left is not None) == (Counter(), True)
    assert first.left is not None
    second = case.look(first.left, source)
    assert (second.outcomes, second.tokens) == (Counter(extra=1), {MAX_TOKEN})


def test_static_cells_without_a_row(tmp_path: Path) -> None:
    """A SELECT shows them alone; the replica has them in an image without clustering, beside those of dead rows."""
    alone = image(7, None, v=None, s=4, live=NO_LIVENESS)
    case = Case(tmp_path, [alone, {**dead(7, 3), "s": 4}, image(8, s=1)])
    source = [image(7, None, v=None, s=5, at=9), image(8, s=1)]
    equal, found = case.first(source)
    assert (equal, len(found)) == (1, 1)
    assert case.look(found, source).outcomes == Counter(different=1)
    case.take({**alone, "s": 5, "_row": {**alone["_row"], "writetime": 9}})
    assert case.look(found, source).outcomes == Counter(equal=1)


def test_a_row_that_is_there_twice(tmp_path: Path) -> None:
    case = Case(tmp_path, [image(1), image(1)])
    equal, found = case.first([image(1)])
    assert (equal, case.look(found, [image(1)]).outcomes) == (1, Counter(extra=1))


def test_suspects_lie_in_files_of_some_bytes_and_go_with_their_run(tmp_path: Path) -> None:
    store, case = LocalStore(tmp_path), Case(tmp_path, [])
    _, found = case.first([image(n) for n in range(100)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringsync.steps.replica.kept.BYTES_OF_A_FILE", found.nbytes // 9)
        mine, other = folder_of("r", 1000), folder_of("killed", 0)
        keys = put_suspects(store, mine, found)
    assert 9 <= len(keys) <= 12
    assert sum(len(rows) for rows in get_suspects(store, keys)) == 100
    put_suspects(store, other, found)
    tidy(store, mine, 2000)
    assert {stat.key.partition("-")[2].partition("/")[0] for stat in store.list("verify/0")} == {"killed"}
    tidy(store, mine, 10**10)
    assert store.list("verify/0") == []


def test_few_suspects_of_many_files_are_looked_at_together(tmp_path: Path) -> None:
    """If they are of one moment, as which the replica is shown."""
    store, case = LocalStore(tmp_path), Case(tmp_path, [])
    _, found = case.first([image(n) for n in range(30)])
    few = [suspects(found.slice(n, 3), NOW + n % 2) for n in range(0, 30, 3)]
    keys = [key for rows in few for key in put_suspects(store, "verify/r/", rows)]
    assert few_together(keys) == [keys]
    assert [(len(rows), set(rows["now_s"].to_pylist())) for rows in get_suspects(store, keys)] == [
        (15, {NOW}),
        (15, {NOW + 1}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringsync.steps.replica.kept.BYTES_TOGETHER", 3 * max(rows.nbytes for rows in few))
        groups = few_together(keys)
    assert [len(group) for group in groups] == [3, 3, 3, 1]
    assert [key for group in groups for key in group] == keys


@pytest.mark.parametrize("kind", [ROW, PARTITION_DELETION])
def test_what_waits_as_late_is_left_out(tmp_path: Path, kind: int) -> None:
    case = Case(tmp_path, [image(1)])
    source = [image(1, v=2, at=9), image(2), image(3)]
    _, found = case.first(source)
    (key, _), clusterings = (one.to_pylist() for one in image_keys(batch([image(2), image(3)]), TABLE))
    waits = {"partition_key": key, "clustering": clusterings[0] if kind == ROW else None, "kind": kind}
    waiting = WaitingRows.of([pa.RecordBatch.from_pylist([waits], STAGED_ROWS)], TABLE)
    judged = case.look(found, source, waiting=waiting)
    assert judged.outcomes == Counter(late=1, different=1, missing=1)
    assert (judged.tokens, judged.late) == ({10, 30}, {20}), "nothing is proved where a row is left out"


def test_what_only_one_replica_of_the_source_has_is_no_difference(tmp_path: Path) -> None:
    """A quorum does not show it; all of them do. If one does not answer, the quorum counts."""
    case = Case(tmp_path, [image(1, v=2, at=9)])
    _, found = case.first([image(1)])
    assert case.look(found, [image(1)]).outcomes == Counter(different=1)
    there = batch([image(1, v=2, at=9)]), NOW + 61, np.array([True])
    assert case.look(found, [image(1)], rows_of_all=lambda keys: there).outcomes == Counter(equal=1)


def test_a_node_that_is_down_keeps_no_other_rows_from_being_read_from_all(tmp_path: Path) -> None:
    """With 100 nodes, one of them down, no row of 44 of 50 files with 50 rows was: what one replica has was "extra"."""
    case = Case(tmp_path, [image(1, v=2, at=9), image(2, v=2, at=9)])
    source = [image(1), image(2)]
    _, found = case.first(source)
    asked: list[int] = []

    def of_all(keys: pa.RecordBatch) -> tuple[pa.RecordBatch, int, Any]:
        asked.extend(keys["token"].to_pylist())
        return batch([image(1, v=2, at=9)]), NOW + 61, keys["token"].to_numpy() == 10

    judged = case.look(found, source, rows_of_all=of_all)
    assert sorted(asked) == [10, 20]
    assert judged.outcomes == Counter(equal=1, different=1)


def test_what_the_source_cannot_tell_needs_no_third_look(tmp_path: Path) -> None:
    """Servers that read as of no moment tell expiries to some seconds."""
    case = Case(tmp_path, [image(1, expires_at=NOW + 900), image(2, expires_at=NOW + 900)])
    source = [image(1, expires_at=NOW + 903), image(2, expires_at=NOW + 950)]
    _, found = case.first(source)
    asked = []
    judged = judge_suspects(
        found,
        TABLE,
        Round(
            partial(previous_images, state_of(tmp_path, TABLE), TABLE),
            lambda keys: (batch(source), asked.append(len(keys)) or NOW),  # type: ignore[func-returns-value]
            slack=Slack(expiry_s=4),
        ),
    )
    assert (judged.outcomes, asked) == (Counter(equal=1, different=1), [1])


def test_while_the_replica_is_behind_nothing_is_missing(tmp_path: Path) -> None:
    case = Case(tmp_path, [image(1), image(2, v=9, at=99)])
    source = [image(1, v=2, at=9), image(2), image(3)]
    _, found = case.first(source)
    behind = case.look(found, source, has_all=False)
    assert behind.outcomes == Counter(different=1), "newer than the source it may not be"
    assert behind.left is not None
    case.take(image(1, v=2, at=9))
    assert case.look(behind.left, source).outcomes == Counter(equal=1, missing=1)
