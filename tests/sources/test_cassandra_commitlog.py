"""The data source ``cassandra_commitlog`` on what real servers wrote; the model is the oracle."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.sources.cassandra_commitlog import CassandraCommitLog, OptionError
from ringsync.sources.segments import DamagedLogError, find_parts, log_options, read_part, read_problems
from tests.commitlog_model.cql_schema import parse_schema
from tests.commitlog_model.segment import read_segment
from tests.commitlogs.fixtures import Fixture, fixture_named, unpacked

pytestmark = pytest.mark.spark

NAME = "5.0-v8-plain"


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return fixture_named(NAME)


@pytest.fixture
def folder(fixture: Fixture, tmp_path: Path) -> Path:
    """A folder like cdc_raw, and the schema beside it."""
    raw = tmp_path / "cdc_raw"
    raw.mkdir()
    unpacked(fixture, raw)
    (tmp_path / "schema.cql").write_text(fixture.schema + fixture.dropped)
    return raw


@pytest.fixture
def load(spark: Any) -> Callable[..., list[Any]]:
    """Read a folder with options."""
    spark.dataSource.register(CassandraCommitLog)

    def rows(folder: Path, **options: str) -> list[Any]:
        found = spark.read.format("cassandra_commitlog").options(**options).load(str(folder)).collect()
        return list(found)

    return rows


def model_changes(fixture: Fixture, folder: Path) -> list[dict[str, Any]]:
    tables = parse_schema(fixture.schema + fixture.dropped)
    return [change for path in sorted(folder.glob("*.log")) for change in read_segment(path, tables).changes]


def digests(rows: list[Any]) -> list[str]:
    return sorted(bytes(row["digest"]).hex() for row in rows)


def test_spark_reads_what_the_model_reads(load: Callable[..., list[Any]], fixture: Fixture, folder: Path) -> None:
    expected = model_changes(fixture, folder)
    rows = load(folder, schema=str(folder.parent / "schema.cql"))
    assert digests(rows) == sorted(change["digest"] for change in expected)
    by_digest = {change["digest"]: change for change in expected}
    for row in rows:
        change = by_digest[bytes(row["digest"]).hex()]
        assert row["token"] == change["token"]
        assert bytes(row["partition_key"]).hex() == change["raw_partition_key"]
        assert uuid.UUID(bytes=bytes(row["table_id"])) == uuid.UUID(change["table_id"])
        assert [cell["timestamp"] for cell in row["cells"]] == [c["timestamp"] for c in change.get("cells", [])]
        assert (row["file"], row["position"]) == (change["source"]["file"], change["source"]["position"])


def test_tables_and_positions_are_chosen(load: Callable[..., list[Any]], fixture: Fixture, folder: Path) -> None:
    expected = model_changes(fixture, folder)
    table = next(change for change in expected if change["kind"] == "range_deletion")
    wanted = [c for c in expected if (c["keyspace"], c["table"]) == (table["keyspace"], table["table"])]
    middle = wanted[len(wanted) // 2]
    segment = middle["source"]["file"].removesuffix(".log").rpartition("-")[2]
    options = {
        "schema": str(folder.parent / "schema.cql"),
        "tables": f"{table['keyspace']}.{table['table']}",
        "from": f"{segment}:{middle['source']['position']}",
    }
    place = (middle["source"]["file"], middle["source"]["position"])
    behind = [c["digest"] for c in wanted if (c["source"]["file"], c["source"]["position"]) > place]
    assert digests(load(folder, **options)) == sorted(behind)
    until = [c["digest"] for c in wanted if (c["source"]["file"], c["source"]["position"]) <= place]
    options["to"] = options.pop("from")
    assert digests(load(folder, **options)) == sorted(until)
    assert behind
    assert until


def test_parts_together_are_the_whole(fixture: Fixture, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted(change["digest"] for change in model_changes(fixture, folder))
    options = log_options({"path": str(folder), "schema": str(folder.parent / "schema.cql")})
    for part_bytes in (2**20, 100_000, 10_000, 1_000):
        monkeypatch.setattr("ringsync.sources.segments.PART_BYTES", part_bytes)
        parts = find_parts(options)
        rows = [row for part in parts for batch in read_part(options, part) for row in batch.to_pylist()]
        assert digests(rows) == expected
    assert len(parts) > 1000


def test_damage_stops_unless_it_is_to_be_skipped(folder: Path) -> None:
    segment = min(folder.glob("*.log"))
    data = bytearray(segment.read_bytes())
    record = data.index(b"\x00\x00\x00", 2000)
    data[record + 40] ^= 1
    segment.write_bytes(data)
    asked = {"path": str(folder), "schema": str(folder.parent / "schema.cql")}
    options = log_options(asked)
    with pytest.raises(DamagedLogError, match=rf"{segment.name}, position \d+, \d+ bytes: .*damage=skip"):
        list(itertools.chain.from_iterable(read_part(options, part) for part in find_parts(options)))
    problems = [
        row for part in find_parts(options) for batch in read_problems(options, part) for row in batch.to_pylist()
    ]
    damages = [row for row in problems if row["raw"] is None]
    assert len(damages) == 1
    skipping = log_options({**asked, "damage": "skip"})
    assert sum(batch.num_rows for part in find_parts(skipping) for batch in read_part(skipping, part)) > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": "x", "tabels": "a.b"}, "did you mean tables"),
        ({}, "either the option schema or the option config"),
        ({"schema": "x", "index": "maybe"}, "index of cassandra_commitlog is obey or ignore, not 'maybe'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CassandraCommitLog({"path": "x", **options}).schema()


def test_a_wrong_position_is_explained() -> None:
    with pytest.raises(ValueError, match="option from is SEGMENT:POSITION"):
        log_options({"path": "x", "schema": "y", "from": "12"})


def test_a_folder_without_segments_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no commit log segment \(CommitLog-7-….log\) in the folder"):
        find_parts(log_options({"path": str(tmp_path), "schema": "y"}))
