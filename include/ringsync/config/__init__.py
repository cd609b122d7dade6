"""The configuration: the keys of ringsync.yaml, all validated before anything else happens.

config/ringsync.yaml explains every key. Secrets are references (an environment variable, a file, an Airflow
connection), never values, so that no secret is in arguments, logs, reports or the Airflow UI.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

import ringsync.config.sections as sections
from ringsync.config.document import explain, read_document, real_problems
from ringsync.config.section import ConfigError, Section, connection_variable
from ringsync.config.sections import Tls
from ringsync.config.sync import DEFAULT_QUEUE, Kafka, Metrics, Sync
from ringsync.cql.identifiers import parse_table_name, portable_name
from ringsync.installed import differences, installed

__all__ = ["DEFAULT_QUEUE", "Config", "ConfigError", "Kafka", "Tls", "connection_variable", "load_config"]


class Config(Section):
    """Everything in ringsync.yaml."""

    server_name: sections.ServerName
    cassandra: sections.Cassandra
    store: sections.Store
    stream: sections.Stream = sections.Stream()
    replica: sections.Replica = sections.Replica()
    scan: sections.Scan = sections.Scan()
    sstable: sections.SSTables = sections.SSTables()
    limits: sections.ClusterLimits = sections.ClusterLimits()
    state: sections.State = sections.State()
    scylla: sections.Scylla = sections.Scylla()
    archive: sections.Archive = sections.Archive()
    alarms: sections.Alarms = sections.Alarms()
    verify: sections.Verify = sections.Verify()
    commitlog_processor_window_count: Annotated[int, Field(ge=1, le=100)] = 5
    commitlog_processor_window_interval_ms: Annotated[int, Field(ge=1000, le=86_400_000)] = 60_000
    out_of_sequence_processor_poll_interval_ms: sections.Milliseconds = 10_000
    schema_updater_poll_interval_ms: Annotated[int, Field(ge=100, le=30_000)] = 10_000
    sync: Sync = Sync()
    kafka: Kafka | None = None
    metrics: Metrics = Metrics()
    airflow: sections.Airflow = sections.Airflow()

    def __getstate__(self) -> dict[Any, Any]:
        """Give tasks the secrets of the cluster, too, which executors can read nowhere, and say what is installed here.
        Spark sends this as part of a task's code, shows it nowhere, and encrypts it if it is told to (docs/deploy.md).
        """
        state = super().__getstate__()
        fields = {**state["__dict__"], "cassandra": self.cassandra.sealed()}
        return {**state, "__dict__": fields, "installed": installed()}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        if differing := differences(installed(), state.pop("installed")):
            raise ConfigError(
                f"Spark's worker on host {socket.gethostname()} cannot work for this driver: it has "
                f"{'; '.join(differing)}: install the same on all hosts (docs/deploy.md)"
            )
        super().__setstate__(state)

    @model_validator(mode="after")
    def _digests_outlive_open_buckets(self) -> Config:
        open_ms = self.commitlog_processor_window_count * self.commitlog_processor_window_interval_ms
        if self.sync.digest_retention_h * 3_600_000 <= open_ms:
            raise ValueError(
                f"sync.digest_retention_h: must be longer than buckets stay open, {open_ms / 3_600_000:g} h "
                "(commitlog_processor_window_count × …_interval_ms), or late copies would be published again"
            )
        return self

    @model_validator(mode="after")
    def _topics_differ(self) -> Config:
        """Check that each chosen topic is of one table only, for Kafka, too, to which ``.`` and ``_`` are the same. It
        is not that of any stream either: a table may get cdc later, and then messages of both would be mixed."""
        part = r"[A-Za-z0-9_]+(-[0-9a-f]{8})?"  # as portable_name makes them
        own, tables = re.compile(rf"{self.server_name}(_{part}_{part})?"), dict[str, str]()
        for table, topic in self.kafka.topic_name.items() if self.kafka else ():
            for_kafka = topic.replace(".", "_")
            other = tables.setdefault(for_kafka, table)
            if other != table or own.fullmatch(for_kafka):
                whose = other if other != table else "a stream: <server_name> or <server_name>.<keyspace>.<table>"
                raise ValueError(
                    f"kafka.topic_name.{table}: {topic} is, for Kafka, also the name of the topic of {whose}: choose "
                    f"another, e.g. {self.server_name}-{table.replace('.', '-')}"
                )
        return self

    @property
    def kafka_topics(self) -> dict[str, str]:
        """The topics of Kafka whose names are not those of their streams, by these (``kafka.topic_name``)."""
        names = self.kafka.topic_name if self.kafka else {}
        return {f"{self.server_name}.{portable_name(*parse_table_name(table))}": name for table, name in names.items()}

    def kafka_topic(self, stream: str) -> str:
        """Name Kafka's topic of a stream."""
        return self.kafka_topics.get(stream, stream)

    def airflow_connections(self, *sections: str) -> tuple[str, ...]:
        """List the ids of the Airflow connections that hold secrets of some sections."""
        used = {name: section for name in sections if (section := getattr(self, name)) is not None}
        secrets = [secret for name, section in used.items() for secret in section.secrets(name).values()]
        return tuple(secret.airflow_connection for secret in secrets if secret.airflow_connection)


def load_config(path: str | Path) -> Config:
    """Read and validate a configuration file. Relative paths inside it are relative to its folder.

    :raises ConfigError: keys are wrong; the message names the file, every wrong key, and what to do
    """
    return parse_config(read_config(path), path)


def read_config(path: str | Path) -> str:
    """Read the text of a configuration file.

    :raises ConfigError: it cannot be read
    """
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: this is no path: {error}") from None


def parse_config(text: str, path: str | Path) -> Config:
    """Validate the text of a configuration file: all of it that can be decided on this host alone.

    :param path: of the file: relative paths in the text begin in its folder
    :raises ConfigError: as :func:`load_config`
    """
    try:
        return _validated(read_document(path, text), path)
    except ConfigError:
        raise
    except Exception as error:  # whatever it is: who goes on with the last good configuration must go on
        raise ConfigError(f"{path}: the configuration cannot be read: {type(error).__name__}") from error


def _validated(document: Any, path: str | Path) -> Config:
    try:
        return Config.model_validate(document, context=Path(path).resolve().parent)
    except ValidationError as error:
        problems = [explain(problem, Config) for problem in real_problems(error)]
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems)) from None
