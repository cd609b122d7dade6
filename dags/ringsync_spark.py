"""The one operator of ringsync's DAGs: a Spark application whose failure says what failed and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Connection, Context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    AirflowSkipException,
)

from ringsync import orchestration
from ringsync.config import ConfigError, connection_variable, load_config


class SparkApplicationOperator(SparkSubmitOperator):
    """Submit one of ringsync's Spark applications.

    Exit codes that another try cannot mend (differences found, wrong configuration, no rights) fail at once;
    crashes and kills are tried again. Passwords from Airflow connections go into the environment of spark-submit
    when the task runs: never into arguments, rendered templates or logs.

    :param spark: the application
    :param skip_if: template of a reason to skip the step; renders to nothing when it is to run
    """

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "skip_if")
    ui_color = "#e8f1fb"

    def __init__(self, *, spark: orchestration.SparkApplication, skip_if: str = "", **kwargs: Any) -> None:
        super().__init__(
            application=spark.path,
            application_args=spark.arguments(),
            conf=spark.spark_conf(),
            driver_memory=spark.driver_memory,
            name=f"{spark.name} {{{{ params.table }}}} {{{{ safe_run_id(run_id) }}}}",
            conn_id=orchestration.SPARK_CONNECTION,
            pool=orchestration.SPARK_POOL,
            retries=orchestration.RETRIES,
            retry_delay=timedelta(seconds=30),
            **kwargs,
        )
        self.spark_name = spark.name
        self.skip_if = skip_if

    def execute(self, context: Context) -> None:
        """Run the application to its end.

        :raises AirflowSkipException: ``skip_if`` gives a reason
        :raises AirflowFailException: it failed and trying again cannot help
        :raises AirflowException: it failed otherwise
        """
        if self.skip_if:
            raise AirflowSkipException(self.skip_if)
        self.application_args = orchestration.given(self.application_args or [])
        try:
            Connection.get(self._conn_id)  # the hook would go to YARN silently if it were missing
            for connection_id in load_config(orchestration.config_path()).airflow_connections():
                os.environ[connection_variable(connection_id)] = Connection.get(connection_id).password or ""
        except ConfigError as error:
            raise AirflowFailException(f"configuration: {error}") from None
        except AirflowNotFoundException as error:
            raise AirflowFailException(
                f"{error}: create it in Airflow (Admin → Connections), see docs/airflow.md"
            ) from None
        try:
            super().execute(context)
        except AirflowException as error:
            failure = orchestration.explain_failure(self.spark_name, str(error))
            kind = AirflowException if failure.may_retry else AirflowFailException
            raise kind(failure.message) from None
