"""Messages of all types, in both mappings, read by fastavro and by Avro's Java implementation: both see the same."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringsync.avro.mapping import AvroMappingError, Mapping
from ringsync.cql.types import CqlType, ListType, MapType, Native, SetType, TupleType, UserType, VectorType
from ringsync.schema.table import TableSchema
from ringsync.streams.messages import envelope_schema, key_schema, message_schema
from tests.cql.strategies import NATIVE_NAMES
from tests.cql.test_avro import BOTH, as_multicell
from tests.java_avro import JavaAvro, as_java_prints, same
from tests.streams.test_messages import images_of, messages_of, random_images, read, table_of

NO_KEYS = ("counter", "duration")
INT, TEXT = Native("int"), Native("text")
INNER = UserType("shop", "inner", ("1st", "Größe"), (Native("decimal"), TEXT), True)
OUTER = UserType("shop", "outer", ("inner", "order-id", "ORDER-ID"), (INNER, MapType(TEXT, INT, True), INT), True)
NESTED: tuple[CqlType, ...] = (
    ListType(MapType(TEXT, INT, True)),
    ListType(MapType(INNER, SetType(INT, True), True), True),
    MapType(INT, TupleType((TEXT, OUTER))),
    MapType(TEXT, ListType(OUTER, True)),
    SetType(TupleType((INT, TupleType((TEXT,)))), True),
    TupleType((ListType(TEXT, True), VectorType(Native("float"), 3), INNER)),
    VectorType(ListType(INT, True), 2),
    VectorType(INNER, 2),
    OUTER,
    as_multicell(OUTER),
)


@pytest.fixture(scope="module")
def java(spark: Any) -> JavaAvro:
    return JavaAvro(spark)


def check(java: JavaAvro, table: TableSchema, batch: pa.RecordBatch, mapping: Mapping) -> None:
    messages = messages_of(table, batch, mapping)
    key, value = key_schema(table, "demo", mapping), envelope_schema(table, "demo", mapping)
    java.parse(message_schema(key, value))
    for schema, data in ((key, messages.keys), (value, messages.values)):
        mine, its = [as_java_prints(one) for one in read(schema, data)], java.read(schema, data)
        for one, other in zip(mine, its, strict=True):
            assert same(one, other), (one, other)


def quiet(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@quiet(8)
@given(data=st.data())
@pytest.mark.parametrize("mapping", BOTH)
@pytest.mark.spark
def test_native_types(java: JavaAvro, mapping: Mapping, data: st.DataObject) -> None:
    """Each as key and value, and each inside collections of both kinds."""
    scalars = [Native(name) for name in NATIVE_NAMES if name != "counter"]
    keys = [kind for kind in scalars if kind.name not in NO_KEYS]
    table = table_of(
        *((f"p_{kind.name}", "partition_key", kind) for kind in keys),
        *((f"k_{kind.name}", "clustering", kind) for kind in keys),
        *((f"s_{kind.name}", "static", kind) for kind in scalars),
        *((f"v_{kind.name}", "regular", kind) for kind in scalars),
        *((f"l_{kind.name}", "regular", ListType(kind)) for kind in scalars),
        *((f"m_{kind.name}", "regular", MapType(kind, kind)) for kind in keys),
        *((f"f_{kind.name}", "regular", ListType(kind, True)) for kind in scalars),
    )
    with suppress(AvroMappingError):  # classic has no long varints, and no huge decimals
        check(java, table, data.draw(images_of(table)), mapping)


@quiet(3)
@given(data=st.data())
@pytest.mark.parametrize("mapping", BOTH)
@pytest.mark.parametrize("name", NATIVE_NAMES)
@pytest.mark.spark
def test_one_native_type(java: JavaAvro, name: str, mapping: Mapping, data: st.DataObject) -> None:
    """Alone, so that no other type makes ``classic`` refuse the row."""
    table = table_of(("id", "partition_key", INT), ("v", "regular", Native(name)))
    with suppress(AvroMappingError):
        check(java, table, data.draw(images_of(table)), mapping)


@quiet(4)
@given(data=st.data())
@pytest.mark.parametrize("mapping", BOTH)
@pytest.mark.parametrize("kind", NESTED, ids=str)
@pytest.mark.spark
def test_nested_types(java: JavaAvro, kind: CqlType, mapping: Mapping, data: st.DataObject) -> None:
    frozen = kind if not hasattr(kind, "frozen") else type(kind)(**{**vars(kind), "frozen": True})
    table = table_of(
        ("id", "partition_key", INT),
        ("p", "partition_key", frozen),
        ("c", "clustering", frozen),
        ("s", "static", kind),
        ("v", "regular", kind),
    )
    with suppress(AvroMappingError):
        check(java, table, data.draw(images_of(table)), mapping)


@quiet(60)
@given(drawn=random_images(), mapping=st.sampled_from(BOTH))
@pytest.mark.spark
def test_random_tables(java: JavaAvro, drawn: tuple[TableSchema, pa.RecordBatch], mapping: Mapping) -> None:
    with suppress(AvroMappingError):
        check(java, *drawn, mapping)
