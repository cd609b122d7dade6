"""The Arrow schema of change rows. A change row is one row-level piece of a mutation.

Values, keys and paths are the bytes that Cassandra wrote. ``clustering`` and ``range_end`` are an int32 count, then for
each value an int32 length (-1 null, 0 empty) and the bytes, all little-endian. For a range a last byte follows: whether
the bound belongs to the range. The digest covers exactly these bytes. (An encoding that sorts like the clustering order
could not give every value back: 1.0 and 1.00 are one clustering.)
"""

from __future__ import annotations

import pyarrow as pa

ROW, STATIC, PARTITION_DELETION, RANGE_DELETION = range(4)
DELETIONS = (PARTITION_DELETION, RANGE_DELETION)
OF_PARTITIONS = (STATIC, *DELETIONS)
"""Kinds of changes that may touch any row of a partition."""
KINDS = ("row", "static", "partition_deletion", "range_deletion")
"""Names of a row's ``kind``, by number."""

LIVE, EXPIRING, TOMBSTONE = 1, 2, 3
"""Numbers of a cell's ``kind``."""

NEVER = -(2**63)
"""Timestamp, µs: there is no deletion, or no liveness (C: DeletionTime.LIVE, LivenessInfo.NO_TIMESTAMP)."""
NO_TTL = 0
"""TTL of a cell or liveness that does not expire (C: LivenessInfo.NO_TTL)."""
UNKNOWN_TTL = -1
"""TTL of a cell, or of a row's liveness, whose write time is unknown: it is ``timestamp`` or earlier."""
NO_EXPIRY = -1
"""Expiry of a cell or liveness that does not expire. ``_x.<column>.e`` of an image has it if the row's common value is
an expiry."""

LIVENESS = pa.struct([("timestamp", pa.int64()), ("ttl", pa.int32()), ("expires_at", pa.int64())])
"""Liveness of the row itself, which INSERT writes: µs, s, s. Without a TTL the last two are null."""
DELETION = pa.struct([("timestamp", pa.int64()), ("local_deletion_time", pa.int64())])
"""Deletion of a row, a partition or a range: µs, s."""
CELL = pa.struct(
    [
        ("column", pa.int32()),
        ("path", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.int64()),
        ("ttl", pa.int32()),
        ("local_deletion_time", pa.int64()),
        ("kind", pa.int8()),
    ]
)
"""``column``: see :func:`ringsync.changes.columns.columns_of`; ``path``: null for a single-cell column; ``value``: null
for a tombstone; ``local_deletion_time``: s; for an expiring cell the time when it expires."""
COMPLEX_DELETION = pa.struct([("column", pa.int32()), ("timestamp", pa.int64()), ("local_deletion_time", pa.int64())])

CHANGE_ROWS = pa.schema(
    [
        ("table_id", pa.binary(16)),
        ("schema_version", pa.int32()),
        ("token", pa.int64()),
        ("partition_key", pa.binary()),
        ("kind", pa.int8()),
        ("clustering", pa.binary()),
        ("range_end", pa.binary()),
        ("write_time", pa.int64()),
        ("liveness", LIVENESS),
        ("deletion", DELETION),
        ("cells", pa.list_(CELL)),
        ("complex_deletions", pa.list_(COMPLEX_DELETION)),
        ("digest", pa.binary(16)),
        ("file", pa.string()),
        ("position", pa.int64()),
    ]
)
"""``clustering``: null for static rows and partition deletions; ``range_end``: null except for ranges; ``write_time``:
the greatest timestamp in the row, µs; ``digest``: see :mod:`ringsync.changes.digest`; ``position``: logical position
after the record in ``file``."""
