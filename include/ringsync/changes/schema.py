"""Change rows: what was written, a row-level piece of a mutation each, as Arrow.

Values, keys and paths are the bytes that Cassandra wrote. ``clustering`` and ``range_end`` are an int32 count and each
value as int32 length (-1 null, 0 empty) and bytes, all little-endian, and for a range a last byte that says whether
the bound belongs to it; exactly so they enter the digest. (An encoding whose order is the clustering order could not
give every value back: 1.0 and 1.00 are one clustering.)
"""

from __future__ import annotations

import pyarrow as pa

ROW, STATIC, PARTITION_DELETION, RANGE_DELETION = range(4)
KINDS = ("row", "static", "partition_deletion", "range_deletion")
"""Names of ``kind``."""

LIVE, EXPIRING, TOMBSTONE = 1, 2, 3
"""``kind`` of a cell."""

LIVENESS = pa.struct([("timestamp", pa.int64()), ("ttl", pa.int32()), ("expires_at", pa.int64())])
"""Of the row itself, as INSERT makes it: µs, s, s; no TTL: null, null."""
DELETION = pa.struct([("timestamp", pa.int64()), ("local_deletion_time", pa.int64())])
"""Of a row, a partition or a range: µs, s."""
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
"""``column``: see :func:`ringsync.changes.columns.columns_of`; ``path``: null for a column of one cell; ``value``: null
for a tombstone; ``local_deletion_time``: s, of an expiring cell when it expires."""
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
"""``clustering``: null for static rows and partition deletions; ``range_end``: null but for ranges; ``write_time``:
the greatest timestamp inside, µs; ``digest``: of the content (:mod:`ringsync.changes.digest`); ``position``: logical,
behind the record in ``file``."""
