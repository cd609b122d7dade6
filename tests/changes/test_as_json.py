"""Tests of change rows as JSON: equal to the model's objects from the commit logs of real servers."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ringsync.changes.columns import logged_tables
from ringsync.changes.text.json import json_lines
from ringsync.formats.commitlog.index import parse_index
from ringsync.formats.commitlog.reader import read_log
from ringsync.formats.commitlog.segment import WHOLE
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.system_tables import system_tables
from tests.commitlog_model import cql_schema
from tests.commitlog_model.segment import read_segment
from tests.commitlogs.fixtures import Fixture, fixtures, unpacked

PLAIN = [fixture for fixture in fixtures() if not fixture.keystore]

GREATEST_FLOAT = {3.402823466e38: "3.4028235e+38", -3.402823466e38: "-3.4028235e+38"}
"""The model writes the greatest number of 32 bits so that a reader of 64 bits does not round it beyond these."""


def differences(model: Any, ours: Any, at: str = "") -> list[str]:
    """List the differences in words; 1.0 and 1.00 are two decimals."""
    if isinstance(model, dict) and isinstance(ours, dict) and model.keys() == ours.keys():
        return [found for key in model for found in differences(model[key], ours[key], f"{at}.{key}")]
    if isinstance(model, list) and isinstance(ours, list) and len(model) == len(ours):
        return [found for i in range(len(model)) for found in differences(model[i], ours[i], f"{at}[{i}]")]
    if isinstance(model, float) and isinstance(ours, Decimal | int):
        equal = repr(float(ours)) in (repr(model), GREATEST_FLOAT.get(model))
    elif isinstance(model, Decimal):
        equal = str(model) == str(ours)
    else:
        equal = type(model) is type(ours) and model == ours
    return [] if equal else [f"{at}: {ours!r} instead of {model!r}"]


def without_raw(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_raw(one) for key, one in value.items() if not key.startswith("raw")}
    return [without_raw(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("fixture", PLAIN, ids=lambda one: one.name)
def test_json_lines_are_what_the_model_reads(fixture: Fixture, tmp_path: Path) -> None:
    text = fixture.schema + fixture.dropped
    model_tables = cql_schema.parse_schema(text)
    tables = parse_schema(text, "schema.cql").by_id()
    logged = logged_tables(list(tables.values()))
    compared = 0
    for path in unpacked(fixture, tmp_path):
        index = parse_index(path.with_name(path.stem + "_cdc.idx").read_bytes())
        wanted = index.wanted if index else WHOLE
        model = read_segment(path, model_tables, end=wanted.until).changes
        log = read_log(path.read_bytes(), path.name, logged, wanted)
        ours: list[list[str]] = [[], []]
        for batch in log.batches:
            assert {one.hex() for one in batch.undecoded["table_id"].to_pylist()} <= system_tables().keys()
            for raw, lines in enumerate(ours):
                found, malformed = json_lines(batch.rows, tables, raw=bool(raw))
                assert not malformed
                lines += found
        for change, bare, full in zip(model, *ours, strict=True):
            assert differences(change, json.loads(full, parse_float=Decimal)) == []
            assert differences(without_raw(change), json.loads(bare, parse_float=Decimal)) == []
        compared += len(model)
    assert compared > 100
