"""Change rows as objects, for CQL: one for each row and cell, with the literals of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from ringsync.changes.schema import EXPIRING, TOMBSTONE
from ringsync.changes.tables import LoggedColumn, columns_of
from ringsync.changes.texts import Bound, change_texts
from ringsync.cql.literals import CQL
from ringsync.schema.table import TableSchema


@dataclass(frozen=True)
class Times:
    """When something was written and for how long.

    :ivar timestamp: µs
    :ivar ttl: s; None: for ever
    :ivar expires_at: s since 1970
    """

    timestamp: int
    ttl: int | None = None
    expires_at: int | None = None


@dataclass(frozen=True)
class Cell:
    """A cell.

    :ivar path: literal; of a UDT's field its name, of a list's entry its timeuuid; None: a column of one cell, or
        bytes that are no value
    :ivar value: literal; None: a tombstone, an element of a set, or bytes that are no value
    :ivar raw_value: None: a tombstone
    :ivar local_deletion_time: s; None: it neither expires nor is a tombstone
    """

    column: LoggedColumn
    path: str | None
    value: str | None
    raw_path: bytes | None
    raw_value: bytes | None
    times: Times
    local_deletion_time: int | None
    kind: int

    @property
    def is_tombstone(self) -> bool:
        return self.kind == TOMBSTONE


@dataclass(frozen=True)
class ChangeRow:
    """A change row.

    :ivar partition_key: literals; None: bytes that are no value
    :ivar clustering: of the row, or the start of the range; None: static rows, partition deletions
    :ivar key: what no other row of any table has
    :ivar complex_deletions: column and µs
    """

    table: TableSchema
    kind: int
    partition_key: tuple[str | None, ...]
    clustering: Bound | None
    range_end: Bound | None
    key: tuple[str, bytes, bytes | None]
    liveness: Times | None
    deletion: int | None
    cells: tuple[Cell, ...]
    complex_deletions: tuple[tuple[LoggedColumn, int], ...]
    file: str
    position: int


def change_objects(rows: pa.RecordBatch, tables: Mapping[str, TableSchema]) -> Iterator[ChangeRow]:
    """Each change row.

    :param rows: of ``CHANGE_ROWS``
    :param tables: by id
    """
    texts = change_texts(rows, tables, CQL)
    cells = _cells(rows["cells"].flatten(), texts.columns, texts.paths, texts.values)
    deleted = zip(*_lists(rows["complex_deletions"].flatten(), "column", "timestamp"), strict=True)
    parts = zip(
        texts.tables,
        rows["kind"].to_pylist(),
        texts.partition_keys,
        texts.clusterings,
        texts.range_ends,
        rows["partition_key"].to_pylist(),
        rows["clustering"].to_pylist(),
        _liveness(rows["liveness"]),
        rows["deletion"].to_pylist(),
        rows["cells"].value_lengths().to_pylist(),
        rows["complex_deletions"].value_lengths().to_pylist(),
        rows["file"].to_pylist(),
        rows["position"].to_pylist(),
        strict=True,
    )
    for table, kind, key, start, end, raw_key, raw, liveness, deletion, size, deletions, file, position in parts:
        columns = columns_of(table) if deletions else ()
        yield ChangeRow(
            table,
            kind,
            key,
            start,
            end,
            (table.table_id, raw_key, raw),
            liveness,
            deletion["timestamp"] if deletion else None,
            tuple(next(cells) for _ in range(size)),
            tuple((columns[column], timestamp) for column, timestamp in (next(deleted) for _ in range(deletions))),
            file,
            position,
        )


def _cells(
    flat: pa.StructArray, columns: list[LoggedColumn], paths: list[str | None], values: list[str | None]
) -> Iterator[Cell]:
    raw = _lists(flat, "path", "value", "timestamp", "ttl", "local_deletion_time", "kind")
    for column, path, value, raw_path, raw_value, timestamp, ttl, local, kind in zip(
        columns, paths, values, *raw, strict=True
    ):
        times = Times(timestamp, ttl, local if kind == EXPIRING else None)
        yield Cell(column, path, value, raw_path, raw_value, times, local, kind)


def _liveness(array: pa.StructArray) -> Iterator[Times | None]:
    fields = _lists(array, "timestamp", "ttl", "expires_at")
    for there, *times in zip(array.is_valid().to_pylist(), *fields, strict=True):
        yield Times(*times) if there else None


def _lists(structs: pa.StructArray, *names: str) -> list[list]:  # type: ignore[type-arg]
    return [structs.field(name).to_pylist() for name in names]
