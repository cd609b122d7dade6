"""The keyspaces of a stand-in: tables that only ScyllaDB has, and copies of ``system_schema`` as ScyllaDB shows it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cassandra.cluster import Session
from cassandra.query import SimpleStatement

from tests.scylla_server.ddl import LOG_SUFFIX, comment_with, comment_without, extension
from tests.scylla_server.log_table import PARTITIONER, create_log, is_user_type, log_columns, quoted
from tests.scylla_server.rewrite import DISTRIBUTED, MOVED_SCHEMA, SCHEMA, SYSTEM

SHOWN_AS = {DISTRIBUTED: "system_distributed", SYSTEM: "system"}

STREAM_TABLES = (
    f"CREATE TABLE IF NOT EXISTS {DISTRIBUTED}.cdc_generation_timestamps (key text, time timestamp, expired timestamp, "
    "PRIMARY KEY (key, time)) WITH CLUSTERING ORDER BY (time DESC)",
    f"CREATE TABLE IF NOT EXISTS {DISTRIBUTED}.cdc_streams_descriptions_v2 (time timestamp, range_end bigint, "
    "streams frozen<set<blob>>, PRIMARY KEY (time, range_end))",
    f"CREATE TABLE IF NOT EXISTS {SYSTEM}.cdc_local (key text PRIMARY KEY, streams_timestamp timestamp, uuid uuid)",
    f"CREATE TABLE IF NOT EXISTS {SYSTEM}.scylla_local (key text PRIMARY KEY, value text)",
    f"CREATE TABLE IF NOT EXISTS {SYSTEM}.cdc_timestamps (keyspace_name text, table_name text, timestamp timestamp, "
    "PRIMARY KEY ((keyspace_name, table_name), timestamp)) WITH CLUSTERING ORDER BY (timestamp DESC)",
    f"CREATE TABLE IF NOT EXISTS {SYSTEM}.cdc_streams (keyspace_name text, table_name text, timestamp timestamp, "
    "stream_state tinyint, stream_id blob, "
    "PRIMARY KEY ((keyspace_name, table_name), timestamp, stream_state, stream_id))",
)
V1_TABLE = (
    f"CREATE TABLE IF NOT EXISTS {DISTRIBUTED}.cdc_streams_descriptions (time timestamp PRIMARY KEY, "
    "streams frozen<set<blob>>, expired timestamp)"
)
COPIES = (
    "{0}.keyspaces (keyspace_name text PRIMARY KEY, durable_writes boolean, replication frozen<map<text, text>>)",
    "{0}.scylla_keyspaces (keyspace_name text PRIMARY KEY, storage_type text, initial_tablets int)",
    "{0}.scylla_tables (keyspace_name text, table_name text, partitioner text, "
    "PRIMARY KEY (keyspace_name, table_name))",
    "{0}.tables (keyspace_name text, table_name text, bloom_filter_fp_chance double, caching frozen<map<text, text>>, "
    "comment text, compaction frozen<map<text, text>>, compression frozen<map<text, text>>, crc_check_chance double, "
    "default_time_to_live int, extensions frozen<map<text, blob>>, flags frozen<set<text>>, gc_grace_seconds int, "
    "id uuid, max_index_interval int, memtable_flush_period_in_ms int, min_index_interval int, speculative_retry text, "
    "PRIMARY KEY (keyspace_name, table_name))",
    "{0}.columns (keyspace_name text, table_name text, column_name text, clustering_order text, "
    "column_name_bytes blob, kind text, position int, type text, PRIMARY KEY (keyspace_name, table_name, column_name))",
    "{0}.dropped_columns (keyspace_name text, table_name text, column_name text, dropped_time timestamp, type text, "
    "PRIMARY KEY (keyspace_name, table_name, column_name))",
)
_WORDS = """
bloom_filter_fp_chance caching comment compaction compression crc_check_chance default_time_to_live extensions flags
gc_grace_seconds id max_index_interval memtable_flush_period_in_ms min_index_interval speculative_retry
"""
_OPTIONS = tuple(_WORDS.split())
_FIELDS = {
    "keyspaces": ("durable_writes", ["keyspace_name"], ["durable_writes", "replication"]),
    "tables": (
        "gc_grace_seconds",
        ["keyspace_name", "table_name"],
        list(_OPTIONS),
    ),
    "columns": (
        "type",
        ["keyspace_name", "table_name", "column_name"],
        ["clustering_order", "column_name_bytes", "kind", "position", "type"],
    ),
    "dropped_columns": ("type", ["keyspace_name", "table_name", "column_name"], ["dropped_time", "type"]),
}
"""Of each copied table: a column whose write time is the row's, the key, and the other columns."""


