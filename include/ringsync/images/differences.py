"""The differences between two versions of one row, named by column and element. Plain Python: only few rows come here.

A row is a dict with the columns of the live view in canonical form (:func:`ringsync.images.digests.canonical`),
as ``to_pylist`` gives it: dates in days, timestamps in µs, floats as their bits, maps as lists of key and value.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from ringsync.cql import types as cql
from ringsync.cql.identifiers import portable_names
from ringsync.cql.natives import NATIVES
from ringsync.images.schema import lake_names
from ringsync.schema.table import TableSchema

Row = Mapping[str, Any]

DifferenceKind = Literal["missing", "extra", "value", "writetime", "ttl"]

_TIMES: Mapping[DifferenceKind, str] = {"writetime": "writetime", "ttl": "expires_at"}
"""The times of a cell, by the kind of their differences."""

LONGEST_TEXT = 80


@dataclass(frozen=True)
class Difference:
    """One difference between two rows.

    :ivar kind: missing (not in the replica), extra (only there), value, writetime or ttl
    :ivar key: key columns of the row by CQL name, as JSON values
    :ivar column: CQL name; None: the whole row
    :ivar element: map key, set element, list index or field of a user-defined type; None: the whole column
    :ivar source: value, writetime (µs) or expiry (s since the epoch) in the source, printed short; None: it has none
    :ivar replica: the same in the replica
    """

    kind: DifferenceKind
    key: Mapping[str, Any]
    column: str | None = None
    element: str | None = None
    source: str | None = None
    replica: str | None = None


def row_differences(table: TableSchema, source: Row | None, replica: Row | None) -> Iterator[Difference]:
    """List all differences; at least one, if the rows are not the same.

    :param source: row of the source; None: the replica's row is extra
    :param replica: row of the replica; None: it is missing
    """
    names = lake_names(table)
    key = _key(table, names, source or replica or {})
    if source is None or replica is None:
        yield Difference("missing" if replica is None else "extra", key)
        return
    for column in table.value_columns:
        there, here = (cell_of(column.type, row, names[column.name]) for row in (source, replica))
        compare = _compare_elements if column.is_multicell and there.raw is None and here.raw is None else _compare
        for difference in compare(there, here):
            yield replace(difference, key=key, column=column.name)


@dataclass(frozen=True)
class Cell:
    """A cell, or a whole multi-cell column, whose times are lists, or None if unknown."""

    type: cql.CqlType
    exists: bool = False
    value: Any = None
    writetime: Any = None
    expires_at: Any = None
    raw: bytes | None = None

    def printed(self) -> str | None:
        if self.raw is not None:
            return _short(_hex(self.raw))
        return _short(_plain(self.type, self.value)) if self.exists else None


def cell_of(cql_type: cql.CqlType, row: Row, name: str) -> Cell:
    """Return a column's cell, or the whole of a multi-cell column.

    :param name: name of the column in the lake
    """
    times = row["_cells"][name]
    return Cell(cql_type) if times is None else Cell(cql_type, exists=True, value=row[name], **times)


def _compare(source: Cell, replica: Cell, element: str | None = None) -> Iterator[Difference]:
    """Compare two cells, and their times if both exist."""
    if (source.exists, source.value, source.raw) != (replica.exists, replica.value, replica.raw):
        yield Difference("value", {}, None, element, source.printed(), replica.printed())
    for kind, name in _TIMES.items() if source.exists and replica.exists else ():
        times = getattr(source, name), getattr(replica, name)
        if times[0] != times[1]:
            yield Difference(kind, {}, None, element, *map(_short, times))


def _compare_elements(source: Cell, replica: Cell) -> Iterator[Difference]:
    """Compare a multi-cell column element by element; times that only one side knows are one difference."""
    for kind, name in _TIMES.items() if source.exists and replica.exists else ():
        times = getattr(source, name), getattr(replica, name)
        if (times[0] is None) != (times[1] is None):
            yield Difference(kind, {}, None, None, *map(_short, times))
            unknown: Any = {name: None}
            source, replica = replace(source, **unknown), replace(replica, **unknown)
    there, here = elements_of(source), elements_of(replica)
    for identity in dict.fromkeys([*there, *here]):
        name, cell = there.get(identity) or here[identity]
        absent = (name, Cell(cell.type))
        yield from _compare(there.get(identity, absent)[1], here.get(identity, absent)[1], element=name)


def elements_of(column: Cell) -> dict[str, tuple[str, Cell]]:
    """Return the cells of a multi-cell column by identity, each with its name for people."""
    if column.value is None:
        return {}
    cells: dict[str, tuple[str, Cell]] = {}
    for i, (identity, name, cql_type, value) in enumerate(_parts(column.type, column.value)):
        if value is not None:
            times = [None if known is None else known[i] for known in (column.writetime, column.expires_at)]
            cells[identity] = name, Cell(cql_type, True, value, *times)
    return cells


def _parts(cql_type: cql.CqlType, value: Any) -> Iterator[tuple[str, str, cql.CqlType, Any]]:
    """Return (identity, name, type, value) of each element."""
    match cql_type:
        case cql.ListType(element):
            yield from ((str(i), str(i), element, item) for i, item in enumerate(value))
        case cql.SetType(element):
            yield from ((repr(item), _short(_plain(element, item)), element, item) for item in value)
        case cql.MapType(key, inner):
            yield from ((repr(e["key"]), _short(_plain(key, e["key"])), inner, e["value"]) for e in value)
        case cql.UserType(field_names=names, field_types=types):
            members = zip(names, portable_names(names), types, strict=True)
            yield from ((name, name, field_type, value[lake]) for name, lake, field_type in members)


def _key(table: TableSchema, names: Mapping[str, str], row: Row) -> dict[str, Any]:
    """Return the row's key as JSON values; a key column that only has bytes is hexadecimal."""
    key = {}
    for column in table.key_columns:
        name = names[column.name]
        raw = (row["_cells"][name] or {}).get("raw")
        key[column.name] = _hex(raw) if raw is not None else _plain(column.type, row[name])
    return key


