"""``cdcservice inspect idx``: what the indexes beside segments say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import segment_name
from ringsync.formats.commitlog.segment import SegmentError, read_descriptor
from ringsync.inspect.problems import Problems

_DESCRIPTOR_ROOM = 2**17
"""Bytes in which every descriptor lies whole."""


def read_indexes(paths: Iterable[Path], problems: Problems) -> Iterator[dict[str, Any]]:
    """What each index says, and the segment beside it, as JSON values (docs/inspect.md)."""
    for path in paths:
        try:
            index = parse_index(path.read_bytes())
        except (OSError, ValueError) as error:
            problems.unreadable(f"{path.name}: {error}")
            continue
        found: dict[str, Any] = {"file": path.name}
        if index is None:
            problems.say(f"{path.name}: is just being rewritten: no news")
        else:
            found |= {"offset": index.offset, "completed": index.completed}
        yield found | {"segment": _segment(path.with_name(segment_name(path.name)), problems)}


def index_text(found: dict[str, Any]) -> str:
    """One index for people."""
    state = "being rewritten"
    if "offset" in found:
        state = "completed" if found["completed"] else f"synced up to position {found['offset']:,}"
    segment = found["segment"]
    if segment is None:
        return f"{found['file']}  {state}; its segment is gone"
    return f"{found['file']}  {state}; version {segment['version']}, {segment['codec']}, {segment['bytes']:,} bytes"


def index_line(found: dict[str, Any]) -> str:
    """One index as a line of JSON."""
    return json.dumps(found, separators=(",", ":"))


def _segment(path: Path, problems: Problems) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            descriptor = read_descriptor(file.read(_DESCRIPTOR_ROOM), path.name)
    except FileNotFoundError:
        return None
    except (OSError, SegmentError) as error:
        problems.unreadable(str(error))
        return None
    return {
        "file": path.name,
        "id": descriptor.segment_id,
        "version": descriptor.version,
        "codec": descriptor.codec,
        "bytes": path.stat().st_size,
    }
