"""What a SELECT would show at a moment: live rows of a table of row images, each cell with absolute times.

The rules are written once, as SQL text, so that a user's view and verification see the same rows. Columns:
``token``, the table's columns (null, or without the elements, where cells have expired), ``_cells``:

===================================  ==========================================================================
``_cells.<column>``                  null where the column has no live cell
``_cells.<column>.writetime``        µs; multi-cell columns: an array, one per element, null when unknown
``_cells.<column>.expires_at``       s since the epoch, null: no expiry; multi-cell columns: an array, as above
``_cells.<column>.raw``              Cassandra's bytes where the typed column cannot hold the value
===================================  ==========================================================================

The arrays are in the order of the typed value; those of a user-defined type have one entry per field. Key
columns have only ``raw``. Row images: :mod:`ringsync.schema.row_image`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import UserType, arrow_type
from ringsync.replica.table import ReplicaTable
from ringsync.schema.row_image import NO_EXPIRY, lake_names
from ringsync.schema.table import Column, TableSchema


def live(rows: DataFrame, table: TableSchema, now_s: int) -> DataFrame:
    """The rows that are alive at a moment.

    :param rows: row images; computed once, but three times if the table has static and clustering columns
    :param now_s: seconds since the epoch; a cell with ``expires_at <= now_s`` is dead, as in Cassandra
    """
    return rows.sparkSession.sql(live_sql(table, "{rows}", str(now_s)), rows=rows)


def as_selected(rows: DataFrame, table: TableSchema, now_s: int) -> DataFrame:
    """The same columns for rows that a SELECT gave as of that very moment: all of them are alive.

    :param rows: row images as the data source ``cassandra_table`` gives them; computed once
    :param now_s: seconds since the epoch, the moment of the scan
    """
    columns = [_column(column, name, str(now_s)) for column, name in _with_names(table)]
    return rows.selectExpr("token", *(f"{c.value} AS `{c.name}`" for c in columns), f"{_cells(columns)} AS _cells")


def register_live_view(spark: SparkSession, uri: str, table: TableSchema, name: str) -> None:
    """Create a temporary view of the replica's rows that are alive at the moment of each query.

    :param uri: the replica's folder, as for :class:`ReplicaTable`
    :param name: the view's name as SQL has it
    """
    sql = live_sql(table, ReplicaTable(uri, table).sql_name, "unix_timestamp()")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {sql}")


def live_sql(table: TableSchema, rows: str, now: str) -> str:
    """The query behind :func:`live`, in Spark SQL.

    A partition whose rows have all expired while a static cell lives shows as one row without clustering,
    as in Cassandra; only tables with static and clustering columns pay for that search.

    :param rows: the row images, as SQL has it after FROM
    :param now: SQL expression, seconds since the epoch
    """
    columns = [_column(column, name, now) for column, name in _with_names(table)]
    images = f"""
        SELECT token, {_comma(f"{c.value} AS `{c.name}`" for c in columns)},
            {_cells(columns)} AS _cells,
            {_row_is_alive(table, columns)} AS `#alive`"""
    shown = f"token, {_comma(f'`{c.name}`' for c in columns)}, _cells"
    if not (table.of_kind("static") and table.clustering):
        return f"SELECT {shown} FROM ({images} FROM {rows}) WHERE `#alive`"
    images += f", {_any_live(columns, 'static')} AS `#static`, {_partition(table)} AS `#partition`"
    return f"""
        WITH images AS ({images} FROM {rows}),
        expired AS (
            SELECT *, row_number() OVER (PARTITION BY `#partition` ORDER BY token) AS `#number`
            FROM images WHERE `#static` AND NOT `#alive`)
        SELECT {shown} FROM images WHERE `#alive`
        UNION ALL
        SELECT token, {_comma(f"{_unless_clustering(c, f'`{c.name}`')} AS `{c.name}`" for c in columns)},
            named_struct({_comma(f"'{c.name}', {_unless_clustering(c, f'_cells.`{c.name}`')}" for c in columns)})
        FROM expired LEFT ANTI JOIN (SELECT `#partition` FROM images WHERE `#alive`) AS alive
            ON expired.`#partition` = alive.`#partition`
        WHERE `#number` = 1"""


def _cells(columns: Sequence[_LiveColumn]) -> str:
    entries = (f"'{c.name}', {c.cell}" for c in columns)
    return f"named_struct({_comma(entries)})"


@dataclass(frozen=True)
class _LiveColumn:
    """SQL expressions over a row image for one column.

    :ivar value: the typed value without what has expired
    :ivar cell: the column's entry in ``_cells``
    :ivar present: whether the image has any cell of the column
    :ivar alive: whether one of them is alive
    """

    name: str
    kind: str
    value: str
    cell: str
    present: str
    alive: str


def _column(column: Column, name: str, now: str) -> _LiveColumn:
    if column.is_key:
        raw = f"_x.`{name}`.raw"
        cell = f"CASE WHEN {raw} IS NOT NULL THEN named_struct('raw', {raw}) END"
        present = f"(`{name}` IS NOT NULL OR {raw} IS NOT NULL)"
        return _LiveColumn(name, column.kind, f"`{name}`", cell, present, alive=present)
    if not column.is_multicell:
        return _single_cell(column, name, now)
    if isinstance(column.type, UserType):
        return _user_type(column, name, now, portable_names(column.type.field_names))
    return _collection(column, name, now)


def _single_cell(column: Column, name: str, now: str) -> _LiveColumn:
    x = f"_x.`{name}`"
    expires_at = f"nullif(coalesce({x}.e, _row.expires_at), {NO_EXPIRY}L)"
    present = f"(`{name}` IS NOT NULL OR {x}.raw IS NOT NULL)"
    alive = f"({present} AND {_is_alive(expires_at, now)})"
    value = f"CASE WHEN {alive} THEN `{name}` END"
    cell = _cell(alive, f"_row.writetime + coalesce({x}.d, 0L)", expires_at, f"{x}.raw")
    return _LiveColumn(name, column.kind, value, cell, present, alive)


def _collection(column: Column, name: str, now: str) -> _LiveColumn:
    """A list, set or map: an element lives as long as its own cell. A raw value cannot lose elements."""
    x = f"_x.`{name}`"
    is_map = pa.types.is_map(arrow_type(column.type))
    elements = f"map_entries(`{name}`)" if is_map else f"`{name}`"
    element_is_alive = _is_alive(_element_expires_at(x, "i"), now)
    present = f"(coalesce(size(`{name}`) > 0, false) OR {x}.raw IS NOT NULL)"
    alive = f"({present} AND {_any_element_is_alive(x, now)})"
    kept = f"filter({elements}, (element, i) -> {element_is_alive})"
    value = f"""CASE WHEN {alive} THEN CASE WHEN {_one_expiry(x)} THEN `{name}`
        ELSE {f"map_from_entries({kept})" if is_map else kept} END END"""
    raw_numbers = f"nullif({_numbers(f'{x}.e')}, array()), nullif({_numbers(f'{x}.d')}, array()), array(0)"
    numbers = f"coalesce({_numbers(elements)}, {raw_numbers})"
    shown = f"""CASE WHEN {_one_expiry(x)} OR {x}.raw IS NOT NULL THEN {numbers}
        ELSE filter({numbers}, i -> {element_is_alive}) END"""
    writetime = f"CASE WHEN {_known(f'{x}.d')} THEN transform({shown}, i -> {_element_writetime(x, 'i')}) END"
    expires_at = f"CASE WHEN {_known(f'{x}.e')} THEN transform({shown}, i -> {_element_expires_at(x, 'i')}) END"
    return _LiveColumn(name, column.kind, value, _cell(alive, writetime, expires_at, f"{x}.raw"), present, alive)


def _user_type(column: Column, name: str, now: str, fields: Sequence[str]) -> _LiveColumn:
    """A user-defined type that is not frozen: each field is a cell."""
    x = f"_x.`{name}`"
    is_set = [f"`{name}`.`{field}` IS NOT NULL" for field in fields]
    is_alive = [f"({one} AND {_is_alive(_element_expires_at(x, i), now)})" for i, one in enumerate(is_set)]
    present = f"({' OR '.join(is_set)} OR {x}.raw IS NOT NULL)"
    typed_alive = f"({' OR '.join(is_alive)})"
    alive = f"({typed_alive} OR ({x}.raw IS NOT NULL AND {_any_element_is_alive(x, now)}))"
    members = [f"'{f}', CASE WHEN {ok} THEN `{name}`.`{f}` END" for f, ok in zip(fields, is_alive, strict=True)]
    value = f"CASE WHEN {typed_alive} THEN named_struct({_comma(members)}) END"

    def per_field(times: Iterable[str]) -> str:
        shown = (f"CASE WHEN {ok} OR {x}.raw IS NOT NULL THEN {t} END" for ok, t in zip(is_alive, times, strict=True))
        return f"array({_comma(shown)})"

    numbers = range(len(fields))
    writetime = f"CASE WHEN {_known(f'{x}.d')} THEN {per_field(_element_writetime(x, i) for i in numbers)} END"
    expires_at = f"CASE WHEN {_known(f'{x}.e')} THEN {per_field(_element_expires_at(x, i) for i in numbers)} END"
    return _LiveColumn(name, column.kind, value, _cell(alive, writetime, expires_at, f"{x}.raw"), present, alive)


def _cell(alive: str, writetime: str, expires_at: str, raw: str) -> str:
    return (
        f"CASE WHEN {alive} THEN named_struct('writetime', {writetime}, 'expires_at', {expires_at}, 'raw', {raw}) END"
    )


def _is_alive(expires_at: str, now: str) -> str:
    return f"coalesce({expires_at} > {now}, true)"


def _known(times: str) -> str:
    """Whether the times of a multi-cell column are known: an empty array says that they are not."""
    return f"coalesce(size({times}) != 0, true)"


def _one_expiry(x: str) -> str:
    """Whether all elements live and die together: as the row does, or nobody knows."""
    return f"({x}.e IS NULL OR size({x}.e) = 0)"


def _element_expires_at(x: str, i: str | int) -> str:
    return f"CASE WHEN {_known(f'{x}.e')} THEN nullif(coalesce(get({x}.e, {i}), _row.expires_at), {NO_EXPIRY}L) END"


def _element_writetime(x: str, i: str | int) -> str:
    return f"_row.writetime + coalesce(get({x}.d, {i}), 0L)"


def _any_element_is_alive(x: str, now: str) -> str:
    return f"""CASE WHEN {_one_expiry(x)} THEN {_is_alive(_element_expires_at(x, 0), now)}
        ELSE exists({_numbers(f"{x}.e")}, i -> {_is_alive(_element_expires_at(x, "i"), now)}) END"""


def _numbers(array: str) -> str:
    """0, 1, 2 … as many as the array has elements."""
    return f"transform({array}, (element, i) -> i)"


def _row_is_alive(table: TableSchema, columns: Sequence[_LiveColumn]) -> str:
    """Whether a SELECT shows the row.

    Without a live regular cell it does if the row has none at all: then its own liveness shows it, unless a
    newer deletion is known. If its cells have expired, so has, as far as a SELECT could tell, its liveness.
    """
    present = " OR ".join(c.present for c in columns if c.kind == "regular") or "false"
    deleted = "_row.deleted_at IS NOT NULL AND coalesce(_row.live <= _row.deleted_at, true)"
    alive = f"({_any_live(columns, 'regular')} OR NOT ({present} OR {deleted}))"
    clustering = [c for c in columns if c.kind == "clustering"]
    return (
        f"CASE WHEN {clustering[0].present} THEN {alive} ELSE {_any_live(columns, 'static')} END"
        if clustering
        else alive
    )


def _any_live(columns: Sequence[_LiveColumn], kind: str) -> str:
    return f"({' OR '.join(c.alive for c in columns if c.kind == kind) or 'false'})"


def _partition(table: TableSchema) -> str:
    """The partition key as one value that can be joined on: Spark cannot compare maps."""
    parts = ["token"]
    for column, name in _with_names(table):
        if column.kind == "partition_key":
            comparable = pa.types.is_primitive(arrow_type(column.type))
            parts += [f"`{name}`" if comparable else f"to_json(struct(`{name}`))", f"_x.`{name}`.raw"]
    return f"struct({_comma(parts)})"


def _unless_clustering(column: _LiveColumn, expression: str) -> str:
    return f"CASE WHEN `#alive` THEN {expression} END" if column.kind == "clustering" else expression


def _with_names(table: TableSchema) -> list[tuple[Column, str]]:
    names = lake_names(table)
    return [(column, names[column.name]) for column in table.columns]


def _comma(parts: Iterable[str]) -> str:
    return ", ".join(parts)
