"""The Spark data source ``cassandra_sstable``: the rows of a table from its SSTables, merged.

::

    from ringsync.sources.cassandra_sstable import CassandraSSTable

    spark.dataSource.register(CassandraSSTable)
    rows = (
        spark.read.format("cassandra_sstable")
        .option("table", "shop.orders")
        .load("/mnt/node1/shop,/mnt/node2/shop,/mnt/node3/shop")
    )

============  ========================================================================================
option
============  ========================================================================================
``path``      argument of ``load``: a snapshot, a folder of snapshots, or a ``…-Data.db``, local or
              ``gs://…``; several are separated by commas. All replicas that are named are merged: name
              those of as many nodes as the consistency level that you want asks for
``table``     ``keyspace.table``; not needed if the paths have one table only
``schema``    path of a schema.cql that has the table; default: the ``schema.cql`` of a snapshot; without
              one the SSTables themselves, which do not say what the columns of the key are called
``config``    path of the configuration file, for ``gs://`` paths: it says how to reach the store
``columns``   ``name, …``: only these static and regular columns, for ``rows=changes``; others are skipped
              while reading. (Images need all: a row may live by a column that is left out)
``rows``      ``images`` (default): row images (:mod:`ringsync.images.schema`), each row once, with its
              deletions and expired cells; ``changes``: merged change rows; ``values``: the columns of the
              rows that a SELECT shows now, without times
``damage``    ``fail`` (default) if a part of an SSTable cannot be read; ``skip``: leave it out
``memory``    MiB for the batches of a task, default 256
``splits``    number of tasks at least, default 1; large tables have more
============  ========================================================================================

The driver reads the indexes once. The files must be at the same paths on every executor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.cql.identifiers import parse_table_name
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.names import Descriptor
from ringsync.formats.sstable.source import LocalSource, Source
from ringsync.formats.sstable.sstables import MEMORY_BYTES
from ringsync.images.from_streams import images_of_part
from ringsync.images.schema import row_image_schema
from ringsync.images.values import shown_values, values_schema
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from ringsync.sources import sstable_files as files
from ringsync.sources.options import OptionError, checked, for_spark, schema_for_spark
from ringsync.storage import open_store
from ringsync.storage.port import ObjectStore

if TYPE_CHECKING:
    from ringsync.config import Config

OPTIONS = ("path", "table", "schema", "config", "columns", "rows", "damage", "memory", "splits")
CHOICES = {"rows": ("images", "changes", "values"), "damage": ("fail", "skip")}
MIB = 2**20


class DamagedSSTableError(ValueError):
    """A part of an SSTable cannot be read; the message says where and why."""


@dataclass(frozen=True)
class SSTableOptions:
    """The options of the data source; see the module."""

    paths: tuple[str, ...]
    table: tuple[str, str] | None
    schema: str | None
    config: Config | None
    columns: tuple[str, ...] | None
    rows: str
    skip_damage: bool
    memory_bytes: int
    splits: int

    def store(self, bucket: str) -> ObjectStore:
        """Open the store of a bucket. The configuration says how to reach it."""
        settings = dict(self.config.store) if self.config else {}
        return open_store(**{**settings, "url": bucket})

    def open_source(self, url: str, descriptor: Descriptor) -> Source:
        """Return the files of an SSTable at a local path (the URL is empty) or in a store."""
        return files.StoredSource(descriptor, self.store(url)) if url else LocalSource(descriptor)


@dataclass(frozen=True)
class FoundTable:
    """The table that is read.

    :ivar shown: the table with those columns only that are read
    :ivar sstables: URL of the store (empty: a local path) and SSTable
    """

    table: TableSchema
    shown: TableSchema
    sstables: tuple[tuple[str, Descriptor], ...]


class CassandraSSTable(DataSource):  # type: ignore[misc]
    """The SSTables of a table as a Spark DataFrame; see the module for its options."""

    @classmethod
    def name(cls) -> str:
        return "cassandra_sstable"

    def schema(self) -> StructType:
        shown = self._found.shown
        match self._chosen.rows:
            case "images":
                schema = row_image_schema(shown)
            case "values":
                schema = values_schema(shown)
            case _:
                schema = CHANGE_ROWS
        return from_arrow_schema(schema_for_spark(schema))

    def reader(self, schema: StructType) -> SSTableReader:
        return SSTableReader(self._chosen, self._found, int(time.time()))

    @cached_property
    def _chosen(self) -> SSTableOptions:
        from ringsync.config import load_config

        options = checked("cassandra_sstable", self.options, OPTIONS, CHOICES)
        if "path" not in options:
            raise OptionError("cassandra_sstable needs the SSTables: .load('/path/of/snapshots/tag')")
        columns = options.get("columns")
        if columns is not None and options.get("rows") != "changes":
            raise OptionError(
                "option columns of cassandra_sstable goes with rows=changes only: images need all columns"
            )
        return SSTableOptions(
            tuple(_listed(options["path"])),
            parse_table_name(options["table"]) if "table" in options else None,
            options.get("schema"),
            load_config(options["config"]) if "config" in options else None,
            None if columns is None else tuple(_listed(columns)),
            options.get("rows", "images"),
            options.get("damage") == "skip",
            _number(options, "memory", MEMORY_BYTES // MIB) * MIB,
            _number(options, "splits", 1),
        )

    @cached_property
    def _found(self) -> FoundTable:
        """The table and its SSTables. They are looked up once: Spark's columns and the rows must have one schema."""
        options = self._chosen
        found = files.together(_find(options, path) for path in options.paths)
        for one in found.left_out:
            if one.is_lost and not options.skip_damage:
                raise DamagedSSTableError(
                    f"{one.path} cannot be read: {one.reason}; say damage=skip to go on without it"
                )
            print(f"ringsync: {one.path} is left out: {one.reason}", flush=True)
        schema = options.schema and parse_schema(Path(options.schema).read_text(encoding="utf-8"), options.schema)
        table, sources = files.choose_table(found, options.table, schema or None)
        shown = table if options.columns is None else table.only(options.columns)
        places = tuple((files.url_of(source), source.descriptor) for source in sources)
        return FoundTable(table, shown, places)


