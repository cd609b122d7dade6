"""The message that README.md shows is what becomes of an UPDATE, from the bytes of a commit log on."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.changes.columns import logged_tables
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.after import rows_after
from ringsync.images.from_changes import row_images_of
from ringsync.images.queries import queries
from ringsync.schema.from_cql import parse_schema
from ringsync.streams.change_messages import change_messages
from ringsync.streams.messages import envelope_schema, key_schema
from tests.commitlog_model import cql_schema
from tests.commitlog_model.write import UpdateWriter, mutation, record, segment
from tests.reconciled import merged
from tests.streams.test_messages import read

README = Path(__file__).parents[2] / "README.md"
SEGMENT = 1790845200000
INSERTED, UPDATED = 1790845200123456, 1790845260123456
SCHEMA = """
CREATE TABLE shop.orders (customer text, line int, state text, total int, PRIMARY KEY (customer, line))
    WITH ID = 7c2fd0e0-5c92-11f0-8de9-f3bd2ad0d1ff AND cdc = true;
"""


def cell(column: str, raw: bytes, timestamp: int) -> dict[str, Any]:
    return {"column": column, "raw": raw.hex(), "timestamp": timestamp}


def logged() -> bytes:
    """A segment with an INSERT of ``('Ann', 1, 'new', 1250)``, and an UPDATE of its state."""
    (table,) = cql_schema.parse_schema(SCHEMA).values()
    row = {"kind": "row", "raw_clustering": ["00000001"]}
    insert = row | {"liveness": {"timestamp": INSERTED}}
    insert |= {"cells": [cell("state", b"new", INSERTED), cell("total", (1250).to_bytes(4, "big"), INSERTED)]}
    update = row | {"cells": [cell("state", b"paid", UPDATED)]}
    writer = UpdateWriter(table, Random(1))
    return segment(7, SEGMENT, [b"".join(record(mutation([writer.write(b"Ann", [one])])) for one in (insert, update))])


def test_the_message_in_the_readme() -> None:
    (table,) = parse_schema(SCHEMA, "schema.cql").tables
    (found,) = read_log(logged(), f"CommitLog-7-{SEGMENT}.log", logged_tables([table])).batches
    inserted, updated = (merged(found.rows.slice(place, 1), table) for place in (0, 1))
    before = row_images_of(inserted, table, "error")
    after = rows_after(before, updated, table, live_known_from_us=0, misfits="error").images
    told: dict[str, Any] = {"hostnames": pa.array(["10.0.0.7"]), "processed_at_ms": 1790845321000}
    told |= {"schema_version": 1, "queries": queries(updated, table)}
    messages = change_messages(updated, after, np.array([True]), table, "demo", "exact", **told)
    (key,) = read(key_schema(table, "demo", "exact"), messages.keys)
    (value,) = read(envelope_schema(table, "demo", "exact"), messages.values)
    assert {"key": key, "value": value} == json.loads(README.read_text().split("```json")[1].split("```")[0])
