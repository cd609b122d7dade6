"""Detection of nodes that are read from one folder: it is one node's ``cdc_raw``, so the other logs are not read.

Every packaged Cassandra has its ``cdc_raw`` at the same path. A worker that reads several such nodes, or runs on
another node's host, finds one folder there, and nothing in it names the owner. Ids of segments do not show the owner
either: they count up from the millisecond of a node's start, so nodes that start together use the same ids.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ringsync.storage.port import ObjectStore, get_json

Sharing = dict[str, str]
"""Nodes that are read from one folder: what is wrong with each, by host id."""

_KEY = "staging/shared_folders.json"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)  # unknown: an id that no other process has


_BOOT_ID = _boot_id()
"""Id of the running kernel, which all containers of a host share: within it, device and inode name one folder."""


def folder_id(folder: Path | None) -> str | None:
    """Return an id that only this folder has: the same for every path and mount that leads to it.

    :returns: None: there is no such folder
    """
    try:
        status = folder.stat() if folder else None
    except OSError:
        return None
    return status and f"{_BOOT_ID}/{status.st_dev}/{status.st_ino}"


def sharings(nodes: Mapping[str, Mapping[str, Any]]) -> list[Sharing]:
    """Find nodes that are read from one folder.

    :param nodes: ``endpoint``, ``folder`` and ``folder_id`` of each node, by host id
    """
    of_folder: dict[str, list[str]] = defaultdict(list)
    for node, place in nodes.items():
        if folder := place.get("folder_id"):
            of_folder[folder].append(node)
    return [
        {node: same_folder([nodes[other]["endpoint"] for other in sharing], nodes[node]["folder"]) for node in sharing}
        for sharing in of_folder.values()
        if len(sharing) > 1
    ]


def shared_folders(*found: Sequence[Sharing]) -> Sharing:
    """Return what is wrong with each node that shares a folder with others."""
    return {node: reason for source in found for sharing in source for node, reason in sharing.items()}


def still_shared(before: Sequence[Sharing], nodes: Mapping[str, Mapping[str, Any]], silent: Set[str]) -> list[Sharing]:
    """Find nodes that are read from one folder, and keep what was found before as long as one of its nodes is silent.

    The worker of a silent node may still be reading it, and a restart may have given its host new ids.

    :param before: what was found before
    :param nodes: the nodes that are to be read, as in :func:`sharings`
    :param silent: nodes whose worker does not report now where it reads them
    """
    found = sharings(nodes)
    kept = [sharing for sharing in before if len(sharing.keys() & nodes.keys()) > 1 and sharing.keys() & silent]
    return found + [sharing for sharing in kept if not any(sharing.keys() <= other.keys() for other in found)]


def shared_by_queues(store: ObjectStore) -> list[Sharing]:
    """Read which nodes the workers of several queues read from one folder, as ``bucket_close`` last found."""
    return get_json(store, _KEY) or []


def put_shared_by_queues(store: ObjectStore, found: Sequence[Sharing]) -> None:
    """Replace what :func:`shared_by_queues` returns."""
    store.say(_KEY, json.dumps(found).encode())


def same_folder(endpoints: list[str], folder: str) -> str:
    """Return an error message: nodes name one folder, and what to do."""
    return (
        f"nodes {', '.join(sorted(endpoints))} name the same folder {folder}, but it belongs to only one of them: "
        "let a worker on each node's host read it (sync.queue_of_node), or give each a path of its own "
        "(cdc_raw_directory)"
    )
