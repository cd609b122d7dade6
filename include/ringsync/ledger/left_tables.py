"""Tables that were followed, and are not now though they are there: ``staging/left/<table id>.json``.

The object says since when. It is put when a plan is made without the table, and removed when the table is planned
again, once the gap is noted (:mod:`ringsync.ledger.gaps`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from ringsync.storage.port import AlreadyExistsError, ChecksumError, ObjectStore, get_json, list_named

_FOLDER = "staging/left/"


@dataclass(frozen=True)
class LeftTable:
    """A table that is not followed any more.

    :ivar since_ms: what was written until then was captured, ms since the epoch; 0: unknown
    :ivar has_cdc: whether it had cdc when it left: then the configuration left it out
    """

    since_ms: int
    has_cdc: bool


def left_tables(store: ObjectStore) -> dict[str, LeftTable | None]:
    """Read the tables that have left, by id; None: the object is damaged, and nobody knows since when."""
    found: dict[str, LeftTable | None] = {}
    for stat in list_named(store, _FOLDER, r"[0-9a-f]{32}\.json"):
        table_id = stat.key.removeprefix(_FOLDER).removesuffix(".json")
        try:
            if (document := get_json(store, stat.key)) is not None:
                found[table_id] = LeftTable(int(document["since_ms"]), bool(document["has_cdc"]))
        except (ChecksumError, ValueError, TypeError, KeyError):
            found[table_id] = None
    return found


def note_left(store: ObjectStore, table_id: str, left: LeftTable) -> None:
    """Record that a table is not followed any more. What was recorded first stays."""
    with suppress(AlreadyExistsError):
        store.put(f"{_FOLDER}{table_id}.json", json.dumps(asdict(left)).encode(), if_absent=True)


def forget_left(store: ObjectStore, table_id: str) -> None:
    """Record that a table is followed again, after its gap was noted, or that it is gone."""
    store.delete(f"{_FOLDER}{table_id}.json")
