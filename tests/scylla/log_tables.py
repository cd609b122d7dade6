"""Tables for tests of the CDC log: a base table in all forms that the tests need, and result pages of its log.

Values are serialised by the driver for the native protocol v4, which Scylla speaks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cassandra.cqltypes as driver
import numpy as np

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.cql import types as cql
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from ringsync.scylla.log_rows import LogRows, decode_log
from ringsync.scylla.log_schema import LogTable, log_table_of
from tests.commitlog_model import types as commitlog_model
from tests.scylla_model import mutation as scylla_model

STREAM = bytes.fromhex("ced00000000000009663c8dc500005a1")
READ_AT, LOG_TTL = 1_700_000_000, 86_400
_METADATA = {
    "cdc$stream_id": "blob",
    "cdc$time": "timeuuid",
    "cdc$batch_seq_no": "int",
    "cdc$operation": "tinyint",
    "cdc$ttl": "bigint",
    "cdc$end_of_batch": "boolean",
}
_PROTOCOL = 4
_NATIVE = {kind.typename: kind for kind in driver._casstypes.values()} | {"text": driver.UTF8Type}


@dataclass(frozen=True)
class Tables:
    """A base table as the package, the model of Scylla's log and the model of commit logs have it."""

    base: TableSchema
    log: LogTable
    model: scylla_model.Table
    commitlog: commitlog_model.Table

    @property
    def logged(self) -> LoggedTables:
        return logged_tables([self.base])

    def page(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
        """The body of a result page with these log rows; columns that a row does not name are null."""
        body = [b"".join(self._cell(row, name, kind) for name, kind in self.log.layout) for row in rows]
        return struct.pack(">i", len(body)) + b"".join(body)

    @staticmethod
    def _cell(row: Mapping[str, Any], name: str, kind: cql.CqlType) -> bytes:
        plain = name if name.startswith("TTL(") else name[1:-1].replace('""', '"')
        value = row.get("cdc$stream_id", STREAM) if plain == "cdc$stream_id" else row.get(plain)
        data = raw(kind, value)
        return struct.pack(">i", -1 if data is None else len(data)) + (data or b"")

    def decode(self, *pages: bytes, **options: Any) -> LogRows:
        """Decode pages of a log that keeps its rows for ever, unless the options say something else."""
        given: dict[str, Any] = {"read_at_s": READ_AT, "log_ttls_s": ()}
        found = decode_log(pages, self.log, **(given | options))
        found.rows.validate(full=True)
        found.errors.validate(full=True)
        assert len(found.group) == len(found.arrivals_s[0] if found.arrivals_s else found.group) == found.rows.num_rows
        counts = found.counts
        assert counts.read == sum(int.from_bytes(page[:4], "big") for page in pages)
        assert counts.read == counts.changed + counts.images + counts.empty + counts.held + counts.errors
        assert np.array_equal(found.rows["position"], found.groups.write_time[found.group])
        return found


def raw(kind: cql.CqlType, value: Any) -> bytes | None:
    """The bytes of a value; those of bytes are themselves, whatever the type."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and isinstance(kind, cql.UserType):
        value = tuple(value[name] for name in kind.field_names)
    return bytes(_driver_type(kind).to_binary(value, _PROTOCOL))


def _driver_type(kind: cql.CqlType) -> Any:
    match kind:
        case cql.Native(name):
            return _NATIVE[name]
        case cql.SetType(element):
            return driver.SetType.apply_parameters([_driver_type(element)])
        case cql.ListType(element):
            return driver.ListType.apply_parameters([_driver_type(element)])
        case cql.MapType(key, value):
            return driver.MapType.apply_parameters([_driver_type(key), _driver_type(value)])
        case cql.UserType(keyspace, name, names, fields):
            return driver.UserType.make_udt_class(keyspace, name, names, [*map(_driver_type, fields)])
    raise AssertionError(kind)


def tables_of(columns: str, key: str, *, types: str = "", options: str = "") -> Tables:
    """Make the tables of the columns and primary key of ``ks.t``.

    :param types: fields of the user-defined type ``ks.u``
    :param options: further options of CREATE TABLE
    """
    of_type = f"CREATE TYPE ks.u ({types}); " if types else ""
    with_id = "WITH ID = 5e000000-1111-2222-3333-444444444444" + (f" AND {options}" if options else "")
    (base,) = parse_schema(f"{of_type}CREATE TABLE ks.t ({columns}, PRIMARY KEY ({key})) {with_id};", "test").tables
    return of_base(base, of_type)


def of_base(base: TableSchema, of_type: str = "") -> Tables:
    """Make the tables of a base table."""
    (log,) = parse_schema(of_type + log_text(base), "test").tables
    return Tables(base, log_table_of(base, log), _scylla_table(base), _commitlog_table(base))


def log_text(base: TableSchema) -> str:
    """CREATE TABLE of the log, by the rules of cdc/log.cc (add_columns_to_cdc_log)."""
    columns = {**_METADATA, **{key.name: str(key.type) for key in base.key_columns}}
    for column in base.value_columns:
        value, removed = str(column.type), None
        match column.type:
            case cql.ListType(element, frozen=False):
                value, removed = f"frozen<map<timeuuid, {element}>>", "timeuuid"
            case cql.SetType(element, frozen=False):
                value, removed = f"frozen<set<{element}>>", str(element)
            case cql.MapType(key, element, frozen=False):
                value, removed = f"frozen<map<{key}, {element}>>", str(key)
            case cql.UserType(name=name, frozen=False):
                value, removed = f"frozen<{name}>", "smallint"
        columns |= {column.name: value, f"cdc$deleted_{column.name}": "boolean"}
        if removed:
            columns[f"cdc$deleted_elements_{column.name}"] = f"frozen<set<{removed}>>"
    listed = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    key = 'PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no")'
    return f"CREATE TABLE ks.t_scylla_cdc_log ({listed}, {key});"


def _scylla_table(base: TableSchema) -> scylla_model.Table:
    kinds: Sequence[tuple[type, scylla_model.Kind]] = (
        *((cql.SetType, "set"), (cql.MapType, "map"), (cql.ListType, "list"), (cql.UserType, "udt")),
    )
    columns = []
    for column in base.value_columns:
        of_type = [kind for cls, kind in kinds if isinstance(column.type, cls)] if column.is_multicell else []
        fields = column.type.field_names if isinstance(column.type, cql.UserType) else ()
        kind = of_type[0] if of_type else "atomic"
        columns.append(scylla_model.Column(column.name, kind, column.kind == "static", fields))
    names = [tuple(key.name for key in keys) for keys in (base.partition_key, base.clustering)]
    return scylla_model.Table(names[0], names[1], tuple(columns))


def _commitlog_table(base: TableSchema) -> commitlog_model.Table:
    user = [column.type for column in base.columns if isinstance(column.type, cql.UserType)]
    return commitlog_model.Table(
        base.keyspace,
        base.name,
        "-".join(base.table_id[first:end] for first, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))),
        tuple((key.name, str(key.type)) for key in base.partition_key),
        tuple((key.name, str(key.type), key.descending) for key in base.clustering),
        {column.name: str(column.type) for column in base.of_kind("static")},
        {column.name: str(column.type) for column in base.of_kind("regular")},
        {},
        {one.name: tuple(zip(one.field_names, map(str, one.field_types), strict=True)) for one in user},
    )
