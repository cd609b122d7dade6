"""The schemas that are told, one after the other, when a whole schema has become another one.

All are such that the statements between them can be executed: each table's user-defined types are there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ringsync.cql.types import CqlTypeError, UserType
from ringsync.schema.description import resolve_user_types
from ringsync.schema.table import TableSchema
from ringsync.schema.to_cql import has_grown, user_types
from ringsync.schema.whole import TableName, WholeSchema
from ringsync.schema.whole_to_cql import whole_statements

Versions = dict[str, dict[str, int]]
"""Numbers of versions by keyspace and full name of the table."""


def without_held(
    before: WholeSchema, after: WholeSchema, held: Collection[TableName], unreadable_types: Collection[str]
) -> tuple[WholeSchema, set[TableName]]:
    """Leave tables that are held back as they were, with the types that they need.

    :param unreadable_types: keyspaces whose types are left as they were
    :returns: the schema, and tables that must wait, too: they need such a type as it is now
    """
    waiting: set[TableName] = set()
    while True:
        left = {
            name: table
            for name, table in before.tables.items()
            if (name in held or name in waiting) and name[0] in after.keyspaces
        }
        tables = {name: table for name, table in after.tables.items() if name not in held and name not in waiting}
        types = {}
        for keyspace in after.keyspaces:
            old = before.types.get(keyspace, {})
            now = old if keyspace in unreadable_types else after.types.get(keyspace, {})
            needing = (table for name, table in left.items() if name[0] == keyspace and not _fits(table, now))
            needed = {name: old.get(name, kind) for table in needing for name, kind in _types(table).items()}
            types[keyspace] = _resolved(keyspace, {**now, **needed}) if needed else now
        more = {
            name
            for name, table in tables.items()
            if types[name[0]] is not after.types.get(name[0]) and not _fits(table, types[name[0]])
        }
        if not more:
            found = {keyspace: kinds for keyspace, kinds in types.items() if kinds}
            return replace(after, types=found, tables={**tables, **left}), waiting
        waiting |= more


def stages(
    before: WholeSchema, after: WholeSchema, versions: Versions, between: Iterable[tuple[TableSchema, int]]
) -> list[tuple[WholeSchema, Versions]]:
    """Find the schemas to tell, the last of which is ``after``, and the versions to name with each.

    :param versions: to name with ``after``
    :param between: versions of tables in between, with their numbers, in the order in which they were made. One that
        cannot be told, since other tables were not as they were then, or that changes nothing, is left out
    """
    found: list[tuple[WholeSchema, Versions]] = []
    schema = replace(before, keyspaces={**before.keyspaces, **after.keyspaces})
    for table, number in between:
        step = _with_table(schema, table)
        if step is not None and whole_statements(schema, step):
            found.append((step, {table.keyspace: {table.full_name: number}}))
            schema = step
    found.append((after, {keyspace: dict(numbers) for keyspace, numbers in versions.items()}))
    told = []
    for place in range(len(found) - 1, -1, -1):
        schema, numbers = found[place]
        statements = whole_statements(found[place - 1][0] if place else before, schema)
        for keyspace in [*numbers] if place else []:
            # The keyspace's last message names them, e.g. that of a type that several tables have.
            if not any(statement.keyspace == keyspace for statement in statements):
                earlier = found[place - 1][1]
                earlier[keyspace] = {**earlier.get(keyspace, {}), **numbers.pop(keyspace)}
        if statements or schema is after:
            told.append((schema, numbers))
    return told[::-1]


def _with_table(schema: WholeSchema, table: TableSchema) -> WholeSchema | None:
    """Return a schema with a version of a table and the types that it needs; None: others need them otherwise."""
    keyspace = table.keyspace
    types = dict(schema.types.get(keyspace, {}))
    for name, kind in _types(table).items():
        is_later = name in types and has_grown(kind, types[name]) and not has_grown(types[name], kind)
        types[name] = types[name] if is_later else kind
    try:
        types = _resolved(keyspace, types)
    except CqlTypeError:
        return None
    tables = {**schema.tables, (keyspace, table.name): table}
    if not all(_fits(one, types) for name, one in tables.items() if name[0] == keyspace):
        return None
    found = {name: kinds for name, kinds in {**schema.types, keyspace: types}.items() if kinds}
    return replace(schema, types=found, tables=tables) if keyspace in schema.keyspaces else None


def _fits(table: TableSchema, types: Mapping[str, UserType]) -> bool:
    """Tell whether a table can have these types: its own ones may have grown."""
    return all(name in types and has_grown(kind, types[name]) for name, kind in _types(table).items())


def _types(table: TableSchema) -> dict[str, UserType]:
    return user_types(table.columns)


def _resolved(keyspace: str, types: Mapping[str, UserType]) -> dict[str, UserType]:
    """Return types with the fields that these have now, each after those that it contains."""
    fields = {
        name: [[field, str(inner)] for field, inner in zip(kind.field_names, kind.field_types, strict=True)]
        for name, kind in types.items()
    }
    return resolve_user_types(keyspace, fields)
