"""The end of a bootstrap for those who follow the table's changes (docs/bootstrap.md).

While a table is copied its changes wait in the bootstrap stream. The cut-over is one pass, put if absent. Changes that
were published before it move behind the copied rows, in their order. Changes that are published after it go to the
table's own stream. Another run after a kill comes to the same end. So does ``bucket_close`` when it finds the cut-over,
and it also feeds Kafka. This step feeds Kafka only if ``bucket_close`` does not run, or does not follow the table.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing

from ringsync.cluster.session import connect
from ringsync.config import Config
from ringsync.ledger.followed import keep_following
from ringsync.ledger.passes import mark
from ringsync.state.bootstrap import SCANNING, BootstrapState
from ringsync.state.session import StateError
from ringsync.status import BOOTSTRAPS, STALE_AFTER_S, age_s, forget, read_status
from ringsync.steps.application import Application, ExitCode, Report, StepError
from ringsync.steps.bootstrap.copied_gap import close_behind_copy
from ringsync.steps.bootstrap.old_snapshots import clear_finished
from ringsync.steps.bootstrap.plan import SSTABLE, BootstrapPlan, completed_since, plans_to_follow
from ringsync.steps.bootstrap.prepare import check_not_cancelled
from ringsync.steps.passes.follow_ups import publish_passes
from ringsync.steps.sync_plan import sync_table
from ringsync.steps.tables import Outcome, each, in_all, text_of
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.relay import relay
from ringsync.streams.sink import RelayError, Sink
from ringsync.wiring import cluster_settings, sink_of


def run(application: Application) -> tuple[Report, ExitCode]:
    """Cut over, move what waits, and see that Kafka gets it; then the bootstrap is completed.

    In a run for several tables each fails for itself.

    :raises StepError: the run has no plan, or not everything is copied; Kafka does not take the messages
    :raises BootstrapReplacedError: another bootstrap of the table has begun
    """
    config = application.config
    outcome = Outcome(alone=not application.patterns)
    plans = plans_to_follow(application, outcome)
    state = BootstrapState(connect(cluster_settings(config)), config.state.keyspace)
    with closing(KafkaFeed(application)) as kafka:
        each(application.run, plans, lambda name: drain_table(application, state, plans[name], kafka), outcome)
    if any(plan.mode == SSTABLE for plan in plans.values()):
        # Once for all tables, since it looks at all bootstraps. After a kill the repeated step does it.
        try:
            clear_finished(config, application.store, state)
        except (StorageError, StateError) as error:  # the tables are completed all the same
            print(f"ringsync: warning: old snapshots stay for now: {error}", flush=True)
    last = not outcome.alone and application.options.last
    since = completed_since(application, state, outcome) if last else []
    report, code = in_all(outcome, last=last)
    return {**report, **({"completed_since": [*map(text_of, since)]} if last else {})}, code


def drain_table(
    application: Application, state: BootstrapState, plan: BootstrapPlan, kafka: KafkaFeed
) -> tuple[Report, ExitCode]:
    """Complete the bootstrap of one table; the errors are those of :func:`run`."""
    config, store = application.config, application.store
    latest = check_not_cancelled(state.find(plan.bootstrap.keyspace, plan.bootstrap.table), plan)
    if latest.state == SCANNING:
        raise StepError(f"not everything of {plan.scan.table.full_name} is copied: run bootstrap_scan first")
    report: Report = {"bootstrap": plan.bootstrap.id, **cut_over(store, config, plan)}
    close_behind_copy(store, plan)
    report["kafka_messages"] = kafka.feed(plan)
    state.complete(plan.bootstrap)
    forget(store, f"{BOOTSTRAPS}{plan.scan.table.table_id}")
    return report, ExitCode.OK


def cut_over(store: ObjectStore, config: Config, plan: BootstrapPlan) -> Report:
    """Let the stream go on, behind the copied rows. Doing it again is safe."""
    number = mark(store, plan.scan.table.table_id, "cutover", plan.bootstrap.id, int(time.time() * 1000))
    moved: list[str] = []
    table = sync_table(store, config, plan.scan.table)
    publish_passes(store, config, table, lambda _, folder: moved.append(folder))
    return {"cutover_pass": number, "folders_moved": len(moved)}


class KafkaFeed:
    """Copies streams of tables to Kafka, one after another; the first one connects."""

    def __init__(self, application: Application) -> None:
        self._store, self._connect = application.store, sink_of(application.config)
        self._sink: Sink | None = None
        self._lock = threading.Lock()

    def feed(self, plan: BootstrapPlan) -> int | None:
        """Copy the stream to Kafka, unless a loop does: two at once would take the topic from each other.

        :returns: messages; None: there is no Kafka, or a loop feeds it
        :raises StepError: Kafka does not take them
        """
        table_id = plan.scan.table.table_id
        if self._connect is None:
            return None
        if is_followed(self._store, table_id, time.time()):
            keep_following(self._store, table_id)
            return None
        with self._lock:
            try:
                self._sink = self._sink or self._connect()
                return relay(self._store, plan.topic, self._sink).messages
            except RelayError as error:
                self.close()
                raise StepError(
                    f"{error}. The replica and the file stream are complete; do this step again, which copies nothing "
                    "anew"
                ) from error

    def close(self) -> None:
        """End the connection; the next table connects again."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


def is_followed(store: ObjectStore, table_id: str, now_s: float) -> bool:
    """Tell whether ``bucket_close`` runs and follows a table."""
    close = read_status(store, "bucket_close/close")
    if close is None or age_s(close, now_s) > STALE_AFTER_S:
        return False
    return any(table["table_id"] == table_id for table in close["tables"].values())
