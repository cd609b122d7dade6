"""What is missing in streams and replicas: the gaps that there are, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringsync.cql.identifiers import parse_table_name
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.gaps import NOT_FOLLOWED, Followed, Gap, Gaps, Judge
from ringsync.replica.folders import base_folder
from ringsync.service.expected import CLOSE
from ringsync.service.problem import Kind, Problem
from ringsync.status import BOOTSTRAPS, Status
from ringsync.storage.port import ObjectStore


@dataclass(frozen=True)
class Lost:
    """A gap.

    :ivar key: key of its object
    :ivar gap: None: the object is damaged
    :ivar unverified: names of the tables that it waits for, if they are known; None: it is over
    """

    key: str
    gap: Gap | None
    unverified: tuple[str, ...] | None = ()

    def problem(self, store: ObjectStore) -> Problem:
        """Say what is missing, and what to do."""
        if self.gap is None:
            text = f"{store.uri(self.key)} cannot be read: restore it, or cdcservice gaps acknowledge {self.key}"
            return Problem(Kind.SEGMENTS_LOST, self.key, text)
        told = self.gap.describe(self.unverified or ())
        if self.gap.node == CDC_LOGS:
            return Problem(Kind.LOG_GAP, self.gap.segment, told)
        if self.gap.node == NOT_FOLLOWED:
            return Problem(Kind.TABLE_GAP, ", ".join(self.gap.tables.values()), told)
        endpoint = self.gap.endpoint
        return Problem(Kind.SEGMENTS_LOST, f"node {endpoint}, {self.gap.segment}", f"node {endpoint}: {told}")


def look_for_lost(store: ObjectStore, statuses: Mapping[str, Status], gaps: Gaps) -> list[Lost]:
    """Return all gaps, also those that are over. The gaps themselves are asked: whoever has found them may be away.

    A gap of a table that was not followed waits while the table is bootstrapped: that copies all of it. One whose
    tables were all dropped waits in case they come back.

    :raises UnavailableError: the store cannot be used
    """
    found = gaps.look()
    if not found:
        return []
    close = statuses.get(CLOSE, {})
    judge = Judge(store, dict(_followed(close.get("tables", {}))), partial(_there, store))
    return [
        Lost(key, gap, () if gap is None else None if (left := judge.unverified(gap)) is None else tuple(left))
        for key, gap in found.items()
        if gap is None or not (_is_bootstrapped(gap, statuses) or judge.are_gone(gap))
    ]


def _is_bootstrapped(gap: Gap, statuses: Mapping[str, Status]) -> bool:
    return gap.node == NOT_FOLLOWED and all(f"{BOOTSTRAPS}{table_id}" in statuses for table_id in gap.tables)


def _followed(tables: Mapping[str, Any]) -> Iterator[tuple[str, Followed]]:
    """Yield the tables that ``bucket_close`` has told of, by name."""
    for name, told in tables.items():
        has_replica = told.get("replica_pass") is not None or told.get("replica_error") is not None
        yield name, Followed(str(told.get("table_id", "")), has_replica)


def _there(store: ObjectStore, name: str) -> bool:
    """Tell whether there is a replica of a table."""
    return bool(store.list(f"{base_folder(*parse_table_name(name))}/_delta_log/"))
