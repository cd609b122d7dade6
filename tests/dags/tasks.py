"""Tasks of the DAGs, as a worker has them in a run."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "dags"
STARTED = 1795234200
"""When the run began, in seconds since the epoch."""
RUN = "manual__2026-11-21T04:20:00+00:00"


def parameters(bag: Any, dag_id: str, conf: dict[str, Any]) -> dict[str, Any]:
    """What tasks get as ``params``: the DAG's, with those of the trigger in their place, checked as Airflow does."""
    merged = copy.deepcopy(bag.dags[dag_id].params)
    merged.update(conf)
    checked: dict[str, Any] = merged.validate()
    return checked


def context(params: Any, run_type: str = "manual") -> dict[str, Any]:
    """What a worker renders templates with."""
    run = SimpleNamespace(start_date=datetime.fromtimestamp(STARTED, UTC), run_type=run_type)
    begin, end = (datetime(2026, 11, 20, hour, tzinfo=UTC) for hour in (3, 4))
    interval = {"data_interval_start": begin, "data_interval_end": end}
    return {"params": params, "run_id": RUN, "ti": None, "dag_run": run, **interval}


def rendered(bag: Any, dag_id: str, task_id: str, conf: dict[str, Any]) -> Any:
    """A copy of a task with its templates rendered as the worker does."""
    task = bag.dags[dag_id].get_task(task_id).prepare_for_execution()
    task.render_template_fields(context(parameters(bag, dag_id, conf)))
    return task
