"""The reader of commit log segments: it finds them, divides them into parts and reads these."""

from __future__ import annotations

import itertools
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import logged_tables
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.changes.typed import typed_rows, typed_schema
from ringsync.cql.cells import cells_of_values, raw_values
from ringsync.cql.identifiers import parse_table_name, printable
from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.names import LogPosition, index_name, is_segment, parse_position, segment_id
from ringsync.formats.commitlog.reader import UNDECODED, SegmentChanges, read_log
from ringsync.formats.commitlog.segment import WHOLE, Wanted
from ringsync.formats.keystores.lookup import keys_in
from ringsync.formats.rows.state import REASONS, UNKNOWN_TABLE
from ringsync.schema.system_tables import system_tables
from ringsync.schema.table import Schema, SchemaError, TableSchema
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings

if TYPE_CHECKING:
    from ringsync.config import Config

PART_BYTES = 8 * 2**20
"""Bytes of a segment that a task reads, about."""

PROBLEMS = pa.schema([pa.field("file", pa.string()), *UNDECODED])
"""Schema of problems: ``length`` unreadable bytes at (for a record: before) the logical ``position``, and the reason. A
record that the schema does not explain also has the mutation, and the table id if the table is unknown."""


class DamagedLogError(ValueError):
    """A part of a segment cannot be read, or a record cannot be decoded; the message says where and why."""


@dataclass(frozen=True)
class LogOptions:
    """The options of the data source; see :mod:`ringsync.sources.cassandra_commitlog`.

    :ivar typed: whether the rows, of the only table, have typed columns
    """

    paths: tuple[str, ...]
    schema: str | None = None
    config: Config | None = None
    tables: tuple[tuple[str, str], ...] = ()
    typed: bool = False
    keystore: str | None = None
    after: LogPosition | None = None
    to: LogPosition | None = None
    obey_index: bool = True
    skip_damage: bool = False
    rows: str = "changes"


@dataclass(frozen=True)
class SegmentPart:
    """A segment, or some of its sections.

    :ivar to: logical position after which no record is read
    """

    file: str
    wanted: Wanted = WHOLE
    to: int | None = None


def log_options(options: Mapping[str, str]) -> LogOptions:
    """Parse the options.

    :raises ValueError: a position or table name is not valid
    """
    from ringsync.config import load_config

    named = options.get("table", options.get("tables", ""))
    names = [named] if "table" in options else [name.strip() for name in named.split(",") if name.strip()]
    return LogOptions(
        paths=tuple(path.strip() for path in options["path"].split(",") if path.strip()),
        schema=options.get("schema"),
        config=load_config(options["config"]) if "config" in options else None,
        tables=tuple(parse_table_name(name) for name in names),
        typed="table" in options,
        keystore=options.get("keystore"),
        after=_position(options.get("from"), "from"),
        to=_position(options.get("to"), "to"),
        obey_index=options.get("index", "obey") == "obey",
        skip_damage=options.get("damage") == "skip",
        rows=options.get("rows", "changes"),
    )


def _position(text: str | None, option: str) -> LogPosition | None:
    if text is None:
        return None
    try:
        position = parse_position(text)
    except ValueError as error:
        raise ValueError(f"option {option}: {error}") from None
    if isinstance(position, int):
        raise ValueError(f"option {option}: {text!r} does not name the segment: write SEGMENT_ID:POSITION")
    return position


@dataclass(frozen=True)
class _Found:
    """A segment file.

    :ivar file: path, or ``gs://…``
    :ivar size: bytes
    :ivar index: content of the ``_cdc.idx``; None: the segment has none
    """

    file: str
    size: int
    index: bytes | None

    @property
    def segment_id(self) -> int:
        number = segment_id(_name_of(self.file))
        if number is None:
            raise ValueError(f"{self.file} is not named like a commit log segment (CommitLog-7-1700000000000.log)")
        return number


def find_parts(options: LogOptions) -> list[SegmentPart]:
    """Find the segments at the paths, in the order of their ids, and divide large ones into parts.

    In a folder, a segment without ``_cdc.idx`` has no change of a table with cdc. It is left out unless indexes are
    ignored.

    :raises FileNotFoundError: a path does not exist, or a folder has no segment
    :raises ValueError: a file is not named like a segment, or an index is not valid
    """
    segments: dict[str, _Found] = {}
    for path in options.paths:
        in_path = _in_store(path, options) if path.startswith("gs://") else _in_files(Path(path), options.obey_index)
        segments |= {segment.file: segment for segment in in_path}
    parts = []
    for segment in sorted(segments.values(), key=lambda segment: segment.segment_id):
        before = options.after and segment.segment_id < options.after.segment_id
        behind = options.to and segment.segment_id > options.to.segment_id
        if not before and not behind:
            parts += _parts_of(segment, options)
    return parts


