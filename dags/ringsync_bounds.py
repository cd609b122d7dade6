"""The time that a try of a task may take: one that hangs must not hold its run for ever."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ringsync.config import load_config
from ringsync.orchestration import SparkApplication, config_path, explain_timeout

END_S = 10.0
"""Seconds that a process which took too long may take to end."""


def task_arguments(application: SparkApplication) -> dict[str, Any]:
    """Return the arguments of a task that say when it runs, how often it is tried, and how long a try may take.

    :raises ConfigError: the configuration, which says the latter, is wrong
    """
    longest_s = application.longest_s(load_config(config_path())) if application.bound else None
    timeout = None if longest_s is None else timedelta(seconds=longest_s)
    return {**application.task_arguments, "execution_timeout": timeout}


def stopped(application: SparkApplication, timeout: timedelta | None) -> AirflowException:
    """Return the error of a task that took too long."""
    failure = explain_timeout(application, timeout.total_seconds() if timeout else 0.0)
    return (AirflowException if failure.may_retry else AirflowFailException)(failure.message)


def end(process: subprocess.Popen[str], log: Any) -> None:
    """End a process, if it can be ended: one that waits for a disk which does not answer cannot."""
    for ask in (process.terminate, process.kill):
        ask()
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            log.warning("process %s does not end within %s s", process.pid, END_S)
