"""Whose folder of segments is it: two nodes cannot have one, so of two that are read from one the other's log is not.

Every packaged Cassandra has its ``cdc_raw`` at the same path. A worker that is to read several such nodes, or that runs
on another node's host, finds one folder there, and nothing in it says whose it is. Ids of segments do not tell either:
they count up from the millisecond at which a node started, and those of nodes that started together meet.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringsync.status import STALE_AFTER_S, age_s, read_status
from ringsync.storage.port import ObjectStore


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)  # unknown: equal to that of no other process


_BOOT_ID = _boot_id()
"""Of the running kernel, that of all containers of a host, too: device and inode are its numbers."""


def folder_id(folder: Path | None) -> str | None:
    """Return what tells a folder from all others, by whatever path or mount it is reached.

    :returns: None: there is no such folder
    """
    try:
        found = folder.stat() if folder else None
    except OSError:
        return None
    return found and f"{_BOOT_ID}/{found.st_dev}/{found.st_ino}"


def shared_folders(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Find nodes that are read from one folder.

    :param nodes: ``endpoint``, ``folder`` and ``folder_id`` of each node, by host id
    :returns: what is wrong with each of them, by host id
    """
    of_folder: dict[str, list[str]] = defaultdict(list)
    for node, one in nodes.items():
        if found := one.get("folder_id"):
            of_folder[found].append(node)
    return {
        node: same_folder([nodes[one]["endpoint"] for one in sharing], nodes[node]["folder"])
        for sharing in of_folder.values()
        if len(sharing) > 1
        for node in sharing
    }


def shared_with_others(store: ObjectStore, now_s: float) -> dict[str, str]:
    """Read which nodes the workers of several queues read from one folder: ``bucket_close`` sees what all of them say.

    :param now_s: seconds since the epoch
    :returns: as :func:`shared_folders`
    """
    status = read_status(store, "bucket_close/close")
    if status is None or age_s(status, now_s) > STALE_AFTER_S:
        return {}
    return dict(status.get("shared_folders", {}))


def same_folder(endpoints: list[str], folder: str) -> str:
    """Say that nodes name one folder, and what to do."""
    return (
        f"nodes {', '.join(sorted(endpoints))} name the same folder {folder}, which can be of one of them only: "
        "have each read on its own host (sync.queue_of_node), or under a path of its own (cdc_raw_directory)"
    )
