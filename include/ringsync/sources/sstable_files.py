"""The SSTables of a table at local paths or in an object store, and how tasks share them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ringsync.changes.reconcile.streams import MergedPart
from ringsync.compiled.arrow import Integers
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.names import DATA, Descriptor, FoundSSTables, LeftOut, find_sstables
from ringsync.formats.sstable.schema import schema_of_all
from ringsync.formats.sstable.source import LocalSource, Source, find_local
from ringsync.formats.sstable.sstables import MEMORY_BYTES, Part, SSTable, merged_rows, open_sstable
from ringsync.formats.sstable.statistics import read_statistics
from ringsync.ring.tokens import MIN_TOKEN, TokenRange
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, TableSchema
from ringsync.storage.port import NotFoundError, ObjectStore

PART_BYTES = 64 * 2**20
"""Uncompressed bytes that a task reads, about."""
_SCHEMA = "schema.cql"
_AUTOMATIC = "Cassandra took this snapshot before it truncated or dropped the table: name it itself to read it"
_SAMPLES = 4096
_SAMPLE_BYTES = 4 * 2**20
"""Partitions of each SSTable that are remembered to divide the ring: so many, or one of so many uncompressed bytes."""
_READ_AT_ONCE = 8
"""Indexes that are in memory at the same time; each takes up to 24 MB."""


class SSTableFilesError(ValueError):
    """There is no such table among the files, or more than one; the message says which there are."""


@dataclass(frozen=True)
class StoredSource:
    """The files of an SSTable in an object store; the descriptor's folder is a prefix of keys."""

    descriptor: Descriptor
    store: ObjectStore = field(repr=False, compare=False)

    def read(self, component: str) -> bytes | None:
        try:
            return self.store.get(self.descriptor.path(component))
        except NotFoundError:
            return None

    def size(self, component: str) -> int | None:
        stat = self.store.stat(self.descriptor.path(component))
        return None if stat is None else stat.size

    def read_range(self, component: str, start: int, length: int) -> bytes:
        return self.store.get_range(self.descriptor.path(component), start, length)


def url_of(source: Source) -> str:
    """Return the URL of the store in which the files are; empty: they are at a local path."""
    return source.store.url if isinstance(source, StoredSource) else ""


@dataclass(frozen=True)
class SSTableFiles:
    """The SSTables at some paths.

    :ivar sources: complete SSTables
    :ivar left_out: what was found and is not read, and why
    :ivar schemas: the different contents of the ``schema.cql`` beside them
    """

    sources: tuple[Source, ...]
    left_out: tuple[LeftOut, ...]
    schemas: tuple[str, ...]


