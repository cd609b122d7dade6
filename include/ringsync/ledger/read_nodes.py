"""The nodes whose logs are read, for the time when they have left the ring: no node tells of them any more then.

``staging/hosts/<host id>.json``, written when the node's folder is claimed, and while its log cannot be read after it
has left. That a node has a claim says ``staging/nodes/<host id>`` (:mod:`ringsync.steps.stage.claims`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from ringsync.ring.ring import Host
from ringsync.storage.port import ObjectStore, StorageError, get_json


@dataclass(frozen=True)
class ReadNode:
    """What is known of a node.

    :ivar vain_ms: so long it was tried in vain to read its log since it has left
    :ivar tried_ms: time of the last of these tries, ms since the epoch; 0: there was none
    """

    address: str
    port: int
    datacenter: str
    vain_ms: int = 0
    tried_ms: int = 0


def read_node(host: Host) -> ReadNode:
    """Return what is known of a node of the ring."""
    return ReadNode(host.address, host.port, host.datacenter)


def get_read_node(store: ObjectStore, node: str) -> ReadNode | None:
    """Return what is known of a node; None: nothing that can be read."""
    with suppress(StorageError, ValueError, TypeError):
        if (document := get_json(store, _key(node))) is not None:
            return ReadNode(**document)
    return None


def put_read_node(store: ObjectStore, node: str, known: ReadNode) -> None:
    """Remember a node."""
    store.put(_key(node), json.dumps(asdict(known)).encode())


def forget_read_node(store: ObjectStore, node: str) -> None:
    """Forget a node of whose log nothing more is read."""
    store.delete(_key(node))


def _key(node: str) -> str:
    return f"staging/hosts/{node}.json"
