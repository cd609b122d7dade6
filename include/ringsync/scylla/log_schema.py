"""Which column of a CDC log table holds what of its base table, and the statement that reads the log.

The log has the base table's key columns, and for each other column ``c``: its value under its name,
``cdc$deleted_c`` (boolean), and, if its elements are cells of their own, ``cdc$deleted_elements_c``. The value of a
collection is frozen; a list's is a map from the timeuuids of its cells (S: cdc/log.cc, ``add_columns_to_cdc_log``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.cql.identifiers import quote
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType
from ringsync.schema.table import SchemaError, TableSchema

LOG_SUFFIX = "_scylla_cdc_log"
"""End of the name of each log table. A user's table may have it, too."""
METADATA = ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no", "cdc$operation", "cdc$ttl")
END_OF_BATCH = "cdc$end_of_batch"
"""True in the last row of a write, else null. Logs from before Scylla 4.3 do not have it."""
REMAINING_TTL = f"TTL({quote('cdc$operation')})"
"""What is left of the log row's own TTL, s. All cells of a log row have the same."""

ATOMIC, SET, MAP, FIELDS = range(4)
"""Forms of a column in the log: one cell; elements that are paths; pairs of path and value, also of lists; fields of a
user-defined type."""

_KEY_TYPES = ("blob", "timeuuid", "int")
_METADATA_TYPES = dict(zip(METADATA, (*_KEY_TYPES, "tinyint", "bigint"), strict=True)) | {END_OF_BATCH: "boolean"}
_BOOLEAN = Native("boolean")
_DELETED, _DELETED_ELEMENTS = "cdc$deleted_", "cdc$deleted_elements_"
EPOCH_100NS = 0x01B21DD213814000
"""1970-01-01 in the clock of timeuuids: 100 ns since 1582-10-15."""


class LogTableError(SchemaError):
    """An error: a log table does not fit its base table. The message names both and the columns."""


@dataclass(frozen=True)
class LogColumn:
    """A static or regular column of the base table that the log has.

    :ivar number: its place among :func:`ringsync.changes.columns.columns_of`
    :ivar type: its type in the base table; if it was dropped and the log still has it: the value's type in the log
    :ivar form: ATOMIC, SET, MAP or FIELDS
    """

    number: int
    name: str
    type: CqlType
    form: int
    is_static: bool

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of its columns in the log: value, whether it was deleted, and deleted elements if it has such."""
        names = (self.name, _DELETED + self.name)
        return names if self.form == ATOMIC else (*names, _DELETED_ELEMENTS + self.name)

    @property
    def log_types(self) -> tuple[CqlType, ...]:
        """Types of these columns."""
        if self.form == ATOMIC:
            return self.type, _BOOLEAN
        return _value_type(self.type), _BOOLEAN, _elements_type(self.type)


@dataclass(frozen=True)
class LogTable:
    """A CDC log table, as seen from its base table.

    :ivar base: the base table; ``name``: name of the log table, which is in the same keyspace
    :ivar columns: static and regular columns of the base table that the log has, dropped ones too, in the order of
        Cassandra's column lists: columns of one cell, then others, each by name
    """

    base: TableSchema
    name: str
    columns: tuple[LogColumn, ...]
    has_end_of_batch: bool

    @property
    def full_name(self) -> str:
        """``keyspace.table`` of the log, as change rows name their source."""
        return f"{self.base.keyspace}.{self.name}"

    @property
    def key_names(self) -> tuple[str, ...]:
        """Names of the base table's key columns."""
        return tuple(key.name for key in self.base.key_columns)

    @cached_property
    def layout(self) -> tuple[tuple[str, CqlType], ...]:
        """The columns of the result: the selector of each and its type."""
        columns = [(quote(name), Native(_METADATA_TYPES[name])) for name in METADATA]
        columns += [(REMAINING_TTL, Native("int"))]
        columns += [(quote(END_OF_BATCH), _BOOLEAN)] if self.has_end_of_batch else []
        keys = [(quote(key.name), key.type) for key in self.base.key_columns]
        values = [
            (quote(name), kind)
            for column in self.columns
            for name, kind in zip(column.log_names, column.log_types, strict=True)
        ]
        return (*columns, *keys, *values)

    def select(self, *, bypass_cache: bool = False) -> str:
        """Write the SELECT of the rows of some streams in a window of time.

        Its values are a ``list<blob>`` of stream ids, and the first timeuuid inside and the first one behind the
        window, see :func:`lowest_time`.

        :param bypass_cache: Scylla only: leave its cache to other tables
        """
        table = f"{quote(self.base.keyspace)}.{quote(self.name)}"
        stream, time, *_ = map(quote, METADATA)
        return (
            f"SELECT {', '.join(selector for selector, _ in self.layout)} FROM {table} "
            f"WHERE {stream} IN ? AND {time} >= ? AND {time} < ?"
        ) + (" BYPASS CACHE" if bypass_cache else "")


def lowest_time(time_ms: int) -> bytes:
    """Return the lowest timeuuid of a millisecond: 16 bytes, to be bound in a statement.

    Both databases order timeuuids by their time, then by the last eight bytes as signed bytes.

    :param time_ms: ms since the epoch
    :raises ValueError: timeuuids do not reach this time
    """
    ticks = time_ms * 10_000 + EPOCH_100NS
    if not 0 <= ticks < 2**60:
        raise ValueError(f"{time_ms} ms since 1970 is no time that a timeuuid can hold")
    first = (ticks & 0xFFFFFFFF) << 32 | (ticks >> 32 & 0xFFFF) << 16 | 0x1000 | ticks >> 48
    return first.to_bytes(8, "big") + b"\x80" * 8


