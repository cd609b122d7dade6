"""The program of docs/replica.md for readers without ringsync, as it stands there, gives the rows that SELECT shows."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from ringsync.images.schema import NO_LIVENESS, row_image_schema
from tests.replica.bases import replica_uri, write_base, write_pass
from tests.replica.test_view import NOW, TABLE, many_partitions
from tests.replica.view_model import Row, live_rows

LIVES = (None, 800, 1000, NO_LIVENESS)
DOCUMENT = Path(__file__).parents[2] / "docs" / "replica.md"


def program() -> dict[str, Any]:
    """What the document defines, about our table."""
    (code,) = (one for one in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "def rows" in one)
    found: dict[str, Any] = {}
    exec(compile(code, "docs/replica.md", "exec"), found)
    return found | {
        "KEY": [column.name for column in TABLE.columns if column.is_key],
        "CLUSTERING": [column.name for column in TABLE.clustering],
        "STATIC": [column.name for column in TABLE.of_kind("static")],
        "REGULAR": [column.name for column in TABLE.of_kind("regular")],
        "MANY_CELLS": [column.name for column in TABLE.columns if column.is_multicell],
    }


def read(uri: str) -> list[Row]:
    query = QueryBuilder().register("t", DeltaTable(uri)).execute("SELECT * FROM t")
    found: list[Row] = pa.table(query.read_all()).to_pylist()
    return found


def stored(images: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(images, schema=row_image_schema(TABLE))


def test_the_documented_program_shows_what_select_shows(tmp_path: Path) -> None:
    """Of the newest images, which lie in the base, or in the changes of several passes with older ones below."""
    newest, chance = many_partitions(150), random.Random(1)
    for image in chance.sample(newest, len(newest) // 2):  # only its own liveness tells whether it lives
        for column in TABLE.of_kind("regular"):
            image[column.name], image["_x"][column.name] = None, {"d": None, "e": None, "raw": None}
        if image["c"] is not None:
            image["_row"] |= {"deleted_at": chance.choice((None, 900)), "live": chance.choice(LIVES)}
    older = many_partitions(150)
    chance.shuffle(older)
    values = [{key: old[key] for key in old if key not in ("token", "p", "c")} for old in older]
    stale = [new | old for new, old in zip(newest, values, strict=True) if new["c"] is not None]
    place = [chance.choice(("base", "first", "second")) for _ in newest]
    in_pass = {name: [one for one, where in zip(newest, place, strict=True) if where == name] for name in set(place)}
    later = {repr(one["token"]) + repr(one["c"]) for name in ("first", "second") for one in in_pass[name]}
    last = {repr(one["token"]) + repr(one["c"]) for one in in_pass["second"]}
    below = [one for one in stale if repr(one["token"]) + repr(one["c"]) in later]
    between = [one for one in stale if repr(one["token"]) + repr(one["c"]) in last]
    write_base(tmp_path, TABLE, stored([*in_pass["base"], *below]))
    write_pass(tmp_path, TABLE, stored([*in_pass["first"], *between]), 1)
    write_pass(tmp_path, TABLE, stored(in_pass["second"]), 2)
    uri = replica_uri(tmp_path, TABLE)
    expected = live_rows(TABLE, newest, NOW)
    found = keyed(program(), read(f"{uri}/changes"), read(f"{uri}/base"))
    assert 50 < len(expected) < len(newest)
    assert found == sorted(repr(shown_values(row)) for row in expected)


def keyed(defined: dict[str, Any], changes: list[Row], base: list[Row]) -> list[str]:
    """The program's rows; each partition has a token of its own, and all have the same key."""
    tokens = sorted({image["token"] for image in changes + base})
    namespace = defined["rows"].__globals__
    namespace.update({name: value for name, value in defined.items() if name.isupper()})
    found = []
    for token in tokens:
        own = [[image for image in images if image["token"] == token] for images in (changes, base)]
        found += [repr((token, comparable(row))) for row in defined["rows"](*own, NOW)]
    return sorted(found)


def shown_values(row: Row) -> tuple[int, list[tuple[str, Any]]]:
    """A row of the model: raw bytes where there are some."""
    cells = {name: cell.get("raw") for name, cell in row["_cells"].items() if cell}
    return row["token"], comparable({c.name: cells.get(c.name) or row[c.name] for c in TABLE.columns})


def comparable(row: Row) -> list[tuple[str, Any]]:
    return [
        (name, dict(value) if name in ("sm", "m") and isinstance(value, list) else value)
        for name, value in sorted(row.items())
    ]
