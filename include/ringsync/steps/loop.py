"""The frame of steps that are loops: a Spark application works through short cycles for as long as one DAG run lasts.

A Spark application needs some twenty CPU seconds to start, so windows shorter than a minute cannot have one each.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cassandra.cluster import Session

from ringsync.cluster.session import ClusterError, ClusterSettings, UnreachableError, connect
from ringsync.config import ConfigError
from ringsync.installed import installed
from ringsync.state.session import StateUnavailableError
from ringsync.status import STOP_KEY, read_status
from ringsync.steps.application import Application, ExitCode, StepError
from ringsync.storage.port import ObjectStore, StorageError, UnavailableError

PATIENCE_S = 120.0
"""Longest time that a loop waits for the cluster when it begins; the wait is part of the loop's time."""

REFUSED_S = 10.0
"""Pause after a refused login, or a file that cannot be read."""

MAX_FAILURES = 30
"""Failed cycles in a row that end the loop."""

STUCK_S = 7200.0
"""Longest time of a cycle, s. That of a backlog may be long; what it has done by then stays done."""

SAY_EVERY_S = 5.0
"""Time between two signs of life while a cycle takes long."""

PASSING = (UnavailableError, UnreachableError, StateUnavailableError)
"""Errors that pass by themselves unless the configuration is wrong."""


def cycles(
    application: Application,
    poll_ms: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    *,
    heeds_stop: bool = True,
) -> Iterator[int]:
    """Yield the number of each cycle, from 0, for ``sync.run_s`` seconds, or until the configuration has changed: the
    next run reads the new one. A cycle begins ``poll_ms`` after the last one began, or later. One that lasts longer
    than :data:`STUCK_S` ends the process, whatever hangs, and says where; Airflow begins the loop again.

    :param heeds_stop: whether ``cdcservice stop`` ends it, too
    """
    end, is_outdated = clock() + application.config.sync.run_s, application.outdated()
    number = 0
    while True:
        began = clock()
        # By a thread that needs no lock of Python's, to stderr as the process has it.
        faulthandler.dump_traceback_later(STUCK_S, exit=True, file=2)
        try:
            yield number
        finally:
            faulthandler.cancel_dump_traceback_later()
        number += 1
        if clock() >= end or is_outdated() or (heeds_stop and is_stopped(application.store)):
            return
        sleep(max(0.0, began + poll_ms / 1000 - clock()))


def start_workers(spark_context: Any, *modules: str) -> None:
    """Start Spark's Python workers and import what their tasks need, before there is work.

    Otherwise the first task of a loop takes most of a minute on two busy cores, and all changes wait for it.
    """

    def load(_: Iterator[int]) -> Iterator[int]:
        for module in modules:
            importlib.import_module(module)
        return iter(())

    count = spark_context.defaultParallelism
    spark_context.parallelize(range(count), count).mapPartitions(load).collect()


class AwayError(StepError):
    """Cluster, object store or Spark are away, maybe for a short time: Airflow starts the loop again."""

    code = ExitCode.INTERRUPTED


@contextmanager
def starts_again() -> Iterator[None]:
    """Let Airflow start a loop again after an error that passes by itself.

    After a final exit code its run would end, and count as failed.

    :raises AwayError: one of :data:`PASSING` was raised
    """
    try:
        yield
    except PASSING as error:
        raise AwayError(str(error)) from error


