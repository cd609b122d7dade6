"""Many tables in one run: each is done or fails for itself, and a killed run goes on where each table stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cassandra.concurrent import execute_concurrent_with_args

from ringsync.cli import main
from ringsync.cluster.schema import read_table
from ringsync.config import load_config
from ringsync.replica.folders import base_folder
from ringsync.state.session import StateSession
from ringsync.status import BOOTSTRAPS, read_statuses
from ringsync.steps.application import ExitCode
from ringsync.steps.bootstrap.plan import plans_of
from ringsync.wiring import store_of
from servers.cassandra import CassandraNode, NodeSettings
from tests.chaos.applications import finished, finished_here, session_of, started
from tests.chaos.bootstraps import (
    change_conf,
    check,
    committed_rows,
    load_partitions,
    progress_of,
    say_emptied,
    scan_report,
    write_conf,
)
from tests.chaos.processes import command_of, parent_of

pytestmark = [pytest.mark.server, pytest.mark.spark]

STEPS = ("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain", "replica_verify")
MANY, ROWS = 300, 1000
MANY_S = 180.0


def report_of(conf: Path, step: str, run: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(store_of(load_config(conf)).get(f"reports/{step}/{run}.json"))
    return report


def states(session: Any, keyspace: str) -> dict[str, str]:
    """The state of the bootstrap of each table of a keyspace."""
    rows = session.execute("SELECT keyspace_name, table_name, state FROM cdc.bootstrap")
    return {row.table_name: row.state for row in rows if row.keyspace_name == keyspace}


@pytest.mark.usefixtures("spark")
def test_one_fails_and_a_kill_costs_nothing(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path
) -> None:
    """Six tables; one is altered before it is read. The driver is killed once some, but not all, are copied."""
    log, rows = tmp_path / "log", 2000
    conf = write_conf(tmp_path, [cassandra], scan={"commit_interval_s": 0.5}, cassandra={"page_size": 200})
    for number in range(6):
        name = f"{keyspace}.t{number}"
        session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
        load_partitions(session, name, range(rows // 10), 10)
    wanted = f"{keyspace}.t?, {keyspace}.absent"
    assert finished_here(STEPS[0], conf, wanted, "six") == ExitCode.OK
    session.execute(f"ALTER TABLE {keyspace}.t3 ADD w int")
    change_conf(conf, limits={"rows_per_s": 1500})
    with started(log, STEPS[1], conf, wanted, "six") as process:
        while progress_of(conf, "six").tables_done < 2:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    # Without the killed driver nothing is committed any more.
    plans = plans_of(store_of(load_config(conf)), "six").values()
    assert 2 * rows <= (done := sum(committed_rows(conf, plan.bootstrap.id) for plan in plans)) < 5 * rows
    change_conf(conf, limits={})
    assert finished_here(STEPS[1], conf, wanted, "six") == ExitCode.OK
    scan = scan_report(conf, "six")
    assert (scan["rows_of_runs_before"], scan["rows_read"]) == (done, 5 * rows - done), "nothing is read again"
    assert finished_here(STEPS[2], conf, wanted, "six") == ExitCode.OK
    assert finished_here(STEPS[3], conf, wanted, "six") == ExitCode.COMPLETED_WITH_ERRORS
    verified = report_of(conf, STEPS[3], "six")
    assert (verified["tables_done"], verified["differences"], verified["rows"]) == (5, 0, 5 * rows)
    assert "2 of 7 tables failed, the other 5 are done" in verified["error"]
    assert f"{keyspace}.t3: the schema of {keyspace}.t3 changed" in verified["error"]
    assert f"there is no table {keyspace}.absent" in verified["error"]
    assert states(session, keyspace) == {f"t{n}": "scanning" if n == 3 else "completed" for n in range(6)}
    for number in (0, 1, 2, 4, 5):
        check(conf, f"{keyspace}.t{number}", session, scan["tables"][f"{keyspace}.t{number}"], rows)
    # The failed one is done by the next run for it.
    again = f"{keyspace}.t3,{keyspace}.t4"
    assert [finished_here(step, conf, again, "again") for step in STEPS] == [0, 0, 0, 0]
    assert states(session, keyspace) == {f"t{n}": "completed" for n in range(6)}


def test_a_worker_that_dies_costs_nothing(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path
) -> None:
    """Spark ends the job of all tables then. What was committed stays, and what was left is read in the next wave."""
    log, rows = tmp_path / "log", 3000
    sections = {"scan": {"commit_interval_s": 0.3}, "cassandra": {"page_size": 100}, "limits": {"rows_per_s": 1000}}
    conf = write_conf(tmp_path, [cassandra], **sections)
    for number in range(3):
        name = f"{keyspace}.w{number}"
        session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
        load_partitions(session, name, range(rows // 10), 10)
    wanted = f"{keyspace}.w?"
    assert finished_here(STEPS[0], conf, wanted, "dies") == ExitCode.OK
    with started(log, STEPS[1], conf, wanted, "dies") as process:
        while progress_of(conf, "dies").ranges_done < 3:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        daemons = [pid for pid in session_of(process.pid) if "-m ringsync.spark_daemon" in command_of(pid)]
        os.kill(next(pid for pid in daemons if parent_of(pid) in daemons), signal.SIGKILL)  # one that reads
        change_conf(conf, limits={})
        assert process.wait(180) == ExitCode.OK, log.read_text()[-3000:]
    assert "a Spark task failed" in log.read_text()
    scan = scan_report(conf, "dies")
    assert (scan["tables_done"], scan["rows_read"], scan["rows_discarded"]) == (3, 3 * rows, 0)
    for number in range(3):
        check(conf, f"{keyspace}.w{number}", session, scan["tables"][f"{keyspace}.w{number}"], rows)


POISON = """
import os, signal, sys

