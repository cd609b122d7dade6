"""``cdcservice gaps``: gaps are listed, and acknowledged with a reason, by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ringsync.cli import main
from ringsync.ledger.gaps import Gap, acknowledged, note_gap, note_verified
from ringsync.storage.local import LocalStore

ORDERS = "a" * 32
KEY = "gaps/4e5d/CommitLog-7-1.log.json"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    document = {"server_name": "s", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "lake"}}
    path = tmp_path / "ringsync.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path / "lake")
    note_gap(found, Gap("4e5d", "10.0.0.1:9042", "CommitLog-7-1.log", 0, 1000, {ORDERS: "shop.orders"}, ()))
    return found


def test_gaps_are_listed_until_they_are_acknowledged(
    conf: Path, store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gaps", "list", "--conf", str(conf)]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"{KEY}: node 10.0.0.1:9042: CommitLog-7-1.log was removed")
    assert f"cdcservice gaps acknowledge {KEY}" in told, "its table has no replica"
    assert main(["gaps", "list", "--json", "--conf", str(conf)]) == 1
    assert json.loads(capsys.readouterr().out)["gap"]["tables"] == {ORDERS: "shop.orders"}
    assert main(["gaps", "acknowledge", KEY, "--reason", "a test cluster", "--conf", str(conf)]) == 0
    assert main(["gaps", "list", "--conf", str(conf)]) == 0
    assert capsys.readouterr().out.endswith("no gap is open\n")
    (noted,) = acknowledged(store)
    assert (noted.key, noted.reason) == (KEY, "a test cluster")
    assert noted.gap is not None
    assert main(["gaps", "list", "--all", "--conf", str(conf)]) == 0
    assert "a test cluster" in capsys.readouterr().out


def test_a_verified_gap_is_not_listed(conf: Path, store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    note_verified(store, ORDERS, 1001)
    assert main(["gaps", "list", "--conf", str(conf)]) == 0


def test_a_damaged_gap_can_be_acknowledged(conf: Path, store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("gaps/4e5d/CommitLog-7-2.log.json", b"{")
    assert main(["gaps", "list", "--conf", str(conf)]) == 1
    assert "cannot be read: restore it, or cdcservice gaps acknowledge" in capsys.readouterr().out
    names = ["4e5d/CommitLog-7-1.log", "4e5d/CommitLog-7-2.log"]
    assert main(["gaps", "acknowledge", *names, "--reason", "lost", "--conf", str(conf)]) == 0
    assert store.list("gaps/") == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["4e5d/CommitLog-7-9.log", KEY, "--reason", "x"], "gaps/4e5d/CommitLog-7-9.log.json: there is no such gap"),
        ([KEY, "--reason", " "], "--reason is empty"),
    ],
)
def test_mistakes_change_nothing(
    conf: Path, store: LocalStore, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["gaps", "acknowledge", *arguments, "--conf", str(conf)]) == 3
    assert told in capsys.readouterr().err
    assert len(store.list("gaps/")) == 1
