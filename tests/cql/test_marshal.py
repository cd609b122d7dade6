"""Types by Cassandra's class names: each one that a server writes, and texts that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsync.cql.marshal import PACKAGE, parse_clustering, parse_marshal, parse_partition_key
from ringsync.cql.types import EMPTY, CqlTypeError, CustomType, Native, TupleType, UserType, VectorType, is_multicell

P = PACKAGE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{P}UTF8Type", "text"),
        ("UTF8Type", "text"),
        (f"{P}DateType", "timestamp"),
        (f"{P}ListType({P}Int32Type)", "list<int>"),
        (f"{P}FrozenType({P}ListType({P}Int32Type))", "frozen<list<int>>"),
        (f"{P}MapType({P}UTF8Type , {P}FrozenType({P}SetType({P}LongType)))", "map<text, frozen<set<bigint>>>"),
        (
            f"{P}FrozenType({P}MapType({P}UTF8Type,{P}ListType({P}ByteType)))",
            "frozen<map<text, frozen<list<tinyint>>>>",
        ),
        (f"{P}TupleType({P}Int32Type,{P}UTF8Type)", "frozen<tuple<int, text>>"),
        (f"{P}VectorType({P}FloatType , 3)", "vector<float, 3>"),
        (f"{P}CounterColumnType", "counter"),
    ],
)
def test_classes_are_types(text: str, expected: str) -> None:
    assert str(parse_marshal(text)) == expected


def test_a_user_defined_type_has_its_fields() -> None:
    inner = f"{P}UserType(shop,61646472657373,737472656574:{P}UTF8Type,74616773:{P}FrozenType({P}SetType({P}UTF8Type)))"
    address = parse_marshal(inner)
    assert isinstance(address, UserType)
    assert (address.keyspace, address.name, address.field_names) == ("shop", "address", ("street", "tags"))
    assert is_multicell(address)
    assert not is_multicell(parse_marshal(f"{P}FrozenType({inner})"))
    nested = parse_marshal(f"{P}TupleType({inner})")
    assert isinstance(nested, TupleType)
    assert not is_multicell(nested.fields[0])


def test_keys_and_their_order() -> None:
    assert parse_partition_key(f"{P}Int32Type") == (Native("int"),)
    assert parse_partition_key(f"{P}CompositeType({P}Int32Type,{P}UTF8Type)") == (Native("int"), Native("text"))
    assert parse_clustering(f"{P}ReversedType({P}TimeUUIDType)") == (Native("timeuuid"), True)
    assert parse_clustering(f"{P}TimeUUIDType") == (Native("timeuuid"), False)


def test_what_cql_has_no_name_for_is_a_custom_type() -> None:
    assert parse_marshal(f"{P}EmptyType") == EMPTY
    assert parse_marshal("LexicalUUIDType") == CustomType(f"{P}LexicalUUIDType")
    composite = f"{P}CompositeType({P}Int32Type,{P}UTF8Type)"
    assert parse_marshal(composite) == CustomType(composite)
    assert parse_marshal("com.example.Own") == CustomType("com.example.Own")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected the name of a class at character 1, found the end"),
        (f"{P}ListType({P}Int32Type", r"expected '\)'"),
        (f"{P}ListType", "ListType does not fit here with 0 parameters"),
        (f"{P}ListType({P}Int32Type) x", "expected the end at character"),
        (f"{P}MapType({P}Int32Type)", "MapType does not fit here with 1 parameters"),
        (f"{P}ListType({P}ReversedType({P}Int32Type))", "ReversedType does not fit here"),
        (f"{P}VectorType({P}FloatType,0)", "'0' is not the dimension of a vector"),
        (f"{P}UserType(shop,zz)", "'zz' is not a name in hexadecimal digits"),
        (f"{P}DynamicCompositeType(s=>{P}UTF8Type)", "DynamicCompositeType is not supported"),
        (f"{P}FrozenType(" * 100, "more than 64 deep"),
        ("a b", "expected the end at character 2, found b"),
        ("a;", "character 2 belongs to no type"),
    ],
)
def test_what_is_no_type_is_refused(text: str, problem: str) -> None:
    with pytest.raises(CqlTypeError, match=problem):
        parse_marshal(text)


@given(st.text(alphabet=f"{P}ListMapTypeUser(),:=>0139 ", max_size=80))
def test_any_text_is_a_type_or_an_error(text: str) -> None:
    try:
        parse_marshal(text)
    except CqlTypeError:
        return
    assert isinstance(parse_marshal(f"VectorType({text},2)"), VectorType)
