"""Tables as CQL: the statements that make one, and those that turn one version of it into another.

They say what decides how rows are read: types, columns, keys and their order. Properties of a table, its indexes and
views, and rights are left out.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ringsync.cql.identifiers import printable
from ringsync.cql.types import CqlType, UserType, types_inside
from ringsync.schema.table import Column, DroppedColumn, TableSchema


def create_statements(table: TableSchema, *, internals: bool = False) -> list[str]:
    """Write the statements that make a table and its user-defined types, in an order in which they can be executed.

    :param internals: whether to make the table with its id, and with the columns that were dropped: then
        :func:`ringsync.schema.from_cql.parse_schema` reads the same schema, and old commit logs can be decoded with it
    """
    dropped = table.dropped if internals else ()
    statements = [_create_type(kind) for kind in user_types([*table.columns, *dropped]).values()]
    again = {column.name for column in dropped} & {column.name for column in table.columns}
    columns = [column for column in table.columns if column.name not in again]
    statements.append(_create_table(table, [*columns, *dropped], with_id=internals))
    statements += [_drop(table, column.name, column) for column in dropped]
    return statements + [_add(table, column) for column in table.columns if column.name in again]


def change_statements(before: TableSchema, after: TableSchema) -> list[str]:
    """Write the statements that turn a version of a table, and its user-defined types, into another version.

    Columns and types of ``before`` may have been dropped and made again since. What came and went in between is left
    out, and so is what became of types while no column of the table had them.
    """
    types = change_types(user_types(before.columns), user_types(after.columns))
    if not is_same_table(before, after):
        return [f"DROP TABLE {before.full_name};", *types, create_table(after)]
    first, last = column_statements(before, after)
    return [*first, *types, *last]


def is_same_table(before: TableSchema, after: TableSchema) -> bool:
    """Tell whether a table was altered; else it was dropped, and another one was created, maybe ``WITH ID`` of the old.

    No statement changes the number of key columns, nor the type of a column: it is dropped and added again.
    """
    kept = _kept(before, after)
    columns = [column for column in before.value_columns if column.name in kept]
    now = [next(other for other in after.value_columns if other.name == column.name) for column in columns]
    return (
        before.table_id == after.table_id
        and len(before.partition_key) == len(after.partition_key)
        and len(before.clustering) == len(after.clustering)
        and all(
            (old.kind, old.descending) == (new.kind, new.descending) and has_grown(old.type, new.type)
            for old, new in zip((*before.key_columns, *columns), (*after.key_columns, *now), strict=True)
        )
    )


def has_grown(before: CqlType, after: CqlType) -> bool:
    """Tell whether a type is another one only in that user-defined types in it have got fields, or others' names."""
    pairs = zip(types_inside(before), types_inside(after), strict=False)
    is_there = len(types_inside(before)) <= len(types_inside(after))
    return str(before) == str(after) and is_there and all(has_grown(*pair) for pair in pairs)


def _kept(before: TableSchema, after: TableSchema) -> list[str]:
    """List the static and regular columns that were not dropped in between."""
    names = {column.name for column in after.value_columns}
    # By its time, not its type: that may have a user-defined type, which is altered later.
    gone, gone_before = ({column.name: column.dropped_at for column in table.dropped} for table in (after, before))
    there = (column.name for column in before.value_columns if column.name in names)
    return [name for name in there if gone.get(name) == gone_before.get(name)]


def create_table(table: TableSchema) -> str:
    """Write the statement that makes a table whose user-defined types are there."""
    return _create_table(table, table.columns, with_id=False)


def column_statements(before: TableSchema, after: TableSchema) -> tuple[list[str], list[str]]:
    """Write the statements that change the columns of a table: those before its types change, and those after.

    :param after: the same table (:func:`is_same_table`)
    """
    kept, gone = _kept(before, after), {column.name: column for column in after.dropped}
    dropped = (column.name for column in before.value_columns if column.name not in kept)
    first = [_drop(after, name, gone.get(name)) for name in dropped]
    # After the drops: a key may have got the name of a dropped column.
    first += [f"ALTER TABLE {after.full_name} RENAME {_pairs([pair])};" for pair in _renames(before, after, kept)]
    return first, [_add(after, column) for column in after.value_columns if column.name not in kept]


