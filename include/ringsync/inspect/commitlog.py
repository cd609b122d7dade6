"""The work of ``cdcservice inspect commitlog`` after its arguments are parsed: from segments to output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.columns import LoggedTables, logged_tables
from ringsync.formats.commitlog.index import SegmentIndex
from ringsync.formats.commitlog.names import LogPosition, segment_id
from ringsync.formats.commitlog.reader import SegmentChanges, read_log
from ringsync.formats.commitlog.segment import WHOLE, Damage, SegmentError
from ringsync.formats.rows.state import REASONS, UNKNOWN_COLUMN, UNKNOWN_TABLE
from ringsync.inspect.files import InspectError, index_path, read_index
from ringsync.inspect.outputs import Output
from ringsync.inspect.problems import Problems
from ringsync.inspect.summary import Summary
from ringsync.inspect.tables import Tables
from ringsync.schema.system_tables import system_tables


@dataclass
class Inspection:
    """Reader of segments, one after another.

    :ivar tables: the tables whose records are decoded, and the tables whose records are shown
    :ivar ignore_index: whether to read segments to their end, including what was never synced
    :ivar key_of: function from an alias to its key, for encrypted segments
    :ivar progress: function that is called with the share of a segment that is read, 0…1
    """

    tables: Tables
    output: Output
    problems: Problems
    ignore_index: bool = False
    key_of: Callable[[str], bytes] | None = None
    progress: Callable[[Path, float], None] = lambda path, fraction: None
    summary: Summary = field(default_factory=Summary)

    def read(self, paths: Sequence[Path], start: LogPosition | int | None) -> None:
        """Read segments, behind a position if one is given.

        :raises InspectError: the position does not name its segment, and there are several
        """
        if isinstance(start, int):
            if len(paths) > 1:
                raise InspectError(
                    f"position {start} does not name one of these {len(paths)} segments. Write SEGMENT_ID:POSITION"
                )
            start = LogPosition(segment_id(paths[0].name) or 0, start)
        logged = logged_tables(list(self.tables.by_id.values()))
        for path in paths:
            after = _after(path, start)
            if after is not None:
                self._read_segment(path, logged, after)
            self.progress(path, 1)

    def _read_segment(self, path: Path, logged: LoggedTables, after: int) -> None:
        try:
            index = read_index(path)
            data = path.read_bytes()
            wanted = WHOLE if index is None or self.ignore_index else index.wanted
            log = read_log(data, path.name, logged, replace(wanted, after=after), key_of=self.key_of)
        except (SegmentError, InspectError, OSError) as error:
            self.problems.unreadable(str(error))
            self.summary.segments.append(f"{path.name}  cannot be read")
            return
        last = self._read_batches(path, log)
        self._explain_end(path, index)
        self._report(path, log.damages, last, torn_end=wanted.until is None and not (index and index.completed))
        self._count(path, log, len(data), index)
        self.problems.finish(path.name)

    def _read_batches(self, path: Path, log: SegmentChanges) -> int:
        """Write a segment's change rows to the output; return the logical position behind the last whole record."""
        last = read = 0
        for batch in log.batches:
            rows = batch.rows
            if len(self.tables.shown) < len(self.tables.by_id):
                shown = pa.array([bytes.fromhex(table_id) for table_id in self.tables.shown], pa.binary(16))
                rows = rows.filter(pc.is_in(rows["table_id"], shown))
            if len(rows):
                self.summary.add(rows)
                self.output.write(rows)
            for positions in (batch.rows["position"], batch.undecoded["position"]):
                last = max(last, positions[-1].as_py()) if len(positions) else last
            self._explain_undecoded(path.name, batch.undecoded)
            self.summary.records["decoded"] += batch.records - len(batch.undecoded)
            read += batch.records
            self.progress(path, read / log.records)
        self.summary.records["damaged"] += log.records - read
        return last

    def _explain_undecoded(self, name: str, undecoded: pa.RecordBatch) -> None:
        records = self.summary.records
        columns = (undecoded[column].to_pylist() for column in ("position", "length", "reason", "table_id"))
        for position, length, reason, raw_id in zip(*columns, strict=True):
            table_id = raw_id.hex() if raw_id else ""
            if table_id in system_tables():
                records["system tables"] += 1
                continue
            if reason == REASONS[UNKNOWN_TABLE]:
                records["unknown tables"] += 1
                reason = self.tables.reason(table_id)
            else:
                records["unknown columns" if reason == REASONS[UNKNOWN_COLUMN] else "malformed"] += 1
            self.problems.lost(name, position, length, reason)

    def _explain_end(self, path: Path, index: SegmentIndex | None) -> None:
        say = self.problems.say
        if index is None and index_path(path).exists():
            say(f"{path.name}: its index is just being rewritten, so the whole file is read")
        elif index is None:
            say(f"{path.name}: there is no {index_path(path).name}, so the file is read up to its last synced part")
        elif not index.completed and not self.ignore_index:
            say(
                f"{path.name}: not completed; it is read up to position {index.offset}, up to which it is synced "
                "(--ignore-idx reads the rest)"
            )

    def _report(self, path: Path, damages: Iterable[Damage], last: int, torn_end: bool) -> None:
        for damage in damages:
            if torn_end and damage.position > last:
                self.problems.say(
                    f"{path.name}: position {damage.position}, {damage.length} bytes: {damage.reason}; this is behind "
                    "the last whole record, as in a segment that was being written"
                )
                continue
            self.problems.lost(path.name, damage.position, damage.length, damage.reason)

    def _count(self, path: Path, log: SegmentChanges, size: int, index: SegmentIndex | None) -> None:
        state = "no index" if index is None else "completed" if index.completed else f"synced up to {index.offset}"
        summary, descriptor = self.summary, log.descriptor
        summary.segments.append(
            f"{path.name}  version {descriptor.version}, {descriptor.codec}, {size:,} bytes, {log.records:,} records, "
            f"{state}"
        )
        summary.damages += len(log.damages)
        summary.lost_bytes += sum(damage.length for damage in log.damages)


def _after(path: Path, start: LogPosition | None) -> int | None:
    """Return the logical position behind which to read a segment; None: all of it lies before the start."""
    if start is None:
        return 0
    segment = segment_id(path.name) or 0
    if segment < start.segment_id:
        return None
    return start.position if segment == start.segment_id else 0
