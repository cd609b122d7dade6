"""Compare replicas with their sources, cell by cell: value, writetime, TTL.

**What it does.** It sums up both sides per token range (a count and an order-free checksum over key, cell, writetime
and expiry). Then it compares row by row only the ranges whose sums differ. With *repair*, it reads these ranges again
from the source and writes them to the replica.

**Inputs.** One table that the DAG `bootstrap_table` has replicated, or several and patterns.

**Outputs.** The report `reports/replica_verify/<run>.json` in the object store: each difference with its key.

**To re-run.** Clear the task, or trigger the DAG again; it changes nothing unless *repair* is on.

**When it fails.** Exit code 1 means that there are differences: the report lists them. Run the DAG again with *repair*.
The last line of the task's log says what failed and what to do.

**Schedule.** None, since there is no default table. For a nightly run trigger the DAG from your own scheduler
(`TriggerDagRunOperator`, or cron with `cdcservice verify --table 'shop.*'`): docs/airflow.md.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import OWNER, REPLICA_VERIFY, VERIFY_PARAMETERS, safe_run_id

with DAG(
    "replica_verify",
    dag_display_name="Verify a replica",
    description="Compare source and replica cell by cell, and repair the replica on request",
    doc_md=__doc__,
    schedule=None,
    max_active_runs=4,
    tags=["ringsync", "verify"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id},
    params={name: Param(**parameter) for name, parameter in VERIFY_PARAMETERS.items()},
):
    SparkApplicationOperator(task_id="verify", spark=REPLICA_VERIFY)
