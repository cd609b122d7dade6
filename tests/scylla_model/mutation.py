"""A mutation of one partition of a base table, as ScyllaDB's CDC sees it: what is written, each part with its time.

Timestamps are in µs, TTLs in s; a TTL of None is none at all. Keys and values are plain Python values, and clustering
keys are compared as such: a table with a descending clustering order is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

Kind = Literal["atomic", "set", "map", "list", "udt"]
"""``atomic`` is every type that is one cell: also frozen collections, frozen UDTs, tuples and vectors."""
Key = tuple[Any, ...]


class UndocumentedError(Exception):
    """No document tells which log rows such a mutation gives."""


@dataclass(frozen=True)
class Column:
    """A column that is no part of the primary key.

    :param fields: of a non-frozen UDT, in the order of DESCRIBE TYPE
    """

    name: str
    kind: Kind = "atomic"
    static: bool = False
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The base table."""

    partition_key: tuple[str, ...]
    clustering_key: tuple[str, ...]
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True)
class Marker:
    """The row marker that an INSERT writes."""

    timestamp: int
    ttl: int | None = None

    def __post_init__(self) -> None:
        _check_ttl(self.ttl, live=True)


@dataclass(frozen=True)
class Cell:
    """An atomic column's cell; a value of None is a tombstone."""

    column: str
    value: Any
    timestamp: int
    ttl: int | None = None

    def __post_init__(self) -> None:
        _check_ttl(self.ttl, live=self.value is not None)


@dataclass(frozen=True)
class Element:
    """One cell of a collection.

    :param key: the element of a set, the key of a map, the timeuuid of a list's element, the index of a UDT's field
    :param value: True for a set's element; None removes the element
    """

    key: Any
    value: Any
    timestamp: int
    ttl: int | None = None

    def __post_init__(self) -> None:
        _check_ttl(self.ttl, live=self.value is not None)


@dataclass(frozen=True)
class Collection:
    """What a mutation changes in a non-frozen collection or UDT.

    :param tombstone: the timestamp of the tombstone over all elements; None: there is none. An overwrite at T has it
        at T-1, a DELETE of the column at T has it at T.
    """

    column: str
    elements: tuple[Element, ...] = ()
    tombstone: int | None = None


Change = Cell | Collection


@dataclass(frozen=True)
class Row:
    """What is written to one row, not its deletion. A table without clustering key has the row ``()``."""

    key: Key
    changes: tuple[Change, ...] = ()
    marker: Marker | None = None

    def __post_init__(self) -> None:
        _check_once(self.changes)


@dataclass(frozen=True)
class RowDeletion:
    """A row tombstone."""

    key: Key
    timestamp: int


@dataclass(frozen=True)
class Bound:
    """One end of a range of rows: a prefix of the clustering key. The empty prefix is no bound."""

    prefix: Key = ()
    inclusive: bool = True

    def __post_init__(self) -> None:
        if not self.prefix and not self.inclusive:
            raise ValueError("no bound is inclusive")


@dataclass(frozen=True)
class RangeDeletion:
    """A range tombstone."""

    start: Bound
    end: Bound
    timestamp: int

    def __post_init__(self) -> None:
        if not self.start.prefix and not self.end.prefix:
            raise ValueError("a range without bounds is a partition deletion")

    @property
    def degenerate(self) -> bool:
        """Whether no clustering key can be in the range."""
        return _is_empty(self.start, self.end)

    def overlaps(self, other: RangeDeletion) -> bool:
        """Whether a clustering key can be in both ranges."""
        return not _is_empty(self.start, other.end) and not _is_empty(other.start, self.end)


@dataclass(frozen=True)
class PartitionDeletion:
    """A partition tombstone."""

    timestamp: int


@dataclass(frozen=True)
class Mutation:
    """All changes of one partition that one write, or one batch, makes.

    :param static: what is written to the static row
    :param range_deletions: in clustering order; how ranges that overlap are logged is not documented
    """

    table: Table
    key: Key
    rows: tuple[Row, ...] = ()
    static: tuple[Change, ...] = ()
    row_deletions: tuple[RowDeletion, ...] = ()
    range_deletions: tuple[RangeDeletion, ...] = ()
    partition_deletion: PartitionDeletion | None = None

    def __post_init__(self) -> None:
        table = self.table
        _check_once(self.static)
        if len(self.key) != len(table.partition_key):
            raise ValueError("the partition key is not whole")
        keys = [row.key for row in self.rows]
        if len(set(keys)) < len(keys):
            raise ValueError("a mutation has each row once")
        if any(len(key) != len(table.clustering_key) for key in [*keys, *(one.key for one in self.row_deletions)]):
            raise ValueError("a clustering key is not whole")
        if not table.clustering_key and (self.row_deletions or self.range_deletions):
            raise ValueError("without clustering key a row is deleted with its partition")
        ranges = [one for one in self.range_deletions if not one.degenerate]
        if any(one.overlaps(other) for one, other in combinations(ranges, 2)):
            raise UndocumentedError("range deletions that overlap")
        written = [(change, False) for row in self.rows for change in row.changes]
        for change, static in [*written, *((change, True) for change in self.static)]:
            column = table.column(change.column)
            if column.static != static or (column.kind == "atomic") != isinstance(change, Cell):
                raise ValueError(f"column {column.name} takes no such change")


def _is_empty(start: Bound, end: Bound) -> bool:
    """Whether no clustering key can be between the two."""
    common = min(len(start.prefix), len(end.prefix))
    first, last = start.prefix[:common], end.prefix[:common]
    if first != last:
        return bool(first > last)
    if len(start.prefix) == len(end.prefix):
        return not (start.inclusive and end.inclusive)
    # The shorter bound decides: if it leaves its own prefix out, then also every key of the longer one.
    shorter = start if len(start.prefix) == common else end
    return not shorter.inclusive


def _check_ttl(ttl: int | None, live: bool) -> None:
    if ttl is not None and (ttl <= 0 or not live):
        raise ValueError("a tombstone has no TTL" if not live else f"a TTL of {ttl} s")


def _check_once(changes: tuple[Change, ...]) -> None:
    names = [change.column for change in changes]
    if len(set(names)) < len(names):
        raise ValueError("a row of a mutation has each column once")
