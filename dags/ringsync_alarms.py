"""Operator of the DAG that raises alarms: it works in the task, where notifiers and connections are."""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.module_loading import import_string
from ringsync_tasks import prepare_environment

from ringsync import orchestration
from ringsync.config.sections import Notifier


class AlarmOperator(BaseOperator):
    """Look at the whole sync every few seconds, raise and clear alarms, and tell the notifiers of both."""

    ui_color = "#fbe9e8"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**orchestration.LOOP_ARGUMENTS, **kwargs)

    def execute(self, context: Context) -> None:
        """Work for ``sync.run_s`` seconds.

        :raises AirflowFailException: the configuration is wrong, or names a notifier that is not there
        """
        from ringsync.service.alarms import watch
        from ringsync.wiring import store_of

        try:
            config = prepare_environment(None)
            notifiers = [_Notify(notifier, context) for notifier in config.alarms.notifiers]
        except AirflowFailException:
            time.sleep(orchestration.LOOP_REST_S)
            raise
        raised = watch(config, store_of(config), notifiers)
        self.log.info("%d alarms are raised", raised)


class _Notify:
    """A notifier of the configuration. A new one is made for each alarm: Airflow renders templates in place."""

    def __init__(self, notifier: Notifier, context: Context) -> None:
        self._context, self._arguments = context, notifier.arguments
        try:
            self._make = import_string(notifier.name)
            self._make(**self._arguments)
        except Exception as error:  # a notifier may refuse its arguments in any way
            raise AirflowFailException(f"configuration: alarms.notifiers: {notifier.name}: {error}") from None

    def __call__(self, alarm: Any) -> None:
        """Tell of an alarm."""
        self._make(**self._arguments)({**self._context, "alarm": alarm})
