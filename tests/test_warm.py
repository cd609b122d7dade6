"""Kernels that are compiled ahead: a worker of the sync that begins must find them all."""

from __future__ import annotations

import json

from tests.own_process import output_of

PROGRAM = """
import json
import sys
import pyarrow as pa
from numba.core.dispatcher import Dispatcher
from ringsync.warm import warm

def compiled():
    return {
        f"{module}.{name}": len(found.signatures)
        for module in [one for one in sys.modules if one.startswith("ringsync.")]
        for name, found in vars(sys.modules[module]).items()
        if isinstance(found, Dispatcher)
    }

warm()
before = compiled()

from ringsync.images.from_changes import row_images_of
from ringsync.changes.batch import ChangeRows
from ringsync.changes.reconcile.rows import merge
from ringsync.images.queries import queries
from ringsync.streams.change_messages import change_messages
from tests.changes.images_of_logs import logged

for one in logged("5.0-v8-plain"):
    if any(column.is_counter for column in one.table.columns):
        continue
    merged = merge(ChangeRows.of(one.rows), one.table)
    told = {"processed_at_ms": 0, "schema_version": 1, "version": "", "queries": queries(merged, one.table)}
    hostnames = pa.array([""] * len(merged))
    images = row_images_of(merged, one.table, "raw")
"""

CDC_LOG = """
from uuid import UUID
from tests.scylla.random_mutations import CLUSTERED, Maker
from tests.scylla_model.log_rows import log_rows

maker, time = Maker(CLUSTERED, 1), UUID("b223c55e-6d07-11ea-7654-24e4fb3f20b9")
rows = [row for _ in range(50) for row in log_rows(maker.mutation(), lambda _: time)]
CLUSTERED.decode(CLUSTERED.page(rows), log_ttls_s=[86_400], take_incomplete=True)
"""

END = """
after = compiled()
print(json.dumps({name: [before.get(name), count] for name, count in after.items() if before.get(name) != count}))
"""


def test_publishing_a_change_compiles_nothing_more() -> None:
    """Tables of all kinds, from a log of random statements, and a CDC log with all kinds of rows."""
    assert json.loads(output_of(PROGRAM + CDC_LOG + END)) == {}
