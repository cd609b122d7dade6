"""Random mutations of a base table: every kind of write, on few keys, so that their order matters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from tests.scylla_model.log_rows import log_rows
from tests.scylla_model.mutation import (
    Bound,
    Cell,
    Change,
    Collection,
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
from tests.scylla_sim.arithmetic import timeuuid
from tests.scylla_sim.clock import SECOND
from tests.scylla_sim.tables import BaseTable, CqlColumn

EPOCH = datetime(1970, 1, 1)
WORDS = ("", "a", "b", "ringsync", "ü", "Scylla", "x" * 40)


@dataclass(frozen=True)
class Habits:
    """How often a workload does what; probabilities are per mutation.

    :ivar partitions: number of partition keys
    :ivar rows: number of values of each clustering column
    :ivar late: probability of a timestamp that is up to ``late_s`` old, s
    :ivar again: probability of the timestamp of the write before, if that was of the same table: with its key
    :ivar batch: probability of a batch of several writes to one partition
    :ivar ttl: probability of a TTL, drawn from ``ttls_s``
    """

    partitions: int = 6
    rows: int = 3
    late: float = 0.05
    late_s: float = 600.0
    again: float = 0.05
    batch: float = 0.2
    ttl: float = 0.2
    ttls_s: tuple[int, ...] = (1, 60, 86_400, 10 * 365 * 86_400)


@dataclass
class _Draft:
    """A mutation in the making. A column of a row is written once: what comes first stays."""

    rows: dict[Key, dict[str, Change]] = field(default_factory=dict)
    markers: dict[Key, Marker] = field(default_factory=dict)
    static: dict[str, Change] = field(default_factory=dict)
    row_deletions: dict[Key, RowDeletion] = field(default_factory=dict)
    range_deletion: RangeDeletion | None = None
    partition_deletion: PartitionDeletion | None = None


class Workload:
    """Random mutations of one table.

    List elements are numbered, so that no two of a table have one value: a server that names elements itself can
    still be told to remove one by its value, see :mod:`tests.scylla_sim.materialise`.
    """

    def __init__(self, rng: random.Random, table: BaseTable, habits: Habits | None = None) -> None:
        self.rng, self.table, self.habits = rng, table, habits or Habits()
        rng = self.rng
        count = self.habits.partitions
        self.keys = [tuple(_value(rng, cql, 10**6) for _, cql in table.partition_key) for _ in range(count)]
        self.clusterings = [
            sorted({_value(rng, cql, self.habits.rows) for _ in range(self.habits.rows * 3)})[: self.habits.rows]
            for _, cql in table.clustering_key
        ]
        self._last: Mutation | None = None
        self._last_time, self._again = 0, False
        self._listed: dict[tuple[Key, str, Key], list[tuple[UUID, int]]] = {}
        self._number = 0

    def mutation(self, now_us: int) -> Mutation:
        """Draw a mutation.

        :param now_us: what its timestamps are about, µs since the epoch
        """
        rng, habits = self.rng, self.habits
        time, key = now_us, rng.choice(self.keys)
        self._again = self._last is not None and rng.random() < habits.again
        if self._last and self._again:
            time, key = self._last_time, self._last.key
        elif rng.random() < habits.late:
            time -= round(rng.uniform(0, habits.late_s) * SECOND)
        while True:
            number = rng.randint(2, 5) if rng.random() < habits.batch else 1
            spread = rng.choice((0, 0, 1, 3))
            listed = {place: list(elements) for place, elements in self._listed.items()}
            draft = _Draft()
            for _ in range(number):
                self._add(draft, key, time + rng.randint(0, spread))
            try:
                made = self._made(draft, key)
                log_rows(made)
            except UndocumentedError:
                self._listed = listed
                continue
            if made.rows or made.static or made.row_deletions or made.range_deletions or made.partition_deletion:
                self._last, self._last_time = made, time
                return made

    def _made(self, draft: _Draft, key: Key) -> Mutation:
        names = dict.fromkeys([*draft.rows, *draft.markers])
        rows = [Row(one, tuple(draft.rows.get(one, {}).values()), draft.markers.get(one)) for one in names]
        return Mutation(
            self.table.model,
            key,
            tuple(row for row in rows if row.changes or row.marker),
            tuple(draft.static.values()),
            tuple(draft.row_deletions.values()),
            (draft.range_deletion,) if draft.range_deletion else (),
            draft.partition_deletion,
        )

    def _add(self, draft: _Draft, key: Key, time: int) -> None:
        """Add one statement to a mutation."""
        table = self.table
        kinds: dict[Callable[[_Draft, Key, int], None], int] = {self._insert: 30, self._update: 40, self._delete: 2}
        if table.clustering_key:
            kinds |= {self._delete_row: 8, self._delete_range: 5}
        if any(column.static for column in table.columns):
            kinds[self._static] = 12
        self.rng.choices(list(kinds), list(kinds.values()))[0](draft, key, time)

    def _insert(self, draft: _Draft, key: Key, time: int) -> None:
        row, ttl = self._row(), self._ttl()
        columns = [column for column in self.table.columns if not column.static and self.rng.random() < 0.6]
        if ttl is not None:
            # With both no document tells which rows the log has: see tests.scylla_model.log_rows.
            atomic = self.rng.random() < 0.5
            columns = [column for column in columns if (column.kind == "atomic") == atomic]
        for column in columns:
            self._put(draft.rows.setdefault(row, {}), column, key, row, time, ttl, "overwrite")
        draft.markers.setdefault(row, Marker(time, ttl))

    def _update(self, draft: _Draft, key: Key, time: int) -> None:
        row, ttl = self._row(), self._ttl()
        columns = [column for column in self.table.columns if not column.static]
        for column in self.rng.sample(columns, self.rng.randint(1, min(3, len(columns)))):
            self._put(draft.rows.setdefault(row, {}), column, key, row, time, ttl)

    def _static(self, draft: _Draft, key: Key, time: int) -> None:
        columns, ttl = [column for column in self.table.columns if column.static], self._ttl()
        for column in self.rng.sample(columns, self.rng.randint(1, len(columns))):
            self._put(draft.static, column, key, ("static",), time, ttl)

    def _delete(self, draft: _Draft, _: Key, time: int) -> None:
        draft.partition_deletion = draft.partition_deletion or PartitionDeletion(time)

    def _delete_row(self, draft: _Draft, _: Key, time: int) -> None:
        row = self._row()
        draft.row_deletions.setdefault(row, RowDeletion(row, time))

    def _delete_range(self, draft: _Draft, _: Key, time: int) -> None:
        """A range of the last column under a prefix, of the first one, or all of a prefix."""
        row = self._row()
        known = self.rng.randrange(len(row))
        if known and self.rng.random() < 0.3:
            whole = Bound(row[:known])
            draft.range_deletion = draft.range_deletion or RangeDeletion(whole, whole, time)
            return
        others = [self._row()[known] for _ in range(2)]
        first, last = sorted(others) if self.rng.random() < 0.95 else others
        bounds = [Bound((*row[:known], one), self.rng.random() < 0.5) for one in (first, last)]
        if self.rng.random() < 0.3:
            bounds[self.rng.randrange(2)] = Bound(row[:known])
        draft.range_deletion = draft.range_deletion or RangeDeletion(bounds[0], bounds[1], time)

    def _row(self) -> Key:
        return self.table.clustering(*(self.rng.choice(values) for values in self.clusterings))

    def _ttl(self) -> int | None:
        if self._again:
            # Of two TTLs at one timestamp the one that expires later wins: when the writes came decides, not what they
            # say. A write without TTL loses for certain.
            return None
        if self.rng.random() < self.habits.ttl:
            return self.rng.choice(self.habits.ttls_s)
        return self.table.default_ttl_s or None

    def _put(
        self,
        changes: dict[str, Change],
        column: CqlColumn,
        key: Key,
        row: Key,
        time: int,
        ttl: int | None,
        way: str = "",
    ) -> None:
        """Write a column, if the mutation does not yet.

        :param way: ``overwrite``: the whole collection; '': any way
        """
        if column.name in changes:
            return
        if column.kind == "atomic":
            value = None if self.rng.random() < 0.2 else _value(self.rng, column.cql)
            changes[column.name] = Cell(column.name, value, time, None if value is None else ttl)
            return
        way = way or self.rng.choice(("overwrite", "add", "add", "remove", "mixed", "clear"))
        if way == "clear":
            # A DELETE of the column; its tombstone has the statement's own time.
            changes[column.name] = Collection(column.name, tombstone=time)
            return
        elements = self._elements(column, (key, column.name, row), time, ttl, way)
        if elements or way == "overwrite":
            changes[column.name] = Collection(column.name, elements, time - 1 if way == "overwrite" else None)

    def _elements(
        self, column: CqlColumn, place: tuple[Key, str, Key], time: int, ttl: int | None, way: str
    ) -> tuple[Element, ...]:
        if column.kind == "list":
            return self._list_elements(place, time, ttl, way)
        if column.kind == "udt":
            paths: list[Any] = self.rng.sample(range(len(column.fields)), self.rng.randint(1, len(column.fields)))
            types = {path: column.fields[path][1] for path in paths}
        else:
            element = column.cql if column.kind == "set" else column.key
            paths = sorted(
                {_value(self.rng, element, 5) for _ in range(self.rng.randint(0 if way == "overwrite" else 1, 3))}
            )
            types = dict.fromkeys(paths, column.cql)
        found = []
        for path in paths:
            removed = way == "remove" or (way == "mixed" and self.rng.random() < 0.5)
            if removed:
                found.append(Element(path, None, time))
            else:
                found.append(Element(path, True if column.kind == "set" else _value(self.rng, types[path]), time, ttl))
        return tuple(found)

    def _list_elements(self, place: tuple[Key, str, Key], time: int, ttl: int | None, way: str) -> tuple[Element, ...]:
        """Elements that are appended, each with a new number, or removed; nothing is put in front."""
        known = self._listed.setdefault(place, [])
        if way in ("remove", "mixed"):
            removed = self.rng.sample(known, min(len(known), self.rng.randint(1, 2)))
            return tuple(Element(one, None, time) for one, _ in removed)
        added = []
        for _ in range(self.rng.randint(0 if way == "overwrite" else 1, 3)):
            self._number += 1
            # Ids ascend, whatever the timestamps: a server makes them by its clock when the write comes.
            added.append((timeuuid(self.rng, LIST_IDS_SINCE_US + self._number), self._number))
        known += added
        return tuple(Element(one, number, time, ttl) for one, number in added)


LIST_IDS_SINCE_US = 1_690_000_000 * SECOND


def _value(rng: random.Random, cql: str, distinct: int = 1000) -> Any:
    """A value of a type out of so many."""
    number = rng.randrange(distinct)
    if cql == "text":
        return WORDS[number] if number < len(WORDS) and distinct < 1000 else f"t{number}"
    return {
        "int": number - distinct // 2,
        "bigint": number * 10**12 - 7,
        "blob": bytes(rng.randrange(256) for _ in range(number % 9)),
        "boolean": number % 2 == 0,
        "double": number / 8 - 3,
        "decimal": Decimal(number).scaleb(-(number % 5)),
        "timestamp": EPOCH + timedelta(days=19_000, milliseconds=number * 37),
        "uuid": UUID(int=number * 2**64 + (4 << 76) + (2 << 62)),
    }[cql]