def files_in_folder(path: Path) -> SSTableFiles:
    """Find the SSTables in a folder, or the one that a file belongs to.

    :raises FileNotFoundError: there is none
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    found = find_local(folder)
    chosen = [
        LocalSource(one)
        for one in found.sstables
        if path.is_dir() or (path.name == f"{one.name}-{DATA}" and Path(one.folder) == path.parent.resolve())
    ]
    named = str(path.resolve())
    automatic = [one for one in chosen if _is_automatic(one.descriptor.folder, named)]
    chosen = [one for one in chosen if one not in automatic]
    folders = sorted({one.descriptor.folder for one in automatic})
    left_out = (*found.left_out, *(LeftOut(folder, _AUTOMATIC, is_lost=False) for folder in folders))
    if not chosen:
        told = "".join(f"; {one.path} {one.reason}" for one in left_out[:3])
        raise FileNotFoundError(f"there is no complete SSTable at {path}: name a folder, or its …-{DATA}{told}")
    texts = [Path(one, _SCHEMA) for one in sorted({source.descriptor.folder for source in chosen})]
    schemas = dict.fromkeys(text.read_text(encoding="utf-8") for text in texts if text.exists())
    return SSTableFiles(tuple(chosen), left_out, tuple(schemas))


def _is_automatic(folder: str, named: str) -> bool:
    """Tell whether a folder is a snapshot that Cassandra took of what was truncated or dropped, and was not named."""
    above, snapshot, tag = folder.rpartition("/snapshots/")
    return bool(snapshot) and tag.startswith(("truncated-", "dropped-")) and not named.startswith(f"{above}/snapshots")


def files_in_store(store: ObjectStore, prefix: str) -> SSTableFiles:
    """Find the SSTables whose keys begin with a folder.

    :raises FileNotFoundError: there is none
    """
    folder = prefix.rstrip("/") + "/"
    keys = [stat.key for stat in store.list(folder)]
    found: FoundSSTables = find_sstables(keys, store.get)
    if not found.sstables:
        raise FileNotFoundError(f"there is no complete SSTable at {store.uri(prefix)}")
    folders = {one.folder for one in found.sstables}
    texts = [key for key in keys if key.rpartition("/")[2] == _SCHEMA and key.rpartition("/")[0] in folders]
    schemas = dict.fromkeys(store.get(key).decode() for key in texts)
    return SSTableFiles(tuple(StoredSource(one, store) for one in found.sstables), found.left_out, tuple(schemas))


def together(found: Iterable[SSTableFiles]) -> SSTableFiles:
    """Join what was found at several paths; an SSTable that two of them name counts once."""
    sources: dict[tuple[str, Descriptor], Source] = {}
    left_out: dict[LeftOut, None] = {}
    schemas: dict[str, None] = {}
    for files in found:
        sources |= {(url_of(source), source.descriptor): source for source in files.sources}
        left_out |= dict.fromkeys(files.left_out)
        schemas |= dict.fromkeys(files.schemas)
    return SSTableFiles(tuple(sources.values()), tuple(left_out), tuple(schemas))


def tables_in(files: SSTableFiles) -> dict[tuple[str, str, str], list[Source]]:
    """Group SSTables by keyspace, name and id of their table; each is empty where the path does not say it."""
    found: dict[tuple[str, str, str], list[Source]] = {}
    for source in files.sources:
        one = source.descriptor
        found.setdefault((one.keyspace, one.table, one.table_id), []).append(source)
    return found


def choose_table(
    files: SSTableFiles, name: tuple[str, str] | None = None, schema: Schema | None = None
) -> tuple[TableSchema, list[Source]]:
    """Choose the SSTables of one table, and find its schema.

    :param name: keyspace and name; None: there is only one table
    :param schema: schema that has the table; None: the ``schema.cql`` beside the SSTables, else what the SSTables say
        of themselves, which is without the names of the key's columns
    :raises SSTableFilesError: there is no such table, or more than one; there are several snapshots of one node's
        table; or the schema does not have it, or schemas of several days do
    :raises SchemaError: a schema.cql cannot be read
    :raises SSTableError: a Statistics.db cannot be read
    """
    tables = {key: sources for key, sources in tables_in(files).items() if name is None or key[:2] in (name, ("", ""))}
    listed = ", ".join(sorted(".".join(key[:2]) + (f" ({key[2]})" if key[2] else "") for key in tables_in(files)))
    if not tables:
        raise SSTableFilesError(f"there are no SSTables of {'.'.join(name or ())}; there are some of {listed}")
    if len(tables) > 1:
        raise SSTableFilesError(
            f"there are SSTables of several tables, {listed}: name one table, and a path of it only"
        )
    (((keyspace, table, table_id), sources),) = tables.items()
    _refuse_several_snapshots(sources)
    known = {
        one: None
        for described in ([schema] if schema else [parse_schema(text, _SCHEMA) for text in files.schemas])
        for one in described.tables
        if (one.table_id == table_id if table_id else name in (None, (one.keyspace, one.name)))
    }
    if len(known) > 1:
        names = ", ".join(sorted({one.full_name for one in known}))
        raise SSTableFilesError(
            f"there are different schemas of {names} beside the SSTables, or in the given schema: name the table, and "
            "give the schema that holds now"
        )
    if known:
        return next(iter(known)), sources
    if schema:
        wanted = f"{keyspace}.{table} with the id {table_id}" if table_id else "it"
        raise SSTableFilesError(f"the schema does not have {wanted}; it has {_named(schema)}")
    return schema_of_all([(source.descriptor, read_statistics(source).header) for source in sources]), sources


def _refuse_several_snapshots(sources: Sequence[Source]) -> None:
    """:raises SSTableFilesError: a table's folder has several snapshots: truncated or purged rows would come back"""
    tags: dict[tuple[str, str], set[str]] = {}
    for source in sources:
        folder, snapshot, tag = source.descriptor.folder.rpartition("/snapshots/")
        if snapshot:
            tags.setdefault((url_of(source), folder), set()).add(tag)
    for (_, folder), found in tags.items():
        if len(found) > 1:
            raise SSTableFilesError(
                f"{folder} has the snapshots {', '.join(sorted(found)[:5])}: name one of them, because rows that were "
                "deleted between two of them would come back"
            )


def _named(schema: Schema) -> str:
    return ", ".join(f"{table.full_name} ({table.table_id})" for table in schema.tables[:10]) or "no table"


@dataclass(frozen=True)
class SSTableSplit:
    """What one task reads: the partitions of a token range.

    :ivar parts: parts of SSTables: URL of the store (empty: a local path), SSTable, and where the partitions are
    """

    tokens: TokenRange
    parts: tuple[tuple[str, Descriptor, Part], ...]


@dataclass(frozen=True)
class OutlinedSSTable:
    """An SSTable, and about where its partitions are: enough to divide the ring, and small, unlike its index.

    :ivar tokens: int64[n]: the tokens of some partitions, in their order
    :ivar positions: int64[n + 1]: their uncompressed positions in Data.db, and its length
    """

    sstable: SSTable
    tokens: Integers
    positions: Integers


