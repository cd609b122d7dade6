"""Tables in the form that the kernels read: they find a table by its id and a column by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringsync.changes.digest import column_hashes
from ringsync.compiled.memory import address, padded
from ringsync.cql.types import COUNTER, VARIABLE, CqlType, ListType, MapType, is_multicell, stored_length
from ringsync.schema.table import TableSchema

TABLE_WORDS, COLUMN_WORDS = 8, 6


@dataclass(frozen=True)
class LoggedColumn:
    """A static or regular column that commit logs may name.

    :ivar number: its place among :func:`columns_of`; the field ``column`` of a cell holds this number
    :ivar dropped: whether it was dropped from the table; older records still name it
    """

    number: int
    name: str
    type: CqlType
    is_static: bool
    dropped: bool

    @property
    def is_multicell(self) -> bool:
        return is_multicell(self.type)

    @property
    def is_list(self) -> bool:
        """Whether its cells are entries of a list: a SELECT does not show which entry is which."""
        return self.is_multicell and isinstance(self.type, ListType)

    @property
    def is_counter(self) -> bool:
        return self.type == COUNTER

    @property
    def value_type(self) -> CqlType | None:
        """The type of its cells' values. None for sets, whose values are empty, and for user-defined types, whose
        fields differ in type and whose bytes change when a type inside gets new fields."""
        if not self.is_multicell:
            return self.type
        match self.type:
            case ListType(element=kind) | MapType(value=kind):
                return kind
        return None


def columns_of(table: TableSchema) -> tuple[LoggedColumn, ...]:
    """List the columns that cells of a table may belong to: static and regular ones, then dropped ones, by number."""
    present = [(column.name, column.type, column.kind == "static", False) for column in table.value_columns]
    names = {name for name, *_ in present}
    gone = [(column.name, column.type, column.kind == "static", True) for column in table.dropped]
    columns = present + [entry for entry in gone if entry[0] not in names]
    return tuple(LoggedColumn(number, *entry) for number, entry in enumerate(columns))


@dataclass(frozen=True)
class LoggedTables:
    """Tables in the form that kernels read.

    :ivar tables: the tables; the kernels' number of a table is its place here
    :ivar directory: int64[tables, 8]: id (two words), number of clustering columns, address of their lengths
        (int32 each), address and number of the static columns, address and number of the regular columns
    :ivar lookup: int64[a power of two]: table numbers by hash of the id; -1: empty slot
    :ivar kept: the arrays that ``directory`` points to
    """

    tables: tuple[TableSchema, ...]
    directory: npt.NDArray[np.int64]
    lookup: npt.NDArray[np.int64]
    kept: tuple[npt.NDArray[np.generic], ...]

    @property
    def most_columns(self) -> int:
        """The greatest number of static and regular columns in one table."""
        return int((self.directory[:, 5] + self.directory[:, 7]).max(initial=0))


def logged_tables(tables: Sequence[TableSchema]) -> LoggedTables:
    """Describe tables to the kernels.

    :raises ValueError: two tables have the same id
    """
    seen: dict[str, TableSchema] = {}
    for table in tables:
        if table.table_id in seen:
            raise ValueError(
                f"{table.full_name} and {seen[table.table_id].full_name} have the same table id {table.table_id}"
            )
        seen[table.table_id] = table
    directory = np.zeros((len(tables), TABLE_WORDS), np.int64)
    kept: list[npt.NDArray[np.generic]] = []
    hashes = column_hashes({column.name for table in tables for column in columns_of(table)})
    for entry, table in zip(directory, tables, strict=True):
        lengths = np.array([stored_length(column.type) for column in table.clustering] or [0], np.int32)
        static, regular = (_described(table, is_static, hashes, kept) for is_static in (True, False))
        kept += [lengths, static, regular]
        entry[:2] = np.frombuffer(bytes.fromhex(table.table_id), np.int64)
        entry[2:] = (
            len(table.clustering),
            address(lengths),
            address(static),
            len(static),
            address(regular),
            len(regular),
        )
    return LoggedTables(tuple(tables), directory, _lookup(directory), tuple(kept))


def _lookup(directory: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Make the hash table, at most half full, so that a search for an unknown id ends soon."""
    size = 2 << len(directory).bit_length()
    lookup = np.full(size, -1, np.int64)
    for number, entry in enumerate(directory):
        slot = int(entry[0] ^ entry[1]) & (size - 1)
        while lookup[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        lookup[slot] = number
    return lookup


def _described(
    table: TableSchema, is_static: bool, hashes: dict[str, int], kept: list[npt.NDArray[np.generic]]
) -> npt.NDArray[np.int64]:
    """Describe columns in int64[columns, 6]: address and length of the name, number, length of values (-1: variable),
    whether the column is multi-cell, hash of the name. The order is that of the column lists in commit logs: simple
    columns first, then multi-cell ones, each sorted by name (docs/formats.md, 2.5)."""
    columns = [column for column in columns_of(table) if column.is_static == is_static]
    columns.sort(key=lambda column: (column.is_multicell, column.name.encode()))
    described = np.zeros((len(columns), COLUMN_WORDS), np.int64)
    for entry, column in zip(described, columns, strict=True):
        name = padded(column.name.encode())
        kept.append(name)
        entry[:] = (
            address(name),
            len(column.name.encode()),
            column.number,
            VARIABLE if column.is_multicell else stored_length(column.type),
            column.is_multicell,
            hashes[column.name],
        )
    return described
