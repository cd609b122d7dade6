"""Records of ``processor_error``, decoded by today's code and the schemas that are known today."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.columns import logged_tables
from ringsync.changes.identity import TableVersion
from ringsync.changes.schema import CHANGE_ROWS
from ringsync.cluster.node import ask_one
from ringsync.cluster.schema import read_node_tables, read_tables
from ringsync.compiled.arrow import array_of, integers
from ringsync.compiled.memory import padded
from ringsync.config import Config
from ringsync.formats.commitlog.reader import read_changes
from ringsync.formats.commitlog.records import Records
from ringsync.ledger.database import CDC_LOGS
from ringsync.ledger.dropped_tables import all_dropped
from ringsync.ledger.past_schema import past_schema
from ringsync.ledger.staging import STAGED_ROWS
from ringsync.ledger.table_versions import CdcBegun, TableVersionError, latest_version, version_of
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

OF_CDC_LOG = (
    "a row of a CDC log is not decoded again: once its cause is mended, cdcservice verify --repair corrects the "
    "replica, and cdcservice errors discard removes the row"
)
"""Reason why a record of a ScyllaDB is not solved by a retry."""


@dataclass(frozen=True)
class Record:
    """A record that could not be decoded.

    :ivar node: host id
    :ivar position: logical position after the record in its segment
    :ivar length: bytes of the mutation, or of what is damaged
    :ivar raw: the mutation; None: it is damage
    """

    node: str
    file: str
    position: int
    length: int
    reason: str
    table_id: bytes | None
    raw: bytes | None


@dataclass(frozen=True)
class Decoded:
    """The content of some records.

    :ivar rows: batch of ``CHANGE_ROWS``, whose ``position`` is the place of their record among those that were given
    :ivar undecoded: reasons why records still cannot be decoded, by place
    """

    rows: pa.RecordBatch
    undecoded: Mapping[int, str]


@dataclass(frozen=True)
class KnownTables:
    """The tables by which records are decoded.

    :ivar versions: versions by table id: of a table that is there the newest, of another one the newest that was
        recorded, with all columns that it ever had
    :ivar followed: ids of the tables whose rows are published: the configuration follows them, and they have cdc or had
    :ivar dropped: ids of tables that were found dropped, and are not there
    :ivar problems: what is damaged of the recorded schemas
    """

    versions: Mapping[str, TableVersion]
    followed: frozenset[str]
    dropped: frozenset[str]
    problems: tuple[str, ...] = ()


def recorded_tables(
    store: ObjectStore, config: Config, present: Sequence[TableSchema], ids: Collection[str], with_cdc: Collection[str]
) -> KnownTables:
    """Find the versions of the tables that are there, and of those that were recorded.

    :param present: tables that are there and can be read
    :param ids: ids of all tables that are there
    :param with_cdc: ids of those that have cdc
    """
    past, begun, follows = past_schema(store), CdcBegun(store), config.sync.follows
    problems = list(past.damaged)
    versions = {table_id: version for table_id, version in past.versions.items() if table_id not in ids}
    for table in present:
        try:
            is_published = follows(table.full_name) and (table.table_id in with_cdc or table.table_id in begun)
            # Rows that are published need the ids of their columns; of other tables nothing is recorded here.
            versions[table.table_id] = _newest(store, table) if is_published else TableVersion.first(table)
        except TableVersionError as error:
            problems.append(f"{table.full_name}: {error}")
    followed = frozenset(
        table_id
        for table_id, version in versions.items()
        if follows(version.table.full_name) and (table_id in with_cdc or table_id in begun)
    )
    return KnownTables(versions, followed, all_dropped(store) - frozenset(ids), tuple(problems))


def _newest(store: ObjectStore, table: TableSchema) -> TableVersion:
    """Return the newest version of a table that is there: the node that was asked may be behind.

    :raises TableVersionError: it is damaged
    """
    shown, recorded = version_of(store, table), latest_version(store, table.table_id)
    return recorded if recorded is not None and recorded.number > shown.number else shown


def known_tables(store: ObjectStore, config: Config, session: Any) -> KnownTables:
    """Ask the cluster and the recorded schemas.

    :param session: a session with the driver's default row factory
    """
    schema, told = ask_one(session, lambda node: (read_tables(node), read_node_tables(node)))
    return recorded_tables(store, config, list(schema.by_id().values()), schema.ids | told.ids, told.with_cdc)


def decode(records: Sequence[Record], tables: Mapping[str, TableVersion]) -> Decoded:
    """Decode records that have bytes.

    :param tables: versions by table id
    """
    of_logs = {place for place, record in enumerate(records) if record.node == CDC_LOGS}
    raws = [b"" if place in of_logs else record.raw or b"" for place, record in enumerate(records)]
    sizes = np.array([len(raw) for raw in raws], np.int64)
    places = np.arange(len(raws), dtype=np.int64)
    found = Records(np.cumsum(sizes) - sizes, sizes, places, np.ones(len(raws), np.bool_))
    logged = logged_tables([version.table for version in tables.values()])
    batches = list(read_changes(padded(b"".join(raws)), found, logged, ""))
    undecoded = {
        place: reason
        for batch in batches
        for place, reason in zip(*(batch.undecoded[name].to_pylist() for name in ("position", "reason")), strict=True)
    }
    undecoded |= dict.fromkeys(of_logs, OF_CDC_LOG)
    rows = pa.Table.from_batches([batch.rows for batch in batches], CHANGE_ROWS).combine_chunks().to_batches()
    return Decoded(rows[0] if rows else pa.RecordBatch.from_pylist([], CHANGE_ROWS), undecoded)


def with_source(rows: pa.RecordBatch, records: Sequence[Record]) -> pa.RecordBatch:
    """Return decoded rows with segment and position of their records."""
    places = integers(rows["position"])
    files = pa.array([record.file for record in records], pa.string()).take(pa.array(places))
    positions = np.array([record.position for record in records], np.int64)[places]
    for name, column in (("file", files), ("position", array_of(positions))):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), column)
    return rows


def staged(rows: pa.RecordBatch, records: Sequence[Record], version: TableVersion) -> pa.RecordBatch:
    """Return decoded rows of one table in the form of files, a batch of ``STAGED_ROWS``.

    :param rows: rows as :func:`decode` returns them
    :param version: the table's version by which they were decoded
    """
    nodes = pa.array([record.node for record in records], pa.string()).take(rows["position"])
    stored = version.to_store(with_source(rows, records))
    return pa.RecordBatch.from_arrays([*stored.columns, nodes], schema=STAGED_ROWS)
