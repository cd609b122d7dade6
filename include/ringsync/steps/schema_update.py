"""A loop that keeps the history of all tables, and publishes what changes as messages.

In each cycle one node is asked for its schema version. If that is new, the node's whole schema is read. Versions of
tables are put at once: a node that is behind shows versions that are known. The log of changes, the messages made of
it, and dropped tables wait until all nodes agree, since a node that is behind looks as if all had been undone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ringsync
from ringsync.cluster.node import Node, NodeSchema, node_schema, one_node
from ringsync.cluster.scylla import is_scylla
from ringsync.cluster.whole_schema import Reading, Silence, read_whole_schema
from ringsync.config import ConfigError
from ringsync.cql.identifiers import portable_name, printable
from ringsync.ledger.dropped_tables import mark_dropped, unmark_dropped
from ringsync.ledger.layout import check_layout
from ringsync.ledger.schema_changes import SchemaChangeError, SchemaLog, schema_change
from ringsync.ledger.table_versions import (
    HistoryEntry,
    TableVersionError,
    history_named,
    latest_version,
    names_of_versions,
    version_entries,
    version_of,
)
from ringsync.schema.stages import Versions, stages, without_held
from ringsync.schema.table import TableSchema
from ringsync.schema.to_cql import change_statements, create_statements
from ringsync.schema.whole import TableName, WholeSchema
from ringsync.state.schema_history import HistoryRow, SchemaHistory
from ringsync.status import Status
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.holes import note_holes_of
from ringsync.steps.loop import Patience, connect_patiently, cycles, put_status, starts_again
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.files import FileStream
from ringsync.streams.relay import relay
from ringsync.streams.schema_messages import change_folder, publish_schema_change
from ringsync.streams.sink import RelayError, Sink
from ringsync.wiring import cluster_settings, sink_of

TOLERATED_S = 60.0
"""Time for which nodes may disagree about the schema before that counts as a problem."""


@starts_again()
def run(application: Application) -> tuple[Report, ExitCode]:
    """Follow the schema until the time is over.

    :returns: exit code 1 when something cannot be recorded or published
    :raises LayoutError: the state is of a version of ringsync that this one does not know
    :raises AwayError: cluster or object store are away
    :raises ClusterError: the cluster refuses us
    """
    config, store = application.config, application.store
    check_layout(store)
    sink = sink_of(config)
    session = connect_patiently(partial(cluster_settings, config))
    create_state(session, config)
    copy = SchemaHistory(session, config.state.keyspace)
    updater = SchemaUpdater(
        *(store, config.server_name, lambda: one_node(session), copy),
        own_keyspace=config.state.keyspace,
        sink=sink,
        changed=None if is_scylla(session) else partial(note_holes_of, store, config),
    )
    patience, error = Patience(), None
    for _ in cycles(application, config.schema_updater_poll_interval_ms):
        error = patience.tried(updater.cycle)
        put_status(store, "schema_update", "schema", {**updater.status(), "error": error})
    problems = [*updater.problems, *([error] if error else [])]
    report = {**updater.status(), "problems": problems}
    return report, ExitCode.COMPLETED_WITH_ERRORS if problems else ExitCode.OK


class SchemaUpdater:
    """One cycle after the other.

    :param server: name of the topic
    :param choose: returns the node to ask (:func:`ringsync.cluster.node.one_node`)
    :param copy: the copy of the histories in the cluster; None: there is none
    :param own_keyspace: ringsync's own keyspace, which is not a user's
    :param sink: connects to Kafka; None: messages are files only
    :param changed: called with a node whose schema has changed
    """

    def __init__(
        self,
        store: ObjectStore,
        server: str,
        choose: Callable[[], Node],
        copy: SchemaHistory | None = None,
        *,
        own_keyspace: str = "",
        sink: Callable[[], Sink] | None = None,
        now: Callable[[], float] = time.time,
        changed: Callable[[Node], None] | None = None,
    ) -> None:
        self._store, self._server, self._choose, self._copy = store, server, choose, copy
        self._own, self._sink, self._now, self._changed = own_keyspace, sink, now, changed
        self._log = SchemaLog(store)
        self._silence = Silence(now)
        self._seen: NodeSchema | None = None
        self._disagree_since: float | None = None
        self._others: list[str] = []
        self._held: dict[TableName, str] = {}
        self._is_damaged = False
        self._log_error: str | None = None
        self._uncopied: list[str] = []
        self._to_copy = True
        self._published = self._relayed = 0
        self._kafka_error: str | None = None

    @property
    def problems(self) -> list[str]:
        """What keeps the schema, or a table, from being recorded or published: a sentence each."""
        found = [f"{_full_name(name)}: {why}" for name, why in sorted(self._held.items())]
        found += self._uncopied
        if self._disagree_since is not None and self._now() - self._disagree_since > TOLERATED_S:
            found.append(
                f"the nodes have had different schemas for {self._now() - self._disagree_since:.0f} s, now "
                f"{', '.join(self._others)}: schema changes are published when they agree; see nodetool describecluster"
            )
        kafka = self._kafka_error and f"Kafka: {self._kafka_error}"
        return [*found, *(error for error in (self._log_error, kafka) if error)]

    def status(self) -> Status:
        """Return the numbers for ``cdcservice status``."""
        since = self._disagree_since
        return {
            "changes": self._log.number,
            "tables_recorded": len(self._log.schema.tables),
            "kafka_changes": self._relayed if self._sink else None,
            "disagreement_since_ms": None if since is None else int(since * 1000),
            "problems": self.problems,
        }

    def cycle(self) -> None:
        """Record and publish what is new."""
        try:
            self._log.catch_up()
            self._log_error = None
        except SchemaChangeError as error:
            self._log_error = str(error)
        self._look()
        if self._log_error is None:
            self._publish()
            self._relay()
        self._copy_missing()

    def _look(self) -> None:
        node = self._choose()
        at = self._silence.ignored(node, node_schema(node))
        if at == self._seen and not self._is_damaged:
            return
        self._seen = None
        reading = read_whole_schema(node, {self._own})
        if reading is None:
            return
        reading = replace(reading, at=self._silence.ignored(node, reading.at))
        versions = self._put_versions(reading)
        self._to_copy = True
        if self._changed is not None:
            self._changed(node)
        self._disagree_since = None if reading.at.agrees else self._disagree_since or self._now()
        self._others = sorted(reading.at.others)
        if self._log_error is None and (not reading.at.agrees or self._add_change(reading, versions)):
            self._seen = reading.at

    def _put_versions(self, reading: Reading) -> Versions:
        """Put the versions of tables that are not as the log knows them; a table that fails is held back.

        :returns: their numbers, and those of tables that came back to what the log knows, with versions in between
        """
        self._held = {(table.keyspace, table.name): table.reason for table in reading.unreadable}
        self._is_damaged = False
        known, numbers, versions = self._log.schema.tables, names_of_versions(self._store), Versions()
        for table in (*reading.schema.tables.values(), *reading.views):
            name, last = (table.keyspace, table.name), self._log.told.get(table.full_name)
            is_changed = known.get(name) != table
            if not is_changed and (last is None or max(numbers.get(portable_name(*name), ()), default=0) <= last):
                continue
            try:
                # A table that is as it was told gets no version: another loop may just have found a later one.
                version = version_of(self._store, table) if is_changed else latest_version(self._store, table.table_id)
                _ddl(known.get(name), table)
            except Exception as error:
                if isinstance(error, StorageError) and not isinstance(error, TableVersionError):
                    raise  # The store is away.
                is_explained = isinstance(error, TableVersionError)
                self._held[name] = str(error) if is_explained else f"{type(error).__name__}: {error}"
                self._is_damaged = True
            else:
                if version is not None and version.table == table and (is_changed or version.number > (last or 0)):
                    versions.setdefault(table.keyspace, {})[table.full_name] = version.number
        return versions

    def _add_change(self, reading: Reading, versions: Versions) -> bool:
        """Add what changed to the log; False: another process added something, so the schema must be read anew."""
        before, found_ms = self._log.schema, int(self._now() * 1000)
        schema, waiting = without_held(before, reading.schema, self._held, reading.unreadable_types)
        self._held |= dict.fromkeys(waiting, "a user-defined type is held back, since another table that has it is")
        left_out = {view.full_name for view in reading.views} | {_full_name(name) for name in self._held}
        told = {key: {t: n for t, n in tables.items() if t not in left_out} for key, tables in versions.items()}
        if self._log.number and schema == before and not any(told.values()):
            return True
        for name, table in before.tables.items():
            if name not in schema.tables or schema.tables[name].table_id != table.table_id:
                mark_dropped(self._store, *name, table.table_id, found_ms)
        for name, table in schema.tables.items():
            if name not in before.tables or before.tables[name].table_id != table.table_id:
                unmark_dropped(self._store, *name, table.table_id)
        return all(
            self._log.add(one, named, found_ms=found_ms, hostname=reading.at.node, ringsync=ringsync.__version__)
            for one, named in stages(before, schema, told, self._between(schema, told))
        )

    def _between(self, schema: WholeSchema, told: Versions) -> list[tuple[TableSchema, int]]:
        """Read the versions that were put since the last change and are not the newest: messages name them, too.

        :param told: versions of the tables that are told now
        """
        if self._log.number == 0:
            return []
        found: list[tuple[int, TableSchema, int]] = []
        numbers, before = names_of_versions(self._store), self._log.schema.tables
        for name in sorted({*before, *schema.tables} - self._held.keys()):
            folder, last = portable_name(*name), self._log.told.get(_full_name(name))
            end = told.get(name[0], {}).get(_full_name(name), 0) if name in schema.tables else sys.maxsize
            if not any((last or 0) < number < end for number in numbers.get(folder, ())):
                continue
            since_us = 0
            for entry in history_named(self._store, folder, (last or 0) + 1):
                if isinstance(entry, TableVersionError) or entry.version.table.is_selection:
                    continue
                is_own = last is not None or entry.version.table_id == schema.tables[name].table_id
                if is_own and entry.version.number < end:
                    since_us = max(since_us, entry.since_us)
                    found.append((since_us, entry.version.table, entry.version.number))
        return [(table, number) for _, table, number in sorted(found, key=lambda one: one[0])]

    def _publish(self) -> None:
        if self._published == 0 and self._log.number:
            there = set(FileStream(self._store, self._server).folders())
            numbers = range(1, self._log.number + 1)
            self._published = next((n - 1 for n in numbers if change_folder(n) not in there), self._log.number)
        while self._published < self._log.number:
            change = schema_change(self._store, self._published + 1)
            assert change is not None
            publish_schema_change(
                *(self._store, self._server, change.number, change.statements, change.versions),
                version=change.ringsync,
                hostname=change.hostname,
                ts_ms=change.found_ms,
                snapshot=change.snapshot,
            )
            self._published = change.number

    def _relay(self) -> None:
        if self._sink is None or self._relayed == self._published:
            return
        try:
            sink = self._sink()
            try:
                relay(self._store, self._server, sink)
            finally:
                sink.close()
        except (RelayError, ConfigError) as error:
            self._kafka_error = str(error)
            return
        self._relayed, self._kafka_error = self._published, None

    def _copy_missing(self) -> None:
        """Write versions that the copy in the cluster lacks."""
        if self._copy is None or not self._to_copy:
            return
        self._uncopied = []
        have = {(portable_name(keyspace, table), number) for keyspace, table, number in self._copy.known()}
        for name, numbers in names_of_versions(self._store).items():
            missing = [number for number in numbers if (name, number) not in have]
            if missing:
                try:
                    rows = _rows(version_entries(self._store, name, missing[0] - 1), missing[0])
                except (TableVersionError, ValueError) as error:
                    self._uncopied.append(str(error))
                else:
                    self._copy.put(rows)
        self._to_copy = False


def _full_name(name: TableName) -> str:
    return f"{printable(name[0])}.{printable(name[1])}"


def _rows(entries: list[HistoryEntry], first: int) -> list[HistoryRow]:
    """Make the rows of versions, each with what changed since the one before.

    :param first: number of the first version that gets a row
    """
    rows, before = [], None
    for entry in entries:
        table = entry.version.table
        if entry.version.number >= first:
            rows.append(
                HistoryRow(
                    *(table.keyspace, table.name, entry.version.number, entry.since_us, entry.found_ms),
                    *(table.table_id, "\n".join(_ddl(before, table))),
                )
            )
        before = table
    return rows


def _ddl(before: TableSchema | None, table: TableSchema) -> list[str]:
    return create_statements(table) if before is None else change_statements(before, table)
