"""The Arrow schema of row images: one typed row as of one moment, with each cell's writetime and expiry.

Columns, in order: ``token``, the table's columns under their own names, ``_row``, ``_x``, ``_merge``.

``_row`` holds the times that most cells of the row share; ``_x`` holds, per column, the differences:

=================  =========================================================================================
``_row.writetime`` µs; null when the row has no cell
``_row.expires_at`` s since the epoch; null: no expiry
``_row.deleted_at`` µs, greatest known row, partition or range deletion; null: unknown (a SELECT cannot show it)
``_row.live``      µs, timestamp of the row's own liveness; NO_LIVENESS: it has none (rows made by UPDATE, deleted
                   rows); null: unknown (a SELECT cannot show it), so the row lives until other facts show its death
``_x.<column>.d``  µs to add to ``_row.writetime``; null: 0. Multi-cell columns: one per element, null: all 0,
                   ``[]``: times unknown (the server could not tell)
``_x.<column>.e``  s since the epoch; null: as the row; -1: no expiry. Multi-cell columns: one per element,
                   null: all as the row, ``[]``: times unknown
``_x.<column>.raw`` the value as Cassandra's bytes, where the typed column cannot hold it (the column is null then)
``_merge``         facts for later merges that typed columns cannot show; null: there are none
=================  =========================================================================================

====================== ====================================================================================
``live_expires_at``    s since the epoch, when the row's own liveness expires, or had ended when the source was
                       read; null: never
``deletion_local``     s since the epoch, local deletion time of ``_row.deleted_at``
``unseen_at``          µs, moment at which a quorum of replicas showed nothing of this key; null: not asked
``tombstones``         of cells (``path`` null: of a column of one cell) and of whole multi-cell columns (``path``
                       null, too), ``column`` by its CQL name; ``timestamp`` in µs, ``local_deletion_time`` in s
                       (for a cell with an expiry that a read of the source did not show: its expiry)
``entries``            per list column the timeuuids of its entries in the order of the value; the entries of lists
                       without one have unknown identities
====================== ====================================================================================

An image without clustering, in a table with clustering columns, holds the static cells of its partition. The images of
rows repeat them, as SELECT does. Images of dead rows stay, with their deletions, until no older write can come.

A column that is null and has no ``raw`` has no cell, and its times mean nothing. The elements of ``d`` and ``e`` are in
the order of the typed value: list position, set order, map key order, UDT field order (null for a UDT field that is not
set). Key columns have only ``raw``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import pyarrow as pa

from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import arrow_type
from ringsync.schema.table import Column, TableSchema

NO_LIVENESS = -(2**63)
"""Value of ``_row.live`` if the row is known to have no liveness of its own; it lives by its cells only."""

ROW_TIMES = pa.struct({name: pa.int64() for name in ("writetime", "expires_at", "deleted_at", "live")})

TOMBSTONE = pa.struct(
    [("column", pa.string()), ("path", pa.binary()), ("timestamp", pa.int64()), ("local_deletion_time", pa.int64())]
)
ENTRIES = pa.struct([("column", pa.string()), ("paths", pa.list_(pa.binary()))])
MERGE = pa.struct(
    [
        ("live_expires_at", pa.int64()),
        ("deletion_local", pa.int64()),
        ("unseen_at", pa.int64()),
        ("tombstones", pa.list_(TOMBSTONE)),
        ("entries", pa.list_(ENTRIES)),
    ]
)

RESERVED_NAMES = ("token", "_row", "_x", "_merge", "_cells", "_version")
"""Names of ringsync's columns; a table column of the same name is renamed, see :func:`lake_names`."""


def lake_names(table: TableSchema) -> Mapping[str, str]:
    """Return the names in row images and in the lake, by CQL column name. They are almost always the same.

    A column keeps its name: one that was added later makes way, and takes no name that another column had.
    """
    every = every_lake_name(table)
    return {column.name: every[table.label(column.name)] for column in table.columns}


def every_lake_name(table: TableSchema) -> Mapping[str, str]:
    """Return the names of :func:`lake_names`, and of all columns that the table had before, by label."""
    labels = (table.label(column.name) for column in table.columns)
    return _distinct(tuple(dict.fromkeys((*table.every_name, *labels))))


@lru_cache(maxsize=64)
def _distinct(names: tuple[str, ...]) -> Mapping[str, str]:
    return dict(zip(names, portable_names(names, RESERVED_NAMES), strict=True))


def row_image_schema(table: TableSchema) -> pa.Schema:
    """Return the Arrow schema of the table's row images. Every field is nullable, as lakes and Spark require."""
    # Equal tables may have other names.
    return _row_image_schema(table, tuple(lake_names(table).items()))


@lru_cache(maxsize=16)
def _row_image_schema(table: TableSchema, lake: tuple[tuple[str, str], ...]) -> pa.Schema:
    names = dict(lake)
    columns = [(names[column.name], arrow_type(column.type)) for column in table.columns]
    x = pa.struct([(names[column.name], _differences(column)) for column in table.columns])
    return pa.schema([("token", pa.int64()), *columns, ("_row", ROW_TIMES), ("_x", x), ("_merge", MERGE)])


def _differences(column: Column) -> pa.DataType:
    if column.is_key:
        return pa.struct([("raw", pa.binary())])
    times = pa.list_(pa.int64()) if column.is_multicell else pa.int64()
    return pa.struct([("d", times), ("e", times), ("raw", pa.binary())])
