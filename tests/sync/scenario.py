"""A random workload on three nodes while the sync runs, tables are bootstrapped, and processes are killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from cassandra import InvalidRequest, OperationTimedOut, Unavailable, WriteFailure, WriteTimeout
from cassandra.cluster import NoHostAvailable

from ringsync.steps.application import ExitCode
from tests.chaos.applications import finished_here
from tests.commitlogs.workload import KEYSPACE, random_schema, random_statements, tables
from tests.sync.pipeline import EXCLUDED, LOOPS, Pipeline

VERSION = "5.0"
TABLES = tuple(f"{KEYSPACE}.{table.name}" for table in tables(VERSION))
AFTER_IMAGES = ("source", "none", "replica")

TROUBLES = (Unavailable, WriteTimeout, WriteFailure, OperationTimedOut, NoHostAvailable)
"""What a statement meets while nodes are away: whoever gets no answer asks again."""


def rotated(names: Sequence[str], turn: int) -> dict[str, dict[str, str]]:
    """Where each table's row after a change comes from; in three turns each table has each way."""
    return {name: {"after_image": AFTER_IMAGES[(place + turn) % 3]} for place, name in enumerate(names)}


def modes(turn: int) -> dict[str, dict[str, str]]:
    """Settings of the workload's tables; the buckets of one of them are by arrival."""
    of_tables = rotated(TABLES, turn + 1)
    of_tables[f"{KEYSPACE}.keyed"]["bucket_by"] = "arrival"
    return of_tables


WITHOUT_CDC = f"{KEYSPACE}.without_cdc"
NOT_FOLLOWED = (WITHOUT_CDC, EXCLUDED)
"""Tables that nobody follows: nothing of them may be anywhere."""


def create_schema(session: Any, replicas: int = 3) -> None:
    """The workload's tables, with cdc, one without, and one that the configuration excludes."""
    for statement in random_schema(VERSION):
        session.execute(statement.replace("'replication_factor': 1", f"'replication_factor': {replicas}"))
    session.execute(f"CREATE TABLE {WITHOUT_CDC} (k int PRIMARY KEY, v text)")
    session.execute(f"CREATE TABLE {EXCLUDED} (k int PRIMARY KEY, v text) WITH cdc = true")


def statements(seed: int, count: int) -> Iterator[str]:
    """Statements of the workload; the same for the same seed. Every tenth is followed by two that nobody follows."""
    for number, statement in enumerate(random_statements(seed, count, VERSION)):
        yield statement
        if number % 10 == 9:
            for table in NOT_FOLLOWED:
                yield f"INSERT INTO {table} (k, v) VALUES ({number}, 'x')"


def at_one(workload: Iterator[str]) -> Iterator[str]:
    """The statements that a single replica can take: no conditions, no logged batches, which need two."""
    return (one for one in workload if " IF " not in one and not one.startswith("BEGIN BATCH"))


def write(
    session: Any, workload: Iterator[str], count: int, give_up_s: float = 60, failed: Counter[str] | None = None
) -> int:
    """Execute some statements. Who gets no answer asks again; counters that may have counted twice are no matter.

    :param failed: counts the tries that failed, by kind
    :returns: how many the server did not take: an empty key, say
    """
    refused = 0
    for statement in islice(workload, count):
        deadline = time.monotonic() + give_up_s
        while True:
            try:
                session.execute(statement)
                break
            except InvalidRequest:
                refused += 1
                break
            except TROUBLES as error:
                if failed is not None:
                    failed[type(error).__name__] += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
    return refused


def start_loops(pipeline: Pipeline) -> None:
    """Start all three."""
    for name in LOOPS:
        pipeline.start(name)


def kill_and_start(pipeline: Pipeline, name: str) -> None:
    """Kill a loop with all its workers, and start it again, as Airflow does."""
    pipeline.kill(name)
    pipeline.start(name)


def bootstrap(conf: Path, table: str, run: str, during: Sequence[Callable[[], object]] = ()) -> None:
    """Bootstrap a table by the DAG's applications, called in this process: their Spark is the one that runs here.

    :param during: done after each application but the last
    """
    for place, name in enumerate(("bootstrap_prepare", "bootstrap_scan", "bootstrap_drain")):
        # As Airflow does: a step fails, say, when another process relays the topic to Kafka just now.
        tries = (finished_here(name, conf, table, run) for _ in range(3))
        assert ExitCode.OK in tries, (name, table)
        if place < len(during):
            during[place]()
