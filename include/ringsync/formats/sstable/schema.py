"""Which column of a table each column of an SSTable is, and a table made of an SSTable alone.

An SSTable lists only the columns that have cells in it, with the types of when it was written. It does not name the
columns of the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.cql.types import (
    CqlType,
    ListType,
    MapType,
    Native,
    SetType,
    TupleType,
    UserType,
    VectorType,
    is_multicell,
    stored_length,
)
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import STATISTICS, Descriptor
from ringsync.formats.sstable.statistics import Header, HeaderColumn
from ringsync.schema.table import Column, ColumnKind, TableSchema

UNKNOWN_KEYSPACE, UNKNOWN_TABLE, UNKNOWN_ID = "keyspace", "table", "0" * 32
"""What a path that does not say them is called by (C: tools/Util.metadataFromSSTable)."""
_VALUE_KINDS: tuple[ColumnKind, ...] = ("static", "regular")
_ONE_TABLE = "name only SSTables of one table"
_SCHEMA_ADVICE = "give the schema of this very table, as it is now: schema.cql of a snapshot of the same time has it"
_WIDER = {
    "text": ("ascii",),
    "uuid": ("timeuuid",),
    "bigint": ("timestamp",),
    "timestamp": ("bigint",),
    "time": ("bigint",),
    "date": ("int",),
    "varint": ("int", "bigint", "timestamp"),
}
"""Types that a dropped column, added again with another one, may have had before; a blob may have had any. All pairs of
AbstractType.isValueCompatibleWith in 4.1 and 5.0. 4.0 asks for no more; later versions also for the same length."""


@dataclass(frozen=True)
class FileColumn:
    """A static or regular column of an SSTable.

    :ivar column: the same column of the table; with ``dropped`` set all its cells up to the drop are gone
    :ivar type: the type by which the SSTable's bytes are laid out
    """

    column: LoggedColumn
    type: CqlType


@dataclass(frozen=True)
class FileColumns:
    """The columns of an SSTable, in the order of its column subsets."""

    static: tuple[FileColumn, ...]
    regular: tuple[FileColumn, ...]


def schema_of_all(sstables: Sequence[tuple[Descriptor, Header]]) -> TableSchema:
    """Make a table of what SSTables of it say. The columns of the key are called ``partition_key``, or ``key1``,
    ``key2`` …, and ``clustering1`` …; columns without cells in the SSTables are missing. Where a user-defined type got
    fields in between, the type with these fields counts.

    :param sstables: at least one
    :raises SSTableError: the name of a column is not UTF-8, or the SSTables are not of one table
    """
    first, header = sstables[0]
    key = len(header.key), len(header.clustering)
    found: dict[tuple[ColumnKind, str], tuple[CqlType, bool]] = {}
    for descriptor, other in sstables:
        file = descriptor.path(STATISTICS)
        if (len(other.key), len(other.clustering)) != key:
            raise SSTableError(file, None, f"its key is not that of {first.path(STATISTICS)}", _ONE_TABLE)
        for kind, name, cql_type, descending in _facts(other, file):
            before, descended = found.get((kind, name), (cql_type, descending))
            if descended != descending or not (_fits(cql_type, before) or _fits(before, cql_type)):
                problem = f"{name} is {cql_type}{' DESC' * descending}, and {before}{' DESC' * descended} in others"
                raise SSTableError(file, None, problem, _ONE_TABLE)
            found[kind, name] = (before if _fits(cql_type, before) else cql_type), descending
    taken = {name for kind, name in found if kind in _VALUE_KINDS}
    key_columns = [
        Column(_free(name, taken), kind, *found[kind, name]) for kind, name in found if kind not in _VALUE_KINDS
    ]
    values = sorted((_VALUE_KINDS.index(kind), name.encode(), name) for kind, name in found if kind in _VALUE_KINDS)
    value_columns = [Column(name, _VALUE_KINDS[kind], *found[_VALUE_KINDS[kind], name]) for kind, _, name in values]
    names = (first.keyspace or UNKNOWN_KEYSPACE, first.table or UNKNOWN_TABLE, first.table_id or UNKNOWN_ID)
    return TableSchema(*names, (*key_columns, *value_columns))


def file_columns(descriptor: Descriptor, header: Header, table: TableSchema) -> FileColumns:
    """Find the column of the table that each column of an SSTable is, by its name.

    A dropped column counts. A type may differ where the bytes of both can be read: user-defined types get fields, and a
    dropped column may be added again with another type (``_WIDER``).

    :raises SSTableError: the table has no such column, or it is of another kind or type; or the key is of other types
    """
    file = descriptor.path(STATISTICS)
    _check_key(file, header, table)
    known = {column.name: column for column in columns_of(table)}
    found: dict[ColumnKind, list[FileColumn]] = {"static": [], "regular": []}
    for kind, column in _columns_of(header):
        name = _name(column, file)
        if name not in known:
            raise _misfit(file, f"has a {kind} column {name}, which {table.full_name} does not have and never had")
        if known[name].is_static != (kind == "static"):
            raise _misfit(file, f"has a {kind} column {name}, which is of another kind in {table.full_name}")
        # Whatever a dropped column was, its cells are gone; schema.cql does not tell whether its type was frozen.
        if not known[name].dropped and not _fits(column.type, known[name].type):
            raise _misfit(
                file, f"has a column {name} of type {column.type}, which is {known[name].type} in {table.full_name}"
            )
        found[kind].append(FileColumn(known[name], column.type))
    return FileColumns(tuple(found["static"]), tuple(found["regular"]))


def _facts(header: Header, file: str) -> Iterator[tuple[ColumnKind, str, CqlType, bool]]:
    """Yield kind, name, type and whether it is descending, of all columns."""
    for number, cql_type in enumerate(header.key, 1):
        yield "partition_key", f"key{number}" if len(header.key) > 1 else "partition_key", cql_type, False
    for number, (cql_type, descending) in enumerate(header.clustering, 1):
        yield "clustering", f"clustering{number}", cql_type, descending
    for kind, column in _columns_of(header):
        yield kind, _name(column, file), column.type, False


def _columns_of(header: Header) -> Iterator[tuple[ColumnKind, HeaderColumn]]:
    yield from (("static", column) for column in header.static)
    yield from (("regular", column) for column in header.regular)


def _name(column: HeaderColumn, file: str) -> str:
    try:
        return column.name.decode()
    except UnicodeDecodeError as error:
        problem = f"the column 0x{column.name.hex()} has a name that is not UTF-8, as only tables of Thrift have"
        raise SSTableError(file, None, problem, "such tables are not supported") from error


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no other column has."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _misfit(file: str, problem: str) -> SSTableError:
    return SSTableError(file, None, f"the SSTable {problem}", _SCHEMA_ADVICE)


def _check_key(file: str, header: Header, table: TableSchema) -> None:
    """Check that an SSTable has the key of a table."""
    key = [column.type for column in table.partition_key]
    if len(header.key) != len(key) or not all(map(_fits_key, header.key, key)):
        raise _misfit(file, f"has the partition key {_listed(header.key)}, and {table.full_name} has {_listed(key)}")
    clustering = [(column.type, column.descending) for column in table.clustering]
    matches = len(header.clustering) == len(clustering) and all(
        _fits_key(own.type, theirs) and own.descending == descending
        for own, (theirs, descending) in zip(header.clustering, clustering, strict=True)
    )
    if not matches:
        problem = f"has the clustering {_ordered(header.clustering)}, and {table.full_name} has {_ordered(clustering)}"
        raise _misfit(file, problem)


def _fits_key(own: CqlType, table: CqlType) -> bool:
    """As :func:`_fits`, for a column of the key, which the reader lays out by the table's type."""
    return _fits(own, table) and stored_length(own) == stored_length(table)


