"""cdcservice inspect sstable on the SSTables of real servers: what it prints, what it refuses, what it reports."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.cli import main
from tests.commitlog_model.replay import replay, rows
from tests.commitlog_model.selected import differences
from tests.commitlog_model.test_fixtures import server_row
from tests.formats.commitlog.comparable import of_model
from tests.formats.sstable.files import unpacked
from tests.sstable_model.sstable import read_sstable, table_beside
from tests.sstable_model.test_fixtures import reader
from tests.sstables.fixtures import FIXTURES

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
MODES: list[list[str]] = [[], ["--merge"]]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs cdcservice inspect sstable: exit code, standard output, standard error."""

    def called(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["inspect", "sstable", *map(str, arguments)])
        except SystemExit as end:
            code = int(str(end.code))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return called


def snapshots(name: str, tag: str = "flushed") -> dict[tuple[str, str], Path]:
    """Return the snapshots of a fixture by keyspace and table, without empty ones."""
    folders = sorted(unpacked(name).glob(f"*/*/snapshots/{tag}"))
    return {
        (folder.parts[-4], folder.parts[-3].rpartition("-")[0]): folder
        for folder in folders
        if any(folder.glob("*-Data.db"))
    }


def snapshot(name: str, keyspace: str, table: str) -> Path:
    return snapshots(name)[keyspace, table]


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """A snapshot of shop.orders, in folders as on a node."""
    source = snapshot("5.0-oa", "shop", "orders")
    folder = tmp_path / Path(*source.parts[-4:])
    shutil.copytree(source, folder)
    return folder


def parsed(out: str) -> list[dict[str, Any]]:
    # A decimal keeps its digits.
    return [json.loads(line, parse_float=Decimal) for line in out.splitlines()]


