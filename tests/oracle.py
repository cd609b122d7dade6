"""The outside view: what Cassandra's own driver reads against what another engine finds in the lake.

Shares no code with the package beyond the table's description: the source is decoded by the driver, the
replica is read by delta-rs, and the layout of ``_row`` and ``_x`` is interpreted here anew.
"""

import io
import struct
from collections.abc import Mapping
from typing import Any

from cassandra.cluster import Session
from cassandra.protocol import _ProtocolHandler
from deltalake import DeltaTable, QueryBuilder

from ringsync.cql.types import ListType, MapType, SetType, TupleType, UserType, VectorType
from ringsync.schema.row_image import lake_names
from ringsync.schema.table import Column, TableSchema

Cell = tuple[Any, Any, Any]
"""(value, writetime µs, expires_at s); lists of times, one per element, for multi-cell columns."""
Rows = dict[tuple[Any, ...], dict[str, Cell]]


def source_rows(session: Session, table: TableSchema, now: int, element_times: bool = True) -> Rows:
    """Every row of the table by the driver's own decoders, times as of ``now`` (s)."""
    session.client_protocol_handler = _at(now)
    quoted = {column.name: '"' + column.name.replace('"', '""') + '"' for column in table.columns}
    selected = [quoted[column.name] for column in table.key_columns]
    for column in table.value_columns:
        name = quoted[column.name]
        selected += [name, f"writetime({name})", f"ttl({name})"][: 3 if element_times or not column.is_multicell else 1]
    statement = session.prepare(f'SELECT {", ".join(selected)} FROM "{table.keyspace}"."{table.name}"')
    statement.fetch_size = 1000
    rows: Rows = {}
    for row in session.execute(statement):
        values = iter(tuple(row))
        key = tuple(_plain(next(values), column.type) for column in table.key_columns)
        cells = {}
        for column in table.value_columns:
            value = _plain(next(values), column.type)
            known = element_times or not column.is_multicell
            writetime, ttl = (next(values), next(values)) if known else (None, None)
            if value is not None:
                cells[column.name] = (value, _listed(writetime), _expiry(ttl, now))
        assert key not in rows
        rows[key] = cells
    session.client_protocol_handler = _ProtocolHandler
    return rows


def replica_rows(uri: str, table: TableSchema) -> Rows:
    """Every row of the replica's base table, read by delta-rs."""
    batches = QueryBuilder().register("base", DeltaTable(uri)).execute("SELECT * FROM base").read_all()
    names = lake_names(table)
    rows: Rows = {}
    for row in _to_python(batches):
        key = tuple(_lake_plain(row[names[column.name]], column.type) for column in table.key_columns)
        cells = {}
        for column in table.value_columns:
            value = _lake_plain(row[names[column.name]], column.type)
            if value is not None:
                cells[column.name] = (value, *_times(row, column, names[column.name], value))
        assert key not in rows, f"the replica has {key} twice"
        rows[key] = cells
    return rows


def differences(source: Rows, replica: Rows) -> list[str]:
    """What differs, in words; empty when every cell is equal."""
    found = [f"missing in replica: {key}" for key in source.keys() - replica.keys()]
    found += [f"not in source: {key}" for key in replica.keys() - source.keys()]
    for key in source.keys() & replica.keys():
        for name in source[key].keys() | replica[key].keys():
            ours, theirs = replica[key].get(name), source[key].get(name)
            if repr(ours) != repr(theirs):
                found.append(f"{key} {name}: source {theirs}, replica {ours}")
    return found


