"""The time that a try of a task may take: one that hangs must not hold its run for ever."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ringsync import orchestration
from ringsync.orchestration import Failure, SparkApplication, explain_timeout, known_config

END_S = 10.0
"""Seconds that a process which took too long may take to end."""


def task_arguments(application: SparkApplication) -> dict[str, Any]:
    """Return the arguments of a task that say when it runs, how often it is tried, and how long a try may take.

    :raises ConfigError: the configuration, which says the latter, was never right
    """
    longest_s = application.longest_s(known_config()) if application.bound else None
    timeout = None if longest_s is None else timedelta(seconds=longest_s)
    return {**application.task_arguments, "execution_timeout": timeout}


def stopped(application: SparkApplication, timeout: timedelta | None) -> AirflowException:
    """Return the error of a task that took too long."""
    return error_of(explain_timeout(application, timeout.total_seconds() if timeout else 0.0))


def error_of(failure: Failure) -> AirflowException:
    """Return the error that tells Airflow of a failure, and whether to try again."""
    return (AirflowException if failure.may_retry else AirflowFailException)(failure.message)


@contextmanager
def rests(loop: bool) -> Iterator[None]:
    """Keep the run of a loop that fails for good open for a while: the next run begins at once.

    :param loop: whether it is one
    """
    try:
        yield
    except AirflowFailException:
        if loop:
            time.sleep(orchestration.LOOP_REST_S)
        raise


def end(process: subprocess.Popen[str], log: Any) -> None:
    """End a process, if it can be ended: one that waits for a disk which does not answer cannot."""
    for ask in (process.terminate, process.kill):
        ask()
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            log.warning("process %s does not end within %s s", process.pid, END_S)
