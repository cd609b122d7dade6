"""Row images made of what the model of commit logs shows: the ``after`` of messages in tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.cql.cells import cells_of_values
from ringsync.cql.codec.decode import decode
from ringsync.images.schema import MERGE, ROW_TIMES, lake_names, row_image_schema
from ringsync.schema.table import Column, TableSchema
from tests.commitlog_model.replay import Row


def images_of(table: TableSchema, rows: list[Row]) -> pa.RecordBatch:
    """A row image for each row of the model."""
    schema, names = row_image_schema(table), lake_names(table)
    x_type = schema.field("_x").type
    arrays: dict[str, pa.Array] = {"token": pa.array([0] * len(rows), pa.int64())}
    differences = []
    for column in table.columns:
        shown = [row.get(column.name) for row in rows]
        values, misfits = decoded(column, [one and one.raw for one in shown])
        arrays[names[column.name]] = values
        kind = x_type.field(names[column.name]).type
        parts: list[dict[str, Any] | None] = []
        for one, misfit in zip(shown, misfits, strict=True):
            raw = {"raw": one.raw if misfit and one else None}
            parts.append((raw if column.is_key else {**_times(column, one), **raw}) if one else None)
        differences.append(pa.array(parts, kind))
    row_times = {"writetime": 0, "expires_at": None, "deleted_at": None, "live": None}
    arrays["_row"] = pa.array([row_times] * len(rows), ROW_TIMES)
    arrays["_x"] = pa.StructArray.from_arrays(differences, fields=list(x_type))
    arrays["_merge"] = pa.nulls(len(rows), MERGE)
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def decoded(column: Column, raws: list[bytes | None]) -> tuple[pa.Array, list[bool]]:
    """Serialised values of a column as row images have them, and which of them no Arrow type can hold."""
    cells = cells_of_values([raw or b"" for raw in raws])
    found = decode(column.type, cells.without(np.array([raw is None for raw in raws], np.bool_)))
    misfits = [False] * len(raws) if found.misfits is None else found.misfits.tolist()
    return found.values, misfits


def _times(column: Column, shown: Any) -> dict[str, Any]:
    if not column.is_multicell:
        return {"d": shown.writetime, "e": shown.expires_at}
    expiries = [None if time is None else -1 if end is None else end for time, end in _pairs(shown)]
    return {"d": shown.writetime, "e": expiries}


def _pairs(shown: Any) -> list[tuple[int | None, int | None]]:
    return list(zip(shown.writetime, shown.expires_at, strict=True))
