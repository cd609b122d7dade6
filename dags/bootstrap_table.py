"""Make verified replicas of Cassandra tables.

**What it does.** `prepare` checks rights, settings and schema, and plans the token ranges. With mode `sstable`, a task
`snapshot_<queue>` on each queue's worker takes snapshots of its nodes; once all have ended, failed or not, `scan` goes
on if enough replicas have one. It reads every row with the writetime and TTL of each cell, and writes it to the replica
(Delta) and to the change stream (Avro). `drain` puts the changes that were made meanwhile after these rows in the
stream. `verify` compares source and replica cell by cell.

**Inputs.** One table of the cluster in `ringsync.yaml` (`RINGSYNC_CONFIG`), or several and patterns, and the parameters
below. Each step does all tables; one that fails does not stop the others, and the last step names it.

**Outputs,** all in the object store: `replica/<keyspace>/<table>/`, `streams/<topic>/`, the plans
`plans/bootstrap/<run>…`, and a report per step, `reports/<application>/<run>.json`.

**To re-run.** Clear the failed task, or trigger the DAG again with the same tables and selection (splits may differ).
Each table goes on where its last run stopped and reads no committed range again; after a failed `drain` it reads
nothing. To give up a bootstrap, use `cdcservice bootstrap --cancel`. If the table's last bootstrap was completed, a new
run makes a new replica. Readers see the old replica until the new one replaces it, in one commit. In the source cluster
only ringsync's own keyspace is written.

**When it fails.** The last line of the task's log says what failed and what to do. Exit code 1: `scan` could not read
some ranges, `verify` found differences, or some of several tables failed; the report lists them. 2: too many errors. 3:
configuration, connection or rights. Airflow does not try again after these codes. It does after 4 (interrupted) and 5
(crashed).
"""

from __future__ import annotations

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param
from ringsync_process import ProcessOperator
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import (
    BOOTSTRAP_DRAIN,
    BOOTSTRAP_PARAMETERS,
    BOOTSTRAP_PREPARE,
    BOOTSTRAP_SCAN,
    NO_SNAPSHOT,
    OWNER,
    REPLICA_VERIFY,
    known_config,
    safe_run_id,
    sstable_snapshot,
)

CONFIG = known_config()

with DAG(
    "bootstrap_table",
    dag_display_name="Bootstrap a table",
    description="Copy a Cassandra table into a verified replica and a change stream",
    doc_md=__doc__,
    schedule=None,
    max_active_runs=4,
    tags=["ringsync", "bootstrap"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id, "default_mode": CONFIG.scan.mode},
    params={name: Param(**parameter) for name, parameter in BOOTSTRAP_PARAMETERS.items()},
):
    prepare = SparkApplicationOperator(task_id="prepare", spark=BOOTSTRAP_PREPARE)
    snapshots = [
        ProcessOperator(task_id=f"snapshot_{queue}", application=sstable_snapshot(queue), skip_if=NO_SNAPSHOT)
        for queue in CONFIG.sync.queues
    ]
    ended = EmptyOperator(task_id="snapshots_ended", trigger_rule="all_done")
    scan = SparkApplicationOperator(
        task_id="scan", spark=BOOTSTRAP_SCAN, skip_if="{{ 'dry run: nothing is copied' if params.dry_run else '' }}"
    )
    drain = SparkApplicationOperator(task_id="drain", spark=BOOTSTRAP_DRAIN)
    verify = SparkApplicationOperator(
        task_id="verify", spark=REPLICA_VERIFY, skip_if="{{ '' if params.verify else 'verify was switched off' }}"
    )
    prepare >> snapshots >> ended >> scan >> drain >> verify
    prepare >> scan  # without a plan there is nothing to read, however the snapshots ended
