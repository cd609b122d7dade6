"""What a consumer makes of a stream: messages applied to nothing, by last write wins, in plain Python.

Shares no code with the package beyond the description of tables and their names. Messages are those of the mapping
``exact`` as fastavro decodes them without logical types; the rows come in the form of :mod:`tests.oracle`, so that they
can be compared with what SELECT shows.
"""

from __future__ import annotations

import decimal
import ipaddress
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cmp_to_key
from typing import Any

from ringsync.cql.identifiers import portable_names
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType
from ringsync.images.schema import lake_names
from ringsync.schema.table import Column, TableSchema
from tests.commitlog_model.order import compare
from tests.commitlog_model.types import Type
from tests.cql.strategies import serialise
from tests.oracle import Rows, hashable, identity

Message = dict[str, Any]
NEVER = -(2**63)


def of_the_last_table(messages: Iterable[Message]) -> list[Message]:
    """The messages of a stream without those of tables that were dropped and created again under the name.

    What every consumer does first, as they come: by an id that is new all is forgotten that was told before, and what
    is of an older one is left out.
    """
    ids: list[str] = []
    found: list[Message] = []
    for message in messages:
        table_id = message["value"]["source"]["table_id"]
        if table_id not in ids:
            ids.append(table_id)
            found.clear()
        if table_id == ids[-1]:
            found.append(message)
    return found


@dataclass(frozen=True)
class Raw:
    """A value that its type cannot express, as Cassandra's bytes."""

    data: bytes


@dataclass
class Cell:
    """The greatest write to a cell.

    :ivar value: None: it was deleted
    """

    writetime: int
    expires_at: int | None
    value: Any
    raw: bytes = b""

    def rank(self) -> tuple[Any, ...]:
        """The greater one wins; of two values that were written at once the one with the greater bytes."""
        dead = self.value is None
        return self.writetime, dead or self.expires_at is not None, dead, self.expires_at or 0, self.raw

    def is_live(self, deleted_at: int, now: int) -> bool:
        expired = self.expires_at is not None and self.expires_at <= now
        return self.writetime > deleted_at and self.value is not None and not expired


@dataclass
class Values:
    """A column of one row.

    :ivar deleted_at: µs, of all elements
    :ivar cells: by identity; None in columns of one cell
    :ivar whole: the value of a collection whose elements' times nobody knows
    """

    deleted_at: int = NEVER
    cells: dict[Any, Cell] = field(default_factory=dict)
    whole: Any = None

    def write(self, identity: Any, cell: Cell, newest: bool = False) -> None:
        known = self.cells.get(identity)
        if known is None or newest or cell.rank() > known.rank():
            self.cells[identity] = cell


@dataclass
class Row:
    """A row, or the static cells of a partition.

    :ivar live: writetime (µs) and expiry (s) of the row itself
    :ivar exists: somebody saw the row, nobody knows its liveness
    """

    deleted_at: int = NEVER
    live: tuple[int, int | None] = (NEVER, None)
    exists: bool = False
    columns: dict[str, Values] = field(default_factory=dict)

    def of(self, column: Column) -> Values:
        return self.columns.setdefault(column.name, Values())


@dataclass
class Partition:
    """:ivar ranges: bounds and time (µs) of their deletion"""

    deleted_at: int = NEVER
    ranges: list[tuple[Message, int]] = field(default_factory=list)
    static: Row = field(default_factory=Row)
    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)


