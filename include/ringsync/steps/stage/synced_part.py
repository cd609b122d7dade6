"""What of a segment in ``cdc_raw`` is synced and not staged yet, by its index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import index_name
from ringsync.steps.stage.stage_task import StageWork

COMPLETE = 2**62
"""In place of the last synced position: the segment is complete, and is read to its end."""


@dataclass(frozen=True)
class SyncedPart:
    """A part of a segment that can be read.

    :ivar end: last synced position, or COMPLETE
    :ivar size: about how many bytes it has
    """

    work: StageWork
    end: int
    size: int


def synced_part(file: Path, node: str, start: int, commit: int, reached: int) -> SyncedPart | None:
    """Return what of a segment is synced behind a position; None: nothing.

    :param commit: number of the node's commit that is to list the result
    :param reached: position that the segment reached by earlier indexes
    :raises OSError: index or segment cannot be read, or the index is there without its segment
    :raises ValueError: the index cannot be parsed
    """
    index = file.with_name(index_name(file.name))
    try:
        content = index.read_bytes()
    except FileNotFoundError:
        return None  # no table with cdc has synced anything in it
    try:
        synced, size = parse_index(content), file.stat().st_size
    except FileNotFoundError:
        raise OSError(f"{index} is there without its segment: who has removed {file.name}?") from None
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from None
    if synced is None or not (synced.completed or synced.offset > start):
        return None
    left = max(0, (size if synced.completed else synced.offset) - start)
    work = StageWork(node, str(file), replace(synced.wanted, after=start, reached=reached), commit)
    return SyncedPart(work, COMPLETE if synced.completed else synced.offset, left)
