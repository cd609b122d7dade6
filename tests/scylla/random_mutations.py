"""Random mutations of tables with all kinds of columns, with few keys and few times, so that many meet."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from tests.scylla.log_tables import Tables, tables_of
from tests.scylla_model.log_rows import log_rows
from tests.scylla_model.mutation import (
    Bound,
    Cell,
    Change,
    Collection,
    Column,
    Element,
    Key,
    Marker,
    Mutation,
    PartitionDeletion,
    RangeDeletion,
    Row,
    RowDeletion,
    UndocumentedError,
)

T = 1_606_390_225_588_900
VALUES = """a int, b text, f frozen<set<int>>, l list<int>, m map<text, int>, o u, s set<int>"""
CLUSTERED = tables_of(
    f"pk int, ck1 int, ck2 text, sa bigint static, sm map<int, text> static, {VALUES}",
    "pk, ck1, ck2",
    types="x int, y text, z int",
)
PLAIN = tables_of(f"pk1 text, pk2 int, {VALUES}", "(pk1, pk2)", types="x int, y text, z int")
ENTRIES = [UUID(f"db3214f{i}-2fe9-11eb-af55-000000000001") for i in range(3)]


class Maker:
    """Makes mutations.

    :param spread: the greatest distance of timestamps, µs
    """

    def __init__(self, tables: Tables, seed: int, spread: int = 5) -> None:
        self.tables, self.chance, self.spread = tables, Random(seed), spread

    def mutation(self) -> Mutation:
        """A mutation whose log rows are documented, and that has some."""
        while True:
            try:
                mutation = self._any()
                if log_rows(mutation):
                    return mutation
            except (UndocumentedError, ValueError):
                continue

    def _any(self) -> Mutation:
        chance, table = self.chance, self.tables.model
        key: Key = ("k", chance.randrange(2)) if len(table.partition_key) > 1 else (chance.randrange(3),)
        if not table.clustering_key:
            rows = (self._row(()),) if chance.random() < 0.8 else ()
        else:
            keys = sorted({self._clustering() for _ in range(chance.choice([0, 1, 1, 2]))})
            rows = tuple(self._row(one) for one in keys)
        static = self._changes(static=True) if table.clustering_key and chance.random() < 0.2 else ()
        deletions: tuple[RowDeletion, ...] = ()
        ranges: tuple[RangeDeletion, ...] = ()
        if table.clustering_key and chance.random() < 0.15:
            deletions = (RowDeletion(self._clustering(), self._time()),)
        if table.clustering_key and chance.random() < 0.15:
            ranges = (RangeDeletion(self._bound(), self._bound(), self._time()),)
        gone = PartitionDeletion(self._time()) if chance.random() < 0.06 else None
        return Mutation(table, key, rows, static, deletions, ranges, gone)

    def _time(self) -> int:
        return T + self.chance.randint(0, self.spread)

    def _ttl(self) -> int | None:
        return self.chance.choice([None, None, None, 10**9, 10**9 + 1])

    def _clustering(self) -> Key:
        return (self.chance.randrange(3), self.chance.choice(["", "x", "y"]))

    def _bound(self) -> Bound:
        prefix = self._clustering()[: self.chance.randrange(3)]
        return Bound(prefix, not prefix or self.chance.random() < 0.5)

    def _row(self, key: Key) -> Row:
        marker = Marker(self._time(), self._ttl()) if self.chance.random() < 0.4 else None
        return Row(key, self._changes(static=False), marker)

    def _changes(self, *, static: bool) -> tuple[Change, ...]:
        columns = [column for column in self.tables.model.columns if column.static == static]
        chosen = self.chance.sample(columns, self.chance.randint(0, min(3, len(columns))))
        return tuple(self._change(column) for column in chosen)

    def _change(self, column: Column) -> Change:
        if column.kind == "atomic":
            value = self._atomic(column.name)
            return Cell(column.name, value, self._time(), None if value is None else self._ttl())
        time, ttl = self._time(), self._ttl()
        tombstone = self.chance.choice([None, None, time - 1, time])
        keys = self.chance.sample(self._keys(column), self.chance.randint(0, 3))
        parts = tuple(self._element(column, key, time, ttl) for key in keys)
        if not parts and tombstone is None:
            tombstone = time
        return Collection(column.name, parts, tombstone)

    def _atomic(self, name: str) -> Any:
        values = {
            "a": [None, 0, 1, -1],
            "b": [None, "", "x", "äöü" * 20],
            "f": [None, frozenset(), frozenset([3, 1])],
            "sa": [None, 2**40, -1],
        }
        return self.chance.choice(values[name])

    @staticmethod
    def _keys(column: Column) -> list[Any]:
        of_maps = [1, 2, -3] if column.name == "sm" else ["", "k", "longer than sixteen bytes"]
        return {"set": [1, 2, -3], "map": of_maps, "list": ENTRIES, "udt": [0, 1, 2]}[column.kind]

    def _element(self, column: Column, key: Any, time: int, ttl: int | None) -> Element:
        if self.chance.random() < 0.3:
            return Element(key, None, time)
        if column.kind == "set":
            return Element(key, True, time, ttl)
        is_text = column.name == "sm" or (column.kind == "udt" and key == 1)
        value = self.chance.choice(["", "v", "w" * 40]) if is_text else self.chance.randint(-5, 5)
        return Element(key, value, time, ttl)
