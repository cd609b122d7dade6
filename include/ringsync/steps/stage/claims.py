"""Whose folder of segments is it? Two nodes cannot share one: if two are read from one folder, one log is not read.

Every packaged Cassandra has its ``cdc_raw`` at the same path. A worker that reads several such nodes, or runs on
another node's host, finds one folder there, and nothing of Cassandra's in it names the owner. Ids of segments do not
tell either: they count up from the millisecond of a node's start, so those of nodes that started together meet.

So each node that is read has a claim in its folder: a small file with the node's id in its name. Nothing is read from a
folder with claims of two nodes, by whatever queue, host or path it is reached, and whoever is silent. A claim holds a
token. ``staging/nodes/<host id>`` has the token of the node's newest claim: another folder's claim of it is old, and is
removed. Cassandra leaves alone what is not named like a segment (C: CommitLogSegmentManagerCDC).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ringsync.storage.port import ObjectStore

_PREFIX = "ringsync-claim."


@dataclass(frozen=True)
class Place:
    """Where a node's log is read.

    :ivar folder: path of its ``cdc_raw``; None: unknown, or it captures nothing
    :ivar token: token of the node's claim in this folder; None: there is none
    """

    folder: str | None
    token: str | None = None


def get_place(store: ObjectStore, node: str) -> Place:
    """Return where a node's log was read last."""
    if store.stat(key := f"staging/nodes/{node}") is None:
        return Place(None)
    data = store.get(key).decode()
    return Place(**json.loads(data)) if data.startswith("{") else Place(data)  # versions before had the path alone


def put_place(store: ObjectStore, node: str, place: Place) -> None:
    """Remember where a node's log is read."""
    store.put(f"staging/nodes/{node}", json.dumps(asdict(place)).encode())


def claim(store: ObjectStore, node: str, folder: Path) -> None:
    """Make sure that a node's newest claim is in this folder.

    :raises OSError: the folder is not there, or this process may not write in it
    """
    file, known = folder / f"{_PREFIX}{node}", get_place(store, node)
    if known.token and known.folder == str(folder) and file.exists() and file.read_text() == known.token:
        return
    token = secrets.token_hex(8)
    file.write_text(token)
    put_place(store, node, Place(str(folder), token))


def is_claimed(names: Iterable[str], node: str) -> bool:
    """Tell whether a node has a claim among the files of a folder."""
    return f"{_PREFIX}{node}" in names


def other_claims(
    store: ObjectStore, folder: Path, names: Iterable[str], node: str, endpoints: Mapping[str, str]
) -> str | None:
    """Say which other nodes claim a folder, and remove their old claims.

    :param names: names of the folder's files
    :param endpoints: addresses of all nodes that are to be read, by host id
    """
    sharing = {node}
    for other in endpoints.keys() - sharing:
        if not is_claimed(names, other):
            continue
        file, place = folder / f"{_PREFIX}{other}", get_place(store, other)
        if place.token in (None, file.read_text()):
            sharing.add(other)
        else:
            with suppress(OSError):  # what cannot be removed is old all the same
                file.unlink()
    if len(sharing) == 1:
        return None
    nodes = ", ".join(sorted(endpoints[sharer] for sharer in sharing))
    return (
        f"nodes {nodes} claim the same folder {folder}, which can be of one of them only: have each read on its own "
        "host (sync.queue_of_node), or under a path of its own (cdc_raw_directory); of a node that is not read any "
        f"more remove {_PREFIX}<host id> there"
    )
