"""Names and paths of SSTables' files, and which sets of files are whole SSTables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ringsync.formats.sstable.errors import SSTableError
from ringsync.formats.sstable.names import Descriptor, LeftOut, find_sstables, parse_path
from ringsync.formats.sstable.source import LocalSource, _files_in, find_local
from tests.formats.sstable.files import sources, unpacked
from tests.sstables.fixtures import FIXTURES

TABLE = "orders-5a1c395eb41f11e5b0a4e5a2c9f8d3b1"
ID = "5a1c395eb41f11e5b0a4e5a2c9f8d3b1"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nb-1-big-Data.db", Descriptor("nb", "1", "big")),
        ("mc-5-big-Data.db", Descriptor("mc", "5", "big")),
        ("da-3gx1_0abc_0000012345678abcde-bti-Data.db", Descriptor("da", "3gx1_0abc_0000012345678abcde", "bti")),
        (f"/d/shop/{TABLE}/oa-2-big-Data.db", Descriptor("oa", "2", "big", f"/d/shop/{TABLE}", "shop", "orders", ID)),
        (
            f"shop/{TABLE}/snapshots/nightly/na-2-big-Data.db",
            Descriptor("na", "2", "big", f"shop/{TABLE}/snapshots/nightly", "shop", "orders", ID),
        ),
        (
            f"shop/{TABLE}/backups/.by_name/na-2-big-Data.db",
            Descriptor("na", "2", "big", f"shop/{TABLE}/backups/.by_name", "shop", "orders", ID),
        ),
        ("copy/me-2-big-Data.db", Descriptor("me", "2", "big", "copy")),
    ],
)
def test_a_path_says_what_the_sstable_is(path: str, expected: Descriptor) -> None:
    found = parse_path(path)
    assert found == (expected, "Data.db")
    assert expected.path("Data.db") == path


def test_other_files_are_none() -> None:
    for name in ("manifest.json", "schema.cql", "nb_txn_flush_5a1c395e-b41f-11e5.log", "nb-x-big-Data.db"):
        assert parse_path(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("zz-1-big-Data.db", "has the unknown version zz of format big"),
        ("nb-1-bti-Data.db", "has the unknown version nb of format bti"),
        ("la-1-big-Data.db", "has the unknown version la of format big"),
        ("shop-orders-ka-1-Data.db", "is of Cassandra 2 or older"),
        ("tmplink-ka-1-Data.db", "is of Cassandra 2 or older"),
    ],
)
def test_an_unknown_version_is_an_error(name: str, problem: str) -> None:
    with pytest.raises(SSTableError, match=f"{problem}; known are ma, .*upgradesstables"):
        parse_path(f"folder/{name}")


@pytest.mark.parametrize("name", FIXTURES)
def test_the_sstables_of_a_server_are_found(name: str) -> None:
    fixture, found = FIXTURES[name], sources(name)
    assert len(found) > 100
    for source in found:
        descriptor = source.descriptor
        assert descriptor.version == fixture.sstable_version
        assert descriptor.format == fixture.sstable_format
        assert descriptor.id.isdecimal() != fixture.uuid_ids
        table_folder = f"/{descriptor.keyspace}/{descriptor.table}-{descriptor.table_id}/snapshots/"
        assert table_folder in descriptor.folder
        content = source.read("Data.db")
        assert content is not None
        assert source.size("Data.db") == len(content)
        assert source.read_range("Data.db", 3, 7) == content[3:10]
        assert source.read_range("Data.db", len(content) - 2, 7) == content[-2:]


def copied(tmp_path: Path) -> Path:
    """A table's folder as on a node: its SSTables, and the same in a snapshot."""
    (snapshot,) = unpacked("5.0-oa").glob("files/lz4-*/snapshots/flushed")
    folder = tmp_path / "files" / snapshot.parts[-3]
    shutil.copytree(snapshot, folder / "snapshots" / "flushed")
    for path in snapshot.iterdir():
        shutil.copy(path, folder)
    return folder


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    shutil.copytree(folder / "snapshots" / "flushed", folder / ".by_v")
    first, second, *others = find_local(folder / "snapshots" / "flushed").sstables
    (folder / f"{first.name}-Statistics.db").unlink()
    (folder / f"{second.name}-CompressionInfo.db").unlink()
    found = find_local(folder)
    assert [one.name for one in found.sstables] == [one.name for one in others]
    reasons = {one.path.removeprefix(f"{folder}/"): one.reason for one in found.left_out}
    assert reasons.pop(".by_v") == "holds a secondary index, whose rows are made of the table's"
    assert "name this folder itself" in reasons.pop("snapshots")
    assert "Statistics.db is missing" in reasons.pop(f"{first.name}-CompressionInfo.db")
    assert "CompressionInfo.db or CRC.db is missing" in reasons.pop(f"{second.name}-Data.db")
    assert not reasons
    assert len(find_local(folder / "snapshots").sstables) == len(others) + 2


