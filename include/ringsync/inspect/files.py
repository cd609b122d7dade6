"""Files that an operator names: segments, the indexes beside them, and the content of the indexes (``inspect idx``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ringsync.formats.commitlog.index import SegmentIndex, parse_index
from ringsync.formats.commitlog.names import index_name, segment_id, segment_name
from ringsync.formats.commitlog.segment import SegmentError, read_descriptor
from ringsync.inspect.problems import Problems

_DESCRIPTOR_ROOM = 2**17
"""Bytes at a segment's beginning that hold its whole descriptor."""


class InspectError(Exception):
    """The request cannot be served; the message says why and what to do."""


def find_files(paths: Sequence[Path], pattern: str) -> list[Path]:
    """Find the segments or indexes that paths name: each file, and all of a folder by segment id.

    :param pattern: names of the files in a folder
    :raises InspectError: a path does not exist, or a folder has no such files
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob(pattern), key=lambda file: (segment_id(file.name) or 0, file.name))
            if not inside:
                raise InspectError(f"{path}: there is no {pattern} in this folder")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise InspectError(f"{path}: there is no such file")
    return files


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it has gone since it was found: whoever reads it tells that."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def index_path(segment: Path) -> Path:
    """Return the path of a segment's index."""
    return segment.with_name(index_name(segment.name))


def read_index(segment: Path) -> SegmentIndex | None:
    """Read the index beside a segment; None: there is none, or Cassandra is just rewriting it.

    :raises InspectError: the file is no index
    """
    path = index_path(segment)
    try:
        return parse_index(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InspectError(f"{path.name}: {error}") from error


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
            problems.say(f"{path.name}: is just being rewritten, so its content is not known")
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


def _segment(path: Path, problems: Problems) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            descriptor = read_descriptor(file.read(_DESCRIPTOR_ROOM), path.name)
            size = os.fstat(file.fileno()).st_size
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
        "bytes": size,
    }


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears only when it is complete.

    :raises OSError: the file cannot be written
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
