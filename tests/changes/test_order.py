"""Tests of the order of encoded keys: it is that of the plain-Python model, and of a server's SELECT."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from cassandra import InvalidRequest
from cassandra.protocol import ServerError
from cassandra.query import BoundStatement
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ringsync.changes.keys.order import clustering_keys, path_type, value_keys
from ringsync.changes.keys.order_kernels import END, START
from ringsync.changes.keys.parts import clustering_parts
from ringsync.cql.cells import cells_of, cells_of_values, raw_values
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
    parse_type,
)
from ringsync.schema.table import Column, TableSchema
from tests.commitlog_model.order import compare, compare_clustering
from tests.commitlog_model.types import Type
from tests.cql.strategies import cql_types, python_values, serialise, typed_values

KINDS = {ListType: "list", SetType: "set", MapType: "map", TupleType: "tuple", UserType: "udt", VectorType: "vector"}
NATIVE_KEYS = """
ascii bigint blob boolean date decimal double float inet int smallint text time timestamp timeuuid tinyint uuid varint
"""
KEYS = [
    *NATIVE_KEYS.split(),
    "frozen<list<decimal>>",
    "frozen<set<text>>",
    "frozen<map<int, text>>",
    "tuple<int, text, boolean>",
    "frozen<pair>",
    "vector<float, 2>",
    "vector<text, 2>",
]
PAIR = UserType("k", "pair", ("a", "b"), (Native("uuid"), Native("varint")))


def model_type(cql_type: CqlType) -> Type:
    """Return the model's form of a type; all types inside are frozen."""
    match cql_type:
        case Native(name):
            return Type(name)
        case CustomType():
            return Type("custom")
        case TupleType(fields) | UserType(field_types=fields):
            inner: tuple[CqlType, ...] = fields
        case MapType(key, value):
            inner = (key, value)
        case ListType(element) | SetType(element) | VectorType(element):
            inner = (element,)
    dimension = cql_type.dimension if isinstance(cql_type, VectorType) else 0
    return Type(KINDS[type(cql_type)], tuple(map(model_type, inner)), frozen=True, dimension=dimension)


def sign(number: int) -> int:
    return (number > 0) - (number < 0)


def ordered(left: Any, right: Any) -> int:
    return (left > right) - (left < right)


def clustering_bytes(values: Sequence[bytes | None], *inclusive: bool) -> bytes:
    """Encode a clustering as in change rows; bounds have a last byte."""
    parts = [struct.pack("<i", -1) if one is None else struct.pack("<i", len(one)) + one for one in values]
    return struct.pack("<i", len(values)) + b"".join(parts) + bytes(inclusive)


def table_of(*columns: tuple[CqlType, bool]) -> TableSchema:
    clustering = tuple(Column(f"c{i}", "clustering", kind, descending) for i, (kind, descending) in enumerate(columns))
    return TableSchema("k", "t", "", (Column("p", "partition_key", Native("int")), *clustering))


def is_key(cql_type: CqlType) -> bool:
    return "duration" not in repr(cql_type)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_sort_as_in_the_model(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types().filter(is_key))
    # Some share their first parts.
    values = data.draw(st.lists(typed_values(cql_type).map(lambda pair: pair[1]), min_size=2, max_size=6))
    values += [b"", *(one[: len(one) - 1] + b"\0" for one in values[:1] if isinstance(cql_type, Native) and one)]
    raws: list[bytes | None] = [*values, None] if str(cql_type) not in ("decimal", "varint") else [*values[:-1], None]
    encoded = raw_values(value_keys(cells_of(pa.array(raws, pa.binary())), cql_type)).to_pylist()
    model = model_type(cql_type)
    for i, left in enumerate(raws):
        for j, right in enumerate(raws):
            found = ordered(encoded[i], encoded[j])
            assert found == sign(compare(model, left, right)), (cql_type, left, right, encoded[i], encoded[j])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_is_between_the_bounds_that_cover_it(data: st.DataObject) -> None:
    types = [Native(data.draw(st.sampled_from(["int", "text", "decimal", "boolean", "timeuuid"]))) for _ in range(2)]
    columns = [(kind, data.draw(st.booleans())) for kind in types]
    pools = [
        [*data.draw(st.lists(typed_values(kind).map(lambda pair: pair[1]), min_size=1, max_size=2)), b"", None]
        for kind in types
    ]
    rows = [[a, b] for a in pools[0] for b in pools[1]]
    bounds = [[], *([a] for a in pools[0] if a is not None), *(row for row in rows if None not in row)]
    table, model = table_of(*columns), [(model_type(kind), descending) for kind, descending in columns]

    def encoded(values: Sequence[Sequence[bytes | None]], side: int, *inclusive: bool) -> list[bytes]:
        raws = [clustering_bytes(one, *inclusive) for one in values]
        found: list[bytes] = raw_values(clustering_keys(cells_of_values(raws), table, side)).to_pylist()
        return found

    keys = encoded(rows, START)
    for i, left in enumerate(rows):
        for j, right in enumerate(rows):
            assert ordered(keys[i], keys[j]) == sign(compare_clustering(model, left, right))
    for inclusive in (True, False):
        for start, end, bound in zip(*(encoded(bounds, side, inclusive) for side in (START, END)), bounds, strict=True):
            for key, row in zip(keys, rows, strict=True):
                place = compare_clustering(model, row, bound)
                assert (start < key) == (place > 0 or (place == 0 and inclusive))
                assert (key < end) == (place < 0 or (place == 0 and inclusive))


