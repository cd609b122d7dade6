"""The outside view: what Cassandra's own driver reads against what another engine finds in the lake.

Shares no code with the package beyond the table's description: the source is decoded by the driver, the
replica is read by delta-rs, and the layout of ``_row`` and ``_x`` is interpreted here anew.
"""

import decimal
import io
import struct
from collections.abc import Mapping
from typing import Any

from cassandra.cluster import Session
from cassandra.cqltypes import DateType
from cassandra.protocol import _ProtocolHandler
from deltalake import DeltaTable, QueryBuilder

from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType
from ringsync.images.schema import lake_names
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
    for row in _with_whole_timestamps(session, statement):
        values = iter(tuple(row))
        key = _key([_plain(next(values), column.type) for column in table.key_columns], table)
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
    return image_rows(QueryBuilder().register("base", DeltaTable(uri)).execute("SELECT * FROM base").read_all(), table)


def image_rows(batches: Any, table: TableSchema) -> Rows:
    """The rows of row images, of which no two may have the same key.

    :param batches: anything that Arrow can make a table of
    """
    names = lake_names(table)
    rows: Rows = {}
    for row in _to_python(batches):
        key = _key([_lake_plain(row[names[column.name]], column.type) for column in table.key_columns], table)
        cells = {}
        for column in table.value_columns:
            value = _lake_plain(row[names[column.name]], column.type)
            if value is not None:
                cells[column.name] = (value, *_times(row, column, names[column.name], value))
        assert key not in rows, f"{key} is there twice"
        rows[key] = cells
    return rows


def synced_rows(base: str, changes: str, table: TableSchema, now: int) -> Rows:
    """The rows of a replica that is kept in sync, as of ``now`` (s): the newest image of each key, if it is alive."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    names = lake_names(table)
    for uri in (base, changes):
        if not DeltaTable.is_deltatable(uri):
            continue
        batches = QueryBuilder().register("images", DeltaTable(uri)).execute("SELECT * FROM images").read_all()
        for row in _to_python(batches):
            key = _key([_lake_plain(row[names[column.name]], column.type) for column in table.key_columns], table)
            if key not in newest or row.get("_version", 0) > newest[key].get("_version", 0):
                newest[key] = row
    rows = {key: cells for key, row in newest.items() if (cells := _living_cells(row, table, names, now)) is not None}
    first = len(table.partition_key)
    if table.clustering:
        partitions = {key[:first] for key in rows if key[first] is not None}
        rows = {key: cells for key, cells in rows.items() if key[first] is not None or key[:first] not in partitions}
    return rows


def _living_cells(row: Mapping[str, Any], table: TableSchema, names: Mapping[str, str], now: int) -> Any:
    """The cells of an image that have not expired; None: the row is dead."""
    cells: dict[str, Cell] = {}
    for column in table.value_columns:
        value = _lake_plain(row[names[column.name]], column.type)
        if value is not None:
            cell = _unexpired(column, value, *_times(row, column, names[column.name], value), now)
            if cell is not None:
                cells[column.name] = cell
    regular = any(column.kind == "regular" and column.name in cells for column in table.value_columns)
    if table.clustering and row[names[table.clustering[0].name]] is None:
        return {name: cell for name, cell in cells.items() if table.column(name).kind == "static"} or None
    times, merge = row["_row"] or {}, row["_merge"] or {}
    live, deleted = times.get("live"), times.get("deleted_at")
    if live is None:
        had_cells = any(row[names[column.name]] is not None for column in table.of_kind("regular"))
        has_static = any(row[names[column.name]] is not None for column in table.of_kind("static"))
        end = times.get("expires_at") if times.get("writetime") is not None and not has_static else None
        lives = merge.get("unseen_at") is None and not had_cells and (end is None or end > now)
    else:
        expires = merge.get("live_expires_at")
        lives = live > -(2**63) and (deleted is None or live > deleted) and (expires is None or expires > now)
    return cells if regular or lives else None


def _unexpired(column: Column, value: Any, writetime: Any, expires: Any, now: int) -> Cell | None:
    if not isinstance(expires, list):
        return None if expires is not None and expires <= now else (value, writetime, expires)
    assert all(one is None or one > now for one in expires), (
        f"an element of {column.name} has expired: not handled here"
    )
    return value, writetime, expires


def identity(cql_type: CqlType, value: Any) -> Any:
    """What tells rows or elements apart, as the key of a dict: 1.0 and 1.00 are one."""
    if value is None:
        return None
    match cql_type:
        case Native("decimal"):
            sign, digits, exponent = decimal.Decimal(value).as_tuple()
            while len(digits) > 1 and digits[-1] == 0:
                digits, exponent = digits[:-1], int(exponent) + 1
            return str(decimal.Decimal((sign, digits, 0 if digits == (0,) else exponent)))
        case ListType(element) | SetType(element) | VectorType(element):
            return tuple(identity(element, one) for one in value)
        case MapType(key, item):
            return tuple((identity(key, one), identity(item, other)) for one, other in value)
        case TupleType(fields) | UserType(field_types=fields):
            return tuple(one if one is None else identity(kind, one) for kind, one in zip(fields, value, strict=True))
    return hashable(value)


def hashable(value: Any) -> Any:
    """A value as the key of a dict."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def _key(values: list[Any], table: TableSchema) -> tuple[Any, ...]:
    """Partition keys differ where their bytes do; clusterings compare by their type."""
    columns = zip(table.key_columns, values, strict=True)
    return tuple(identity(column.type, one) if column.kind == "clustering" else one for column, one in columns)


