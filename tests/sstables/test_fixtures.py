"""The committed SSTables are what their names say, complete, overlapping, and small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sstables.fixtures import DATA, FIXTURES, TAGS, Fixture
from tests.sstables.statements import COMPRESSION, NARROW_PARTITIONS, all_schema_statements, all_statements

MOST_BYTES = 2_500_000


@pytest.fixture(params=FIXTURES.values(), ids=lambda fixture: fixture.name)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.param
    return found


def test_all_are_there_and_small() -> None:
    assert {folder.name for folder in DATA.iterdir()} == set(FIXTURES)
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < MOST_BYTES


def test_every_table_has_sstables(fixture: Fixture, tmp_path: Path) -> None:
    """Flushed several times without compaction, and then compacted to one."""
    root = fixture.unpacked(tmp_path)
    creation = "\n".join(all_schema_statements(fixture.server_version, fixture.log_mode))
    created = set(re.findall(r'CREATE TABLE "?(\w+)"?\."?(\w+)"? \(', creation)) - {("shop", "gone")}
    for tag in TAGS:
        data = list(root.glob(f"*/*/snapshots/{tag}/*-Data.db"))
        assert all(path.name.startswith(f"{fixture.sstable_version}-") for path in data)
        tables = [(path.parts[-5], path.parts[-4].split("-")[0]) for path in data]
        assert set(tables) == created
        for table in created:
            assert tables.count(table) == 1 if tag == "compacted" else tables.count(table) >= 1
        for name in (*COMPRESSION, "narrow"):
            assert tables.count(("files", name)) >= 3 or tag == "compacted"
    assert all(path.with_name("schema.cql").exists() for path in root.rglob("*-Data.db"))


def test_partitions_are_large_enough_for_an_index_inside_them(fixture: Fixture, tmp_path: Path) -> None:
    root = fixture.unpacked(tmp_path)
    for name in ("lz4", "noop", "plain"):
        for tag in TAGS:
            index = "Rows.db" if fixture.sstable_format == "bti" else "Index.db"
            sizes = [path.stat().st_size for path in root.glob(f"files/{name}-*/snapshots/{tag}/*-{index}")]
            # Without one, an entry has 2 + 4 bytes of key, up to 3 of the position, and a zero.
            assert max(sizes) > 4 * 10


def test_every_table_was_selected(fixture: Fixture) -> None:
    selected = fixture.selected["keyspaces"]
    assert all(rows for tables in selected.values() for rows in tables.values())
    narrow = selected["files"]["narrow"]
    assert len(narrow) == len({row["v"]["writetime"] for row in narrow}) == NARROW_PARTITIONS


def test_the_statements_are_the_same_each_time() -> None:
    made = all_statements("5.0", "5.0-v8")
    assert made == all_statements("5.0", "5.0-v8")
    assert len(made) > 5000
    for part in ("USING TTL 630720000", "ALTER TABLE shop.dropping ADD a int", "DELETE FROM files.noop USING"):
        assert any(part in text for text in made), part
