"""The committed SSTables for the tests of their files: unpacked once, with the schema of the server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ringsync.formats.sstable.compression import ChunkPlaces, Chunks
from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.source import LocalSource, Source, find_local
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from tests.sstables.fixtures import FIXTURES


@dataclass(frozen=True)
class Changed:
    """The files of an SSTable, some of them replaced."""

    source: Source
    files: dict[str, bytes | None]

    @property
    def descriptor(self) -> Descriptor:
        return self.source.descriptor

    def read(self, component: str) -> bytes | None:
        return self.files[component] if component in self.files else self.source.read(component)

    def size(self, component: str) -> int | None:
        content = self.read(component)
        return None if content is None else len(content)

    def read_range(self, component: str, start: int, length: int) -> bytes:
        content = self.read(component)
        assert content is not None
        return content[start : start + length]


def places_of(chunks: Chunks) -> ChunkPlaces:
    """Where all chunks are."""
    found = []
    while (first := found[-1].end if found else 0) < chunks.count:
        found.append(chunks.places(first))
    sums = None if found[0].checksums is None else np.concatenate([one.checksums for one in found])
    return ChunkPlaces(
        0, *(np.concatenate([getattr(one, name) for one in found]) for name in ("starts", "stored")), sums
    )


_SCRATCH = tempfile.TemporaryDirectory(prefix="ringsync-sstables-")


@cache
def unpacked(name: str) -> Path:
    """Return the folder of a fixture's files, which all tests of the process share: they only read."""
    folder = Path(_SCRATCH.name) / name
    folder.mkdir()
    return FIXTURES[name].unpacked(folder)


@cache
def sources(name: str) -> tuple[LocalSource, ...]:
    """Return the SSTables of a fixture, of all tables and both snapshots."""
    found = [find_local(folder) for folder in sorted(unpacked(name).glob("*/*/snapshots/*"))]
    assert not any(one.left_out for one in found)
    return tuple(LocalSource(descriptor) for one in found for descriptor in one.sstables)


def sources_of(name: str, table: str, tag: str) -> list[LocalSource]:
    """Return the SSTables of one table (`keyspace.table`) in one snapshot."""
    return [
        source
        for source in sources(name)
        if f"{source.descriptor.keyspace}.{source.descriptor.table}" == table
        and source.descriptor.folder.endswith(f"/snapshots/{tag}")
    ]


@cache
def table_of(descriptor: Descriptor) -> TableSchema:
    """Return the table of an SSTable, from the schema.cql beside it."""
    text = (Path(descriptor.folder) / "schema.cql").read_text()
    schema = parse_schema(text, "schema.cql")
    (table,) = [table for table in schema.tables if table.table_id == descriptor.table_id]
    return table


def every_source() -> Iterator[LocalSource]:
    """Yield the SSTables of all fixtures."""
    for name in FIXTURES:
        yield from sources(name)