def _to_python(batches: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    table = pa.table(batches)
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_date(field.type):
            column = column.cast(pa.int32())
        elif pa.types.is_timestamp(field.type):
            column = column.cast(pa.int64())
        columns.append(column.to_pylist())
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _times(row: Mapping[str, Any], column: Column, name: str, value: Any) -> tuple[Any, Any]:
    common, own = row["_row"], (row["_x"] or {}).get(name) or {}

    def writetime(difference: int | None) -> int:
        return int(common["writetime"] + (difference or 0))

    def expiry(own_expiry: int | None) -> int | None:
        return common["expires_at"] if own_expiry is None else None if own_expiry == -1 else own_expiry

    if not column.is_multicell:
        return writetime(own.get("d")), expiry(own.get("e"))
    count = len(value)
    unset = [isinstance(column.type, UserType) and element is None for element in value]
    d, e = own.get("d"), own.get("e")
    if d == [] or e == []:
        return None, None
    d = d if d is not None else [None] * count
    e = e if e is not None else [None] * count
    return (
        [None if gone else writetime(x) for x, gone in zip(d, unset, strict=True)],
        [None if gone else expiry(x) for x, gone in zip(e, unset, strict=True)],
    )


def _listed(writetime: Any) -> Any:
    return list(writetime) if isinstance(writetime, list | tuple) else writetime


def _expiry(ttl: Any, now: int) -> Any:
    if isinstance(ttl, list | tuple):
        return [None if t is None else now + t for t in ttl]
    return None if ttl is None else now + ttl


def _plain(value: Any, cql_type: Any) -> Any:
    """A value of the driver in the plain form that both sides are compared in."""
    if value is None:
        return None
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            return [_plain(item, element) for item in value]
        case MapType(key, inner):
            return [(_plain(k, key), _plain(v, inner)) for k, v in value.items()]
        case TupleType(fields):
            return tuple(_plain(item, field) for item, field in zip(value, fields, strict=True))
        case UserType():
            return tuple(_plain(item, field) for item, field in zip(value, cql_type.field_types, strict=True))
    match str(cql_type):
        case "date":
            return value.days_from_epoch
        case "time":
            return value.nanosecond_time
        case "timestamp":
            return _milliseconds(value) * 1000
        case "duration":
            return (value.months, value.days, value.nanoseconds)
        case "decimal" | "varint" | "uuid" | "timeuuid" | "inet":
            return str(value)
    return value


def _lake_plain(value: Any, cql_type: Any) -> Any:
    """A value of the lake, as pyarrow gives it, in the same plain form."""
    if value is None:
        return None
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            return [_lake_plain(item, element) for item in value]
        case MapType(key, inner):
            pairs = [(item["key"], item["value"]) if isinstance(item, dict) else item for item in value]
            return [(_lake_plain(k, key), _lake_plain(v, inner)) for k, v in pairs]
        case TupleType(fields):
            return tuple(_lake_plain(item, field) for item, field in zip(value.values(), fields, strict=True))
        case UserType():
            return tuple(
                _lake_plain(item, field) for item, field in zip(value.values(), cql_type.field_types, strict=True)
            )
    match str(cql_type):
        case "duration":
            return (value["months"], value["days"], value["nanoseconds"])
        case "date" if not isinstance(value, int):
            return value.toordinal() - 719163
        case "timestamp" if not isinstance(value, int):
            return _milliseconds(value.replace(tzinfo=None)) * 1000
    return value


def _milliseconds(moment: Any) -> int:
    import datetime

    return int((moment - datetime.datetime(1970, 1, 1)) / datetime.timedelta(milliseconds=1))


def _at(now: int) -> type[_ProtocolHandler]:
    """A protocol handler that makes every prepared SELECT see the cells as of ``now`` (native protocol v5)."""

    class Patched:
        def __init__(self, message: Any) -> None:
            self.message, self.opcode = message, message.opcode
            self.custom_payload, self.tracing = message.custom_payload, message.tracing

        def send_body(self, out: Any, version: int) -> None:
            buffer = io.BytesIO()
            self.message.send_body(buffer, version)
            body = bytearray(buffer.getvalue())
            position = 2 + len(self.message.query_id) + 2 + len(self.message.result_metadata_id) + 2
            (flags,) = struct.unpack_from(">I", body, position)
            struct.pack_into(">I", body, position, flags | 0x100)
            out.write(bytes(body) + struct.pack(">i", now))

    class Handler(_ProtocolHandler):  # type: ignore[misc]
        @classmethod
        def encode_message(cls, message: Any, *args: Any, **kwargs: Any) -> bytes:
            patched = Patched(message) if message.opcode == 0x0A else message
            return bytes(super().encode_message(patched, *args, **kwargs))

    return Handler
