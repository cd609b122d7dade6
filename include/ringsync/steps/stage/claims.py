"""Whose folder of segments is it? Two nodes cannot share one: if two are read from one folder, one log is not read.

Every packaged Cassandra has its ``cdc_raw`` at the same path. A worker that reads several such nodes, or runs on
another node's host, finds one folder there, and nothing of Cassandra's in it names the owner. Ids of segments do not
tell either: they count up from the millisecond of a node's start, so those of nodes that started together meet.

So each node that is read has a claim in its folder: a small file with the node's id in its name. A folder with claims
of two nodes is not read, no matter through which queue, host or path, and whether the other's worker runs. A claim
holds a token, and ``staging/nodes/<host id>`` has the token of the node's newest claim. A claim with another token is
left from an earlier folder of its node, and is removed. Cassandra ignores files that are not named like a segment
(C: CommitLogSegmentManagerCDC).

Two workers may read each other's node, each with one claim in its folder. Then most rows of a log are of token ranges
that its node does not replicate (:func:`not_its_own`).

Nor can two stores share a node: what one has read, it removes. And a store that was not mounted looks like a new one.
So a claim of which the store knows nothing is another store's, and stays.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ringsync.formats.commitlog.names import is_segment
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore, StorageError, list_named

_PREFIX = "ringsync-claim."
_PLACES = "staging/nodes/"

MANY_FOREIGN_ROWS = 100
"""With fewer rows of other nodes' token ranges nothing is said of a folder."""


class ForeignClaimError(Exception):
    """The log of a node is read into another object store."""


@dataclass(frozen=True)
class Place:
    """Where a node's log is read.

    :ivar folder: path of its ``cdc_raw``; None: it captures nothing
    :ivar token: token of the node's newest claim; None: it has none
    """

    folder: str | None
    token: str | None = None


def get_place(store: ObjectStore, node: str) -> Place | None:
    """Return where a node's log was read last; None: unknown.

    :raises ChecksumError: that is damaged
    """
    key = f"{_PLACES}{node}"
    try:
        document = json.loads(store.get(key))
        return Place(document["folder"], document.get("token"))
    except NotFoundError:
        return None
    except (ChecksumError, ValueError, KeyError, TypeError) as error:
        raise ChecksumError(
            f"{store.uri(key)}, where the node's log is, cannot be read ({type(error).__name__}): restore it; if the "
            "node is in the ring, it can be removed, too"
        ) from error


def put_place(store: ObjectStore, node: str, place: Place) -> None:
    """Remember where a node's log is read."""
    store.put(f"{_PLACES}{node}", json.dumps(asdict(place)).encode())


def known_nodes(store: ObjectStore) -> list[str]:
    """Return the ids of all nodes that have or had a claim."""
    return [stat.key.removeprefix(_PLACES) for stat in list_named(store, _PLACES, r"[^/. ]+")]


def is_claimed(store: ObjectStore, node: str) -> bool:
    """Tell whether a node has a claim somewhere: its log was read, and may not be read to its end yet. It may have one
    if that cannot be read."""
    try:
        place = get_place(store, node)
    except StorageError:
        return True
    return place is not None and bool(place.folder and place.token)


def claim(store: ObjectStore, node: str, folder: Path, *, anew: bool) -> str:
    """Make sure that a node's newest claim is in this folder, and return its token; empty: it is not.

    A folder without segments gets no claim: maybe it is not mounted yet. The token of a claim that is there stays,
    also if the folder has another path now. A new token is stored before its file is written: a kill in between leaves
    a node without a claim, and no other node with an old one that is valid.

    :param anew: whether to make a claim if there is none
    :raises OSError: the folder is not there, or this process may not write in it
    :raises ForeignClaimError: the claim that is there is another store's
    """
    names, place = os.listdir(folder), get_place(store, node)
    known, file = place or Place(None), folder / f"{_PREFIX}{node}"
    written = file.read_text() if file.name in names else ""  # empty also if a kill or a full disk cut it off
    if written and place is None:
        raise ForeignClaimError(
            f"{file} was made for another object store than {store.url}: is the store mounted, and store.url right? If "
            "the other store is given up, remove this file"
        )
    if not (anew and any(map(is_segment, names))) and (not written or written != known.token):
        return ""
    token = written or secrets.token_hex(8)
    if known != Place(str(folder), token):
        put_place(store, node, Place(str(folder), token))
    if not written:
        file.write_text(token)
    return token


def may_be_first(folder: str | None, known: Place | None) -> bool:
    """Tell whether a node that does not answer has no claim in this folder yet, and so may get one. If it had one that
    is gone, the folder may be another node's by now: only the node can tell."""
    if known is None or folder is None:
        return known is None
    return known.folder is not None and Path(known.folder) != Path(folder)


def release(store: ObjectStore, node: str, place: Place) -> None:
    """Give up the claim of a node of whose log nothing more is read: it captures nothing, or has left the ring."""
    if place.folder and place.token:
        with suppress(OSError):  # without its token in the store it is old all the same
            (Path(place.folder) / f"{_PREFIX}{node}").unlink()
    put_place(store, node, Place(None))


def has_claim(folder: Path, node: str, token: str) -> bool:
    """Tell whether a node's claim with this token is in a folder.

    :raises OSError: the folder cannot be read
    """
    file = folder / f"{_PREFIX}{node}"
    return bool(token) and file.exists() and file.read_text() == token


def claimants(folder: Path) -> list[str]:
    """Return the ids of the nodes that have claims in a folder, valid or not.

    :raises OSError: the folder cannot be listed
    """
    return [name.removeprefix(_PREFIX) for name in os.listdir(folder) if name.startswith(_PREFIX)]


def other_claims(
    store: ObjectStore, folder: Path, names: Collection[str], node: str, endpoints: Mapping[str, str]
) -> str | None:
    """Return why a folder is not read: which other nodes claim it. Remove old claims of other nodes.

    :param names: names of the folder's files
    :param endpoints: addresses of all nodes that are to be read, by host id
    """
    sharing = {node}
    for other in endpoints.keys() - sharing:
        file = folder / f"{_PREFIX}{other}"
        if file.name not in names:
            continue
        place = get_place(store, other)
        if place is None or file.read_text() in ("", place.token):  # empty: it is being written
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


def not_its_own(folder: Path | None, counts: Mapping[str, int]) -> str | None:
    """Tell why a folder is probably another node's. After a move of token ranges a log has some rows of ranges that its
    node does not replicate any more; half of all is no such move. With as many nodes as replicas nothing shows.

    :param counts: rows that were staged, by outcome
    """
    foreign, staged = counts.get("foreign", 0), counts.get("staged", 0)
    if foreign < MANY_FOREIGN_ROWS or 2 * foreign < staged:
        return None
    return (
        f"{foreign:,} of {staged:,} rows in {folder} are of token ranges that this node does not replicate: is it "
        "another node's folder? Check which host's worker has the queue of each node (sync.queue_of_node)"
    )
