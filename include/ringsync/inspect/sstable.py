"""The work of ``cdcservice inspect sstable`` after its arguments are parsed: from SSTables to output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.reconcile.streams import MergedPart
from ringsync.cql.identifiers import printable
from ringsync.cql.key_literals import parse_partition_key
from ringsync.cql.murmur3 import tokens
from ringsync.formats.sstable.data import DataFile, Loss
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import DATA
from ringsync.formats.sstable.schema import UNKNOWN_ID
from ringsync.formats.sstable.source import Source
from ringsync.formats.sstable.sstables import Part, SSTable, merged_rows, open_sstable
from ringsync.images import live
from ringsync.images.from_streams import images_of_part
from ringsync.inspect.files import InspectError
from ringsync.inspect.problems import Problems
from ringsync.inspect.summary import SSTableSummary
from ringsync.ring.tokens import MAX_TOKEN, MIN_TOKEN, WHOLE_RING, TokenRange
from ringsync.schema.table import Schema, TableSchema
from ringsync.sources.sstable_files import SSTableFilesError, choose_table, files_in_folder, together

Progress = Callable[[Path, float], None]


@dataclass(frozen=True)
class FoundTable:
    """The SSTables of one table.

    :ivar sizes: bytes of each Data.db
    :ivar left_out: number of SSTables and folders that are not read
    """

    table: TableSchema
    sources: tuple[Source, ...]
    sizes: dict[Path, int]
    left_out: int


@dataclass(frozen=True)
class Wanted:
    """The partitions to read.

    :ivar tokens: token range
    :ivar key: key of the only partition, as Cassandra serialises it; None: all of the range
    """

    tokens: TokenRange = WHOLE_RING
    key: bytes | None = None

    @classmethod
    def of_key(cls, text: str, table: TableSchema) -> Wanted:
        """Read a partition key that a user has typed.

        :raises InspectError: it is no key of the table
        """
        try:
            key = parse_partition_key(text, [column.type for column in table.partition_key])
        except ValueError as error:
            names = ", ".join(f"{printable(column.name)} {column.type}" for column in table.partition_key)
            raise InspectError(f"--{error}. The partition key of {table.full_name} is ({names})") from None
        token = int(tokens(pa.array([key], pa.binary()))[0])
        return cls(TokenRange(token - 1, token), key)


def find_table(
    paths: Sequence[Path], name: tuple[str, str] | None, schema: Schema | None, problems: Problems
) -> FoundTable:
    """Find the SSTables at some paths, which are of one table. What is left out is reported.

    :param name: keyspace and name of the table; None: there is only one
    :param schema: schema that has the table; None: it is beside the SSTables, or they say it themselves
    :raises InspectError: there are none, or they are of several tables, or the schema is of others
    :raises SchemaError: the schema beside them cannot be read
    """
    try:
        found = together([files_in_folder(path) for path in paths])
        table, sources = choose_table(found, name, schema)
    except (SSTableFilesError, SSTableError, OSError, UnicodeDecodeError) as error:
        raise InspectError(str(error)) from error
    folders = [path.resolve() for path in paths if path.is_dir()]
    # Beside a file that is named, other files are not asked for.
    left_out = [one for one in found.left_out if any(Path(one.path).is_relative_to(folder) for folder in folders)]
    for one in left_out:
        (problems.imperfect if one.is_lost else problems.say)(f"{one.path} is left out: {one.reason}")
    if not table.table_id:
        table = replace(table, table_id=sources[0].descriptor.table_id or UNKNOWN_ID)
    sizes = {Path(source.descriptor.path(DATA)): source.size(DATA) or 0 for source in sources}
    return FoundTable(table, tuple(sources), sizes, len(left_out))


@dataclass
class SSTableInspection:
    """Reader of the SSTables of one table.

    :ivar progress: function that is called with the share of a Data.db that is read, 0…1
    """

    table: TableSchema
    wanted: Wanted
    problems: Problems
    progress: Progress = lambda path, fraction: None
    summary: SSTableSummary = field(default_factory=SSTableSummary)

    def read(self, sources: Sequence[Source]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the SSTables, one SSTable after another."""
        for sstable in self._opened(sources):
            file = Path(sstable.source.descriptor.path(DATA))
            for part in self._parts(sstable):
                yield from self._wanted_rows(self._batches(sstable, part))
            self.progress(file, 1)
            self.problems.finish(str(file))

    def merged(self, sources: Sequence[Source], *, with_source: bool = True) -> Iterator[MergedPart]:
        """Merge the SSTables: yield what they hold together, each row once.

        :param with_source: whether the rows are shown as change rows; if not, they are not summed up
        """
        with_source = with_source or self.wanted.key is not None
        sstables = list(self._opened(sources))
        parts = [(sstable, part) for sstable in sstables for part in self._parts(sstable)]
        try:
            for part in merged_rows(parts, self.table, self._lose, with_source=with_source):
                yield self._wanted_part(part) if with_source else part
        except (ValueError, OSError) as error:
            self._unreadable(f"the merge cannot go on, the rest is missing: {error}")
        for source in sources:
            self.progress(Path(source.descriptor.path(DATA)), 1)
            self.problems.finish(source.descriptor.path(DATA))

    def _opened(self, sources: Sequence[Source]) -> Iterator[SSTable]:
        for source in sources:
            try:
                sstable = open_sstable(source, self.table)
                chunks = DataFile(source).chunks
            except (SSTableError, OSError) as error:
                self._unreadable(str(error))
                continue
            self.summary.files.append(
                f"{source.descriptor.path(DATA)}  version {source.descriptor.version}, "
                f"{chunks.compressor or 'not compressed'}, {source.size(DATA):,} bytes, {chunks.length:,} uncompressed"
            )
            yield sstable

    def _parts(self, sstable: SSTable) -> list[Part]:
        """Find the wanted partitions; the index is not needed to read all of them."""
        try:
            if self.wanted.tokens == WHOLE_RING:
                return [Part(TokenRange(MIN_TOKEN, MAX_TOKEN), 0, DataFile(sstable.source).length)]
            return list(sstable.parts(self.wanted.tokens))
        except (SSTableError, OSError) as error:
            self._unreadable(str(error))
            return []

    def _batches(self, sstable: SSTable, part: Part) -> Iterator[pa.RecordBatch]:
        file = Path(sstable.source.descriptor.path(DATA))
        try:
            for batch in sstable.rows(part):
                for loss in batch.losses:
                    self._lose(loss)
                yield batch.rows
                self.progress(file, (batch.end - part.first) / (part.end - part.first))
        except (SSTableError, OSError) as error:
            self._unreadable(f"the rest of {file} is missing: {error}")

    def _wanted_rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = batch if self.wanted.key is None else batch.filter(self._is_wanted(batch))
            if len(rows):
                self.summary.add(rows)
                yield rows

    def _wanted_part(self, part: MergedPart) -> MergedPart:
        if self.wanted.key is not None:
            chosen = [rows.where(np.asarray(self._is_wanted(rows.to_arrow()))) for rows in (part.rows, part.carried)]
            part = MergedPart(chosen[0], chosen[1])
        if len(part.rows):
            self.summary.add(part.rows.to_arrow())
        return part

    def _is_wanted(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        return pc.equal(rows["partition_key"], pa.scalar(self.wanted.key, pa.binary()))

    def _lose(self, loss: Loss) -> None:
        self.summary.losses += 1
        self.summary.lost_bytes += loss.length
        self.problems.lost(loss.file, loss.position, loss.length, loss.reason)

    def _unreadable(self, text: str) -> None:
        self.summary.unreadable += 1
        self.problems.unreadable(text)


def shown_schema(table: TableSchema) -> pa.Schema:
    """Return the schema of :func:`shown_rows`: ``token``, the columns, and ``_cells`` with the times of each."""
    return pa.schema([field for field in live.live_schema(table) if not field.name.startswith("#")])


def shown_rows(parts: Iterable[MergedPart], table: TableSchema, now_s: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a SELECT shows, typed, with the times of their cells.

    :param parts: all parts of a merge
    """
    return live.shown_rows((images_of_part(part, table, "raw") for part in parts), table, now_s)
