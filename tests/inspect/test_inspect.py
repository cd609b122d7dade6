"""cdcservice inspect on the commit logs of real servers: what it prints, what it refuses, what it reports."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.cli import main
from ringsync.formats.commitlog.index import parse_index
from ringsync.inspect.files import index_path
from tests.commitlog_model import cql_schema, segment
from tests.commitlogs.fixtures import fixture_named, unpacked

Run = Callable[..., tuple[int, str, str]]
FIXTURE = fixture_named("5.0-v8-lz4")
PATIENCE_S = 600
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs cdcservice inspect: exit code, standard output, standard error."""

    def called(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["inspect", *map(str, arguments)])
        except SystemExit as end:
            code = int(str(end.code))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return called


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A folder with the fixture's segments and indexes."""
    folder = tmp_path / "cdc_raw"
    folder.mkdir()
    unpacked(FIXTURE, folder)
    return folder


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.cql"
    path.write_text(FIXTURE.schema + FIXTURE.dropped)
    return path


def segments(log: Path) -> list[Path]:
    return sorted(log.glob("*.log"))


def model(log: Path) -> list[dict[str, Any]]:
    tables = cql_schema.parse_schema(FIXTURE.schema + FIXTURE.dropped)
    return [change for path in segments(log) for change in segment.read_segment(path, tables).changes]


def test_a_folder_is_read_segment_by_segment(run: Run, log: Path, schema: Path) -> None:
    code, out, err = run("commitlog", log, "--schema", schema, "--raw")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    expected = model(log)
    assert [(line["source"], line["digest"], line["kind"]) for line in lines] == [
        (change["source"], change["digest"], change["kind"]) for change in expected
    ]


def test_every_object_fits_the_published_schema(run: Run, log: Path, schema: Path) -> None:
    published = json.loads((ROOT / "docs" / "inspect.schema.json").read_text())
    Draft202012Validator.check_schema(published)
    validator = Draft202012Validator(published)
    for raw in ([], ["--raw"]):
        _, out, _ = run("commitlog", log, "--schema", schema, *raw)
        lines = out.removesuffix("\n").split("\n")
        assert len(lines) > 500
        for line in lines:
            validator.validate(json.loads(line))


def test_the_example_of_the_documentation_fits_the_published_schema() -> None:
    validator = Draft202012Validator(json.loads((ROOT / "docs" / "inspect.schema.json").read_text()))
    text = (ROOT / "docs" / "inspect.md").read_text().split("```")
    example = json.loads(next(part for part in text if part.strip().startswith('{"keyspace"')))
    del example["range"]  # the example shows all parts, a row has no range
    validator.validate(example)


def test_only_the_chosen_tables_are_shown(run: Run, log: Path, schema: Path) -> None:
    code, out, _ = run("commitlog", log, "--schema", schema, "--table", "shop.orders", "--table", '"MixedCase"."Table"')
    found = Counter((line["keyspace"], line["table"]) for line in map(json.loads, out.splitlines()))
    expected = Counter((change["keyspace"], change["table"]) for change in model(log))
    assert code == 0
    assert found == {key: expected[key] for key in (("shop", "orders"), ("MixedCase", "Table"))}


