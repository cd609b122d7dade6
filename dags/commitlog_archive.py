"""Keep room in the nodes' `cdc_raw`: finished commit logs go to the object store before Cassandra's limit is reached.

**What it does.** Each queue of workers has such a DAG. Its task looks at the free space of its nodes' `cdc_raw` every
few seconds. If less than `archive.free_percent` of `cdc_total_space` is free, it copies the oldest finished segments to
`cdc/<node>/`, verifies their checksums, and deletes them on the node. With `archive.policy: always` it does so with all
finished segments. It goes on while the sync is stopped or broken: then it is needed most.

**Inputs.** The nodes' `cdc_raw` folders and `ringsync.yaml` (`RINGSYNC_CONFIG`), section `archive`.

**Outputs,** all in the object store: `cdc/<node>/<segment>.log`, its index and its entry; numbers every few seconds
under `status/commitlog_archive/`, and a report per task, `reports/commitlog_archive/<run>.json`. The end of each run
changes the asset `ringsync_archive`; then the DAG `archive_reprocess` reads what is there. So a run that has archived
what nobody has read ends after ten minutes.

**To re-run.** Nothing to do: Airflow starts a killed task again after five seconds. A run ends after `sync.run_s`
seconds, or when `ringsync.yaml` has changed; then the next run begins by itself.

**When it fails.** A node that has too little room, or whose folder cannot be looked at, fails no run, since the others
need theirs: `cdcservice status` names it, and docs/archive.md says what to do. While the configuration is wrong, it
goes on with the last good one; while the object store is away, it waits.
"""

from __future__ import annotations

from airflow.sdk import DAG, Asset
from ringsync_process import ProcessOperator

from ringsync.config import DEFAULT_QUEUE
from ringsync.orchestration import ARCHIVE_ASSET, LOOP_DAG, commitlog_archive, dag_of, known_config

for queue in known_config().sync.queues:
    application = commitlog_archive(queue)
    with DAG(
        dag_of(application),
        dag_display_name="Archive commit logs" + (f" of queue {queue}" if queue != DEFAULT_QUEUE else ""),
        description="Move finished commit logs to the object store before cdc_raw is full",
        doc_md=__doc__,
        **LOOP_DAG,
    ):
        ProcessOperator(task_id="archive", application=application, outlets=[Asset(ARCHIVE_ASSET)])