def _find(options: SSTableOptions, path: str) -> files.SSTableFiles:
    if not path.startswith("gs://"):
        return files.files_in_folder(Path(path))
    bucket, _, prefix = path.removeprefix("gs://").partition("/")
    return files.files_in_store(options.store(f"gs://{bucket}"), prefix)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(options: dict[str, str], name: str, default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise OptionError(f"option {name} of cassandra_sstable is a number from 1 on, not {value!r}")
    return int(value)


@dataclass
class SplitPartition(InputPartition):  # type: ignore[misc]
    """The input of one task."""

    split: files.SSTableSplit


@dataclass
class SSTableReader(DataSourceReader):  # type: ignore[misc]
    """A reader that merges each token range in its own task.

    :ivar now_s: the moment at which cells have expired, for ``rows=values``: s since the epoch
    """

    options: SSTableOptions
    found: FoundTable
    now_s: int

    def partitions(self) -> list[SplitPartition]:
        sources = [self.options.open_source(url, descriptor) for url, descriptor in self.found.sstables]
        opener = files.Opener(self.found.table)
        sstables = [opener.open(source) for source in sources]
        return [SplitPartition(split) for split in files.split_tables(sstables, self.options.splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without SSTables Spark invents a partition.
        if not isinstance(partition, SplitPartition):
            return
        options = self.options
        lose = _tell if options.skip_damage else _refuse
        shown = self.found.shown
        opener = files.Opener(self.found.table, shown)
        parts = files.merged_split(
            partition.split,
            lambda url, descriptor: opener.open(options.open_source(url, descriptor)),
            shown,
            lose,
            memory_bytes=options.memory_bytes,
            with_source=options.rows == "changes",
        )
        batches: Iterator[pa.RecordBatch]
        match options.rows:
            case "images":
                batches = (images_of_part(part, shown, "raw") for part in parts)
            case "values":
                batches = shown_values(parts, shown, self.now_s)
            case _:
                batches = (part.rows.to_arrow() for part in parts)
        yield from map(for_spark, batches)


def _tell(loss: Loss) -> None:
    print(f"ringsync: {loss.file}, {loss.length} bytes at {loss.position} are left out: {loss.reason}", flush=True)


def _refuse(loss: Loss) -> None:
    raise DamagedSSTableError(
        f"{loss.file}, {loss.length} bytes at {loss.position}: {loss.reason}; say damage=skip to read the rest, or "
        "name the SSTables of other replicas"
    )
