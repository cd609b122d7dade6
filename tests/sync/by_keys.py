"""A consumer that knows only keys: deletions of partitions and ranges are expanded, also those that
came while the table was copied, and ``before`` is what it held."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from ringsync.ledger.passes import get_pass, pass_numbers
from ringsync.replica.changes import replica_state
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, data_topic

KEYSPACE = "shop"
TABLE = f"{KEYSPACE}.orders"
ROWS = f"SELECT id, seq, v FROM {TABLE}"


def modes(turn: int) -> dict[str, dict[str, Any]]:
    """Settings of the table: the row after a change is in the replica in the first turn, and read in the others."""
    return {TABLE: {"after_image": "replica" if turn == 0 else "source", "expand_deletions": True}}


def create_schema(session: Any) -> None:
    session.execute(
        f"CREATE KEYSPACE {KEYSPACE} WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': 3}}"
    )
    session.execute(f"CREATE TABLE {TABLE} (id int, seq int, v text, PRIMARY KEY (id, seq)) WITH cdc = true")


def change(session: Any, rng: random.Random) -> None:
    """Change a row, a range or a partition."""
    id_, seq = rng.randrange(8), rng.randrange(12)
    match rng.randrange(12):
        case 0:
            session.execute(f"DELETE FROM {TABLE} WHERE id = {id_}")
        case 1 | 2:
            session.execute(f"DELETE FROM {TABLE} WHERE id = {id_} AND seq >= {seq} AND seq < {seq + 4}")
        case 3:
            session.execute(f"DELETE FROM {TABLE} WHERE id = {id_} AND seq = {seq}")
        case _:
            session.execute(f"INSERT INTO {TABLE} (id, seq, v) VALUES ({id_}, {seq}, '{rng.random()}')")


REMOVED = 100
"""The partition of which :func:`remove` deletes all rows at once."""


def fill(session: Any) -> None:
    """Give a partition rows that nobody else changes."""
    for seq in range(30):
        session.execute(f"INSERT INTO {TABLE} (id, seq, v) VALUES ({REMOVED}, {seq}, 'v')")


def remove(session: Any) -> None:
    """Delete this partition."""
    session.execute(f"DELETE FROM {TABLE} WHERE id = {REMOVED}")


def held(messages: list[dict[str, Any]], *, with_before: bool) -> dict[tuple[int, int], str]:
    """What a consumer has that ignores what is not of one row; with ``before`` where it was asked for."""
    found: dict[tuple[int, int], str] = {}
    bootstrapped, known = False, 0
    for message in messages:
        key, value = (message["key"]["id"], message["key"]["seq"]), message["value"]
        if key[1] is None:
            continue
        bootstrapped |= value["op"] == "r"
        spared = value["op"] == "u" and value["source"]["query"] is None
        if value["before"] is not None and not spared:
            assert with_before or value["op"] == "d"
            assert (value["before"]["id"], value["before"]["seq"]) == key
            known += value["after"] is not None
        if value["after"] is not None:
            found[key] = value["after"]["v"]
        else:
            found.pop(key, None)
    assert bootstrapped
    assert (known > 5) == with_before
    return found


MERGED_US = 40_000_000
"""So much older than the newest may the oldest be that is merged to one change of a row."""


def messages_by_replica(store: ObjectStore, table: TableSchema) -> Iterator[tuple[bool, dict[str, Any]]]:
    """All messages in order, and whether the replica, not the source, said what the row is: not of a bootstrap, nor of
    what was written while it went on or soon after, nor late."""
    passes = [get_pass(store, table.table_id, number) for number in pass_numbers(store, table.table_id)]
    by_replica = {one.folder: one.kind == "changes" and not one.bootstrap and not one.late for one in passes}
    state = replica_state(store, table)
    assert state is not None
    since_us = state.deletions_known_from_us + MERGED_US
    stream = FileStream(store, data_topic("test", table))
    for bucket in stream.folders():
        for message in stream.read(bucket):
            yield by_replica[bucket] and (message["value"]["source"]["ts_us"] or 0) > since_us, message


def retold(messages: Iterable[tuple[bool, dict[str, Any]]]) -> int:
    """Check that ``before`` is what the message before has told, where the replica was asked both times.

    :returns: how often
    """
    told: dict[tuple[int, int], dict[str, Any] | None] = {}
    checked = 0
    for by_replica, message in messages:
        key, value = (message["key"]["id"], message["key"]["seq"]), message["value"]
        if key[1] is None:
            continue
        if by_replica and key in told:
            assert value["before"] == told[key], (message, told[key])
            checked += 1
        told.pop(key, None)
        spared = value["op"] == "u" and value["source"]["query"] is None
        if by_replica and not spared:  # it is as the source has it, which may be ahead
            told[key] = value["after"]
    return checked
