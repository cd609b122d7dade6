"""Compile every kernel once: ``python -m ringsync.warm`` (docs/performance.md).

The compiled code is kept in NUMBA_CACHE_DIR, so no worker compiles it again: twenty seconds of CPU on a new machine,
one on the next start.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.avro.to_json import json_converter
from ringsync.changes.columns import logged_tables
from ringsync.changes.flat import FlatDeletions
from ringsync.changes.keys.canonical import canonical_column
from ringsync.changes.reconcile.plain import order_plain
from ringsync.changes.reconcile.rows import merge
from ringsync.compiled.memory import padded
from ringsync.cql import types as cql
from ringsync.cql.codec.encode import encode
from ringsync.cql.natives import NATIVES
from ringsync.formats.commitlog.reader import read_changes
from ringsync.formats.commitlog.records import Records, find_records
from ringsync.formats.commitlog.segment import Section
from ringsync.formats.result_page import page_cells
from ringsync.formats.sstable.data import DataFile
from ringsync.formats.sstable.names import CHECKSUMS, DATA, INDEX, PARTITIONS, ROWS, Descriptor
from ringsync.formats.sstable.partitions import read_partitions
from ringsync.formats.sstable.reader import layout_of, read_plain_rows, read_rows
from ringsync.formats.sstable.statistics import Header
from ringsync.formats.sstable.tries import read_trie
from ringsync.images.after import rows_after
from ringsync.images.from_pages import ResultColumn, row_images
from ringsync.images.keys import key_digests
from ringsync.images.live import live_rows, shown_rows
from ringsync.images.queries import queries
from ringsync.images.to_changes import change_rows_of
from ringsync.replica.checksum import partial_checksums
from ringsync.schema.table import Column, TableSchema
from ringsync.scylla.log_rows import decode_log
from ringsync.scylla.log_schema import SET, LogColumn, LogTable
from ringsync.sources.lookup.keys import row_keys
from ringsync.sources.scan.scan import scan_query
from ringsync.streams.change_messages import change_messages
from ringsync.streams.messages import envelope_schema, key_schema, message_schema, snapshot_messages
from ringsync.streams.tokens import steps_to_token, tokens_of

NOW = 1_700_000_000
_NULL = struct.pack(">i", -1)


def warm() -> None:
    """Send one row with a column of every type through decoding, checksums and messages."""
    table = sample_table()
    query = scan_query(table, times=True, element_times=True)
    page = struct.pack(">i", 1) + b"".join(_cell(table, column) for column in query.layout)
    batch = row_images([page], table, query.layout, NOW, "raw")
    page_cells(page, len(query.layout))
    edges = np.array([-(2**63), 0, 2**63 - 1])
    partial_checksums(shown_rows([batch], table, NOW), table, edges)
    _read_record(table)
    _read_sstable(table)
    # A row without anything of the log of a set: logs that have only columns of one cell do not need all kernels.
    log = LogTable(table, "warm", (LogColumn(0, "warm", cql.SetType(cql.Native("int")), SET, False),), True)
    decode_log([struct.pack(">i", 1) + _NULL * len(log.layout)], log, read_at_s=NOW, log_ttls_s=[1])
    origin: dict[str, Any] = {"hostname": "", "processed_at_ms": 0, "schema_version": 1}
    messages = snapshot_messages(batch, table, "warm", "exact", **origin)
    key, envelope = (make(table, "warm", "exact") for make in (key_schema, envelope_schema))
    (value,) = messages.values.to_pylist()
    json_converter(envelope)([value])
    tokens_of(value, np.array([0, len(value)]), 1, steps_to_token(message_schema(key, envelope)))
    _publish_change(batch, table)


def _publish_change(images: pa.RecordBatch, table: TableSchema) -> None:
    """Send the row as a change through all steps of publishing."""
    rows = change_rows_of(images, table)
    # Without any, their kernel is not called.
    deletions = FlatDeletions(*np.zeros((4, 1), np.int64))
    merged = merge(replace(rows, digest=np.ones_like(rows.digest), complex_deletions=deletions), table)
    after = rows_after(images, merged, table, live_known_from_us=0, misfits="raw").images
    visible = live_rows(after, table, NOW)["#alive"].to_numpy(zero_copy_only=False)
    origin: dict[str, Any] = {"hostnames": pa.array([""]), "processed_at_ms": 0, "schema_version": 1}
    change_messages(merged, after, visible, table, "warm", "exact", queries=queries(merged, table), **origin)
    key_digests(after, table)
    for column in table.columns:
        canonical_column(after[column.name], column.type)
    row_keys(merged.keys, table)


def _read_record(table: TableSchema) -> None:
    """Send an empty commit log record through the commit log's kernels."""
    mutation = b"\x01" + bytes.fromhex(table.table_id) + b"\x01\x00\x01" + bytes(10)
    record = struct.pack(">iI", len(mutation), 0) + mutation + bytes(4)
    buffer = padded(record)
    find_records(buffer, [Section(0, len(record), 0)])
    offset, size, position = (np.array([number]) for number in (8, len(mutation), len(record)))
    records = Records(offset, size, position, np.array([True]))
    for _ in read_changes(buffer, records, logged_tables([table]), "warm"):
        pass


