"""Whose folder of segments is it? Two nodes cannot share one: if two are read from one folder, one log is not read.

Every packaged Cassandra has its ``cdc_raw`` at the same path. A worker that reads several such nodes, or runs on
another node's host, finds one folder there, and nothing in it names the owner. Ids of segments do not tell either: they
count up from the millisecond of a node's start, so those of nodes that started together meet.
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
        return secrets.token_hex(16)  # unknown, so unlike any other process's


_BOOT_ID = _boot_id()
"""Id of the running kernel, which all containers of a host share: it gives out the numbers of device and inode."""


def folder_id(folder: Path | None) -> str | None:
    """Return an id that tells a folder from all others, by whatever path or mount it is reached.

    :returns: None: there is no such folder
    """
    try:
        status = folder.stat() if folder else None
    except OSError:
        return None
    return status and f"{_BOOT_ID}/{status.st_dev}/{status.st_ino}"


def shared_folders(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Find nodes that are read from one folder.

    :param nodes: ``endpoint``, ``folder`` and ``folder_id`` of each node, by host id
    :returns: what is wrong with each of these nodes, by host id
    """
    of_folder: dict[str, list[str]] = defaultdict(list)
    for node, place in nodes.items():
        if folder := place.get("folder_id"):
            of_folder[folder].append(node)
    return {
        node: same_folder([nodes[sharer]["endpoint"] for sharer in sharing], nodes[node]["folder"])
        for sharing in of_folder.values()
        if len(sharing) > 1
        for node in sharing
    }


def shared_with_others(store: ObjectStore, now_s: float) -> dict[str, str]:
    """Read which nodes the workers of several queues read from one folder, as ``bucket_close`` has found out.

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
