"""``cdcservice errors``: what it refuses, and what a person reads; the rest is in tests/steps/test_error_late.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringsync.cli import main
from ringsync.service.error_text import damage_text, hex_dump, record_text, report_lines, row_text
from ringsync.state.processor_error import ErrorKey, ErrorRow
from ringsync.steps.application import StepError
from ringsync.steps.errors.records import KnownTables, Record
from ringsync.steps.errors.retry import OUTCOMES, RetryReport


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: WHAT"),
        (["list", "--limit", "0"], "'0' is not a whole number from 1"),
        (["retry", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["show", "n", "f", "x"], "argument POSITION: invalid int value: 'x'"),
        (["discard", "n", "f", "1"], "the following arguments are required: --reason"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["errors", *arguments])
    assert end.value.code == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["n", "f", "1", "--reason", " "], "--reason is empty"),
        (["n", "f", "--reason", "old"], "say which records"),
        (["--all", "--node", "n", "--reason", "old"], "say which records"),
        (["n", "f", "1", "--all", "--node", "n", "--file", "f", "--reason", "old"], "say which records"),
    ],
)
def test_discard_says_which_and_why(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["errors", "discard", *arguments, "--conf", str(tmp_path / "not read")]) == 3
    assert message in capsys.readouterr().err


def test_an_unreachable_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ringsync.yaml"
    path.write_text("server_name: t\ncassandra: {contact_points: [127.0.0.1], port: 9}\nstore: {url: lake}\n")
    assert main(["errors", "list", "--conf", str(path)]) == 3
    assert "127.0.0.1" in capsys.readouterr().err


def test_a_hex_dump() -> None:
    assert list(hex_dump(b"The first line, \x00 and the second")) == [
        "00000000  54 68 65 20 66 69 72 73 74 20 6c 69 6e 65 2c 20  The first line, ",
        "00000010  00 20 61 6e 64 20 74 68 65 20 73 65 63 6f 6e 64  . and the second",
    ]


def test_rows_records_and_damage_are_described() -> None:
    row = ErrorRow(ErrorKey("n", "CommitLog-7-1.log", 100), 5, "of an unknown table", bytes(16), b"\x01")
    lines = list(row_text(row, 1))
    assert "table id  00000000-0000-0000-0000-000000000000" in lines
    assert lines[-1].startswith("1 records of it were tried again, and wait")
    record = Record("n", "CommitLog-7-1.log", 100, 5000, "torn", None, b"\x01" * 5000)
    lines = list(record_text(record, KnownTables({}, frozenset(), frozenset())))
    assert lines[256] == "… and 904 bytes more"
    assert lines[257].startswith("it still cannot be decoded: ")
    place = {"node": "n", "file": "f", "position": 1, "reason": "torn"}
    assert "a copy of the segment is in cdc_damaged/n/f" in damage_text({**place, "copy": "cdc_damaged/n/f"})
    assert "no copy of the segment was kept" in damage_text({**place, "copy": None})


def test_the_report_names_every_outcome_and_its_counts_reconcile() -> None:
    report = RetryReport(read=len(OUTCOMES), waits_because="the sync is stopped")
    report.outcomes.update(OUTCOMES)
    report.undecodable["malformed"] = 1
    report.check()
    lines = list(report_lines(report))
    assert sum(line.startswith("  1 ") for line in lines) == len(OUTCOMES)
    assert lines[-1] == "! 1 records wait: the sync is stopped"
    assert (report.left, report.document()["reasons"]) == (3, {"malformed": 1})
    report.read += 1
    with pytest.raises(StepError, match="8 records were read, but the outcomes are"):
        report.check()
