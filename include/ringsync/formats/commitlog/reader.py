"""Commit log segments decoded to change rows; records that cannot be decoded are returned as raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ringsync.changes.batch import fixed16_array
from ringsync.changes.columns import LoggedTables
from ringsync.changes.schema import CELL, CHANGE_ROWS, COMPLEX_DELETION, DELETION, EXPIRING, LIVENESS, TOMBSTONE
from ringsync.compiled.arrow import Mask, array_of, bitmap, only, structs_of
from ringsync.compiled.memory import address
from ringsync.cql.cells import Cells, cells_of_values, raw_values
from ringsync.formats.commitlog import state as at
from ringsync.formats.commitlog.mutation import decode_records
from ringsync.formats.commitlog.records import Records, find_records
from ringsync.formats.commitlog.segment import WHOLE, Damage, Descriptor, Wanted, read_segment
from ringsync.formats.commitlog.state import DECODED, LAST_CODE, REASONS, TOO_LARGE, UNKNOWN_TABLE, Capacity, Output

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
    constants = _constants(0, file)
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
            constants = _constants(room.rows, file)
        yield Changes(_rows(output, *constants), undecoded, stop - first)
        first, room = stop, capacity


def _constants(rows: int, file: str) -> tuple[pa.Array, pa.Array]:
    """Make the columns that are equal in all rows: version of the schema, and name of the file."""
    return array_of(np.zeros(rows, np.int32)), raw_values(
        cells_of_values([file.encode()]).take(np.zeros(rows, np.intp)), pa.string()
    )


def _rows(output: Output, versions: pa.Array, files: pa.Array) -> pa.RecordBatch:
    """Wrap the arrays that the kernels have filled in Arrow. Nothing is copied.

    :param versions: versions of the schema, at least as many as rows
    :param files: names of the file, at least as many as rows
    """
    rows, cells, deletions = (output.count(cursor) for cursor in (at.ROWS, at.CELLS, at.COMPLEX))
    arrays = output.arrays
    liveness, deletion, kinds = (arrays[name][:rows] for name in (at.ROW_LIVENESS, at.ROW_DELETION, at.ROW_KIND))
    cell_kinds = arrays[at.CELL_KIND][:cells]

    def numbers(name: int, count: int, valid: Mask | None = None) -> pa.Array:
        return array_of(arrays[name][:count], valid)

    def binary(ends: int, data: int, count: int, valid: Mask | None = None) -> pa.Array:
        nulls = None if valid is None or valid.all() else bitmap(valid)
        return pa.Array.from_buffers(pa.binary(), count, [nulls, *map(pa.py_buffer, (arrays[ends], arrays[data]))])

    def lists(structs: pa.StructArray, starts: int) -> pa.Array:
        buffers = [None, pa.py_buffer(arrays[starts])]
        return pa.Array.from_buffers(pa.list_(structs.type), rows, buffers, children=[structs])

    cell = [
        numbers(at.CELL_COLUMN, cells),
        binary(at.PATH_ENDS, at.PATHS, cells, arrays[at.CELL_HAS_PATH][:cells] > 0),
        binary(at.VALUE_ENDS, at.VALUES, cells, cell_kinds != TOMBSTONE),
        numbers(at.CELL_TIMESTAMP, cells),
        numbers(at.CELL_TTL, cells, cell_kinds == EXPIRING),
        numbers(at.CELL_LOCAL, cells, cell_kinds >= EXPIRING),
        numbers(at.CELL_KIND, cells),
    ]
    of_complex = (at.COMPLEX_COLUMN, at.COMPLEX_TIMESTAMP, at.COMPLEX_LOCAL)
    complex_deletion = [numbers(name, deletions) for name in of_complex]
    expiring = liveness == 2
    row_liveness = [
        numbers(at.ROW_LIVENESS_TIMESTAMP, rows),
        numbers(at.ROW_LIVENESS_TTL, rows, expiring),
        numbers(at.ROW_LIVENESS_EXPIRES, rows, expiring),
    ]
    row_deletion = [numbers(at.ROW_DELETION_TIMESTAMP, rows), numbers(at.ROW_DELETION_LOCAL, rows)]
    columns = [
        pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(arrays[at.ROW_TABLE_ID])], 0),
        versions.slice(0, rows),
        numbers(at.ROW_TOKEN, rows),
        binary(at.KEY_ENDS, at.KEYS, rows),
        numbers(at.ROW_KIND, rows),
        binary(at.CLUSTERING_ENDS, at.CLUSTERINGS, rows, (kinds == 0) | (kinds == 3)),
        binary(at.RANGE_ENDS, at.RANGES, rows, kinds == 3),
        numbers(at.ROW_WRITE_TIME, rows),
        structs_of(LIVENESS, row_liveness, liveness > 0),
        structs_of(DELETION, row_deletion, deletion > 0),
        lists(structs_of(CELL, cell), at.ROW_CELLS),
        lists(structs_of(COMPLEX_DELETION, complex_deletion), at.ROW_COMPLEX),
        pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(arrays[at.ROW_DIGEST])], 0),
        files.slice(0, rows),
        numbers(at.ROW_POSITION, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_ROWS)


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