def log_table_of(base: TableSchema, log: TableSchema, *, is_on: bool = True) -> LogTable:
    """Find the columns of a base table in its log table.

    If the log still has a dropped column, it is read.

    :param base: the base table, or some of its columns
    :param is_on: whether writes are logged now. If not, the log does not get new columns, nor anything of them
    :raises LogTableError: the log table does not fit
    """
    types = {column.name: column.type for column in log.columns}
    problems = _key_problems(base, log, types)
    if base.has_counters:
        problems.append("the base table has counters, of which Scylla keeps no log")
    columns = []
    for logged in columns_of(base):
        if logged.name not in types and not logged.dropped and is_on:
            problems.append(f"the log has no {quote(logged.name)}: what is written to it is not logged")
        if logged.name in types:
            column = _log_column(logged, types)
            problems += _column_problems(column, types, logged)
            columns.append(column)
    known = {name for column in columns for name in column.log_names} | {key.name for key in base.key_columns}
    unknown = [name for name in types if name not in known and _is_of_base(name)]
    if unknown and not base.is_selection:
        problems.append(f"the log has {', '.join(map(quote, unknown))}, which belongs to no column of the base table")
    if problems:
        raise LogTableError(f"the log table {log.full_name} does not fit {base.full_name}: {'; '.join(problems)}")
    columns.sort(key=lambda column: (column.form != ATOMIC, column.name.encode()))
    return LogTable(base, log.name, tuple(columns), END_OF_BATCH in types)


def _is_of_base(name: str) -> bool:
    """Tell whether a column of the log is about one of the base table. A newer Scylla may have further metadata."""
    return not name.startswith("cdc$") or name.startswith(_DELETED)


def _key_problems(base: TableSchema, log: TableSchema, types: Mapping[str, CqlType]) -> list[str]:
    problems = []
    if log.keyspace != base.keyspace:
        problems.append("it is in another keyspace")
    keys = tuple(column.name for column in log.key_columns)
    if keys != METADATA[:3]:
        problems.append(f"its primary key is ({', '.join(keys)}) instead of ({', '.join(METADATA[:3])})")
    wanted = {name: Native(kind) for name, kind in _METADATA_TYPES.items() if name != END_OF_BATCH or name in types}
    return problems + _differences(wanted | {key.name: key.type for key in base.key_columns}, types)


def _column_problems(column: LogColumn, types: Mapping[str, CqlType], logged: LoggedColumn) -> list[str]:
    if logged.dropped:
        # system_schema describes the type of a dropped column in its own way, and the log decides how to read it.
        return _differences(dict(zip(column.log_names[1:], column.log_types[1:], strict=True)), types)
    return _differences(dict(zip(column.log_names, column.log_types, strict=True)), types)


def _differences(wanted: Mapping[str, CqlType], types: Mapping[str, CqlType]) -> list[str]:
    problems = []
    for name, kind in wanted.items():
        if name not in types:
            problems.append(f"the log lacks {quote(name)}")
        elif _thawed(types[name]) != _thawed(kind):
            problems.append(f"{quote(name)} is {types[name]} instead of {kind}")
    return problems


def _log_column(logged: LoggedColumn, types: Mapping[str, CqlType]) -> LogColumn:
    kind = logged.type
    if logged.dropped:
        kind = _thawed(types[logged.name]) if _DELETED_ELEMENTS + logged.name in types else types[logged.name]
    is_multicell = _DELETED_ELEMENTS + logged.name in types if logged.dropped else logged.is_multicell
    form = _form(kind) if is_multicell else ATOMIC
    return LogColumn(logged.number, logged.name, kind, form, logged.is_static)


def _form(kind: CqlType) -> int:
    match kind:
        case SetType():
            return SET
        case MapType() | ListType():
            return MAP
        case UserType() | TupleType():
            return FIELDS
    return ATOMIC


def _value_type(kind: CqlType) -> CqlType:
    match kind:
        case SetType(element):
            return SetType(element, frozen=True)
        case MapType(key, value):
            return MapType(key, value, frozen=True)
        case ListType(element):
            return MapType(Native("timeuuid"), element, frozen=True)
        case UserType(keyspace, name, names, fields):
            return UserType(keyspace, name, names, fields, frozen=True)
    return kind


def _elements_type(kind: CqlType) -> CqlType:
    match kind:
        case SetType(element) | MapType(key=element):
            return SetType(element, frozen=True)
        case ListType():
            return SetType(Native("timeuuid"), frozen=True)
    return SetType(Native("smallint"), frozen=True)


def _thawed(kind: CqlType) -> CqlType:
    """Return a type without ``frozen``, which changes nothing inside a frozen value."""
    match kind:
        case ListType(element):
            return ListType(_thawed(element))
        case SetType(element):
            return SetType(_thawed(element))
        case MapType(key, value):
            return MapType(_thawed(key), _thawed(value))
        case TupleType(fields):
            return TupleType(tuple(map(_thawed, fields)))
        case VectorType(element, dimension):
            return VectorType(_thawed(element), dimension)
        case UserType(keyspace, name, names, fields):
            return UserType(keyspace, name, names, tuple(map(_thawed, fields)))
    return kind
