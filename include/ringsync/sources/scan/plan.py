"""The plan of a scan: everything a task needs to read its part of a table, as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ringsync.ring.splits import ReplicaRange, Split, interleaved, split_of
from ringsync.ring.tokens import WHOLE_RING, TokenRange, TokenSet, overlaps, union
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import TableSchema

FORMAT_VERSION = 2


EXPIRY_SLACK_S = 4
"""So much do expiries differ at most that are read without a moment, s: TTLs are whole seconds, and a write time within
two seconds of the arrival stands for it (:mod:`ringsync.scylla.log_rows`)."""


@dataclass(frozen=True)
class Selection:
    """The part of a table that a scan reads.

    :ivar columns: names of the value columns; None: all of them. Key columns are always read
    :ivar token_range: tokens to read; None: the whole ring
    :ivar where: condition on key columns, see :mod:`ringsync.sources.scan.where`; None: all rows
    """

    columns: tuple[str, ...] | None = None
    token_range: TokenRange | None = None
    where: str | None = None

    @property
    def ranges(self) -> TokenSet:
        """The tokens to read."""
        return union([self.token_range or WHOLE_RING])

    def to_json(self) -> str:
        """Write the selection as a JSON object, equal for equal selections."""
        token_range = self.token_range and [self.token_range.start, self.token_range.end]
        columns = self.columns and sorted(self.columns)
        return json.dumps({"columns": columns, "token_range": token_range, "where": self.where})

    @staticmethod
    def from_json(text: str) -> Selection:
        """Read a selection from JSON (:meth:`to_json`)."""
        document = json.loads(text)
        return Selection(
            columns=document["columns"] and tuple(document["columns"]),
            token_range=document["token_range"] and TokenRange(*document["token_range"]),
            where=document["where"],
        )


@dataclass(frozen=True)
class ScanPlan:
    """The decisions about a scan of a table.

    :ivar table: the table with the selected columns only
    :ivar now: moment for the expiry of all rows, seconds since the epoch
    :ivar element_times: whether the times of elements of collections and user-defined types are read, too
    :ivar unrepresentable_values: treatment of values that the Arrow type cannot hold
    :ivar ring_digest: digest of the ring snapshot that the splits were made from
    :ivar exact_expiry: whether the server reads as of ``now``, so that expiries are exact. Else they are to a second,
        and rows are as of the moment when each is read
    :ivar beginning_rows: most rows of a page of beginnings of partitions (:mod:`ringsync.sources.scan.beginnings`).
        None: the table has no large partitions, and they are not read
    """

    table: TableSchema
    selection: Selection
    now: int
    times: bool
    element_times: bool
    consistency_level: str
    unrepresentable_values: Literal["error", "raw"]
    ring_digest: str
    splits: tuple[Split, ...]
    exact_expiry: bool = True
    beginning_rows: int | None = None

    def to_json(self) -> str:
        """Write the plan as a JSON object, for :meth:`from_json`."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                **vars(self),
                "table": describe(self.table),
                "selection": self.selection.to_json(),
                "splits": [split_to_json(split) for split in self.splits],
            }
        )

    @staticmethod
    def from_json(text: str) -> ScanPlan:
        """Read a plan from JSON (:meth:`to_json`).

        :raises ValueError: the text is not a plan of this version
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError(f"this is not a scan plan of format version {FORMAT_VERSION}: {text[:80]}")
        table = from_description(document.pop("table"))
        selection = Selection.from_json(document.pop("selection"))
        splits = tuple(split_from_json(split) for split in document.pop("splits"))
        return ScanPlan(table=table, selection=selection, splits=splits, **document)


def within(plan: ScanPlan, ranges: Iterable[tuple[int, int]]) -> ScanPlan:
    """Restrict a plan to a part of the ring; the rest of a split stays one task.

    :param ranges: token ranges (start, end], disjoint, without wrap
    """
    return parted(plan, [ranges])


def parted(plan: ScanPlan, parts: Iterable[Iterable[tuple[int, int]]]) -> ScanPlan:
    """Restrict a plan to parts of the ring, each of which has tasks of its own, however large its splits are. Tasks
    that start together ask different hosts.

    :param parts: token ranges (start, end] of each, all of them disjoint, without wrap
    """
    wanted = sorted((TokenRange(*bounds), number) for number, ranges in enumerate(parts) for bounds in ranges)
    there = [(number, part) for number, split in enumerate(plan.splits) for part in split.ranges]
    cut: dict[tuple[int, int], list[ReplicaRange]] = defaultdict(list)
    for place, at, both in overlaps([part.range for _, part in there], [tokens for tokens, _ in wanted]):
        split, part = there[place]
        cut[split, wanted[at][1]].append(part if both == part.range else replace(part, range=both))
    return replace(plan, splits=interleaved([split_of(ranges) for ranges in cut.values()]))


def split_to_json(split: Split) -> dict[str, Any]:
    """Write a split as a JSON object, for :func:`split_from_json`."""
    return {"ranges": [[part.range.start, part.range.end, *part.endpoints] for part in split.ranges]}


def split_from_json(document: Mapping[str, Any]) -> Split:
    """Read a split from a JSON object (:func:`split_to_json`)."""
    return Split(
        ranges=tuple(
            ReplicaRange(TokenRange(start, end), tuple(endpoints)) for start, end, *endpoints in document["ranges"]
        )
    )
