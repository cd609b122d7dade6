"""What a server says its tables hold: every value as bytes and as JSON, with writetime and expiry.

Nothing of the package is used, and of the driver only its protocol: values stay the bytes that the server sends.
"""

from __future__ import annotations

import struct
import time
from typing import Any

from cassandra.cluster import EXEC_PROFILE_DEFAULT, NoHostAvailable
from cassandra.protocol import ResultMessage, ServerError, _ProtocolHandler, read_int
from cassandra.query import tuple_factory

Row = dict[str, dict[str, Any]]
"""
By column: `raw` (hex), `json` (text, where the server can print it), `writetime` (µs) and `expires_at` (s) of value
columns; a list of each, one per element, for multi-cell columns (5.0; 4.x does not tell these). Null columns and parts
are absent.
"""
TRIES = 20


class RawResult(ResultMessage):
    """Rows whose values are not decoded."""

    def recv_results_rows(self, f: Any, protocol_version: Any, user_types: Any, metadata: Any, policy: Any) -> None:
        self.recv_results_metadata(f, user_types)
        columns = self.column_metadata or metadata
        self.parsed_rows = [self.recv_row(f, len(columns)) for _ in range(read_int(f))]
        self.column_names = [column[2] for column in columns]
        self.column_types = [column[3] for column in columns]


class RawHandler(_ProtocolHandler):
    """Has the session return undecoded rows."""

    message_types_by_opcode = _ProtocolHandler.message_types_by_opcode | {ResultMessage.opcode: RawResult}


def captured(cluster: Any, version: str, keyspaces: tuple[str, ...], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """
    Return what `SELECT` says of every table: `{"moment": s, "keyspaces": {keyspace: {table: [row]}}}`.

    :param cluster: the driver's, of a node; its sessions return undecoded tuples from now on.
    :param version: `4.0`, `4.1` or `5.0`.
    :param keyspaces: whose tables.
    :param without: names of tables that are left out.
    """
    session = cluster.connect()
    session.get_execution_profile(EXEC_PROFILE_DEFAULT).row_factory = tuple_factory
    found: dict[str, dict[str, list[Row]]] = {}
    for keyspace in keyspaces:
        schema = f"FROM system_schema.{{}} WHERE keyspace_name = '{keyspace}'"
        session.client_protocol_handler = _ProtocolHandler
        user_types = {name for (name,) in session.execute(f"SELECT type_name {schema.format('types')}")}
        columns = list(session.execute(f"SELECT table_name, column_name, kind, type {schema.format('columns')}"))
        session.client_protocol_handler = RawHandler
        found[keyspace] = {
            table: _rows(session, version, f'"{keyspace}"."{table}"', _of_table(columns, table, user_types))
            for table in sorted({column[0] for column in columns} - set(without))
        }
    return {"moment": int(time.time()), "keyspaces": found}


def _of_table(columns: list[Any], table: str, user_types: set[str]) -> dict[str, str]:
    """Column name → `key`, `cell` or `cells` (multi-cell)."""
    found = {}
    for owner, name, kind, cql_type in columns:
        if owner == table:
            multicell = cql_type.startswith(("list<", "set<", "map<")) or cql_type.strip('"') in user_types
            found[name] = "key" if kind in ("partition_key", "clustering") else "cells" if multicell else "cell"
    return found


def _rows(session: Any, version: str, table: str, columns: dict[str, str]) -> list[Row]:
    selected, timed = [], []
    for name, kind in columns.items():
        quoted = '"' + name.replace('"', '""') + '"'
        has_times = kind == "cell" or (kind == "cells" and version == "5.0")
        selected += [quoted, f"writetime({quoted})", f"ttl({quoted})"] if has_times else [quoted]
        timed.append(has_times)
    values, now = _at_one_moment(session, f"SELECT {', '.join(selected)} FROM {table}")
    texts = {name: _texts(session, table, name, len(values)) for name in columns}
    rows = []
    for number, row in enumerate(values):
        parts = iter(row)
        found: Row = {}
        for (name, kind), has_times in zip(columns.items(), timed, strict=True):
            raw, writetime, ttl = next(parts), *((next(parts), next(parts)) if has_times else (None, None))
            if raw is not None:
                found[name] = {"raw": raw.hex(), "json": texts[name][number]}
                if has_times:
                    many = kind == "cells"
                    found[name] |= {
                        "writetime": _numbers(writetime, ">q", many, 0),
                        "expires_at": _numbers(ttl, ">i", many, now),
                    }
        rows.append({name: {part: v for part, v in cell.items() if v is not None} for name, cell in found.items()})
    return rows


def _at_one_moment(session: Any, query: str) -> tuple[list[Any], int]:
    """The rows, and the second (since 1970) in which the server answered: TTLs count from it."""
    for _ in range(TRIES):
        began = int(time.time())
        rows = list(session.execute(query))
        if int(time.time()) == began:
            return rows, began
    raise AssertionError(f"{query} took longer than a second, {TRIES} times")


def _texts(session: Any, table: str, column: str, count: int) -> list[str | None]:
    """The column as JSON, once per row; None if the server cannot print it because one value is empty."""
    quoted = '"' + column.replace('"', '""') + '"'
    try:
        answer = session.execute(f"SELECT toJson({quoted}) FROM {table}")
    except NoHostAvailable as error:
        if all(isinstance(reason, ServerError) for reason in error.errors.values()):
            return [None] * count  # NullPointerException: 4.x
        raise
    found = [None if text is None else text.decode() for (text,) in answer]
    assert len(found) == count, f"{table} changed while it was read"
    return found


def _numbers(raw: bytes | None, form: str, many: bool, base: int) -> Any:
    """A number, or with `many` the list of those in a serialised list; `base` is added to each."""
    if raw is None:
        return None
    if not many:
        return struct.unpack(form, raw)[0] + base
    (count,), position, found = struct.unpack_from(">i", raw), 4, []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, position)
        position += 4
        found.append(struct.unpack_from(form, raw, position)[0] + base if length >= 0 else None)
        position += max(length, 0)
    return found
