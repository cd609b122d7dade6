"""A loop that keeps the history of all tables, and publishes what changes as messages.

In each cycle one node is asked for its schema version. If that is new, the node's whole schema is read. Versions of
tables are put at once: a node that is behind shows versions that are known. The log of changes, the messages made of
it, and dropped tables wait until all nodes agree, since a node that is behind looks as if all had been undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import ringsync
from ringsync.cluster.whole_schema import (
    Node,
    NodeSchema,
    Reading,
    Silence,
    node_schema,
    one_node,
    read_whole_schema,
)
from ringsync.config import ConfigError
from ringsync.cql.identifiers import printable
from ringsync.ledger.dropped_tables import mark_dropped, unmark_dropped
from ringsync.ledger.layout import check_layout
from ringsync.ledger.schema_changes import SchemaChangeError, SchemaLog, schema_change
from ringsync.ledger.table_versions import (
    HistoryEntry,
    TableVersionError,
    names_of_versions,
    version_entries,
    version_of,
)
from ringsync.schema.description import user_types_of
from ringsync.schema.table import TableSchema
from ringsync.schema.to_cql import change_statements, create_statements
from ringsync.schema.whole import TableName, WholeSchema
from ringsync.state.schema_history import HistoryRow, SchemaHistory
from ringsync.status import Status
from ringsync.steps.application import Application, ExitCode, Report
from ringsync.steps.loop import Patience, connect_patiently, cycles, put_status, starts_again
from ringsync.steps.own_keyspace import create_state
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.streams.files import FileStream, portable_name
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
    session = connect_patiently(cluster_settings(config))
    create_state(session, config)
    copy = SchemaHistory(session, config.state.keyspace)
    updater = SchemaUpdater(
        store, config.server_name, lambda: one_node(session), copy, own_keyspace=config.state.keyspace, sink=sink
    )
    patience, error = Patience(), None
    for _ in cycles(store, config.sync.run_s, config.schema_updater_poll_interval_ms / 1000):
        error = patience.tried(updater.cycle)
        put_status(store, "schema_update", "schema", {**updater.status(), "error": error})
    problems = [*updater.problems, *([error] if error else [])]
    report = {**updater.status(), "problems": problems}
    return report, ExitCode.COMPLETED_WITH_ERRORS if problems else ExitCode.OK


class SchemaUpdater:
    """One cycle after the other.

    :param server: name of the topic
    :param choose: returns the node to ask (:func:`ringsync.cluster.whole_schema.one_node`)
    :param copy: the copy of the histories in the cluster; None: there is none
    :param own_keyspace: ringsync's own keyspace, which is not a user's
    :param sink: connects to Kafka; None: messages are files only
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
    ) -> None:
        self._store, self._server, self._choose, self._copy = store, server, choose, copy
        self._own, self._sink, self._now = own_keyspace, sink, now
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
        found = [f"{printable(name[0])}.{printable(name[1])}: {why}" for name, why in sorted(self._held.items())]
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
        self._disagree_since = None if reading.at.agrees else self._disagree_since or self._now()
        self._others = sorted(reading.at.others)
        if self._log_error is None and (not reading.at.agrees or self._add_change(reading, versions)):
            self._seen = reading.at

    def _put_versions(self, reading: Reading) -> dict[str, dict[str, int]]:
        """Put the versions of tables that are not as the log knows them; a table that fails is held back."""
        self._held = {(table.keyspace, table.name): table.reason for table in reading.unreadable}
        self._is_damaged = False
        known, versions = self._log.schema.tables, dict[str, dict[str, int]]()
        changed = [table for name, table in reading.schema.tables.items() if known.get(name) != table]
        for table in (*changed, *reading.views):
            name = (table.keyspace, table.name)
            try:
                version = version_of(self._store, table)
                _ddl(known.get(name), table)
            except Exception as error:
                if isinstance(error, StorageError) and not isinstance(error, TableVersionError):
                    raise  # The store is away.
                is_known = isinstance(error, TableVersionError)
                self._held[name] = str(error) if is_known else f"{type(error).__name__}: {error}"
                self._is_damaged = True
            else:
                versions.setdefault(table.keyspace, {})[table.full_name] = version.number
        return versions

    def _add_change(self, reading: Reading, versions: dict[str, dict[str, int]]) -> bool:
        """Add what changed to the log; False: another process added something, so the schema must be read anew."""
        schema, before, found_ms = self._without_held(reading), self._log.schema, int(self._now() * 1000)
        if self._log.number and schema == before:
            return True
        for name, table in before.tables.items():
            if name not in schema.tables or schema.tables[name].table_id != table.table_id:
                mark_dropped(self._store, *name, table.table_id, found_ms)
        for name, table in schema.tables.items():
            if name not in before.tables or before.tables[name].table_id != table.table_id:
                unmark_dropped(self._store, *name, table.table_id)
        views = {view.full_name for view in reading.views}
        told = {key: {t: n for t, n in tables.items() if t not in views} for key, tables in versions.items()}
        return self._log.add(schema, told, found_ms=found_ms, hostname=reading.at.node, ringsync=ringsync.__version__)

    def _without_held(self, reading: Reading) -> WholeSchema:
        """Leave tables that are held back as the log knows them, with the types that they need."""
        before, schema = self._log.schema, reading.schema
        tables = {name: table for name, table in schema.tables.items() if name not in self._held}
        types = {name: dict(kinds) for name, kinds in schema.types.items()}
        for keyspace in reading.unreadable_types:
            types[keyspace] = dict(before.types.get(keyspace, {}))
        for name, table in before.tables.items():
            if name in self._held and name[0] in schema.keyspaces:
                tables[name] = table
                needed = before.types.get(name[0], {})
                own = {kind: needed[kind] for kind in user_types_of(table) if kind in needed}
                types[name[0]] = {**own, **types.get(name[0], {})} if own else types.get(name[0], {})
        return replace(schema, types={name: kinds for name, kinds in types.items() if kinds}, tables=tables)

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
