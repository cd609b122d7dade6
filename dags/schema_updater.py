"""Keep the history of all tables, and publish schema changes.

**What it does.** Every `schema_updater_poll_interval_ms` a loop asks a node whether its schema changed. If so, it
records new versions of tables, and publishes the statements that make the new schema of the old one. The first run
publishes the present schema.

**Inputs.** `system_schema` of the cluster, and `ringsync.yaml` (`RINGSYNC_CONFIG`).

**Outputs.** The histories under `schemas/`, the log of changes under `schema_changes/`, messages in
`streams/<server>/` and, with `kafka`, in the topic `<server>`, and the copy `cdc.schema_history` in the cluster. Also
numbers under `status/schema_update/`, and the report `reports/schema_update/<run>.json`.

**To re-run.** Nothing to do: Airflow starts a killed loop again after five seconds, and the loop goes on where it was.
A run ends after `sync.run_s` seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.
`cdcservice start` and `stop` switch the sync on and off.

**When it fails.** The sync goes on: it finds changes of the tables that it follows by itself. `cdcservice status` names
tables whose history is held up; the last line of the task's log says what failed and what to do. After exit code 3
(configuration, connection or rights) the next run tries again.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import LOOP_DAG, SCHEMA_UPDATE

with DAG(
    "schema_updater",
    dag_display_name="Follow the schema",
    description="Record the versions of all tables, and publish schema changes as messages",
    doc_md=__doc__,
    **LOOP_DAG,
):
    SparkApplicationOperator(task_id="update", spark=SCHEMA_UPDATE)
