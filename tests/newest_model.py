"""What a consumer makes of a stream that takes the newest (docs/messages.md), in plain Python.

Read in order: ``after`` takes the place of the row, null removes it, the deletion of a partition or a range removes the
rows that it covers. No time is compared with another; only what has expired is left out, as ``cells`` says when.
Static columns belong to the partition. The form of keys and values is that of :mod:`tests.oracle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ringsync.schema.table import TableSchema
from tests.oracle import Rows
from tests.stream_model import Message, Raw, StreamModel, plain

Values = dict[str, Any]
NewestRows = dict[tuple[Any, ...], Values]
"""Values of the columns by key; without times."""


@dataclass
class _Row:
    """A row, or the static columns of a partition, as the newest message has it.

    :ivar expiries: s by column, of its cells; None: never, or not known
    :ivar live_until: s, of the row itself; None: for ever, or not known
    """

    values: Values
    expiries: dict[str, list[int | None]]
    live_until: int | None = None


@dataclass
class _Partition:
    static: _Row = field(default_factory=lambda: _Row({}, {}))
    rows: dict[tuple[Any, ...], _Row] = field(default_factory=dict)


class NewestModel:
    """The rows of a table, as a stream's messages leave them whose ``after`` is the whole row."""

    def __init__(self, table: TableSchema) -> None:
        self.table = table
        self._forms = StreamModel(table, True)
        self._names = self._forms.names
        self._partitions: dict[tuple[Any, ...], _Partition] = {}

    def apply_all(self, messages: Iterable[Message]) -> NewestModel:
        """Apply messages ``{"key", "value"}``, in the order of the stream."""
        for message in messages:
            self.apply(message["key"], message["value"])
        return self

    def apply(self, key: Message, value: Message) -> None:
        """Apply one message."""
        partition = self._partitions.setdefault(self._forms._key(key, self.table.partition_key), _Partition())
        clustering = self._forms._key(key, self.table.clustering)
        after = value["after"]
        if value.get("range"):
            for place in [one for one in partition.rows if self._forms._covers(value["range"], one)]:
                del partition.rows[place]
        elif self.table.clustering and clustering[0] is None:
            if after is not None:
                partition.static = self._row(value, "static")
            else:
                partition.static = _Row({}, {})
                if not self._of_static_cells(value):
                    partition.rows.clear()
        elif after is None:
            partition.rows.pop(clustering, None)
        else:
            partition.rows[clustering] = self._row(value, "regular")
            partition.static = self._row(value, "static")

    def _of_static_cells(self, value: Message) -> bool:
        """Whether a message without clustering and ``after`` is of static cells, not the deletion of the partition."""
        times = value["cells"]["_row"]
        return times is None or times["deleted_at"] is None or self._forms._names_cells(value)

    def _row(self, value: Message, kind: str) -> _Row:
        values, expiries = {}, {}
        for column in self.table.of_kind(kind):  # type: ignore[arg-type]
            name = self._names[column.name]
            if name not in value["cells"]:
                continue  # it was made when the table did not have the column
            cell = value["cells"][name] or {}
            held = Raw(cell["raw"]) if cell.get("raw") is not None else plain(value["after"][name], column.type)
            if held is None:
                continue
            values[column.name] = held
            elements = [one for one in cell.get("elements") or () if one["writetime"] is not None]
            expiries[column.name] = [one["expires_at"] for one in elements or ([cell] if "expires_at" in cell else [])]
        times = value["cells"]["_row"] or {}
        return _Row(values, expiries, times.get("expires_at"))

    def rows(self, now: int) -> NewestRows:
        """Every row that a SELECT would show.

        :param now: s; what has expired by then is not there
        """
        found: NewestRows = {}
        for key, partition in self._partitions.items():
            static = _unexpired(partition.static, now)
            alive = 0
            for clustering, row in partition.rows.items():
                values = _unexpired(row, now)
                expired = len(values) < len(row.values) or (row.live_until is not None and row.live_until <= now)
                if values or not expired:
                    alive += 1
                    found[key + clustering] = static | values
            if static and not alive:
                found[key + (None,) * len(self.table.clustering)] = static
        return found


def _unexpired(row: _Row, now: int) -> Values:
    """The values, without those whose cells have all expired."""
    return {
        name: value
        for name, value in row.values.items()
        if not (ends := row.expiries[name]) or any(end is None or end > now for end in ends)
    }


def newest_differences(source: Rows, newest: NewestRows) -> list[str]:
    """What a consumer that takes the newest has otherwise than SELECT shows, in words."""
    shown = {key: {name: cell[0] for name, cell in cells.items()} for key, cells in source.items()}
    found = [f"missing: {key}" for key in shown.keys() - newest.keys()]
    found += [f"not in source: {key}" for key in newest.keys() - shown.keys()]
    for key in shown.keys() & newest.keys():
        for name in shown[key].keys() | newest[key].keys():
            if repr(shown[key].get(name)) != repr(newest[key].get(name)):
                found.append(f"{key} {name}: source {shown[key].get(name)}, newest {newest[key].get(name)}")
    return found