def _plain(cql_type: cql.CqlType, value: Any) -> Any:
    """Convert a canonical value to a JSON value that people can read."""
    if value is None:
        return None
    match cql_type:
        case cql.Native(name):
            return _plain_native(name, value)
        case cql.ListType(element) | cql.SetType(element) | cql.VectorType(element):
            return [_plain(element, item) for item in value]
        case cql.MapType(key, inner):
            return [[_plain(key, entry["key"]), _plain(inner, entry["value"])] for entry in value]
        case cql.TupleType(fields):
            return [_plain(field, value[cql.tuple_field_name(i)]) for i, field in enumerate(fields)]
        case cql.UserType(field_names=names, field_types=types):
            members = zip(names, portable_names(names), types, strict=True)
            return {name: _plain(field_type, value[lake]) for name, lake, field_type in members}
    return _hex(value)


def _plain_native(name: str, value: Any) -> Any:
    native = NATIVES[name]
    match native.text:
        case "blob":
            return _hex(value)
        case "float":
            number, bits = ("<f", "<i") if native.width == 4 else ("<d", "<q")
            return repr(struct.unpack(number, struct.pack(bits, value))[0])
        case "date":
            return _or_number(lambda: (date(1970, 1, 1) + timedelta(days=value)).isoformat(), f"{value} days")
        case "timestamp":
            moment = datetime(1970, 1, 1, tzinfo=UTC)
            return _or_number(lambda: (moment + timedelta(microseconds=value)).isoformat(), f"{value} µs")
    return value


def _or_number(printed: Callable[[], str], number: str) -> str:
    """Return a date as text, or its number if Python cannot hold it (before year 1, after 9999)."""
    try:
        return printed()
    except OverflowError:
        return number


def _hex(value: bytes) -> str:
    return f"0x{value[:LONGEST_TEXT].hex()}"


def _short(value: Any) -> str:
    """Print a value on one line and cut it if it is long; None becomes ``null``."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"
