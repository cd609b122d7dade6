"""The SSTables of a table at local paths or in an object store, and how tasks share them."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from ringsync.changes.reconcile.streams import MergedPart
from ringsync.compiled.arrow import Integers
from ringsync.formats.sstable.data import Loss
from ringsync.formats.sstable.names import DATA, Descriptor, FoundSSTables, LeftOut, find_sstables
from ringsync.formats.sstable.partitions import Partitions
from ringsync.formats.sstable.reader import Layout, layout_of
from ringsync.formats.sstable.schema import schema_of_all
from ringsync.formats.sstable.source import LocalSource, Source, find_local
from ringsync.formats.sstable.sstables import MEMORY_BYTES, Part, SSTable, merged_rows
from ringsync.formats.sstable.statistics import read_statistics
from ringsync.ring.tokens import WHOLE_RING, TokenRange, TokenSet, overlaps
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, TableSchema
from ringsync.storage.port import NotFoundError, ObjectStore

PART_BYTES = 128 * 2**20
"""Uncompressed bytes that a task reads, about."""
_SCHEMA = "schema.cql"
_AUTOMATIC = "Cassandra took this snapshot before it truncated or dropped the table: name it itself to read it"
_SAMPLES = 2**20
"""Partitions of all SSTables by which the ring is divided."""
_READ_AT_ONCE = 8
"""Indexes that are read at the same time."""


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
    found: FoundSSTables = find_sstables(keys)
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
        if (
            one.table_id == table_id
            if table_id and one.table_id
            else ((keyspace, table) if table_id else name) in (None, (one.keyspace, one.name))
        )
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
    return schema_of_all([(source.descriptor, read_statistics(source)) for source in sources]), sources


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
    """A token range that is read at once.

    :ivar parts: parts of SSTables: URL of the store (empty: a local path), SSTable, and where the partitions are; they
        have those tokens of the range only that are read of their SSTable
    """

    tokens: TokenRange
    parts: tuple[tuple[str, Descriptor, Part], ...]


class Opener:
    """Opens SSTables of one table. Those that have the same columns share what describes these, some 100 KiB.

    :param table: the whole table; ``shown``: the table with those columns only that are read; None: all
    """

    def __init__(self, table: TableSchema, shown: TableSchema | None = None) -> None:
        self.table, self.shown = table, shown or table
        self._layouts: dict[object, Layout] = {}

    def open(self, source: Source) -> SSTable:
        """Open an SSTable; the errors are those of :func:`~ringsync.formats.sstable.sstables.open_sstable`."""
        header, descriptor = read_statistics(source), source.descriptor
        columns = header.key, header.clustering, header.static, header.regular
        if columns not in self._layouts:
            self._layouts[columns] = layout_of(descriptor, header, self.table, self.shown)
        layout = self._layouts[columns]
        known = layout.header
        header = replace(header, key=known.key, clustering=known.clustering, static=known.static, regular=known.regular)
        return SSTable(source, replace(layout, descriptor=descriptor, header=header))


@dataclass(frozen=True)
class OutlinedSSTable:
    """An SSTable, and about where its partitions are: enough to divide the ring, and small, unlike its index.

    :ivar url: URL of the store in which the files are; empty: they are at a local path
    """

    url: str
    descriptor: Descriptor
    partitions: Partitions


def outlined(sstables: Sequence[SSTable]) -> list[OutlinedSSTable]:
    """Read the indexes of SSTables, and remember a little of each.

    :raises SSTableError: an index is missing or damaged
    """

    def outline(sstable: SSTable) -> OutlinedSSTable:
        return OutlinedSSTable(url_of(sstable.source), sstable.source.descriptor, sstable.partitions())

    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(outline, sstables))


SSTableGroup = tuple[Sequence[OutlinedSSTable], TokenSet]
"""SSTables, and the tokens that are read of them."""

Task = tuple[SSTableSplit, ...]
"""What one task reads, in token order."""


def split_tables(sstables: Sequence[SSTable], least: int = 1) -> list[SSTableSplit]:
    """Divide SSTables of one table over tasks, so that each has about as many bytes, and the same tokens of all.

    :param least: number of tasks at least, if there are so many partitions
    :raises SSTableError: an index is missing or damaged
    """
    whole = WHOLE_RING.unwrap()
    return [
        split for task in split_groups([(outlined(sstables), whole)], whole, least) for split in task if split.parts
    ]


def split_groups(
    groups: Sequence[SSTableGroup], ranges: Sequence[TokenRange], least: int = 1, most: int | None = None
) -> list[Task]:
    """Divide token ranges over tasks, so that each has about as many bytes of all SSTables. Nothing is read.

    :param groups: each SSTable is in one
    :param ranges: disjoint ranges without wrap, in token order: each is a split, or several of adjacent tasks. A split
        may have no parts
    :param least: number of tasks at least, if there are so many partitions; ``most``: at most, which wins
    """
    cuts = _cuts(groups, least, most)
    tasks: dict[int, list[TokenRange]] = {}
    for tokens in ranges:
        inside = cuts[bisect_right(cuts, tokens.start) : bisect_left(cuts, tokens.end)]
        for start, end in itertools.pairwise([tokens.start, *inside, tokens.end]):
            tasks.setdefault(bisect_left(cuts, end), []).append(TokenRange(start, end))
    splits = [tokens for number in sorted(tasks) for tokens in tasks[number]]
    parts: list[list[tuple[str, Descriptor, Part]]] = [[] for _ in splits]
    for tables, wanted in groups:
        pieces = [(number, tokens) for _, number, tokens in overlaps(wanted, splits)]
        of_split = {number: tuple(tokens for _, tokens in some) for number, some in groupby(pieces, itemgetter(0))}
        numbers = np.array([number for number, _ in pieces], np.int64)
        starts, ends = (np.array([getattr(one, end) for _, one in pieces], np.int64) for end in ("start", "end"))
        for table in tables:
            for number, part in _joined(table.partitions, numbers, starts, ends):
                if len(of_split[number]) > 1 and not table.partitions.is_within:
                    part = replace(part, only=of_split[number])
                parts[number].append((table.url, table.descriptor, part))
    made = (SSTableSplit(tokens, tuple(some)) for tokens, some in zip(splits, parts, strict=True))
    return [tuple(itertools.islice(made, len(tasks[number]))) for number in sorted(tasks)]


def _joined(partitions: Partitions, numbers: Integers, starts: Integers, ends: Integers) -> Iterator[tuple[int, Part]]:
    """Find the parts of an SSTable for pieces of splits; those of one split that touch are joined.

    With vnodes they would be thousands, each of which costs a read from the store and a step of the merge: a node holds
    many ranges, and between them its SSTables have little.

    :param numbers: int64[n]: split of each piece; ``starts``, ``ends``: its tokens, in their order
    """
    firsts, behind = partitions.between(starts, ends)
    chosen = np.flatnonzero(firsts < behind)
    numbers, starts, ends, firsts, behind = (some[chosen] for some in (numbers, starts, ends, firsts, behind))
    is_new = np.ones(len(chosen) + 1, bool)
    is_new[1:-1] = (np.diff(numbers) != 0) | (firsts[1:] > behind[:-1])
    for first, end in itertools.pairwise(np.flatnonzero(is_new).tolist()):
        tokens = TokenRange(int(starts[first]), int(ends[end - 1]))
        yield int(numbers[first]), Part(tokens, int(firsts[first]), int(behind[end - 1]))


def _cuts(groups: Sequence[SSTableGroup], least: int, most: int | None) -> list[int]:
    """Return the tokens at which one task ends and the next one begins, in their order."""
    found, sizes = [], []
    step = 1 + sum(len(table.partitions) for tables, _ in groups for table in tables) // _SAMPLES
    for tables, wanted in groups:
        starts, ends = (
            np.array(some, np.int64) for some in zip(*((one.start, one.end) for one in wanted), strict=True)
        )
        for table in tables:
            tokens, positions = table.partitions.highest[::step], table.partitions.positions[::step]
            number = np.searchsorted(starts, tokens) - 1
            inside = (number >= 0) & (tokens <= ends[number])
            found.append(tokens[inside])
            sizes.append(np.diff(positions, append=table.partitions.length)[inside])
    if not sum(map(len, found)):
        return []
    order = np.argsort(np.concatenate(found), kind="stable")
    places, read = np.concatenate(found)[order], np.cumsum(np.concatenate(sizes)[order])
    count = max(least, int(read[-1]) // PART_BYTES)
    count = count if most is None else min(count, most)
    wanted_bytes = np.searchsorted(read, [int(read[-1]) * part // count for part in range(1, count)])
    return sorted({int(token) for token in places[wanted_bytes]})


def merged_split(
    split: SSTableSplit,
    open_sstable: Callable[[str, Descriptor], SSTable],
    shown: TableSchema,
    lose: Callable[[Loss], None],
    *,
    memory_bytes: int = MEMORY_BYTES,
    with_source: bool = True,
) -> Iterator[MergedPart]:
    """Merge a split.

    :param open_sstable: function from the store's URL (empty: a local path) and the SSTable to the open one
    :param shown: the table with those columns that are read
    :param lose: function that is told what cannot be read
    :param memory_bytes: memory for the batches of all SSTables
    :param with_source: see :func:`~ringsync.formats.sstable.sstables.merged_rows`
    :raises SSTableError: a file is missing or damaged, so that nothing can be read
    """
    opened = {where: open_sstable(*where) for where in {(url, one) for url, one, _ in split.parts}}
    parts = [(opened[url, descriptor], part) for url, descriptor, part in split.parts]
    yield from merged_rows(parts, shown, lose, memory_bytes, with_source=with_source)
