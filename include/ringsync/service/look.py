"""One look at the whole sync: the loops' status, Airflow's DAGs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringsync.airflow_client import AirflowClient, AirflowError, AirflowUnreachableError
from ringsync.config import Config, ConfigError
from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.gaps import Followed, Gap, Gaps, Judge
from ringsync.service.delays import Limits, counted
from ringsync.service.expected import CLOSE, Expected, expected_in
from ringsync.service.health import DagHealth, judges, problems
from ringsync.service.problem import Kind, Problem
from ringsync.status import STOP_KEY, Status, look_at_statuses
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class Look:
    """What was seen.

    :ivar is_judge: tells whether an owner of problems says now what is wrong
    :ivar gaps_over: keys of gaps that are no problem any more, for :func:`ringsync.ledger.gaps.close_gap`
    """

    statuses: Mapping[str, Status]
    dags: Mapping[str, DagHealth]
    stopped: bool
    problems: tuple[Problem, ...]
    is_judge: Callable[[str], bool]
    gaps_over: tuple[str, ...] = ()


def look(config: Config, store: ObjectStore, now_s: float, gaps: Gaps | None = None) -> Look:
    """Look at all loops and DAGs. What cannot be read of one of them is one of the problems.

    :param now_s: present time, seconds since the epoch
    :param gaps: the gaps, for who looks again and again: they are read once
    :raises UnavailableError: the object store cannot be used
    """
    seen = look_at_statuses(store)
    statuses = {**seen.understood, **counted(store)}
    stopped = store.stat(STOP_KEY) is not None
    expected = expected_in(config, store)
    dags, of_airflow = _dags(config, expected)
    asked = statuses, dags, expected, stopped, now_s
    wrong = problems(*asked, limits=Limits.of(config), damaged=seen.damaged)
    clocks = [_of_clock(host, ahead_ms) for host, ahead_ms in seen.ahead_ms.items()]
    lost, over = _lost(store, statuses, gaps or Gaps(store))
    found = (*of_airflow, *clocks, *lost, *wrong)
    return Look(statuses, dags, stopped, found, judges(*asked), over)


def _of_clock(host: str, ahead_ms: int) -> Problem:
    way = "ahead of" if ahead_ms > 0 else "behind"
    text = f"host {host}: its clock is {abs(ahead_ms) / 1000:,.1f} s {way} that of the object store: set it, with NTP"
    return Problem(Kind.CLOCK_OFF, host, text)


def _dags(config: Config, expected: Expected) -> tuple[dict[str, DagHealth], list[Problem]]:
    """Ask how each DAG stands, each on its own."""
    found: dict[str, DagHealth] = {}
    reasons = []
    try:
        client = client_of(config)
        for dag in expected.all_dags:
            try:
                found[dag] = DagHealth(client.is_paused(dag), client.newest_run(dag))
            except AirflowUnreachableError:
                raise
            except (AirflowError, ValueError, KeyError, TypeError) as error:
                reasons.append(f"DAG {dag}: {error}")
    except (AirflowError, ConfigError) as error:
        reasons.append(str(error))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return found, [Problem(Kind.AIRFLOW_AWAY, "Airflow", f"{reasons[0]}{more}")] if reasons else []


def _lost(store: ObjectStore, statuses: Mapping[str, Status], gaps: Gaps) -> tuple[list[Problem], tuple[str, ...]]:
    """Return what nodes have lost, and the keys of the gaps that are over. The gaps themselves are asked: whoever has
    found them may be away."""
    found = gaps.look()
    if not found:
        return [], ()
    close = statuses.get(CLOSE, {})
    left_out = close.get("left_out")
    judge = Judge(
        store,
        dict(_followed(close.get("tables"))),
        frozenset(left_out if isinstance(left_out, Mapping) else ()),
        partial(_has_replica, store),
    )
    lost, over = [], []
    for key, gap in found.items():
        if gap is None:
            lost.append(Problem(Kind.SEGMENTS_LOST, key, f"{store.uri(key)} cannot be read: restore it"))
        elif (unverified := judge.unverified(gap)) is None:
            over.append(key)
        else:
            lost.append(_of_gap(gap, gap.describe(unverified)))
    return lost, tuple(over)


def _of_gap(gap: Gap, told: str) -> Problem:
    if gap.node == CDC_LOGS:
        return Problem(Kind.LOG_GAP, gap.segment, told)
    return Problem(Kind.SEGMENTS_LOST, f"node {gap.endpoint}, {gap.segment}", f"node {gap.endpoint}: {told}")


def _followed(tables: Any) -> Iterator[tuple[str, Followed]]:
    """Yield the tables that ``bucket_close`` has told of, by name."""
    for name, told in tables.items() if isinstance(tables, Mapping) else ():
        if isinstance(told, Mapping):
            has_replica = told.get("replica_pass") is not None or told.get("replica_error") is not None
            yield name, Followed(str(told.get("table_id", "")), has_replica)


def _has_replica(store: ObjectStore, name: str) -> bool:
    from ringsync.replica.base import base_folder

    return bool(store.list(f"{base_folder(*parse_table_name(name))}/_delta_log/"))


def client_of(config: Config) -> AirflowClient:
    """Make the client of the configured Airflow.

    :raises ConfigError: the password cannot be read
    """
    airflow = config.airflow
    return AirflowClient(airflow.url, airflow.username, airflow.password.resolve("airflow.password"))
