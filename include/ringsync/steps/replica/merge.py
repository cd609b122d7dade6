"""The merge of the replicas' changes into their bases, when it is due (docs/replica.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ringsync.cluster.schema import read_tables
from ringsync.cluster.scylla import cdc_column, has_cdc
from ringsync.cluster.session import connect
from ringsync.config import Config, ConfigError
from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.followed import followed_tables
from ringsync.ledger.table_versions import version_of, versions_of
from ringsync.schema.table import TableSchema
from ringsync.steps.application import Application, ExitCode, Report, StepError, plain, spark_is_gone
from ringsync.steps.passes.follow_ups import FORGOTTEN_LATER_MS, digests_kept_ms
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.replica.session import check_session, store_session
from ringsync.storage import delta_options
from ringsync.storage.port import ChecksumError, ObjectStore, get_json
from ringsync.wiring import cluster_settings, store_of

UNMERGED_KEY = "progress/replica_merge.json"
"""Names of tables that were tried and are not merged yet, in the order of their last tries."""


def run(application: Application, clock: Callable[[], float] = time.time) -> tuple[Report, ExitCode]:
    """Merge the table that is named, or all that are due. A table that fails holds up no other. It may kill the run, so
    the next run merges it last. Bases that are to be written again come first: their tables' passes wait for that.

    :returns: exit code 1 when some table could not be merged: the report says which and why
    :raises StepError: the table that is named has no replica, or it cannot be merged now
    :raises ClusterError: the cluster does not answer
    :raises ConfigError: the configuration is wrong, for all tables
    """
    check_session(application)
    session = connect(cluster_settings(application.config))
    named = application.options.table and parse_table_name(application.options.table)
    merges = _Merges(application, clock, is_named=bool(named))
    tables = sorted(candidates(session, application.store, named), key=merges.place)
    later = [pair for pair in tables if not merges.done(*pair, only_rewriting=True)]
    for table, gc_grace_s in later:
        merges.done(table, gc_grace_s)
    report = {"merged": merges.merged, "not_yet_due": merges.waiting, "failed": merges.failed}
    if not merges.failed:
        return report, ExitCode.OK
    names = ", ".join(merges.failed)
    return {**report, "error": f"tables that could not be merged: {names}"}, ExitCode.COMPLETED_WITH_ERRORS


class _Merges:
    """The work of a run, one table after the other.

    :ivar merged: reports by table
    :ivar failed: errors by table
    :ivar waiting: number of tables that have changes and are not due
    """

    def __init__(self, application: Application, clock: Callable[[], float], *, is_named: bool) -> None:
        self._application, self._clock, self._is_named = application, clock, is_named
        self._unmerged = _unmerged(application.store)
        self._tried = {name: place for place, name in enumerate(self._unmerged)}
        self.merged: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.waiting = 0

    def place(self, pair: tuple[TableSchema, int]) -> int:
        """Return a table's place: those that were tried before come last, in the order of their last tries."""
        return self._tried.get(pair[0].full_name, -1)

    def done(self, table: TableSchema, gc_grace_s: int, *, only_rewriting: bool = False) -> bool:
        """Do a table's work.

        :param only_rewriting: do nothing but write the base again, for the first time
        :returns: whether nothing is left to do in this run
        """
        name = table.full_name
        if only_rewriting and name in self._tried:
            return False
        try:
            work = _work_on(self._application, table, gc_grace_s, int(self._clock()), is_named=self._is_named)
            if not isinstance(work, _Work):
                self.waiting += work
                return True
            if only_rewriting and not work.is_rewriting:
                return False
            self._note([*(other for other in self._unmerged if other != name), name])
            self.merged[name] = work.do()
            self._note([other for other in self._unmerged if other != name])
        except ConfigError:
            raise
        except Exception as error:
            if self._is_named or _spark_is_gone():
                raise
            self.failed[name] = plain(error)
            print(f"ringsync: warning: {name} could not be merged: {plain(error)}", flush=True)
        return True

    def _note(self, unmerged: list[str]) -> None:
        self._unmerged = unmerged
        self._application.store.say(UNMERGED_KEY, json.dumps(unmerged).encode())


@dataclass(frozen=True)
class _Work:
    do: Callable[[], Report]
    is_rewriting: bool


