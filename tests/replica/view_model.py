"""What rows are alive at a moment, in plain Python: the oracle of the view. Shares no code with it.

A row image is a dict as ``RecordBatch.to_pylist`` gives it; so is a live row.
"""

from __future__ import annotations

from typing import Any

from ringsync.cql.types import UserType
from ringsync.images.schema import NO_LIVENESS
from ringsync.schema.table import Column, TableSchema

Row = dict[str, Any]


def live_rows(table: TableSchema, images: list[Row], now_s: int) -> list[Row]:
    shown, expired = [], []
    for image in images:
        row = {"token": image["token"], "_cells": {}}
        for column in table.columns:
            row[column.name], row["_cells"][column.name] = live_column(column, image, now_s)
        (shown if is_alive(table, image, row, now_s) else expired).append(row)
    for row in expired:
        only_static = any(row["_cells"][c.name] for c in table.of_kind("static"))
        if only_static and table.clustering and partition(table, row) not in [partition(table, r) for r in shown]:
            for column in table.clustering:
                row[column.name] = row["_cells"][column.name] = None
            shown.append(row)
    return shown


def partition(table: TableSchema, row: Row) -> list[Any]:
    return [row["token"], *((row[c.name], row["_cells"][c.name]) for c in table.partition_key)]


def is_alive(table: TableSchema, image: Row, row: Row, now_s: int) -> bool:
    if table.clustering and not any(has_cell(image, c) for c in table.clustering):
        return False
    regular = table.of_kind("regular")
    if any(row["_cells"][c.name] for c in regular):
        return True
    deleted, written, merge = image["_row"]["deleted_at"], image["_row"]["live"], image.get("_merge") or {}
    expires_at = merge.get("live_expires_at")
    if written is None:
        if any(has_cell(image, c) for c in regular) or merge.get("unseen_at") is not None:
            return False
        row_end, static = image["_row"]["expires_at"], any(has_cell(image, c) for c in table.of_kind("static"))
        return static or image["_row"]["writetime"] is None or row_end is None or row_end > now_s
    if written == NO_LIVENESS or (deleted is not None and written <= deleted):
        return False
    return expires_at is None or expires_at > now_s


def has_cell(image: Row, column: Column) -> bool:
    value = image[column.name]
    if column.is_multicell and isinstance(value, dict):
        value = [one for one in value.values() if one is not None]
    empty = column.is_multicell and not value
    return (value is not None and not empty) or image["_x"][column.name]["raw"] is not None


def live_column(column: Column, image: Row, now_s: int) -> tuple[Any, Any]:
    """(value, entry of ``_cells``), both None when nothing of the column lives."""
    x, row, value = image["_x"][column.name], image["_row"], image[column.name]
    if column.is_key:
        return value, ({"raw": x["raw"]} if x["raw"] is not None else None)
    if not has_cell(image, column):
        return None, None
    if not column.is_multicell:
        expiry = row["expires_at"] if x["e"] is None else None if x["e"] == -1 else x["e"]
        if expiry is not None and expiry <= now_s:
            return None, None
        return value, {"writetime": row["writetime"] + (x["d"] or 0), "expires_at": expiry, "raw": x["raw"]}
    fields = column.type.field_names if isinstance(column.type, UserType) else None
    count = len(fields or (x["e"] or x["d"] or [0] if x["raw"] is not None else value))
    return live_elements(value, count, x, row, now_s)


def live_elements(value: Any, count: int, x: Row, row: Row, now_s: int) -> tuple[Any, Any]:
    writetimes = [row["writetime"] + d for d in (x["d"] or [0] * count)]
    expiries = [row["expires_at"] if e is None else None if e == -1 else e for e in x["e"] or [None] * count]
    if x["e"] == []:
        expiries = [None] * count
    alive = [e is None or e > now_s for e in expiries]
    if x["raw"] is not None and any(alive):
        alive = [True] * count
    kept: Any
    if isinstance(value, dict):
        names = list(value)
        kept = {name: value[name] if ok else None for name, ok in zip(names, alive, strict=True)}
        present = [kept[name] is not None for name in names]
        times = [(w, e) if ok else (None, None) for w, e, ok in zip(writetimes, expiries, present, strict=True)]
    else:
        kept = None if value is None else [one for one, ok in zip(value, alive, strict=True) if ok]
        present = alive
        times = [(w, e) for w, e, ok in zip(writetimes, expiries, alive, strict=True) if ok]
    if not any(present):
        return None, None
    return kept, {
        "writetime": None if x["d"] == [] else [w for w, _ in times],
        "expires_at": None if x["e"] == [] else [e for _, e in times],
        "raw": x["raw"],
    }
