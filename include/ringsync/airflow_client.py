"""A small client of Airflow's REST API: trigger a DAG run, follow it, say why it failed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode

import requests

TIMEOUT_S = 30.0
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each repetition of a request that Airflow failed to answer: its database may be busy (SQLite)."""

ENDED_S = 7200.0
"""Time for which runs that have ended are asked for all at once, s: longer than Airflow waits for a worker."""

WORKED_S = 300.0
"""So long the task of a loop must have run, s, that the end of the run before it says nothing any more. A login that is
refused takes two minutes to fail."""

CONTINUOUS = "@continuous"
"""What Airflow calls the schedule of loops."""

PAGE = 1000
"""Rows of a listing that are asked for at once. Airflow may give fewer (``[api] maximum_page_limit``)."""

_ALL_TASKS = "dags/~/dagRuns/~/taskInstances"


class AirflowError(Exception):
    """Airflow cannot do what was asked: the message says what is wrong and what to do."""


class AirflowUnreachableError(AirflowError):
    """Airflow does not answer now; it may answer in a moment."""


@dataclass(frozen=True)
class TaskState:
    """One task of a run.

    :ivar state: Airflow's word: ``running``, ``success``, ``failed``, ``skipped``, ``upstream_failed``, … or
        ``waiting`` if Airflow has none yet
    :ivar try_number: number of the newest try, from 1; 0: none yet
    :ivar seconds: duration of the newest try; None: it has not ended
    """

    task: str
    state: str
    try_number: int
    seconds: float | None


@dataclass(frozen=True)
class RunState:
    """A DAG run and its tasks, in the order in which they started; tasks that have not started come last.

    :ivar state: ``queued``, ``running``, ``success`` or ``failed``
    """

    dag: str
    run: str
    state: str
    tasks: tuple[TaskState, ...]

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("success", "failed")

    @property
    def current(self) -> TaskState | None:
        """The task that runs or is about to, if any."""
        return next((task for task in self.tasks if task.state in ("running", "up_for_retry", "queued")), None)


@dataclass(frozen=True)
class DagHealth:
    """How a DAG stands.

    :ivar run: the run that began last; None: it never ran
    :ivar ended: the last one that has ended: a loop that fails for good is begun again at once. None: there is none, or
        ``run`` is that of a loop, and has worked for so long that the end of the one before it says nothing any more
    """

    paused: bool
    run: RunState | None
    ended: RunState | None


@dataclass(frozen=True)
class TaskFailure:
    """The failure at the end of a task's log.

    :ivar message: text of the task's last exception, or the log's last lines if there is none
    :ivar final: whether the task said itself that another try cannot help
    """

    message: str
    final: bool


