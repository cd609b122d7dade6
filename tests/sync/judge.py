"""The oracle (docs/architecture.md): replica and stream against what SELECT gives at ALL, once all is quiet.

The stream is judged as both kinds of consumers see it: who keeps what was written last, and, where messages hold the
whole row, who takes the newest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from cassandra.protocol import _ProtocolHandler

from ringsync.cluster.schema import read_table
from ringsync.config.sync import Sync
from ringsync.cql.types import ListType
from ringsync.replica.folders import base_folder, changes_folder
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic
from servers.cassandra import CassandraNode
from tests.changes.query_replay import replay_queries
from tests.newest_model import NewestModel, newest_differences
from tests.oracle import Rows, differences, source_rows, synced_rows
from tests.stream_model import StreamModel, of_the_last_table
from tests.sync.scenario import NOT_FOLLOWED


def judge(
    store: ObjectStore,
    session: Any,
    tables: Sequence[str],
    bootstrapped: Collection[str],
    sync: Sync,
    not_followed: Collection[str] = NOT_FOLLOWED,
    slack_s: int = 0,
) -> dict[str, int]:
    """Compare everything.

    :param session: reads at ALL
    :param tables: whose whole stream there is
    :param bootstrapped: those that have a replica
    :param sync: says of which tables the messages hold the whole row
    :param not_followed: tables of which there may be no message
    :param slack_s: so much may expiries differ, s
    :returns: rows of each table
    """
    found: dict[str, int] = {}
    wrong: list[str] = []
    for name in tables:
        table = read_table(session, *name.split("."))
        now = int(time.time())
        source, complete = source_rows(session, table, now), sync.after_image_of(name) != "none"
        found[name] = len(source)
        messages = of_the_last_table(stream_messages(store, table))
        wrong += [
            f"stream of {name}: the last messages are of table id {one}"
            for one in {message["value"]["source"]["table_id"] for message in messages} - {table.table_id}
        ]
        modelled = _comparable(StreamModel(table, complete).apply_all(messages).rows(now), source, table)
        told = [source, modelled]
        if name in bootstrapped and not complete:  # no message tells which entries the scan has read
            told = [_without_lists(rows, table) for rows in told]
        wrong += [f"stream of {name}: {one}" for one in differences(*told, slack_s)]
        if complete:
            newest = NewestModel(table).apply_all(messages).rows(now)
            wrong += [f"newest of {name}: {one}" for one in newest_differences(source, newest)]
        ids = Counter(message["value"]["source"]["event_id"] for message in messages if message["value"]["op"] != "r")
        wrong += [f"stream of {name}: event {event} comes {count} times" for event, count in ids.items() if count > 1]
        if name in bootstrapped:
            uris = [store.uri(folder(table.keyspace, table.name)) for folder in (base_folder, changes_folder)]
            replica = synced_rows(*uris, table, now)
            wrong += [f"replica of {name}: {one}" for one in differences(source, replica, slack_s)]
    for name in not_followed:
        topic = data_topic("test", read_table(session, *name.split(".")))
        wrong += [f"a message in {topic}/{bucket}" for bucket in FileStream(store, topic).folders()]
    assert not wrong, (len(wrong), wrong[:8])
    return found


def judge_queries(store: ObjectStore, session: Any, empty: CassandraNode, tables: Sequence[str]) -> int:
    """Run ``source.query`` of the streams on empty tables, and compare these with the source.

    Left out is what CQL cannot say: counters, and columns of lists, whose entries have no names.

    :param session: reads the source at ALL
    :param empty: a node with the schema and no rows
    :returns: statements
    """
    done = 0
    wrong: list[str] = []
    cluster = empty.cluster()
    try:
        other = cluster.connect()
        for name in tables:
            table = read_table(session, *name.split("."))
            if any(column.is_counter for column in table.columns):
                continue
            found = [message["value"]["source"]["query"] for message in stream_messages(store, table)]
            done += replay_queries(other, found)
            other.client_protocol_handler = _ProtocolHandler
            now = int(time.time())
            rows = [_without_lists(source_rows(one, table, now), table) for one in (session, other)]
            wrong += [f"queries of {name}: {one}" for one in differences(*rows)]
    finally:
        cluster.shutdown()
    assert not wrong, (len(wrong), wrong[:8])
    return done


def _without_lists(rows: Rows, table: TableSchema) -> Rows:
    """The rows without columns of lists, and without rows of nothing else: maybe they are there only for these."""
    lists = {column.name for column in table.columns if column.is_multicell and isinstance(column.type, ListType)}
    if not lists:
        return rows
    found = {key: {name: cell for name, cell in cells.items() if name not in lists} for key, cells in rows.items()}
    return {key: cells for key, cells in found.items() if cells}


def stream_messages(store: ObjectStore, table: TableSchema) -> list[dict[str, Any]]:
    """All messages of a table's stream, in its order."""
    stream = FileStream(store, data_topic("test", table))
    return [message for bucket in stream.folders() for message in stream.read(bucket)]


def _comparable(rows: Rows, source: Rows, table: TableSchema) -> Rows:
    """Counters have no writetime in messages that mean something to others: values are compared."""
    if not any(column.is_counter for column in table.columns):
        return rows
    return {
        key: {name: (cell[0], *source.get(key, {}).get(name, cell)[1:]) for name, cell in cells.items()}
        for key, cells in rows.items()
    }
