"""Random schemas, and their CQL in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ringsync.cql.identifiers import printable
from ringsync.cql.natives import NATIVES
from ringsync.cql.types import (
    CqlType,
    CustomType,
    ListType,
    MapType,
    Native,
    SetType,
    TupleType,
    UserType,
    VectorType,
)
from ringsync.schema.table import Column, DroppedColumn, TableSchema

Choose = Callable[[Sequence[str]], str]

# Without the prefix, a user-defined type could have the name of a native one, which nobody can print.
NAMES = st.one_of(
    st.from_regex(r"u[a-z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(lambda text: "u" + text),
    st.sampled_from(['u"', "uSelect", "u;--", "u/*", "u'"]),
)
SPACES = [" ", "\n", "\t\r\n ", " /* it's; */ ", "-- it's; $$\n", "// CREATE TABLE\r\n"]


def types(user_types: list[UserType], depth: int = 2, frozen: bool = False) -> st.SearchStrategy[CqlType]:
    """Types of columns and fields; what is inside another type is frozen, as Cassandra wants it."""
    scalar: st.SearchStrategy[CqlType] = st.one_of(
        st.sampled_from(sorted(NATIVES)).map(Native),
        st.just(CustomType("org.apache.cassandra.db.marshal.DynamicCompositeType(a=>x.BytesType,b=>x.UTF8Type)")),
    )
    if depth == 0:
        return scalar
    inner = types(user_types, depth - 1, frozen=True)
    freeze = st.just(True) if frozen else st.booleans()
    several = [
        scalar,
        st.builds(ListType, inner, freeze),
        st.builds(SetType, inner, freeze),
        st.builds(MapType, inner, inner, freeze),
        st.builds(TupleType, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(VectorType, inner, st.integers(1, 9999)),
    ]
    if user_types:
        several.append(
            st.builds(lambda udt, is_frozen: replace(udt, frozen=is_frozen), st.sampled_from(user_types), freeze)
        )
    return st.one_of(several)


@st.composite
def schemas(draw: st.DrawFn) -> list[TableSchema]:
    """Tables of one keyspace that share its user-defined types, each with an id of its own."""
    keyspace = draw(NAMES)
    user_types: list[UserType] = []
    for name in draw(st.lists(NAMES, max_size=3, unique=True)):
        fields = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
        user_types.append(UserType(keyspace, name, tuple(fields), tuple(draw(types(user_types)) for _ in fields)))
    ids = draw(st.lists(st.uuids(), min_size=1, max_size=3, unique=True))
    names = draw(st.lists(NAMES, min_size=len(ids), max_size=len(ids), unique=True))
    return [draw(_tables(keyspace, name, table_id.hex, user_types)) for name, table_id in zip(names, ids, strict=True)]


@st.composite
def _tables(draw: st.DrawFn, keyspace: str, name: str, table_id: str, user_types: list[UserType]) -> TableSchema:
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    keys = draw(st.integers(1, len(names)))
    partition = draw(st.integers(1, keys))
    frozen, free = types(user_types, frozen=True), types(user_types)
    columns = [Column(one, "partition_key", draw(frozen)) for one in names[:partition]]
    columns += [Column(one, "clustering", draw(frozen), draw(st.booleans())) for one in names[partition:keys]]
    others = sorted(names[keys:], key=str.encode)
    kinds = {one: draw(st.sampled_from(["static", "regular"])) for one in others}
    for kind in ("static", "regular"):
        columns += [Column(one, kind, draw(free)) for one in others if kinds[one] == kind]
    gone = draw(st.lists(NAMES.filter(lambda one: one not in names), max_size=3, unique=True))
    gone += draw(st.lists(st.sampled_from(others), max_size=2, unique=True)) if others else []
    dropped = [
        DroppedColumn(one, draw(st.sampled_from(["static", "regular"])), draw(free), draw(st.integers(-(2**62), 2**62)))
        for one in sorted(gone, key=str.encode)
    ]
    return TableSchema(keyspace, name, table_id, tuple(columns), tuple(dropped))


def printed(tables: list[TableSchema], choose: Choose) -> str:
    """The CQL of these tables and their types, with spaces and comments wherever there may be some."""
    words: list[str] = []
    user_types: dict[str, UserType] = {}
    for table in tables:
        for one in (*table.columns, *table.dropped):
            _collect(one.type, user_types)
    for user_type in user_types.values():
        fields = zip(user_type.field_names, user_type.field_types, strict=True)
        words += ["CREATE", "TYPE", *_name(user_type.keyspace, user_type.name), "("]
        words += [*_separated([[printable(name), str(field)] for name, field in fields]), ")", ";"]
    for table in tables:
        words += _table(table, choose)
    gap = choose([" ", "\n", "any"])
    return "".join(word + (choose(SPACES) if gap == "any" else gap) for word in words)


def _table(table: TableSchema, choose: Choose) -> list[str]:
    inline = not table.clustering and len(table.partition_key) == 1 and choose(["inline", "apart"]) == "inline"
    gone = {old.name for old in table.dropped}
    columns = [
        _column(one) + (["PRIMARY", "KEY"] if inline and one.is_key else [])
        for one in table.columns
        if one.name not in gone
    ]
    columns += [_column(old) for old in table.dropped]
    if not inline:
        keys = [[printable(one.name)] for one in table.partition_key]
        rest = [[printable(one.name)] for one in table.clustering]
        columns.append(["PRIMARY", "KEY", "(", *_separated([["(", *_separated(keys), ")"], *rest]), ")"])
    table_id = "-".join([table.table_id[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))])
    options = [["ID", "=", table_id], ["comment", "=", "'it''s; AND ID = ('"], ["x", "=", "{", "'a)'", ":", "'}'", "}"]]
    if table.clustering:
        order = [[printable(one.name), "DESC" if one.descending else "ASC"] for one in table.clustering]
        options.append(["CLUSTERING", "ORDER", "BY", "(", *_separated(order), ")"])
    words = ["CREATE", choose(["TABLE", "table"]), *_name(table.keyspace, table.name), "(", *_separated(columns), ")"]
    words += ["WITH", *_separated(options, "AND"), ";"]
    for old in table.dropped:
        start = ["ALTER", "TABLE", *_name(table.keyspace, table.name)]
        words += [*start, "DROP", printable(old.name), "USING", "TIMESTAMP", str(old.dropped_at), ";"]
        words += [word for one in table.columns if one.name == old.name for word in (*start, "ADD", *_column(one), ";")]
    return words


def _column(column: Column | DroppedColumn) -> list[str]:
    return [printable(column.name), str(column.type), *(["STATIC"] if column.kind == "static" else [])]


def _name(keyspace: str, name: str) -> list[str]:
    return [printable(keyspace), ".", printable(name)]


def _separated(parts: list[list[str]], separator: str = ",") -> list[str]:
    return [word for index, part in enumerate(parts) for word in ([separator] if index else []) + part]


def _collect(cql_type: CqlType, found: dict[str, UserType]) -> None:
    match cql_type:
        case ListType(element) | SetType(element) | VectorType(element):
            _collect(element, found)
        case MapType(key, value):
            _collect(key, found)
            _collect(value, found)
        case TupleType(fields):
            for one in fields:
                _collect(one, found)
        case UserType():
            for one in cql_type.field_types:
                _collect(one, found)
            found[cql_type.name] = cql_type
