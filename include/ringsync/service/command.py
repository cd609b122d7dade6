"""Commands of the sync as a whole: ``cdcservice start``, ``stop``, ``status`` and ``wait``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.session import ClusterError, connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.ledger.alarms import raised_now
from ringsync.metrics import exposition
from ringsync.service.checks import CHECKS, CheckError, longest_sync_period_ms
from ringsync.service.health import DAGS, REPROCESS, expected_loops
from ringsync.service.look import archive_dags, archives, client_of, dags_of, look
from ringsync.service.published import wait_until_published
from ringsync.service.show import status_lines
from ringsync.service.workers import WorkerReports, wait_for_workers, worker_reports
from ringsync.status import BOOTSTRAPS, STALE_AFTER_S, STOP_KEY, age_s, forget, read_statuses
from ringsync.steps.application import ExitCode
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import StorageError
from ringsync.wiring import cluster_settings, store_of

EXIT_CODES = """\
exit codes: 0 done, or all is well; 1 start: a worker cannot use cdc_raw of its nodes, or has not reported in time;
stop: tasks have not ended in time; status: something is wrong; 3 configuration, connection or rights: nothing was
started; 4 interrupted"""

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
        "follow the commit logs",
        "Check configuration, cluster, object store, brokers and Airflow, start the sync, and wait until the worker of "
        "each queue has found that it can list, read and delete in cdc_raw of its nodes.",
        timeout_s=START_TIMEOUT_S,
    )
    start.add_argument("--check", action="store_true", help="check only, start nothing")
    add(
        "stop",
        _stop,
        "stop following the commit logs",
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
    checks = {**CHECKS, "airflow": check_airflow}
    failed = [name for name, check in checks.items() if not _passes(name, check, config, console)]
    if failed:
        say(console, f"nothing was started: {', '.join(failed)}")
        return ExitCode.FATAL
    if arguments.check:
        return _check_workers(config, console)
    # The loops would create it, too, but if two create a table at the same moment, it may exist twice.
    create_state(connect(cluster_settings(config)), config)
    store, client = store_of(config), client_of(config)
    expected = expected_loops(config.sync.queues, archives=archives(config))
    before = read_statuses(store)
    for loop in before:
        if loop not in expected and not loop.startswith((BOOTSTRAPS, REPROCESS)):
            forget(store, loop)
    store.delete(STOP_KEY)
    for dag in dags_of(config):
        client.set_paused(dag, False)
    if not archives(config):
        for dag in archive_dags(config):
            client.set_paused(dag, True)
    say(console, f"started: {', '.join(dags_of(config))}; cdcservice status shows how they stand")
    queues = config.sync.queues
    seen = {queue: before[loop]["at_ms"] for queue in queues if (loop := f"commitlog_stage/{queue}") in before}
    reports = wait_for_workers(store, queues, seen, arguments.timeout, lambda text: say(console, text))
    return _print_reports(reports, console)


def _check_workers(config: Config, console: Console) -> ExitCode:
    """Print the reports of the workers that run already; the others look at cdc_raw when they are started."""
    now_s, statuses = time.time(), read_statuses(store_of(config))
    alive = {loop: status for loop, status in statuses.items() if age_s(status, now_s) < STALE_AFTER_S}
    reports = worker_reports(alive, config.sync.queues, {})
    for queue in reports.silent:
        say(console, f"queue {queue}: its worker does not run now; it looks at cdc_raw when it is started")
    if not (reports.usable or reports.refused):
        return ExitCode.OK
    return _print_reports(replace(reports, silent={}), console)


def _print_reports(reports: WorkerReports, console: Console) -> ExitCode:
    wrong = [f"queue {queue}: its worker has not looked at cdc_raw: {why}" for queue, why in reports.silent.items()]
    for problem in (*reports.refused, *wrong):
        say_error(problem)
    if reports.refused or reports.silent:
        say(console, "the workers go on trying; what can be read is published")
        return ExitCode.COMPLETED_WITH_ERRORS
    say(console, f"cdc_raw can be listed, read and deleted from: {', '.join(reports.usable) or 'no node is read'}")
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


def check_airflow(config: Config) -> list[str]:
    """Check that Airflow answers, lets us in, and has the DAGs.

    :raises AirflowError: it does not answer, refuses us, or lacks a DAG
    :raises ConfigError: the password cannot be read
    """
    client = client_of(config)
    paused = [dag for dag in dags_of(config) if client.is_paused(dag)]
    return [f"{client.url} has the DAGs" + (f", paused: {', '.join(paused)}" if paused else ", all running")]


def _stop(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store, client = store_of(config), client_of(config)
    # This object comes first: it ends the loops even while Airflow is away.
    store.put(STOP_KEY, json.dumps({"at_ms": int(time.time() * 1000)}).encode())
    for dag in DAGS:
        client.set_paused(dag, True)
    busy = wait_until_idle(client, arguments.timeout, console)
    if busy:
        say_error(
            f"after {arguments.timeout:.0f} s these tasks still run: {', '.join(busy)}; they end when they are done, "
            "and no new task begins"
        )
        return ExitCode.COMPLETED_WITH_ERRORS
    left = (
        f"{', '.join(archive_dags(config))} goes on and archives commit logs"
        if archives(config)
        else "cdc_raw of the nodes fills"
    )
    say(console, f"stopped; {left} until cdcservice start")
    return ExitCode.OK


def wait_until_idle(
    client: AirflowClient,
    timeout_s: float,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until no task of the sync runs.

    :returns: tasks that still run at the end of the time, ``DAG.task``
    """
    end, printed = clock() + timeout_s, None
    while busy := [f"{dag}.{task}" for dag in DAGS for task in client.busy_tasks(dag)]:
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