class StreamModel:
    """The rows of a table, as the messages of its stream tell.

    :param complete: whether ``after`` is the whole row (after_image source, replica), not what changed only (none)
    """

    def __init__(self, table: TableSchema, complete: bool) -> None:
        self.table = table
        self.complete = complete
        self.names = lake_names(table)
        self.partitions: dict[tuple[Any, ...], Partition] = {}

    def apply_all(self, messages: Iterable[Message]) -> StreamModel:
        """Apply messages ``{"key", "value"}``, in the order of the stream."""
        for message in messages:
            self.apply(message["key"], message["value"])
        return self

    def apply(self, key: Message, value: Message) -> None:
        """Apply one message."""
        partition = self.partitions.setdefault(self._key(key, self.table.partition_key), Partition())
        clustering = self._key(key, self.table.clustering)
        times = value["cells"]["_row"] or {"writetime": None, "expires_at": None, "deleted_at": None}
        deleted_at = NEVER if times["deleted_at"] is None else times["deleted_at"]
        if value.get("range"):
            partition.ranges.append((value["range"], deleted_at))
            for place, row in partition.rows.items():
                row.exists &= not self._covers(value["range"], place)
        elif self.table.clustering and clustering[0] is None:
            partition.static.deleted_at = max(partition.static.deleted_at, deleted_at)
            self._write(partition.static, value, ("static",))
            if value["after"] is None and not self._names_cells(value) and deleted_at > NEVER:
                partition.deleted_at = max(partition.deleted_at, deleted_at)
                for row in partition.rows.values():
                    row.exists = False
        else:
            row = partition.rows.setdefault(clustering, Row())
            row.deleted_at = max(row.deleted_at, deleted_at)
            if times["writetime"] is not None:
                row.live = max(row.live, (times["writetime"], times["expires_at"]), key=_liveness_rank)
            self._notice(row, value, times["writetime"], deleted_at)
            self._write(row, value, ("regular",))
            if value["after"] is not None:
                self._write(partition.static, value, ("static",))

    def rows(self, now: int) -> Rows:
        """Every row that a SELECT would show.

        :param now: s; what has expired by then is not there
        """
        found: Rows = {}
        for key, partition in self.partitions.items():
            deleted_at = max(partition.deleted_at, partition.static.deleted_at)
            static = self._shown(partition.static, deleted_at, now, ("static",))
            alive = 0
            for clustering, row in partition.rows.items():
                covering = [time for bounds, time in partition.ranges if self._covers(bounds, clustering)]
                deleted_at = max([row.deleted_at, partition.deleted_at, *covering])
                cells = self._shown(row, deleted_at, now, ("regular",))
                if cells or self._is_alive(row, deleted_at, now):
                    alive += 1
                    found[key + clustering] = static | cells
            if static and not alive:
                found[key + (None,) * len(self.table.clustering)] = static
        return found

    def _key(self, record: Message, columns: Iterable[Column]) -> tuple[Any, ...]:
        found = []
        for column in columns:
            raw = (record["_x"] or {}).get(self.names[column.name])
            value = record[self.names[column.name]]
            found.append(Raw(raw) if raw is not None else hashable(plain(value, column.type)))
        return tuple(found)

    def _names_cells(self, value: Message) -> bool:
        return any(cell for name, cell in value["cells"].items() if name != "_row")

    def _notice(self, row: Row, value: Message, writetime: int | None, deleted_at: int) -> None:
        """Whether the row is there: what its cells and its liveness do not tell, its newest message does."""
        if value["after"] is not None and (self.complete or value["op"] == "r"):
            row.exists = writetime is None and row.live[0] <= row.deleted_at
        elif self.complete or deleted_at > NEVER:
            row.exists = False

    def _write(self, row: Row, value: Message, kinds: tuple[str, ...]) -> None:
        for column in self.table.of_kind(*kinds):  # type: ignore[arg-type]
            name = self.names[column.name]
            if name not in value["cells"]:
                continue  # it was made when the table did not have the column
            cell, after = value["cells"][name], (value["after"] or {}).get(name)
            if column.is_multicell:
                self._write_many(row.of(column), column, cell, after, value)
            elif cell is not None:
                self._write_one(row.of(column), column, cell, after)

    def _write_one(self, values: Values, column: Column, cell: Message, after: Any) -> None:
        if cell["deleted_at"] is not None:
            values.write(None, Cell(cell["deleted_at"], None, None), newest=column.is_counter)
        if cell["raw"] is not None:
            held, raw = Raw(cell["raw"]), cell["raw"]
        else:
            held = plain(after, column.type)
            raw = b"" if column.is_counter else _bytes(column.type, held)
        if held is not None:
            values.write(None, Cell(cell["writetime"], cell["expires_at"], held, raw), newest=column.is_counter)

    def _write_many(self, values: Values, column: Column, cell: Message | None, after: Any, value: Message) -> None:
        is_list = isinstance(column.type, ListType)
        if is_list and self.complete:
            # The names of entries may be unknown, but this is the whole list; there is none where no row is left.
            values.cells, values.whole = {}, None
        if cell is None:
            return
        if cell["deleted_at"] is not None:
            values.deleted_at = max(values.deleted_at, cell["deleted_at"])
        entries = cell["elements"] or []
        live = [one for one in entries if one["writetime"] is not None]
        for one in entries:
            if one["writetime"] is None and not (is_list and self.complete):
                values.write(self._identity(column, one), Cell(one["deleted_at"], None, None))
        if cell["raw"] is not None:
            values.whole = Raw(cell["raw"])
        elif after is not None and not live:
            values.whole = plain(after, column.type)
        elif after is not None:
            values.whole = None
            for place, (one, (name, held, raw)) in enumerate(zip(live, elements(column.type, after), strict=True)):
                if is_list:
                    name = ("?", place) if one["identity"] is None else one["identity"]
                values.write(name, Cell(one["writetime"], one["expires_at"], held, raw))

    def _identity(self, column: Column, element: Message) -> Any:
        if element["raw"] is not None:
            return Raw(element["raw"])
        match column.type:
            case SetType(kind) | MapType(kind):
                return identity(kind, plain(element["identity"], kind))
        return element["identity"]

    def _shown(self, row: Row, deleted_at: int, now: int, kinds: tuple[str, ...]) -> dict[str, Any]:
        found = {}
        for column in self.table.of_kind(*kinds):  # type: ignore[arg-type]
            values = row.columns.get(column.name)
            if values is None:
                continue
            if values.whole is not None:
                found[column.name] = (values.whole, None, None)
                continue
            after = max(deleted_at, values.deleted_at)
            live = {name: cell for name, cell in values.cells.items() if cell.is_live(after, now)}
            if live and not column.is_multicell:
                (cell,) = live.values()
                found[column.name] = (cell.value, cell.writetime, cell.expires_at)
            elif live:
                found[column.name] = _together(column.type, live)
        return found

    def _is_alive(self, row: Row, deleted_at: int, now: int) -> bool:
        writetime, expires_at = row.live
        if writetime > deleted_at and (expires_at is None or expires_at > now):
            return True
        cells = [cell for values in row.columns.values() for cell in values.cells.values()]
        expired = any(cell.value is not None and (cell.expires_at or now + 1) <= now for cell in cells)
        return row.exists and not expired

    def _covers(self, bounds: Message, clustering: tuple[Any, ...]) -> bool:
        start, end = bounds["start"], bounds["end"]
        after, before = self._compare(clustering, start), self._compare(clustering, end)
        return (after > 0 or (after == 0 and start["inclusive"])) and (before < 0 or (before == 0 and end["inclusive"]))

    def _compare(self, clustering: tuple[Any, ...], bound: Message) -> int:
        values = self._key(bound["clustering"], self.table.clustering)[: bound["columns"]]
        for column, mine, its in zip(self.table.clustering, clustering, values, strict=False):
            found = compare(model_type(column.type), _bytes(column.type, mine), _bytes(column.type, its))
            if found:
                return -found if column.descending else found
        return 0


