"""Compare replicas with their sources, cell by cell: value, writetime, TTL.

**What it does.** It sums up both sides per token range (a count and an order-free checksum over key, cell, writetime
and expiry). Then it compares row by row only the ranges whose sums differ. With *repair*, it reads these ranges again
from the source and writes them to the replica.

**Inputs.** One table that the DAG `bootstrap_table` has replicated, or several and patterns. Without any, as in
scheduled runs: all tables that the sync follows. Of a large one, only the token ranges that were compared longest ago,
so that each is compared within `replica.verify_days`.

**Outputs.** The report `reports/replica_verify/<run>.json` in the object store: each difference with its key.

**To re-run.** Clear the task, or trigger the DAG again; it changes nothing unless *repair* is on.

**When it fails.** Exit code 1 means that there are differences: the report lists them. Run the DAG again with *repair*.
A run without *table*, as each scheduled one, succeeds all the same: the alarm `replica-differs` names the tables.
The last line of the task's log says what failed and what to do.

**Schedule.** `replica.verify_schedule`, daily by default.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, CronTriggerTimetable, Param
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import OWNER, REPLICA_VERIFY, VERIFY_PARAMETERS, known_config, safe_run_id

SCHEDULE = known_config().replica.verify_schedule

with DAG(
    "replica_verify",
    dag_display_name="Verify a replica",
    description="Compare source and replica cell by cell, and repair the replica on request",
    doc_md=__doc__,
    # Not at once when it is switched on: then tables are just being bootstrapped.
    schedule=SCHEDULE and CronTriggerTimetable(SCHEDULE, timezone="UTC", run_immediately=timedelta(0)),
    catchup=False,
    max_active_runs=4,
    is_paused_upon_creation=True,
    tags=["ringsync", "verify"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id},
    params={name: Param(**parameter) for name, parameter in VERIFY_PARAMETERS.items()},
):
    SparkApplicationOperator(task_id="verify", spark=REPLICA_VERIFY)
