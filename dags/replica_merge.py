"""Merge the newest row images into the replicas' bases.

**What it does.** A replica is a base and the changes since. Readers read both (docs/replica.md). The merge brings the
changes into the base, so that readers have few changes to look through. A table is due after `replica.merge_interval_s`
seconds, or when its changes are more than `replica.merge_rows_fraction` of its rows. A base whose files cannot show the
schema after an `ALTER TABLE` is written again.

**Inputs.** Replicas that `bootstrap_table` has made and `bucket_close` has changed. The parameter *table* names a
table to merge now.

**Outputs.** The tables `base` and `changes` of `replica/<keyspace>/<table>/`, and the report
`reports/replica_merge/<run>.json` in the object store.

**To re-run.** Clear the task, or trigger the DAG again: merging the same changes again gives the same result.

**When it fails.** Readers still see everything, but more slowly. The last line of the task's log says what failed and
what to do; the next run tries all tables again.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import MERGE_LOOK_S, MERGE_PARAMETERS, OWNER, REPLICA_MERGE, known_config, safe_run_id

with DAG(
    "replica_merge",
    dag_display_name="Merge changes into replicas",
    description="Bring the newest images of changed rows into the replicas' bases",
    doc_md=__doc__,
    schedule=timedelta(seconds=min(MERGE_LOOK_S, known_config().replica.merge_interval_s)),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    tags=["ringsync", "sync"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id},
    params={name: Param(**parameter) for name, parameter in MERGE_PARAMETERS.items()},
):
    SparkApplicationOperator(task_id="merge", spark=REPLICA_MERGE)
