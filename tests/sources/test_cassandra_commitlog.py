"""The data source ``cassandra_commitlog`` on what real servers wrote; the model is the oracle."""

from __future__ import annotations

import pickle
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.schema.table import SchemaError
from ringsync.sources.cassandra_commitlog import CassandraCommitLog, CommitLogReader, OptionError
from ringsync.sources.segments import (
    DamagedLogError,
    LogOptions,
    find_parts,
    find_tables,
    log_options,
    read_part,
    read_problems,
)
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


def rows_of(options: LogOptions, read: Callable[..., Any] = read_part) -> list[Any]:
    """What all parts give, without Spark."""
    tables = find_tables(options)
    return [row for part in find_parts(options) for batch in read(options, tables, part) for row in batch.to_pylist()]


def test_parts_together_are_the_whole(fixture: Fixture, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sorted(change["digest"] for change in model_changes(fixture, folder))
    options = log_options({"path": str(folder), "schema": str(folder.parent / "schema.cql")})
    for part_bytes in (2**20, 100_000, 4_000):
        monkeypatch.setattr("ringsync.sources.segments.PART_BYTES", part_bytes)
        assert digests(rows_of(options)) == expected
    assert len(find_parts(options)) > 250


def test_tasks_need_no_schema_file(folder: Path) -> None:
    schema = folder.parent / "schema.cql"
    options = log_options({"path": str(folder), "schema": str(schema)})
    reader = pickle.loads(pickle.dumps(CommitLogReader(options, find_tables(options))))
    schema.unlink()
    assert sum(rows.num_rows for part in reader.partitions() for rows in reader.read(part)) > 100


def test_a_schema_without_ids_is_refused(folder: Path) -> None:
    schema = folder.parent / "schema.cql"
    schema.write_text(re.sub(r"ID = [-0-9a-f]+\s+AND ", "", schema.read_text()))
    with pytest.raises(SchemaError, match=r"is missing.* DESCRIBE SCHEMA WITH INTERNALS"):
        find_tables(log_options({"path": str(folder), "schema": str(schema)}))


def test_a_table_that_nobody_knows_is_not_passed_over_silently(fixture: Fixture, folder: Path) -> None:
    known = next(c for c in model_changes(fixture, folder) if c["kind"] == "range_deletion")
    schema = folder.parent / "schema.cql"
    statement = next(s for s in fixture.schema.split(";") if known["table_id"] in s)
    schema.write_text(
        ";".join(
            [*(s for s in fixture.schema.split(";") if "CREATE TYPE" in s or "CREATE KEYSPACE" in s), statement, ""]
        )
    )
    asked = {"path": str(folder), "schema": str(schema)}
    with pytest.raises(DamagedLogError, match=r"position \d+, \d+ bytes: a record .*tables=… to read only these"):
        rows_of(log_options(asked))
    expected = [c["digest"] for c in model_changes(fixture, folder) if c["table_id"] == known["table_id"]]
    assert digests(rows_of(log_options({**asked, "tables": f"{known['keyspace']}.{known['table']}"}))) == sorted(
        expected
    )


def test_damage_stops_unless_it_is_to_be_skipped(folder: Path) -> None:
    segment = min(folder.glob("*.log"))
    data = bytearray(segment.read_bytes())
    record = data.index(b"\x00\x00\x00", 2000)
    data[record + 40] ^= 1
    segment.write_bytes(data)
    asked = {"path": str(folder), "schema": str(folder.parent / "schema.cql")}
    options = log_options(asked)
    with pytest.raises(DamagedLogError, match=rf"{segment.name}, position \d+, \d+ bytes: .*damage=skip"):
        rows_of(options)
    damages = [row for row in rows_of(options, read_problems) if row["raw"] is None]
    assert len(damages) == 1
    assert len(rows_of(log_options({**asked, "damage": "skip"}))) > 100


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
    with pytest.raises(ValueError, match=r"option from: .*SEGMENT_ID:POSITION"):
        log_options({"path": "x", "schema": "y", "from": "12"})


def test_a_folder_without_segments_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no commit log segment \(CommitLog-7-….log\) in the folder"):
        find_parts(log_options({"path": str(tmp_path), "schema": "y"}))
