"""Whose records could not be decoded, and wait in the table ``processor_error``: ``errors/waiting/<host id>.json``.

The object is put after the rows and before the commit, and removed with the last row. So whoever looks at the store
alone knows of them for as long as they are there.
"""

from __future__ import annotations

from ringsync.storage.port import ObjectStore, list_named

_WAITING = "errors/waiting/"


def note_undecodable(store: ObjectStore, node: str) -> None:
    """Record that records of a node's log wait.

    :param node: host id, or :data:`ringsync.ledger.database.CDC_LOGS`
    """
    store.put(f"{_WAITING}{node}.json", b"{}")


def forget_undecodable(store: ObjectStore, node: str) -> None:
    """Record that none waits any more."""
    store.delete(f"{_WAITING}{node}.json")


def with_undecodable(store: ObjectStore) -> list[str]:
    """List the nodes of whose logs records wait.

    :raises UnavailableError: the store cannot be used
    """
    listed = list_named(store, _WAITING, r"[^/]+\.json")
    return [stat.key.removeprefix(_WAITING).removesuffix(".json") for stat in listed]
