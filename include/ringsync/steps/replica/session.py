"""The Spark session of the steps whose JVM itself reads and writes the object store: merge and verification."""

from __future__ import annotations

from typing import Any

from ringsync.steps.application import Application
from ringsync.storage import spark_options


def check_session(application: Application) -> None:
    """Check, before a step does anything, that Spark can reach the object store; this costs nothing for a folder.

    :raises ConfigError: a jar is missing
    """
    if options := spark_options(**application.config.store.model_dump()):
        from ringsync.replica.session import check_file_system

        check_file_system(options)


def store_session(application: Application, title: str) -> Any:
    """Start (or get) a Spark session that reaches the object store of the configuration.

    :param title: the name that Spark shows
    """
    from ringsync.replica.session import spark_session

    return spark_session(title, store=spark_options(**application.config.store.model_dump()))