def outlined(sstables: Iterable[SSTable]) -> list[OutlinedSSTable]:
    """Read the indexes of SSTables, and remember a little of each.

    :raises SSTableError: an index is missing or damaged
    """

    def outline(sstable: SSTable) -> OutlinedSSTable:
        partitions = replace(sstable).partitions
        most = max(_SAMPLES, partitions.length // _SAMPLE_BYTES)
        step = max(len(partitions) // most, 1)
        positions = np.append(partitions.positions[::step], partitions.length)
        return OutlinedSSTable(sstable, partitions.highest[::step].copy(), positions)

    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(outline, sstables))


SSTableGroup = tuple[Sequence[OutlinedSSTable], Sequence[TokenRange]]
"""SSTables, and the token ranges that are read of all of them."""


def split_tables(sstables: Sequence[SSTable], ranges: Sequence[TokenRange], least: int = 1) -> list[SSTableSplit]:
    """Divide SSTables of one table over tasks, so that each has about as many bytes, and the same tokens of all.

    :param ranges: token ranges to read
    :param least: number of tasks of each range at least, if there are so many partitions
    :raises SSTableError: an index is missing or damaged
    """
    return split_groups([(outlined(sstables), ranges)], least)


def split_groups(groups: Sequence[SSTableGroup], least: int) -> list[SSTableSplit]:
    """Divide several groups of SSTables; an SSTable may be in many groups. See :func:`split_tables`.

    Each index is read once, and forgotten when all parts of its SSTable were found.
    """
    cuts: list[TokenRange] = []
    numbers: dict[int, list[range]] = {}
    tables: dict[int, OutlinedSSTable] = {}
    for group, ranges in groups:
        first = len(cuts)
        for tokens in [part for one in ranges for part in one.unwrap()]:
            bounds = [tokens.start, *_bounds(group, tokens, least), tokens.end]
            cuts += [TokenRange(start, end) for start, end in itertools.pairwise(bounds)]
        for table in group:
            tables[id(table)] = table
            numbers.setdefault(id(table), []).append(range(first, len(cuts)))

    def parts_of(key: int) -> list[tuple[int, Part]]:
        sstable = replace(tables[key].sstable)  # the index goes with this one
        return [
            (number, part) for part_of in numbers[key] for number in part_of for part in sstable.parts(cuts[number])
        ]

    parts: list[list[tuple[str, Descriptor, Part]]] = [[] for _ in cuts]
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for key, found in zip(tables, pool.map(parts_of, tables), strict=True):
            source = tables[key].sstable.source
            for number, part in found:
                parts[number].append((url_of(source), source.descriptor, part))
    return [SSTableSplit(cut, tuple(some)) for cut, some in zip(cuts, parts, strict=True) if some]


def _bounds(tables: Sequence[OutlinedSSTable], tokens: TokenRange, least: int) -> list[int]:
    """Return the tokens at which a range is cut."""
    found, sizes = [], []
    for table in tables:
        first, end = np.searchsorted(table.tokens, [tokens.start, tokens.end], side="right")
        found.append(table.tokens[first:end])
        sizes.append(np.diff(table.positions[first : end + 1]))
    if not sum(map(len, found)):
        return []
    order = np.argsort(np.concatenate(found), kind="stable")
    places, read = np.concatenate(found)[order], np.cumsum(np.concatenate(sizes)[order])
    count = max(least, int(read[-1]) // PART_BYTES)
    wanted = np.searchsorted(read, [read[-1] * part // count for part in range(1, count)])
    return sorted({int(token) for token in places[wanted]} - {tokens.start, tokens.end, MIN_TOKEN})


def merged_split(
    split: SSTableSplit,
    table: TableSchema,
    open_source: Callable[[str, Descriptor], Source],
    lose: Callable[[Loss], None],
    *,
    shown: TableSchema | None = None,
    memory_bytes: int = MEMORY_BYTES,
    with_source: bool = True,
) -> Iterator[MergedPart]:
    """Merge what a task reads.

    :param open_source: function from the store's URL (empty: a local path) and the SSTable to its files
    :param lose: function that is told what cannot be read
    :param shown: the table with those columns only that are read; None: all
    :param memory_bytes: memory for the batches of all SSTables
    :param with_source: see :func:`~ringsync.formats.sstable.sstables.merged_rows`
    :raises SSTableError: a file is missing or damaged, so that nothing can be read
    """
    opened: dict[tuple[str, Descriptor], SSTable] = {}
    for url, descriptor, _ in split.parts:
        if (url, descriptor) not in opened:
            opened[url, descriptor] = open_sstable(open_source(url, descriptor), table, shown)
    parts = [(opened[url, descriptor], part) for url, descriptor, part in split.parts]
    return merged_rows(parts, shown or table, lose, memory_bytes, with_source=with_source)
