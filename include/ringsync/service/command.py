"""Commands of the sync as a whole: ``cdcservice start``, ``stop`` and ``wait``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.cluster.session import ClusterError, connect
from ringsync.config import Config, ConfigError, load_config
from ringsync.ledger.archive import is_waiting
from ringsync.ledger.database import note_database
from ringsync.ledger.proofs import PROOFS
from ringsync.orchestration import ARCHIVE_REPROCESS
from ringsync.service.checks import CHECKS, is_of_scylla, longest_sync_period_ms
from ringsync.service.expected import Expected, expected_in, expected_of
from ringsync.service.health import REPROCESS
from ringsync.service.look import client_of
from ringsync.service.published import wait_until_published
from ringsync.service.table_checks import CheckError
from ringsync.service.workers import WorkerReports, stage_reports, told_before, wait_for_workers
from ringsync.state.session import StateError
from ringsync.status import (
    BOOTSTRAPS,
    LEFT_KEY,
    NODES,
    STALE_AFTER_S,
    STOP_KEY,
    age_s,
    forget,
    look_at_statuses,
    read_statuses,
)
from ringsync.steps.application import ExitCode
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.terminal import say, say_error
from ringsync.wiring import cluster_settings, store_of


def start(arguments: argparse.Namespace, console: Console) -> ExitCode:
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
    before = look_at_statuses(store)
    for loop in (*before.understood, *before.damaged):
        if loop not in expected.loops and not loop.startswith((BOOTSTRAPS, NODES, REPROCESS, PROOFS)):
            forget(store, loop)
    for key in (STOP_KEY, LEFT_KEY):
        store.delete(key)
    try:
        _switch_on(client := client_of(config), expected)
    except AirflowError as error:
        say_error(f"{error}; some DAGs may be on and others off: run cdcservice start again, or cdcservice stop")
        return ExitCode.COMPLETED_WITH_ERRORS
    say(console, f"started: {', '.join(expected.all_dags)}; cdcservice status shows how they stand")
    if ARCHIVE_REPROCESS.name in expected.all_dags and is_waiting(store):
        _read_archived(client)
    seen = told_before(before.understood, expected)
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


def _read_archived(client: AirflowClient) -> None:
    """Let what was archived during a stop be read: the DAG would hear of it when the next run of an archive ends."""
    try:
        client.trigger(ARCHIVE_REPROCESS.name, f"start_{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}", {})
    except AirflowError as error:
        say_error(f"{error}; archived commit logs wait for the DAG {ARCHIVE_REPROCESS.name}, which also runs each hour")


def _check_workers(store: ObjectStore, expected: Expected, console: Console) -> ExitCode:
    """Print the reports of the workers that run already; the others report when they are started."""
    now_s, statuses = time.time(), read_statuses(store)
    alive = {
        loop: {name: told for name, told in status.items() if name != "busy"}  # what its last cycle told counts
        for loop, status in statuses.items()
        if age_s(status, now_s) < STALE_AFTER_S
    }
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
    except (CheckError, ConfigError, ClusterError, StateError, StorageError, AirflowError) as error:
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


def stop(arguments: argparse.Namespace, console: Console) -> ExitCode:
    config = load_config(arguments.conf)
    store, client = store_of(config), client_of(config)
    expected = expected_in(config, store)
    # This object comes first: it ends the loops even while Airflow is away.
    store.put(STOP_KEY, json.dumps({"at_ms": int(time.time() * 1000)}).encode())
    on = list(expected.dags)
    try:
        while on:
            client.set_paused(on[0], True)
            del on[0]
        busy = wait_until_idle(client, expected.dags, arguments.timeout, console)
    except AirflowError as error:
        say_error(error)
        say(console, "the loops end all the same, after their cycle: the object store tells them to")
        if on:
            say(console, f"still on in Airflow: {', '.join(on)}; the loops that it begins end at once")
        say(console, "run cdcservice stop again when Airflow answers")
        return ExitCode.COMPLETED_WITH_ERRORS
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


def wait(arguments: argparse.Namespace, console: Console) -> ExitCode:
    began_s = time.time()
    config = load_config(arguments.conf)
    synced_ms = int(began_s * 1000) + longest_sync_period_ms(config)
    printed = ""

    def tell(left: str) -> None:
        nonlocal printed
        if left != printed:
            say(console, f"waiting: {left}")
            printed = left

    kafka = config.kafka_topic if config.kafka else None
    waited = wait_until_published(store_of(config), config.sync, synced_ms, arguments.timeout, kafka, tell)
    if waited.left:
        say_error(f"not all is published: {waited.left}")
        return ExitCode.COMPLETED_WITH_ERRORS
    for note in waited.notes:
        say(console, note)
    moment = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds")
    places = "streams, replicas and Kafka" if config.kafka else "streams and replicas"
    say(console, f"what was written before {moment} is in {places}, {time.time() - began_s:.0f} s later")
    return ExitCode.OK
