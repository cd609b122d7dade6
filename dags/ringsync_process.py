"""Operator for ringsync's applications that need no Spark: a Python process, and no JVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout
from ringsync_bounds import end, error_of, rests, stopped, task_arguments
from ringsync_tasks import prepare_environment, send_report

from ringsync import orchestration
from ringsync.config import DEFAULT_QUEUE

LAST_LINES = 50


class ProcessOperator(BaseOperator):
    """Run one of ringsync's applications as a process of the worker's Python.

    The task fails at once after exit codes that another try cannot change, as with Spark applications.

    :param application: the application to run
    :param skip_if: template of the reason to skip the step; empty when rendered: the step runs
    """

    template_fields: Sequence[str] = ("arguments", "report", "skip_if")
    ui_color = "#eef7e8"

    def __init__(self, *, application: orchestration.SparkApplication, skip_if: str = "", **kwargs: Any) -> None:
        if application.queue and application.queue != DEFAULT_QUEUE:
            kwargs["queue"] = application.queue
        super().__init__(**task_arguments(application), **kwargs)
        self.application, self.path = application, application.path
        self.arguments, self.skip_if = application.arguments(), skip_if
        self.report = f"reports/{application.name}/{application.run}.json"
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Context) -> None:
        """Run the application to its end.

        :raises AirflowSkipException: ``skip_if`` gives a reason
        :raises AirflowFailException: it failed, or took too long, and another try cannot help
        """
        if self.skip_if:
            raise AirflowSkipException(self.skip_if)
        app = self.application
        with rests(app.loop):
            config, started = prepare_environment(app.secrets, lasting=app.lasting), time.time()
            command = [sys.executable, self.path, *orchestration.given(self.arguments)]
            said: deque[str] = deque(maxlen=LAST_LINES)
            # No `with`, which would wait for a process that cannot be ended.
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                for line in self._process.stdout or ():
                    self.log.info(line.rstrip())
                    said.append(line)
                code = self._process.wait()
            except AirflowTaskTimeout:
                end(self._process, self.log)
                raise stopped(app, self.execution_timeout) from None
            finally:
                if self._process.stdout:
                    self._process.stdout.close()
            send_report(config, self.report, started, self.log)
            if code:
                raise error_of(orchestration.explain_failure(app.name, f"Error code is: {code}.\n{''.join(said)}"))

    def on_kill(self) -> None:
        """End the process when the task is stopped in Airflow."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)