class StandInSchema:
    """Keeps the stand-in's keyspaces.

    :param session: a session on the node behind the proxy, and on no other
    :param schema: keyspace of the copies of ``system_schema``, as this node has it
    :param replicas: replicas of the keyspaces
    """

    def __init__(self, session: Session, schema: str = SCHEMA, replicas: int = 1) -> None:
        self._session, self.keyspace = session, schema
        self._lock = threading.RLock()
        self._version: object = None
        self._copied: dict[str, dict[tuple[str, ...], tuple[Any, ...]]] = {name: {} for name in _FIELDS}
        replication = f"{{'class': 'SimpleStrategy', 'replication_factor': {replicas}}}"
        for name in (DISTRIBUTED, SYSTEM, schema):
            session.execute(f"CREATE KEYSPACE IF NOT EXISTS {name} WITH replication = {replication}")
        for statement in (*STREAM_TABLES, *(f"CREATE TABLE IF NOT EXISTS {text.format(schema)}" for text in COPIES)):
            session.execute(statement)
        for name in _FIELDS:
            self._copied[name] = dict(self._left_by_another(name))

    def refresh(self) -> None:
        """Bring the copies up to date if the node's schema has changed."""
        with self._lock:
            for _ in range(20):
                version = self._schema_version()
                if version == self._version:
                    return
                for name in _FIELDS:
                    self._copy(name)
                self._version = version
            raise RuntimeError("the schema behind the stand-in changes all the time")

    def column_type(self, keyspace: str, table: str, column: str) -> str | None:
        """Return a column's type; ``udt:`` stands before a user-defined type that is not frozen."""
        self.refresh()
        row = self._copied["columns"].get((keyspace, table, column))
        if row is None:
            return None
        kind = str(row[1 + _FIELDS["columns"][2].index("type")])
        return f"udt:{kind}" if is_user_type(kind) else kind

    def has_tablets(self, keyspace: str) -> bool:
        """Tell whether a keyspace has tablets."""
        row = self._session.execute(
            f"SELECT initial_tablets FROM {self.keyspace}.scylla_keyspaces WHERE keyspace_name = %s", (keyspace,)
        ).one()
        return row is not None and row.initial_tablets is not None

    def set_tablets(self, keyspace: str, has_tablets: bool) -> None:
        """Note whether a keyspace has tablets."""
        self._session.execute(
            f"INSERT INTO {self.keyspace}.scylla_keyspaces (keyspace_name, initial_tablets) VALUES (%s, %s)",
            (keyspace, 0 if has_tablets else None),
        )

    def comment(self, keyspace: str, table: str) -> str | None:
        """Return the comment of the real table, with its cdc options; None: there is no such table."""
        row = self._session.execute(
            "SELECT comment FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s", (keyspace, table)
        ).one()
        return None if row is None else row.comment or ""

    def cdc_options(self, keyspace: str, table: str) -> dict[str, str] | None:
        """Return a table's cdc options; None: it never had any."""
        return comment_without(self.comment(keyspace, table) or "")[1]

    def set_cdc(self, keyspace: str, table: str, options: Mapping[str, str]) -> None:
        """Give a table cdc options, and a log if it has none yet, as ALTER TABLE through the proxy does."""
        own, _ = comment_without(self.comment(keyspace, table) or "")
        text = comment_with(options, own).replace("'", "''")
        self._session.execute(f"ALTER TABLE {quoted(keyspace)}.{quoted(table)} WITH comment = '{text}'")
        self.follow(keyspace, table)

    def follow(self, keyspace: str, table: str) -> None:
        """Create the log of a table with cdc, or give an existing one the table's columns."""
        options = self.cdc_options(keyspace, table)
        if options is None:
            return
        wanted = log_columns(self._columns(keyspace, table))
        log = f"{quoted(keyspace)}.{quoted(table + LOG_SUFFIX)}"
        existing = {row.column_name: row.type for row in self._columns(keyspace, table + LOG_SUFFIX)}
        if not existing:
            if options["enabled"] == "true":
                self._session.execute(create_log(log, wanted, int(options["ttl"])))
                self._session.execute(
                    f"INSERT INTO {self.keyspace}.scylla_tables (keyspace_name, table_name, partitioner) "
                    "VALUES (%s, %s, %s)",
                    (keyspace, table + LOG_SUFFIX, PARTITIONER),
                )
            return
        for name in existing.keys() - wanted.keys():
            self._session.execute(f"ALTER TABLE {log} DROP {quoted(name)}")
        for name in wanted.keys() - existing.keys():
            self._session.execute(f"ALTER TABLE {log} ADD {quoted(name)} {wanted[name]}")

    def drop_log(self, keyspace: str, table: str) -> None:
        """Drop the log of a table that was dropped."""
        self._session.execute(f"DROP TABLE IF EXISTS {quoted(keyspace)}.{quoted(table + LOG_SUFFIX)}")
        self._session.execute(
            f"DELETE FROM {self.keyspace}.scylla_tables WHERE keyspace_name = %s AND table_name = %s",
            (keyspace, table + LOG_SUFFIX),
        )

    def create_v1(self) -> None:
        """Create the table of stream sets of ScyllaDB up to 4.3."""
        self._session.execute(V1_TABLE)

    def _columns(self, keyspace: str, table: str) -> list[Any]:
        return list(
            self._session.execute(
                "SELECT column_name, kind, type FROM system_schema.columns "
                "WHERE keyspace_name = %s AND table_name = %s",
                (keyspace, table),
            )
        )

    def _left_by_another(self, name: str) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
        """Yield the rows of a copy that an earlier stand-in made: only when they were written counts."""
        timed, key, _ = _FIELDS[name]
        for row in self._session.execute(f"SELECT {', '.join(key)}, writetime({timed}) FROM {self.keyspace}.{name}"):
            yield tuple(row[:-1]), (row[-1] or 0,)

    def _schema_version(self) -> object:
        return self._session.execute("SELECT schema_version FROM system.local").one().schema_version

    def _copy(self, name: str) -> None:
        """Bring one copy up to date. Rows keep their write times."""
        timed, key, others = _FIELDS[name]
        rows = self._session.execute(SimpleStatement(_select(name, timed, key, others), fetch_size=None))
        found = dict(self._shown(name, rows))
        copied = self._copied[name]
        names = ", ".join([*key, *others])
        values = ", ".join(
            "blobAsTimestamp(bigintAsBlob(?))" if column == "dropped_time" else "?" for column in [*key, *others]
        )
        insert = self._session.prepare(
            f"INSERT INTO {self.keyspace}.{name} ({names}) VALUES ({values}) USING TIMESTAMP ?"
        )
        where = " AND ".join(f"{column} = ?" for column in key)
        delete = self._session.prepare(f"DELETE FROM {self.keyspace}.{name} USING TIMESTAMP ? WHERE {where}")
        futures = [
            self._session.execute_async(delete, (copied[place][0], *place)) for place in copied.keys() - found.keys()
        ]
        futures += [
            self._session.execute_async(insert, (*place, *row[1:], row[0]))
            for place, row in found.items()
            if copied.get(place) != row
        ]
        for future in futures:
            future.result()
        self._copied[name] = found

    def _shown(self, name: str, rows: Iterable[Any]) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
        """Yield rows as ScyllaDB has them: key, and write time and values."""
        _, key, others = _FIELDS[name]
        for row in (row._asdict() for row in rows):
            keyspace, table = row["keyspace_name"], row.get("table_name")
            is_own = keyspace.startswith((DISTRIBUTED, SYSTEM, SCHEMA))
            if is_own:
                keyspace = SHOWN_AS.get(keyspace, "system_schema" if row["keyspace_name"] == self.keyspace else None)
                if keyspace is None or name == "keyspaces":
                    continue
            elif _is_hidden(name, keyspace, table):
                continue
            if name == "tables":
                comment, options = comment_without(row["comment"] or "")
                row = {**row, "comment": comment, "extensions": {"cdc": extension(options)} if options else None}
            place = (keyspace, *(row[column] for column in key[1:]))
            yield place, (row["written_us"] or 0, *(row[column] for column in others))


def _is_hidden(name: str, keyspace: str, table: str | None) -> bool:
    if name == "dropped_columns":
        return keyspace.startswith("system")
    return (keyspace == "system_schema" and table in MOVED_SCHEMA) or (keyspace, table) == ("system", "peers_v2")


def _select(name: str, timed: str, key: list[str], others: list[str]) -> str:
    shown = [
        "blobAsBigint(timestampAsBlob(dropped_time)) AS dropped_time" if column == "dropped_time" else column
        for column in (*key, *others)
    ]
    return f"SELECT {', '.join(shown)}, writetime({timed}) AS written_us FROM system_schema.{name}"
