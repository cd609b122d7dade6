"""Read the nodes' commit logs: writes to tables with `cdc = true` are staged, for `bucket_close` to publish.

**What it does.** Each queue of workers has such a DAG. Its loop reads the synced part of its nodes' commit logs, and
puts the change rows into buckets. A queue whose host is away keeps no other queue from working, nor what publishes.

**Inputs.** The nodes' `cdc_raw` folders and the configuration `ringsync.yaml` (`RINGSYNC_CONFIG`), whose
`sync.queue_of_node` says in which Airflow queue a node's task runs.

**Outputs,** all in the object store: files under `staging/`, numbers every second under `status/commitlog_stage/`, and
a report per run, `reports/commitlog_stage/<run>.json`.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
A run ends after `sync.run_s` seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.
`cdcservice start` and `stop` switch the sync on and off.

**When it fails.** `cdcservice status` shows what stands still and why; the last line of the task's log says what failed
and what to do. After exit code 3 (configuration, connection or rights) the next run tries again. docs/sync.md explains
each number.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.config import DEFAULT_QUEUE
from ringsync.orchestration import LOOP_DAG, commitlog_stage, dag_of, known_config

for queue in known_config().sync.queues:
    application = commitlog_stage(queue)
    with DAG(
        dag_of(application),
        dag_display_name="Read commit logs" + (f" of queue {queue}" if queue != DEFAULT_QUEUE else ""),
        description="Stage changes from the nodes' commit logs",
        doc_md=__doc__,
        **LOOP_DAG,
    ):
        SparkApplicationOperator(task_id="stage", spark=application)
