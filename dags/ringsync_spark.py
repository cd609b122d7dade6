"""Operator of all ringsync DAGs: it runs a Spark application, and its failure says what failed and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowException, AirflowSkipException, AirflowTaskTimeout
from ringsync_bounds import error_of, rests, stopped, task_arguments
from ringsync_tasks import prepare_environment, send_report

from ringsync import orchestration
from ringsync.config import DEFAULT_QUEUE


class SparkApplicationOperator(SparkSubmitOperator):
    """Submit one of ringsync's Spark applications.

    The task fails at once after exit codes that another try cannot change; after crashes and kills Airflow tries again.
    Passwords from Airflow connections go into the environment of spark-submit: never into arguments, templates or logs.

    :param spark: the application to submit
    :param skip_if: template of the reason to skip the step; empty when rendered: the step runs
    """

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "skip_if", "report")
    ui_color = "#e8f1fb"

    def __init__(self, *, spark: orchestration.SparkApplication, skip_if: str = "", **kwargs: Any) -> None:
        if spark.queue and spark.queue != DEFAULT_QUEUE:  # Airflow's own default queue may have another name
            kwargs["queue"] = spark.queue
        super().__init__(
            application=spark.path,
            application_args=spark.arguments(),
            conf=spark.spark_conf(),
            driver_memory=spark.driver_memory,
            name=spark.title,
            conn_id=orchestration.SPARK_CONNECTION,
            **task_arguments(spark),
            **kwargs,
        )
        self.spark, self.loop, self.skip_if = spark, spark.loop, skip_if
        self.report = f"reports/{spark.name}/{spark.run}.json"

    def execute(self, context: Context) -> None:
        """Run the application to its end.

        :raises AirflowSkipException: ``skip_if`` gives a reason
        :raises AirflowFailException: it failed or hung, and another try cannot help or would delay the next run
        """
        if self.skip_if:
            raise AirflowSkipException(self.skip_if)
        self.application_args = orchestration.given(self.application_args or [])
        try:
            with rests(self.loop):
                self._run(context)
        except AirflowTaskTimeout:
            self.on_kill()
            raise stopped(self.spark, self.execution_timeout) from None

    def _run(self, context: Context) -> None:
        config = prepare_environment(self.spark.secrets, spark_connection=self._conn_id)
        started, failure = time.time(), None
        try:
            super().execute(context)
        except AirflowException as error:
            failure = orchestration.explain_failure(self.spark.name, str(error))
        send_report(config, self.report, started, self.log)  # not after a timeout: its store may hang, too
        if failure is not None:
            raise error_of(failure)
