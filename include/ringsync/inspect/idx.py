"""Contents of the indexes beside segments: ``cdcservice inspect idx``."""

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
"""Bytes at a segment's beginning that hold its whole descriptor."""


def read_indexes(paths: Iterable[Path], problems: Problems) -> Iterator[dict[str, Any]]:
    """Read each index and the segment beside it, as JSON values (docs/inspect.md)."""
    for path in paths:
        try:
            index = parse_index(path.read_bytes())
        except (OSError, ValueError) as error:
            problems.unreadable(f"{path.name}: {error}")
            continue
        values: dict[str, Any] = {"file": path.name}
        if index is None:
            problems.say(f"{path.name}: is just being rewritten: no news")
        else:
            values |= {"offset": index.offset, "completed": index.completed}
        yield values | {"segment": _segment(path.with_name(segment_name(path.name)), problems)}


def index_text(index: dict[str, Any]) -> str:
    """Format an index for people."""
    state = "being rewritten"
    if "offset" in index:
        state = "completed" if index["completed"] else f"synced up to position {index['offset']:,}"
    segment = index["segment"]
    if segment is None:
        return f"{index['file']}  {state}; its segment is gone"
    return f"{index['file']}  {state}; version {segment['version']}, {segment['codec']}, {segment['bytes']:,} bytes"


def index_line(index: dict[str, Any]) -> str:
    """Format an index as a line of JSON."""
    return json.dumps(index, separators=(",", ":"))


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
