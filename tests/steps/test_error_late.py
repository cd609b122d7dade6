"""Real mutations whose table's schema was withheld: cdcservice tries them again, and the real late step publishes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from ringsync.changes.columns import logged_tables
from ringsync.cli import main
from ringsync.cluster.control import ControlServer
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import close_all, connect
from ringsync.config import load_config
from ringsync.formats.commitlog.reader import ERROR_ROWS, read_log
from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.schema.table import TableSchema
from ringsync.state.out_of_sequence import OutOfSequence
from ringsync.state.processor_error import OVERFLOW, ErrorTable
from ringsync.state.undecodable import with_undecodable
from ringsync.status import LATE_ROWS, STOP_KEY
from ringsync.steps.application import Application
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream
from ringsync.wiring import cluster_settings, store_of
from servers.cassandra import CassandraNode

pytestmark = pytest.mark.server


@pytest.fixture
def conf(cassandra: CassandraNode, session: Any, tmp_path: Path) -> Iterator[str]:
    """A configuration whose state is in a keyspace of its own."""
    document = {
        "server_name": "test",
        "cassandra": {"contact_points": [cassandra.contact_point], "port": cassandra.port},
        "store": {"url": "lake"},
        "state": {"keyspace": "t_error_late_state"},
        "sync": {"max_errors_per_hour": 4},
    }
    path = tmp_path / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    create_state(session, load_config(path))
    yield str(path)
    session.execute("DROP KEYSPACE t_error_late_state")
    close_all()


def undecodable(cassandra: CassandraNode, table: TableSchema, count: int) -> pa.RecordBatch:
    """The table's mutations as the stage keeps them if no schema has the table; they are synced within a second."""
    end, table_id = time.monotonic() + 20, bytes.fromhex(table.table_id)
    while True:
        found = [
            {**record, "file": path.name}
            for path in sorted(cassandra.cdc_raw.glob("CommitLog-*.log"))
            for batch in read_log(path.read_bytes(), path.name, logged_tables([])).batches
            for record in batch.undecoded.to_pylist()
            if record["table_id"] == table_id
        ]
        if len(found) >= count or time.monotonic() > end:
            assert len(found) == count
            return pa.RecordBatch.from_pylist(found, ERROR_ROWS)
        time.sleep(0.2)