if "ringsync.spark_daemon" in sys.orig_argv:
    from ringsync.sources.scan import images

    read = images.read_images

    def read_or_die(config, plan, *more):
        if plan.table.name == os.environ["POISONOUS"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(config, plan, *more)

    images.read_images = read_or_die
"""
"""A ``sitecustomize`` of Spark's Python workers: who reads the rows of one table dies, as for want of memory."""


@pytest.mark.usefixtures("spark")
def test_a_table_that_kills_workers_fails_alone(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table kills the workers of the scan, another those of the verification, and one replica cannot be read. All
    others are done. Only the Spark of applications of their own has poison."""
    log, rows, number = tmp_path / "log", 100, 16
    conf = write_conf(tmp_path, [cassandra], verify={"ranges": 4})
    for one in range(number):
        name = f"{keyspace}.p{one:02}"
        session.execute(f"CREATE TABLE {name} (id int, seq int, v int, PRIMARY KEY (id, seq))")
        load_partitions(session, name, range(rows // 10), 10)
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "poison"))
    wanted, died, kills, damaged = f"{keyspace}.p*", "p03", "p05", "p07"
    monkeypatch.setenv("POISONOUS", died)
    assert finished_here(STEPS[0], conf, wanted, "poison") == ExitCode.OK
    assert finished(log, STEPS[1], conf, wanted, "poison") == ExitCode.OK, log.read_text()[-3000:]
    assert finished_here(STEPS[2], conf, wanted, "poison") == ExitCode.OK
    scan = scan_report(conf, "poison")
    assert (scan["tables_done"], scan["rows"]) == (number - 1, (number - 1) * rows)
    assert [*scan["failed"]] == [f"{keyspace}.{died}"]
    assert "a Spark worker has died that was reading it" in scan["failed"][f"{keyspace}.{died}"]["error"]
    for file in (tmp_path / "lake" / base_folder(keyspace, damaged)).glob("*.parquet"):
        file.write_bytes(b"PAR1")
    monkeypatch.setenv("POISONOUS", kills)
    assert finished(log, STEPS[3], conf, wanted, "poison") == ExitCode.COMPLETED_WITH_ERRORS, log.read_text()[-3000:]
    verified = report_of(conf, STEPS[3], "poison")
    assert [*verified["failed"]] == [f"{keyspace}.{one}" for one in (died, kills, damaged)]
    assert "the Spark job that compares only this table fails" in verified["failed"][f"{keyspace}.{kills}"]["error"]
    assert (verified["tables_done"], verified["rows"], verified["differences"]) == (number - 3, (number - 3) * rows, 0)
    # Without poison a further run finishes what is left.
    cured = ",".join(f"{keyspace}.{one}" for one in (died, kills, damaged))
    assert [finished_here(step, conf, cured, "cured") for step in STEPS] == [0, 0, 0, 0]
    assert states(session, keyspace).items() >= {f"p{one:02}": "completed" for one in range(number)}.items()
    # What another run has completed no longer fails the first one, if its last step is done again.
    assert finished_here(STEPS[3], conf, wanted, "poison") == ExitCode.OK
    verified = report_of(conf, STEPS[3], "poison")
    assert (verified["tables_done"], verified["rows"], verified["differences"]) == (number, number * rows, 0)
    assert verified["completed_since"] == [f"{keyspace}.{died}"]


@pytest.mark.chaos
def test_cdc_of_many_is_enabled_and_their_bootstraps_are_cancelled(
    cassandra: CassandraNode, session: Any, keyspace: str, tmp_path: Path
) -> None:
    """The first run is killed in between. The next one enables what is left, and all options are what they were."""
    log, number = tmp_path / "log", 120
    conf = write_conf(tmp_path, [cassandra])
    for one in range(number):
        session.execute(f"CREATE TABLE {keyspace}.c{one:03} (id int PRIMARY KEY, v int) WITH gc_grace_seconds = 777")
    query = "SELECT table_name, cdc, gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = %s"

    def options() -> list[tuple[bool, int]]:
        return [
            (bool(row.cdc), row.gc_grace_seconds)
            for row in session.execute(query, (keyspace,))
            if row.table_name.startswith("c")
        ]

    wanted = f"{keyspace}.c*"
    say_emptied(conf)
    with started(log, STEPS[0], conf, wanted, "cdc", "--enable-cdc") as process:
        while sum(cdc for cdc, _ in options()) < number // 3:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    assert sum(cdc for cdc, _ in options()) < number
    seconds = {}
    for run in ("cdc", "again"):
        say_emptied(conf)
        began = time.monotonic()
        assert finished(log, STEPS[0], conf, wanted, run, "--enable-cdc") == ExitCode.OK, log.read_text()[-3000:]
        seconds[run] = round(time.monotonic() - began, 1)
    assert options() == [(True, 777)] * number
    told = [table["cdc"] for table in report_of(conf, STEPS[0], "again")["tables"].values()]
    assert told == ["was enabled"] * number
    began = time.monotonic()
    assert main(["bootstrap", "--cancel", "--table", wanted, "--conf", str(conf)]) == ExitCode.OK
    seconds["cancel"] = round(time.monotonic() - began, 1)
    print(seconds)
    assert states(session, keyspace).items() >= {f"c{one:03}": "cancelled" for one in range(number)}.items()
    assert not any(key.startswith(BOOTSTRAPS) for key in read_statuses(store_of(load_config(conf))))
    # Nothing is left to cancel: that is said.
    assert main(["bootstrap", "--cancel", "--table", wanted, "--conf", str(conf)]) == ExitCode.FATAL
    assert max(seconds.values()) < 60, seconds


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[CassandraNode]:
    """A node with 300 tables of 1,000 rows. The role ``ringsync`` may read all of them but one."""
    settings = NodeSettings(authenticator="password", heap_mb=1024, short_lived=False).on_free_ports()
    with CassandraNode(tmp_path_factory.mktemp("guarded"), settings, cache) as node:
        cluster = node.cluster()
        session = cluster.connect()
        session.execute("CREATE KEYSPACE many WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}")
        StateSession(session, "cdc").create({"class": "NetworkTopologyStrategy", "datacenter1": "1"})
        session.execute("CREATE ROLE ringsync WITH PASSWORD = 'sesame' AND LOGIN = true")
        for permission in ("SELECT", "MODIFY"):
            session.execute(f"GRANT {permission} ON KEYSPACE cdc TO ringsync")
        for number in range(MANY):
            name = f"many.t{number:03}"
            session.execute(f"CREATE TABLE {name} (id int, seq int, v text, n bigint, PRIMARY KEY (id, seq))")
            insert = f"INSERT INTO {name} (id, seq, v, n) VALUES (?, ?, ?, ?)"
            batch = session.prepare(f"BEGIN UNLOGGED BATCH {'; '.join([insert] * 10)}; APPLY BATCH")
            parameters = [
                tuple(value for seq in range(10) for value in (one, seq, f"value {one} {seq}", one * seq))
                for one in range(ROWS // 10)
            ]
            execute_concurrent_with_args(session, batch, parameters, concurrency=32)
            if number != 7:
                session.execute(f"GRANT SELECT ON {name} TO ringsync")
        cluster.shutdown()
        yield node


@pytest.mark.chaos
def test_three_hundred_tables_take_minutes(guarded: CassandraNode, tmp_path: Path) -> None:
    """From the start of the first application to the end of the verification; one table may not be read."""
    log = tmp_path / "log"
    (tmp_path / "password").write_text("sesame")
    login = {"username": "ringsync", "password": {"file": "password"}}
    conf = write_conf(tmp_path, [guarded], cassandra=login)
    began, codes, seconds = time.monotonic(), [], {}
    for step in STEPS:
        step_began = time.monotonic()
        codes.append(finished(log, step, conf, "many.*", "many", timeout=900))
        seconds[step] = round(time.monotonic() - step_began, 1)
    took = time.monotonic() - began
    print({**seconds, "all": round(took, 1)})
    assert codes == [0, 0, 0, ExitCode.COMPLETED_WITH_ERRORS], log.read_text()[-3000:]
    verified = report_of(conf, "replica_verify", "many")
    assert (verified["tables_done"], verified["rows"], verified["differences"]) == (MANY - 1, (MANY - 1) * ROWS, 0)
    missing = "user ringsync lacks a permission: GRANT SELECT ON TABLE many.t007 TO ringsync;"
    assert verified["error"] == f"1 of {MANY} tables failed, the other {MANY - 1} are done:\nmany.t007: {missing}"
    cluster = guarded.cluster()
    session = cluster.connect()
    assert states(session, "many") == {f"t{n:03}": "completed" for n in range(MANY) if n != 7}
    scan = scan_report(conf, "many")
    for number in (0, 150, 299):
        name = f"many.t{number:03}"
        assert read_table(session, *name.split(".")).name == f"t{number:03}"
        check(conf, name, session, scan["tables"][name], ROWS)
    cluster.shutdown()
    assert took < MANY_S, seconds
