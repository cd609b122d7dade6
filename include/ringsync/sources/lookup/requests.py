"""The grouping of keys into requests, and the SELECT of each kind of request.

Requests for single rows cost the driver more than the server (the goal is 20,000 rows/s). So one request asks for many
keys with ``IN``: some partitions of one replica, in token order, and all clusterings that are wanted in any of them.
The server returns the rows of the cross product, and the reader drops the unwanted ones. To keep these few, partitions
with the same wanted clusterings share requests, partitions with different ones form smaller groups, and a partition
with many wanted rows gets requests of its own.

A node reads all that a request lists into memory. So the reader cuts lists to what is known of the rows' bytes
(:func:`divided`), and the first rows of a partition with many, which may be unlike all others, are asked for first.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import numpy as np
import numpy.typing as npt

from ringsync.cluster.page_size import STEP
from ringsync.compiled.arrow import Integers
from ringsync.cql.identifiers import quote
from ringsync.images.from_pages import ResultColumn
from ringsync.ring.ranks import RankedRing
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.keys import STATIC, WHOLE, RowKeys, differs, list_of
from ringsync.sources.scan.pages import Request
from ringsync.sources.scan.scan import scan_query
from ringsync.sources.scan.where import all_of

PARTITIONS = 50
"""Most partitions in a request: one slow partition fails all of it, and the coordinator holds the whole answer."""
MIXED_PARTITIONS = 16
"""The same if they want different clusterings: the server looks for each clustering in each partition."""
WHOLE_PARTITIONS = 10
"""The same if all rows of the partitions are wanted."""
FEW_ROWS = 3
"""Most wanted rows of a partition that shares its request with others."""
CLUSTERINGS = 100
"""Most rows in a request for a single partition."""
COMMON = 8
"""Least number of partitions with the same wanted clusterings that are kept apart from the others."""

Kind = Literal["rows", "static", "whole"]
"""Rows by their keys; static columns of partitions; whole partitions."""


@dataclass(frozen=True)
class Lookup:
    """Keys that are asked for together.

    :ivar keys: places of the keys in the :class:`RowKeys`; the keys of a partition are neighbours
    :ivar endpoints: ``address:port`` of the replicas; the first one is asked first
    :ivar most_keys: most keys in the next request; while they are fewer than :data:`CLUSTERINGS`, the others wait for
        its answer, and ten times as many are next
    :ivar patient: whether the request is repeated if it fails
    """

    kind: Kind
    keys: Integers
    endpoints: tuple[str, ...]
    most_keys: int = sys.maxsize
    patient: bool = False


@dataclass(frozen=True)
class LookupQuery:
    """A SELECT for lookups of one kind.

    :ivar table: the table, with the columns that it selects
    """

    cql: str
    table: TableSchema
    layout: tuple[ResultColumn, ...]


def lookup_query(table: TableSchema, kind: Kind, *, element_times: bool, server_time: bool = False) -> LookupQuery:
    """Return the SELECT for a kind of lookup.

    :param element_times, server_time: see :func:`ringsync.sources.scan.scan.scan_query`
    """
    if kind == "static":
        table = replace(table, columns=table.of_kind("partition_key", "static"))
    scan = scan_query(table, times=True, element_times=element_times, server_time=server_time)
    select = scan.select.replace("SELECT", "SELECT DISTINCT", 1) if kind == "static" else scan.select
    *first, last = (quote(column.name) for column in table.partition_key)
    conditions = [*(f"{name} = ?" for name in first), f"{last} IN ?"]
    clustering = ", ".join(quote(column.name) for column in table.clustering)
    if clustering and kind != "whole":
        conditions.append(f"{clustering} IN ?" if len(table.clustering) == 1 else f"({clustering}) IN ?")
    return LookupQuery(f"{select} WHERE {all_of(conditions)}", table, scan.layout)


def request_of(lookup: Lookup, cql: str, keys: RowKeys) -> Request:
    """Return the request for a lookup's rows. Its answer may have unwanted rows, too."""
    partitions = keys.partitions[lookup.keys]
    partitions = partitions[differs(partitions)]
    prefix = [part[int(partitions[0])].as_py() for part in keys.partition_parts[:-1]]
    values = (*prefix, list_of(keys.last_frames, partitions))
    if lookup.kind == "whole":
        return Request(cql, values, thorough=len(partitions) == 1, begins_small=True)
    if lookup.kind == "static" or not keys.clustering_parts:
        return Request(cql, values, limit=len(partitions), listed=len(partitions))
    clusterings = np.unique(keys.clusterings[lookup.keys])
    listed = list_of(keys.clustering_frames, clusterings)
    return Request(cql, (*values, listed), limit=len(partitions) * len(clusterings), listed=len(lookup.keys))


def divided(lookup: Lookup, most: int) -> tuple[Lookup, Lookup | None]:
    """Return the lookup of the first keys, and that of all others.

    :param most: most keys of the first one
    """
    if len(lookup.keys) <= most:
        return lookup, None
    next_most = max(lookup.most_keys, min(CLUSTERINGS, STEP * lookup.most_keys))
    return replace(lookup, keys=lookup.keys[:most]), replace(lookup, keys=lookup.keys[most:], most_keys=next_most)


