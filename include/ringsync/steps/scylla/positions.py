"""How far the CDC logs were read when the last run ended: the newest commit says it."""

from __future__ import annotations

from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.staging import commit_keys, get_commit
from ringsync.scylla.progress import Position
from ringsync.storage.port import ObjectStore, get_json

_BEGINS = "cdc_log_begins/"


def read_positions(store: ObjectStore) -> tuple[int, dict[str, Position]]:
    """Return the number of the newest commit, 0: there is none, and the position of each table by its id.

    :raises ChecksumError: the commit is damaged
    """
    keys = commit_keys(store, CDC_LOGS)
    if not keys:
        return 0, {}
    commit = get_commit(store, keys[-1])
    return commit.number, {table_id: Position.of(one) for table_id, one in commit.positions.items()}


def note_log_begins(store: ObjectStore, table_id: str, at_ms: int) -> None:
    """Record from which write time on a table's log is to be read, whenever that begins. What was recorded first stays.

    :param at_ms: ms since the epoch
    """
    key = f"{_BEGINS}{table_id}.json"
    if store.stat(key) is None:
        store.put(key, f'{{"at_ms": {at_ms}}}'.encode())


def log_begins_ms(store: ObjectStore, table_id: str) -> int | None:
    """Return what :func:`note_log_begins` has recorded, ms since the epoch; None: nothing."""
    noted = get_json(store, f"{_BEGINS}{table_id}.json")
    return int(noted["at_ms"]) if noted else None
