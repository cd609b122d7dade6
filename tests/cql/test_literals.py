"""Tests of literals: differences between inspect and messages, and independence of a value's neighbours."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringsync.cql.cells import Cells, cells_of
from ringsync.cql.text.json import JSON
from ringsync.cql.text.literals import CQL, literals, message_literals
from ringsync.cql.text.values import TextForm, value_texts
from ringsync.cql.types import CqlType, ListType, Native
from tests.cql.strategies import cql_types, typed_values


def cells(*values: bytes | None) -> Cells:
    return cells_of(pa.array(values, pa.binary()))


@settings(deadline=None)
@given(st.data())
def test_a_text_does_not_depend_on_the_values_around_it(data: st.DataObject) -> None:
    cql_type = data.draw(cql_types())
    value = st.one_of(st.none(), st.binary(max_size=12), typed_values(cql_type).map(lambda pair: pair[1]))
    values = data.draw(st.lists(value, max_size=6))
    for write in (literals, message_literals):
        alone = [write(cql_type, cells(one))[0].as_py() for one in values]
        assert write(cql_type, cells(*values)).to_pylist() == alone


@pytest.mark.parametrize(
    ("name", "value", "line", "message"),
    [
        ("text", b"it's\n", "blobAsText(0x697427730a)", "'it''s\n'"),
        ("double", struct.pack(">d", 1e10), "1.0E10", "1e+10"),
        ("double", struct.pack(">d", -0.0), "-0.0", "-0.0"),
        ("float", struct.pack(">f", float("inf")), "Infinity", "blobAsFloat(0x7f800000)"),
        ("int", b"", "blobAsInt(0x)", "blobAsInt(0x)"),
        ("date", struct.pack(">I", 2**31 - 719163), "2146764485", "2146764485"),
        ("date", struct.pack(">I", 2**31 - 719162), "'0001-01-01'", "'0001-01-01'"),
        ("timestamp", struct.pack(">q", -1), "-1", "-1"),
        ("timestamp", bytes(8), "'1970-01-01 00:00:00.000Z'", "'1970-01-01 00:00:00.000Z'"),
    ],
)
def test_a_value_outside_of_collections(name: str, value: bytes, line: str, message: str) -> None:
    kind = Native(name)
    assert literals(kind, cells(value, None)).to_pylist() == [line, None]
    assert message_literals(kind, cells(value, None)).to_pylist() == [message, None]


def test_values_in_collections_are_alike_everywhere() -> None:
    one = struct.pack(">ii", 1, 8) + struct.pack(">d", 1.0)
    found = literals(ListType(Native("double"), True), cells(one))
    assert message_literals(ListType(Native("double"), True), cells(one)).equals(found)
    assert found.to_pylist() == ["[1.0]"]


@pytest.mark.parametrize(("form", "text"), [(CQL, "[null, 2]"), (JSON, "[null, 2]")])
def test_null_is_null_within_a_collection(form: TextForm, text: str) -> None:
    kind: CqlType = ListType(Native("int"), True)
    value = struct.pack(">iiii", 2, -1, 4, 2)
    assert value_texts(form, kind, cells(value, None, b"\1")).to_pylist() == [text, "null", None]
