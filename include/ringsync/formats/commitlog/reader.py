"""Commit log segments decoded to change rows; records that cannot be decoded are returned as raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.batch import fixed16_array
from ringsync.changes.columns import LoggedTables
from ringsync.compiled.arrow import array_of, only
from ringsync.compiled.memory import address
from ringsync.cql.cells import Cells, cells_of_values, raw_values
from ringsync.formats.commitlog.mutation import decode_records
from ringsync.formats.commitlog.records import Records, find_records
from ringsync.formats.commitlog.segment import WHOLE, Damage, Descriptor, Wanted, read_segment
from ringsync.formats.rows import state as at
from ringsync.formats.rows.arrow import change_rows, constant_columns
from ringsync.formats.rows.state import DECODED, LAST_CODE, REASONS, TOO_LARGE, UNKNOWN_TABLE, Capacity, Output

UNDECODED = pa.schema(
    [
        ("position", pa.int64()),
        ("length", pa.int64()),
        ("reason", pa.string()),
        ("table_id", pa.binary(16)),
        ("raw", pa.binary()),
    ]
)
"""Records that have the right checksum but do not fit the schema: the logical position after the record, bytes of the
mutation, the reason, the id of the table if it is unknown, and the mutation, to be decoded by another schema."""

ERROR_ROWS = UNDECODED.append(pa.field("file", pa.string()))
"""Undecoded records, and damaged parts, of several segments, each with its segment's name; the latter have no ``raw``.
"""

_NONE_UNDECODED = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in UNDECODED], schema=UNDECODED)
_REASONS = cells_of_values([REASONS.get(code, "").encode() for code in range(LAST_CODE + 1)])


@dataclass(frozen=True)
class Changes:
    """The content of some records.

    :ivar rows: batch of ``CHANGE_ROWS``
    :ivar undecoded: batch of ``UNDECODED``
    :ivar records: number of records, including ``undecoded``
    """

    rows: pa.RecordBatch
    undecoded: pa.RecordBatch
    records: int


@dataclass(frozen=True)
class SegmentChanges:
    """The content of a segment.

    :ivar end: logical position after the last section that was read
    :ivar records: number of records, including damaged ones
    :ivar damages: parts that cannot be read: records with a wrong checksum, sections, sync markers
    :ivar batches: change rows and undecoded records of all other records, in the order of the log
    :ivar unsure: see :class:`~ringsync.formats.commitlog.segment.Segment`
    """

    descriptor: Descriptor
    end: int
    records: int
    damages: list[Damage]
    batches: Iterator[Changes]
    unsure: str = ""


def read_log(
    data: bytes | memoryview,
    name: str,
    tables: LoggedTables,
    wanted: Wanted = WHOLE,
    *,
    key_of: Callable[[str], bytes] | None = None,
    capacity: Capacity | None = None,
) -> SegmentChanges:
    """Read a segment.

    :param data: the whole file, or what :func:`~ringsync.formats.commitlog.segment.read_wanted` returns
    :param name: name of the file, for messages and change rows
    :param tables: tables whose records are decoded
    :param wanted: part of the segment to read
    :param key_of: function from alias to key, for encrypted segments
    :param capacity: capacity of a batch
    :raises SegmentError: nothing of the segment can be read
    """
    segment = read_segment(data, name, wanted, key_of)
    records, damages = find_records(segment.buffer, segment.sections, segment.file_end)
    records = records.behind(wanted.after, segment.certain)
    damages = segment.damages + [damage for damage in damages if damage.position + damage.length > wanted.after]
    end = segment.end
    if wanted.until is not None:
        records = records.up_to(wanted.until)
        damages = [damage for damage in damages if damage.position < wanted.until]
        end = min(end, wanted.until)
    broken = ~records.sound
    for position, size in zip(records.positions[broken], records.sizes[broken], strict=True):
        reason = "the checksum of a record is wrong: it is left out, and the next one is read"
        damages.append(Damage(int(position), int(size), reason))
    damages.sort(key=lambda damage: damage.position)
    batches = read_changes(segment.buffer, records.only(records.sound), tables, name, capacity)
    return SegmentChanges(segment.descriptor, end, len(records), damages, batches, segment.unsure)


def read_changes(
    buffer: npt.NDArray[np.uint8], records: Records, tables: LoggedTables, file: str, capacity: Capacity | None = None
) -> Iterator[Changes]:
    """Decode records, some thousands of change rows at a time.

    :param buffer: bytes of the records, followed by spare bytes
    :param records: records whose checksum is right
    :param tables: known tables; a record of another table is returned undecoded
    :param file: the segment's name, for the change rows
    :param capacity: capacity of a batch; a single record that needs more gets it
    """
    capacity = room = capacity or Capacity()
    outcomes = np.zeros(len(records), np.uint8)
    ids = np.empty((len(records), 16), np.uint8)
    constants = constant_columns(0, file)
    ends = np.cumsum(records.sizes)
    first = 0
    while first < len(records):
        output = Output.new(buffer, tables, room)
        # The values cannot have more bytes than their records.
        read = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, read + room.bytes, side="right"))
        stop = decode_records(
            address(output.state),
            address(records.offsets),
            address(records.sizes),
            address(records.positions),
            address(outcomes),
            address(ids),
            first,
            max(last, first),
        )
        if stop == first and not room.is_largest:
            room = room.doubled()
            continue
        if stop == first:
            outcomes[first] = TOO_LARGE
            stop += 1
        failed = first + np.flatnonzero(outcomes[first:stop] != DECODED)
        undecoded = _undecoded(buffer, records, outcomes, ids, failed) if len(failed) else _NONE_UNDECODED
        if len(constants[0]) < output.count(at.ROWS):
            constants = constant_columns(room.rows, file)
        yield Changes(change_rows(output, *constants), undecoded, stop - first)
        first, room = stop, capacity


def _undecoded(
    buffer: npt.NDArray[np.uint8],
    records: Records,
    outcomes: npt.NDArray[np.uint8],
    ids: npt.NDArray[np.uint8],
    failed: npt.NDArray[np.intp],
) -> pa.RecordBatch:
    """Collect the records that could not be decoded."""
    codes, sizes = outcomes[failed], records.sizes[failed]
    raw = Cells(buffer, records.offsets[failed].astype(np.int32), sizes.astype(np.int32))
    arrays = [
        array_of(records.positions[failed]),
        array_of(sizes),
        raw_values(_REASONS.take(codes), pa.string()),
        only(fixed16_array(ids[failed]), codes == UNKNOWN_TABLE),
        raw_values(raw),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=UNDECODED)
