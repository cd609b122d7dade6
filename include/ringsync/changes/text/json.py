"""Change rows as JSON objects, one per line, as docs/inspect.md describes them."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from ringsync.changes.batch import ChangeRows
from ringsync.changes.columns import LoggedColumn, columns_of
from ringsync.changes.schema import EXPIRING, KINDS, RANGE_DELETION, TOMBSTONE
from ringsync.changes.text.values import Bound, ChangeTexts, change_texts
from ringsync.cql.text.json import JSON, json_string
from ringsync.cql.text.values import NULL
from ringsync.cql.types import ListType, SetType, UserType
from ringsync.schema.table import TableSchema

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""JSON allows these characters in strings, but many programs take them for the end of a line."""

_quoted = lru_cache(maxsize=65536)(json_string)


def json_lines(
    rows: pa.RecordBatch, tables: Mapping[str, TableSchema], raw: bool = False
) -> tuple[list[str], Counter[tuple[str, str]]]:
    """Write a JSON object for each change row, and count the malformed values of each table and column.

    Bytes that are no value of their type are malformed. Such a value is null, and its bytes are added even if ``raw``
    is false.

    :param rows: batch of ``CHANGE_ROWS``
    :param tables: tables by id
    :param raw: whether to add the bytes of keys, paths and values, as hexadecimal digits
    """
    texts = change_texts(ChangeRows.of(rows), tables, JSON)
    by_id = {table_id: _names(tables[table_id]) for table_id in {table.table_id for table in texts.tables}}
    names = [by_id[table.table_id] for table in texts.tables]
    kinds = rows["kind"].to_pylist()
    parts = zip(
        [table_names.table for table_names in names],
        rows["token"].to_pylist(),
        kinds,
        _partition_keys(rows["partition_key"], names, texts, raw),
        _clusterings(kinds, names, texts, raw),
        _liveness(rows["liveness"]),
        _deletions(rows["deletion"]),
        _by_row(rows["cells"], "cells", _cells(rows["cells"].flatten(), texts, raw)),
        _by_row(rows["complex_deletions"], "complex_deletions", _complex_deletions(rows, names)),
        _ranges(names, texts, raw),
        rows["file"].to_pylist(),
        rows["position"].to_pylist(),
        rows["digest"].to_pylist(),
        strict=True,
    )
    lines = [
        f'{{{table},"token":{token},"kind":"{KINDS[kind]}",{"".join(content)},'
        f'"source":{{"file":{json_string(file)},"position":{position}}},"digest":"{digest.hex()}"}}'
        for table, token, kind, *content, file, position, digest in parts
    ]
    return [_LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04X}", line) for line in lines], texts.malformed


@dataclass(frozen=True)
class _Names:
    """The names of a table and its columns, as JSON."""

    table: str
    partition_key: tuple[str, ...]
    clustering: tuple[str, ...]
    columns: tuple[str, ...]


def _names(table: TableSchema) -> _Names:
    keyspace, name = json_string(table.keyspace), json_string(table.name)
    return _Names(
        f'"keyspace":{keyspace},"table":{name},"table_id":"{uuid.UUID(table.table_id)}"',
        tuple(json_string(column.name) for column in table.partition_key),
        tuple(json_string(column.name) for column in table.clustering),
        tuple(json_string(column.name) for column in columns_of(table)),
    )


def _object(names: Sequence[str], values: Sequence[str | None]) -> str:
    return ",".join([f"{name}:{value or NULL}" for name, value in zip(names, values, strict=False)])


def _partition_keys(keys: pa.Array, names: list[_Names], texts: ChangeTexts, raw: bool) -> Iterator[str]:
    for key, values, table in zip(keys.to_pylist(), texts.partition_keys, names, strict=True):
        text = f'"partition_key":{{{_object(table.partition_key, values)}}}'
        yield f'{text},"raw_partition_key":"{key.hex()}"' if raw or None in values else text


