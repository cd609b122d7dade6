"""Publish late rows: changes whose bucket was closed before they came.

**What it does.** A loop reads the files of late rows, drops rows that were published before, reads the others from all
replicas, and publishes them as they are now. If a replica that is down may have a newer state of a row, the row waits
in `cdc.out_of_sequence`, and is looked at again later.

**Inputs.** The files under `staging/late/`, which `commitlog_stage` or `scylla_log_stage` writes, the table
`cdc.out_of_sequence`, and `ringsync.yaml` (`RINGSYNC_CONFIG`).

**Outputs.** Messages with `source.late`, the replica, numbers every few seconds under `status/out_of_sequence/`, and
the report `reports/out_of_sequence/<run>.json` in the object store.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
A run ends after `sync.run_s` seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.
`cdcservice start` and `stop` switch the sync on and off.

**When it fails.** `cdcservice status` shows how many rows wait, and since when; the last line of the task's log says
what failed and what to do. After exit code 3 (configuration, connection or rights) the next run tries again.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import LOOP_DAG, OUT_OF_SEQUENCE

with DAG(
    "out_of_sequence",
    dag_display_name="Publish late rows",
    description="Read the rows of late changes, and publish them as they are now",
    doc_md=__doc__,
    **LOOP_DAG,
):
    SparkApplicationOperator(task_id="publish", spark=OUT_OF_SEQUENCE)
