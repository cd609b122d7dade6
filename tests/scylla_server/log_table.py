"""The log table of a table with cdc, as a plain table of Cassandra."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PARTITIONER = "com.scylladb.dht.CDCPartitioner"
FIXED = {
    "cdc$stream_id": "blob",
    "cdc$time": "timeuuid",
    "cdc$batch_seq_no": "int",
    "cdc$operation": "tinyint",
    "cdc$ttl": "bigint",
    "cdc$end_of_batch": "boolean",
}
_COLLECTION = re.compile(r"(list|set|map)<(.*)>")
_WORDS = """
ascii bigint blob boolean counter date decimal double duration empty float inet int smallint text time timestamp
timeuuid tinyint uuid varchar varint
"""
NATIVES = frozenset(_WORDS.split())


def log_columns(columns: Iterable[Any]) -> dict[str, str]:
    """Return the columns of the log, with their types.

    :param columns: rows of ``system_schema.columns`` of the base table
    """
    found = dict(FIXED)
    for row in sorted(columns, key=lambda row: row.column_name):
        found[row.column_name] = _value_type(row.type)
        if row.kind in ("partition_key", "clustering"):
            continue
        found[f"cdc$deleted_{row.column_name}"] = "boolean"
        if elements := _element_type(row.type):
            found[f"cdc$deleted_elements_{row.column_name}"] = elements
    return found


def is_multi_cell(kind: str) -> bool:
    """Tell whether values of a type have several cells: a collection or user-defined type that is not frozen."""
    return bool(_COLLECTION.fullmatch(kind)) or is_user_type(kind)


def is_user_type(kind: str) -> bool:
    """Tell whether a type is a user-defined one that is not frozen."""
    return kind not in NATIVES and "<" not in kind and not kind.startswith("'")


def _value_type(kind: str) -> str:
    match = _COLLECTION.fullmatch(kind)
    if match and match[1] == "list":
        return f"frozen<map<timeuuid, {match[2]}>>"
    return f"frozen<{kind}>" if is_multi_cell(kind) else kind


def _element_type(kind: str) -> str | None:
    if not is_multi_cell(kind):
        return None
    match = _COLLECTION.fullmatch(kind)
    if match is None:
        return "frozen<set<smallint>>"
    if match[1] == "list":
        return "frozen<set<timeuuid>>"
    return f"frozen<set<{_first(match[2]) if match[1] == 'map' else match[2]}>>"


def _first(pair: str) -> str:
    """Return the first of two types with a comma between them."""
    depth = 0
    for at, sign in enumerate(pair):
        depth += (sign == "<") - (sign == ">")
        if sign == "," and depth == 0:
            return pair[:at]
    raise ValueError(f"{pair} is no pair of types")


def create_log(name: str, columns: Mapping[str, str], ttl_s: int) -> str:
    """Write the CREATE TABLE of a log.

    :param name: keyspace and name, as in CQL
    :param ttl_s: ttl of its rows, s; 0: for ever
    """
    listed = ", ".join(f"{quoted(column)} {kind}" for column, kind in columns.items())
    window_s = max(ttl_s // 24, 60)
    return (
        f'CREATE TABLE IF NOT EXISTS {name} ({listed}, PRIMARY KEY ("cdc$stream_id", "cdc$time", "cdc$batch_seq_no")) '
        "WITH gc_grace_seconds = 0 AND caching = {'keys': 'NONE', 'rows_per_partition': 'NONE'} AND compaction = "
        "{'class': 'TimeWindowCompactionStrategy', 'compaction_window_unit': 'MINUTES', "
        f"'compaction_window_size': '{max(window_s // 60, 1)}'}}"
    )


def quoted(name: str) -> str:
    """Quote an identifier."""
    return '"' + name.replace('"', '""') + '"'
