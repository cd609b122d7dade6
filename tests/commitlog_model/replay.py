"""Last write wins (docs/formats.md, 3.1): what SELECT shows after a set of change rows, in any order, however often.

Nothing is reconciled while the changes come in; :func:`rows` does it all at once from everything that is known of a
partition, in the simplest way that there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cmp_to_key
from typing import Any

from tests.commitlog_model.order import compare, compare_clustering
from tests.commitlog_model.types import Table, Type
from tests.commitlog_model.values import counter_shards, decode, partition_key_components

Change = dict[str, Any]
Cell = dict[str, Any]
Raw = tuple[bytes | None, ...]
Deletion = tuple[int, int]
"""(µs, s); the greater one supersedes, and deletes what is not later than its µs."""
NO_DELETION: Deletion = (-(1 << 63), 0)
_EXPIRED_LIVENESS_TTL = (1 << 31) - 1


@dataclass
class Partition:
    """All that the changes say of one partition."""

    deletions: list[Deletion] = field(default_factory=list)
    ranges: list[Change] = field(default_factory=list)
    static: list[Change] = field(default_factory=list)
    rows: list[Change] = field(default_factory=list)


State = dict[tuple[str, str], Partition]
"""(table id, partition key in hex) → partition"""


@dataclass(frozen=True)
class Shown:
    """A column's value in a SELECT: for multi-cell columns a list of times, one per element (for a UDT: per field).

    :param value: JSON
    :param raw: the value as the native protocol has it
    :param writetime: µs
    :param expires_at: s, or None
    """

    value: Any
    raw: bytes | None
    writetime: Any
    expires_at: Any


Row = dict[str, Shown]
"""By column; key columns have no times."""


def replay(changes: Iterable[Change]) -> State:
    """Collect changes in the jsonl form with ``--raw``, by partition."""
    state: State = {}
    for change in changes:
        partition = state.setdefault((change["table_id"], change["raw_partition_key"]), Partition())
        match change["kind"]:
            case "partition_deletion":
                partition.deletions.append(_deletion(change))
            case "range_deletion":
                partition.ranges.append(change)
            case "static":
                partition.static.append(change)
            case "row":
                partition.rows.append(change)
            case kind:
                raise ValueError(f"a change of kind {kind!r}")
    return state


def rows(state: State, table: Table, now: int) -> list[Row]:
    """The rows that ``SELECT`` shows of a table: every column that is not null.

    :param now: s; what has expired by then is not shown
    :returns: partitions in any order, the rows of each in the order of its clustering; a partition of which only
        static columns are left is one row without clustering columns
    """
    return [
        row
        for (table_id, key), partition in state.items()
        if table_id == table.id
        for row in _partition_rows(partition, bytes.fromhex(key), table, now)
    ]


def _partition_rows(partition: Partition, raw_key: bytes, table: Table, now: int) -> list[Row]:
    deleted = max(partition.deletions, default=NO_DELETION)
    components = partition_key_components(raw_key, len(table.partition_key))
    key = _keys(table.partition_types, components)
    static = _columns(partition.static, table, deleted, now)
    order = [(table.types[name], descending) for name, _, descending in table.clustering]
    found = []
    for clustering, changes in _by_clustering(partition.rows, order):
        covering = [_deletion(one) for one in partition.ranges if _covers(one["range"], clustering, order)]
        deletion = max([deleted, *covering, *map(_deletion, changes)])
        columns = _columns(changes, table, deletion, now)
        if columns or _is_alive(changes, deletion, now):
            found.append(key | _keys(table.clustering_types, clustering) | static | columns)
    if static and not found:
        found = [key | static]
    return found


def _keys(columns: Sequence[tuple[str, Type]], raws: Sequence[bytes | None]) -> Row:
    return {
        name: Shown(decode(cql_type, raw), raw, None, None)
        for (name, cql_type), raw in zip(columns, raws, strict=True)
        if raw is not None
    }


def _deletion(change: Change) -> Deletion:
    found = change.get("deletion")
    return (found["timestamp"], found["local_deletion_time"]) if found else NO_DELETION


def _by_clustering(changes: list[Change], order: Sequence[tuple[Type, bool]]) -> list[tuple[Raw, list[Change]]]:
    """The changes of each row: clusterings that compare as equal are one, whatever their bytes (1 and 1.0)."""
    by_bytes: dict[Raw, list[Change]] = defaultdict(list)
    for change in changes:
        by_bytes[_raw(change.get("raw_clustering", []))].append(change)
    found: list[tuple[Raw, list[Change]]] = []
    for clustering in sorted(by_bytes, key=cmp_to_key(lambda a, b: compare_clustering(order, a, b))):
        if found and compare_clustering(order, found[-1][0], clustering) == 0:
            found[-1][1].extend(by_bytes[clustering])
        else:
            found.append((clustering, by_bytes[clustering]))
    return found


def _raw(values: list[str | None]) -> Raw:
    return tuple(None if value is None else bytes.fromhex(value) for value in values)


def _covers(bounds: dict[str, Any], clustering: Raw, order: Sequence[tuple[Type, bool]]) -> bool:
    start, end = bounds["start"], bounds["end"]
    after_start = compare_clustering(order, clustering, _raw(start["raw_clustering"]))
    after_end = compare_clustering(order, clustering, _raw(end["raw_clustering"]))
    return (after_start > 0 or (after_start == 0 and start["inclusive"])) and (
        after_end < 0 or (after_end == 0 and end["inclusive"])
    )


def _is_alive(changes: list[Change], deletion: Deletion, now: int) -> bool:
    """Whether the row's primary key liveness keeps it."""
    found = [change["liveness"] for change in changes if "liveness" in change]
    if not found:
        return False
    winner = max(found, key=_liveness_rank)
    expires_at = winner.get("expires_at")
    has_expired = winner.get("ttl") == _EXPIRED_LIVENESS_TTL or (expires_at is not None and now >= expires_at)
    return winner["timestamp"] > deletion[0] and not has_expired


