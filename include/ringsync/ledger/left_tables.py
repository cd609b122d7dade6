"""Tables that were followed, and are not now though they are there: ``staging/left/<table id>.json``.

The object says since when. It is put when a plan is made without the table, and removed when the table is planned
again, once the gap is noted (:mod:`ringsync.ledger.gaps`).
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, list_named

_FOLDER = "staging/left/"


@dataclass(frozen=True)
class LeftTable:
    """A table that is not followed any more.

    :ivar since_ms: what was written until then was captured, ms since the epoch; 0: unknown
    :ivar has_cdc: whether it had cdc when it left: then the configuration left it out
    :ivar noted_ms: when that was noted, ms since the epoch; 0: it was not yet
    """

    since_ms: int
    has_cdc: bool
    noted_ms: int = field(default=0, compare=False)


def left_tables(store: ObjectStore) -> set[str]:
    """List the ids of the tables that have left: thousands, after all were left."""
    listed = list_named(store, _FOLDER, r"[0-9a-f]{32}\.json")
    return {stat.key.removeprefix(_FOLDER).removesuffix(".json") for stat in listed}


def when_left(store: ObjectStore, table_id: str) -> LeftTable | None:
    """Read since when a table is not followed; None: the object is damaged, and nobody knows.

    :raises NotFoundError: it is followed again
    """
    try:
        document = json.loads(store.get(f"{_FOLDER}{table_id}.json"))
        return LeftTable(int(document["since_ms"]), bool(document["has_cdc"]), int(document["noted_ms"]))
    except (ChecksumError, ValueError, TypeError, KeyError):
        return None


def note_left(store: ObjectStore, table_id: str, left: LeftTable) -> None:
    """Record that a table is not followed any more. What was recorded first stays."""
    with suppress(AlreadyExistsError):
        noted = {**asdict(left), "noted_ms": int(time.time() * 1000)}
        store.put(f"{_FOLDER}{table_id}.json", json.dumps(noted).encode(), if_absent=True)


def forget_left(store: ObjectStore, table_id: str) -> None:
    """Record that a table is followed again, after its gap was noted, or that it is gone."""
    store.delete(f"{_FOLDER}{table_id}.json")
