"""Keys in several spellings, as a real server takes and shows them: one row, one element, whatever its bytes."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ringsync.changes.columns import logged_tables
from ringsync.cluster.cluster import read_ring
from ringsync.cluster.schema import read_table
from ringsync.cluster.session import close_all, connect
from ringsync.formats.commitlog.reader import read_log
from ringsync.images.after import rows_after
from ringsync.images.from_changes import row_images_of
from ringsync.ring.ranks import ranked
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import read_rows
from ringsync.sources.scan.scan import scan_session
from servers.cassandra import CassandraNode
from tests.oracle import differences, image_rows, source_rows
from tests.reconciled import merged
from tests.sources.clusters import settings_of
from tests.sources.row_key_batches import Key, batch_of
from tests.sources.scans import UNLIMITED

pytestmark = pytest.mark.server

SYNC_SECONDS = 30
FIRST = """
INSERT INTO {name} (p, c, t, s, m, v) VALUES (1, 1.0, (2.0, 'a'), {{3.0, 7}}, {{4.0: 1}}, 1) USING TIMESTAMP 1000
INSERT INTO {name} (p, c, t, s, m, v) VALUES (2, 1.000, (2, 'a'), {{3.0}}, {{4.0: 1}}, 1) USING TIMESTAMP 1000
INSERT INTO {name} (p, c, t, v) VALUES (2, 5.0, (6.0, 'b'), 1) USING TIMESTAMP 1000
INSERT INTO {name} (p, c, t, v) VALUES (2, 5.00, (6.5, 'b'), 1) USING TIMESTAMP 1000
INSERT INTO {name} (p, c, t, v) VALUES (3, 100, (0, 'b'), 1) USING TIMESTAMP 1000
"""
SECOND = """
UPDATE {name} USING TIMESTAMP 2000 SET w = 2, s = s + {{3.00}}, m[4.00] = 5 WHERE p = 1 AND c = 1.00 AND t = (2.00, 'a')
UPDATE {name} USING TIMESTAMP 2000 SET s = s - {{3.00}} WHERE p = 2 AND c = 1.0 AND t = (2.0, 'a')
DELETE m[4.000] FROM {name} USING TIMESTAMP 2000 WHERE p = 2 AND c = 1.0 AND t = (2.0, 'a')
DELETE FROM {name} USING TIMESTAMP 2000 WHERE p = 2 AND c = 5.000 AND t > (6.00, 'a') AND t <= (6.00, 'b')
DELETE FROM {name} USING TIMESTAMP 2000 WHERE p = 3 AND c = 1E2 AND t = (0.00, 'b')
"""


@pytest.fixture(scope="module")
def table(session: Any, keyspace: str) -> TableSchema:
    session.execute(
        f"CREATE TABLE {keyspace}.spelled (p int, c decimal, t tuple<decimal, text>, s set<decimal>, "
        "m map<decimal, int>, v int, w int, PRIMARY KEY (p, c, t)) WITH cdc = true"
    )
    return read_table(session, keyspace, "spelled")


def logged(node: CassandraNode, table: TableSchema, count: int) -> pa.RecordBatch:
    """Change rows of the table as its node has logged them, once there are so many."""
    deadline = time.monotonic() + SYNC_SECONDS
    while time.monotonic() < deadline:
        found = []
        for index in sorted(node.cdc_raw.glob("*_cdc.idx")):
            log = index.with_name(index.name.replace("_cdc.idx", ".log"))
            batches = read_log(log.read_bytes(), log.name, logged_tables([table])).batches
            found += [batch.rows for batch in batches]
        if found:
            rows = pa.concat_batches(found)
            rows = rows.filter(pc.equal(rows["table_id"], pa.scalar(bytes.fromhex(table.table_id), pa.binary(16))))
            if len(rows) >= count:
                return rows
        time.sleep(0.5)
    raise AssertionError(f"the commit log did not have {count} rows within {SYNC_SECONDS} s")


def test_what_the_log_says_and_what_is_looked_up_is_what_select_shows(
    cassandra: CassandraNode, session: Any, table: TableSchema
) -> None:
    first, second = (
        [one.format(name=table.full_name) for one in statements.strip().split("\n")] for statements in (FIRST, SECOND)
    )
    for statement in first:
        session.execute(statement)
    before = merged(logged(cassandra, table, len(first)), table)
    for statement in second:
        session.execute(statement)
    now = int(time.time())
    source = source_rows(session, table, now)
    # As they were written first; elements as they were written last.
    assert [tuple(row) for row in session.execute(f"SELECT c, t FROM {table.full_name} WHERE p = 1")]
    assert sorted(source) == [(1, "1", ("2", "a")), (2, "1", ("2", "a")), (2, "5", ("6.5", "b"))]

    changes = logged(cassandra, table, len(first) + len(second))
    images = row_images_of(merged(changes, table), table, "raw")
    alive = images.filter(pc.greater(pc.struct_field(images["_row"], "live"), 0))
    shown = image_rows(pa.Table.from_batches([alive]), table)
    assert differences(source, shown) == []

    # The images of before, and what came later under other spellings.
    written_later = np.asarray(changes["write_time"]) == 2000
    later = merged(changes.filter(pa.array(written_later)), table)
    after = rows_after(row_images_of(before, table, "raw"), later, table, live_known_from_us=0, misfits="raw")
    assert not after.unknown.any()
    assert after.images.num_rows == 4
    settings = settings_of(cassandra)
    try:
        keys = [
            Key((p,), (struct.pack(">i", p),), (decimal_bytes(c, 3), tuple_bytes(t, 3, text)))
            for p, c, t, text in (
                (1, 1000, 2000, b"a"),
                (2, 1000, 2000, b"a"),
                (3, 100000, 0, b"b"),
                (2, 5000, 6500, b"b"),
            )
        ]
        keys.append(Key((1,), (struct.pack(">i", 1),), (decimal_bytes(1, 0), tuple_bytes(2, 0, b"a"))))
        found = read_rows(
            scan_session(settings, now),
            table,
            batch_of(keys),
            ranked(read_ring(connect(settings), table.keyspace)),
            settings,
            UNLIMITED,
            element_times=True,
            misfits="raw",
        )
    finally:
        close_all()
    assert not found.unread
    assert found.places.tolist() == [0, 1, 3]
    assert differences(source, image_rows(pa.Table.from_batches([found.images]), table)) == []


def decimal_bytes(unscaled: int, scale: int) -> bytes:
    return struct.pack(">iq", scale, unscaled)


def tuple_bytes(unscaled: int, scale: int, text: bytes) -> bytes:
    number = decimal_bytes(unscaled, scale)
    return struct.pack(">i", len(number)) + number + struct.pack(">i", len(text)) + text
