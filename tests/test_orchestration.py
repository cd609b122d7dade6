"""What the DAGs know of the applications: ids, arguments, and what the end of an application means."""

import re

import pytest

from ringsync.cql.identifiers import parse_table_name, parse_table_patterns
from ringsync.orchestration import TABLE_PATTERN, TABLES_PATTERN, explain_failure, given, safe_run_id

OUTPUT = """Cannot execute: spark-submit --master local[2] app.py --table shop.x. Error code is: {code}.
Last spark-submit output:
26/11/21 04:20:01 WARN Utils: something of no interest
{lines}
26/11/21 04:20:02 WARN ShutdownHookManager: nor this"""


@pytest.mark.parametrize(
    ("run_id", "expected"),
    [
        ("manual__2026-11-21T04:20:00.123456+00:00", "manual__2026-11-21T04:20:00.123456+00:00"),
        ("shop.orders__20261121T042000", "shop.orders__20261121T042000"),
        ("../../etc~x y", "etc-x-y"),
        ("__", "run"),
        ("é" * 300, "run"),
    ],
)
def test_run_ids_are_what_applications_take(run_id: str, expected: str) -> None:
    assert safe_run_id(run_id) == expected
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,200}", expected)


@pytest.mark.parametrize("table", ["shop.orders", '"Shop"."Or""ders"', '"a.b".c_1', "S.T9"])
def test_the_form_takes_what_the_parser_takes(table: str) -> None:
    assert re.search(TABLE_PATTERN, table)
    parse_table_name(table)


@pytest.mark.parametrize("table", ["x", "shop.", ".orders", "shop.orders.x", "shop.orders; drop", '"shop.orders', ""])
def test_the_form_refuses_what_the_parser_refuses(table: str) -> None:
    assert not re.search(TABLE_PATTERN, table)
    with pytest.raises(ValueError, match="is not a table name"):
        parse_table_name(table)


TABLES = ["shop.orders", "shop.*", "shop.*, crm.c?", 'shop.orders\n"My ks"."a, b" ,x.y', '"a""b".c*']


@pytest.mark.parametrize("tables", TABLES)
def test_the_form_takes_several_tables_as_the_parser_does(tables: str) -> None:
    assert re.search(TABLES_PATTERN, tables)
    parse_table_patterns(tables)


@pytest.mark.parametrize("tables", ["", "*", "shop", "shop.orders, x", "shop.orders --repair", "a.b; c.d", 'a."b'])
def test_the_form_refuses_several_tables_as_the_parser_does(tables: str) -> None:
    assert not re.search(TABLES_PATTERN, tables)
    with pytest.raises(ValueError, match="is not a table name"):
        parse_table_patterns(tables)


def test_arguments_that_were_not_given_are_left_out() -> None:
    assert given(["--table", "a.b", "", "", "--dry-run"]) == ["--table", "a.b", "--dry-run"]


@pytest.mark.parametrize(("code", "may_retry"), [(1, False), (2, False), (3, False), (4, True), (5, True), (-9, True)])
def test_only_what_may_go_better_is_tried_again(code: int, may_retry: bool) -> None:
    failure = explain_failure("bootstrap_scan", OUTPUT.format(code=code, lines="ringsync: error: no such table"))
    assert (f"exit code {code}, " if code > 0 else "killed by signal 9") in failure.message
    assert failure.may_retry is may_retry


def test_the_error_line_is_found_whole() -> None:
    lines = "ringsync: error: first\nringsync: error: a.yaml: port: wrong\na.yaml: table: wrong\nringsync: report: {}"
    failure = explain_failure("bootstrap_scan", OUTPUT.format(code=3, lines=lines))
    assert failure.message == (
        "a.yaml: port: wrong\na.yaml: table: wrong [bootstrap_scan: exit code 3, configuration, connection or rights]"
    )


def test_a_killed_application_says_so() -> None:
    assert "killed by signal 9" in explain_failure("x", OUTPUT.format(code=-9, lines="")).message
    assert "killed by signal 15" in explain_failure("x", OUTPUT.format(code=143, lines="")).message


def test_differences_are_no_reason_to_try_again_but_sparks_own_exit_code_1_is() -> None:
    found = explain_failure("replica_verify", OUTPUT.format(code=1, lines='ringsync: report: {"differences": 3}'))
    assert (found.may_retry, "completed with differences" in found.message) == (False, True)
    crashed = explain_failure("replica_verify", OUTPUT.format(code=1, lines="Traceback\nModuleNotFoundError: delta"))
    assert crashed.may_retry
    assert crashed.message == "ModuleNotFoundError: delta [replica_verify: exit code 1 before it could say why]"


def test_a_failed_submission_says_so() -> None:
    failure = explain_failure("x", "spark-submit: no such file")
    assert "could not be submitted" in failure.message
