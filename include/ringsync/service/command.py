"""Commands of the sync as a whole: ``cdcservice start``, ``stop``, ``status`` and ``wait``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.session import ClusterError, connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.ledger.alarms import raised_now
from ringsync.ledger.database import note_database
from ringsync.metrics import exposition
from ringsync.service.checks import CHECKS, is_of_scylla, longest_sync_period_ms
from ringsync.service.expected import Expected, expected_in, expected_of
from ringsync.service.health import REPROCESS
from ringsync.service.look import client_of, look
from ringsync.service.published import wait_until_published
from ringsync.service.show import status_lines
from ringsync.service.table_checks import CheckError
from ringsync.service.workers import WorkerReports, stage_reports, told_before, wait_for_workers
from ringsync.status import BOOTSTRAPS, STALE_AFTER_S, STOP_KEY, age_s, forget, read_statuses
from ringsync.steps.application import ExitCode
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.wiring import cluster_settings, store_of

EXIT_CODES = """\
exit codes: 0 done, or all is well; 1 start: a worker cannot use cdc_raw of its nodes, a CDC log cannot be read, or
there was no report in time; stop: tasks have not ended in time; status: something is wrong; 3 configuration, connection
or rights: nothing was started; 4 interrupted"""

START_TIMEOUT_S = 300.0
"""Seconds that ``start`` waits for the workers by default: Airflow and Spark need a minute or two to start."""

STOP_TIMEOUT_S = 300.0
"""Seconds that ``stop`` waits for the loops by default; a merge of replicas may take longer."""

WAIT_EXIT_CODES = """\
exit codes: 0 all is published; 1 not in time, or a loop does not run: the last line says what is waited for;
3 configuration, connection or rights; 4 interrupted"""

WAIT_TIMEOUT_S = 1800.0
"""Seconds that ``wait`` waits by default: six times as long as buckets of the default length are open."""

Command = Callable[[argparse.Namespace, Console], ExitCode]


def add_service(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """

    def add(
        name: str, run: Command, help: str, about: str, epilog: str = EXIT_CODES, timeout_s: float = 0.0
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=about, epilog=epilog)
        add_conf(parser)
        if timeout_s:
            about_timeout = "wait so long (default: %(default).0f s)"
            parser.add_argument("--timeout", type=_seconds, default=timeout_s, metavar="S", help=about_timeout)
        parser.set_defaults(command=run)
        return parser

    start = add(
        "start",
        _start,
        "follow the commit logs, or the CDC logs of ScyllaDB",
        "Check configuration, cluster, object store, brokers and Airflow, start the sync, and wait until the worker of "
        "each queue has found that it can list, read and delete in cdc_raw of its nodes. The cluster is asked whether "
        "it is ScyllaDB; then its CDC logs are read.",
        timeout_s=START_TIMEOUT_S,
    )
    start.add_argument("--check", action="store_true", help="check only, start nothing")
    add(
        "stop",
        _stop,
        "stop following the logs",
        "Let the loops finish their cycle, and start nothing more.",
        timeout_s=STOP_TIMEOUT_S,
    )
    status = add(
        "status",
        _status,
        "lag, backlog and what is wrong",
        "Show how the sync stands: docs/sync.md explains each number.",
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as one JSON object")
    form.add_argument("--prometheus", action="store_true", help="the numbers as Prometheus reads them")
    add(
        "wait",
        _wait,
        "wait until all that was written before now is published",
        "Wait until all that was written before now is in the streams, the replicas and Kafka, while others go on "
        "writing. docs/sync.md says how long that takes, and what it relies on.",
        WAIT_EXIT_CODES,
        WAIT_TIMEOUT_S,
    )


def _seconds(text: str) -> float:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def _start(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    expected = expected_of(config, _asked_for_scylla(config))
    checks = {**CHECKS, "airflow": lambda config: check_airflow(config, expected)}
    failed = [name for name, check in checks.items() if not _passes(name, check, config, console)]
    if failed:
        say(console, f"nothing was started: {', '.join(failed)}")
        return ExitCode.FATAL
    store = store_of(config)
    if arguments.check:
        return _check_workers(store, expected, console)
    # The loops would create it, too, but if two create a table at the same moment, it may exist twice.
    create_state(connect(cluster_settings(config)), config)
    note_database(store, expected.of_scylla)
    before = read_statuses(store)
    for loop in before:
        if loop not in expected.loops and not loop.startswith((BOOTSTRAPS, REPROCESS)):
            forget(store, loop)
    store.delete(STOP_KEY)
    _switch_on(client_of(config), expected)
    say(console, f"started: {', '.join(expected.all_dags)}; cdcservice status shows how they stand")
    seen = told_before(before, expected)
    reports = wait_for_workers(store, expected, seen, arguments.timeout, lambda text: say(console, text))
    return _print_reports(reports, console)


def _asked_for_scylla(config: Config) -> bool:
    """Ask the cluster whether it is ScyllaDB. If it does not answer, its check says why, and nothing is started."""
    try:
        return is_of_scylla(config)
    except (ClusterError, ConfigError):
        return False


def _switch_on(client: AirflowClient, expected: Expected) -> None:
    """Switch on what has to run. What is for the other database goes off first: it would read nothing, and fail."""
    for dag in expected.needless_dags:
        client.set_paused(dag, True)
    for dag in expected.all_dags:
        client.set_paused(dag, False)


def _check_workers(store: ObjectStore, expected: Expected, console: Console) -> ExitCode:
    """Print the reports of the workers that run already; the others report when they are started."""
    now_s, statuses = time.time(), read_statuses(store)
    alive = {loop: status for loop, status in statuses.items() if age_s(status, now_s) < STALE_AFTER_S}
    reports = stage_reports(alive, expected, {})
    for name in reports.silent:
        say(console, reports.words.idle.format(name))
    if not (reports.usable or reports.refused):
        return ExitCode.OK
    return _print_reports(replace(reports, silent={}), console)


def _print_reports(reports: WorkerReports, console: Console) -> ExitCode:
    words = reports.words
    wrong = [f"{words.silent.format(name)}: {why}" for name, why in reports.silent.items()]
    for problem in (*reports.refused, *wrong):
        say_error(problem)
    if reports.refused or reports.silent:
        say(console, "the workers go on trying; what can be read is published")
        return ExitCode.COMPLETED_WITH_ERRORS
    say(console, f"{words.usable}: {', '.join(reports.usable) or words.nothing}")
    return ExitCode.OK


def _passes(name: str, check: Callable[[Config], list[str]], config: Config, console: Console) -> bool:
    try:
        remarks = check(config)
    except (CheckError, ConfigError, ClusterError, StorageError, AirflowError) as error:
        say_error(error)
        return False
    for remark in remarks:
        say(console, f"{name}: {remark}")
    return True


def check_airflow(config: Config, expected: Expected) -> list[str]:
    """Check that Airflow answers, lets us in, and has the DAGs, also those that are switched off.

    :raises AirflowError: it does not answer, refuses us, or lacks a DAG
    :raises ConfigError: the password cannot be read
    """
    client = client_of(config)
    is_paused = {dag: client.is_paused(dag) for dag in (*expected.all_dags, *expected.needless_dags)}
    paused = [dag for dag in expected.all_dags if is_paused[dag]]
    return [f"{client.url} has the DAGs" + (f", paused: {', '.join(paused)}" if paused else ", all running")]


def _stop(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store, client = store_of(config), client_of(config)
    expected = expected_in(config, store)
    # This object comes first: it ends the loops even while Airflow is away.
    store.put(STOP_KEY, json.dumps({"at_ms": int(time.time() * 1000)}).encode())
    for dag in expected.dags:
        client.set_paused(dag, True)
    busy = wait_until_idle(client, expected.dags, arguments.timeout, console)
    if busy:
        say_error(
            f"after {arguments.timeout:.0f} s these tasks still run: {', '.join(busy)}; they end when they are done, "
            "and no new task begins"
        )
        return ExitCode.COMPLETED_WITH_ERRORS
    left = ", ".join(expected.lasting_dags)
    say(console, f"stopped; {expected.meanwhile} until cdcservice start. Still on: {left}")
    return ExitCode.OK


def wait_until_idle(
    client: AirflowClient,
    dags: Sequence[str],
    timeout_s: float,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until no task of the sync runs.

    :param dags: DAGs whose tasks are waited for
    :returns: tasks that still run at the end of the time, ``DAG.task``
    """
    end, printed = clock() + timeout_s, None
    while busy := [f"{dag}.{task}" for dag in dags for task in client.busy_tasks(dag)]:
        if clock() >= end:
            return busy
        if busy != printed:
            say(console, f"waiting for {', '.join(busy)}")
            printed = busy
        sleep(1.0)
    return []


def _status(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store = store_of(config)
    if arguments.prometheus:
        raised = [alarm.labels for alarm in raised_now(store)]
        sys.stdout.write(exposition(read_statuses(store), raised))
        return ExitCode.OK
    now_s = time.time()
    seen = look(config, store, now_s)
    if arguments.json:
        document = {
            "healthy": not seen.problems,
            "problems": [{"kind": one.kind, "where": one.where, "text": one.text} for one in seen.problems],
            "stopped": seen.stopped,
            "loops": seen.statuses,
            "dags": {dag: asdict(health) for dag, health in seen.dags.items()},
        }
        print(json.dumps(document, indent=2))
    else:
        for line in status_lines(seen.statuses, seen.dags, now_s):
            say(console, line)
        for problem in seen.problems:
            say(console, f"! {problem.text} ({problem.page})")
        if not seen.problems:
            say(console, "all is well")
    return ExitCode.COMPLETED_WITH_ERRORS if seen.problems else ExitCode.OK


def _wait(arguments: argparse.Namespace, console: Console) -> ExitCode:
    began_s = time.time()
    config = load_config(arguments.conf)
    synced_ms = int(began_s * 1000) + longest_sync_period_ms(config)
    printed = ""

    def tell(left: str) -> None:
        nonlocal printed
        if left != printed:
            say(console, f"waiting: {left}")
            printed = left

    waited = wait_until_published(
        store_of(config), config.sync, synced_ms, arguments.timeout, kafka=config.kafka is not None, tell=tell
    )
    if waited.left:
        say_error(f"not all is published: {waited.left}")
        return ExitCode.COMPLETED_WITH_ERRORS
    for note in waited.notes:
        say(console, note)
    moment = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds")
    places = "streams, replicas and Kafka" if config.kafka else "streams and replicas"
    say(console, f"what was written before {moment} is in {places}, {time.time() - began_s:.0f} s later")
    return ExitCode.OK


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False)


def say_error(error: object) -> None:
    """Print an error on stderr."""
    print(f"ringsync: error: {error}", file=sys.stderr, flush=True)
