"""Make a verified replica of a Cassandra table.

**What it does.** `prepare` checks rights, settings and schema, and plans the token ranges; `scan` reads every row
with the writetime and TTL of each cell and writes it to the replica (Delta) and to the change stream (Avro);
`verify` compares source and replica cell by cell.

**Inputs.** A table of the cluster in `ringsync.yaml` (`RINGSYNC_CONFIG`) and the parameters below.

**Outputs,** all in the object store: `replica/<keyspace>/<table>/`, `streams/<topic>/`, the plan
`plans/bootstrap/<run>.json`, and a report per step, `reports/<application>/<run>.json`.

**To re-run.** Clear the failed task: the plan is kept, and the step does its work again from its start. A new run
replaces the replica by a fresh one, in one commit; until then readers see the old one. The source is only read.

**When it fails.** The last line of the task's log says what failed and what to do. Exit code 1: differences found,
the report lists them, the DAG `replica_verify` with *repair* mends them. 2: too many errors. 3: configuration,
connection or rights. None of these is tried again by itself; 4 and 5, interrupted and crashed, are.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param
from ringsync_spark import SparkApplicationOperator

from ringsync.orchestration import (
    BOOTSTRAP_PREPARE,
    BOOTSTRAP_SCAN,
    OWNER,
    REPLICA_VERIFY,
    TABLE_PATTERN,
    safe_run_id,
)

with DAG(
    "bootstrap_table",
    dag_display_name="Bootstrap a table",
    description="A Cassandra table becomes a verified replica and a change stream",
    doc_md=__doc__,
    schedule=None,
    max_active_runs=4,
    tags=["ringsync", "bootstrap"],
    default_args={"owner": OWNER},
    user_defined_macros={"safe_run_id": safe_run_id},
    params={
        "table": Param(
            type="string",
            pattern=TABLE_PATTERN,
            title="Table",
            description_md="`keyspace.table`, e.g. `shop.orders`. Odd names in double quotes, as in CQL",
        ),
        "dry_run": Param(False, type="boolean", title="Dry run", description_md="Check and plan only; copy nothing"),
        "verify": Param(
            True, type="boolean", title="Verify", description_md="Compare source and replica cell by cell afterwards"
        ),
        "splits": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            maximum=65536,
            title="Splits",
            section="Tuning",
            description_md="Pieces into which the token ring is cut; empty: by the table's estimated size",
        ),
    },
):
    prepare = SparkApplicationOperator(task_id="prepare", spark=BOOTSTRAP_PREPARE)
    scan = SparkApplicationOperator(
        task_id="scan", spark=BOOTSTRAP_SCAN, skip_if="{{ 'dry run: nothing is copied' if params.dry_run else '' }}"
    )
    verify = SparkApplicationOperator(
        task_id="verify", spark=REPLICA_VERIFY, skip_if="{{ '' if params.verify else 'verify was switched off' }}"
    )
    prepare >> scan >> verify
