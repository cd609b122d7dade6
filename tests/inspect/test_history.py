"""Old commit logs by the recorded history: the rows of their day, without the cluster, also of dropped tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsync.cli import main
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.ledger.table_versions import version_of
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode
from tests.inspect.test_round_trip import copied_log

Run = Callable[..., str]
DAY = (
    "INSERT INTO {t} (id, c, v, w, a, f, m) VALUES "
    "(1, 1, 'one', 11, {{street: 'High', no: 5}}, {{street: 'Low', no: 6}}, {{'k': 1, 'l': 2}})",
    "INSERT INTO {t} (id, c, v, w) VALUES (1, 2, 'two', 22)",
    "INSERT INTO {t} (id, c, s) VALUES (2, 1, 'static')",
)
ALTERS = (
    "ALTER TABLE {t} ADD x text",
    "ALTER TABLE {t} DROP w",
    "ALTER TABLE {t} RENAME c TO seq",
    "ALTER TYPE {ks}.address ADD zip text",
    "ALTER TYPE {ks}.address RENAME no TO number",
    "ALTER TABLE {t} DROP m",
)


@pytest.fixture
def run(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs cdcservice inspect with a store of its own; its standard output, or in case of an error what it says."""
    conf = tmp_path / "ringsync.yaml"
    conf.write_text("server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: lake}\n")

    def called(*arguments: object, code: int = 0, imperfect: str = "reads the rest)") -> str:
        found = main(["inspect", "commitlog", *map(str, arguments), "--conf", str(conf)])
        out, err = (text.decode() for text in capfdbinary.readouterr())
        # Other tests write to this server, too, and their tables have no history here.
        others = ("which is not in the schema", "reads the rest)", imperfect)
        only_others = all(line.endswith(others) for line in err.splitlines())
        assert found == code or (found, code, only_others) == (1, 0, True), err
        return err if code else out

    return called


def rows_of(lines: str) -> list[dict[str, Any]]:
    """The rows that a log of INSERTs makes, as SELECT JSON has them."""
    rows: dict[str, dict[str, Any]] = {}
    statics: dict[str, dict[str, Any]] = {}
    for change in map(json.loads, lines.splitlines()):
        of_static = change["kind"] == "static"
        keys = {**change["partition_key"], **change.get("clustering", {})}
        row = (statics if of_static else rows).setdefault(json.dumps(keys), {} if of_static else keys)
        for cell in change.get("cells", ()):
            if "path" in cell:
                row.setdefault(cell["column"], {})[cell["path"]] = cell["value"]
            else:
                row[cell["column"]] = cell["value"]
    for row in rows.values():
        row.update(statics.get(json.dumps({"id": row["id"]}), {}))
    return sorted(rows.values(), key=json.dumps)


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


@pytest.mark.server
def test_a_segment_from_before_some_alters_gives_the_rows_of_its_day(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path, run: Run
) -> None:
    store, name = store_of(load_config(tmp_path / "ringsync.yaml")), f"{keyspace}.orders"

    def execute(statement: str) -> None:
        session.execute(statement.format(t=name, ks=keyspace))
        version_of(store, read_table(session, keyspace, "orders"))

    session.execute(f"CREATE TYPE {keyspace}.address (street text, no int)")
    execute(
        "CREATE TABLE {t} (id int, c int, s text static, v text, w int, a address, f frozen<address>, "
        "m map<text, int>, PRIMARY KEY (id, c)) WITH cdc = true"
    )
    for statement in DAY:
        session.execute(statement.format(t=name))
    selected = [without_nulls(json.loads(row[0])) for row in session.execute(f"SELECT JSON * FROM {name}")]
    selected.sort(key=json.dumps)
    before, after = tmp_path / "before", tmp_path / "after"
    copied_log(cassandra, before)
    for statement in ALTERS:
        execute(statement)
    session.execute(
        f"INSERT INTO {name} (id, seq, x, a) VALUES (3, 3, 'new', {{street: 'Up', number: 1, zip: '8000'}})"
    )
    copied_log(cassandra, after)
    session.execute(f"DROP TABLE {name}")

    def same(found: str) -> bool:
        ordered = [json.dumps(row, sort_keys=True) for row in rows_of(found)]
        return sorted(ordered) == sorted(json.dumps(row, sort_keys=True) for row in selected)

    of_the_day = run(before, "--history", "--table", name)
    assert len(selected) == 3
    assert same(of_the_day), of_the_day
    # What was written later has the names of its own day.
    later = [row for row in rows_of(run(after, "--history", "--table", name)) if row["id"] == 3]
    assert later == [{"id": 3, "seq": 3, "x": "new", "a": {"street": "Up", "number": 1, "zip": "8000"}}]
    # With the schema of a day before, no cell is lost: columns that were added later are decoded, too. What fields of a
    # type came later is unknown: they are given as bytes, and counted.
    imperfect = f"1 values of {name} a are no values of its type: null in the output, with their raw bytes; "
    imperfect += "check that the schema is the one of that day"
    earlier = rows_of(run(after, "--history", "--at-time", "2001-01-01", "--table", name, imperfect=imperfect))
    assert {"id": 3, "c": 3, "x": "new"}.items() <= earlier[-1].items()


def test_a_time_needs_a_history(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.cql").write_text("")
    told = run(tmp_path, "--schema", tmp_path / "s.cql", "--at-time", "2026-11-01", code=3)
    assert "say --history, too" in told


def test_a_store_without_history_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "CommitLog-7-1.log").write_bytes(b"")
    assert "has no history of any table" in run(tmp_path, "--history", code=3)
