"""The base tables that the simulator writes to: their CQL types beside the model's columns.

Keys and values are the Python values that the driver takes. A clustering value of a descending column stands in the
model as :class:`Descending`, so that the model's comparisons give Scylla's order; everywhere else it is plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from cassandra import cqltypes
from cassandra.metadata import Murmur3Token

from tests.scylla_model.mutation import Column, Key, Kind, Table

TYPES = {
    "int": cqltypes.Int32Type,
    "bigint": cqltypes.LongType,
    "smallint": cqltypes.ShortType,
    "text": cqltypes.UTF8Type,
    "blob": cqltypes.BytesType,
    "boolean": cqltypes.BooleanType,
    "double": cqltypes.DoubleType,
    "decimal": cqltypes.DecimalType,
    "timestamp": cqltypes.DateType,
    "uuid": cqltypes.UUIDType,
    "timeuuid": cqltypes.TimeUUIDType,
}
"""The driver's types by their names in CQL."""


@total_ordering
@dataclass(frozen=True, eq=True)
class Descending:
    """A value of a descending clustering column: the greater one comes first."""

    value: Any

    def __lt__(self, other: Descending) -> bool:
        return bool(self.value > other.value)


def plain(value: Any) -> Any:
    """A value as the driver takes it."""
    return value.value if isinstance(value, Descending) else value


def serialised(cql_type: str, value: Any) -> bytes:
    """The bytes of a value of a simple type."""
    return bytes(TYPES[cql_type].serialize(value, 4))


@dataclass(frozen=True)
class CqlColumn:
    """A column that is no key.

    :ivar cql: type of an atomic column, of a collection's values or of a set's elements
    :ivar key: type of a map's keys
    :ivar fields: names and types of a UDT's fields
    """

    name: str
    cql: str = ""
    kind: Kind = "atomic"
    static: bool = False
    key: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    udt: str = ""

    @property
    def cql_type(self) -> str:
        """The type as CQL writes it."""
        shapes = {"atomic": self.cql, "map": f"map<{self.key}, {self.cql}>", "udt": self.udt}
        return shapes.get(self.kind, f"{self.kind}<{self.cql}>")

    @property
    def log_types(self) -> tuple[str, str]:
        """The types of its value column in the log and of ``cdc$deleted_elements_…``, '' for none."""
        return {
            "atomic": (self.cql_type, ""),
            "set": (f"frozen<set<{self.cql}>>", f"frozen<set<{self.cql}>>"),
            "map": (f"frozen<map<{self.key}, {self.cql}>>", f"frozen<set<{self.key}>>"),
            "list": (f"frozen<map<timeuuid, {self.cql}>>", "frozen<set<timeuuid>>"),
            "udt": (f"frozen<{self.udt}>", "frozen<set<smallint>>"),
        }[self.kind]

    def value_bytes(self, path: Any, value: Any) -> bytes:
        """The bytes of a cell's value; ``path``: the element's key, None in an atomic column."""
        if value is None or self.kind == "set":
            return b""
        return serialised(self.fields[path][1] if self.kind == "udt" else self.cql, value)