@dataclass(frozen=True)
class _InMemory:
    """The files of an SSTable that was never written."""

    descriptor: Descriptor
    files: dict[str, bytes]

    def read(self, component: str) -> bytes | None:
        return self.files.get(component)

    def size(self, component: str) -> int | None:
        return len(self.files[component]) if component in self.files else None

    def read_range(self, component: str, start: int, length: int) -> bytes:
        return self.files[component][start : start + length]


def _read_sstable(table: TableSchema) -> None:
    """Send an empty partition, and an entry of each kind of index, through the kernels of SSTables."""
    key = b"\0\4warm"
    files = {DATA: key + b"\x80\x01", INDEX: key + b"\0\0", ROWS: key + b"\0"}
    files[CHECKSUMS] = struct.pack(">iI", 2**16, zlib.crc32(files[DATA]))
    # A trie of one node, whose payload is the place 0 in Rows.db.
    files[PARTITIONS] = b"\x01\x00" + struct.pack(">qqq", 2, 1, 0)
    header = Header(0, 0, 0, tuple(column.type for column in table.partition_key), (), (), ())
    source = _InMemory(Descriptor("oa", "1", "big"), files)
    data = DataFile(source)
    read_partitions(source, data.length)
    layout = layout_of(source.descriptor, header, table)
    for _ in read_rows(data, layout, 0, data.length, lambda _: None):
        pass
    for _ in read_trie(source):
        pass
    for batch in read_plain_rows(data, layout, 0, data.length, lambda _: None):
        if ordered := order_plain([batch.rows], table):
            ordered.merged()
            ordered.shown(0)


def sample_table() -> TableSchema:
    """Return a table with every native type and every kind of collection."""
    text = cql.Native("text")
    nested: list[cql.CqlType] = [
        cql.ListType(text),
        cql.SetType(text),
        cql.MapType(text, cql.Native("int")),
        cql.TupleType((text,)),
    ]
    nested += [
        cql.VectorType(cql.Native("float"), 2),
        cql.VectorType(text, 2),
        cql.parse_type("frozen<list<decimal>>", {}),
    ]
    columns = [Column("key", "partition_key", text)]
    types = [*(cql.Native(name) for name in NATIVES if name != "counter"), *nested]
    columns += [Column(f"c{i:02}", "regular", cql_type) for i, cql_type in enumerate(types)]
    return TableSchema("warm", "warm", "0" * 32, tuple(columns))


def _cell(table: TableSchema, selected: ResultColumn) -> bytes:
    """Return a cell of the page as the server would send it."""
    bigint = cql.Native("bigint")
    if selected.column is None:
        return _prefixed(bigint, 1)
    column = table.column(selected.column)
    if selected.role == "value":
        return _prefixed(column.type, _sample(column.type))
    kind = bigint if selected.role == "writetime" else cql.Native("int")
    return _prefixed(cql.ListType(kind), [5]) if column.is_multicell else _prefixed(kind, 5)


def _prefixed(cql_type: cql.CqlType, value: object) -> bytes:
    kind = cql.arrow_type(cql_type)
    physical = {pa.date32(): pa.int32(), pa.timestamp("us", "UTC"): pa.int64()}.get(kind, kind)
    data = encode(cql_type, pa.array([value], physical).cast(kind))[0].as_py()
    return struct.pack(">i", len(data)) + bytes(data)


def _sample(cql_type: cql.CqlType) -> object:
    match cql_type:
        case cql.ListType(element) | cql.SetType(element):
            return [_sample(element)]
        case cql.MapType(key, value):
            return [(_sample(key), _sample(value))]
        case cql.TupleType(fields):
            return {f"field_{i + 1}": _sample(field) for i, field in enumerate(fields)}
        case cql.VectorType(element, dimension):
            return [_sample(element)] * dimension
    return NATIVES[str(cql_type)].sample


if __name__ == "__main__":
    warm()
