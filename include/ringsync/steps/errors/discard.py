"""``cdcservice errors discard``: rows of ``processor_error`` are given up, and what they held is written down first."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringsync.state.processor_error import ErrorRow, ErrorTable
from ringsync.storage.port import ObjectStore

ROWS_OF_AN_OBJECT, BYTES_OF_AN_OBJECT = 500, 16 * 2**20
"""About how much one audit object holds at most."""


@dataclass(frozen=True)
class Discarded:
    """The result.

    :ivar records: number of records that the rows stood for
    :ivar objects: keys of the audit objects
    """

    records: int
    objects: tuple[str, ...]


def discard(
    store: ObjectStore,
    errors: ErrorTable,
    rows: Iterable[ErrorRow],
    who: str,
    reason: str,
    clock: Callable[[], float] = time.time,
) -> Discarded:
    """Delete rows, after an object ``errors/discarded/<time>-<random>.json`` with all that they held is there.

    Bytes that lie in the object store stay there; the audit object names them.

    :param rows: rows, with their bytes
    :param who: user of the operating system
    :param reason: why the rows are given up
    :raises ValueError: the reason is empty
    """
    if not reason.strip():
        raise ValueError("say why, with --reason: it is kept with what is discarded")
    keys, records = [], 0
    batch: list[ErrorRow] = []
    size = 0

    def flush() -> None:
        moment = datetime.fromtimestamp(clock(), UTC)
        key = f"errors/discarded/{moment:%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}.json"
        document = {
            **{"who": who, "at": moment.isoformat(), "reason": reason},
            "rows": [_described(row) for row in batch],
        }
        store.put(key, json.dumps(document).encode(), if_absent=True)
        errors.remove([row.key for row in batch])
        keys.append(key)

    for row in rows:
        batch.append(row)
        records, size = records + row.records, size + len(row.raw or b"")
        if len(batch) >= ROWS_OF_AN_OBJECT or size >= BYTES_OF_AN_OBJECT:
            flush()
            batch, size = [], 0
    if batch:
        flush()
    return Discarded(records, tuple(keys))


def _described(row: ErrorRow) -> dict[str, Any]:
    return {
        **{"node": row.key.node, "file": row.key.file, "position": row.key.position, "length": row.length},
        **{"reason": row.reason, "table_id": row.table_id.hex() if row.table_id else None, "records": row.records},
        "raw": base64.b64encode(row.raw).decode() if row.raw is not None else None,
        "raw_object": row.raw_object,
    }