def _liveness_rank(liveness: dict[str, int]) -> tuple[Any, ...]:
    ttl = liveness.get("ttl")
    return liveness["timestamp"], ttl == _EXPIRED_LIVENESS_TTL, ttl is not None, liveness.get("expires_at", 0)


def _columns(changes: list[Change], table: Table, deletion: Deletion, now: int) -> dict[str, Shown]:
    cells: dict[str, list[Cell]] = defaultdict(list)
    deletions: dict[str, Deletion] = defaultdict(lambda: deletion)
    for change in changes:
        for one in change.get("complex_deletions", []):
            deletions[one["column"]] = max(deletions[one["column"]], (one["timestamp"], one["local_deletion_time"]))
        for cell in change.get("cells", []):
            cells[cell["column"]].append(cell)
    found = {}
    for name, of_column in cells.items():
        if name not in table.static and name not in table.regular:
            continue
        dropped_at = table.dropped[name][1] if name in table.dropped else NO_DELETION[0]
        newer = [cell for cell in of_column if cell["timestamp"] > max(dropped_at, deletions[name][0])]
        shown = _column(table.types[name], newer, now)
        if shown is not None:
            found[name] = shown
    return found


def _column(cql_type: Type, cells: list[Cell], now: int) -> Shown | None:
    if cql_type.kind == "counter":
        return _counter(cells)
    if not cql_type.is_complex:
        winner = max(cells, key=_cell_rank, default=None)
        if winner is None or not _is_live(winner, now):
            return None
        raw = bytes.fromhex(winner["raw"])
        return Shown(decode(cql_type, raw), raw, winner["timestamp"], winner.get("expires_at"))
    live = [cell for cell in _elements(cql_type, cells) if _is_live(cell, now)]
    return _multi_cell(cql_type, live) if live else None


def _cell_rank(cell: Cell) -> tuple[Any, ...]:
    """Greater wins (C: db/rows/Cells.resolveRegular)."""
    is_tombstone = "deleted" in cell
    local_time = cell["local_deletion_time"] if is_tombstone else cell.get("expires_at")
    value = bytes.fromhex(cell.get("raw", ""))
    return cell["timestamp"], local_time is not None, is_tombstone, local_time or 0, value


def _is_live(cell: Cell, now: int) -> bool:
    return "deleted" not in cell and ("expires_at" not in cell or now < cell["expires_at"])


def _elements(cql_type: Type, cells: list[Cell]) -> list[Cell]:
    """The winning cell of each path, in the order of the paths."""
    path_type = {"list": Type("timeuuid"), "udt": Type("smallint")}.get(cql_type.kind) or cql_type.inner[0]

    def order(a: Cell, b: Cell) -> int:
        return compare(path_type, bytes.fromhex(a["raw_path"]), bytes.fromhex(b["raw_path"]))

    found: list[list[Cell]] = []
    for cell in sorted(cells, key=cmp_to_key(order)):
        if found and order(found[-1][0], cell) == 0:
            found[-1].append(cell)
        else:
            found.append([cell])
    return [max(candidates, key=_cell_rank) for candidates in found]


def _multi_cell(cql_type: Type, cells: list[Cell]) -> Shown:
    """The value of a collection or UDT is decoded from its frozen form, which is put together here."""
    if cql_type.kind == "udt":
        by_field = {int(cell["raw_path"], 16): cell for cell in cells}
        parts = [by_field.get(i) for i in range(len(cql_type.inner))]
        raw = b"".join(_sized(None if cell is None else cell["raw"]) for cell in parts)
        times = [cell or {"timestamp": None} for cell in parts]
    else:
        raws = {
            "list": lambda cell: [cell["raw"]],
            "set": lambda cell: [cell["raw_path"]],
            "map": lambda cell: [cell["raw_path"], cell["raw"]],
        }[cql_type.kind]
        raw = len(cells).to_bytes(4, "big") + b"".join(_sized(one) for cell in cells for one in raws(cell))
        times = cells
    writetime = [cell["timestamp"] for cell in times]
    return Shown(decode(cql_type, raw), raw, writetime, [cell.get("expires_at") for cell in times])


def _sized(raw: str | None) -> bytes:
    if raw is None:
        return (-1).to_bytes(4, "big", signed=True)
    data = bytes.fromhex(raw)
    return len(data).to_bytes(4, "big") + data


def _counter(cells: list[Cell]) -> Shown | None:
    """The sum over all shards (C: CounterContext.merge); a tombstone that is not older than a deletion wins always."""
    if not cells or any("deleted" in cell for cell in cells):
        return None
    shards: dict[bytes, tuple[int, int, int]] = {}
    for cell in cells:
        for shard_id, clock, count, kind in counter_shards(bytes.fromhex(cell["raw"])):
            rank = ("remote", "local", "global").index(kind)
            before = shards.get(shard_id)
            if before is not None and rank == before[0] == 1:
                shards[shard_id] = (rank, before[1] + clock, before[2] + count)
            elif before is None or (rank, clock, count) > before:
                shards[shard_id] = (rank, clock, count)
    total = sum(count for _, _, count in shards.values())
    value = (total + (1 << 63)) % (1 << 64) - (1 << 63)
    return Shown(value, value.to_bytes(8, "big", signed=True), max(cell["timestamp"] for cell in cells), None)
