"""A table's schema from a running cluster: what ``system_schema`` says now."""

from __future__ import annotations

import difflib
from typing import Any

from ringsync.cql.identifiers import printable
from ringsync.schema.description import from_description
from ringsync.schema.table import TableSchema

SYSTEM_KEYSPACES = frozenset(
    (
        "system",
        "system_auth",
        "system_distributed",
        "system_distributed_everywhere",
        "system_schema",
        "system_traces",
        "system_views",
        "system_virtual_schema",
    )
)


class SchemaError(ValueError):
    """The table cannot be read by ringsync; the message says why and what to do."""


class UnknownTableError(SchemaError):
    """There is no such table; the message lists names that come near."""


def read_table(session: Any, keyspace: str, table: str) -> TableSchema:
    """Read a table's schema, its user-defined types resolved.

    :param session: a ``cassandra.cluster.Session`` with the driver's default row factory
    :param keyspace: unquoted, in its exact case
    :param table: unquoted, in its exact case
    :raises UnknownTableError: when there is no such keyspace or table
    :raises SchemaError: for views, system keyspaces and COMPACT STORAGE
    :raises CqlTypeError: for a column type that this version does not know
    """
    name = f"{printable(keyspace)}.{printable(table)}"
    if keyspace in SYSTEM_KEYSPACES:
        raise SchemaError(f"{name}: keyspace {keyspace} belongs to Cassandra itself and has no replica; name your own")
    header = session.execute(
        "SELECT id, flags FROM system_schema.tables WHERE keyspace_name = %s AND table_name = %s", (keyspace, table)
    ).one()
    if header is None:
        raise _explain_missing(session, keyspace, table)
    if "compound" not in (header.flags or ()):
        raise SchemaError(
            f"{name} is declared WITH COMPACT STORAGE, whose rows are laid out otherwise: run "
            f"ALTER TABLE {name} DROP COMPACT STORAGE first"
        )
    columns = session.execute(
        "SELECT column_name, kind, position, type, clustering_order FROM system_schema.columns "
        "WHERE keyspace_name = %s AND table_name = %s",
        (keyspace, table),
    )
    user_types = session.execute(
        "SELECT type_name, field_names, field_types FROM system_schema.types WHERE keyspace_name = %s", (keyspace,)
    )
    return from_description(
        {
            "keyspace": keyspace,
            "table": table,
            "table_id": header.id.hex,
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
            "user_types": {
                row.type_name: list(zip(row.field_names or (), row.field_types or (), strict=True))
                for row in user_types
            },
        }
    )


def _explain_missing(session: Any, keyspace: str, table: str) -> SchemaError:
    """Why there is no row for this table: a view, another spelling, another keyspace, or nothing like it."""
    name = f"{printable(keyspace)}.{printable(table)}"
    view = session.execute(
        "SELECT base_table_name FROM system_schema.views WHERE keyspace_name = %s AND view_name = %s",
        (keyspace, table),
    ).one()
    if view is not None:
        base = f"{printable(keyspace)}.{printable(view.base_table_name)}"
        return SchemaError(f"{name} is a materialised view; replicate its base table {base}")
    rows = session.execute("SELECT keyspace_name, table_name FROM system_schema.tables")
    own = [(row.keyspace_name, row.table_name) for row in rows if row.keyspace_name not in SYSTEM_KEYSPACES]
    near = _near_names(keyspace, table, own)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif own:
        shown = sorted(f"{printable(k)}.{printable(t)}" for k, t in own)
        hint = f"the cluster has {', '.join(shown[:10])}{', …' if len(shown) > 10 else ''}"
    else:
        hint = "the cluster has no tables of its own yet"
    exists = any(existing == keyspace for existing, _ in own)
    missing = "" if exists else f" (nor a keyspace {printable(keyspace)} with tables)"
    return UnknownTableError(f"there is no table {name}{missing}; {hint}")


def _near_names(keyspace: str, table: str, existing: list[tuple[str, str]]) -> list[str]:
    by_lower = {f"{k}.{t}".lower(): f"{printable(k)}.{printable(t)}" for k, t in existing}
    found = difflib.get_close_matches(f"{keyspace}.{table}".lower(), by_lower, n=3, cutoff=0.75)
    same_table = [f"{k}.{t}".lower() for k, t in existing if t.lower() == table.lower()]
    return list(dict.fromkeys(by_lower[name] for name in (*found, *same_table)))[:3]
