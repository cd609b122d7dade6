"""Stable ids of columns: stored cells find their column again after the table was altered.

In memory a cell names its column by its place among :func:`ringsync.changes.columns.columns_of`. An ``ALTER TABLE``
moves these places, so files do not store them. Files name a column by an id. A table gives each name one id and never
reuses it. Files also store the version of the table under which they were written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.columns import columns_of
from ringsync.compiled.arrow import array_of, integers, list_of, rows_of_lists, structs_of
from ringsync.cql.types import CqlType, UserType, types_inside
from ringsync.schema.table import Column, TableSchema

_NOWHERE = -1


class UnresolvedRowsError(Exception):
    """An error: stored rows name a column that this version of the table does not have."""


@dataclass(frozen=True)
class TableVersion:
    """One version of a table, and the ids of its columns.

    :ivar number: number of the version, from 1
    :ivar names: names of static and regular columns by id, including those of all earlier versions. A name stands for
        one column as long as the table exists: Cassandra refuses to add a dropped column again with another kind, or
        with a type that cannot read the bytes of before (``AlterTableStatement.AddColumns``)
    """

    table: TableSchema
    number: int
    names: tuple[str, ...]

    @property
    def table_id(self) -> str:
        """32 hexadecimal digits."""
        return self.table.table_id

    @staticmethod
    def first(table: TableSchema) -> TableVersion:
        """Return the first known version of a table."""
        names = tuple(column.name for column in columns_of(table))
        every_name = (*(column.name for column in table.key_columns), *names)
        return TableVersion(replace(table, every_name=every_name, former_keys=()), 1, names)

    def followed_by(self, table: TableSchema) -> TableVersion:
        """Return the next version: new columns get new ids."""
        new = (column.name for column in columns_of(table) if column.name not in self.names)
        return TableVersion(self.with_past(table), self.number + 1, (*self.names, *new))

    def with_past(self, table: TableSchema) -> TableSchema:
        """Return a later or equal schema of the table, or some of its columns, with what is known of those before."""
        before, labels, former_keys = self.table, dict(self.table.relabelled), self.table.former_keys
        every: dict[str, None] = dict.fromkeys(before.every_name)
        if [(key.kind, str(key.type)) for key in before.key_columns] == [
            (key.kind, str(key.type)) for key in table.key_columns
        ]:  # Else it is another table, which was created `WITH ID`.
            formers = before.former_keys or ((),) * len(before.key_columns)
            pairs = list(zip(before.key_columns, table.key_columns, formers, strict=True))
            renamed = [old.name != key.name for old, key, _ in pairs]
            former_keys = tuple(
                (*former, before.label(old.name)) if is_new else former
                for (old, _, former), is_new in zip(pairs, renamed, strict=True)
            )
            for (_, key, former), is_new in zip(pairs, renamed, strict=True):
                if is_new:
                    labels.pop(key.name, None)
                    if key.name in every and key.name not in former:
                        labels[key.name] = _fresh(key.name, every)
                every[labels.get(key.name, key.name)] = None
        else:
            former_keys = ()
        keys = {label for former in former_keys for label in former} | {key.name for key in before.key_columns}
        for column in table.value_columns:
            if self._is_another(column, table) if column.name in self.names else column.name in keys:
                labels[column.name] = _fresh(column.name, every)
        names = [*(key.name for key in table.key_columns), *(column.name for column in columns_of(table))]
        now = [labels.get(name, name) for name in names]
        return replace(
            table,
            every_name=tuple(dict.fromkeys((*before.every_name, *now))),
            former_keys=former_keys,
            relabelled=tuple(sorted(labels.items())),
        )

    def _is_another(self, column: Column, table: TableSchema) -> bool:
        """Tell whether a column was dropped, and added again with another type, since this version."""
        drops = {gone.name: gone for gone in self.table.dropped}
        there = next((known for known in self.table.value_columns if known.name == column.name), None)
        dropped_at = next((gone.dropped_at for gone in table.dropped if gone.name == column.name), None)
        gone = drops.get(column.name)
        if there is not None and dropped_at == (gone.dropped_at if gone else None):
            return False
        old = there or gone
        # User-defined types grow, and Cassandra adds no such column again.
        return old is not None and old.type != column.type and not _has_user_type(column.type)

    @cached_property
    def _ids(self) -> npt.NDArray[np.int32]:
        """Ids of columns by place."""
        return np.array([self.names.index(column.name) for column in columns_of(self.table)], np.int32)

    @cached_property
    def _places(self) -> npt.NDArray[np.int32]:
        """Places of columns by id; -1: the table has no such column, not even a dropped one."""
        places = {column.name: column.number for column in columns_of(self.table)}
        return np.array([places.get(name, _NOWHERE) for name in self.names], np.int32)

    def to_store(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return change rows that were decoded under this version in the form of files: with ids of columns."""
        at = rows.schema.get_field_index("schema_version")
        version = array_of(np.full(rows.num_rows, self.number, np.int32))
        return _renumbered(rows, self._ids).set_column(at, rows.schema.field(at), version)

    def from_store(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return stored change rows with the places of their columns in this version.

        :raises UnresolvedRowsError: they follow a later version, name a column that this version does not have, or have
            no version
        """
        highest = int(integers(rows["schema_version"]).max(initial=0))
        lowest = int(integers(rows["schema_version"]).min(initial=highest))
        if rows.num_rows and lowest < 1:
            raise UnresolvedRowsError(
                f"rows of {self.table.full_name} were staged without a version of its schema: "
                f"it is unknown whether they follow version {self.number}"
            )
        if highest > self.number:
            # A column may have been added again since: this version knows it as dropped, and would leave out its cells.
            raise UnresolvedRowsError(
                f"rows of {self.table.full_name} follow version {highest} of its schema, which is later than version "
                f"{self.number}: they wait until it is read"
            )
        for name in ("cells", "complex_deletions"):
            ids = integers(rows[name].flatten().field(0))
            unknown = (ids < 0) | (ids >= len(self._places))
            unknown[~unknown] = self._places[ids[~unknown]] == _NOWHERE
            if unknown.any():
                named = int(ids[unknown][0])
                known = self.names[named] if 0 <= named < len(self.names) else f"with id {named}"
                raise UnresolvedRowsError(
                    f"rows of {self.table.full_name} were staged under version {highest} of its schema and have the "
                    f"column {known}, which version {self.number} does not have: they wait until the newer version "
                    "is read"
                )
        return _renumbered(rows, self._places)


def _has_user_type(kind: CqlType) -> bool:
    return isinstance(kind, UserType) or any(map(_has_user_type, types_inside(kind)))


def _fresh(name: str, labels: Collection[str]) -> str:
    """Return a label for a column whose name another one had. A CQL identifier has no zero byte."""
    return next(label for number in count(2) if (label := f"{name}\0{number}") not in labels)


def _renumbered(rows: pa.RecordBatch, by: npt.NDArray[np.int32]) -> pa.RecordBatch:
    """Replace the number of each cell's column by ``by[number]``."""
    if np.array_equal(by, np.arange(len(by))):
        return rows
    for name in ("cells", "complex_deletions"):
        at = rows.schema.get_field_index(name)
        lists = rows.column(at)
        row, structs = rows_of_lists(lists)
        numbers, *others = structs.flatten()
        structs = structs_of(structs.type, [array_of(by[integers(numbers)]), *others])
        counts = np.bincount(row, minlength=len(rows))
        rows = rows.set_column(at, rows.schema.field(at), list_of(counts, structs, kind=lists.type))
    return rows
