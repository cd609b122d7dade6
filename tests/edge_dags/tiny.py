"""Tasks of a second for three queues, which leave a note where they have run, and loops of the same."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, BaseOperator, Connection, Context

QUEUES = ("default", "q1", "q2")


class NoteOperator(BaseOperator):
    """Write down who runs it, where, in which environment; then wait, as a process of its own."""

    template_fields = ("note",)

    def __init__(self, *, connection: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.connection = connection
        self.note = "{{ dag.dag_id }}-{{ run_id }}-{{ task_instance.try_number }}.json"
        self.process: subprocess.Popen[bytes] | None = None

    def execute(self, context: Context) -> None:
        """Leave the note and wait."""
        folder = Path(os.environ["AIRFLOW_HOME"], "notes")
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(["sleep", str(context["params"]["seconds"])])
        note: dict[str, Any] = {"folder": os.getcwd(), "file": __file__, "pid": os.getpid(), "child": self.process.pid}
        note["environment"] = dict(os.environ)
        note["password"] = Connection.get(self.connection).password if self.connection else None
        (folder / self.note).write_text(json.dumps(note))
        print("a line of", self.note, flush=True)
        if code := self.process.wait():
            raise RuntimeError(f"it ended with {code}")

    def on_kill(self) -> None:
        """End the process."""
        if self.process:
            self.process.terminate()


for queue in QUEUES:
    arguments = {"queue": queue, "retries": 100, "retry_delay": timedelta(seconds=2)}
    with DAG(f"once_{queue}", schedule=None, params={"seconds": 0}, default_args=arguments):
        NoteOperator(task_id="note", connection="from_server")
    with DAG(
        f"loop_{queue}",
        schedule="@continuous",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=True,
        params={"seconds": 3},
        default_args=arguments,
    ):
        NoteOperator(task_id="note")
