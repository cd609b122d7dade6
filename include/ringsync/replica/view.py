"""The rows that a SELECT would show at a moment: live rows of row images, each cell with absolute times.

Columns: ``token``, the table's columns (null, or without the elements, where cells have expired), ``_cells``:

===================================  ==========================================================================
``_cells.<column>``                  null where the column has no live cell
``_cells.<column>.writetime``        µs; multi-cell columns: an array, one per element, null when unknown
``_cells.<column>.expires_at``       s since the epoch, null: no expiry; multi-cell columns: an array, as above
``_cells.<column>.raw``              Cassandra's bytes where the typed column cannot hold the value
===================================  ==========================================================================

The arrays are in the order of the typed value; those of a user-defined type have one entry per field. Key
columns have only ``raw``. Row images: :mod:`ringsync.images.schema`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ringsync.images.live import live_rows, live_schema
from ringsync.images.schema import lake_names
from ringsync.replica.table import ReplicaTable
from ringsync.schema.table import TableSchema


def live(rows: DataFrame, table: TableSchema, now_s: int | None) -> DataFrame:
    """Select the rows that are alive at a moment.

    :param rows: row images; computed once, but three times if the table has static and clustering columns
    :param now_s: the moment, seconds since the epoch; a cell with ``expires_at <= now_s`` is dead, as in Cassandra.
        None: the moment when the rows are read
    """
    marked = _marked(rows, table, now_s)
    if table.of_kind("static") and table.clustering:
        return _with_static_rows(marked, table)
    return _shown(marked.where("`#alive`"), table)


def as_selected(rows: DataFrame, table: TableSchema, now_s: int) -> DataFrame:
    """Make the columns of :func:`live` from rows that a SELECT returned at this moment; all of these are alive.

    :param rows: row images from the data source ``cassandra_table``
    :param now_s: moment of the scan, seconds since the epoch
    """
    return _shown(_marked(rows, table, now_s), table)


def register_live_view(spark: SparkSession, uri: str, table: TableSchema, name: str) -> None:
    """Create a temporary view of the replica's rows that are alive at the moment of each query, changes included.

    Create it again after a bootstrap, and when the table was altered.

    :param uri: folder of the replica, as for :class:`ReplicaTable`
    :raises ReplicaMismatchError: the replica belongs to a table that was dropped and created again
    :raises SchemaChangedError: the replica has another version of the schema, as which it cannot be read
    """
    live(ReplicaTable(uri, table).read_images(spark), table, None).createOrReplaceTempView(name)


def _marked(rows: DataFrame, table: TableSchema, now_s: int | None) -> DataFrame:
    """Mark all rows with ``#alive`` and ``#static`` as of a moment (None: when they are read)."""

    def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        moment = int(time.time()) if now_s is None else now_s
        for batch in batches:
            yield live_rows(batch, table, moment)

    return rows.mapInArrow(mark, from_arrow_schema(live_schema(table)))


def _shown(marked: DataFrame, table: TableSchema) -> DataFrame:
    return marked.select("token", *(f"`{name}`" for name in lake_names(table).values()), "_cells")


def _with_static_rows(marked: DataFrame, table: TableSchema) -> DataFrame:
    """Select the live rows, and one row without clustering of each partition where only static cells live.

    Cassandra's SELECT shows the same.
    """
    names = lake_names(table)
    columns = ", ".join(f"`{name}`" for name in names.values())
    regular_gone = ", ".join(
        f"CAST(NULL AS {marked.schema[names[c.name]].dataType.simpleString()}) AS `{names[c.name]}`"
        if c.kind == "clustering"
        else f"`{names[c.name]}`"
        for c in table.columns
    )
    key = ", ".join(f"to_json(struct(`{names[c.name]}`)), _cells.`{names[c.name]}`.raw" for c in table.partition_key)
    without_clustering = ", ".join(
        f"'{names[c.name]}', " + ("NULL" if c.kind == "clustering" else f"_cells.`{names[c.name]}`")
        for c in table.columns
    )
    # An image without clustering comes first: all others repeat its static cells.
    name = names[table.clustering[0].name]
    has_clustering = f"`{name}` IS NOT NULL OR _cells.`{name}`.raw IS NOT NULL"
    cells = marked.schema["_cells"].dataType.simpleString()
    return marked.sparkSession.sql(
        f"""
        WITH marked AS (SELECT *, struct(token, {key}) AS `#partition` FROM {{marked}}),
        expired AS (
            SELECT *, row_number() OVER (PARTITION BY `#partition` ORDER BY {has_clustering}) AS `#number`
            FROM marked WHERE `#static` AND NOT `#alive`)
        SELECT token, {columns}, _cells FROM marked WHERE `#alive`
        UNION ALL
        SELECT token, {regular_gone}, CAST(named_struct({without_clustering}) AS {cells})
        FROM expired LEFT ANTI JOIN (SELECT `#partition` FROM marked WHERE `#alive`) AS alive
            ON expired.`#partition` = alive.`#partition`
        WHERE `#number` = 1""",
        marked=marked,
    )