def _fits(own: CqlType, table: CqlType) -> bool:
    """Tell whether bytes of a type in an SSTable can be read as the type in the table."""
    if is_multicell(own) != is_multicell(table):
        return False
    return _is_readable(own, table)


def _is_readable(own: CqlType, table: CqlType) -> bool:
    """As :func:`_fits`, whether frozen or not: inside other types everything is."""
    match own, table:
        case (ListType(a), ListType(b)) | (SetType(a), SetType(b)):
            return _is_readable(a, b)
        case MapType(a, c), MapType(b, d):
            return _is_readable(a, b) and _is_readable(c, d)
        case VectorType(a, n), VectorType(b, m):
            return n == m and _is_readable(a, b)
        case ((TupleType(a) | UserType(field_types=a)), (TupleType(b) | UserType(field_types=b))):
            # Fields that the SSTable does not have are null.
            return len(a) <= len(b) and all(map(_is_readable, a, b))
        case Native(a), Native(b):
            return a == b or a in _WIDER.get(b, ()) or b == "blob"
        case _, Native("blob"):
            return True
    return own == table


def _listed(types: Sequence[CqlType]) -> str:
    return f"({', '.join(map(str, types))})"


def _ordered(clustering: Iterable[tuple[CqlType, bool]]) -> str:
    return f"({', '.join(f'{cql_type} DESC' if descends else str(cql_type) for cql_type, descends in clustering)})"
