"""A loop that publishes late rows, from their files and from the queue ``out_of_sequence``.

In each cycle the rows of new files and the due rows of the queue are published with their present state. Rows that were
published before are dropped. Rows wait in the queue if a replica that is down may know more of them. See late_rows.py.
"""

from __future__ import annotations

import time
from functools import partial

from ringsync.cluster.control import ControlServer
from ringsync.ledger.layout import check_layout
from ringsync.state.out_of_sequence import OutOfSequence
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.late.late_pass import LatePasses
from ringsync.steps.late.late_rows import LateRows
from ringsync.steps.loop import Patience, connect_patiently, cycles, is_stopped, put_status, starts_again
from ringsync.steps.own_keyspace import create_state
from ringsync.wiring import cluster_limits, cluster_settings

STATUS_EVERY_S = 5.0


@starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Publish late rows until the time is over.

    :returns: exit code 1 when something keeps rows from being published
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises StepError: the counts do not reconcile
    :raises AwayError: cluster or object store are away
    :raises ClusterError: the cluster refuses us
    """
    config, store = application.config, application.store
    check_layout(store)
    session = connect_patiently(partial(cluster_settings, config))
    create_state(session, config)
    end = time.monotonic() + config.sync.run_s
    patience, written_s, is_outdated = Patience(), 0.0, application.outdated()

    def goes_on() -> bool:
        nonlocal written_s
        if time.monotonic() >= written_s + STATUS_EVERY_S:
            written_s = time.monotonic()
            put_status(store, "out_of_sequence", "queue", late.status())
        return time.monotonic() < end and not is_outdated() and not is_stopped(store)

    with ControlServer() as control:
        control.watch_limits(store, application.run, cluster_limits(config))
        queue = OutOfSequence(session, config.state.keyspace)
        late = LateRows(store, queue, LatePasses(application, session, control.address), goes_on=goes_on)
        for _ in cycles(application, config.out_of_sequence_processor_poll_interval_ms):
            error = patience.tried(late.cycle)
            put_status(store, "out_of_sequence", "queue", {**late.status(), "error": error or late.error})
    problems = [*late.problems, *([error] if error else [])]
    report = {"counts": dict(late.counts), **late.status(), "problems": problems}
    return report, ExitCode.COMPLETED_WITH_ERRORS if problems else ExitCode.OK