def _liveness_rank(live: tuple[int, int | None]) -> tuple[int, bool, int]:
    writetime, expires_at = live
    return writetime, expires_at is not None, expires_at or 0


def _together(cql_type: CqlType, live: dict[Any, Cell]) -> Any:
    """Elements in Cassandra's order, as one value with lists of times."""
    if isinstance(cql_type, UserType):
        cells = [live.get(name) for name in _field_names(cql_type)]
        value: Any = tuple(cell and cell.value for cell in cells)
        return value, [cell and cell.writetime for cell in cells], [cell and cell.expires_at for cell in cells]
    if isinstance(cql_type, ListType):
        ordered = sorted(live, key=cmp_to_key(_compare_entries))
    else:
        kind = cql_type.key if isinstance(cql_type, MapType) else cql_type.element  # type: ignore[union-attr]
        form = model_type(kind)
        ordered = sorted(live, key=cmp_to_key(lambda a, b: compare(form, _bytes(kind, a), _bytes(kind, b))))
    cells = [live[name] for name in ordered]
    return [cell.value for cell in cells], [cell.writetime for cell in cells], [cell.expires_at for cell in cells]


def _compare_entries(left: Any, right: Any) -> int:
    """Entries that a SELECT showed have no names: they stand behind what was prepended, before what was appended."""
    unnamed = [isinstance(one, tuple) for one in (left, right)]
    if all(unnamed):
        return int(left[1]) - int(right[1])
    if any(unnamed):
        name = uuid.UUID(right if unnamed[0] else left)
        prepended = name.time < 0x01B21DD213814000 + 1262304000 * 10_000_000
        return (1 if prepended else -1) * (1 if unnamed[0] else -1)
    return compare(Type("timeuuid"), uuid.UUID(left).bytes, uuid.UUID(right).bytes)