def _renames(before: TableSchema, after: TableSchema, kept: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return the renames of key columns one by one: each to a name that no column has just then."""
    keys = zip(before.key_columns, after.key_columns, strict=True)
    pending = {old.name: new.name for old, new in keys if old.name != new.name}
    there = {*kept, *(column.name for column in before.key_columns)}
    while pending:
        old = next((name for name, new in pending.items() if new not in there), None)
        if old is None:  # They exchange their names.
            old = next(iter(pending))
            free = next(name for n in itertools.count() if (name := f"{old}_{n}") not in there | {*pending.values()})
            pending = {free: pending.pop(old), **pending}
            there = there - {old} | {free}
            yield old, free
        else:
            there = there - {old} | {pending[old]}
            yield old, pending.pop(old)


def change_types(before: Mapping[str, UserType], after: Mapping[str, UserType], *, drop: bool = False) -> list[str]:
    """Write what changes types of one version into those of another. A type only grows, and its fields get other names;
    one that differs otherwise was dropped and made again, after all that contain it.

    :param before: types by name, each after those that it contains; ``after`` likewise
    :param drop: whether a type that ``after`` lacks was dropped; else only no column has it any more
    """
    made_again: list[str] = []
    changed: list[str] = []
    for name, kind in after.items():
        full_name, old = _full_name(kind), before.get(name)
        count = len(old.field_types) if old else 0
        if old is None:
            changed.append(_create_type(kind))
        elif not has_grown(old, kind):
            made_again.append(name)
            changed.append(_create_type(kind))
        else:
            both = zip(old.field_names, kind.field_names[:count], strict=True)
            if renamed := [(was, now) for was, now in both if was != now]:
                changed.append(f"ALTER TYPE {full_name} RENAME {_pairs(renamed)};")
            added = zip(kind.field_names[count:], kind.field_types[count:], strict=True)
            changed += [f"ALTER TYPE {full_name} ADD {printable(field)} {inner};" for field, inner in added]
    dropped = [name for name in before if name in made_again or (drop and name not in after)]
    return [f"DROP TYPE {_full_name(before[name])};" for name in reversed(dropped)] + changed


def user_types(columns: Iterable[Column | DroppedColumn]) -> dict[str, UserType]:
    """Return the user-defined types of columns by name, each after those that it contains."""
    found: dict[str, UserType] = {}

    def collect(cql_type: CqlType) -> None:
        for inner in types_inside(cql_type):
            collect(inner)
        if isinstance(cql_type, UserType):
            found[cql_type.name] = replace(cql_type, frozen=False)

    for column in columns:
        collect(column.type)
    return found


def _create_type(kind: UserType) -> str:
    fields = zip(kind.field_names, kind.field_types, strict=True)
    lines = ",\n".join(f"    {printable(name)} {inner}" for name, inner in fields)
    # Several tables may have it.
    return f"CREATE TYPE IF NOT EXISTS {_full_name(kind)} (\n{lines}\n);"


def _create_table(table: TableSchema, columns: Iterable[Column | DroppedColumn], *, with_id: bool) -> str:
    partition_key = ", ".join(printable(column.name) for column in table.partition_key)
    key = ", ".join([f"({partition_key})", *(printable(column.name) for column in table.clustering)])
    lines = [*map(_column, columns), f"PRIMARY KEY ({key})"]
    options = [f"ID = {uuid.UUID(table.table_id)}"] if with_id else []
    if any(column.descending for column in table.clustering):
        order = (f"{printable(c.name)} {'DESC' if c.descending else 'ASC'}" for c in table.clustering)
        options.append(f"CLUSTERING ORDER BY ({', '.join(order)})")
    end = f" WITH {' AND '.join(options)};" if options else ";"
    return f"CREATE TABLE {table.full_name} (\n" + ",\n".join(f"    {line}" for line in lines) + f"\n){end}"


def _column(column: Column | DroppedColumn) -> str:
    return f"{printable(column.name)} {column.type}{' static' if column.kind == 'static' else ''}"


def _add(table: TableSchema, column: Column) -> str:
    return f"ALTER TABLE {table.full_name} ADD {_column(column)};"


def _drop(table: TableSchema, name: str, dropped: DroppedColumn | None) -> str:
    # With its time, which decides what of the column is shown if it is added again.
    at = f" USING TIMESTAMP {dropped.dropped_at}" if dropped else ""
    return f"ALTER TABLE {table.full_name} DROP {printable(name)}{at};"


def _pairs(renamed: Iterable[tuple[str, str]]) -> str:
    return " AND ".join(f"{printable(old)} TO {printable(new)}" for old, new in renamed)


def _full_name(kind: UserType) -> str:
    return f"{printable(kind.keyspace)}.{printable(kind.name)}"