def test_withheld_mutations_are_published_once(
    cassandra: CassandraNode, session: Any, keyspace: str, conf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{keyspace}.orders"
    session.execute(f"CREATE TABLE {name} (id int, seq int, v text, w text, PRIMARY KEY (id, seq)) WITH cdc = true")
    for seq in range(6):
        session.execute(f"INSERT INTO {name} (id, seq, v, w) VALUES (1, {seq}, 'v{seq}', 'w')")
    session.execute(f"DELETE FROM {name} WHERE id = 1 AND seq = 5")
    table, config = read_table(session, keyspace, "orders"), load_config(conf)
    store = store_of(config)
    node = str(session.execute("SELECT host_id FROM system.local").one().host_id)
    records = undecodable(cassandra, table, 7)
    session.execute(f"ALTER TABLE {name} DROP w")
    session.execute(f"ALTER TABLE {name} ADD x int")
    session.execute(f"INSERT INTO {name} (id, seq, x) VALUES (1, 4, 44)")
    errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
    errors.put(records, node)
    assert with_undecodable(store) == [node]

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["errors", *arguments, "--conf", conf])
        said = capsys.readouterr()
        return code, said.out + said.err

    def listed() -> dict[str, Any]:
        code, said = run("list", "--json")
        assert code == 0
        found: dict[str, Any] = json.loads(said)
        return found

    assert listed()["records"] == 7
    assert len(store.list(OVERFLOW)) == 1
    first, last = records.to_pylist()[0], records.to_pylist()[-1]
    for one in (first, last):
        code, said = run("show", node, one["file"], str(one["position"]))
        assert code == 0, said
        assert one["raw"][:16].hex(" ") in said
        assert f'"keyspace":"{keyspace}","table":"orders"' in said
        assert "it can be decoded now, and has 1 change rows" in said

    store.put(STOP_KEY, b"{}")
    code, said = run("retry", "--node", node, "--json")
    report = json.loads(said)
    assert (code, report["read"], report["waits"]) == (1, 7, 7)
    assert "the sync is stopped" in report["waits_because"]
    assert sum(group["waits"] for group in listed()["groups"]) == 7
    store.delete(STOP_KEY)
    run_late(conf, session)
    code, said = run("retry", "--json")
    assert (code, json.loads(said)["earlier"]) == (0, {"published": 7})
    assert (listed()["records"], store.list(LATE_ROWS), store.list(OVERFLOW)) == (0, [], [])
    assert with_undecodable(store) == [], "none is left"

    said_of = messages(store, table)
    assert len(said_of) == 6
    after = {one["after"]["seq"]: one["after"] for one in said_of if one["after"]}
    assert after == {row.seq: row._asdict() for row in session.execute(f"SELECT id, seq, v, x FROM {name}")}
    assert [one["op"] for one in said_of].count("d") == 1
    # The stage was killed, and has put them once more.
    errors.put(records.slice(0, 2), node)
    assert with_undecodable(store) == [node]
    code, said = run("retry", "--json")
    assert (code, json.loads(said)["was_published"]) == (0, 2)
    assert with_undecodable(store) == []
    assert len(messages(store, table)) == 6

    damage = pa.RecordBatch.from_pylist([{**first, "raw": None, "reason": "torn", "table_id": None}], ERROR_ROWS)
    errors.put(damage, node)
    assert len(store.list(OVERFLOW)) == 1
    code, said = run("discard", node, first["file"], str(first["position"]), "--reason", "repaired", "--yes")
    assert code == 3
    (row,) = (row for _, file in errors.files(node) for row in errors.rows(node, file))
    assert f"it is one of 1 records of {row.key}" in said
    assert run("discard", *str(row.key).split(), "--reason", "repaired", "--yes")[0] == 0
    ErrorTable(session, config.state.keyspace, store).put(damage, node)
    one = (node, first["file"], str(first["position"]))
    code, said = run("retry")
    assert code == 1
    assert "is damage, and has no bytes" in said
    assert run("discard", *one, "--reason", " ", "--yes")[0] == 3
    assert "say --yes" in run("discard", *one, "--reason", "repaired")[1]
    assert run("discard", *one[:2], "1", "--reason", "repaired", "--yes")[0] == 3
    assert listed()["records"] == 1
    code, said = run("discard", "--all", "--node", node, "--file", first["file"], "--reason", "repaired", "--yes")
    assert code == 0, said
    assert listed()["records"] == 0
    whole, audit = (json.loads(store.get(stat.key)) for stat in store.list("errors/discarded/"))
    assert (whole["rows"][0]["raw_object"], whole["rows"][0]["records"]) == (row.raw_object, 1)
    assert (audit["reason"], audit["rows"][0]["position"]) == ("repaired", first["position"])


def run_late(conf: str, session: Any) -> None:
    """The real late step, without Airflow."""
    config = load_config(conf)
    application = Application("out_of_sequence", conf, config, store_of(config), None, "r", None)  # type: ignore[arg-type]
    with ControlServer() as control:
        passes = LatePasses(application, connect(cluster_settings(config)), control.address)
        late = LateRows(application.store, OutOfSequence(session, config.state.keyspace), passes)
        late.cycle()
    assert not late.problems


def messages(store: Any, table: TableSchema) -> list[dict[str, Any]]:
    """What the passes of a table say."""
    assert isinstance(store, LocalStore)
    stream, found = FileStream(store, f"test.{table.keyspace}.{table.name}"), []
    for number in pass_numbers(store, table.table_id):
        made = get_pass(store, table.table_id, number)
        stream.publish(made.folder, made.parts)
        found += [message["value"] for message in stream.read(made.folder)]
    return found