def test_equal_values_have_equal_bytes() -> None:
    def encoded(name: str, *values: bytes) -> set[bytes]:
        return set(raw_values(value_keys(cells_of_values(values), Native(name))).to_pylist())

    decimals = [struct.pack(">i", scale) + unscaled for scale, unscaled in ((0, b"\1"), (1, b"\x0a"), (2, b"\0\x64"))]
    assert len(encoded("decimal", *decimals, b"\0\0\0\0\0\0\1")) == 1
    assert len(encoded("decimal", b"\0\0\0\0\0", b"\xff\xff\xff\xff\0\0")) == 1
    assert len(encoded("varint", b"\1", b"\0\1", b"\0\0\1")) == 1
    assert len(encoded("varint", b"\xff", b"\xff\xff")) == 1
    assert len(encoded("boolean", b"\1", b"\2")) == 1
    assert len(encoded("double", *(bytes.fromhex(nan) for nan in ("7ff8000000000000", "fff0000000000001")))) == 1
    assert len(encoded("float", b"\x80\0\0\0", b"\0\0\0\0")) == 2


def test_paths_are_sorted_by_element_key_entry_or_field() -> None:
    paths = {"list<int>": "timeuuid", "set<text>": "text", "map<varint, int>": "varint", "pair": "smallint"}
    assert {name: str(path_type(parse_type(name, {"pair": PAIR}))) for name in paths} == paths


def test_what_is_no_clustering_of_the_table_is_refused() -> None:
    for damaged in (b"", b"\1\0\0\0", clustering_bytes([b"a", b"b"]), clustering_bytes([b"a"]) + b"\0\0"):
        with pytest.raises(ValueError, match="another table"):
            clustering_keys(cells_of_values([damaged]), table_of((Native("text"), False)))


def has_no_nulls(value: Any) -> bool:
    """Tell whether a value has no nulls: servers cannot compare collections with nulls inside, and shorten tuples."""
    return "None" not in repr(value)


@pytest.fixture(scope="module")
def raw_session(session: Any, keyspace: str) -> Any:
    session.execute(f"CREATE TYPE {keyspace}.pair (a uuid, b varint)")
    return session


@pytest.mark.server
@pytest.mark.parametrize("name", KEYS)
def test_a_server_sorts_rows_as_their_keys_are(raw_session: Any, keyspace: str, name: str) -> None:
    cql_type = parse_type(name, {"pair": PAIR})
    table = f"{keyspace}.t{uuid.uuid4().hex}"
    raw_session.execute(
        f"CREATE TABLE {table} (p int, a {name}, d {name}, n int, PRIMARY KEY (p, a, d)) "
        "WITH CLUSTERING ORDER BY (a ASC, d DESC)"
    )
    insert = raw_session.prepare(f"INSERT INTO {table} (p, a, d, n) VALUES (?, ?, ?, ?)")
    select = raw_session.prepare(f"SELECT n FROM {table} WHERE p = ?")
    partitions = iter(range(1000))
    compared: list[int] = []

    def stored(value: Any) -> bytes:
        """Sort sets and maps, without repetitions, as servers store them."""
        if isinstance(cql_type, SetType):
            value = sorted(set(value), key=str.encode)
        elif isinstance(cql_type, MapType):
            value = sorted(dict(value).items())
        return serialise(cql_type, value)

    @settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(python_values(cql_type).filter(has_no_nulls).map(stored), min_size=12, max_size=16))
    def check(values: list[bytes]) -> None:
        partition = next(partitions)
        expected: dict[bytes, int] = {}
        pairs = [(a, values[0]) for a in [*values, b""]] + [(values[0], d) for d in [*values, b""]]
        clusterings = cells_of_values([clustering_bytes(pair) for pair in pairs])
        keys = raw_values(clustering_keys(clusterings, table_of((cql_type, False), (cql_type, True)))).to_pylist()
        for number, (pair, key) in enumerate(zip(pairs, keys, strict=True)):
            bound = BoundStatement(insert)
            bound.values = [struct.pack(">i", partition), *pair, struct.pack(">i", number)]
            try:
                raw_session.execute(bound)
            except (InvalidRequest, ServerError):
                assert b"" in pair  # some types have no empty values
                continue
            expected[key] = number
        shown = [row.n for row in raw_session.execute(select, (partition,))]
        assert shown == [expected[key] for key in sorted(expected)], (name, pairs, keys)
        compared.append(len(shown))

    check()
    assert sum(compared) > 10


@pytest.mark.parametrize("columns", [1, 2])
def test_a_clustering_that_ends_behind_its_bytes_is_refused(columns: int) -> None:
    cells = cells_of_values([(2).to_bytes(4, "little") + (2**30).to_bytes(4, "little")])
    with pytest.raises(IndexError, match="ends behind its bytes"):
        clustering_parts(cells, columns)
