"""The statements by which tables lose cdc, as the nodes' own logs tell them.

Nobody may have looked while a table had no cdc: the sync stood still, or all was over within a second. The row in
``system_schema.tables`` tells nothing then: each ALTER TABLE writes all options again (C: SchemaKeyspace.
addTableParamsToRowBuilder). But every node logs these rows like others, and Cassandra keeps a segment as a whole if a
table with cdc has a change in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import columns_of
from ringsync.ledger.left_tables import LeftTable, note_left
from ringsync.ledger.table_versions import CdcBegun
from ringsync.schema.system_tables import system_tables
from ringsync.schema.table import TableSchema
from ringsync.storage.port import ObjectStore

SwitchedOff = tuple[str, int]
"""Id of a table, and the time of a statement after which it has no cdc, ms since the epoch."""

_TABLES = next(table_id for table_id, name in system_tables().items() if name == ("system_schema", "tables"))
_FALSE = b"\0"


def switched_off(rows: pa.RecordBatch, logged: Sequence[TableSchema]) -> set[SwitchedOff]:
    """Find the statements after which a table has no cdc; also those that alter a table which had none before.

    :param rows: change rows (:data:`ringsync.changes.schema.CHANGE_ROWS`)
    :param logged: tables by which they were decoded
    """
    schemas = rows.filter(pc.equal(rows["table_id"], pa.scalar(bytes.fromhex(_TABLES), pa.binary(16))))
    if not schemas.num_rows:
        return set()
    (described,) = (table for table in logged if table.table_id == _TABLES)
    names = {column.number: column.name for column in columns_of(described)}
    found = set()
    for row in schemas.to_pylist():
        values = {names[cell["column"]]: cell["value"] for cell in row["cells"]}
        # A node with cdc_enabled: false writes no cdc; from 4.1 on it removes what was there.
        is_off = values["cdc"] == _FALSE if "cdc" in values else row["deletion"] is not None
        if is_off and "id" in values:
            found.add((values["id"].hex(), row["write_time"] // 1000))
    return found


def note_switched_off(store: ObjectStore, begun: CdcBegun, found: Iterable[SwitchedOff]) -> None:
    """Note which tables have lost cdc while they were followed. To be called before the commit of what was read."""
    for table_id, at_ms in sorted(found, key=lambda one: one[1]):
        if table_id in begun and at_ms > begun.altered_ms(table_id):
            note_left(store, table_id, LeftTable(at_ms, has_cdc=False))