def _work_on(
    application: Application, shown: TableSchema, gc_grace_s: int, now_s: int, *, is_named: bool
) -> _Work | int:
    """Return what there is to do for a table; else the number of tables that are not due yet: 0 or 1.

    :param shown: the table as the cluster shows it
    :raises StepError: the table is named, and has no replica
    """
    from ringsync.replica.changes import begin_changes
    from ringsync.replica.evolve import RewriteNeededError
    from ringsync.replica.merge import due

    config, store = application.config, application.store
    table = version_of(store, shown).table
    try:
        state = followed_state(store, table, delta_options(**config.store.model_dump()))
    except RewriteNeededError as error:
        print(f"ringsync: {error}", flush=True)
        return _Work(partial(rewrite_table, application, table, now_s), is_rewriting=True)
    if state is None and is_named:
        raise StepError(f"{table.full_name} has no replica: trigger bootstrap_table first")
    if state is None:
        return 0
    if state.changes_version < 0:
        begin_changes(store, table, now_s * 1000)  # who replaced the base was killed before this
    limits = {"interval_s": config.replica.merge_interval_s, "rows_fraction": config.replica.merge_rows_fraction}
    if not is_named and not due(state, now_s * 1000, **limits):
        return int(bool(state.changed_rows))
    return _Work(partial(merge_table, application, table, gc_grace_s, state, now_s), is_rewriting=False)


def _unmerged(store: ObjectStore) -> list[str]:
    """Read the names of tables that earlier runs have tried and not merged."""
    with suppress(ChecksumError, ValueError):
        return list(get_json(store, UNMERGED_KEY) or ())
    return []


def _spark_is_gone() -> bool:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return context is not None and spark_is_gone(context)


def candidates(session: Any, store: ObjectStore, named: tuple[str, str] | None) -> list[tuple[TableSchema, int]]:
    """Return the named table, or all that the sync keeps in step: those with cdc, and those that lost it and are
    followed to their end; and ``gc_grace_seconds`` of each.

    :raises StepError: there is no such table
    """
    rows = list(session.execute(f"SELECT id, {cdc_column(session)}, gc_grace_seconds FROM system_schema.tables"))
    grace: Mapping[str, int] = {row.id.hex: row.gc_grace_seconds for row in rows}
    in_step = {row.id.hex for row in rows if has_cdc(row)} | followed_tables(store).keys()
    tables = [
        (table, grace[table.table_id])
        for table in read_tables(session).tables
        if table.table_id in grace and ((table.keyspace, table.name) == named if named else table.table_id in in_step)
    ]
    if named and not tables:
        raise StepError(f"the cluster has no table {'.'.join(named)} that ringsync can read")
    return tables


def dead_kept_s(config: Config, gc_grace_s: int) -> int:
    """Return how long dead rows are kept: until older writes no longer come, or the source is read for each of them."""
    return max(gc_grace_s, (digests_kept_ms(config) + FORGOTTEN_LATER_MS) // 1000)


def rewrite_table(application: Application, table: TableSchema, now_s: int) -> Report:
    """Write the base of a table again, whose schema has changed in a way that its files cannot show.

    :raises ConcurrentCommitError: another writer was faster
    """
    from ringsync.replica.evolve import Piece, RewriteTask, rewrite

    started = time.monotonic()
    context = store_session(application, f"replica_merge {application.run}").sparkContext

    def run(task: RewriteTask, pieces: Sequence[Piece]) -> list[Any]:
        return list(context.parallelize(pieces, len(pieces)).mapPartitions(task).collect())

    counts = rewrite(
        application.store,
        table,
        partial(versions_of, application.store, table),
        run,
        partial(store_of, application.config),
        delta_options(**application.config.store.model_dump()),
        now_s * 1000,
    )
    return {"rewritten": counts, "seconds": round(time.monotonic() - started, 3)}


def merge_table(application: Application, table: TableSchema, gc_grace_s: int, state: Any, now_s: int) -> Report:
    """Merge one table and tidy it up.

    :param state: :class:`ringsync.replica.changes.ReplicaState`
    :raises StepError: another writer was faster, or the counts do not reconcile
    """
    from ringsync.replica.folders import replica_folder
    from ringsync.replica.merge import merge_changes, tidy
    from ringsync.replica.table import CONFLICTS, ReplicaTable

    started = time.monotonic()
    if state.changes_version < 0:
        return {"read": 0}
    spark = store_session(application, f"replica_merge {application.run}")
    replica = ReplicaTable(application.store.uri(replica_folder(table.keyspace, table.name)), table)
    try:
        result = merge_changes(
            spark,
            application.store,
            replica,
            state,
            now_s=now_s,
            dead_kept_s=dead_kept_s(application.config, gc_grace_s),
            properties={"run_id": application.run},
        )
        compacted = tidy(spark, application.store, replica, state.options)
    except CONFLICTS as error:
        raise StepError(
            f"{replica.uri}: a bootstrap, a repair or an ALTER TABLE has changed the replica meanwhile; merge again: "
            f"{error}"
        ) from error
    counts = asdict(result)
    outcomes = [counts[name] for name in ("updated", "inserted", "deleted", "never_there", "superseded")]
    if counts["read"] != sum(outcomes):
        raise StepError(f"the counts of the merge of {table.full_name} do not reconcile: {counts}")
    return {**counts, "compacted": compacted, "seconds": round(time.monotonic() - started, 3)}