class Patience:
    """Lets a loop survive failed cycles: nodes, brokers and stores go away and return.

    A :class:`StepError` ends the loop at once: trying again does not help.

    :param is_over: called after a failure; True: this process cannot work any more, e.g. its Spark has ended
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._failures = 0

    def tried(self, cycle: Callable[[], object]) -> str | None:
        """Run a cycle.

        :returns: its error; None: it did not fail
        :raises AwayError: after :data:`MAX_FAILURES` failures in a row, or at once if the process cannot work any more
        :raises ConfigError: it was so each time; a secret's file that is just being replaced is there a moment later
        """
        try:
            cycle()
        except StepError:
            raise
        except Exception as error:
            self._failures += 1
            message = f"{type(error).__name__}: {error}"
            if self._failures >= MAX_FAILURES and isinstance(error, ConfigError):
                raise
            if self._failures >= MAX_FAILURES or self._is_over():
                raise AwayError(f"{self._failures} cycles in a row failed, the last: {message[:2000]}") from error
            print(f"ringsync: warning: a cycle failed, it is tried again: {message[:2000]}", flush=True)
            return message
        self._failures = 0
        return None


def connect_patiently(settings: Callable[[], ClusterSettings], sleep: Callable[[float], None] = time.sleep) -> Session:
    """Connect to a cluster that may be away for a moment, by secrets and TLS files that may just be being replaced.

    :param settings: reads the secrets
    :raises ClusterError: one of its subclasses
    :raises ConfigError: a secret cannot be read
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return connect(settings())
        except (ClusterError, ConfigError) as error:
            if time.monotonic() >= deadline:
                raise
            print(f"ringsync: warning: {error}", flush=True)
            # A login that is refused again and again would fill the nodes' logs.
            sleep(2.0 if isinstance(error, UnreachableError) else REFUSED_S)


def is_stopped(store: ObjectStore) -> bool:
    """Tell whether ``cdcservice stop`` has asked the loops to end; if that cannot be read, they go on."""
    try:
        return store.stat(STOP_KEY) is not None
    except StorageError as error:
        print(f"ringsync: warning: {error}", flush=True)
        return False


def put_status(store: ObjectStore, application: str, name: str, status: dict[str, Any]) -> None:
    """Write the status of a loop, for ``cdcservice status``. A failure is only printed: the next cycle writes again.

    :param name: the loop's name among those of its application
    """
    of_host = {"host": socket.gethostname(), "installed": dict(installed())}
    said = {"at_ms": int(time.time() * 1000), **of_host, **status}
    try:
        store.say(f"status/{application}/{name}.json", json.dumps(said).encode())
    except StorageError as error:
        print(f"ringsync: warning: {error}", flush=True)


class SignOfLife:
    """Writes the status of a loop: after each cycle, and every few seconds while a cycle takes long.

    While a cycle takes long, the last status is repeated, with ``busy``: the present work (``with``), and the end of
    the last cycle (``since_ms``). This shows a loop that hangs. It also shows a loop that is killed in each first
    cycle: until a cycle ends, the last run's status is repeated.

    :param name: the loop's name among those of its application
    :param at: returns the loop's present work
    :param first: status of a loop that has never ended a cycle
    """

    def __init__(
        self, store: ObjectStore, application: str, name: str, at: Callable[[], str | None], first: dict[str, Any]
    ) -> None:
        self._store, self._application, self._name, self._at = store, application, name, at
        before: Mapping[str, Any] = {"at_ms": int(time.time() * 1000), **first}
        with suppress(StorageError):  # the archive works while the store is away
            before = read_status(store, f"{application}/{name}") or before
        self._status = {
            key: value for key, value in before.items() if key not in ("at_ms", "host", "installed", "busy")
        }
        self._written_s = before.get("busy", {}).get("since_ms", before["at_ms"]) / 1000
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"{application} lives", daemon=True)

    def __enter__(self) -> SignOfLife:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def say(self, status: dict[str, Any]) -> None:
        """Write the status after a cycle."""
        with self._lock:
            self._status, self._written_s = status, time.time()
            put_status(self._store, self._application, self._name, status)

    def _live(self) -> None:
        while not self._ended.wait(SAY_EVERY_S):
            with self._lock:
                if time.time() >= self._written_s + SAY_EVERY_S:
                    busy = {"with": self._at(), "since_ms": int(self._written_s * 1000)}
                    put_status(self._store, self._application, self._name, {**self._status, "busy": busy})
