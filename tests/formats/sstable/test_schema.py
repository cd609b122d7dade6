"""The columns of SSTables against the schema.cql of the same snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringsync.cql.types import Native, UserType
from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.schema import file_columns, schema_of_all
from ringsync.formats.sstable.statistics import HeaderColumn, read_statistics
from ringsync.schema.table import Column
from tests.formats.sstable.files import sources, sources_of, table_of
from tests.sstables.fixtures import FIXTURES


@pytest.mark.parametrize("name", FIXTURES)
def test_every_column_of_every_sstable_is_found(name: str) -> None:
    different = set()
    for source in sources(name):
        header, table = read_statistics(source), table_of(source.descriptor)
        columns = file_columns(source.descriptor, header, table)
        assert [one.column.name.encode() for one in columns.static] == [column.name for column in header.static]
        assert [one.column.name.encode() for one in columns.regular] == [column.name for column in header.regular]
        for one in (*columns.static, *columns.regular):
            assert one.column.is_multicell == any(
                column.is_multicell for column in (*table.columns, *table.dropped) if column.name == one.column.name
            )
            if str(one.type) != str(one.column.type):
                different.add((table.name, one.column.name, str(one.type), str(one.column.type)))
    # Cassandra writes the type of a dropped column with tuples instead of user-defined types.
    fields = "tuple<text, int, frozen<set<text>>>"
    assert different == {("dropping", "d", "frozen<address>", f"frozen<{fields}>")}


def test_columns_that_were_dropped_are_marked() -> None:
    found = {}
    for source in sources_of("5.0-oa", "shop.dropping", "flushed"):
        columns = file_columns(source.descriptor, read_statistics(source), table_of(source.descriptor))
        found |= {one.column.name: one.column.dropped for one in columns.regular}
    assert found == {"a": False, "b": False, "c": False, "d": True, "e": True}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_table_is_made_of_its_sstables(name: str) -> None:
    by_table: dict[str, list] = {}
    for source in sources(name):
        by_table.setdefault(source.descriptor.table_id, []).append(source.descriptor)
    for descriptors in by_table.values():
        headers = [
            (one, read_statistics(source)) for source in sources(name) if (one := source.descriptor) in descriptors
        ]
        made, table = schema_of_all(headers), table_of(descriptors[0])
        assert (made.keyspace, made.name, made.table_id) == (table.keyspace, table.name, table.table_id)
        assert [(c.kind, str(c.type), c.descending) for c in made.key_columns] == [
            (c.kind, str(c.type), c.descending) for c in table.key_columns
        ]
        known = {(c.name, c.kind) for c in table.value_columns} | {(c.name, c.kind) for c in table.dropped}
        assert {(c.name, c.kind) for c in made.value_columns} <= known
        for descriptor, header in headers:
            file_columns(descriptor, header, made)


def test_a_user_defined_type_has_the_fields_of_the_latest_sstable() -> None:
    headers = [(one.descriptor, read_statistics(one)) for one in sources_of("5.0-oa", "shop.adding", "flushed")]
    fields = [len(header.regular[-1].type.field_names) for _, header in headers if header.regular[-1].name == b"u"]
    assert min(fields) < max(fields)
    for order in (headers, headers[::-1]):
        made = schema_of_all(order).column("u").type
        assert isinstance(made, UserType)
        assert made.field_names == ("street", "number", "tags", "zip")


def test_columns_of_the_key_have_names_that_no_other_has() -> None:
    source = sources_of("5.0-oa", "files.keyed", "compacted")[0]
    header = read_statistics(source)
    made = schema_of_all([(source.descriptor, header)])
    assert [c.name for c in made.columns] == ["key1", "key2", "clustering1", "v"]
    odd = replace(header, key=(Native("int"),), regular=(HeaderColumn(b"partition_key", Native("int")),))
    assert [c.name for c in schema_of_all([(source.descriptor, odd)]).key_columns] == ["partition_key_", "clustering1"]


def test_an_sstable_of_another_table_is_refused() -> None:
    source = sources_of("5.0-oa", "files.keyed", "compacted")[0]
    descriptor, header, table = source.descriptor, read_statistics(source), table_of(source.descriptor)
    key, rest = table.columns[:3], table.columns[3:]
    for columns, problem in [
        (key, "has a regular column v, which files.keyed does not have and never had"),
        ((*key, Column("v", "static", Native("int"))), "has a regular column v, which is of another kind"),
        ((*key, Column("v", "regular", Native("text"))), "has a column v of type int, which is text in files.keyed"),
        (
            (*key[:2], replace(key[2], descending=True), *rest),
            r"clustering \(uuid\), and files.keyed has \(uuid DESC\)",
        ),
        ((*key[:1], *key[2:], *rest), r"has the partition key \(int, text\), and files.keyed has \(int\)"),
    ]:
        with pytest.raises(SSTableError, match=f"{problem}.*give the schema of this very table"):
            file_columns(descriptor, header, replace(table, columns=columns))
    other = sources_of("5.0-oa", "files.narrow", "compacted")[0]
    with pytest.raises(SSTableError, match="name only SSTables of one table"):
        schema_of_all([(descriptor, header), (other.descriptor, read_statistics(other))])
