"""Change rows of the package and of the model in a common form: the jsonl form with only raw values."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable
from typing import Any

from ringsync.changes.columns import LoggedTables, columns_of
from ringsync.changes.schema import KINDS, TOMBSTONE
from ringsync.formats.commitlog.reader import Changes

Change = dict[str, Any]
_DECODED = {"partition_key", "clustering", "value", "path", "source", "keyspace", "table"}


def of_model(change: Change) -> Change:
    """Return a change of the model without its decoded values."""
    content = {key: value for key, value in change.items() if key not in _DECODED}
    if change["kind"] == "row":
        content.setdefault("raw_clustering", [])
    if "range" in change:
        sides = change["range"].items()
        content["range"] = {side: {k: v for k, v in bound.items() if k != "clustering"} for side, bound in sides}
    if "cells" in change:
        content["cells"] = [{k: v for k, v in cell.items() if k not in _DECODED} for cell in change["cells"]]
    return content | {"position": change["source"]["position"]}


def of_package(batches: Iterable[Changes], tables: LoggedTables) -> list[Change]:
    """Return the change rows of batches, and check that these are valid Arrow."""
    names = {table.table_id: {column.number: column.name for column in columns_of(table)} for table in tables.tables}
    found = []
    for batch in batches:
        batch.rows.validate(full=True)
        found += [_change(row, names) for row in batch.rows.to_pylist()]
    return found


def _change(row: dict[str, Any], names: dict[str, dict[int, str]]) -> Change:
    columns = names[row["table_id"].hex()]
    found: Change = {
        "table_id": str(uuid.UUID(bytes=row["table_id"])),
        "token": row["token"],
        "kind": KINDS[row["kind"]],
        "raw_partition_key": row["partition_key"].hex(),
        "digest": row["digest"].hex(),
        "position": row["position"],
    }
    if found["kind"] == "row":
        found["raw_clustering"], rest = _values(row["clustering"])
        assert rest == b""
    elif found["kind"] == "range_deletion":
        found["range"] = {"start": _bound(row["clustering"]), "end": _bound(row["range_end"])}
    else:
        assert row["clustering"] is None
    assert (row["range_end"] is not None) == (found["kind"] == "range_deletion")
    if row["liveness"]:
        found["liveness"] = {key: value for key, value in row["liveness"].items() if value is not None}
    if row["deletion"]:
        found["deletion"] = row["deletion"]
    if row["cells"]:
        found["cells"] = [_cell(cell, columns) for cell in row["cells"]]
    if row["complex_deletions"]:
        found["complex_deletions"] = [
            {key: columns[value] if key == "column" else value for key, value in one.items()}
            for one in row["complex_deletions"]
        ]
    return found


def _cell(cell: dict[str, Any], columns: dict[int, str]) -> Change:
    found: Change = {"column": columns[cell["column"]], "timestamp": cell["timestamp"]}
    if cell["path"] is not None:
        found["raw_path"] = cell["path"].hex()
    if cell["kind"] == TOMBSTONE:
        assert cell["value"] is None
        return found | {"deleted": True, "local_deletion_time": cell["local_deletion_time"]}
    found["raw"] = cell["value"].hex()
    if cell["ttl"] is not None:
        found |= {"ttl": cell["ttl"], "expires_at": cell["local_deletion_time"]}
    return found


def _values(data: bytes) -> tuple[list[str | None], bytes]:
    (count,) = struct.unpack_from("<i", data)
    at, values = 4, []
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, at)
        values.append(data[at + 4 : at + 4 + length].hex() if length >= 0 else None)
        at += 4 + max(length, 0)
    return values, data[at:]


def _bound(data: bytes) -> Change:
    values, rest = _values(data)
    return {"raw_clustering": values, "inclusive": {b"\0": False, b"\1": True}[rest]}
