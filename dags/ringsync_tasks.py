"""Work of a task around its Spark application: secrets before it, metrics after it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from datetime import datetime
from typing import Any

from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException
from airflow.sdk.observability.stats import gauge, incr

from ringsync.config import Config, ConfigError, connection_variable, load_config
from ringsync.config.last_good import load_last_good
from ringsync.metrics import report_metrics
from ringsync.orchestration import config_path


def prepare_environment(
    secrets: Collection[str], *, spark_connection: str | None = None, lasting: bool = False
) -> Config:
    """Put the passwords of Airflow connections into the environment, where only the task's process finds them.

    :param secrets: sections of the configuration whose passwords are needed
    :param spark_connection: id of Spark's connection, which must exist, too; None: Spark is not needed
    :param lasting: whether to go on with the last good configuration, and without passwords that cannot be had: who
        needs one says so
    :raises AirflowFailException: a connection is missing, or the configuration is wrong
    """
    try:
        if spark_connection is not None:
            Connection.get(spark_connection)  # the hook would go to YARN silently if it were missing
        config = load_last_good(config_path(), waits=True)[0] if lasting else load_config(config_path())
        for connection in config.airflow_connections(*secrets):
            try:
                os.environ[connection_variable(connection)] = Connection.get(connection).password or ""
            except Exception as error:  # also that Airflow itself cannot be asked
                if not lasting:
                    raise
                print(f"ringsync: warning: connection {connection}: {error}", flush=True)
    except ConfigError as error:
        raise AirflowFailException(f"configuration: {error}") from None
    except AirflowNotFoundException as error:
        raise AirflowFailException(
            f"{error}: create it in Airflow (Admin → Connections), see docs/airflow.md"
        ) from None
    return config


def send_report(config: Config, key: str, since: float, log: Any) -> None:
    """Send the numbers of an application's report as Airflow's section ``[metrics]`` says; never fail the task.

    :param key: the report's key in the object store
    :param since: start of the task, seconds since the epoch; an older report belongs to an earlier try
    """
    from ringsync.storage.port import NotFoundError, StorageError
    from ringsync.wiring import store_of

    try:
        report = json.loads(store_of(config).get(key))
    except NotFoundError:
        return  # killed before it could write one
    except (ConfigError, StorageError, ValueError) as error:
        log.warning("no metrics of this task: %s", error)
        return
    if datetime.fromisoformat(report["started_at"]).timestamp() < int(since):
        return
    for number in report_metrics(report):
        if number.kind == "counter":
            incr(number.name, round(number.value), tags=dict(number.tags))
        else:
            gauge(number.name, number.value, tags=dict(number.tags))
