"""A mutation of the model as CQL statements that write the same into a Cassandra table: each part with its time.

What cannot be said in CQL is the id of a list's element: the server makes it by its clock. Elements come in the order
of their writes, as the workload's do, and one is removed by its value, which no other has. So the values of a list,
their order and their times are those of the model; the ids are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from cassandra.query import UNSET_VALUE

from tests.scylla_model.mutation import Bound, Cell, Change, Collection, Element, Key, Mutation, RangeDeletion
from tests.scylla_sim.tables import BaseTable, CqlColumn, plain

Statement = tuple[str, tuple[Any, ...]]
"""CQL to prepare, and what to bind."""


class Statements:
    """Makes the statements of one table. They are few: what is not written is bound as unset.

    :ivar table: may be replaced by the same with other columns
    """

    def __init__(self, table: BaseTable) -> None:
        self.table = table
        self._partition = [name for name, _ in table.partition_key]
        self._clustering = [name for name, _ in table.clustering_key]
        # What each element of a list is, by its id in the log.
        self._numbers: dict[UUID, Any] = {}

    def of(self, mutation: Mutation) -> list[Statement]:
        """The statements of a mutation, in any order."""
        return list(self._of(mutation))

    def touches_lists(self, mutation: Mutation) -> bool:
        """Whether a mutation writes elements of lists: those of a partition are to be written in their order."""
        changes = [*mutation.static, *(change for row in mutation.rows for change in row.changes)]
        return any(self.table.column(change.column).kind == "list" for change in changes)

    def _of(self, mutation: Mutation) -> Iterator[Statement]:
        name, key = self.table.full_name, mutation.key
        yield from self._written(key, None, mutation.static)
        for row in mutation.rows:
            if row.marker:
                columns = [*self._partition, *self._clustering]
                marks = ", ".join("?" for _ in columns)
                text = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({marks}) USING TIMESTAMP ? AND TTL ?"
                yield text, (*key, *map(plain, row.key), row.marker.timestamp, row.marker.ttl or 0)
            yield from self._written(key, row.key, row.changes)
        for deletion in mutation.row_deletions:
            where, values = self._where(key, deletion.key)
            yield f"DELETE FROM {name} USING TIMESTAMP ? WHERE {where}", (deletion.timestamp, *values)
        for one in mutation.range_deletions:
            # A degenerate range deletes nothing; Cassandra has no reason to be asked.
            if not one.degenerate:
                where, values = self._range(key, one)
                yield f"DELETE FROM {name} USING TIMESTAMP ? WHERE {where}", (one.timestamp, *values)
        if mutation.partition_deletion:
            where, values = self._where(key, None)
            yield (
                f"DELETE FROM {name} USING TIMESTAMP ? WHERE {where}",
                (mutation.partition_deletion.timestamp, *values),
            )

    def _where(self, key: Key, clustering: Key | None) -> tuple[str, tuple[Any, ...]]:
        """The restriction to a row, or to the partition."""
        names = [*self._partition, *(self._clustering if clustering is not None else [])]
        return " AND ".join(f"{name} = ?" for name in names), (*key, *map(plain, clustering or ()))

    def _range(self, key: Key, deletion: RangeDeletion) -> tuple[str, tuple[Any, ...]]:
        """The restriction to a range: the columns that both bounds have the same, then at most one column's bounds."""
        start, end = deletion.start, deletion.end
        same = 0
        while same < min(len(start.prefix), len(end.prefix)) and start.prefix[same] == end.prefix[same]:
            same += 1
        if max(len(start.prefix), len(end.prefix)) > same + 1:
            raise ValueError(f"CQL has no word for {deletion}")
        terms = [f"{name} = ?" for name in [*self._partition, *self._clustering[:same]]]
        values = [*key, *map(plain, start.prefix[:same])]
        for bound, sign in ((start, ">"), (end, "<")):
            if len(bound.prefix) > same:
                terms.append(self._bound(bound, same, sign))
                values.append(plain(bound.prefix[same]))
            elif not bound.inclusive:
                raise ValueError(f"CQL has no word for {deletion}")
        return " AND ".join(terms), tuple(values)

    def _bound(self, bound: Bound, place: int, sign: str) -> str:
        name = self._clustering[place]
        if name in self.table.descending:
            sign = {">": "<", "<": ">"}[sign]
        return f"{name} {sign}{'=' * bound.inclusive} ?"

    def _written(self, key: Key, row: Key | None, changes: tuple[Change, ...]) -> Iterator[Statement]:
        """The statements for what is written to a row; None: to the static one."""
        cells: dict[tuple[int, int], dict[str, Any]] = {}
        for change in changes:
            if isinstance(change, Cell):
                cells.setdefault((change.timestamp, change.ttl or 0), {})[change.column] = change.value
            else:
                yield from self._collection(key, row, change)
        names = [one.name for one in self.table.columns if one.kind == "atomic" and one.static == (row is None)]
        for (timestamp, ttl), values in cells.items():
            bound = tuple(values.get(name, UNSET_VALUE) for name in names)
            yield self._update(key, row, ", ".join(f"{name} = ?" for name in names), bound, timestamp, ttl)

    def _update(
        self, key: Key, row: Key | None, change: str, bound: tuple[Any, ...], timestamp: int, ttl: int
    ) -> Statement:
        where, values = self._where(key, row)
        text = f"UPDATE {self.table.full_name} USING TIMESTAMP ? AND TTL ? SET {change} WHERE {where}"
        return text, (timestamp, ttl, *bound, *values)

    def _collection(self, key: Key, row: Key | None, change: Collection) -> Iterator[Statement]:
        column = self.table.column(change.column)
        if change.tombstone is not None:
            where, values = self._where(key, row)
            text = f"DELETE {column.name} FROM {self.table.full_name} USING TIMESTAMP ? WHERE {where}"
            yield text, (change.tombstone, *values)
        parts: dict[tuple[int, int, bool], list[Element]] = {}
        for element in change.elements:
            removed = element.value is None and column.kind != "udt"
            parts.setdefault((element.timestamp, element.ttl or 0, removed), []).append(element)
        for (timestamp, ttl, removed), elements in parts.items():
            if column.kind == "udt":
                fields = {element.key: element.value for element in elements}
                bound = tuple(fields.get(place, UNSET_VALUE) for place in range(len(column.fields)))
                text = ", ".join(f"{column.name}.{field} = ?" for field, _ in column.fields)
                yield self._update(key, row, text, bound, timestamp, ttl)
            else:
                value = self._operand(column, elements, removed)
                text = f"{column.name} = {column.name} {'-' if removed else '+'} ?"
                if value:
                    yield self._update(key, row, text, (value,), timestamp, ttl)

    def _operand(self, column: CqlColumn, elements: list[Element], removed: bool) -> Any:
        """What is added to a collection or taken from it."""
        if column.kind == "list":
            if not removed:
                self._numbers |= {element.key: element.value for element in elements}
            return [self._numbers[element.key] for element in elements if element.key in self._numbers]
        if removed or column.kind == "set":
            return {element.key for element in elements}
        return {element.key: element.value for element in elements}