class AirflowClient:
    """Airflow's API with one login.

    Methods raise AirflowError: Airflow is unreachable, refuses the login, does not know the DAG, or gives us no rights.

    :param url: the API server's address, e.g. ``http://127.0.0.1:8080``
    :param username: a user who may trigger DAGs
    :param password: never shown in messages
    """

    def __init__(self, url: str, username: str, password: str) -> None:
        self.url = url.rstrip("/")
        self._username = username
        self._password = password
        self._session = requests.Session()

    def trigger(self, dag: str, run: str, parameters: Mapping[str, Any], note: str | None = None) -> bool:
        """Start a DAG run.

        :param parameters: the DAG's params; the others take their defaults
        :returns: True if the DAG was paused and has been unpaused for it
        :raises AirflowError: the DAG is broken, the parameters are refused, or the id is taken
        """
        unpaused = self.is_paused(dag)
        if unpaused:
            self.set_paused(dag, False)
        body = {"dag_run_id": run, "logical_date": None, "conf": dict(parameters), "note": note}
        for tries, delay in enumerate((*RETRY_DELAYS_S, None)):
            try:
                self._request("POST", f"dags/{quote(dag)}/dagRuns", body)
                break
            except _ConflictError:
                if tries:  # the id is ours: Airflow made the run, and failed after that
                    break
                raise
            except AirflowUnreachableError:
                if delay is None:
                    raise
                time.sleep(delay)
        return unpaused

    def state(self, dag: str, run: str) -> RunState:
        """Read the states of a run and its tasks."""
        return self._with_tasks(dag, self._request("GET", f"dags/{quote(dag)}/dagRuns/{quote(run)}"))

    def _with_tasks(self, dag: str, details: Mapping[str, Any]) -> RunState:
        path = f"dags/{quote(dag)}/dagRuns/{quote(details['dag_run_id'])}"
        return _run_state(details, self._request("GET", f"{path}/taskInstances")["task_instances"])

    def failure(self, dag: str, run: str, task: TaskState) -> TaskFailure:
        """Find in the log why a task's newest try failed."""
        path = f"dags/{quote(dag)}/dagRuns/{quote(run)}/taskInstances/{quote(task.task)}/logs/{max(task.try_number, 1)}"
        return find_failure(self._request("GET", f"{path}?full_content=true")["content"])

    def is_paused(self, dag: str) -> bool:
        """Tell whether a DAG is paused; raise AirflowError if it is broken."""
        try:
            details = self._request("GET", f"dags/{quote(dag)}")
        except _NotFoundError:
            errors = self._import_errors()
            reason = (
                f"its files have errors:\n{errors}"
                if errors
                else "either Airflow has just started and will know the DAG in a minute, or it has another DAGs folder"
            )
            raise AirflowError(f"Airflow at {self.url} has no DAG {dag}: {reason}") from None
        if details.get("has_import_errors"):
            raise AirflowError(f"the file of DAG {dag} has errors, so it cannot run:\n{self._import_errors()}")
        return bool(details["is_paused"])

    def set_paused(self, dag: str, paused: bool) -> None:
        """Pause a DAG, so that no run or task of it begins, or let it run again."""
        self._request("PATCH", f"dags/{quote(dag)}?update_mask=is_paused", {"is_paused": paused})

    def busy_tasks(self, dag: str) -> list[str]:
        """List the tasks of a DAG that run, or are about to: pausing the DAG does not stop them."""
        states = "&".join(f"state={state}" for state in ("running", "queued", "restarting", "deferred"))
        tasks = self._request("GET", f"dags/{quote(dag)}/dagRuns/~/taskInstances?{states}")["task_instances"]
        return sorted(task["task_id"] for task in tasks)

    def newest_run(self, dag: str, *, ended: bool = False) -> RunState | None:
        """Read the state of a DAG's newest run, or of the newest that has ended; None: there is none."""
        states = "&state=success&state=failed" if ended else ""
        runs = self._request("GET", f"dags/{quote(dag)}/dagRuns?limit=1&order_by=-run_after{states}")["dag_runs"]
        return self._with_tasks(dag, runs[0]) if runs else None

    def health(self, dags: Sequence[str], now: datetime, *, all_tasks: bool) -> dict[str, DagHealth | str]:
        """Ask how DAGs stand, of all at once: a sync has some for each queue. Those of which no run has ended lately
        are asked one by one, but for loops that run.

        :param all_tasks: False: of runs that go well tasks are left out, of others those that have not failed
        :returns: by DAG; a text: why nothing is known of it
        """
        known = {dag["dag_id"]: dag for dag in self._listed("GET", "dags?tags=ringsync&order_by=dag_id", "dags")}
        loops = {dag for dag in dags if dag in known and known[dag]["timetable_summary"] == CONTINUOUS}
        since = now - timedelta(seconds=ENDED_S)
        unfinished = self._newest(dags, states=["running", "queued"])
        began = {"state": "running", "start_date_lte": (now - timedelta(seconds=WORKED_S)).isoformat()}
        worked = {dag for dag, run in self._tasks(began) if dag in unfinished and unfinished[dag]["dag_run_id"] == run}
        ended: dict[str, Mapping[str, Any]] = {}
        for some in (loops - worked, {*dags} - loops):
            ended |= self._newest(sorted(some), states=["success", "failed"], end_date_gte=since.isoformat())
        newest = {**ended, **unfinished}
        listed = {dag for dag in newest if dag in ended or dag in loops}
        runs = [run for dag in sorted(listed) for run in (newest[dag], ended.get(dag)) if run is not None]
        tasks = self._tasks_of(runs) if all_tasks else self._failed_tasks(runs, loops, since)
        found: dict[str, DagHealth | str] = {}
        for dag in dags:
            try:
                is_sound = dag in known and not known[dag]["has_import_errors"]
                paused = bool(known[dag]["is_paused"]) if is_sound else self.is_paused(dag)
                if dag in listed:
                    pair = (newest[dag], ended.get(dag))
                    found[dag] = DagHealth(
                        paused, *(None if run is None else _run_state(run, tasks.get(_key(run), ())) for run in pair)
                    )
                else:
                    last = self.newest_run(dag)
                    found[dag] = DagHealth(
                        paused, last, last if last is None or last.finished else self.newest_run(dag, ended=True)
                    )
            except AirflowUnreachableError:
                raise
            except (AirflowError, ValueError, KeyError, TypeError) as error:
                found[dag] = str(error)
        return found

    def _tasks_of(self, runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
        """Return tasks by DAG and run. Airflow keeps each such request in its audit log."""
        asked = {name: sorted({run[name] for run in runs}) for name in ("dag_id", "dag_run_id")}
        body = {"dag_ids": asked["dag_id"], "dag_run_ids": asked["dag_run_id"], "order_by": "id"}
        return _by_run(self._listed("POST", f"{_ALL_TASKS}/list", "task_instances", body) if runs else ())

    def _newest(self, dags: Sequence[str], **which: Any) -> dict[str, Mapping[str, Any]]:
        """Return the newest of some runs of each DAG, by DAG. Loops that fail again and again have thousands: no more
        pages are read once each DAG has one.

        :param which: fields of the request that say which runs
        """
        found: dict[str, Mapping[str, Any]] = {}
        asked = {"dag_ids": [*dags], "order_by": "-run_after", **which}
        for page in self._pages("POST", "dags/~/dagRuns/list", "dag_runs", asked) if dags else ():
            for run in page:
                found.setdefault(run["dag_id"], run)
            if len(found) == len(dags):
                break
        return found

    def _failed_tasks(
        self, runs: Iterable[Mapping[str, Any]], loops: Collection[str], since: datetime
    ) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
        """Return failed tasks by DAG and run, at least those of some runs.

        :param loops: DAGs with one task: if it has failed, its run has, too
        :param since: time since when they have failed at the earliest
        """
        failing = [run for run in runs if run["state"] == "failed" or (_goes_on(run) and run["dag_id"] not in loops)]
        began = (datetime.fromisoformat(run["start_date"]) if run["start_date"] else since for run in failing)
        if not failing:
            return {}
        return self._tasks({"state": "failed", "end_date_gte": max(since, min(began)).isoformat()})

    def _tasks(self, which: Mapping[str, str]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
        """Return some tasks of all runs, by DAG and run, also of others' DAGs. Airflow does not log this request, which
        the alarms repeat every few seconds."""
        asked = urlencode({**which, "order_by": "id"})
        return _by_run(self._listed("GET", f"{_ALL_TASKS}?{asked}", "task_instances"))

    def _listed(self, method: str, path: str, name: str, body: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
        """Read a whole listing; the arguments are those of :meth:`_pages`."""
        return [row for page in self._pages(method, path, name, body) for row in page]

    def _pages(self, method: str, path: str, name: str, body: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Read a listing, page by page.

        :param method: GET: the page is named in the path; POST: in the body
        :param name: field of the answer that has the rows
        """
        number = 0
        while True:
            if method == "GET":
                page = self._request(method, f"{path}&limit={PAGE}&offset={number}")
            else:
                page = self._request(method, path, {**body, "page_limit": PAGE, "page_offset": number})
            yield page[name]
            number += len(page[name])
            if not page[name] or number >= page["total_entries"]:
                return

    def end_unfinished(self, dag: str) -> list[str]:
        """End the runs of a DAG that have not ended, e.g. after Airflow was killed.

        Running tasks fail at once or with their next sign of life, and later tasks are skipped. The last tasks decide
        which state Airflow gives the run.

        :returns: the runs' ids
        """
        path = f"dags/{quote(dag)}/dagRuns"
        unfinished = self._request("GET", f"{path}?state=running&state=queued")["dag_runs"]
        runs = [str(run["dag_run_id"]) for run in unfinished]
        for run in runs:
            self._request("PATCH", f"{path}/{quote(run)}?update_mask=state", {"state": "failed"})
        return runs

    def run_page(self, dag: str, run: str) -> str:
        """Return the address of a run in Airflow's UI."""
        return f"{self.url}/dags/{quote(dag)}/runs/{quote(run)}"

    def _import_errors(self) -> str:
        errors = self._request("GET", "importErrors")["import_errors"]
        return "\n".join(f"{error['filename']}: {error['stack_trace'].strip()}" for error in errors)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if "Authorization" not in self._session.headers:
            self._log_in()
        response = self._send(method, f"{self.url}/api/v2/{path}", body)
        if response.status_code == 401:  # the token lasts a day, a bootstrap may last longer
            self._log_in()
            response = self._send(method, f"{self.url}/api/v2/{path}", body)
        delays = iter(RETRY_DELAYS_S if method != "POST" or path.endswith("/list") else ())
        while response.status_code >= 500 and (delay := next(delays, None)) is not None:
            time.sleep(delay)
            response = self._send(method, f"{self.url}/api/v2/{path}", body)
        if response.ok:
            return response.json() if response.content else None
        reason = _reason(response)
        if response.status_code == 404:
            raise _NotFoundError(f"Airflow at {self.url} does not know {path}: {reason}")
        if response.status_code == 403:
            raise AirflowError(f"the Airflow user {self._username} may not do this ({method} {path}): {reason}")
        if response.status_code >= 500:
            raise AirflowUnreachableError(f"Airflow at {self.url} fails ({response.status_code}): {reason}")
        refused = _ConflictError if response.status_code == 409 else AirflowError
        raise refused(f"Airflow refuses ({response.status_code}): {reason}")

    def _log_in(self) -> None:
        self._session.headers.pop("Authorization", None)
        login = {"username": self._username, "password": self._password}
        response = self._send("POST", f"{self.url}/auth/token", login)
        if response.status_code in (400, 401, 403, 422):
            raise AirflowError(
                f"Airflow at {self.url} refuses the login of user {self._username}: "
                "check airflow.username and airflow.password in ringsync.yaml"
            )
        token = response.json().get("access_token") if response.ok and _is_json(response) else None
        if token is None:
            raise AirflowError(
                f"what answers at {self.url} is not Airflow 3 (status {response.status_code}): check airflow.url"
            )
        self._session.headers["Authorization"] = f"Bearer {token}"

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> requests.Response:
        try:
            return self._session.request(method, url, json=body, timeout=TIMEOUT_S)
        except requests.exceptions.Timeout:
            raise AirflowUnreachableError(f"Airflow at {self.url} does not answer within {TIMEOUT_S:.0f} s") from None
        except requests.exceptions.ConnectionError:
            message = f"Airflow is not reachable at {self.url}: does it run? Check airflow.url in ringsync.yaml"
            raise AirflowUnreachableError(message) from None
        except requests.exceptions.RequestException as error:
            raise AirflowError(f"{self.url} cannot be asked: {type(error).__name__}; check airflow.url") from None


def find_failure(log: Sequence[Mapping[str, Any] | str], lines: int = 20) -> TaskFailure:
    """Find the last exception in a task's log.

    :param log: entries as the API gives them: ``event`` and, for an exception, ``error_detail``
    :param lines: number of last lines to return if there is no exception
    """
    entries: list[Mapping[str, Any]] = [{"event": entry} if isinstance(entry, str) else entry for entry in log]
    for entry in reversed(entries):
        if details := entry.get("error_detail"):
            error = details[-1]
            return TaskFailure(str(error.get("exc_value")), error.get("exc_type") == "AirflowFailException")
    text = [str(entry.get("event", "")) for entry in entries]
    shown = [line for line in text if not line.startswith(("::group::", "::endgroup::"))]
    return TaskFailure("the end of its log:\n  " + "\n  ".join(shown[-lines:]), final=False)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["dag_id"], row["dag_run_id"]


def _goes_on(run: Mapping[str, Any]) -> bool:
    return run["state"] not in ("success", "failed")


def _by_run(tasks: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for task in tasks:
        found.setdefault(_key(task), []).append(task)
    return found


def _run_state(run: Mapping[str, Any], tasks: Iterable[Mapping[str, Any]]) -> RunState:
    ordered = sorted(tasks, key=lambda task: (task["start_date"] is None, task["start_date"] or "", task["task_id"]))
    states = [
        TaskState(task["task_id"], task["state"] or "waiting", task["try_number"], task["duration"]) for task in ordered
    ]
    return RunState(run["dag_id"], run["dag_run_id"], run["state"], tuple(states))


class _ConflictError(AirflowError):
    """The API answered 409: the object exists already."""


class _NotFoundError(AirflowError):
    """The API answered 404."""


def _is_json(response: requests.Response) -> bool:
    return response.headers.get("Content-Type", "").startswith("application/json")


def _reason(response: requests.Response) -> str:
    """Format an error of Airflow, which has several shapes, in one line."""
    if not _is_json(response):
        return response.text.strip()[:500] or response.reason
    detail = response.json().get("detail", response.text)
    if isinstance(detail, list):  # FastAPI's own validation
        return "; ".join(f"{'.'.join(map(str, error.get('loc', [])))}: {error.get('msg')}" for error in detail)
    if isinstance(detail, dict):
        return str(detail.get("reason") or detail.get("message") or detail)
    return str(detail)