def test_only_what_is_read_is_required(tmp_path: Path) -> None:
    """SSTables that came by zero-copy streaming have no TOC.txt; that of others may list indexes that were dropped."""
    folder = copied(tmp_path)
    expected = set(find_local(folder).sstables)
    for path in folder.glob("*-TOC.txt"):
        path.unlink()
        break
    for path in folder.glob("*-TOC.txt"):
        path.write_text(path.read_text() + "SI_by_v_idx.db\nSAI+aa+GroupComplete.db\n")
    for name in ("Filter.db", "Summary.db", "Digest.crc32"):
        min(folder.glob(f"*-{name}")).unlink()
    assert set(find_local(folder).sstables) == expected


def test_a_folder_whose_sstables_are_just_replaced_is_left_out(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "oa_txn_compaction_8b2c1d80-e4ce-11f1-b6ab-ab43428c5b9c.log").write_text("ADD:[…]")
    found = find_local(folder)
    assert not found.sstables
    assert all("read a snapshot" in one.reason for one in found.left_out if "snapshots" not in one.path)


def test_a_folder_with_several_names_is_read_once_under_its_own(tmp_path: Path) -> None:
    """Links to itself, up, and beside it: twice, its rows would be of several tables, or an error."""
    folder = copied(tmp_path)
    shutil.rmtree(folder / "snapshots")
    keyspace = folder.parent.rename(tmp_path / "shop")
    folder = keyspace / folder.name
    expected = find_local(folder).sstables
    assert {one.keyspace for one in expected} == {"shop"}
    for link, target in (("self", folder), ("up", tmp_path), ("a", keyspace)):
        (folder / link).symlink_to(target)
        assert find_local(folder).sstables == expected
    for link in ("a", "z"):
        (tmp_path / link).symlink_to(keyspace)
        (keyspace / f"{link}-{ID}").symlink_to(folder)
        assert find_local(tmp_path).sstables == expected


def test_a_folder_elsewhere_is_read_under_the_name_of_its_link(tmp_path: Path) -> None:
    """As where a table's folder is on a disk of its own; two links to it are one folder."""
    folder = copied(tmp_path)
    for keyspace in ("shop", "twice"):
        (tmp_path / "data" / keyspace).mkdir(parents=True)
    (tmp_path / "data" / "shop" / folder.name).symlink_to(folder)
    expected = find_local(tmp_path / "data").sstables
    assert {one.folder for one in expected} == {f"{tmp_path}/data/shop/{folder.name}"}
    assert len(expected) == len(find_local(folder).sstables)
    (tmp_path / "data" / "twice" / folder.name).symlink_to(folder)
    assert len(find_local(tmp_path / "data").sstables) == len(expected)


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        find_local(tmp_path / "none")


def test_paths_need_not_be_files() -> None:
    names = ("Data.db", "Statistics.db", "Index.db", "CRC.db")
    found = find_sstables([f"bucket/nb-7-big-{name}" for name in names])
    assert list(found.sstables) == [Descriptor("nb", "7", "big", "bucket")]
    found = find_sstables(["bucket/nb-7-big-TOC.txt"])
    assert found.left_out == (
        LeftOut(
            "bucket/nb-7-big-TOC.txt",
            "Data.db, Index.db, Statistics.db, CompressionInfo.db or CRC.db is missing, though an SSTable has it: copy "
            "all files of the SSTable",
            True,
        ),
    )


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    source = LocalSource(Descriptor("nb", "1", "big", str(tmp_path)))
    assert source.read("CRC.db") is None
    assert source.size("CRC.db") is None


def test_a_folder_that_vanishes_while_files_are_looked_for_holds_nothing(tmp_path: Path) -> None:
    """A snapshot is cleared just then."""
    (tmp_path / "cleared").mkdir()
    (tmp_path / "file").touch()
    found = _files_in(tmp_path)
    assert next(found).endswith("/file")
    (tmp_path / "cleared").rmdir()
    assert list(found) == []