def differences(source: Rows, replica: Rows, slack_s: int = 0) -> list[str]:
    """What differs, in words; empty when every cell is equal.

    :param slack_s: so much may expiries differ: protocol v4 tells them no better
    """
    found = [f"missing in replica: {key}" for key in source.keys() - replica.keys()]
    found += [f"not in source: {key}" for key in replica.keys() - source.keys()]
    for key in source.keys() & replica.keys():
        for name in source[key].keys() | replica[key].keys():
            ours, theirs = replica[key].get(name), source[key].get(name)
            if repr(ours) != repr(theirs) and not (slack_s and _are_close(ours, theirs, slack_s)):
                found.append(f"{key} {name}: source {theirs}, replica {ours}")
    return found


def _are_close(one: Cell | None, other: Cell | None, slack_s: int) -> bool:
    """Whether two cells are equal but for some seconds of their expiry."""
    if one is None or other is None or repr(one[:2]) != repr(other[:2]):
        return False
    pairs = zip(*(cell[2] if isinstance(cell[2], list) else [cell[2]] for cell in (one, other)), strict=True)
    return all(a == b or (a is not None and b is not None and abs(a - b) <= slack_s) for a, b in pairs)


def _to_python(batches: Any) -> list[dict[str, Any]]:
    import pyarrow as pa

    table = pa.table(batches)
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        column = column.cast(_numbered(field.type))
        columns.append(column.to_pylist())
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _numbered(kind: Any) -> Any:
    """A type with numbers in the place of dates and timestamps, for Python's own end with the year 9999."""
    import pyarrow as pa

    if pa.types.is_date(kind):
        return pa.int32()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_map(kind):
        return pa.map_(_numbered(kind.key_type), _numbered(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_numbered(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _numbered(one.type)) for one in kind])
    return kind


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
            return (value if isinstance(value, int) else _milliseconds(value)) * 1000
        case "duration":
            return (value.months, value.days, value.nanoseconds)
        case "decimal" | "varint" | "uuid" | "timeuuid" | "inet":
            return str(value)
    return value


def _with_whole_timestamps(session: Session, statement: Any) -> list[Any]:
    """All rows of a query; timestamps in ms, since Python's datetime ends with the year 9999."""
    original = DateType.deserialize
    DateType.deserialize = staticmethod(lambda data, version: int.from_bytes(data, "big", signed=True))
    try:
        return list(session.execute(statement))
    finally:
        DateType.deserialize = original


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
