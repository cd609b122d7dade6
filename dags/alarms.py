"""Raise an alarm when something is wrong, and clear it when it is over.

**What it does.** Every `alarms.interval_s` seconds its task looks at the status of all loops and at the DAGs, as
`cdcservice status` does. A problem that lasts for `alarms.after_s` seconds is an alarm; a critical one is an alarm at
once. The configured notifiers are told when an alarm is raised, and again when it is cleared. It goes on after
`cdcservice stop`.

**Inputs.** `status/` in the object store, Airflow's API, and `ringsync.yaml` (`RINGSYNC_CONFIG`), section `alarms`.

**Outputs.** Notifications; `alarms/` in the object store; the file of `metrics.prometheus_file`.

**To re-run.** Nothing to do: Airflow starts a killed task again after five seconds. A run ends after `sync.run_s`
seconds, an hour at most, or when `ringsync.yaml` has changed; then the next run begins by itself. What was not told yet
is told then.

**When it fails.** The configuration is wrong, and never was right on this host. If it was, the last good one is used,
and that is an alarm. A notifier that fails or cannot be made is tried again at each look, holds up no other, and
`cdcservice status` names it.
"""

from __future__ import annotations

from airflow.sdk import DAG
from ringsync_alarms import AlarmOperator

from ringsync.orchestration import ALARMS_DAG, LOOP_DAG

with DAG(
    ALARMS_DAG,
    dag_display_name="Watch over ringsync",
    description="Raise alarms when something is wrong, and clear them when it is over",
    doc_md=__doc__,
    **LOOP_DAG,
):
    AlarmOperator(task_id="watch")