def _in_files(path: Path, obey_index: bool) -> Iterator[_Found]:
    if path.is_dir():
        files = [file for file in path.iterdir() if is_segment(file.name)]
        if not files:
            raise FileNotFoundError(f"there is no commit log segment (CommitLog-7-….log) in the folder {path}")
    elif path.exists():
        files = [path]
    else:
        raise FileNotFoundError(f"there is no commit log segment {path}")
    for file in files:
        index = file.with_name(index_name(file.name))
        content = index.read_bytes() if index.exists() else None
        if content is not None or not obey_index or not path.is_dir():
            yield _Found(str(file), file.stat().st_size, content)


def _in_store(path: str, options: LogOptions) -> Iterator[_Found]:
    store, prefix = _store_of(path, options)
    sizes = {stat.key: stat.size for stat in store.list(prefix) if stat.key.startswith(prefix)}
    keys = [key for key in sizes if is_segment(_name_of(key)) and key in (prefix, f"{prefix}/{_name_of(key)}")]
    if not keys:
        raise FileNotFoundError(f"there is no commit log segment (CommitLog-7-….log) at {path}")
    for key in keys:
        index = key[: -len(_name_of(key))] + index_name(_name_of(key))
        content = store.get(index) if index in sizes or (key == prefix and store.stat(index)) else None
        if content is not None or not options.obey_index or key == prefix:
            yield _Found(f"{store.url}/{key}", sizes[key], content)


def _store_of(path: str, options: LogOptions) -> tuple[ObjectStore, str]:
    """Open the store of a bucket, and return it with the key or folder. The configuration says how to reach it."""
    from ringsync.storage import open_store

    bucket, _, prefix = path.removeprefix("gs://").partition("/")
    settings = dict(options.config.store) if options.config else {}
    return open_store(**{**settings, "url": f"gs://{bucket}"}), prefix.rstrip("/")


def _name_of(file: str) -> str:
    return file.rpartition("/")[2]


