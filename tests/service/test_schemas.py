"""``cdcservice schema``: what a person learns of a table's versions, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ringsync.cli import main
from ringsync.config import load_config
from ringsync.cql.types import Native
from ringsync.ledger.dropped_tables import mark_dropped
from ringsync.ledger.table_versions import next_version, version_of
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Column, DroppedColumn, TableSchema
from ringsync.wiring import store_of

TEXT = Native("text")
KEY = Column("id", "partition_key", Native("int"))
FIRST = TableSchema("shop", "orders", "5a1c395eb41f11e59f22ba0be0483c18", (KEY, Column("note", "regular", TEXT)))
AT = 1_795_000_000_000_001
"""2026-11-18T11:06:40.000001 in UTC"""


def told(columns: str, since_us: int, *dropped: DroppedColumn) -> TableSchema:
    values = (Column(name, "regular", TEXT) for name in columns.split())
    return replace(FIRST, columns=(KEY, *values), since_us=since_us, dropped=dropped)


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose store has four versions: made, altered twice, and with messages of another form."""
    path = tmp_path / "ringsync.yaml"
    path.write_text("server_name: test\ncassandra: {contact_points: [127.0.0.1]}\nstore: {url: lake}\n")
    store = store_of(load_config(path))
    monkeypatch.setattr("ringsync.ledger.table_versions.time.time", lambda: AT / 1e6 + 9)
    version_of(store, told("note", AT))
    version_of(store, told("note total", AT + 1_000_000))
    third = version_of(store, told("total", AT + 2_000_000, DroppedColumn("note", "regular", TEXT, AT + 1_999_999)))
    next_version(store, third)
    return path


Say = Callable[..., str]


@pytest.fixture
def say(conf: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*arguments: str, code: int = 0) -> str:
        assert main(["schema", *arguments, "--conf", str(conf)]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


def test_the_history_tells_what_changed_and_when(say: Say) -> None:
    found = "found 2026-11-18T11:06:49+00:00"
    assert say("history", "shop.orders").splitlines() == [
        f"version 1 since 2026-11-18T11:06:40.000001+00:00, {found}",
        "    CREATE TABLE shop.orders (",
        "        id int,",
        "        note text,",
        "        PRIMARY KEY ((id))",
        "    );",
        f"version 2 since 2026-11-18T11:06:41.000001+00:00, {found}",
        "    ALTER TABLE shop.orders ADD total text;",
        f"version 3 since 2026-11-18T11:06:42.000001+00:00, {found}",
        f"    ALTER TABLE shop.orders DROP note USING TIMESTAMP {AT + 1_999_999};",
        f"version 4 since 2026-11-18T11:06:42.000001+00:00, {found}",
        "    -- the same columns: its messages have another form",
    ]


def test_the_history_tells_that_the_table_was_dropped(say: Say, conf: Path) -> None:
    store = store_of(load_config(conf))
    mark_dropped(store, "shop", "orders", FIRST.table_id, AT // 1000 + 20_000)
    version_of(store, replace(FIRST, table_id="6" * 32))
    lines = say("history", "shop.orders").splitlines()
    at = lines.index("dropped, found 2026-11-18T11:07:00+00:00")
    assert lines[at - 1] == "    -- the same columns: its messages have another form"
    assert lines[at + 1].startswith("version 5 since ")


def test_a_version_is_shown_by_its_number_or_its_day(say: Say) -> None:
    assert "note text" not in say("show", "shop.orders")
    assert say("show", "SHOP.Orders", "--version", "1") == say("show", "shop.orders", "--at", "2026-11-18T11:06:41Z")
    second = say("show", "shop.orders", "--version", "2")
    assert second == say("show", "shop.orders", "--at", "2026-11-18T12:06:41.5+01:00")
    assert second == say("show", "shop.orders", "--at", "2026-11-18 11:06:41.5")


def test_what_inspect_needs_is_shown_too(say: Say) -> None:
    (table,) = parse_schema(say("show", "shop.orders", "--internals"), "schema.cql").tables
    assert table == told("total", 0, DroppedColumn("note", "regular", TEXT, AT + 1_999_999))


def test_two_versions_are_compared(say: Say) -> None:
    assert say("diff", "shop.orders", "1").splitlines() == [
        "-- shop.orders: version 1 to version 4",
        f"ALTER TABLE shop.orders DROP note USING TIMESTAMP {AT + 1_999_999};",
        "ALTER TABLE shop.orders ADD total text;",
    ]
    assert say("diff", "shop.orders", "1", "2").endswith("2\nALTER TABLE shop.orders ADD total text;\n")
    assert say("diff", "shop.orders") == "-- shop.orders: version 3 to version 4\n"
    assert say("diff", "shop.orders", "2", "1").splitlines()[1:] == ["ALTER TABLE shop.orders DROP total;"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("history", "shop.ordres"), "has no history of shop.ordres: ringsync records a table when it"),
        (("history", "shop.ordres"), "Recorded are shop.orders"),
        (("show", "shop.orders", "--version", "9"), "shop.orders has no version 9: it has 1 to 4"),
        (("diff", "shop.orders", "0"), "shop.orders has no version 0: it has 1 to 4"),
        (
            ("show", "shop.orders", "--at", "2020-01-01"),
            "begins at 2026-11-18T11:06:40.000001+00:00",
        ),
    ],
)
def test_what_is_not_there_is_named_with_what_is(say: Say, arguments: tuple[str, ...], message: str) -> None:
    error = say(*arguments, code=3)
    assert error.startswith("ringsync: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "orders"], "'orders' is not a table name"),
        (["show", "a.b", "--at", "noon"], "'noon' is not a time such as 2026-11-01T12:00Z"),
        (["show", "a.b", "--at", "2026-01-01", "--version", "1"], "not allowed with argument"),
        (["diff", "a.b", "-1"], "'-1' is not the number of a version"),
        (["diff", "a.b", "one"], "'one' is not the number of a version"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["schema", *arguments])
    assert end.value.code == 3
    assert message in capsys.readouterr().err


def test_a_damaged_version_hides_no_other(say: Say, conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of(load_config(conf))
    whole = {number: store.get(f"schemas/shop.orders/{number:06}.json") for number in (2, 4)}
    store.put("schemas/shop.orders/000002.json", b"{")
    mark_dropped(store, "shop", "orders", FIRST.table_id, 1)
    store.put(f"dropped_tables/shop.orders/{FIRST.table_id}.json", b"{")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["schema", *arguments, "--conf", str(conf)])
        return (code, *capsys.readouterr())

    code, out, err = run("history", "shop.orders")
    assert (code, [line.split()[1] for line in out.splitlines() if line.startswith("version")]) == (1, ["1", "3", "4"])
    assert "schemas/shop.orders/000002.json cannot be read" in err
    assert "dropped, found at a time that cannot be read" in out
    assert run("show", "shop.orders", "--version", "1")[0] == 1
    assert "no version 2 that can be read" in run("show", "shop.orders", "--version", "2")[2]
    store.put("schemas/shop.orders/000004.json", b"{")
    code, out, err = run("show", "shop.orders")
    assert (code, out) == (3, "")
    assert "the newest version is damaged" in err
    for number, data in whole.items():
        store.put(f"schemas/shop.orders/{number:06}.json", data)
    assert run("show", "shop.orders")[0] == 0
