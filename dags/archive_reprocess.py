"""Read archived commit logs: their rows are staged, or published as late rows.

**What it does.** Commit logs that left their node unread are in `cdc/<node>/`. They are read by the schema of their
day, from where the node's commits end. Then they move to `cdc_archive/<node>/`, where they stay for
`archive.retention_days`. A run for an interval (`airflow backfill create`, or the parameters *since* and *until*) reads
all archived logs with writes of this interval again: what was published is recognised and dropped.

**Inputs.** `cdc/` and, for an interval, `cdc_archive/` in the object store; the cluster; `ringsync.yaml`
(`RINGSYNC_CONFIG`).

**Outputs.** Commits and rows under `staging/`, which `bucket_close` and `out_of_sequence` publish, and the report
`reports/archive_reprocess/<run>.json` in the object store.

**To re-run.** Clear the task, or trigger the DAG again: a log is read once, and rows that were published are dropped.

**When it fails.** Exit code 1: some logs cannot be read; the report names them, and they stay in `cdc/`. All others
were read. The last line of the task's log says what failed and what to do.
"""

from __future__ import annotations

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, CronDataIntervalTimetable, Param
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import (
    ARCHIVE_ASSET,
    ARCHIVE_REPROCESS,
    LOOPS_SINCE,
    OWNER,
    REPROCESS_PARAMETERS,
    nothing_archived,
    safe_run_id,
)

with DAG(
    "archive_reprocess",
    dag_display_name="Read archived commit logs",
    description="Stage or publish the rows of archived commit logs",
    doc_md=__doc__,
    schedule=AssetOrTimeSchedule(
        timetable=CronDataIntervalTimetable("0 * * * *", timezone="UTC"), assets=[Asset(ARCHIVE_ASSET)]
    ),
    start_date=LOOPS_SINCE,
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    tags=["ringsync", "sync"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id, "nothing_archived": nothing_archived},
    params={name: Param(**parameter) for name, parameter in REPROCESS_PARAMETERS.items()},
):
    SparkApplicationOperator(
        task_id="reprocess",
        spark=ARCHIVE_REPROCESS,
        skip_if="{{ '' if dag_run.run_type == 'backfill' or params.since else nothing_archived() }}",
    )