@dataclass(frozen=True)
class BaseTable:
    """A base table.

    :ivar descending: the clustering columns that are so
    :ivar default_ttl_s: of the table; 0: none
    """

    keyspace: str
    name: str
    partition_key: tuple[tuple[str, str], ...]
    clustering_key: tuple[tuple[str, str], ...]
    columns: tuple[CqlColumn, ...]
    descending: frozenset[str] = frozenset()
    default_ttl_s: int = 0

    @property
    def full_name(self) -> str:
        return f"{self.keyspace}.{self.name}"

    @property
    def log_name(self) -> str:
        return f"{self.full_name}_scylla_cdc_log"

    @property
    def model(self) -> Table:
        """The table as the model sees it."""
        columns = tuple(
            Column(one.name, one.kind, one.static, tuple(name for name, _ in one.fields)) for one in self.columns
        )
        partition, clustering = (tuple(name for name, _ in key) for key in (self.partition_key, self.clustering_key))
        return Table(partition, clustering, columns)

    def column(self, name: str) -> CqlColumn:
        """The column of that name that is no key."""
        return next(column for column in self.columns if column.name == name)

    def clustering(self, *values: Any) -> Key:
        """A clustering key, or a prefix of one, for the model."""
        names = [name for name, _ in self.clustering_key]
        return tuple(
            Descending(value) if name in self.descending else value for name, value in zip(names, values, strict=False)
        )

    def key_bytes(self, key: Key) -> bytes:
        """The serialised partition key."""
        parts = [serialised(cql, value) for (_, cql), value in zip(self.partition_key, key, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return b"".join(len(part).to_bytes(2, "big") + part + b"\0" for part in parts)

    def token(self, key: Key) -> int:
        """The token of a partition key, by the driver's hash."""
        return int(Murmur3Token.hash_fn(self.key_bytes(key)))

    def user_types(self) -> list[str]:
        """The CREATE TYPE statements that the table needs."""
        types = {one.udt: one.fields for one in self.columns if one.udt}
        return [
            f"CREATE TYPE IF NOT EXISTS {self.keyspace}.{name} ({', '.join(' '.join(one) for one in fields)})"
            for name, fields in types.items()
        ]

    def create_table(self) -> str:
        """Its CREATE TABLE, without the option ``cdc``."""
        defined = [f"{name} {cql}" for name, cql in (*self.partition_key, *self.clustering_key)]
        defined += [f"{one.name} {one.cql_type}{' static' * one.static}" for one in self.columns]
        partition = ", ".join(name for name, _ in self.partition_key)
        clustering = [name for name, _ in self.clustering_key]
        defined.append(f"PRIMARY KEY ({', '.join([f'({partition})', *clustering])})")
        options = [f"default_time_to_live = {self.default_ttl_s}"]
        if clustering:
            order = ", ".join(f"{name} {'DESC' if name in self.descending else 'ASC'}" for name in clustering)
            options.append(f"CLUSTERING ORDER BY ({order})")
        return f"CREATE TABLE {self.full_name} ({', '.join(defined)}) WITH {' AND '.join(options)}"

    def log_columns(self) -> dict[str, str]:
        """The types of the log's columns."""
        types = {
            "cdc$stream_id": "blob",
            "cdc$time": "timeuuid",
            "cdc$batch_seq_no": "int",
            "cdc$operation": "tinyint",
            "cdc$ttl": "bigint",
            "cdc$end_of_batch": "boolean",
            **dict(self.partition_key),
            **dict(self.clustering_key),
        }
        for one in self.columns:
            value, elements = one.log_types
            types |= {one.name: value, f"cdc$deleted_{one.name}": "boolean"}
            types |= {f"cdc$deleted_elements_{one.name}": elements} if elements else {}
        return types

    def create_log(self) -> str:
        """CREATE TABLE of its log, for a server that does not make one."""
        defined = ", ".join(f'"{name}" {cql}' for name, cql in self.log_columns().items())
        return (
            f'CREATE TABLE {self.log_name} ({defined}, PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no"))'
        )


ADDRESS = (("street", "text"), ("zip", "int"), ("city", "text"))


def wide_table(keyspace: str = "sim", *, lists: bool = True) -> BaseTable:
    """A table with everything: composite keys, a descending clustering column, statics, every kind of column."""
    columns = [
        CqlColumn("s", "text", static=True),
        CqlColumn("sm", "int", "map", static=True, key="text"),
        CqlColumn("i", "int"),
        CqlColumn("t", "text"),
        CqlColumn("d", "double"),
        CqlColumn("b", "blob"),
        CqlColumn("w", "timestamp"),
        CqlColumn("u", "uuid"),
        CqlColumn("n", "decimal"),
        CqlColumn("tags", "text", "set"),
        CqlColumn("m", "text", "map", key="int"),
        CqlColumn("a", kind="udt", fields=ADDRESS, udt="address"),
    ]
    if lists:
        columns.append(CqlColumn("l", "int", "list"))
    keys = (("p1", "int"), ("p2", "text")), (("c1", "int"), ("c2", "text"))
    return BaseTable(keyspace, "wide", *keys, tuple(columns), frozenset({"c2"}))


def narrow_table(keyspace: str = "sim") -> BaseTable:
    """A table without clustering key."""
    columns = CqlColumn("v", "int"), CqlColumn("flag", "boolean"), CqlColumn("tags", "int", "set")
    return BaseTable(keyspace, "narrow", (("id", "bigint"),), (), columns)


def expiring_table(keyspace: str = "sim", default_ttl_s: int = 3600) -> BaseTable:
    """A table with a default TTL."""
    columns = CqlColumn("v", "int"), CqlColumn("t", "text"), CqlColumn("m", "int", "map", key="text")
    return BaseTable(
        keyspace, "expiring", (("id", "uuid"),), (("at", "timestamp"),), columns, frozenset({"at"}), default_ttl_s
    )


def all_tables(keyspace: str = "sim", *, lists: bool = True) -> list[BaseTable]:
    """The tables of the workload."""
    return [wide_table(keyspace, lists=lists), narrow_table(keyspace), expiring_table(keyspace)]
