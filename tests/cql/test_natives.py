"""Tests of the table of native types: each type can be read, written, printed, compared and published."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import get_args

import fastavro
import pyarrow as pa
import pytest

from ringsync.avro.mapping import Mapping, avro_type, avro_values
from ringsync.avro.rows import encode_rows
from ringsync.changes.keys.canonical import canonical_cells
from ringsync.changes.keys.order import value_keys
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.codec.decode import decode, misfit_reason
from ringsync.cql.codec.encode import encode
from ringsync.cql.natives import NATIVES, NativeType
from ringsync.cql.text.json import JSON
from ringsync.cql.text.literals import literals, some_literal
from ringsync.cql.text.values import value_texts
from ringsync.cql.types import VARIABLE, CqlType, ListType, MapType, Native, TupleType, VectorType, stored_length
from ringsync.formats.page_columns import decode_pages
from tests.commitlog_model.types import FIXED_LENGTHS, NATIVE

ODD = [b"", b"\x00", b"\x02", b"\xff", b"\x00\x00", b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\x80" * 9, b"\x00" * 17]
"""Bytes of which each type except blob refuses some."""
DOCS = Path(__file__).parents[2] / "docs" / "types.md"

every_type = pytest.mark.parametrize("name", NATIVES)


def sample(native: NativeType) -> pa.Array:
    """Return the type's sample and null, as Arrow."""
    physical = {pa.date32(): pa.int32(), pa.timestamp("us", "UTC"): pa.int64()}.get(native.arrow, native.arrow)
    return pa.array([native.sample, None], physical).cast(native.arrow)


def cells(name: str) -> Cells:
    return cells_of(encode(Native(name), sample(NATIVES[name])))


def test_the_table_holds_what_cassandra_has() -> None:
    assert set(NATIVES) == NATIVE - {"empty", "varchar"}
    documented = DOCS.read_text()
    assert [name for name in NATIVES if f"`{name}`" not in documented] == []


@every_type
def test_lengths_are_those_of_the_model(name: str) -> None:
    assert stored_length(Native(name)) == FIXED_LENGTHS.get(name, VARIABLE)
    if NATIVES[name].width:
        assert cells(name).lengths.tolist() == [NATIVES[name].width, -1]


@every_type
def test_a_round_trip_alone_in_pages_and_inside_of_other_types(name: str) -> None:
    native, values = Native(name), sample(NATIVES[name])
    decoded = decode(native, cells(name))
    assert decoded.misfits is None
    assert decoded.values.equals(values)
    raw = raw_values(cells(name))[0].as_py()
    page = struct.pack(">i", 2) + struct.pack(">i", len(raw)) + raw + struct.pack(">i", -1)
    (column,) = decode_pages([page], [native]).decoded
    assert column.values.equals(values)
    whole: list[CqlType] = [ListType(native), MapType(native, native), TupleType((native,)), VectorType(native, 2)]
    for cql_type, parts in zip(whole, ([raw], [raw, raw], [raw], [raw, raw]), strict=True):
        serialised = b"".join(struct.pack(">i", len(part)) + part for part in parts)
        if isinstance(cql_type, VectorType):
            serialised = b"".join((b"" if name in FIXED_LENGTHS else bytes([len(part)])) + part for part in parts)
        elif not isinstance(cql_type, TupleType):
            serialised = struct.pack(">i", 1) + serialised
        inside = decode(cql_type, cells_of(pa.array([serialised])))
        assert inside.misfits is None
        assert encode(cql_type, inside.values).to_pylist() == [serialised]


@every_type
def test_what_is_no_value_has_a_reason(name: str) -> None:
    misfits = decode(Native(name), cells_of(pa.array(ODD))).misfits
    assert (misfits is None) == (name == "blob")
    for place, value in enumerate(ODD):
        if misfits is not None and misfits[place]:
            assert misfit_reason(Native(name), value)


@every_type
@pytest.mark.parametrize("mapping", get_args(Mapping))
def test_avro_takes_it(name: str, mapping: Mapping) -> None:
    # The sample of varint is no long.
    values = sample(NATIVES[name]) if name != "varint" else pa.array(["1", None])
    schema = ["null", avro_type(Native(name), mapping, "a.b")]
    found = encode_rows(schema, avro_values(Native(name), mapping, values)).to_pylist()
    read = [fastavro.schemaless_reader(io.BytesIO(row), fastavro.parse_schema(schema), None) for row in found]
    assert read[0] is not None
    assert read[1] is None


@every_type
def test_it_is_printed(name: str) -> None:
    assert json.loads(value_texts(JSON, Native(name), cells(name))[0].as_py()) is not None
    assert literals(Native(name), cells(name))[0].as_py()
    assert some_literal(Native(name))


@every_type
def test_it_has_an_order_and_a_canonical_form(name: str) -> None:
    raw = raw_values(cells(name))
    value, nothing = raw_values(value_keys(cells(name), Native(name))).to_pylist()
    assert nothing < value
    assert raw_values(canonical_cells(cells(name), Native(name))).equals(raw)
