"""Tests of the type strings in system_schema."""

import re

import pyarrow as pa
import pytest

from ringsync.cql.identifiers import (
    parse_table_name,
    parse_table_pattern,
    parse_table_patterns,
    portable_names,
    quote,
)
from ringsync.cql.types import CqlTypeError, Native, UserType, arrow_type, is_multicell, parse_type

ADDRESS = UserType("shop", "address", ("street", "Zip code"), (Native("text"), Native("int")))
USER_TYPES = {"address": ADDRESS, "Odd name": ADDRESS}


@pytest.mark.parametrize(
    "text",
    [
        "int",
        "list<int>",
        "frozen<map<text, frozen<list<int>>>>",
        "map<text, frozen<set<uuid>>>",
        "frozen<tuple<int, frozen<list<text>>>>",
        "vector<float, 3>",
        "vector<vector<float, 2>, 3>",
        "address",
        "frozen<address>",
        "list<frozen<address>>",
        "'org.apache.cassandra.db.marshal.DynamicCompositeType'",
    ],
)
def test_prints_what_it_parsed(text: str) -> None:
    assert str(parse_type(text, USER_TYPES)).replace("frozen<list<int>>", "list<int>") == text.replace(
        "frozen<list<int>>", "list<int>"
    )


@pytest.mark.parametrize(
    ("text", "multicell"),
    [
        ("list<int>", True),
        ("frozen<list<int>>", False),
        ("address", True),
        ("frozen<address>", False),
        ("tuple<int, int>", False),
        ("vector<float, 3>", False),
        ("int", False),
    ],
)
def test_multicell(text: str, multicell: bool) -> None:
    assert is_multicell(parse_type(text, USER_TYPES)) is multicell


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a type at character 1, found the end"),
        ("list<", "expected a type at character 6, found the end"),
        ("list<int", "expected > at character 9, found the end"),
        ("list<int>>", "expected the end at character 10, found '>'"),
        ("list<int;>", "expected > at character 9, found ';>'"),
        ("list<int> -- of what", "expected the end at character 11, found '-- of what'"),
        ("frozen<'java.Class>", "expected a type at character 8, found .*java"),
        ("map<int>", "'map' does not take 1 parameters"),
        ("nosuch", "unknown type 'nosuch'"),
        ("vector<float>", "expected , at character 13, found '>'"),
        ("vector<float, x>", "expected a vector's dimension at character 15, found 'x>'"),
        ("vector<float, -3>", "expected a vector's dimension at character 15, found '-3>'"),
    ],
)
def test_broken_types_are_quoted_in_the_error(text: str, problem: str) -> None:
    with pytest.raises(CqlTypeError, match=f"^CQL type {re.escape(repr(text))}: {problem}"):
        parse_type(text, USER_TYPES)


def test_arrow_types_that_are_not_obvious() -> None:
    assert arrow_type(parse_type("map<frozen<map<int, int>>, text>", {})) == pa.list_(
        pa.struct([("key", pa.map_(pa.int32(), pa.int32())), ("value", pa.string())])
    )
    assert arrow_type(ADDRESS) == pa.struct([("street", pa.string()), ("Zip_code", pa.int32())])
    assert arrow_type(Native("decimal")) == pa.string()


def test_portable_names_stay_apart() -> None:
    assert portable_names(["a", "A", "a_", "a b", "1x", "é"], ["_row"]) == ("a", "A_", "a__", "a_b", "_1x", "_")
    assert portable_names(["_row"], ["_row"]) == ("_row_",)


@pytest.mark.parametrize(
    ("text", "name"),
    [("shop.orders", ("shop", "orders")), ("Shop.Orders", ("shop", "orders")), ('"S p"."a""b"', ("S p", 'a"b'))],
)
def test_table_names(text: str, name: tuple[str, str]) -> None:
    assert parse_table_name(text) == name
    assert parse_table_name(f"{quote(name[0])}.{quote(name[1])}") == name


@pytest.mark.parametrize("text", ["orders", "a.b.c", "a.", ".b", "a;b.c", 'a."b', "a.b; DROP TABLE c", "1a.b"])
def test_what_is_not_a_table_name(text: str) -> None:
    with pytest.raises(ValueError, match="not a table name"):
        parse_table_name(text)


@pytest.mark.parametrize(
    ("pattern", "shown", "matched"),
    [
        ("Shop.Orders", "shop.orders", ["shop.orders"]),
        ("shop.*", "shop.*", ["shop.orders", "shop.Orders", "shop.order"]),
        ("*.O*s", "*.o*s", ["shop.orders", "Shop.orders"]),
        ('"Shop".*', '"Shop".*', ["Shop.orders"]),
        ('*."O"*', '*."O"*', ["shop.Orders"]),
        ('shop."*"', 'shop."*"', []),
        ('shop."Orders"', 'shop."Orders"', ["shop.Orders"]),
        ("shop.order_", "shop.order_", []),
        ("shop.order?", "shop.order?", ["shop.orders"]),
        ("?hop.?rder", "?hop.?rder", ["shop.order"]),
        ('shop."order?"', 'shop."order?"', []),
    ],
)
def test_patterns_of_tables(pattern: str, shown: str, matched: list[str]) -> None:
    found = parse_table_pattern(pattern)
    names = [("shop", "orders"), ("Shop", "orders"), ("shop", "Orders"), ("shop", "order")]
    assert str(found) == shown
    assert parse_table_pattern(shown) == found
    assert [".".join(name) for name in names if found.matches(*name)] == matched


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("shop.orders", ["shop.orders"]),
        (" shop . orders ", ["shop.orders"]),
        ("shop.*, crm.c?", ["shop.*", "crm.c?"]),
        ("a.b\na.c  a.b,", ["a.b", "a.c"]),
        ('"My ks"."a, b",x.y', ['"My ks"."a, b"', "x.y"]),
        ('"a""b".*', ['"a""b".*']),
    ],
)
def test_several_names_and_patterns(text: str, found: list[str]) -> None:
    assert [str(pattern) for pattern in parse_table_patterns(text)] == found


@pytest.mark.parametrize("text", ["", "orders", "a.b orders", "a.b; DROP TABLE c", 'a."b', 'a.b, "c.d', "a.b,c"])
def test_what_is_no_list_of_tables(text: str) -> None:
    with pytest.raises(ValueError, match="is not a table name"):
        parse_table_patterns(text)


@pytest.mark.parametrize("text", ["*", "shop", "a.b.*", "a.*;", "a. ", "1a.b", 'a."*', "a.[bc]", ".*"])
def test_what_is_no_pattern_of_tables(text: str) -> None:
    with pytest.raises(ValueError, match="is not a table name or pattern"):
        parse_table_pattern(text)
