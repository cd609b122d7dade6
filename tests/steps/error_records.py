"""Records that could not be decoded, in a table in memory, and ``out_of_sequence`` in a few lines."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ringsync.changes.columns import logged_tables
from ringsync.config import Config
from ringsync.formats.commitlog.reader import ERROR_ROWS, read_log
from ringsync.ledger.error_tries import mark_taken
from ringsync.ledger.passes import LATE, Pass, digests_key, encode_digests, get_pass, pass_numbers, put_pass
from ringsync.ledger.staging import decode_rows
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import TableSchema
from ringsync.state.processor_error import ErrorKey, ErrorRow, ErrorTable
from ringsync.status import LATE_ROWS
from ringsync.storage.local import LocalStore
from ringsync.storage.port import ObjectStore
from tests.commitlogs.fixtures import DATA

FOLDER = DATA / "5.0-v7-plain"
TABLES = tuple(parse_schema((FOLDER / "schema.cql").read_text(), "schema.cql").by_id().values())
CONFIG = Config.model_validate(
    {"server_name": "test", "cassandra": {"contact_points": ["127.0.0.1"]}, "store": {"url": "/nowhere"}}
)
NODE = "6f1c"
NOW_S = 1_790_000_000.0


@lru_cache
def withheld(*tables: TableSchema) -> pa.RecordBatch:
    """The records of a real segment that name only these tables, as they are kept if nobody knows these."""
    ids = {bytes.fromhex(table.table_id) for table in tables}
    source = next(iter(sorted(FOLDER.glob("*.log.xz"))))
    name = source.name.removesuffix(".xz")
    others = [table for table in TABLES if bytes.fromhex(table.table_id) not in ids]
    found = [
        {**record, "file": name}
        for batch in read_log(lzma.decompress(source.read_bytes()), name, logged_tables(others)).batches
        for record in batch.undecoded.to_pylist()
        if record["table_id"] in ids and record["raw"][:1] == b"\x01"
    ]
    return pa.RecordBatch.from_pylist(found, ERROR_ROWS)


def of_several_tables() -> pa.RecordBatch:
    """The records of a real segment that have rows of two tables or more, as they are kept if nobody knows any."""
    source = sorted(FOLDER.glob("*.log.xz"))[1]
    name, data = source.name.removesuffix(".xz"), lzma.decompress(source.read_bytes())
    own: dict[int, set[bytes]] = {}
    for batch in read_log(data, name, logged_tables(TABLES)).batches:
        for row in batch.rows.select(["position", "table_id"]).to_pylist():
            own.setdefault(row["position"], set()).add(row["table_id"])
    found = [
        {**record, "file": name}
        for batch in read_log(data, name, logged_tables([])).batches
        for record in batch.undecoded.to_pylist()
        if len(own.get(record["position"], ())) > 1
    ]
    return pa.RecordBatch.from_pylist(found, ERROR_ROWS)


class Rows(ErrorTable):
    """The table ``processor_error``, in memory. A kill may come before each of its effects."""

    def __init__(self, store: ObjectStore, lives: Callable[[], object] = lambda: None) -> None:
        self._store = store
        self._most_per_hour = None
        self.kept: dict[ErrorKey, ErrorRow] = {}
        self.lives = lives

    def _write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        for node, file, position, length, reason, table_id, raw, key in rows:
            self.lives()
            of_row = ErrorKey(node, file, position)
            self.kept[of_row] = ErrorRow(of_row, length, reason, table_id, raw, key)

    def files(self, node: str | None = None, file: str | None = None) -> list[tuple[str, str]]:
        found = {(key.node, key.file) for key in self.kept}
        return sorted(one for one in found if node in (None, one[0]) and file in (None, one[1]))

    def rows(self, node: str, file: str, *, with_bytes: bool = False) -> Iterator[ErrorRow]:
        of_file = [row for key, row in sorted(self.kept.items()) if (key.node, key.file) == (node, file)]
        yield from of_file if with_bytes else (replace(row, raw=None) for row in of_file)

    def row(self, key: ErrorKey) -> ErrorRow | None:
        return self.kept.get(key)

    def remove(self, keys: Iterable[ErrorKey]) -> None:
        for key in keys:
            self.lives()
            self.kept.pop(key, None)


def digests(store: ObjectStore, table_id: str) -> list[bytes]:
    """What was published of a table, each as often as it was."""
    found: list[bytes] = []
    for number in pass_numbers(store, table_id):
        for keys in get_pass(store, table_id, number).digests.values():
            for data in map(store.get, keys):
                found += [data[at : at + 16] for at in range(0, len(data), 16)]
    return found


def publish_late(folder: Path | ObjectStore, most: int | None = None) -> int:
    """Publish files of late rows as ``out_of_sequence`` does: without what was published before. How many rows.

    :param most: so many files at most
    """
    store = LocalStore(folder) if isinstance(folder, Path) else folder
    count = 0
    for stat in store.list(LATE_ROWS)[:most]:
        table_id = stat.key.split("/")[2]
        known = set(digests(store, table_id))
        rows = decode_rows(store.get(stat.key))
        new = sorted({digest for digest in rows["digest"].to_pylist() if digest not in known})
        number = max(pass_numbers(store, table_id), default=0) + 1
        key = digests_key(table_id, LATE, number, "a")
        store.put(key, encode_digests(pa.array(new, pa.binary(16))))
        assert put_pass(store, Pass(number, "changes", table_id, int(NOW_S * 1000), digests={LATE: (key,)}))
        mark_taken(store, stat.key, "published")
        store.delete(stat.key)
        count += len(new)
    return count
