"""cdcservice: what it refuses before anything is touched, and what it says of a run that is over."""

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringsync.airflow_client import AirflowClient, RunState, TaskState, find_failure
from ringsync.cli import code_of, main, parser
from ringsync.cluster.control import get_limits
from ringsync.cluster.limits import Limits
from ringsync.config import load_config
from ringsync.ledger.gaps import NOT_FOLLOWED, Gap, note_gap
from ringsync.service.runs import Run, report_end
from ringsync.state.undecodable import note_undecodable
from ringsync.status import STOP_KEY
from ringsync.storage.port import ObjectStore
from ringsync.wiring import store_of

RUN = "shop.orders__1"


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGSYNC_AIRFLOW_PASSWORD", "not-shown-anywhere")
    path = tmp_path / "ringsync.yaml"
    path.write_text(
        "server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: lake}\n"
        "airflow: {url: 'http://127.0.0.1:9'}\n"
    )
    return path


@pytest.fixture
def run(configuration: Path) -> Run:
    store = store_of(load_config(configuration))
    return Run(AirflowClient("http://127.0.0.1:9/", "admin", "x"), store, "bootstrap_table", RUN, "shop.orders")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bootstrap"], "the following arguments are required: --table"),
        (["bootstrap", "--table", "orders"], "'orders' is not a table name: write keyspace.table"),
        (["bootstrap", "--table", "shop.orders", "--splits", "0"], "'0' is not a whole number from 1"),
        (["verify", "--table", "shop.orders", "--splits", "3"], "unrecognized arguments: --splits 3"),
        (["bootstrap", "--table", "a.b", "--token-range", "5"], "'5' is not a token range: write START:END"),
        (["bootstrap", "--table", "a.b", "--columns", "a,,b"], "'a,,b' is not a list of columns"),
        (["limits", "--rows-per-s", "0"], "'0' is not a number above 0, nor none"),
        (["limits", "--concurrent-requests", "1.5"], "'1.5' is not a whole number from 1"),
        (["limits", "--reset", "--rows-per-s", "5"], "--reset does not go with --rows-per-s"),
        (["sync"], "invalid choice: 'sync'"),
        (["bootstrap", "--table", "a.b", "--token-range", "-5:9"], "such as --token-range=-5:9"),
        (["bootstrap", "--table", "a.b", "--where", ""], "argument --where: it is empty"),
        (["bootstrap", "--table", "a.b", "--token-range=5:5"], "'5:5' is the whole ring"),
        (["bootstrap", "--table", "a.b", "--cancel", "--dry-run"], "--cancel does not go with --dry-run"),
        (["bootstrap", "--table", "a.b", "--cancel", "--wait", "--restart"], "does not go with --restart, --wait"),
        (["bootstrap", "--table", "a.b", "--cancel", "--mode", "sstable"], "--cancel does not go with --mode"),
        (["bootstrap", "--table", "a.b", "--cancel", "--no-verify"], "--cancel does not go with --no-verify"),
        (["bootstrap", "--cancel"], "the following arguments are required: --table"),
        (["start", "--check", "--timeout", "9"], "--check does not go with --timeout"),
        (["status", "--json", "--prometheus"], "not allowed with argument"),
    ],
)
def test_wrong_arguments_are_explained_with_exit_code_3(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 3
    error = capsys.readouterr().err
    assert message in error
    assert "ringsync: error: " in error


def test_a_file_of_tables_is_explained(configuration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "tables"
    for text, message in (
        (None, "tables: cannot read the names of tables"),
        ("# none\n\n", "names no table: write one name or pattern a line"),
        ("shop.*  # all\nshop orders\n", "tables:2: 'shop' is not a table name"),
        ("shop.*\ncrm.c?\n", "Airflow is not reachable"),
    ):
        if text is not None:
            listed.write_text(text)
        assert main(["verify", "--tables-from", str(listed), "--conf", str(configuration)]) == 3
        assert message in capsys.readouterr().err


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bootstrap", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--table", "--conf", "--splits", "--no-verify", "--dry-run", "--wait", "exit codes:"):
        assert option in shown


HEAVY = ("numba", "pyarrow", "numpy", "cassandra", "pyspark", "deltalake", "confluent_kafka", "pydantic", "requests")


def libraries_after(arguments: list[list[str]]) -> set[str]:
    """Which heavy libraries a fresh process has loaded after it was asked these things."""
    program = (
        "import contextlib, io, json, sys\nfrom ringsync.cli import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(arguments)\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout))


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


def test_help_needs_no_library() -> None:
    pages = [[*one.prog.split()[1:], "--help"] for one in parsers(parser())]
    assert len(pages) > 15
    wrong = [["bootstrap", "--table", "orders"], ["limits", "--rows-per-s", "0"], ["inspect", "idx"], ["sync"]]
    assert libraries_after([["--version"], *pages, *wrong]) == set()


@pytest.mark.parametrize("command", ["status", "alarms", "limits"])
def test_a_look_at_the_store_needs_neither_kernels_nor_driver(configuration: Path, command: str) -> None:
    """Also while something is wrong."""
    store = store_of(load_config(configuration))
    note_gap(store, Gap(NOT_FOLLOWED, "", "0-0-1", 0, 1, {"0": "shop.orders"}, ()))
    note_undecodable(store, "4e5d")
    loaded = libraries_after([[command, "--conf", str(configuration)]])
    assert "pydantic" in loaded
    assert not loaded & (set(HEAVY) - {"pydantic", "requests"})


def test_the_code_of_every_command_is_there() -> None:
    """It is named by text, and imported when the command runs."""
    names = {one.get_default("command") for one in parsers(parser())} - {None}
    assert len(names) > 15
    for name in names:
        assert callable(code_of(name)), name


def test_limits_are_set_one_by_one_shown_and_reset(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of(load_config(configuration))

    def limits(*options: str) -> list[str]:
        assert main(["limits", "--conf", str(configuration), *options]) == 0
        return [line.strip() for line in capsys.readouterr().out.splitlines()]

    assert limits()[:2] == ["limits of all runs together, from the configuration:", "rows a second: no limit"]
    limits("--rows-per-s", "20000")
    shown = limits("--megabytes-per-s", "2.5", "--concurrent-requests", "8")
    assert shown == [
        "limits of all runs together, set here:",
        "rows a second: 20,000",
        "megabytes of result pages a second: 2.5",
        "pages on their way at once: 8",
    ]
    assert get_limits(store) == Limits(20_000, 2_500_000, 8)
    limits("--rows-per-s", "none")
    assert get_limits(store) == Limits(None, 2_500_000, 8)
    assert "from the configuration" in limits("--reset")[0]
    assert get_limits(store) is None


def test_a_missing_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--table", "shop.orders", "--conf", str(tmp_path / "none.yaml")]) == 3
    assert "none.yaml: cannot read the configuration" in capsys.readouterr().err


def test_a_missing_password_is_named(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RINGSYNC_AIRFLOW_PASSWORD")
    assert main(["verify", "--table", "shop.orders", "--conf", str(configuration)]) == 3
    assert "RINGSYNC_AIRFLOW_PASSWORD is not set" in capsys.readouterr().err


def test_an_unreachable_airflow_is_named(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bootstrap", "--table", "shop.orders", "--conf", str(configuration)]) == 3
    error = capsys.readouterr().err
    assert "Airflow is not reachable at http://127.0.0.1:9" in error
    assert "not-shown-anywhere" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schema", "s", "--raw", "--format", "cql"], "--raw is for --format jsonl"),
        (["--schema", "s", "--remaining-ttl"], "--remaining-ttl is for --format cql"),
        (["--schema", "s", "--conf", "c"], "--conf is for --contact-point and --history"),
        (["--schema", "s", "--at-time", "2026-11-01"], "--at-time chooses a version of the history"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "commitlog", str(tmp_path), *arguments]) == 3
    assert message in capsys.readouterr().err


def test_stop_without_airflow_says_what_it_did(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--conf", str(configuration)]) == 1
    shown = capsys.readouterr()
    assert "Airflow is not reachable at http://127.0.0.1:9" in shown.err
    assert "the loops end all the same, after their cycle" in shown.out
    assert "still on in Airflow: commitlog_stage, bucket_close, out_of_sequence" in shown.out
    assert store_of(load_config(configuration)).stat(STOP_KEY) is not None


def test_a_good_end_shows_the_numbers(run: Run) -> None:
    put_report(run.store, "bootstrap_prepare", {"exit_code": 0, "ranges": 40, "seconds": 4.25})
    put_report(run.store, "bootstrap_scan", {"exit_code": 0, "rows": 1_200_000, "cells": 5_000_000, "seconds": 60})
    put_report(run.store, "replica_verify", {"exit_code": 0, "rows": 1_200_000, "differences": 0, "seconds": 75.0})
    code, shown = ended(run, "success", {"prepare": "success", "scan": "success", "verify": "success"})
    assert code == 0
    assert shown == [
        "prepare: 40 ranges, 4.2 s",
        "scan: 1,200,000 rows, 5,000,000 cells, 0:01:00, 20,000 rows/s",
        "verify: 1,200,000 rows, 0 differences, 0:01:15, 16,000 rows/s",
    ]


def test_differences_are_exit_code_1(run: Run) -> None:
    put_report(run.store, "replica_verify", {"exit_code": 1, "rows": 10, "differences": 2, "seconds": 1.0})
    code, shown = ended(run, "failed", {"prepare": "success", "scan": "success", "verify": "failed"})
    assert code == 1
    assert "verify: failed: 10 rows, 2 differences, 1.0 s, 10 rows/s" in shown


def test_of_several_tables_the_sums_are_shown_and_who_has_failed(run: Run) -> None:
    both = {"tables_done": 2, "tables_failed": 1, "failed": {"shop.c": {"error": "no rights", "exit_code": 3}}}
    forecast = {"rows": 5, "rows_low": 4, "rows_high": 7, "bytes": 1_000_000, "at_least": False, "exact": False}
    table = {"forecast": {**forecast, "seconds_at_the_limits": 30}, "splits": 2, "continues": "x"}
    dry = {**both, "dry_run": True, "tables": {"shop.a": table, "shop.b": table}}
    put_report(run.store, "bootstrap_prepare", dry)
    put_report(run.store, "bootstrap_scan", {**both, "rows": 20, "seconds": 2.0})
    error = "1 of 3 tables failed, the other 2 are done:\nshop.c: no rights"
    put_report(run.store, "replica_verify", {**both, "exit_code": 1, "error": error})
    code, shown = ended(run, "failed", {"prepare": "success", "scan": "success", "verify": "failed"})
    assert code == 1
    assert shown[:-1] == [
        "prepare: 2 tables (1 failed), about 10 rows (8 to 14), 2.0 MB, 4 splits, 0:01:00 at the configured limits, "
        "would continue 2 bootstraps",
        "scan: 2 tables (1 failed), 20 rows, 2.0 s, 10 rows/s",
        "verify: failed: 1 of 3 tables failed, the other 2 are done:",
        "shop.c: no rights",
    ]


def test_a_size_that_is_unknown_is_no_number(run: Run) -> None:
    """A place that could not be read leaves no forecast, and fails nothing."""
    table = {"splits": 2, "continues": None}
    unread = {**table, "forecast": {"unknown": "token range (1, 2] could not be read"}}
    put_report(run.store, "bootstrap_prepare", {"dry_run": True, **unread})
    assert ended(run, "success", {"prepare": "success"}) == (
        0,
        ["prepare: size unknown: token range (1, 2] could not be read, 2 splits"],
    )
    numbers = {"rows": 5, "rows_low": 5, "rows_high": 5, "bytes": 1_000_000, "at_least": False, "exact": True}
    known = {**table, "forecast": {**numbers, "seconds_at_the_limits": None}}
    both = {"tables_done": 2, "tables_failed": 0, "dry_run": True, "tables": {"shop.a": unread, "shop.b": known}}
    put_report(run.store, "bootstrap_prepare", both)
    assert ended(run, "success", {"prepare": "success"})[1] == [
        "prepare: 2 tables, size unknown of 1 tables: token range (1, 2] could not be read, 5 rows, 1.0 MB, 4 splits",
    ]


def test_a_failure_shows_its_error_and_where_to_look(run: Run) -> None:
    put_report(run.store, "bootstrap_prepare", {"exit_code": 3, "error": "no table shop.orders: check its name"})
    states = {"prepare": "failed", "scan": "upstream_failed", "verify": "upstream_failed"}
    code, shown = ended(run, "failed", states)
    assert code == 3
    assert shown == [
        "prepare: failed: no table shop.orders: check its name",
        "scan: upstream failed",
        "verify: upstream failed",
        f"look at it: http://127.0.0.1:9/dags/bootstrap_table/runs/{RUN}",
    ]


def test_a_node_without_a_snapshot_is_told_though_the_run_succeeds(run: Run) -> None:
    error = "node 10.0.0.2: nodetool failed"
    put_report(run.store, "bootstrap_scan", {"exit_code": 0, "rows": 20, "seconds": 2.0})
    run.store.put(f"reports/sstable_snapshot/{RUN}.rack-2.json", json.dumps({"exit_code": 3, "error": error}).encode())
    snapshots = {"snapshot_default": "success", "snapshot_rack-2": "failed", "snapshots_ended": "success"}
    code, shown = ended(run, "success", {"prepare": "success", **snapshots, "scan": "success"})
    assert code == 0
    assert shown == [
        *("prepare: done", "snapshot_default: done", f"snapshot_rack-2: failed: {error}"),
        "scan: 20 rows, 2.0 s, 10 rows/s",
    ]


def test_a_run_that_was_marked_failed_is_no_success(run: Run) -> None:
    code, _ = ended(run, "failed", {"prepare": "success", "scan": "skipped", "verify": "skipped"})
    assert code == 5


def test_the_reason_is_found_in_a_log() -> None:
    detail = {"exc_type": "AirflowFailException", "exc_value": "no table [prepare: exit code 3]", "frames": []}
    log = [{"event": "::group::Pre"}, {"event": "x"}, {"event": "Task failed", "error_detail": [detail]}, {"event": ""}]
    assert find_failure(log).message == "no table [prepare: exit code 3]"
    assert find_failure(log).final


def test_without_an_exception_the_end_of_the_log_is_the_reason() -> None:
    failure = find_failure(["::group::Pre", "one", "two"], lines=1)
    assert failure.message == "the end of its log:\n  two"
    assert not failure.final


def put_report(store: ObjectStore, application: str, report: dict[str, Any]) -> None:
    store.put(f"reports/{application}/{RUN}.json", json.dumps(report).encode())


def ended(run: Run, state: str, tasks: dict[str, str]) -> tuple[int, list[str]]:
    out = io.StringIO()
    states = tuple(TaskState(task, one, 1, 1.0) for task, one in tasks.items())
    code = report_end(run, RunState(run.dag, run.run, state, states), Console(file=out, width=200, soft_wrap=True))
    return code, out.getvalue().splitlines()
