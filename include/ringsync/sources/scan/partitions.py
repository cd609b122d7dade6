"""Single partitions of a scan: finding them, the position in one, and the SELECTs for its remaining rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ringsync.cql.identifiers import quote
from ringsync.formats.result_page import Page, page_cells
from ringsync.images.from_pages import ResultColumn
from ringsync.schema.table import Column, TableSchema
from ringsync.sources.scan.pages import Request
from ringsync.sources.scan.where import Condition, all_of, behind

Choices = Mapping[str, Sequence[bytes]]
"""The serialised values of the ``IN`` conditions on clustering columns, by column."""


@dataclass(frozen=True, order=True)
class Partition:
    """A partition. Partitions have Cassandra's order, also if their tokens are equal.

    :ivar key: whole partition key as Cassandra stores it
    :ivar values: serialised values of the key's columns
    :ivar clustering: clustering of the last row read; None: no row with clustering was read
    """

    token: int
    key: bytes
    values: tuple[bytes, ...] = field(compare=False)
    clustering: tuple[bytes, ...] | None = field(default=None, compare=False)


def token_of(table: TableSchema) -> str:
    """Write CQL's expression for the token of a row."""
    return f"token({', '.join(quote(column.name) for column in table.partition_key)})"


def token_bytes(token: int) -> bytes:
    """Serialise a token as a parameter."""
    return token.to_bytes(8, "big", signed=True)


def filtering(where: Sequence[Condition]) -> str:
    """Return the end of a SELECT with these conditions."""
    return " ALLOW FILTERING" if where else ""


def partitions_cql(table: TableSchema, where: Sequence[Condition]) -> str:
    """Write the SELECT of the partitions in a token range (its parameters), for :func:`partitions_of`."""
    token, keys = token_of(table), [quote(column.name) for column in table.partition_key]
    conditions = _on(where, table.partition_key)
    return (
        f"SELECT DISTINCT {token}, {', '.join(keys)} FROM {quote(table.keyspace)}.{quote(table.name)} WHERE "
        + all_of([f"{token} > ?", f"{token} <= ?", *(condition.cql for condition in conditions)])
        + filtering(conditions)
    )


def partitions_of(page: Page, table: TableSchema) -> Iterator[Partition]:
    """Read the partitions on a page of :func:`partitions_cql`."""
    rows, columns = page_cells(page, 1 + len(table.partition_key))
    for row in range(rows):
        token, *values = (column.value(row) or b"" for column in columns)
        yield _partition(token, tuple(values))


def last_partition(page: Page, layout: Sequence[ResultColumn], table: TableSchema) -> Partition:
    """Return the partition of a page's last row, and the position in it.

    :param page: page of the scan, with at least one row
    """
    rows, columns = page_cells(page, len(layout))
    last = {entry: cells.value(rows - 1) for entry, cells in zip(layout, columns, strict=True)}
    clustering = [last[ResultColumn("value", column.name)] for column in table.clustering]
    return _partition(
        last[ResultColumn("token", None)] or b"",
        tuple(last[ResultColumn("value", column.name)] or b"" for column in table.partition_key),
        # Null if the partition has static cells only.
        tuple(value for value in clustering if value is not None) or None,
    )


def rest_of_partition(
    select: str, table: TableSchema, where: Sequence[Condition], choices: Choices, partition: Partition
) -> Iterator[Request]:
    """Write the SELECTs that together give the partition's rows after the last one read, in clustering order.

    If no row was read, this is one SELECT of all rows. With clustering columns a, b, c the first SELECT gives the rows
    with the same a and b and a later c, the next one those with the same a and a later b, the last one those with a
    later a. Later means smaller in a descending column.

    :param select: ``SELECT … FROM …``
    """
    key = [f"{quote(column.name)} = ?" for column in table.partition_key]
    if partition.clustering is None:
        kept = _on(where, table.clustering)
        yield _request(select, [*key, *(condition.cql for condition in kept)], partition.values, where)
        return
    for depth in reversed(range(len(table.clustering))):
        column, reached = table.clustering[depth], partition.clustering[depth]
        later = _later(column, reached, where, choices)
        if later is None:
            continue
        same = [f"{quote(other.name)} = ?" for other in table.clustering[:depth]]
        # The same values fulfil their conditions, since the last row did.
        kept = _on(where, table.clustering[depth + 1 :])
        conditions = [*key, *same, *later[0], *(condition.cql for condition in kept)]
        yield _request(select, conditions, (*partition.values, *partition.clustering[:depth], later[1]), where)


def _later(
    column: Column, reached: bytes, where: Sequence[Condition], choices: Choices
) -> tuple[list[str], bytes] | None:
    """Write the conditions for values after the one reached, and their parameter; None: there can be no such values."""
    of_column = _on(where, [column])
    operators = {condition.operator for condition in of_column}
    if "=" in operators:
        return None
    if "IN" in operators:
        left = behind(choices[column.name], reached, column)
        return ([f"{quote(column.name)} IN ?"], _list_bytes(left)) if left else None
    direction = "<" if column.descending else ">"
    # If a value fulfils a condition in the same direction, all values after it do.
    others = [condition.cql for condition in of_column if condition.operator[0] != direction]
    return [f"{quote(column.name)} {direction} ?", *others], reached


def _request(select: str, conditions: list[str], values: tuple[bytes, ...], where: Sequence[Condition]) -> Request:
    return Request(f"{select} WHERE {all_of(conditions)}{filtering(where)}", values, thorough=True, begins_small=True)


def _on(where: Sequence[Condition], columns: Sequence[Column]) -> list[Condition]:
    names = {column.name for column in columns}
    return [condition for condition in where if condition.column in names]


def _partition(token: bytes, values: tuple[bytes, ...], clustering: tuple[bytes, ...] | None = None) -> Partition:
    # (C: CompositeType) each part of a key of several columns is its length, its bytes, and a zero.
    parts = [len(value).to_bytes(2, "big") + value + b"\0" for value in values] if len(values) > 1 else values
    return Partition(int.from_bytes(token, "big", signed=True), b"".join(parts), values, clustering)


def _list_bytes(values: Sequence[bytes]) -> bytes:
    parts = (len(value).to_bytes(4, "big") + value for value in values)
    return len(values).to_bytes(4, "big") + b"".join(parts)
