"""Readers of other versions: a message decodes by its own schema, by the first one of its table, and by the last one.

Each version's messages are read with each version's schema, by fastavro and by Java, with Avro's schema resolution."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from ringsync.avro.mapping import Mapping, without_logical_types
from ringsync.changes.identity import TableVersion
from ringsync.cql.types import CqlType, ListType, MapType, Native, UserType
from ringsync.images.schema import lake_names
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.storage.local import LocalStore
from ringsync.streams.messages import envelope_schema, key_schema
from tests.cql.test_avro import BOTH
from tests.java_avro import JavaAvro, as_java_prints, same
from tests.streams.test_messages import images, messages_of, table_of

INT, TEXT = Native("int"), Native("text")


def address(*fields: str, frozen: bool = False) -> UserType:
    return UserType("shop", "address", fields, (TEXT,) * len(fields), frozen)


def version_with(clustering: str, columns: dict[str, CqlType], dropped: tuple[str, ...] = ()) -> TableSchema:
    """A table's version; names in quotes' order, as Cassandra has them."""
    made = table_of(
        ("id", "partition_key", INT),
        (clustering, "clustering", INT),
        *((name, "regular", columns[name]) for name in sorted(columns, key=str.encode)),
    )
    return replace(made, dropped=tuple(DroppedColumn(name, "regular", INT, 5) for name in dropped))


SHORT, LONG = address("street"), address("street", "zip")
BASE: dict[str, CqlType] = {"v": INT, "a": SHORT, "l": ListType(replace(SHORT, frozen=True))}
GROWN: dict[str, CqlType] = {"v": INT, "a": LONG, "l": ListType(replace(LONG, frozen=True))}
STEPS: tuple[TableSchema, ...] = (
    version_with("c", BASE),
    version_with("c", {**BASE, "w": INT, "m": MapType(TEXT, INT)}),  # ADD
    version_with("c", {**BASE, "m": MapType(TEXT, INT)}, ("w",)),  # DROP
    version_with("c", {**BASE, "w": INT, "m": MapType(TEXT, INT)}, ("w",)),  # ADD again
    version_with("c", {**GROWN, "w": INT, "m": MapType(TEXT, INT)}, ("w",)),  # ALTER TYPE ADD
    version_with("line no", {**GROWN, "w": INT, "m": MapType(TEXT, INT)}, ("w",)),  # RENAME
    version_with("seq", {**GROWN, "w": INT, "line-no": INT}, ("m", "w")),  # RENAME, DROP and ADD
)
VALUES: dict[str, Any] = {
    "id": 1,
    "v": 2,
    "w": 3,
    "m": [("k", 4)],
    "line-no": 6,
    "a": {"street": "High", "zip": "8000"},
    "l": [{"street": "Low", "zip": "8001"}],
}


@pytest.fixture(scope="module")
def java(spark: Any) -> JavaAvro:
    return JavaAvro(spark)


def versions_of(store: LocalStore) -> list[TableVersion]:
    return [version_of(store, table) for table in STEPS]


def fitting(kind: CqlType, value: Any) -> Any:
    """The part of a value that a type can hold."""
    if isinstance(kind, UserType):
        return {name: value.get(name) for name in kind.field_names}
    return [fitting(kind.element, one) for one in value] if isinstance(kind, ListType) else value


def message_of(table: TableSchema, mapping: Mapping) -> tuple[pa.Array, pa.Array]:
    """Key and value of a row that has all values."""
    names, (_, clustering) = lake_names(table), table.key_columns
    values = {names[c.name]: fitting(c.type, VALUES[c.name]) for c in table.columns if c.name != clustering.name}
    times = {"writetime": 10, "expires_at": None, "deleted_at": None, "live": None}
    row = {"token": 5, **values, names[clustering.name]: 7, "_row": times}
    messages = messages_of(table, images(table, row), mapping)
    return messages.keys, messages.values


def resolved(writer: Any, data: pa.Array, reader: Any) -> list[Any]:
    schemas = [fastavro.parse_schema(without_logical_types(schema)) for schema in (writer, reader)]
    return [fastavro.schemaless_reader(io.BytesIO(one), *schemas) for one in data.to_pylist()]


def expected(written: TableSchema, read: TableSchema, later: bool) -> dict[str, Any]:
    """What a reader of a version sees of ``after`` of a message of another version, in ``exact``.

    :param later: whether the reader knows of all renames that were done before the message was written
    """
    found: dict[str, Any] = {}
    writes = {column.name: column.type for column in written.columns}
    for column in read.columns:
        name = lake_names(read)[column.name]
        if column.kind == "clustering":
            found[name] = 7 if later or column.name in writes else None
        elif column.name not in writes:
            found[name] = None
        else:
            value = fitting(writes[column.name], VALUES[column.name])
            found[name] = dict(value) if isinstance(column.type, MapType) else filled(column.type, value)
    return found


def filled(kind: CqlType, value: Any) -> Any:
    if isinstance(kind, UserType):
        return {name: value.get(name) for name in kind.field_names}
    return [filled(kind.element, one) for one in value] if isinstance(kind, ListType) else value


@pytest.mark.parametrize("mapping", BOTH)
@pytest.mark.spark
def test_every_version_s_messages_are_read_by_every_version_s_readers(
    java: JavaAvro, mapping: Mapping, tmp_path: Path
) -> None:
    versions = versions_of(LocalStore(tmp_path))
    tables = [version.table for version in versions]
    schemas = [(key_schema(table, "demo", mapping), envelope_schema(table, "demo", mapping)) for table in tables]
    assert [version.number for version in versions] == list(range(1, len(STEPS) + 1))
    for number, written in enumerate(tables):
        data = message_of(written, mapping)
        for place, read in enumerate(tables):
            for part in (0, 1):
                mine = resolved(schemas[number][part], data[part], schemas[place][part])
                its = java.read(schemas[number][part], data[part], schemas[place][part])
                assert same([as_java_prints(one) for one in mine], its), (number, place, mine, its)
                assert java.can_read(schemas[place][part], schemas[number][part]), (number, place)
                (one,) = mine
                name = lake_names(read)[read.clustering[0].name]
                seen = 7 if place >= number or read.clustering == written.clustering else None
                if part == 0:
                    assert one == {"id": 1, name: seen, "_x": None}
                elif mapping == "exact":
                    assert one["after"] == expected(written, read, place >= number), (number, place)


@pytest.mark.spark
def test_a_table_that_was_created_again_may_be_of_no_use_to_readers_of_before(java: JavaAvro, tmp_path: Path) -> None:
    """It is a version of the same history, and its schema tells whether the registry takes it."""
    store = LocalStore(tmp_path)
    first = version_of(store, version_with("c", {"v": INT}))
    again = replace(version_with("c", {"v": TEXT}), table_id="1" * 32)
    second = version_of(store, again)
    assert (first.number, second.number) == (1, 2)
    before, after = (envelope_schema(version.table, "demo", "exact") for version in (first, second))
    assert not java.can_read(after, before)
    # Another key is another record of the same fields and more, each null where it is missing.
    other_key = replace(version_with("d", {"v": INT}), table_id="2" * 32)
    third = version_of(store, other_key)
    assert third.table.former_keys == ()
    assert java.can_read(key_schema(third.table, "demo", "exact"), key_schema(first.table, "demo", "exact"))


CLASHING = ["a b", "a-b", "a_b", "A_B", "Größe", "1st", "_1st", "order-id", "token", "token_", "Gr__e"]


@pytest.mark.spark
def test_no_column_gets_another_s_name_when_it_is_added(java: JavaAvro, tmp_path: Path) -> None:
    """Names were given out in alphabetical order: ``a b`` took ``a_b`` from the column of that name."""
    store, seen = LocalStore(tmp_path), dict[str, str]()
    columns: dict[str, CqlType] = {}
    for name in reversed(CLASHING):
        columns = {**columns, name: INT}
        table = version_of(store, version_with("c", columns)).table
        names = lake_names(table)
        assert seen.items() <= names.items()
        seen = dict(names)
        row = next(field for field in envelope_schema(table, "demo", "exact")["fields"] if field["name"] == "before")
        parsed = java.parse(row["type"][1])
        kept = {str(field.getProp("cql") or field.name()): str(field.name()) for field in parsed.getFields()}
        assert kept == names
        # Whoever reads the table from the cluster, or a plan, gives the same names.
        assert lake_names(as_recorded(store, version_with("c", columns))) == names
        assert lake_names(from_description(describe(table))) == names
    assert len({name.lower() for name in seen.values()}) == len(seen)


def test_a_dropped_column_s_name_goes_to_no_other(tmp_path: Path) -> None:
    """A reader of the first version would take the new column's values for the dropped one's."""
    store = LocalStore(tmp_path)
    assert lake_names(version_of(store, version_with("c", {"a b": INT})).table)["a b"] == "a_b"
    version_of(store, version_with("c", {"v": INT}, ("a b",)))
    table = version_of(store, version_with("c", {"v": INT, "a_b": INT}, ("a b",))).table
    assert lake_names(table)["a_b"] == "a_b_"
    again = version_of(store, version_with("c", {"v": INT, "a_b": INT, "a b": INT}, ("a b",))).table
    assert lake_names(again) == {"id": "id", "c": "c", "a b": "a_b", "a_b": "a_b_", "v": "v"}
    # Some of the columns have the same names as all of them, also if they are read first.
    part = version_of(store, again.only(["a_b"]))
    assert lake_names(part.table)["a_b"] == "a_b_"


def test_a_former_name_of_a_key_stays_its_alias(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    version_of(store, version_with("c", {"v": INT}))
    renamed = version_of(store, version_with("seq", {"v": INT})).table
    assert renamed.former_keys == ((), ("c",))
    assert key_schema(renamed, "demo", "exact")["fields"][1]["aliases"] == ["c"]
    added = version_of(store, version_with("seq", {"v": INT, "c": INT})).table
    assert lake_names(added)["c"] == "c_2"
    assert key_schema(added, "demo", "exact")["fields"][1]["aliases"] == ["c"]
    back = version_of(store, version_with("c", {"v": INT})).table
    assert key_schema(back, "demo", "exact")["fields"][1]["aliases"] == ["seq"]


def test_a_column_of_keys_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    table = TableSchema("shop", "keys", "3" * 32, (Column("K", "partition_key", INT), Column("k", "clustering", INT)))
    assert lake_names(version_of(store, table).table) == {"K": "K", "k": "k_"}
