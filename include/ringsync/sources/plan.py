"""The plan of a scan: everything a task needs to read its part of a table, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cassandra.cluster import Session

from ringsync.ring.ring import RingSnapshot
from ringsync.ring.splits import ReplicaRange, Split, plan_splits
from ringsync.ring.tokens import TokenRange
from ringsync.schema.description import describe, from_description
from ringsync.schema.from_cluster import read_table
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.cluster import read_ring, read_size_estimate
from ringsync.sources.scan import check_readable, columns_without_element_times
from ringsync.sources.session import ClusterError

if TYPE_CHECKING:
    from ringsync.config import Config

FORMAT_VERSION = 1


class ElementTimesError(ClusterError):
    """The server cannot tell when the elements of a collection were written, and the configuration wants to know."""


@dataclass(frozen=True)
class ScanPlan:
    """How a table is scanned, decided once.

    :ivar now: seconds since the epoch; all rows are read as of this moment of expiry
    :ivar times: whether writetimes and expiry are read
    :ivar element_times: whether also those of the elements of collections and user-defined types
    :ivar unrepresentable_values: what becomes of a value that its Arrow type cannot hold
    :ivar ring_digest: of the ring snapshot that the splits were cut from
    :ivar splits: one per task
    """

    table: TableSchema
    now: int
    times: bool
    element_times: bool
    consistency_level: str
    unrepresentable_values: Literal["error", "raw"]
    ring_digest: str
    splits: tuple[Split, ...]

    @property
    def schema_digest(self) -> str:
        """Changes when the table's schema does."""
        return self.table.digest

    def to_json(self) -> str:
        """The plan as a JSON object; :meth:`from_json` gives an equal plan back."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "table": describe(self.table),
                "now": self.now,
                "times": self.times,
                "element_times": self.element_times,
                "consistency_level": self.consistency_level,
                "unrepresentable_values": self.unrepresentable_values,
                "ring_digest": self.ring_digest,
                "splits": [_split_to_json(split) for split in self.splits],
            }
        )

    @staticmethod
    def from_json(text: str) -> ScanPlan:
        """Read what :meth:`to_json` wrote.

        :raises ValueError: when it is no plan of this version
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.pop("format_version", None) != FORMAT_VERSION:
            raise ValueError(f"this is not a scan plan of format version {FORMAT_VERSION}: {text[:80]}")
        table = from_description(document.pop("table"))
        splits = tuple(_split_from_json(split) for split in document.pop("splits"))
        return ScanPlan(table=table, splits=splits, **document)


def make_scan_plan(
    session: Session, config: Config, keyspace: str, table: str, *, now: int, times: bool = True
) -> ScanPlan:
    """Look at the cluster and decide how the table is scanned.

    :param session: from :func:`ringsync.sources.session.connect`
    :param now: seconds since the epoch, see :class:`ScanPlan`
    :param times: whether to read writetimes and expiry
    :raises UnknownTableError: when there is no such table
    :raises NoPermissionError: when the user may not read it
    :raises ElementTimesError: when the server cannot tell the times of elements, unless
        ``replica.element_times`` is ``unknown``
    """
    schema = read_table(session, keyspace, table)
    check_readable(session, schema, config.cassandra.username)
    missing = columns_without_element_times(session, schema) if times else ()
    if missing and config.replica.element_times == "error":
        raise ElementTimesError(_explain_missing_times(schema, missing))
    ring = read_ring(session, keyspace)
    return ScanPlan(
        table=schema,
        now=now,
        times=times,
        element_times=times and not missing,
        consistency_level=config.cassandra.consistency_level,
        unrepresentable_values=config.replica.unrepresentable_values,
        ring_digest=ring.digest,
        splits=_splits(session, config, schema, ring),
    )


def within(plan: ScanPlan, ranges: Iterable[tuple[int, int]]) -> ScanPlan:
    """The same plan for a part of the ring; what is left of a split stays one task.

    :param ranges: (start, end] without wrap, disjoint
    """
    wanted = [TokenRange(start, end) for start, end in ranges]
    splits = []
    for split in plan.splits:
        parts = [
            ReplicaRange(TokenRange(max(part.range.start, other.start), min(part.range.end, other.end)), part.endpoints)
            for part in split.ranges
            for other in wanted
            if max(part.range.start, other.start) < min(part.range.end, other.end)
        ]
        if parts:
            splits.append(Split(tuple(sorted(parts, key=lambda part: part.range))))
    return replace(plan, splits=tuple(splits))


def _splits(session: Session, config: Config, table: TableSchema, ring: RingSnapshot) -> tuple[Split, ...]:
    # The policy asks nodes of the local datacenter only, so whoever answers is of it.
    local = session.execute("SELECT data_center FROM system.local").one()
    return plan_splits(
        ring,
        read_size_estimate(session, table.keyspace, table.name),
        split_size_bytes=config.scan.split_size_mb * 2**20,
        minimum=config.scan.min_splits,
        maximum=config.scan.max_splits,
        datacenter=local.data_center,
    )


def _explain_missing_times(table: TableSchema, columns: tuple[Column, ...]) -> str:
    names = ", ".join(f"{column.name} {column.type}" for column in columns)
    return (
        f"{table.full_name}: this server cannot tell WRITETIME and TTL of the elements of {names} (Cassandra can "
        "from 5.0 on). Set replica.element_times: unknown to replicate them without these times"
    )


def _split_to_json(split: Split) -> dict[str, Any]:
    return {
        "ranges": [[part.range.start, part.range.end, *part.endpoints] for part in split.ranges],
        "estimated_partitions": split.estimated_partitions,
        "estimated_bytes": split.estimated_bytes,
    }


def _split_from_json(document: dict[str, Any]) -> Split:
    return Split(
        ranges=tuple(
            ReplicaRange(TokenRange(start, end), tuple(endpoints)) for start, end, *endpoints in document["ranges"]
        ),
        estimated_partitions=document["estimated_partitions"],
        estimated_bytes=document["estimated_bytes"],
    )
