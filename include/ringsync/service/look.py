"""One look at the whole sync: the loops' status, Airflow's DAGs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ringsync.airflow_client import AirflowClient, AirflowError, DagHealth
from ringsync.config import Config, ConfigError
from ringsync.installed import differences
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.gaps import Gaps
from ringsync.service.delays import Limits, counted
from ringsync.service.expected import CLOSE, LOG_STAGE, Expected, expected_in, expected_of
from ringsync.service.health import judges, problems, told_by
from ringsync.service.lost import look_for_lost
from ringsync.service.problem import Kind, Problem
from ringsync.service.show import status_lines
from ringsync.state.undecodable import with_undecodable
from ringsync.status import STALE_AFTER_S, STOP_KEY, Status, age_s, has_left, known_now, look_at_statuses
from ringsync.storage.port import ChecksumError, ObjectStore


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
    :param gaps: the gaps, for who looks again and again: they are read once, and of Airflow's tasks only failed ones
    :raises UnavailableError: the object store cannot be used
    """
    seen, limits = look_at_statuses(store), Limits.of(config)
    untold = {loop: why for loop, status in seen.understood.items() if (why := _untold(loop, status, limits, now_s))}
    told = {loop: status for loop, status in seen.understood.items() if loop not in untold}
    damaged, statuses = {**seen.damaged, **untold}, {**known_now(told, now_s), **counted(store)}
    stopped = store.stat(STOP_KEY) is not None
    if has_left(store):
        left = Problem(
            Kind.SYNC_STOPPED, "sync", "cdcservice leave was run: nothing is followed until cdcservice start"
        )
        return Look(statuses, {}, True, (left,), lambda owner: True)
    try:
        expected, database = expected_in(config, store), []
    except ChecksumError as error:  # the loops that have a status tell which database it is
        expected = expected_of(config, LOG_STAGE in statuses)
        database = [Problem(Kind.STATUS_UNREADABLE, "database", f"{error}: cdcservice start writes it anew")]
    dags, of_airflow = _dags(config, expected, now_s, all_tasks=gaps is None)
    asked = statuses, dags, expected, stopped, now_s
    wrong = problems(*asked, limits=limits, damaged=damaged)
    clocks = [_of_clock(host, ahead_ms) for host, ahead_ms in seen.ahead_ms.items()]
    strangers = _of_installed(statuses, expected, now_s)
    lost = look_for_lost(store, statuses, gaps or Gaps(store))
    missing = (one.problem(store) for one in lost if one.unverified is not None)
    over = tuple(one.key for one in lost if one.unverified is None)
    undecodable = map(_undecodable, with_undecodable(store))
    found = (*of_airflow, *database, *clocks, *missing, *undecodable, *strangers, *wrong)
    return Look(statuses, dags, stopped, found, judges(*asked, damaged=damaged), over)


def _untold(loop: str, status: Status, limits: Limits, now_s: float) -> str:
    """Say why a status is damaged, whatever fields it has: it cannot be told of. Empty: it can."""
    try:
        told_by(loop, status, limits, now_s)
        list(status_lines({loop: status}, {}, now_s))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _undecodable(node: str) -> Problem:
    where = "CDC logs" if node == CDC_LOGS else f"node {node}"
    text = f"{where}: records could not be decoded, and wait: cdcservice errors list --node {node}"
    return Problem(Kind.RECORDS_UNDECODABLE, where, text)


def _of_clock(host: str, ahead_ms: int) -> Problem:
    way = "ahead of" if ahead_ms > 0 else "behind"
    text = f"host {host}: its clock is {abs(ahead_ms) / 1000:,.1f} s {way} that of the object store: set it, with NTP"
    return Problem(Kind.CLOCK_OFF, host, text)


def _of_installed(statuses: Mapping[str, Status], expected: Expected, now_s: float) -> Iterator[Problem]:
    """Yield the loops that run something else than the loop does that publishes what they stage."""
    live = {
        loop: statuses[loop]
        for loop in expected.loops
        if loop in statuses and age_s(statuses[loop], now_s) <= STALE_AFTER_S
    }
    of_close = live.get(CLOSE, {})
    for loop, status in live.items():
        if differing := differences(status.get("installed", {}), of_close.get("installed", {})):
            text = (
                f"{loop} on host {status.get('host')} runs {'; '.join(differing)}, as {CLOSE} on host "
                f"{of_close.get('host')} does: install the same on both; a loop takes it at the begin of its next run"
            )
            yield Problem(Kind.INSTALLED_DIFFERS, loop, text)


def _dags(
    config: Config, expected: Expected, now_s: float, *, all_tasks: bool
) -> tuple[dict[str, DagHealth], list[Problem]]:
    """Ask how each DAG stands."""
    found: dict[str, DagHealth] = {}
    reasons = []
    now = datetime.fromtimestamp(now_s, UTC)
    try:
        for dag, health in client_of(config).health(expected.all_dags, now, all_tasks=all_tasks).items():
            if isinstance(health, DagHealth):
                found[dag] = health
            else:
                reasons.append(f"DAG {dag}: {health}")
    except (AirflowError, ConfigError, ValueError, KeyError, TypeError) as error:
        reasons.append(str(error))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return found, [Problem(Kind.AIRFLOW_AWAY, "Airflow", f"{reasons[0]}{more}")] if reasons else []


def client_of(config: Config) -> AirflowClient:
    """Make the client of the configured Airflow.

    :raises ConfigError: the password cannot be read
    """
    airflow = config.airflow
    return AirflowClient(airflow.url, airflow.username, airflow.password.resolve("airflow.password"))