def _clusterings(kinds: list[int], names: list[_Names], texts: ChangeTexts, raw: bool) -> Iterator[str]:
    """Write the clusterings of rows. Those of ranges are inside ``range``."""
    for bound, kind, table in zip(texts.clusterings, kinds, names, strict=True):
        yield "," + _clustering(bound, table, raw) if bound and bound.values and kind != RANGE_DELETION else ""


def _ranges(names: list[_Names], texts: ChangeTexts, raw: bool) -> Iterator[str]:
    for start, end, table in zip(texts.clusterings, texts.range_ends, names, strict=True):
        if start is None or end is None:
            yield ""
        else:
            sides = [
                f'"{side}":{{{_clustering(bound, table, raw)},"inclusive":{str(bound.inclusive).lower()}}}'
                for side, bound in (("start", start), ("end", end))
            ]
            yield f',"range":{{{",".join(sides)}}}'


def _clustering(bound: Bound, names: _Names, raw: bool) -> str:
    text = f'"clustering":{{{_object(names.clustering, bound.values)}}}'
    if not raw and None not in bound.values:
        return text
    values = [NULL if value is None else f'"{value.hex()}"' for value in bound.raw]
    return f'{text},"raw_clustering":[{",".join(values)}]'


def _liveness(array: pa.StructArray) -> Iterator[str]:
    for there, timestamp, ttl, expires_at in _fields(array):
        times = "" if ttl is None else f',"ttl":{ttl},"expires_at":{expires_at}'
        yield f',"liveness":{{"timestamp":{timestamp}{times}}}' if there else ""


def _deletions(array: pa.StructArray) -> Iterator[str]:
    for there, timestamp, local in _fields(array):
        yield f',"deletion":{{"timestamp":{timestamp},"local_deletion_time":{local}}}' if there else ""


def _fields(array: pa.StructArray) -> Iterator[tuple[Any, ...]]:
    """Return for each struct whether it is there, and its fields."""
    children = [array.field(i).to_pylist() for i in range(array.type.num_fields)]
    return zip(array.is_valid().to_pylist(), *children, strict=True)


def _cells(flat: pa.StructArray, texts: ChangeTexts, raw: bool) -> Iterator[str]:
    parts = zip(
        texts.columns,
        texts.paths,
        texts.values,
        _fields(flat),
        strict=True,
    )
    for column, path, value, (_, _, raw_path, raw_value, timestamp, ttl, local, kind) in parts:
        text = f'{{"column":{_quoted(column.name)}'
        if raw_path is not None:
            text += f',"path":{_path(column, path)}'
            if raw or path is None:
                text += f',"raw_path":"{raw_path.hex()}"'
        if kind == TOMBSTONE:
            yield f'{text},"deleted":true,"timestamp":{timestamp},"local_deletion_time":{local}}}'
            continue
        has_value = raw_path is None or not isinstance(column.type, SetType)
        if has_value:
            text += f',"value":{value or NULL}'
        if raw or (has_value and value is None):
            text += f',"raw":"{raw_value.hex()}"'
        times = f',"ttl":{ttl},"expires_at":{local}' if kind == EXPIRING else ""
        yield f'{text},"timestamp":{timestamp}{times}}}'


def _path(column: LoggedColumn, path: str | None) -> str:
    if path is None:
        return NULL
    return _quoted(path) if isinstance(column.type, ListType | UserType) else path


def _complex_deletions(rows: pa.RecordBatch, names: list[_Names]) -> Iterator[str]:
    lists = rows["complex_deletions"]
    flat = lists.flatten()
    sizes = lists.value_lengths().to_pylist()
    tables = (table for table, size in zip(names, sizes, strict=True) for _ in range(size))
    for table, (_, column, timestamp, local) in zip(tables, _fields(flat), strict=True):
        yield f'{{"column":{table.columns[column]},"timestamp":{timestamp},"local_deletion_time":{local}}}'


def _by_row(lists: pa.ListArray, name: str, objects: Iterator[str]) -> Iterator[str]:
    for size in lists.value_lengths().to_pylist():
        yield f',"{name}":[{",".join([next(objects) for _ in range(size)])}]' if size else ""
