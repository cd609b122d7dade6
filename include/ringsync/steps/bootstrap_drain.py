"""End a bootstrap for those who follow the table's changes (DESIGN §6, steps 3 and 4).

While a table is copied its changes wait in the bootstrap stream. The cut-over is one pass, put if absent: what is
published before it waits, and is moved behind the rows that were copied, in its order; what is published after it goes
to the table's own stream. Who is killed between, or does this again, comes to the same end; ``bucket_close`` does the
same when it finds the cut-over.
"""

from __future__ import annotations

import time

from ringsync.state.table_versions import version_of
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.bootstrap_prepare import load_plan
from ringsync.steps.follow_ups import publish_pass
from ringsync.steps.sync_plan import SyncTable
from ringsync.streams.pass_log import get_pass, mark, pass_numbers


def run(application: Application) -> tuple[Report, ExitCode]:
    """Cut over, and move what waits.

    :raises StepError: the run has no plan
    """
    config, store = application.config, application.store
    plan = load_plan(store, application.run)
    schema = plan.scan.table
    table = SyncTable(version_of(store, schema), plan.topic, config.sync.bucket_by_of(schema.full_name) == "arrival")
    number = mark(store, schema.table_id, "cutover", plan.bootstrap.id, int(time.time() * 1000))
    numbers = [known for known in pass_numbers(store, schema.table_id) if known <= number]
    passes = {known: get_pass(store, schema.table_id, known) for known in numbers}
    moved: list[str] = []
    publish_pass(store, config, table, passes, number, lambda _, bucket: moved.append(bucket))
    return {"bootstrap": plan.bootstrap.id, "cutover_pass": number, "buckets_moved": len(moved)}, ExitCode.OK
