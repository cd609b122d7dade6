"""What the sync adds to a replica: verification sees it, a repair is not hidden by it, a merge takes it to the base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.cluster.schema import read_table
from ringsync.images.schema import row_image_schema
from ringsync.replica.lookup import previous_images
from ringsync.schema.table import TableSchema
from ringsync.steps.application import ExitCode, Report, StepError
from tests.replica.bases import state_of, write_pass

pytestmark = [pytest.mark.server, pytest.mark.spark]

ROWS = 60


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str, bootstrap: Callable[[str, str], Report]) -> TableSchema:
    """A replicated table, all written long ago."""
    name = f"{keyspace}.orders"
    session.execute(f"CREATE TABLE {name} (id double PRIMARY KEY, v int) WITH cdc = true")
    for i in range(ROWS):
        session.execute(f"INSERT INTO {name} (id, v) VALUES (%s, %s) USING TIMESTAMP 1000", (float(i), i))
    bootstrap(name, "merge")
    return read_table(session, keyspace, "orders")


def images(store: Path, table: TableSchema, session: Any, ids: range, value: int | None) -> pa.Table:
    """Images of these rows with another value, of a writetime of 2000; None: as they are."""
    rows = session.execute(f"SELECT token(id) AS place, id FROM {table.keyspace}.{table.name}")
    tokens = {row.id: row.place for row in rows}
    asked = [{"token": tokens[float(i)], "id": float(i)} for i in ids]
    keys = pa.RecordBatch.from_pylist(asked, schema=row_image_schema(table))
    found = previous_images(state_of(store, table), table, keys)
    assert found.num_rows == len(ids)
    if value is not None:
        times = pa.StructArray.from_arrays(
            [pa.array([2000 if i == 0 else None] * len(ids), pa.int64()) for i in range(4)],
            fields=list(found.schema.field("_row").type),
        )
        found = found.set_column(found.schema.names.index("_row"), found.schema.field("_row"), times)
        found = found.set_column(2, "v", pa.array([value] * len(ids), pa.int32()))
    return pa.Table.from_batches([found])


def test_passes_are_verified_repaired_and_merged(table: TableSchema, session: Any, step: Any, lake: Path) -> None:
    name = f"{table.keyspace}.{table.name}"
    first = state_of(lake, table).applied + 1
    write_pass(lake, table, images(lake, table, session, range(5), 100), first)
    report, code = step("replica_verify", name, "wrong")
    assert (report["differences_by_kind"], code) == ({"value": 5, "writetime": 5}, ExitCode.COMPLETED_WITH_ERRORS)
    assert report["replica_pass"] == first
    repaired, code = step("replica_verify", name, "repaired", repair=True)
    assert (repaired["differences"], code) == (0, ExitCode.OK)

    for i in range(5):
        session.execute(f"INSERT INTO {name} (id, v) VALUES (%s, 100) USING TIMESTAMP 2000", (float(i),))
    write_pass(lake, table, images(lake, table, session, range(5), 100), first + 1)
    write_pass(lake, table, images(lake, table, session, range(3), None), first + 2)
    report, code = step("replica_verify", name, "right")
    assert (report["differences"], report["replica_rows"], code) == (0, ROWS, ExitCode.OK)

    report, code = step("replica_merge", name, "merge")
    counts = {key: report["merged"][name][key] for key in ("read", "superseded", "updated", "merged_pass")}
    expected = {"read": 8, "superseded": 3, "updated": 5, "merged_pass": first + 2}
    assert (counts, code) == (expected, ExitCode.OK)
    assert state_of(lake, table).changed_rows == 0
    report, code = step("replica_verify", name, "merged")
    assert (report["differences"], report["replica_rows"], code) == (0, ROWS, ExitCode.OK)
    report, code = step("replica_merge", "", "all")
    assert (name in report["merged"], code) == (False, ExitCode.OK)
    with pytest.raises(StepError, match=r"no table shop\.nothing"):
        step("replica_merge", "shop.nothing", "unknown")
    assert pc.max(images(lake, table, session, range(5), None)["v"]).as_py() == 100
