"""Tests of the start of a new process that reads commit logs."""

from __future__ import annotations

from pathlib import Path

from tests.commitlogs.fixtures import fixture_named, unpacked
from tests.own_process import output_of

READ = """
import sys
from pathlib import Path
from ringsync.changes.columns import logged_tables
from ringsync.formats.commitlog.reader import read_log
from ringsync.schema.from_cql import parse_schema

tables = logged_tables(parse_schema(Path({schema!r}).read_text(), "schema.cql").tables)
path = Path({segment!r})
batches = list(read_log(path.read_bytes(), path.name, tables).batches)
print(sum(batch.rows.num_rows for batch in batches) > 100, sum(batch.undecoded.num_rows for batch in batches) > 0)
print("pandas" in sys.modules)
"""


def test_pandas_is_not_imported(tmp_path: Path) -> None:
    """It takes a new process as long as all else together."""
    fixture = fixture_named("5.0-v8-plain")
    schema = tmp_path / "schema.cql"
    schema.write_text(fixture.schema + fixture.dropped)
    segment = unpacked(fixture, tmp_path)[0]
    assert output_of(READ.format(schema=str(schema), segment=str(segment))) == "True True\nFalse"
