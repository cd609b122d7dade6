"""One look at the whole sync: the loops' status, Airflow's DAGs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringsync.airflow_client import AirflowClient, AirflowError
from ringsync.config import Config, ConfigError
from ringsync.orchestration import ALARMS_DAG, archive_dag
from ringsync.service.health import DAGS, DagHealth, Kind, Problem, problems
from ringsync.status import STOP_KEY, Status, read_statuses
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class Look:
    """What was seen.

    :ivar unjudged: kinds of problems of which nothing is known now, since something could not be asked
    """

    statuses: Mapping[str, Status]
    dags: Mapping[str, DagHealth]
    stopped: bool
    problems: tuple[Problem, ...]
    unjudged: frozenset[Kind]


def look(config: Config, store: ObjectStore, now_s: float) -> Look:
    """Look at all loops and DAGs. If Airflow cannot be asked, that is one of the problems.

    :param now_s: present time, seconds since the epoch
    :raises StorageError: the object store cannot be used
    """
    statuses, stopped = read_statuses(store), store.stat(STOP_KEY) is not None
    dags: dict[str, DagHealth] = {}
    of_airflow: list[Problem] = []
    unjudged: frozenset[Kind] = frozenset()
    try:
        client = client_of(config)
        dags.update({dag: DagHealth(client.is_paused(dag), client.newest_run(dag)) for dag in dags_of(config)})
    except (AirflowError, ConfigError) as error:
        of_airflow.append(Problem(Kind.AIRFLOW_AWAY, "Airflow", str(error)))
        unjudged = frozenset({Kind.DAG_PAUSED, Kind.DAG_FAILED})
    wrong = problems(statuses, dags, config.sync.queues, stopped, now_s, archives=archives(config), lag_s=lag_s(config))
    return Look(statuses, dags, stopped, (*of_airflow, *wrong), unjudged)


def client_of(config: Config) -> AirflowClient:
    """Make the client of the configured Airflow.

    :raises ConfigError: the password cannot be read
    """
    airflow = config.airflow
    return AirflowClient(airflow.url, airflow.username, airflow.password.resolve("airflow.password"))


def archives(config: Config) -> bool:
    """Tell whether commit logs are archived."""
    return config.archive.policy != "off"


def archive_dags(config: Config) -> tuple[str, ...]:
    """Return the DAGs that archive commit logs. ``stop`` leaves them: then the nodes' logs need them most."""
    return tuple(map(archive_dag, config.sync.queues))


def dags_of(config: Config) -> tuple[str, ...]:
    """Return the DAGs that ``start`` switches on."""
    return (*DAGS, ALARMS_DAG, *(archive_dags(config) if archives(config) else ()))


def lag_s(config: Config) -> float:
    """Return the age in seconds that the oldest open bucket may have: its ordinary life, and ``alarms.lag_s``."""
    open_ms = config.commitlog_processor_window_count * config.commitlog_processor_window_interval_ms
    return open_ms / 1000 + config.alarms.lag_s
