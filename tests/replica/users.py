"""A replica in whose tables somebody does something, and what ringsync does with it afterwards."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from ringsync.images.live import shown_rows
from ringsync.images.schema import row_image_schema
from ringsync.replica.base import MERGE
from ringsync.replica.changes import forget_merged
from ringsync.replica.data_files import DataFileWriter
from ringsync.replica.delta_log import append, read_snapshot, remove
from ringsync.replica.evolve import follow_schema
from ringsync.replica.folders import base_folder
from ringsync.replica.lookup import images_between
from ringsync.schema.table import TableSchema
from ringsync.storage.local import LocalStore
from tests.replica.bases import NOW_MS, replica_uri, state_of, write_base, write_pass
from tests.replica.test_evolve import ALL, INT, V, image, rows_of, table

FIRST, SECOND = table(V), table(V, ("w", "regular", INT))
"""The table, and after ``ALTER TABLE … ADD w int``."""

BASE_ROWS = 20
EVERYTHING = range(-1, 1000)


@dataclass
class Used:
    """A replica and what its rows must be.

    :ivar part: ``base`` or ``changes``: where somebody does something
    :ivar wrong: ids of rows that somebody has changed, until they are repaired
    """

    root: Path
    part: str
    version: TableSchema = FIRST
    rows: dict[int, str] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)
    passes: int = 0

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.root)

    @property
    def uri(self) -> str:
        """The Delta table that somebody uses."""
        return f"{replica_uri(self.root, self.version)}/{self.part}"

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(self.uri)

    def snapshot(self, part: str = "") -> Any:
        return read_snapshot(self.store, f"replica/shop/orders/{part or self.part}")

    def begin(self) -> Used:
        """Bootstrap it twice, and add two passes."""
        self.bootstrap()
        self.add_pass()
        self.bootstrap()
        self.add_pass()
        self.add_pass()
        return self

    def bootstrap(self) -> None:
        self.wrong.clear()
        self.rows = dict.fromkeys(range(BASE_ROWS), f"base {self.passes}")
        write_base(
            self.root, self.version, self.images(self.rows), rows_per_file=BASE_ROWS // 2, from_pass=self.passes + 1
        )

    def add_pass(self) -> None:
        """Change three rows, one of them in each pass, and add one."""
        number = self.passes + 1
        new = dict.fromkeys((number % 7, 7, 10 + number, 100 + number), f"pass {number}")
        write_pass(self.root, self.version, self.images(new), number)
        self.passes = number
        self.rows |= new
        self.wrong -= set(new)

    def images(self, rows: dict[int, str]) -> Any:
        return rows_of(self.version, *(image(self.version, n, id=n, line=n, v=v) for n, v in sorted(rows.items())))

    def merge(self) -> None:
        """Merge as ``replica_merge`` does, but instead of Spark's MERGE write the base again."""
        seen, folder = state_of(self.root, self.version), base_folder("shop", "orders")
        base, writer = self.snapshot("base"), DataFileWriter(row_image_schema(self.version))
        rows = pa.Table.from_batches(images_between(seen, self.version, *ALL)).sort_by("token").combine_chunks()
        for batch in rows.to_batches():
            writer.add(batch)
        file, data = writer.finish(f"part-{secrets.token_hex(8)}.zstd.parquet", NOW_MS)
        self.store.put(f"{folder}/{file.name}", data)
        append(self.store, folder, base, [file], transactions={MERGE: base.version + 1}, now_ms=NOW_MS)
        remove(self.store, folder, self.snapshot("base"), base.files, now_ms=NOW_MS)
        forget_merged(self.store, self.version, seen, NOW_MS)
        self.check()

    def alter(self) -> None:
        """Follow the source's ``ALTER TABLE``."""
        follow_schema(self.store, SECOND, lambda: [FIRST, SECOND], NOW_MS)
        self.version = SECOND

    def check(self) -> None:
        """All rows are right but those that somebody has changed."""
        images = images_between(state_of(self.root, self.version), self.version, *ALL)
        batches = shown_rows(images, self.version, NOW_MS // 1000)
        found = [(row["id"], row["v"]) for batch in batches for row in batch.select(["id", "v"]).to_pylist()]
        assert sorted(row for row in found if row[0] not in self.wrong) == sorted(
            row for row in self.rows.items() if row[0] not in self.wrong
        )
        for part in ("base", "changes"):
            ours = set(row_image_schema(self.version).names)
            assert ours <= set(DeltaTable(f"{replica_uri(self.root, FIRST)}/{part}").schema().to_arrow().names)

    def go_on(self) -> None:
        """A pass, an ALTER TABLE, a pass, a new bootstrap, a pass: without Spark."""
        self.add_pass()
        self.check()
        self.alter()
        self.add_pass()
        self.check()
        self.bootstrap()
        self.add_pass()
        assert not self.wrong
        self.check()


def theirs(used: Used) -> dict[str, Any]:
    """What others have given a table: properties, name, comments, features. It must outlive all that ringsync does."""
    snapshot = used.snapshot()
    columns = json.loads(snapshot.metadata["schemaString"])["fields"]
    kept = {name: value for name, value in snapshot.configuration.items() if not name.startswith("ringsync.")}
    return {
        "properties": kept,
        "named": {name: snapshot.metadata.get(name) for name in ("id", "name", "description")},
        "columns": {column["name"]: column["metadata"] for column in columns if column["metadata"]},
        "features": sorted(snapshot.protocol.get("writerFeatures") or ()),
    }


def lacks(before: Any, after: Any) -> list[str]:
    """What is there before and not after."""
    if isinstance(before, dict):
        return [f"{key}: {rest}" for key, value in before.items() for rest in lacks(value, after.get(key, {}))]
    if isinstance(before, list):
        return sorted(set(before) - set(after or ()))
    return [] if before == after else [f"{before!r} is {after!r}"]


def changed(used: Used, ids: Collection[int]) -> None:
    """Somebody has changed these rows in a table."""
    used.wrong |= set(ids)
