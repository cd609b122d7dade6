"""The schema of a commit log's day, from the histories that ringsync has recorded: no cluster, also dropped tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ringsync.formats.commitlog.names import LogPosition
from ringsync.inspect.commitlog import Inspection
from ringsync.inspect.files import InspectError
from ringsync.inspect.outputs import Output
from ringsync.inspect.problems import Problems
from ringsync.inspect.tables import choose_tables
from ringsync.ledger.past_schema import past_schema
from ringsync.schema.table import Schema
from ringsync.storage.port import ObjectStore


def recorded_schema(store: ObjectStore, at_us: int | None, problems: Problems) -> Schema:
    """Read the schema of a moment, and report what is damaged of the histories.

    :param at_us: µs since the epoch; None: the newest version of each table
    :raises InspectError: the store has no history at all
    """
    found = past_schema(store, at_us)
    for text in found.damaged:
        problems.imperfect(text)
    if not found.versions and not found.damaged:
        raise InspectError(
            f"--history: {store.url} has no history of any table: ringsync records a table when it follows or "
            "bootstraps it. Is it the store of this cluster (--conf)?"
        )
    return found.schema


def last_write_us(
    schema: Schema,
    paths: Sequence[Path],
    start: LogPosition | int | None,
    ignore_index: bool,
    key_of: Callable[[str], bytes] | None,
    names: Sequence[tuple[str, str]] = (),
) -> int | None:
    """Read segments for their greatest write time, µs since the epoch; None: they have no rows of these tables.

    :param schema: all columns that the tables ever had
    :param names: keyspace and name of the tables that count; empty: all
    :raises InspectError: no table has one of the names
    """
    nothing_said = Problems(say=lambda text: None)
    inspection = Inspection(choose_tables(schema, names), Output(), nothing_said, ignore_index, key_of)
    inspection.read(paths, start)
    return max((table.last for table in inspection.summary.tables.values() if table.last is not None), default=None)