def test_a_position_tells_where_to_go_on(run: Run, log: Path, schema: Path) -> None:
    everything = run("commitlog", log, "--schema", schema)[1].splitlines()
    middle = json.loads(everything[len(everything) // 2])["source"]
    identifier = middle["file"].split("-")[2].removesuffix(".log")
    rest = [line for line in everything if order(line) > (middle["file"], middle["position"])]
    assert (
        run("commitlog", log, "--schema", schema, "--from", f"{identifier}:{middle['position']}")[1].splitlines()
        == rest
    )
    own = [line for line in rest if json.loads(line)["source"]["file"] == middle["file"]]
    answer = run("commitlog", log / middle["file"], "--schema", schema, "--from", middle["position"])
    assert answer[1].splitlines() == own
    code, _, err = run("commitlog", log, "--schema", schema, "--from", "4711")
    assert code == 3
    assert "Write SEGMENT_ID:POSITION" in err


def order(line: str) -> tuple[str, int]:
    source = json.loads(line)["source"]
    return source["file"], source["position"]


def test_what_is_not_synced_is_not_read(run: Run, log: Path, schema: Path) -> None:
    first = segments(log)[0]
    changes = [change for change in model(log) if change["source"]["file"] == first.name]
    synced = changes[len(changes) // 2]["source"]["position"]
    index = first.with_name(first.stem + "_cdc.idx")
    index.write_text(str(synced))
    code, out, err = run("commitlog", first, "--schema", schema)
    assert code == 0
    assert f"{first.name}: not completed; it is read up to position {synced}, up to which" in err
    assert len(out.splitlines()) < len(changes)
    ignored = run("commitlog", first, "--schema", schema, "--ignore-idx")
    assert len(ignored[1].splitlines()) == len(changes)
    index.write_text(f"{synced}\nCOMPL")
    code, out, err = run("commitlog", first, "--schema", schema)
    assert (code, len(out.splitlines())) == (0, len(changes))
    assert "is just being rewritten" in err
    index.write_text("not an index")
    code, _, err = run("commitlog", first, "--schema", schema)
    assert code == 3
    assert "is not what Cassandra writes" in err


def test_damage_is_reported_and_the_rest_is_read(run: Run, tmp_path: Path, schema: Path) -> None:
    plain = unpacked(fixture_named("5.0-v8-plain"), tmp_path)[0]
    whole = run("commitlog", plain, "--schema", schema, "--format", "summary")[1]
    data = bytearray(plain.read_bytes())
    schema.write_text(fixture_named("5.0-v8-plain").schema)
    before = run("commitlog", plain, "--schema", schema)[1].splitlines()
    position = json.loads(before[10])["source"]["position"]
    data[position - 5] ^= 1  # the last byte of a mutation, before its checksum
    plain.write_bytes(data)
    code, out, err = run("commitlog", plain, "--schema", schema)
    assert code == 1
    assert f"{plain.name}: position {position}, " in err
    assert "the checksum of a record is wrong" in err
    assert out.splitlines() == [line for line in before if json.loads(line)["source"]["position"] != position]
    assert "0 damaged" in whole
    assert "1 damaged" in run("commitlog", plain, "--schema", schema, "--format", "summary")[1]


def test_a_torn_end_is_normal_without_an_index_and_loud_with_a_completed_one(run: Run, log: Path, schema: Path) -> None:
    first = segments(log)[0]
    first.write_bytes(first.read_bytes()[:-1000])
    code, out, err = run("commitlog", first, "--schema", schema)
    assert code == 1
    assert "was cut off" in err or "cannot be unpacked" in err
    first.with_name(first.stem + "_cdc.idx").unlink()
    torn = run("commitlog", first, "--schema", schema)
    assert (torn[0], torn[1]) == (0, out)
    assert "as in a segment that was being written" in torn[2]


def test_records_of_unknown_tables_are_reported_a_few_times(run: Run, log: Path, tmp_path: Path) -> None:
    schema = tmp_path / "less.cql"
    tables = [text for text in FIXTURE.schema.split("\n\n") if "shop.wide " not in text]
    schema.write_text("\n\n".join(tables))
    code, out, err = run("commitlog", log, "--schema", schema)
    assert code == 1
    assert len(out.splitlines()) > 300
    reported = [line for line in err.splitlines() if "which is not in the schema" in line]
    assert 5 < len(reported) < 30
    assert any(" more: of table " in line for line in reported)


def test_the_summary_adds_up(run: Run, log: Path, schema: Path) -> None:
    code, out, err = run("commitlog", log, "--schema", schema, "--format", "summary")
    assert (code, err) == (0, "")
    numbers = {
        words[1]: int(words[0].replace(",", ""))
        for line in out.splitlines()
        if len(words := line.split(None, 1)) == 2 and words[0][0].isdigit()
    }
    outcomes = ("decoded", "system tables", "unknown tables", "unknown columns", "malformed", "damaged")
    assert numbers["records"] == sum(numbers[outcome] for outcome in outcomes)
    changes = model(log)
    assert f"{len(changes):,} change rows of " in out
    cells = sum(len(change.get("cells", ())) for change in changes if change["table"] == "orders")
    kinds = Counter(change["kind"] for change in changes if change["table"] == "orders")
    words = next(line for line in out.splitlines() if "shop.orders" in line).split()
    expected = [*(kinds[kind] for kind in ("row", "static", "partition_deletion", "range_deletion")), cells]
    assert [int(word.replace(",", "")) for word in words[1:6]] == expected


def test_parquet_and_arrow_hold_the_change_rows(run: Run, log: Path, schema: Path, tmp_path: Path) -> None:
    parquet, arrow = tmp_path / "changes.parquet", tmp_path / "changes.arrow"
    assert run("commitlog", log, "--schema", schema, "--format", "parquet", "--output", parquet) == (0, "", "")
    assert run("commitlog", log, "--schema", schema, "--format", "arrow", "--output", arrow) == (0, "", "")
    from_parquet, from_arrow = pq.read_table(parquet), pa.ipc.open_file(arrow).read_all()
    assert from_arrow.schema.equals(CHANGE_ROWS)
    assert from_parquet.equals(from_arrow)
    changes = model(log)
    assert [digest.hex() for digest in from_arrow["digest"].to_pylist()] == [change["digest"] for change in changes]
    described = json.loads(from_parquet.schema.metadata[b"ringsync.tables"])
    for row, change in zip(from_arrow.to_pylist(), changes, strict=True):
        table = described[row["table_id"].hex()]
        names = list(table["columns"])
        assert (table["keyspace"], table["table"]) == (change["keyspace"], change["table"])
        assert [names[cell["column"]] for cell in row["cells"]] == [cell["column"] for cell in change.get("cells", ())]
    assert run("commitlog", log, "--schema", schema, "--format", "arrow")[0] == 3


@pytest.mark.parametrize("name", ["log", "index", "schema"])
def test_an_output_never_replaces_what_is_read(run: Run, log: Path, schema: Path, tmp_path: Path, name: str) -> None:
    copy = next(log.glob("CommitLog-*.log"))
    index = index_path(copy)
    index.write_bytes(index.read_bytes() if index.exists() else b"0\n")
    target = {"log": copy, "index": index, "schema": schema}[name]
    before = target.read_bytes()
    (tmp_path / "link").symlink_to(target)
    code, _, err = run("commitlog", copy, "--schema", schema, "--output", tmp_path / "link")
    assert (code, target.read_bytes()) == (3, before)
    assert "is a file that is read: it would be replaced" in err


def test_an_output_that_fails_is_not_there(run: Run, log: Path, schema: Path, tmp_path: Path) -> None:
    code, _, err = run("commitlog", log, "--schema", schema, "--output", tmp_path / "missing" / "changes.jsonl")
    assert code == 3
    assert "--output" in err
    assert not list(tmp_path.glob("**/*.partial"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["commitlog"], "the following arguments are required: PATH"),
        (["commitlog", "x.log"], "one of the arguments --schema --contact-point --history is required"),
        (["commitlog", "nowhere.log", "--schema", "SCHEMA"], "nowhere.log: there is no such file"),
        (["commitlog", "EMPTY", "--schema", "SCHEMA"], "there is no CommitLog-*.log in this folder"),
        (["commitlog", "LOG", "--schema", "nowhere.cql"], "--schema nowhere.cql"),
        (["commitlog", "LOG", "--schema", "SCHEMA", "--table", "shop.ordres"], "did you mean shop.orders"),
        (["commitlog", "LOG", "--schema", "SCHEMA", "--table", "orders"], "is not a table name: write keyspace.table"),
        (["commitlog", "LOG", "--schema", "SCHEMA", "--from", "x:1"], "is not a position: write POSITION or"),
        (["commitlog", "LOG", "--schema", "TEXT"], "text.cql:1:14: "),
        (["commitlog", "SCHEMA", "--schema", "SCHEMA"], "commit log version"),
        (["idx", "EMPTY"], "there is no CommitLog-*_cdc.idx in this folder"),
        (["commitlog", "LOG", "--contact-point", "host:port"], "is not HOST or HOST:PORT"),
    ],
)
def test_what_cannot_be_read_is_explained_with_exit_code_3(
    arguments: list[str], message: str, run: Run, log: Path, schema: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.cql").write_text("CREATE TABLE nothing else")
    places = {"LOG": log, "SCHEMA": schema, "EMPTY": tmp_path / "empty", "TEXT": tmp_path / "text.cql"}
    code, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (3, "")
    assert message in err


def test_one_unreadable_segment_does_not_hide_the_others(run: Run, log: Path, schema: Path) -> None:
    first = segments(log)[0]
    everything = run("commitlog", log, "--schema", schema)[1].splitlines()
    first.write_bytes(b"\xff" + first.read_bytes()[1:])
    code, out, err = run("commitlog", log, "--schema", schema)
    assert code == 3
    assert f"ringsync: error: {first.name}" in err
    assert out.splitlines() == [line for line in everything if order(line)[0] != first.name]


@pytest.mark.parametrize("kind", ["commitlog", "idx"])
def test_what_has_gone_since_it_was_found_does_not_hide_the_rest(
    run: Run, log: Path, schema: Path, kind: str, tmp_path: Path
) -> None:
    """A dangling link is found and cannot be read, as a segment that was removed meanwhile."""
    arguments = ["commitlog", log, "--schema", schema] if kind == "commitlog" else ["idx", log]
    everything = run(*arguments)[1].splitlines()
    lost = segments(log)[0] if kind == "commitlog" else min(log.glob("*_cdc.idx"))
    lost.unlink()
    lost.symlink_to(tmp_path / "nowhere")
    code, out, err = run(*arguments)
    assert code == 3
    assert lost.name in err
    assert "Traceback" not in err
    assert 0 < len(out.splitlines()) < len(everything)
    assert set(out.splitlines()) <= set(everything)


def test_indexes_are_shown_with_their_segments(run: Run, log: Path) -> None:
    indexes = sorted(log.glob("*_cdc.idx"))
    indexes[1].write_text("4711")
    indexes[2].write_text("")
    shutil.move(segments(log)[1], log / "gone")
    code, out, err = run("idx", log, "--format", "jsonl")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "just being rewritten, so its content is not known" in err
    first = parse_index(indexes[0].read_bytes())
    assert first is not None
    assert found[0]["offset"] == first.offset
    assert found[0]["completed"] is True
    assert found[0]["segment"]["codec"] == "LZ4Compressor"
    assert found[1] == {"file": indexes[1].name, "offset": 4711, "completed": False, "segment": None}
    assert set(found[2]) == {"file", "segment"}
    code, out, _ = run("idx", indexes[1])
    assert out == f"{indexes[1].name}  synced up to position 4,711; its segment is gone\n"
    (log / "CommitLog-7-1_cdc.idx").write_text("4711\nDONE")
    assert run("idx", log)[0] == 3


def test_remaining_ttls_end_when_the_original_ones_did(run: Run, log: Path, schema: Path) -> None:
    arguments = ("commitlog", log, "--schema", schema, "--format", "cql", "--table", "shop.expiring")
    original, remaining = run(*arguments)[1].splitlines(), run(*arguments, "--remaining-ttl")[1].splitlines()
    assert len(original) == len(remaining)
    changed = [(a, b) for a, b in zip(original, remaining, strict=True) if a != b]
    assert changed
    for before, after in changed:
        assert re.sub(r"TTL \d+", "", before) == re.sub(r"TTL \d+", "", after)
        found = re.search(r" AND TTL (\d+) /\* expires_at (\d+) \*/.*;$", after)
        assert found
        ttl, expires_at = map(int, found.groups())
        assert 0 <= ttl - max(expires_at - time.time(), 0) <= PATIENCE_S


def test_encrypted_segments_are_read_with_their_keystore(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = fixture_named("5.0-v8-jceks")
    keystore = fixture.keystore
    assert keystore is not None
    folder = tmp_path / "encrypted"
    folder.mkdir()
    unpacked(fixture, folder)
    schema = tmp_path / "schema.cql"
    schema.write_text(fixture.schema + fixture.dropped)
    arguments = ("commitlog", folder, "--schema", schema, "--keystore", keystore.path)
    code, out, err = run(*arguments)
    assert (code, out) == (3, "")
    assert "RINGSYNC_KEYSTORE_PASSWORD" in err
    monkeypatch.setenv("RINGSYNC_KEYSTORE_PASSWORD", keystore.store_password)
    monkeypatch.setenv("RINGSYNC_KEY_PASSWORD", keystore.key_password)
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    tables = cql_schema.parse_schema(fixture.schema + fixture.dropped)
    key = bytes.fromhex(keystore.key_file.read_text())
    expected = [c["digest"] for p in segments(folder) for c in segment.read_segment(p, tables, key=key).changes]
    assert [json.loads(line)["digest"] for line in out.splitlines()] == expected
    monkeypatch.setenv("RINGSYNC_KEYSTORE_PASSWORD", "wrong")
    code, out, err = run(*arguments)
    assert (code, out) == (3, "")
    assert "wrong" not in err.replace("password is wrong", "")
