"""Operator of the DAG that raises alarms: it works in the task, where notifiers and connections are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.module_loading import import_string
from ringsync_bounds import rests
from ringsync_tasks import prepare_environment

from ringsync import orchestration
from ringsync.config.last_good import Outdated, what_is_wrong
from ringsync.config.sections import Notifier


class AlarmOperator(BaseOperator):
    """Look at the whole sync every few seconds, raise and clear alarms, and tell the notifiers of both."""

    ui_color = "#fbe9e8"

    def __init__(self, **kwargs: Any) -> None:
        longest_s = orchestration.known_config().sync.run_s + orchestration.LOOP_GRACE_S
        super().__init__(**orchestration.LOOP_ARGUMENTS, execution_timeout=timedelta(seconds=longest_s), **kwargs)

    def execute(self, context: Context) -> None:
        """Work for ``sync.run_s`` seconds, with the last good configuration while it is wrong.

        :raises AirflowFailException: the configuration is wrong, and never was right on this host
        """
        from ringsync.installed import installed
        from ringsync.service.alarms import watch
        from ringsync.wiring import store_of

        installed()  # what this process runs, whatever is installed meanwhile
        with rests(loop=True):
            config = prepare_environment(["airflow"], lasting=True)
        notifiers = [partial(_make, notifier, context) for notifier in config.alarms.notifiers]
        path = orchestration.config_path()
        raised = watch(
            *(config, store_of(config), notifiers),
            wrong=lambda: what_is_wrong(path),
            is_outdated=Outdated(path, config, lasting=True),
        )
        self.log.info("%d alarms are raised", raised)


def _make(notifier: Notifier, context: Context) -> Callable[[Any], None]:
    """Make a notifier of the configuration.

    :returns: what tells it of an alarm, with a new one for each: Airflow renders templates in place
    :raises UnmadeError: there is none of this name, or it refuses its arguments
    """
    from ringsync.service.telling import UnmadeError

    try:
        make = import_string(notifier.name)
        make(**notifier.arguments)
    except Exception as error:  # a notifier may refuse its arguments in any way
        raise UnmadeError(f"{notifier.name} ({type(error).__name__})") from error
    return lambda alarm: make(**notifier.arguments)({**context, "alarm": alarm})