@pytest.mark.parametrize("name", FIXTURES)
def test_all_tables_are_what_the_server_selects(run: Run, name: str) -> None:
    selected = FIXTURES[name].selected
    validator = Draft202012Validator(json.loads((ROOT / "docs" / "inspect.schema.json").read_text()))
    found, compared = [], 0
    for (keyspace, table), folder in snapshots(name).items():
        model = table_beside(folder, folder.parts[-3].rpartition("-")[2])
        expected = [server_row(model, row) for row in selected["keyspaces"][keyspace][table]]
        for mode in MODES:
            code, out, err = run(folder, "--raw", *mode)
            assert (code, err) == (0, "")
            lines = parsed(out)
            found += differences(model, rows(replay(lines), model, selected["moment"]), expected)
            for line in lines[:: len(lines) // 50 + 1]:
                validator.validate(line)
        names = [
            (line["raw_partition_key"], line["kind"], str(line.get("raw_clustering")), str(line.get("range")))
            for line in lines
        ]
        assert max(Counter(names).values()) == 1, "a merged row is printed twice"
        compared += len(expected)
    assert found == []
    assert compared > 1000


@pytest.mark.parametrize("name", FIXTURES)
def test_without_merge_each_row_of_each_file_is_shown(run: Run, name: str) -> None:
    compared = 0
    for folder in snapshots(name).values():
        table = table_beside(folder, folder.parts[-3].rpartition("-")[2])
        expected = Counter(
            (str(data), without_digest(change))
            for data in folder.glob("*-Data.db")
            for partition in read_sstable(reader(data), table, FIXTURES[name].sstable_version)
            for change in partition.changes
        )
        lines = parsed(run(folder, "--raw")[1])
        shown = Counter((line["source"]["file"], without_digest(line)) for line in lines)
        assert shown == expected
        compared += expected.total()
    assert compared > 1000


def without_digest(change: dict[str, Any]) -> str:
    """Return a change in the form of the model, which makes no digests here."""
    content = of_model(change | {"source": {"position": 0}})
    return json.dumps({part: value for part, value in content.items() if part != "digest"}, sort_keys=True, default=str)


@pytest.mark.parametrize("name", ["4.1-nb", "5.0-da"])
def test_typed_rows_are_what_the_server_selects(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = FIXTURES[name].selected
    monkeypatch.setattr(time, "time", lambda: selected["moment"])
    compared = 0
    for (keyspace, table), folder in snapshots(name).items():
        file = tmp_path / f"{keyspace}.{table}.parquet"
        assert run(folder, "--merge", "--format", "parquet", "--output", file)[0] == 0
        content = pq.read_table(file)
        expected = selected["keyspaces"][keyspace][table]
        assert content.num_rows == len(expected), table
        for column in content.schema.names[1:-1]:
            if pa.types.is_nested(content.schema.field(column).type):
                continue
            cells = content["_cells"].combine_chunks().field(column)
            if "writetime" not in [field.name for field in cells.type]:
                continue
            of_server = Counter(
                row[column]["writetime"] for row in expected if column in row and "writetime" in row[column]
            )
            times = cells.field("writetime")
            assert Counter(pc.drop_null(times).to_pylist()) == of_server, (table, column)
            compared += of_server.total()
    assert compared > 1000


def test_values_are_those_of_the_typed_rows(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: FIXTURES["5.0-oa"].selected["moment"])
    compared = 0
    for (_, table), folder in snapshots("5.0-oa").items():
        files = [tmp_path / f"{table}.{kind}.arrow" for kind in ("times", "values")]
        assert run(folder, "--merge", "--format", "arrow", "--output", files[0])[0] == 0
        code, _, told = run(folder, "--merge", "--values", "--format", "arrow", "--output", files[1])
        with_times = pa.ipc.open_file(files[0]).read_all()
        if code:
            assert "with their times" in told
            cells = with_times["_cells"].combine_chunks()
            assert any(cells.field(field.name).field("raw").null_count < len(cells) for field in cells.type)
            assert not files[1].exists()
            continue
        values = pa.ipc.open_file(files[1]).read_all()
        assert values.schema.names == [name for name in with_times.schema.names if name not in ("token", "_cells")]
        for name in values.schema.names:  # as text, since Python does not have all dates
            texts = [rows[name].combine_chunks().to_string(window=10**9) for rows in (values, with_times)]
            assert texts[0] == texts[1], (table, name)
        compared += len(values)
    assert compared > 100


def test_a_partition_is_found_by_its_key(run: Run, orders: Path) -> None:
    lines = parsed(run(orders, "--merge")[1])
    key = lines[len(lines) // 2]["partition_key"]
    expected = [line for line in lines if line["partition_key"] == key]
    code, out, err = run(orders, "--merge", "--key", ", ".join(map(literal, key.values())))
    assert (code, err) == (0, "")
    assert parsed(out) == expected
    single = parsed(run(orders, "--key", ", ".join(map(literal, key.values())))[1])
    assert {json.dumps(line["partition_key"], default=str) for line in single} == {json.dumps(key, default=str)}
    assert len(single) >= len(expected)


def literal(value: object) -> str:
    """Return a value of SELECT JSON as a CQL literal."""
    is_bare = (
        str(value).startswith("0x") or str(value).count("-") == 4 or str(value) in ("NaN", "Infinity", "-Infinity")
    )
    if isinstance(value, str) and not is_bare:
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", FIXTURES)
def test_partitions_are_found_in_all_tables(run: Run, name: str) -> None:
    found = 0
    for folder in snapshots(name).values():
        lines = parsed(run(folder)[1])
        for line in lines[:: len(lines) // 3 + 1]:
            key = line["partition_key"]
            # Arrow reads no dates of such years.
            if not all(isinstance(value, str | int | Decimal) for value in key.values()) or "-5877641-06-23" in str(
                key
            ):
                continue
            text = ", ".join(map(literal, key.values()))
            code, out, err = run(folder, "--key", text)
            assert (code, err) == (0, ""), text
            assert out.splitlines(), (folder, text)
            assert parsed(out) == [one for one in lines if one["partition_key"] == key]
            found += 1
    assert found > 20


def test_a_key_that_is_not_there_shows_nothing(run: Run, orders: Path) -> None:
    key = parsed(run(orders)[1])[0]["partition_key"]
    absent = ["'nowhere'" if isinstance(value, str) else "2147483" for value in key.values()]
    assert run(orders, "--key", ", ".join(absent)) == (0, "", "")


@pytest.mark.parametrize("mode", MODES)
def test_token_ranges_are_the_whole(run: Run, orders: Path, mode: list[str]) -> None:
    whole = run(orders, *mode)[1].splitlines()
    tokens = sorted({json.loads(line)["token"] for line in whole})
    bounds = [tokens[len(tokens) // 3], tokens[2 * len(tokens) // 3]]
    low, high = bounds
    parts = []
    for start, end in ((low, high), (high, low)):
        code, out, err = run(orders, *mode, f"--token-range={start}:{end}")
        assert (code, err) == (0, "")
        parts += out.splitlines()
    assert sorted(parts) == sorted(whole)
    assert all(
        low < json.loads(line)["token"] <= high for line in run(orders, f"--token-range={low}:{high}")[1].splitlines()
    )


def test_snapshots_of_several_nodes_are_merged(run: Run, orders: Path, tmp_path: Path) -> None:
    files = sorted(orders.glob("*-Data.db"))
    other = tmp_path / "node2" / Path(*orders.parts[-4:])
    other.mkdir(parents=True)
    shutil.copy(orders / "schema.cql", other)
    whole = content(run(orders, "--merge")[1])
    for data in files[: len(files) // 2]:
        for file in orders.glob(data.name.replace("Data.db", "*")):
            shutil.move(file, other)
    assert content(run(orders, other, "--merge")[1]) == whole
    assert content(run(orders, other, orders, "--merge")[1]) == whole


def content(out: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in ("source", "digest")} for line in parsed(out)]


def test_without_a_schema_the_sstables_name_the_columns(run: Run, orders: Path) -> None:
    with_schema = parsed(run(orders)[1])
    (orders / "schema.cql").unlink()
    code, out, err = run(orders)
    assert (code, err) == (0, "")
    for line, known in zip(parsed(out), with_schema, strict=True):
        assert list(line["partition_key"].values()) == list(known["partition_key"].values())
        assert line.get("cells") == known.get("cells")


def test_a_schema_without_ids_is_taken_by_name(run: Run, orders: Path, tmp_path: Path) -> None:
    """As DESCRIBE SCHEMA prints it; the folder's name has the table's id."""
    known = parsed(run(orders, "--merge")[1])
    text = (orders / "schema.cql").read_text()
    without = re.sub(r"WITH ID = \S+\s+AND", "WITH", text)
    assert without != text
    (orders / "schema.cql").unlink()
    (tmp_path / "described.cql").write_text(without)
    code, out, err = run(orders, "--merge", "--schema", tmp_path / "described.cql")
    assert (code, err) == (0, "")
    assert parsed(out) == known
    (tmp_path / "other.cql").write_text(without.replace("shop.orders", "shop.items"))
    code, out, err = run(orders, "--schema", tmp_path / "other.cql")
    assert (code, out) == (3, "")
    assert "the schema does not have shop.orders" in err


def test_a_schema_that_is_no_text_is_told(run: Run, orders: Path) -> None:
    (orders / "schema.cql").write_bytes(b"\xff\xfe")
    code, out, err = run(orders)
    assert (code, out) == (3, "")
    assert "ringsync: error: " in err


@pytest.mark.parametrize("mode", MODES)
def test_a_dangling_link_does_not_hide_the_others(run: Run, orders: Path, mode: list[str], tmp_path: Path) -> None:
    lost = min(orders.glob("*-Data.db"))
    lost.unlink()
    lost.symlink_to(tmp_path / "nowhere")
    code, out, err = run(orders, *mode)
    assert code != 0
    assert lost.name in err
    assert "Traceback" not in err
    assert parsed(out)


def test_one_file_is_read_alone(run: Run, orders: Path) -> None:
    data = min(orders.glob("*-Data.db"))
    lines = parsed(run(orders)[1])
    code, out, err = run(data)
    assert (code, err) == (0, "")
    assert parsed(out) == [line for line in lines if line["source"]["file"] == str(data)]


def test_unchanged_rows_as_a_file(run: Run, orders: Path, tmp_path: Path) -> None:
    target = tmp_path / "rows.arrow"
    assert run(orders, "--format", "arrow", "--output", target) == (0, "", "")
    found = pa.ipc.open_file(target).read_all()
    assert found.schema.remove_metadata() == CHANGE_ROWS
    (named,) = json.loads(found.schema.metadata[b"ringsync.tables"]).values()
    assert (named["keyspace"], named["table"]) == ("shop", "orders")
    assert found.num_rows == len(run(orders)[1].splitlines())


def test_the_summary_counts(run: Run, orders: Path) -> None:
    lines = parsed(run(orders)[1])
    code, out, err = run(orders, "--format", "summary")
    assert (code, err) == (0, "")
    assert f"{len(list(orders.glob('*-Data.db')))} SSTables" in out
    assert f"{len(lines):,} change rows of 1 tables" in out
    assert "version oa, LZ4Compressor" in out


def test_statements_are_printed(run: Run, orders: Path) -> None:
    for mode in MODES:
        code, out, _ = run(orders, "--format", "cql", *mode)
        assert code in (0, 1)
        assert "INSERT INTO shop.orders" in out
        assert "USING TIMESTAMP" in out


def test_wrong_input_is_refused(run: Run, orders: Path, tmp_path: Path) -> None:
    index = min(orders.glob("*-Index.db"))
    other = tmp_path / "other.cql"
    other.write_text((snapshot("5.0-oa", "shop", "wide") / "schema.cql").read_text())
    (tmp_path / "empty").mkdir()
    for arguments, told in (
        ([tmp_path / "nowhere"], "there is no "),
        ([tmp_path / "empty"], "no complete SSTable"),
        ([index], "name a folder, or its …-Data.db"),
        ([orders, "--schema", other], "the schema does not have shop.orders"),
        ([orders, "--schema", tmp_path / "no.cql"], "no.cql"),
        ([orders, "--table", "shop.nothing"], "there are no SSTables of shop.nothing"),
        ([unpacked("5.0-oa")], "several tables"),
        ([orders, "--key", "nonsense"], "expected a number, 'text'"),
        ([orders, "--key", "1, 2, 3, 4"], "4 values"),
        ([orders, "--token-range", "1"], "is not a token range"),
        ([orders, "--format", "parquet"], "--output FILE"),
        ([orders, "--values", "--merge"], "say --merge and --format parquet or arrow"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (3, ""), arguments
        assert told in err, err


def test_an_unknown_version_is_refused(run: Run, orders: Path) -> None:
    for file in orders.glob("oa-*"):
        file.rename(file.with_name(file.name.replace("oa-", "zz-")))
    code, out, err = run(orders)
    assert (code, out) == (3, "")
    assert "unknown version zz" in err


def test_one_table_of_several_is_chosen(run: Run, orders: Path) -> None:
    flushed = unpacked("5.0-oa") / "shop"
    tables = [
        folder for folder in flushed.glob("*/snapshots/flushed") if "orders-" in str(folder) or "wide-" in str(folder)
    ]
    lines = content(run(*tables, "--table", "shop.orders", "--merge")[1])
    assert lines == content(run(orders, "--merge")[1])


def test_an_incomplete_sstable_is_left_out_and_told(run: Run, orders: Path) -> None:
    data = min(orders.glob("*-Data.db"))
    whole = parsed(run(orders)[1])
    (orders / data.name.replace("Data.db", "Statistics.db")).unlink()
    code, out, err = run(orders)
    assert code == 1
    assert "is left out: Statistics.db is missing" in err
    assert parsed(out) == [line for line in whole if line["source"]["file"] != str(data)]
    assert "1 left out" in run(orders, "--format", "summary")[1]


def test_a_secondary_index_is_told_and_nothing_is_missing(run: Run, orders: Path) -> None:
    shutil.copytree(orders, orders / ".by_name")
    code, out, err = run(orders)
    assert code == 0
    assert ".by_name is left out: holds a secondary index" in err
    assert out


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_reported_and_the_rest_is_read(run: Run, orders: Path, mode: list[str]) -> None:
    data = max(orders.glob("*-Data.db"), key=lambda file: file.stat().st_size)
    before = Counter(str(line["source"]["file"]) for line in parsed(run(orders)[1]))
    damaged = bytearray(data.read_bytes())
    damaged[10] ^= 1
    data.write_bytes(damaged)
    code, out, err = run(orders, *mode)
    assert code == 1
    assert f"{data}: position 0, " in err
    assert "its checksum is wrong" in err
    if not mode:
        after = Counter(str(line["source"]["file"]) for line in parsed(out))
        assert after[str(data)] < before[str(data)]
        assert all(after[file] == count for file, count in before.items() if file != str(data))
    assert "1 damaged places" in run(orders, "--format", "summary", *mode)[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_was_cut_off_is_reported(run: Run, tmp_path: Path, mode: list[str]) -> None:
    folder = Path(shutil.copytree(snapshot("5.0-oa", "files", "plain"), tmp_path / "snapshot"))
    data = max(folder.glob("*-Data.db"), key=lambda file: file.stat().st_size)
    whole = len(run(folder, *mode)[1].splitlines())
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    code, out, err = run(folder, *mode)
    assert code == 1
    assert str(data) in err
    assert "what follows is lost, too, since" in err
    assert 0 < len(out.splitlines()) < whole


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_cannot_be_read_does_not_hide_the_others(run: Run, orders: Path, mode: list[str]) -> None:
    first, *others = sorted(orders.glob("*-Statistics.db"))
    first.write_bytes(b"no statistics")
    code, out, err = run(orders, *mode)
    assert code == 3
    assert str(first) in err
    if not mode:
        names = {line["source"]["file"] for line in parsed(out)}
        assert names == {str(file).replace("Statistics", "Data") for file in others}
