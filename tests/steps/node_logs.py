"""The log of a node as the stage knows it when it begins."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ringsync.formats.commitlog.segment import SegmentError, read_segment
from ringsync.ring.ring import Host
from ringsync.steps.stage.node_log import NodeLog
from ringsync.storage.port import ObjectStore


def read_node_log(store: ObjectStore, host: Host, folder: Path | None, now_ms: int) -> NodeLog:
    log = NodeLog(host.id, host.endpoint, folder)
    log.read_progress(store, now_ms)
    return log


def finished(segment: bytes) -> str:
    """Return the index that Cassandra writes beside a segment that is finished, while no crash has changed it."""
    try:
        return f"{read_segment(segment, 'CommitLog-7-1.log').end}\nCOMPLETED"
    except SegmentError:
        return f"{len(segment)}\nCOMPLETED"


def claimed(names: Collection[str]) -> None:
    """The folder is claimed for this node alone."""
