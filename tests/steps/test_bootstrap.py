"""A bootstrap from a real node, judged from outside: driver against delta-rs, cell by cell, and fastavro's messages."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from examples.flights.load import TABLES
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.steps.application import ExitCode, Report, StepError
from ringsync.streams.files import FileStream
from ringsync.wiring import store_of
from tests.oracle import Rows, differences, replica_rows, source_rows

pytestmark = [pytest.mark.server, pytest.mark.spark]


@pytest.mark.parametrize("name", TABLES)
def test_replica_and_stream_equal_the_source(
    name: str, flights: dict[str, int], bootstrap: Callable[[str, str], Report], session: Any, lake: Any
) -> None:
    report = bootstrap(f"flights.{name}", f"equal-{name}")
    assert report["rows_read"] == report["rows_written"] == report["messages_published"] == flights[name]
    table = read_table(session, "flights", name)
    source = source_rows(session, table, now=int(time.time()))
    assert len(source) == flights[name]
    assert differences(source, replica_rows(report["replica"]["uri"], table))[:5] == []
    stream = FileStream(store_of(load_config(lake / "ringsync.yaml")), report["stream"]["topic"])
    check_messages(list(stream.read(report["stream"]["folder"])), table, source)


def check_messages(messages: list[Any], table: Any, source: Rows) -> None:
    """One message for each row, with its key and its greatest writetime; a cell has times exactly if it has a value."""
    assert len({message["value"]["source"]["event_id"] for message in messages}) == len(messages) == len(source)
    newest = sorted(max((_greatest(cell[1]) for cell in cells.values()), default=0) for cells in source.values())
    assert newest == sorted(message["value"]["source"]["ts_us"] or 0 for message in messages)
    for message in messages:
        value = message["value"]
        assert value["op"] == "r"
        for column in table.key_columns:
            assert value["after"][column.name] == message["key"][column.name]
        for column in table.value_columns:
            assert (value["after"][column.name] is None) == (value["cells"][column.name] is None)


def _greatest(writetime: Any) -> int:
    return max(t for t in writetime if t is not None) if isinstance(writetime, list) else writetime


def test_the_same_row_twice_has_the_same_event_id(
    bootstrap: Callable[[str, str], Report], lake: Any, flights: Any
) -> None:
    seen = []
    for run in ("again-1", "again-2"):
        stream = bootstrap("flights.airlines", run)["stream"]
        store = store_of(load_config(lake / "ringsync.yaml"))
        messages = FileStream(store, stream["topic"]).read(stream["folder"])
        seen.append(sorted(message["value"]["source"]["event_id"] for message in messages))
    assert seen[0] == seen[1]


def test_a_dry_run_writes_no_plan(step: Any, lake: Any, flights: Any) -> None:
    report, code = step("bootstrap_prepare", "flights.planes", "dry", dry_run=True, splits=7)
    assert (code, report["splits"], report["dry_run"]) == (ExitCode.OK, 7, True)
    assert not (lake / "plans" / "bootstrap" / "dry.json").exists()


@pytest.mark.parametrize("changes", [["ADD w int"], ["DROP v", "ADD v int"]], ids=["added", "added_again"])
def test_a_changed_schema_stops_the_scan(
    changes: list[str], step: Any, session: Any, keyspace: str, request: pytest.FixtureRequest
) -> None:
    """Also where it looks as before: what was written to the dropped column is gone."""
    name = f"changing_{request.node.callspec.id}"
    session.execute(f"CREATE TABLE {keyspace}.{name} (id int PRIMARY KEY, v int)")
    step("bootstrap_prepare", f"{keyspace}.{name}", name)
    for change in changes:
        session.execute(f"ALTER TABLE {keyspace}.{name} {change}")
    with pytest.raises(StepError, match=rf"schema of .*{name} changed"):
        step("bootstrap_scan", f"{keyspace}.{name}", name)
    assert step("bootstrap_prepare", f"{keyspace}.{name}", f"{name}-2")[0]["continues"] is None


def test_a_table_without_rows(bootstrap: Callable[[str, str], Report], step: Any, session: Any, keyspace: str) -> None:
    session.execute(f"CREATE TABLE {keyspace}.empty (id int PRIMARY KEY, v int)")
    assert bootstrap(f"{keyspace}.empty", "empty")["rows"] == 0
    report, code = step("replica_verify", f"{keyspace}.empty", "empty")
    assert (report["differences"], code) == (0, ExitCode.OK)


def test_an_added_column_is_bootstrapped_again(
    bootstrap: Callable[[str, str], Report], step: Any, session: Any, keyspace: str
) -> None:
    name = f"{keyspace}.growing"
    session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")
    session.execute(f"INSERT INTO {name} (id, v) VALUES (1, 2)")
    bootstrap(name, "growing-1")
    session.execute(f"ALTER TABLE {name} ADD w text")
    session.execute(f"INSERT INTO {name} (id, w) VALUES (1, 'x')")
    time.sleep(1.1)
    bootstrap(name, "growing-2")
    assert step("replica_verify", name, "growing")[0]["differences"] == 0


def test_odd_names(bootstrap: Callable[[str, str], Report], step: Any, session: Any, keyspace: str) -> None:
    session.execute(f'CREATE TYPE {keyspace}."A type" ("a field" int, "A Field" text)')
    session.execute(
        f'CREATE TABLE {keyspace}."OddTable" ("the key" int, "token" int, "Value" text, value text, '
        f'"_row" frozen<"A type">, "q""uote" map<text, int>, PRIMARY KEY ("the key", "token"))'
    )
    session.execute(
        f'INSERT INTO {keyspace}."OddTable" ("the key", "token", "Value", value, "_row", "q""uote") '
        "VALUES (1, 2, 'a', 'b', {\"a field\": 3, \"A Field\": 'c'}, {'k': 4})"
    )
    report = bootstrap(f"{keyspace}.OddTable", "odd")
    table = read_table(session, keyspace, "OddTable")
    source = source_rows(session, table, now=int(time.time()))
    assert differences(source, replica_rows(report["replica"]["uri"], table)) == []
    assert step("replica_verify", f"{keyspace}.OddTable", "odd")[0]["differences"] == 0
