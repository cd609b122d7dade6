"""No name in messages ever stands for two columns, whatever is renamed, dropped and added.

Each version's messages are read with each version's schema, by fastavro and by Java: a column shows its own value or
null, never another column's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringsync.avro.mapping import Mapping
from ringsync.changes.identity import TableVersion
from ringsync.cql.types import CqlType, ListType, Native
from ringsync.images.schema import lake_names
from ringsync.ledger.table_versions import as_recorded, version_of
from ringsync.schema.description import describe, from_description
from ringsync.schema.table import DroppedColumn, TableSchema
from ringsync.storage.local import LocalStore
from ringsync.streams.messages import envelope_schema, key_schema
from tests.cql.test_avro import BOTH
from tests.java_avro import JavaAvro, as_java_prints, same
from tests.streams.test_messages import images, messages_of, table_of
from tests.streams.test_readers_of_versions import resolved

INT, TEXT, BLOB, INET = (Native(name) for name in ("int", "text", "blob", "inet"))

Dropped = tuple[tuple[str, CqlType, int], ...]


def table(keys: str, columns: dict[str, CqlType], dropped: Dropped = ()) -> TableSchema:
    """A table with a partition key and two clustering columns of these names, of one letter each."""
    key, *clustering = keys
    made = table_of(
        (key, "partition_key", INT),
        *((name, "clustering", INT) for name in clustering),
        *((name, "regular", columns[name]) for name in sorted(columns)),
    )
    return replace(made, dropped=tuple(DroppedColumn(name, "regular", kind, at) for name, kind, at in dropped))


V_GONE: Dropped = (("v", INET, 5),)
HISTORIES: dict[str, tuple[TableSchema, ...]] = {
    "a new column has a key's former name": (
        table("abc", {"v": INT}),
        table("xbc", {"v": INT}),
        table("xbc", {"v": INT, "a": INT}),
        table("xbc", {"v": INT, "a": INT, "w": TEXT}),
    ),
    "a new column has it, seen at once": (table("abc", {"v": INT}), table("xbc", {"v": INT, "a": INT})),
    "a key gets a dropped column's name": (
        table("abc", {"v": INT, "w": INT}),
        table("abc", {"w": INT}, (("v", INT, 5),)),
        table("vbc", {"w": INT}, (("v", INT, 5),)),
    ),
    "keys exchange their names in turn": (
        table("abc", {"v": INT}),
        table("axc", {"v": INT}),
        table("axb", {"v": INT}),
        table("acb", {"v": INT}),
    ),
    "keys exchange their names, seen at once": (table("abc", {"v": INT}), table("acb", {"v": INT})),
    "a key gets its first name again": (
        table("abc", {"v": INT}),
        table("xbc", {"v": INT}),
        table("abc", {"v": INT}),
    ),
    "another type": (
        table("abc", {"v": INET, "w": INT}),
        table("abc", {"w": INT}, V_GONE),
        table("abc", {"v": BLOB, "w": INT}, V_GONE),
        table("abc", {"w": INT}, (("v", BLOB, 9),)),
        table("abc", {"v": BLOB, "w": INT}, (("v", BLOB, 9),)),
    ),
    "another type, seen at once": (
        table("abc", {"v": ListType(INT)}),
        table("abc", {"v": BLOB}, (("v", ListType(INT), 5),)),
    ),
    "the same type": (
        table("abc", {"v": INET}),
        table("abc", {"w": INT}, V_GONE),
        table("abc", {"v": INET}, V_GONE),
    ),
}
OF_TYPE: dict[CqlType, Any] = {INT: 7, TEXT: "t", BLOB: b"\4\2", INET: "10.0.0.1", ListType(INT): [7]}


def value_of(label: str, kind: CqlType) -> Any:
    """A value that only the column with this label has."""
    return sum(map(ord, label)) if kind == INT else OF_TYPE[kind]


def history(store: LocalStore, name: str) -> list[TableVersion]:
    return [version_of(store, one) for one in HISTORIES[name]]


def labels(schema: TableSchema) -> dict[str, str]:
    """Which column each name in messages stands for: keys by their places, others by their labels."""
    names = lake_names(schema)
    keys = {names[key.name]: f"key {place}" for place, key in enumerate(schema.key_columns)}
    return keys | {names[column.name]: schema.label(column.name) for column in schema.value_columns}


@pytest.fixture(scope="module")
def java(spark: Any) -> JavaAvro:
    return JavaAvro(spark)


@pytest.mark.spark
@pytest.mark.parametrize("mapping", BOTH)
@pytest.mark.parametrize("name", HISTORIES)
def test_a_name_shows_its_own_column_or_nothing(java: JavaAvro, tmp_path: Path, name: str, mapping: Mapping) -> None:
    tables = [version.table for version in history(LocalStore(tmp_path), name)]
    schemas = [(key_schema(one, "demo", mapping), envelope_schema(one, "demo", mapping)) for one in tables]
    for number, written in enumerate(tables):
        names, written_labels = lake_names(written), labels(written)
        values = {names[c.name]: value_of(written_labels[names[c.name]], c.type) for c in written.columns}
        times = {"writetime": 10, "expires_at": None, "deleted_at": None, "live": None}
        messages = messages_of(written, images(written, {"token": 5, **values, "_row": times}), mapping)
        own = resolved(schemas[number][1], messages.values, schemas[number][1])[0]["after"]
        by_label = {written_labels[field]: value for field, value in own.items()}
        for place, read in enumerate(tables):
            case = (name, number, place)
            for part, data in enumerate((messages.keys, messages.values)):
                mine = resolved(schemas[number][part], data, schemas[place][part])
                its = java.read(schemas[number][part], data, schemas[place][part])
                assert same([as_java_prints(one) for one in mine], its), case
                assert java.can_read(schemas[place][part], schemas[number][part]), case
                seen = mine[0]["after"] if part else {k: v for k, v in mine[0].items() if k != "_x"}
                for field, label in labels(read).items():
                    if field in seen:
                        shown, wanted = seen[field], by_label.get(label)
                        assert shown in (wanted, None), (*case, field)
                        assert shown == wanted or (place < number and field not in written_labels), (*case, field)


def test_a_column_keeps_its_label(tmp_path: Path) -> None:
    """Whoever reads the table from the cluster, a plan, or as some of its columns, gives the same names."""
    for name in HISTORIES:
        store, given = LocalStore(tmp_path / name), dict[str, str]()
        for version, shown in zip(history(store, name), HISTORIES[name], strict=True):
            for field, label in labels(version.table).items():
                if not label.startswith("key "):
                    assert given.setdefault(field, label) == label, name
            expected = lake_names(version.table)
            assert lake_names(from_description(describe(version.table))) == expected
            assert lake_names(version.with_past(shown)) == expected
        assert lake_names(as_recorded(store, HISTORIES[name][-1])) == expected
        part = HISTORIES[name][-1].only(["v"] if "v" in expected else [])
        assert lake_names(as_recorded(store, part)).items() <= expected.items()


def test_names_in_the_lake(tmp_path: Path) -> None:
    newest = {name: lake_names(history(LocalStore(tmp_path / name), name)[-1].table) for name in HISTORIES}
    assert newest["a new column has a key's former name"]["a"] == "a_2"
    assert newest["another type"] == {"a": "a", "b": "b", "c": "c", "v": "v_2", "w": "w"}
    assert newest["the same type"]["v"] == "v"
    assert newest["a key gets its first name again"]["a"] == "a"