def _parts_of(found: _Found, options: LogOptions) -> list[SegmentPart]:
    wanted = WHOLE
    if options.obey_index and found.index is not None:
        try:
            index = parse_index(found.index)
        except ValueError as error:
            raise ValueError(f"{index_name(found.file)}: {error}") from None
        if index is None:
            return []
        wanted = index.wanted
    if options.after and options.after.segment_id == found.segment_id:
        wanted = replace(wanted, after=options.after.position)
    to = options.to.position if options.to and options.to.segment_id == found.segment_id else None
    # An object is fetched whole, so tasks do not share it. And only a task that reads everything before a position can
    # tell whether positions are certain.
    is_shared = not found.file.startswith("gs://") and wanted.until is None and not wanted.after
    count = max(1, -(-found.size // PART_BYTES)) if is_shared else 1
    bounds = [place * found.size // count for place in range(count)] + [found.size + 1]
    ranges = itertools.pairwise(bounds)
    return [SegmentPart(found.file, replace(wanted, part=part if count > 1 else None), to) for part in ranges]


def row_schema(options: LogOptions, tables: LogTables) -> pa.Schema:
    """Return the schema of the rows."""
    if options.rows == "problems":
        return PROBLEMS
    return typed_schema(tables.chosen[0]) if options.typed else CHANGE_ROWS


def read_part(options: LogOptions, tables: LogTables, part: SegmentPart) -> Iterator[pa.RecordBatch]:
    """Read the change rows of a part of a segment.

    :raises DamagedLogError: something cannot be read or decoded, and ``damage`` is not ``skip``. Records of tables that
        the schema lacks are left out if tables were chosen; records of Cassandra's own tables always are
    :raises SegmentError: nothing of the segment can be read
    """
    content = _read(options, tables, part)
    if content.damages and not options.skip_damage:
        first = content.damages[0]
        raise DamagedLogError(
            f"{part.file}, position {first.position}, {first.length} bytes: {first.reason} "
            f"({len(content.damages)} damages in this part); say damage=skip to read the rest without them"
        )
    ids = _ids(table.table_id for table in tables.chosen)
    for changes in content.batches:
        if not options.skip_damage:
            _refuse_undecoded(part, _up_to(changes.undecoded, part.to), chosen=bool(options.tables))
        rows = _up_to(changes.rows, part.to)
        if options.tables:
            rows = rows.filter(pc.is_in(rows["table_id"], ids))
        yield typed_rows(rows, tables.chosen[0]) if options.typed else rows


def _refuse_undecoded(part: SegmentPart, undecoded: pa.RecordBatch, *, chosen: bool) -> None:
    """Raise an error if wanted records could not be decoded.

    :param chosen: whether tables were chosen; records of unknown table ids are then not wanted
    """
    if not undecoded.num_rows:
        return
    unknown = pc.equal(undecoded["reason"], REASONS[UNKNOWN_TABLE])
    passed_over = pc.and_(unknown, chosen or pc.is_in(undecoded["table_id"], _ids(system_tables())))
    asked_for = undecoded.filter(pc.invert(passed_over))
    if not asked_for.num_rows:
        return
    first = asked_for.slice(0, 1).to_pylist()[0]
    table = f" ({uuid.UUID(bytes=first['table_id'])})" if first["table_id"] else ""
    raise DamagedLogError(
        f"{part.file}, position {first['position']}, {first['length']} bytes: a record {first['reason']}{table}; say "
        "rows=problems to see such records, damage=skip to read the rest without them, tables=… to read only these"
    )


def _ids(table_ids: Iterable[str]) -> pa.Array:
    values = cells_of_values([bytes.fromhex(table_id) for table_id in table_ids])
    return raw_values(values).cast(pa.binary(16))


def read_problems(options: LogOptions, tables: LogTables, part: SegmentPart) -> Iterator[pa.RecordBatch]:
    """Read the problems of a part of a segment, as ``PROBLEMS``: bytes that cannot be read or decoded.

    :raises SegmentError: nothing of the segment can be read
    """
    content = _read(options, tables, part)
    damages = [
        {"file": part.file, "position": damage.position, "length": damage.length, "reason": damage.reason}
        for damage in content.damages
    ]
    yield _up_to(pa.RecordBatch.from_pylist(damages, PROBLEMS), part.to)
    for changes in content.batches:
        undecoded = changes.undecoded
        arrays = [pa.repeat(part.file, undecoded.num_rows), *undecoded.columns]
        yield _up_to(pa.RecordBatch.from_arrays(arrays, schema=PROBLEMS), part.to)


def _up_to(rows: pa.RecordBatch, to: int | None) -> pa.RecordBatch:
    return rows if to is None else rows.filter(pc.less_equal(rows["position"], to))


def _read(options: LogOptions, tables: LogTables, part: SegmentPart) -> SegmentChanges:
    if part.file.startswith("gs://"):
        store, key = _store_of(part.file, options)
        data: bytes | mmap.mmap = store.get(key)
    else:
        with open(part.file, "rb") as file:
            # A mapping never reads pages that the part does not need. An empty file cannot be mapped.
            empty = file.seek(0, 2) == 0
            data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    keys = keys_in(options.keystore, os.environ) if options.keystore else None
    logged = logged_tables(tables.logged)
    return read_log(memoryview(data), _name_of(part.file), logged, part.wanted, key_of=keys)


@dataclass(frozen=True)
class LogTables:
    """The tables of the schema.

    :ivar logged: all tables, since a mutation may have any
    """

    logged: tuple[TableSchema, ...]
    chosen: tuple[TableSchema, ...]


def find_tables(options: LogOptions) -> LogTables:
    """Find the tables of the schema that the options name.

    :raises SchemaError: an id is missing, or the schema lacks a wanted table
    """
    logged = tuple(_load_schema(options).by_id().values())
    chosen = tuple(table for table in logged if (table.keyspace, table.name) in options.tables)
    for name in options.tables:
        if name not in {(table.keyspace, table.name) for table in chosen}:
            raise SchemaError(f"the schema has no table {printable(name[0])}.{printable(name[1])}")
    if options.typed and len(chosen) > 1:
        raise SchemaError(
            f"the schema has {len(chosen)} tables {chosen[0].full_name} of different ids: it was dropped and created "
            "again; give a schema with one of them"
        )
    return LogTables(logged, chosen)


def _load_schema(options: LogOptions) -> Schema:
    """Read the schema that the options name: a file's, or the cluster's."""
    if options.schema is not None:
        from ringsync.schema.from_cql import parse_schema

        return parse_schema(Path(options.schema).read_text(), options.schema)
    from ringsync.cluster.schema import read_tables
    from ringsync.cluster.session import connect

    assert options.config is not None, "an option says where the schema is"
    return read_tables(connect(cluster_settings(options.config)))
