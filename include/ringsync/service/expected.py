"""What has to run: the DAGs and loops of a sync. Cassandra and ScyllaDB differ in who reads the changes, and in little
else; all that does is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringsync.config import Config
from ringsync.ledger.database import follows_scylla
from ringsync.orchestration import (
    ALARMS_DAG,
    BUCKET_CLOSE,
    SCYLLA_LOG_STAGE,
    SparkApplication,
    commitlog_archive,
    commitlog_stage,
    dag_of,
)
from ringsync.storage.port import ObjectStore

CLOSE = "bucket_close/close"
"""Name of the status of the loop that closes buckets."""

SCHEMA = "schema_update/schema"
"""Name of the status of the schema updater."""

ALARMS = "alarms/alarms"
"""Name of the status of the loop that raises alarms."""

ARCHIVE = "commitlog_archive/"
"""Beginning of the names of the archive's statuses."""

LOG_STAGE = "scylla_log_stage/log"
"""Name of the status of the loop that reads Scylla's CDC logs."""

_LOOPS = (CLOSE, "out_of_sequence/queue", SCHEMA)
VERIFY_DAG = "replica_verify"
"""The DAG that proves replicas."""

_LASTING_DAGS = (ALARMS_DAG, VERIFY_DAG)
_SYNC_DAGS = (dag_of(BUCKET_CLOSE), "out_of_sequence", "replica_merge", "schema_updater")
_REPROCESS_DAG, _LOG_STAGE_DAG = "archive_reprocess", dag_of(SCYLLA_LOG_STAGE)


@dataclass(frozen=True)
class Expected:
    """What has to run. Loops are named by the keys of their statuses.

    :ivar dags: DAGs that ``cdcservice start`` switches on, and ``stop`` off
    :ivar lasting_dags: DAGs that ``start`` switches on, and ``stop`` leaves on
    :ivar needless_dags: DAGs that ``start`` switches off: they are for the other database, or not wanted
    :ivar stages: loops that read what was written
    :ivar lasting_loops: loops that ``stop`` leaves on
    :ivar queues: queues of the workers that read ``cdc_raw`` of nodes; none: nobody does
    :ivar meanwhile: what becomes of changes while the sync is stopped
    :ivar of_scylla: whether the cluster is ScyllaDB
    """

    dags: tuple[str, ...]
    lasting_dags: tuple[str, ...]
    needless_dags: tuple[str, ...]
    stages: tuple[str, ...]
    lasting_loops: tuple[str, ...]
    queues: tuple[str, ...]
    meanwhile: str
    of_scylla: bool = False

    @property
    def loops(self) -> tuple[str, ...]:
        """All loops that must have a status."""
        return (*self.stages, *_LOOPS, *self.lasting_loops)

    @property
    def emptying_loops(self) -> tuple[str, ...]:
        """The loops without which ``cdc_raw`` of nodes fills: the archive, or without it what stages."""
        return tuple(loop for loop in self.lasting_loops if loop.startswith(ARCHIVE)) or (self.queues and self.stages)

    @property
    def all_dags(self) -> tuple[str, ...]:
        """All DAGs that ``start`` switches on."""
        return (*self.dags, *self.lasting_dags)

    @staticmethod
    def of_commit_logs(queues: Sequence[str], *, archives: bool = False) -> Expected:
        """Return what follows commit logs.

        :param queues: names of the workers' queues, ``config.sync.queues``
        :param archives: whether commit logs are archived: ``archive.policy`` is not off
        """
        # stop leaves the archive on: then the nodes' logs need it most.
        of_archive = _dags_of(commitlog_archive, queues)
        return Expected(
            dags=(*_dags_of(commitlog_stage, queues), *_SYNC_DAGS, _REPROCESS_DAG),
            lasting_dags=(*_LASTING_DAGS, *(of_archive if archives else ())),
            needless_dags=(_LOG_STAGE_DAG, *(() if archives else of_archive)),
            stages=tuple(f"commitlog_stage/{queue}" for queue in queues),
            lasting_loops=(ALARMS, *(f"{ARCHIVE}{queue}" for queue in queues if archives)),
            queues=tuple(queues),
            meanwhile="commit logs are archived" if archives else "cdc_raw of the nodes fills",
        )

    @staticmethod
    def of_cdc_logs(queues: Sequence[str]) -> Expected:
        """Return what follows the CDC logs of ScyllaDB.

        :param queues: queues of workers that read commit logs elsewhere: their DAGs are not needed
        """
        return Expected(
            dags=(_LOG_STAGE_DAG, *_SYNC_DAGS),
            lasting_dags=_LASTING_DAGS,
            needless_dags=(
                *_dags_of(commitlog_stage, queues),
                *_dags_of(commitlog_archive, queues),
                _REPROCESS_DAG,
            ),
            stages=(LOG_STAGE,),
            lasting_loops=(ALARMS,),
            queues=(),
            meanwhile="changes stay in the CDC logs for as long as their TTL",
            of_scylla=True,
        )


def expected_of(config: Config, of_scylla: bool) -> Expected:
    """Return what has to run.

    :param of_scylla: whether the cluster is ScyllaDB
    """
    queues = config.sync.queues
    return Expected.of_cdc_logs(queues) if of_scylla else Expected.of_commit_logs(queues, archives=archives(config))


def expected_in(config: Config, store: ObjectStore) -> Expected:
    """Return what has to run, for the database that the sync follows.

    :raises StorageError: the store cannot be used
    """
    return expected_of(config, follows_scylla(store))


def archives(config: Config) -> bool:
    """Tell whether commit logs are archived."""
    return config.archive.policy != "off"


def _dags_of(loop: Callable[[str], SparkApplication], queues: Sequence[str]) -> tuple[str, ...]:
    return tuple(dag_of(loop(queue)) for queue in queues)
