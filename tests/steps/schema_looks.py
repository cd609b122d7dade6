"""A schema updater whose looks at the cluster are given: no server is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringsync.cluster.node import NodeSchema
from ringsync.cluster.whole_schema import Reading
from ringsync.schema.description import from_description, resolve_user_types
from ringsync.schema.table import TableSchema, UnreadableTable
from ringsync.schema.whole import Keyspace, WholeSchema
from ringsync.steps import schema_update
from ringsync.steps.schema_update import SchemaUpdater
from ringsync.storage.local import LocalStore
from ringsync.streams.files import FileStream

KEYSPACES = {"k": Keyspace("k", (("class", "SimpleStrategy"), ("replication_factor", "1")))}
Types = Mapping[str, list[list[str]]]


def table(
    name: str,
    table_id: str,
    columns: str,
    *,
    clustering: str = "",
    key: str = "id int",
    dropped: Sequence[tuple[str, str, int]] = (),
    types: Types | None = None,
    since: int = 0,
) -> TableSchema:
    """A table of the keyspace ``k``.

    :param table_id: the last digits of the id, of which the first one is repeated
    :param columns: regular columns with their types, separated by ``;``; ``clustering`` and ``key`` likewise
    :param since: time of its last change, µs
    """
    kinds = {"partition_key": key, "clustering": clustering, "regular": columns}
    described = [
        {"name": part.split()[0], "kind": kind, "position": i, "type": part.split(maxsplit=1)[1], "descending": False}
        for kind, text in kinds.items()
        for i, part in enumerate(text.split("; ") if text else [])
    ]
    return from_description(
        {
            "keyspace": "k",
            "table": name,
            "table_id": table_id.rjust(32, table_id[0]),
            "columns": described,
            "user_types": types or {},
            "since_us": since,
            "dropped": [{"name": n, "kind": "regular", "type": t, "dropped_at": at} for n, t, at in dropped],
        }
    )


class Looks:
    """One updater, and what it finds."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = LocalStore(path)
        self.count = 0
        self.reading: Any = None
        monkeypatch.setattr(schema_update, "node_schema", lambda node: self.reading.at)
        monkeypatch.setattr(schema_update, "read_whole_schema", lambda node, own: self.reading)
        self.begin()

    def begin(self) -> None:
        """Begin another run."""
        self.updater = SchemaUpdater(self.store, "srv", lambda: None)  # type: ignore[arg-type, return-value]

    def look(
        self, *tables: TableSchema, types: Types | None = None, unreadable: Sequence[UnreadableTable] = ()
    ) -> list[tuple[str, dict[str, int] | None]]:
        """Look at a schema; return the messages that come of it: statement and versions of each."""
        self.count += 1
        before = len(self.messages())
        found = {"k": resolve_user_types("k", types)} if types else {}
        schema = WholeSchema(KEYSPACES, found, {("k", one.name): one for one in tables})
        self.reading = Reading(NodeSchema(str(self.count), "n1", {}), schema, (), tuple(unreadable), {})
        self.updater.cycle()
        return self.messages()[before:]

    def messages(self) -> list[tuple[str, dict[str, int] | None]]:
        """All messages."""
        stream = FileStream(self.store, "srv")
        found = [message["value"] for folder in stream.folders() for message in stream.read(folder)]
        return [(value["ddl"], value["source"]["tables"]) for value in found]


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(tmp_path, monkeypatch)