def elements(cql_type: CqlType, after: Any) -> list[tuple[Any, Any, bytes]]:
    """Of each element the identity (but of lists), what the oracle has at its place, and its value's bytes."""
    found = plain(after, cql_type)
    match cql_type:
        case SetType():
            return [(identity(cql_type.element, one), one, b"") for one in found]
        case MapType(_, kind):
            return [(identity(cql_type.key, key), (key, value), _bytes(kind, value)) for key, value in found]
        case UserType(field_types=kinds):
            named = zip(_field_names(cql_type), kinds, found, strict=True)
            return [(name, value, _bytes(kind, value)) for name, kind, value in named if value is not None]
        case ListType(kind):
            return [(None, one, _bytes(kind, one)) for one in found]
    raise AssertionError(f"{cql_type} has no elements")


def _field_names(cql_type: UserType) -> tuple[str, ...]:
    return portable_names(cql_type.field_names)


def plain(value: Any, cql_type: CqlType) -> Any:
    """A value of a message in the form that :mod:`tests.oracle` compares."""
    if value is None:
        return None
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            return [plain(item, element) for item in value]
        case MapType(key, inner):
            pairs = value.items() if isinstance(value, dict) else [(item["key"], item["value"]) for item in value]
            return [(plain(k, key), plain(v, inner)) for k, v in pairs]
        case TupleType(fields) | UserType(field_types=fields):
            return tuple(plain(item, kind) for item, kind in zip(value.values(), fields, strict=True))
        case Native("duration"):
            return (value["months"], value["days"], value["nanoseconds"])
        case Native("decimal" | "varint"):
            return _big_decimal(value)
        case Native("timestamp"):
            return value * 1000
    return value


def _big_decimal(data: bytes) -> str:
    """Avro's logical type big-decimal: bytes (with their length before them) and scale."""
    length, start = _long(data, 0)
    scale, _ = _long(data, start + length)
    sign, digits, _ = decimal.Decimal(int.from_bytes(data[start : start + length], "big", signed=True)).as_tuple()
    return str(decimal.Decimal((sign, digits, -scale)))


def _long(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[position] & 0x7F) << shift
        shift += 7
        position += 1
        if data[position - 1] < 0x80:
            return number >> 1 ^ -(number & 1), position


def _bytes(cql_type: CqlType, value: Any) -> bytes:
    """Cassandra's bytes of a value in the oracle's form; of null none."""
    if isinstance(value, Raw):
        return value.data
    return b"" if value is None else serialise(cql_type, _python(cql_type, value))


def _python(cql_type: CqlType, value: Any) -> Any:
    """A value in the form that :func:`serialise` takes."""
    if value is None:
        return None
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            return [_python(element, one) for one in value]
        case MapType(key, inner):
            return [(_python(key, k), _python(inner, v)) for k, v in value]
        case TupleType(fields) | UserType(field_types=fields):
            return [_python(kind, one) for kind, one in zip(fields, value, strict=True)]
        case Native("decimal"):
            return decimal.Decimal(value)
        case Native("varint"):
            sign, digits = (-1, value[1:]) if value.startswith("-") else (1, value)
            return sign * int(decimal.Decimal(digits))
        case Native("uuid" | "timeuuid"):
            return uuid.UUID(value)
        case Native("inet"):
            return ipaddress.ip_address(value)
        case Native("timestamp"):
            return value // 1000
    return value


def model_type(cql_type: CqlType) -> Type:
    """A type as the model of commit logs has it, which knows Cassandra's order."""
    match cql_type:
        case Native(name):
            return Type(name)
        case ListType(element):
            return Type("list", (model_type(element),), (), True)
        case SetType(element):
            return Type("set", (model_type(element),), (), True)
        case MapType(key, value):
            return Type("map", (model_type(key), model_type(value)), (), True)
        case TupleType(fields):
            return Type("tuple", tuple(map(model_type, fields)), (), True)
        case UserType(field_types=fields):
            return Type("udt", tuple(map(model_type, fields)), cql_type.field_names, True)
        case VectorType(element, dimension):
            return Type("vector", (model_type(element),), (), True, dimension)
    return Type("custom")