def halves(lookup: Lookup, keys: RowKeys) -> list[Lookup]:
    """Divide a lookup into two, between partitions if it has several; a single key gives an empty list."""
    if len(lookup.keys) == 1:
        return []
    starts = np.flatnonzero(differs(keys.partitions[lookup.keys]))
    middle = int(starts[len(starts) // 2]) or len(lookup.keys) // 2
    return [replace(lookup, keys=part) for part in (lookup.keys[:middle], lookup.keys[middle:])]


def plan_lookups(keys: RowKeys, ring: RankedRing) -> list[Lookup]:
    """Group keys into lookups. Consecutive lookups ask different replicas first, as far as possible. Otherwise they are
    in no order: those of partition keys with the same first columns, whose rows may be wider than others, are apart.

    :param ring: ring snapshot whose first rank is asked first
    """
    planner = _Planner(keys, ring)
    lookups = [*planner.rows(np.flatnonzero(keys.clusterings >= 0))]
    if keys.table.of_kind("static"):
        lookups += planner.partitions("static", np.flatnonzero(keys.clusterings == STATIC), PARTITIONS)
    lookups += planner.partitions("whole", np.flatnonzero(keys.clusterings == WHOLE), WHOLE_PARTITIONS)
    # Take one lookup of each group in turn.
    turn = defaultdict[int, Iterator[int]](count)
    mixed = [lookups[place] for place in np.random.default_rng(0).permutation(len(lookups)).tolist()]
    turns = [(next(turn[group]), place) for place, (group, _) in enumerate(mixed)]
    return [mixed[place][1] for _, place in sorted(turns)]


class _Planner:
    """Divides keys into lookups. Each comes with the number of the group of replicas that it asks."""

    def __init__(self, keys: RowKeys, ring: RankedRing) -> None:
        self._keys = keys
        ranges = ring.numbers_of(keys.tokens)
        groups: dict[tuple[str, ...], int] = {}
        group_of = np.zeros(len(ring.ranges), np.int64)
        for number in np.unique(ranges).tolist():
            endpoints = tuple(host.endpoint for host in ring.hosts[number])
            group_of[number] = groups.setdefault(endpoints, len(groups))
        self._endpoints = tuple(groups)
        self._groups = group_of[ranges]

    def rows(self, chosen: Integers) -> Iterator[tuple[int, Lookup]]:
        """Return lookups of rows."""
        if not self._keys.clustering_parts:
            yield from self.partitions("rows", chosen, PARTITIONS)
            return
        counts = np.bincount(self._keys.partitions[chosen], minlength=len(self._keys.partition_keys))
        few = counts[self._keys.partitions[chosen]] <= FEW_ROWS
        many = chosen[~few]
        for start, end in _cuts(differs(self._keys.partitions[many])):
            group, lookup = self._lookup("rows", many[start:end])
            yield group, replace(lookup, most_keys=1)
        alike, ordered = self._alike(chosen[few])
        changes = differs(*self._apart(ordered), alike)
        yield from self._by_partitions("rows", ordered, changes, np.where(alike >= 0, PARTITIONS, MIXED_PARTITIONS))

    def partitions(self, kind: Kind, chosen: Integers, most: int) -> Iterator[tuple[int, Lookup]]:
        """Return lookups of keys, given at most one key of each partition.

        :param most: most partitions in a lookup
        """
        groups, prefixes = self._apart(chosen)
        ordered = chosen[np.lexsort((chosen, prefixes, groups))]
        yield from self._by_partitions(kind, ordered, differs(*self._apart(ordered)), np.full(len(ordered), most))

    def _alike(self, chosen: Integers) -> tuple[Integers, Integers]:
        """Sort keys so that those that may share a lookup are neighbours.

        :returns: a number for each key, and the keys. The number is equal for keys whose partitions want the same
            clusterings; it is -1 if fewer than :data:`COMMON` partitions want these
        """
        partitions, clusterings = self._keys.partitions[chosen], self._keys.clusterings[chosen]
        starts = np.flatnonzero(differs(partitions))
        partition = np.cumsum(differs(partitions)) - 1
        position = np.arange(len(chosen)) - starts[partition]
        sets = np.zeros(len(starts), np.int64)
        for place in range(FEW_ROWS):
            there = position == place
            # Pack two numbers below 2^31 into one.
            sets <<= 31
            sets[partition[there]] += clusterings[there] + 1
            _, sets, counts = np.unique(sets, return_inverse=True, return_counts=True)
        alike = np.where(counts[sets] >= COMMON, sets, -1)[partition]
        groups, prefixes = self._apart(chosen)
        order = np.lexsort((chosen, alike, prefixes, groups))
        return alike[order], chosen[order]

    def _apart(self, chosen: Integers) -> tuple[Integers, Integers]:
        """Return what the keys of a lookup must share: replicas, and all partition key columns but the last."""
        return self._groups[chosen], self._keys.prefixes[self._keys.partitions[chosen]]

    def _by_partitions(
        self, kind: Kind, ordered: Integers, changes: npt.NDArray[np.bool_], most: Integers
    ) -> Iterator[tuple[int, Lookup]]:
        """Cut keys into lookups at changes, and after ``most`` partitions."""
        first = np.flatnonzero(differs(self._keys.partitions[ordered]))
        limits = [*first.tolist(), len(ordered)]
        for start, end in _cuts(changes[first], most[first]):
            yield self._lookup(kind, ordered[limits[start] : limits[end]])

    def _lookup(self, kind: Kind, keys: Integers) -> tuple[int, Lookup]:
        group = int(self._groups[keys[0]])
        return group, Lookup(kind, keys, self._endpoints[group])


def _cuts(changes: npt.NDArray[np.bool_], most: int | Integers | None = None) -> Iterator[tuple[int, int]]:
    """Return starts and ends of the runs between changes, cut where they are longer than ``most``."""
    places = np.arange(len(changes))
    if most is not None:
        runs = np.flatnonzero(changes)
        changes = changes | ((places - runs[np.cumsum(changes) - 1]) % most == 0)
    starts = places[changes].tolist()
    yield from zip(starts, [*starts[1:], len(changes)][: len(starts)], strict=True)
