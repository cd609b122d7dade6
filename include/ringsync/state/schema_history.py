"""The table ``schema_history``: a copy of the tables' histories, for people and programs that ask the cluster.

The object store is the truth. Rows that are missing are written again, and nobody reads them to decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringsync.state.session import StateSession


@dataclass(frozen=True)
class HistoryRow:
    """A version of a table.

    :ivar since_us: since when the table is so, µs since the epoch
    :ivar found_ms: when ringsync found it, ms since the epoch
    :ivar ddl: the statements that make it of the version before
    """

    keyspace: str
    table: str
    version: int
    since_us: int
    found_ms: int
    table_id: str
    ddl: str


class SchemaHistory:
    """The table ``schema_history``. Each method raises :class:`ringsync.state.session.StateError` as that module says.

    :param session: session with the driver's default row factory
    :param keyspace: name of ringsync's own keyspace
    """

    def __init__(self, session: Any, keyspace: str) -> None:
        self._state = StateSession(session, keyspace)
        self._table = f"{self._state.keyspace}.schema_history"

    def known(self) -> set[tuple[str, str, int]]:
        """Read which versions have a row: keyspace, table and number."""
        (rows,) = self._state.read_all(
            [self._state.bind(f"SELECT keyspace_name, table_name, version FROM {self._table}", ())]
        )
        return {(row.keyspace_name, row.table_name, row.version) for row in rows}

    def put(self, rows: Iterable[HistoryRow]) -> None:
        """Write versions; writing them again is safe."""
        cql = (
            f"INSERT INTO {self._table} (keyspace_name, table_name, version, since, found, table_id, ddl) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        self._state.write_all(
            self._state.bind(
                cql,
                (
                    *(row.keyspace, row.table, row.version),
                    *(_moment(row.since_us / 1e6), _moment(row.found_ms / 1e3)),
                    *(row.table_id, row.ddl),
                ),
            )
            for row in rows
        )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
