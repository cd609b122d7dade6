"""What a user can get wrong, tried on the program that meets it first: one clear line, exit code 3, nothing written."""

import io
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringsync.cluster.session import close_all
from servers.cassandra import CassandraNode
from servers.ports import free_port

PROJECT = Path(__file__).parents[2]
PROGRAM = PROJECT / "spark_apps" / "bootstrap_prepare.py"
pytestmark = pytest.mark.server


@pytest.fixture
def document(guarded: CassandraNode, tmp_path: Path) -> dict[str, Any]:
    """A configuration that works."""
    (tmp_path / "password").write_text("sesame-reader")
    return {
        "server_name": "demo",
        "cassandra": {
            "contact_points": [guarded.contact_point],
            "port": guarded.port,
            "username": "reader",
            "password": {"file": "password"},
            "connect_timeout_s": 5.0,
        },
        "store": {"url": "lake"},
    }


def configured(folder: Path, document: dict[str, Any] | str, table: str, *options: str) -> list[str]:
    """Write a configuration; gives the arguments of an application."""
    (folder / "ringsync.yaml").write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return ["--conf", str(folder / "ringsync.yaml"), "--table", table, "--run", "test", *options]


def prepare_alone(arguments: list[str]) -> tuple[int, str]:
    """Run ``bootstrap_prepare`` as a process: its exit code and everything it printed."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "include")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def prepare_here(arguments: list[str]) -> tuple[int, str]:
    """The same in this process, which imports everything once. What is logged is printed, as in a process alone; only
    the driver sees to it that its own is not."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not record.name.startswith("cassandra."))
    logging.getLogger().addHandler(handler)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            code = runpy.run_path(str(PROGRAM))["main"](arguments)
    finally:
        logging.getLogger().removeHandler(handler)
        close_all()
    return int(code), output.getvalue()


def refused(
    folder: Path,
    document: dict[str, Any] | str,
    table: str = "shop.orders",
    *options: str,
    prepare: Callable[[list[str]], tuple[int, str]] = prepare_here,
) -> str:
    """The error of a run that must be refused."""
    code, output = prepare(configured(folder, document, table, *options))
    assert code == 3, output
    assert "Traceback" not in output
    assert "sesame" not in output
    assert not list(folder.rglob("plans/**/*.json"))
    return output.split("ringsync: error: ", 1)[1]


def test_what_works(document: dict[str, Any], tmp_path: Path) -> None:
    code, output = prepare_alone(configured(tmp_path, document, "shop.orders"))
    assert code == 0, output
    assert list(tmp_path.glob("lake/plans/bootstrap/test.json"))
    assert list(tmp_path.glob("lake/reports/bootstrap_prepare/test.json"))


def test_unknown_table(document: dict[str, Any], tmp_path: Path) -> None:
    error = refused(tmp_path, document, "shop.order", prepare=prepare_alone)
    assert "shop.order" in error
    assert "did you mean" in error.lower()
    assert "orders" in error


def test_unknown_keyspace(document: dict[str, Any], tmp_path: Path) -> None:
    assert "shp" in refused(tmp_path, document, "shp.orders")


def test_not_a_table_name(document: dict[str, Any], tmp_path: Path) -> None:
    assert "is not a table name" in refused(tmp_path, document, "orders; DROP TABLE x")


def test_no_rights(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "password").write_text("sesame-nobody")
    document["cassandra"]["username"] = "nobody"
    error = refused(tmp_path, document)
    assert "GRANT SELECT ON" in error
    assert "nobody" in error


def test_no_rights_in_the_state(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "password").write_text("sesame-stateless")
    document["cassandra"]["username"] = "stateless"
    assert 'GRANT SELECT, MODIFY ON KEYSPACE "cdc"' in refused(tmp_path, document)
    document["state"] = {"keyspace": "elsewhere"}
    error = refused(tmp_path, document)
    assert '"elsewhere" cannot be created' in error
    assert "docs/state.md" in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--columns=w", "columns: shop.orders has no column w; it has id, v"),
        ("--where=v = 'x'", "v"),
        ("--where=id = 1; DROP TABLE shop.orders", "where"),
    ],
)
def test_a_selection_that_does_not_fit(document: dict[str, Any], tmp_path: Path, option: str, message: str) -> None:
    assert message in refused(tmp_path, document, "shop.orders", option)


def test_wrong_password(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "password").write_text("sesame-wrong")
    error = refused(tmp_path, document)
    assert "reader" in error
    assert "cassandra.password" in error


def test_no_password_where_one_is_needed(document: dict[str, Any], tmp_path: Path) -> None:
    del document["cassandra"]["username"], document["cassandra"]["password"]
    assert "cassandra.username" in refused(tmp_path, document)


def test_unreachable_host(document: dict[str, Any], tmp_path: Path) -> None:
    document["cassandra"]["port"] = port = free_port("127.0.0.1")
    error = refused(tmp_path, document)
    assert f"127.0.0.1:{port}" in error
    assert "cassandra.contact_points" in error


def test_unwritable_output(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file where a folder should be")
    assert str(tmp_path / "lake") in refused(tmp_path, document)


def test_malformed_yaml(tmp_path: Path) -> None:
    error = refused(tmp_path, "cassandra: [1")
    assert "not valid YAML" in error
    assert "line 1" in error


def test_unknown_key(document: dict[str, Any], tmp_path: Path) -> None:
    document["cassandra"]["contact_point"] = "x"
    assert "cassandra.contact_point: unknown key; did you mean contact_points?" in refused(tmp_path, document)
