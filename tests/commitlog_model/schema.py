"""The tables of a running cluster, from ``system_schema`` (docs/formats.md, 2.5)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.commitlog_model.types import Table


def load_tables(session: Any) -> dict[str, Table]:
    """All tables and materialised views of all keyspaces, by id.

    :param session: of the Python driver; rows come as named tuples
    """
    user_types: dict[str, dict[str, tuple[tuple[str, str], ...]]] = defaultdict(dict)
    for row in session.execute("SELECT * FROM system_schema.types"):
        fields = tuple(zip(row.field_names, row.field_types, strict=True))
        user_types[row.keyspace_name][row.type_name] = fields
    columns = _by_table(session, "SELECT * FROM system_schema.columns")
    # The built-in system tables have dropped columns at times that Python's datetime cannot hold.
    dropped = _by_table(
        session,
        "SELECT keyspace_name, table_name, column_name, type, toUnixTimestamp(dropped_time) AS dropped_ms"
        " FROM system_schema.dropped_columns",
    )
    tables = [
        _table(row, columns[key], dropped[key], user_types[row.keyspace_name])
        for kind in ("table", "view")
        for row in session.execute(f"SELECT keyspace_name, {kind}_name AS table_name, id FROM system_schema.{kind}s")
        if (key := (row.keyspace_name, row.table_name))
    ]
    return {table.id: table for table in tables}


def _by_table(session: Any, statement: str) -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in session.execute(statement):
        found[row.keyspace_name, row.table_name].append(row)
    return found


def _table(row: Any, columns: list[Any], dropped: list[Any], user_types: dict[str, Any]) -> Table:
    def of_kind(kind: str) -> list[Any]:
        return sorted((c for c in columns if c.kind == kind), key=lambda c: c.position)

    return Table(
        keyspace=row.keyspace_name,
        name=row.table_name,
        id=str(row.id),
        partition_key=tuple((c.column_name, c.type) for c in of_kind("partition_key")),
        clustering=tuple((c.column_name, c.type, c.clustering_order == "desc") for c in of_kind("clustering")),
        static={c.column_name: c.type for c in of_kind("static")},
        regular={c.column_name: c.type for c in of_kind("regular")},
        dropped={c.column_name: (c.type, c.dropped_ms * 1000) for c in dropped},
        user_types=user_types,
    )
