"""The schemas of tables in a running cluster, from ``system_schema``."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringsync.cluster.node import ask_one
from ringsync.cluster.scylla import cdc_column, has_cdc
from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlTypeError, UserType
from ringsync.schema.description import build_table, resolve_user_types, user_types_of
from ringsync.schema.table import Schema, SchemaError, TableSchema, UnreadableTable

SYSTEM_KEYSPACES = frozenset(
    (
        "system",
        "system_auth",
        "system_auth_v2",
        "system_distributed",
        "system_distributed_everywhere",
        "system_replicated_keys",
        "system_schema",
        "system_traces",
        "system_views",
        "system_virtual_schema",
    )
)


_COLUMNS = (
    "SELECT keyspace_name, table_name, column_name, column_name_bytes, kind, position, type, clustering_order, "
    "writetime(type) AS written_us FROM system_schema.columns"
)
_USER_TYPES = (
    "SELECT type_name, field_names, field_types, keyspace_name, writetime(field_types) AS written_us "
    "FROM system_schema.types"
)
_OF_TABLE = " WHERE keyspace_name = %s AND table_name = %s"


def read_table(session: Any, keyspace: str, table: str) -> TableSchema:
    """Read a table's schema, its user-defined types resolved, as one node has it.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory, or a node
    :raises SchemaError: there is no such table, or it is a view, in a system keyspace, or has COMPACT STORAGE
    :raises CqlTypeError: this version does not know the type of a column
    :raises ChangingSchemaError: the schema changes all the time
    """
    name = f"{printable(keyspace)}.{printable(table)}"
    if keyspace in SYSTEM_KEYSPACES:
        raise SchemaError(f"{name}: keyspace {keyspace} belongs to Cassandra itself and has no replica; name your own")
    return ask_one(session, lambda node: _read_table(node, keyspace, table, name))


def _read_table(session: Any, keyspace: str, table: str, name: str) -> TableSchema:
    header = session.execute(f"SELECT id, flags FROM system_schema.tables{_OF_TABLE}", (keyspace, table)).one()
    if header is None:
        raise _explain_missing(session, keyspace, table)
    if "compound" not in (header.flags or ()):
        raise SchemaError(
            f"{name} is declared WITH COMPACT STORAGE, which lays rows out differently: run "
            f"ALTER TABLE {name} DROP COMPACT STORAGE first"
        )
    columns = session.execute(f"{_COLUMNS}{_OF_TABLE}", (keyspace, table))
    dropped_columns = session.execute(f"{_COLUMNS}{_OF_TABLE}", ("system_schema", "dropped_columns"))
    dropped = session.execute(f"{_select_dropped(dropped_columns)}{_OF_TABLE}", (keyspace, table))
    user_types = list(session.execute(f"{_USER_TYPES} WHERE keyspace_name = %s", (keyspace,)))
    resolved = _resolve(keyspace, user_types)
    return _build(keyspace, table, header.id.hex, list(columns), list(dropped), resolved, user_types)


def read_tables(session: Any) -> Schema:
    """Read all tables and materialised views as one node has them, Cassandra's own included: a commit log has mutations
    of all of them.

    A table with COMPACT STORAGE is read with the columns of ``system_schema``, some of which no SELECT shows.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory, or a node
    :raises ChangingSchemaError: the schema changes all the time
    """
    return ask_one(session, tables_of)


@dataclass(frozen=True)
class NodeTables:
    """The tables of one node, as it says itself.

    :ivar ids: ids of all tables and views
    :ivar with_cdc: ids of the tables with ``cdc``
    :ivar altered_ms: when the tables were altered last, which may have switched ``cdc`` off, ms since the epoch, by id.
        A node of Cassandra with ``cdc_enabled: false`` does not tell it: it knows nothing of ``cdc``
    """

    ids: frozenset[str]
    with_cdc: frozenset[str]
    altered_ms: Mapping[str, int]


def read_node_tables(node: Any) -> NodeTables:
    """Ask a node for its tables. Each ALTER TABLE writes all of a table's properties again (C: SchemaKeyspace.
    addTableParamsToRowBuilder), also those that it leaves as they are. So does ScyllaDB.

    :param node: a node (:class:`ringsync.cluster.node.Node`)
    :raises CdcOptionsError: ScyllaDB has cdc options that this version does not know
    """
    query = f"SELECT id, {cdc_column(node)}, writetime(gc_grace_seconds) AS altered_us FROM system_schema.tables"
    tables = list(node.execute(query))
    views = node.execute("SELECT id FROM system_schema.views")
    return NodeTables(
        frozenset(row.id.hex for rows in (tables, views) for row in rows),
        frozenset(row.id.hex for row in tables if has_cdc(row)),
        {row.id.hex: row.altered_us // 1000 for row in tables if _knows_cdc(row) and row.altered_us},
    )


def _knows_cdc(row: Any) -> bool:
    """Tell whether the node that gave this row of ``system_schema.tables`` knows of cdc."""
    return getattr(row, "cdc", False) is not None


def tables_of(node: Any) -> Schema:
    """Read what :func:`read_tables` reads, of a node whose schema does not change meanwhile."""
    columns, user_types, dropped = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in node.execute(_COLUMNS):
        columns[row.keyspace_name, row.table_name].append(row)
    for row in node.execute(_USER_TYPES):
        user_types[row.keyspace_name].append(row)
    for row in node.execute(_select_dropped(columns["system_schema", "dropped_columns"])):
        dropped[row.keyspace_name, row.table_name].append(row)
    headers = [
        *node.execute("SELECT keyspace_name, table_name AS name, id FROM system_schema.tables"),
        *node.execute("SELECT keyspace_name, view_name AS name, id FROM system_schema.views"),
    ]
    tables, unreadable = [], []
    resolved: dict[str, Mapping[str, UserType]] = {}
    for keyspace, name, table_id in headers:
        key = (keyspace, name)
        try:
            if keyspace not in resolved:
                resolved[keyspace] = _resolve(keyspace, user_types[keyspace])
            _require_text_names(columns[key])
            types = (resolved[keyspace], user_types[keyspace])
            tables.append(_build(keyspace, name, table_id.hex, columns[key], dropped[key], *types))
        except (CqlTypeError, SchemaError) as error:
            unreadable.append(UnreadableTable(keyspace, name, table_id.hex, str(error)))
    return Schema(tuple(tables), tuple(unreadable))


def _select_dropped(own_columns: Iterable[Any]) -> str:
    """Write the query for dropped columns.

    It reads ``dropped_time`` as milliseconds: a column of system.local has the largest timestamp there is, which the
    driver cannot represent. Not every server has ``kind``.

    :param own_columns: columns of the table ``system_schema.dropped_columns``
    """
    kind = ", kind" if any(row.column_name == "kind" for row in own_columns) else ""
    return (
        "SELECT keyspace_name, table_name, column_name, type, blobAsBigint(timestampAsBlob(dropped_time)) "
        f"AS dropped_ms, writetime(type) AS written_us{kind} FROM system_schema.dropped_columns"
    )


def _require_text_names(columns: Iterable[Any]) -> None:
    for row in columns:
        if row.column_name_bytes != row.column_name.encode():
            raise SchemaError(
                f"the name of column {row.column_name} is not text (COMPACT STORAGE from the time of Thrift)"
            )


def _resolve(keyspace: str, user_types: Iterable[Any]) -> dict[str, UserType]:
    fields = {row.type_name: list(zip(row.field_names or (), row.field_types or (), strict=True)) for row in user_types}
    return resolve_user_types(keyspace, fields)


def _build(
    keyspace: str,
    name: str,
    table_id: str,
    columns: Sequence[Any],
    dropped: Sequence[Any],
    resolved: Mapping[str, UserType],
    user_types: Sequence[Any],
) -> TableSchema:
    """Build a table from the rows of ``system_schema``. The newest of them says since when it is so."""
    description = {
        "keyspace": keyspace,
        "table": name,
        "table_id": table_id,
        "columns": [
            {
                "name": row.column_name,
                "kind": row.kind,
                "position": row.position,
                "type": row.type,
                "descending": row.clustering_order == "desc",
            }
            for row in columns
        ],
        "dropped": [
            {
                "name": row.column_name,
                "kind": getattr(row, "kind", "regular"),
                "type": row.type,
                "dropped_at": row.dropped_ms * 1000,
            }
            for row in dropped
        ],
    }
    table = build_table(description, resolved)
    used = user_types_of(table)
    rows = [*columns, *dropped, *(row for row in user_types if row.type_name in used)]
    return replace(table, since_us=max((row.written_us for row in rows), default=0))


def _explain_missing(session: Any, keyspace: str, table: str) -> SchemaError:
    """Explain why there is no row for this table: a view, another spelling, another keyspace, or nothing similar."""
    name = f"{printable(keyspace)}.{printable(table)}"
    view = session.execute(
        "SELECT base_table_name FROM system_schema.views WHERE keyspace_name = %s AND view_name = %s",
        (keyspace, table),
    ).one()
    if view is not None:
        base = f"{printable(keyspace)}.{printable(view.base_table_name)}"
        return SchemaError(f"{name} is a materialised view; replicate its base table {base}")
    rows = session.execute("SELECT keyspace_name, table_name FROM system_schema.tables")
    tables = [(row.keyspace_name, row.table_name) for row in rows if row.keyspace_name not in SYSTEM_KEYSPACES]
    near = near_names(keyspace, table, tables)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif tables:
        shown = sorted(f"{printable(k)}.{printable(t)}" for k, t in tables)
        hint = f"the cluster has {', '.join(shown[:10])}{', …' if len(shown) > 10 else ''}"
    else:
        hint = "the cluster has no tables of its own yet"
    exists = any(existing == keyspace for existing, _ in tables)
    missing = "" if exists else f" (nor a keyspace {printable(keyspace)} with tables)"
    return SchemaError(f"there is no table {name}{missing}; {hint}")


def near_names(keyspace: str, table: str, existing: list[tuple[str, str]]) -> list[str]:
    """List up to three existing tables with similar names, as CQL prints them."""
    by_lower = {f"{k}.{t}".lower(): f"{printable(k)}.{printable(t)}" for k, t in existing}
    similar = difflib.get_close_matches(f"{keyspace}.{table}".lower(), by_lower, n=3, cutoff=0.75)
    same_table = [f"{k}.{t}".lower() for k, t in existing if t.lower() == table.lower()]
    return list(dict.fromkeys(by_lower[name] for name in (*similar, *same_table)))[:3]
