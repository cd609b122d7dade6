"""``cdcservice errors retry``: records that could not be decoded are decoded again, and published as late rows.

A row of ``processor_error`` goes only after its change rows are published, or if there is nothing to publish of it: its
tables were dropped, are not followed, or its rows are known as published. Until then these objects say where it is:

1. ``errors/retry/<id>.json`` is put: which rows wait for which files of late rows, and the digests in these;
2. the files are put, under names that no other try uses;
3. the object is put again: all files are there;
4. ``out_of_sequence`` publishes the files' rows, but for those that were published before, puts a mark for each file,
   and removes the files;
5. the rows of ``processor_error`` are removed, then their bytes in the object store, then the object, then the marks
   (settle.py).

A process that is killed after any of these leaves the row where it is, so it is tried again. Its change rows may then
be in two files of late rows. They are published once: ``out_of_sequence`` knows by digest what was published. Two
retries at once do no more than that.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ringsync.compiled.arrow import Mask, integers
from ringsync.formats.commitlog.names import segment_id
from ringsync.ledger.error_tries import TriedFile, TriedRow, Try, put_try, tried_key
from ringsync.ledger.passes import digest_halves, first_of_each
from ringsync.ledger.staging import encode_rows
from ringsync.state.processor_error import ErrorKey, ErrorRow, ErrorTable
from ringsync.status import LATE_ROWS, STALE_AFTER_S, STOP_KEY, age_s, read_status
from ringsync.steps.application import StepError
from ringsync.steps.errors.records import KnownTables, Record, decode, staged
from ringsync.steps.errors.settle import Settled, Settling, solve
from ringsync.storage.port import NotFoundError, ObjectStore

OUTCOMES = (
    "published",
    "was_published",
    "waits",
    "of_dropped_tables",
    "not_followed",
    "still_undecodable",
    "damage",
)
"""Outcomes of a record; each has one."""

BATCH_RECORDS = 1_000
"""About how many records are tried together …"""
BATCH_BYTES = 32 * 2**20
"""… or how many bytes of them."""

MOST_WAITING = 20_000
"""Rows of ``processor_error`` that may wait at once: more are tried only when half of these are solved."""

POLL_S = 1.0
"""Seconds between two looks at what waits."""

NO_OBJECT = "its bytes are not in the object store any more"
"""Reason why a record whose ``raw_object`` is gone cannot be decoded."""

_DAMAGES_NAMED = 100


@dataclass(frozen=True)
class Chosen:
    """The records to try.

    :ivar node: host id; None: all nodes
    :ivar file: name of a segment, or of an overflow row; None: all
    :ivar reason: text that the reason must contain, in any case of letters; empty: all
    :ivar limit: stop reading after so many records; None: read all
    """

    node: str | None = None
    file: str | None = None
    reason: str = ""
    limit: int | None = None

    def has(self, record: Record, row: ErrorRow) -> bool:
        """Tell whether a record is chosen.

        :param row: row that stands for it
        """
        return self.file in (None, record.file, row.key.file) and self.reason.lower() in record.reason.lower()


@dataclass
class RetryReport:
    """The result of a retry.

    :ivar outcomes: number of records by outcome (:data:`OUTCOMES`)
    :ivar undecodable: number of records that still cannot be decoded, by reason
    :ivar damage: the first damaged parts of segments, with the copy of each segment
    :ivar earlier: number of records that earlier retries had put, and that were found solved now, by outcome
    :ivar waits_because: why records still wait; empty: none does
    :ivar problems: recorded schemas that cannot be read
    """

    read: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    undecodable: Counter[str] = field(default_factory=Counter)
    damage: list[dict[str, Any]] = field(default_factory=list)
    earlier: Counter[str] = field(default_factory=Counter)
    waits_because: str = ""
    problems: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """Number of records that are not solved."""
        return sum(self.outcomes[name] for name in ("waits", "still_undecodable", "damage"))

    def check(self) -> None:
        """Check that each record has one outcome.

        :raises StepError: some have none, or two
        """
        if self.read != sum(self.outcomes[name] for name in OUTCOMES):
            raise StepError(f"{self.read} records were read, but the outcomes are {dict(self.outcomes)}")

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "read": self.read,
            **{name: self.outcomes[name] for name in OUTCOMES},
            "reasons": dict(self.undecodable.most_common()),
            "damaged": self.damage,
            "earlier": dict(self.earlier),
            "waits_because": self.waits_because,
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class _Unit:
    """A row of ``processor_error`` and its chosen records.

    :ivar places: places of the records in the object of an overflow row
    :ivar others: places of the records there that are not chosen
    """

    row: ErrorRow
    records: tuple[Record, ...]
    places: tuple[int, ...] = (0,)
    others: tuple[int, ...] = ()


class Retry:
    """One retry.

    :param settling: removes rows whose change rows are published
    :param clock: s since the epoch
    :param tell: is told what the retry waits for
    """

    def __init__(
        self,
        store: ObjectStore,
        errors: ErrorTable,
        tables: KnownTables,
        settling: Settling,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store = store
        self._errors = errors
        self._tables = tables
        self._settling = settling
        self._clock = clock
        self._sleep = sleep
        self._tell = tell
        self._pending: dict[ErrorKey, int] = {}
        self._report = RetryReport(problems=tables.problems)

    def run(self, chosen: Chosen, timeout_s: float) -> RetryReport:
        """Solve what earlier retries have put, decode the chosen records, put their rows, and wait until these are
        published.

        :param timeout_s: seconds to wait; while the sync is stopped nothing is waited for
        :raises StepError: the counts do not reconcile
        """
        end_s = self._clock() + timeout_s
        for one in self._settling.settle():
            self._report.earlier[one.outcome] += one.records
        for batch in self._batches(chosen):
            self._try(batch)
            if len(self._pending) >= MOST_WAITING and not self._wait(end_s, MOST_WAITING // 2):
                break
        self._wait(end_s, 0)
        self._report.outcomes["waits"] = sum(self._pending.values())
        if self._pending:
            self._report.waits_because = why_rows_wait(self._store, self._clock())
        self._report.check()
        return self._report

    def _batches(self, chosen: Chosen) -> Iterator[list[_Unit]]:
        """Read the chosen records that do not wait yet, some together."""
        known, batch, size = dict(self._settling.waits), list[_Unit](), 0.0
        for row in self._rows(chosen):
            if chosen.limit is not None and self._report.read >= chosen.limit:
                break
            unit = self._unit(row, chosen, is_waiting=row.key in known)
            if not unit.records:
                continue
            if row.key in known:
                self._report.read += known[row.key]
                self._pending[row.key] = known[row.key]
                continue
            self._report.read += len(unit.records)
            batch.append(unit)
            size += sum(max(1 / BATCH_RECORDS, len(one.raw or b"") / BATCH_BYTES) for one in unit.records)
            if size >= 1:
                yield batch
                batch, size = [], 0.0
        if batch:
            yield batch

    def _rows(self, chosen: Chosen) -> Iterator[ErrorRow]:
        """Read the rows that may be chosen, the oldest segments first."""
        for node, file in self._errors.files(chosen.node):
            # Records of a segment may also be in overflow objects.
            if chosen.file in (None, file) or segment_id(file) is None:
                yield from self._errors.rows(node, file, with_bytes=True)

    def _unit(self, row: ErrorRow, chosen: Chosen, *, is_waiting: bool) -> _Unit:
        """Return the chosen records of a row."""
        bare = Record(row.key.node, row.key.file, row.key.position, row.length, row.reason, row.table_id, row.raw)
        try:
            if row.is_overflow:
                records = overflow_records(self._errors, row)
                places = [place for place, record in enumerate(records) if chosen.has(record, row)]
                others = sorted(set(range(len(records))) - set(places))
                return _Unit(row, tuple(records[place] for place in places), tuple(places), tuple(others))
            if not chosen.has(bare, row) or is_waiting:
                return _Unit(row, (bare,) if chosen.has(bare, row) else ())
            return _Unit(row, (replace(bare, raw=self._errors.mutation(row)),))
        except NotFoundError:
            return _Unit(row, (replace(bare, reason=NO_OBJECT, raw=b""),))

    def _try(self, units: Sequence[_Unit]) -> None:
        """Decode records, put their late rows, remove what is solved already, and count."""
        records = [record for unit in units for record in unit.records]
        sound = [place for place, record in enumerate(records) if record.raw is not None]
        decoded = decode([records[place] for place in sound], self._tables.versions)
        outcomes = np.full(len(records), "damage", object)
        outcomes[sound] = "not_followed"
        made = Try(f"{int(self._clock() * 1000):013}-{secrets.token_hex(4)}", int(self._clock() * 1000), False, (), ())
        files: list[tuple[TriedFile, bytes]] = []
        files_of: dict[int, list[int]] = defaultdict(list)
        of_outcome = self._by_outcome(decoded.rows)
        for outcome, _, rows, _ in sorted(of_outcome, key=lambda one: _RANK[one[0]]):
            outcomes[np.array(sound)[np.unique(integers(rows["position"]))]] = outcome
        for outcome, table_id, rows, behind in of_outcome:
            if outcome == "waits":
                for place in np.unique(integers(rows["position"])).tolist():
                    files_of[sound[place]].append(len(files))
                once = rows.filter(pa.array(first_of_each(digest_halves(rows["digest"]))))
                stored = staged(once, [records[place] for place in sound], self._tables.versions[table_id])
                key = tried_key(table_id, made.id)
                files.append((TriedFile.of(key, table_id, behind, stored), encode_rows(stored)))
        for place, reason in decoded.undecoded.items():
            outcomes[sound[place]] = "still_undecodable"
            is_gone = records[sound[place]].reason == NO_OBJECT
            self._report.undecodable[NO_OBJECT if is_gone else reason] += 1
        waits, solved = self._sorted(units, outcomes.tolist(), files_of)
        if waits:
            self._put(replace(made, rows=tuple(waits), files=tuple(file for file, _ in files)), [d for _, d in files])
        solve(self._store, self._errors, solved)
        self._count(records, outcomes.tolist())

    def _by_outcome(self, rows: pa.RecordBatch) -> list[tuple[str, str, pa.RecordBatch, int]]:
        """Divide decoded rows by table and outcome: outcome, table id, rows, last pass that was looked at."""
        ids = rows["table_id"].dictionary_encode()
        numbers, found = integers(ids.indices), []
        for number, raw_id in enumerate(ids.dictionary.to_pylist()):
            table_id, behind = raw_id.hex(), 0
            of_table = rows.filter(pa.array(numbers == number))
            if table_id in self._tables.dropped:
                found.append(("of_dropped_tables", table_id, of_table, behind))
            elif table_id in self._tables.followed:
                published, behind = self._settling.published.among(table_id, of_table)
                masks: tuple[tuple[str, Mask], ...] = (("was_published", published), ("waits", ~published))
                found += [
                    (name, table_id, of_table.filter(pa.array(mask)), behind) for name, mask in masks if mask.any()
                ]
        return found

    def _sorted(
        self, units: Sequence[_Unit], outcomes: Sequence[str], files_of: dict[int, list[int]]
    ) -> tuple[list[TriedRow], list[TriedRow]]:
        """Return the rows that wait for late files, and those that are solved."""
        waits, solved, first = [], [], 0
        for unit in units:
            places = range(first, first + len(unit.records))
            first += len(unit.records)
            unsolved = [here for here, place in zip(unit.places, places, strict=True) if outcomes[place] in _STAY]
            files = sorted({file for place in places for file in files_of.get(place, ())})
            count = sum(outcomes[place] == "waits" for place in places)
            left = tuple(sorted((*unsolved, *unit.others))) if unit.row.is_overflow else ()
            row = TriedRow(
                unit.row.key.node,
                unit.row.key.file,
                unit.row.key.position,
                unit.row.raw_object,
                count,
                tuple(files),
                left,
            )
            # A record that is not decoded has no rows: it neither waits nor is solved.
            if count:
                waits.append(row)
            elif len(unsolved) < len(unit.records):
                solved.append(row)
        return waits, solved

    def _put(self, made: Try, contents: Sequence[bytes]) -> None:
        version = put_try(self._store, made)
        for file, data in zip(made.files, contents, strict=True):
            self._store.put(file.key, data)
        # None: another retry took us for dead. The files are published; a later retry finds that.
        put_try(self._store, replace(made, is_put=True), version)
        for row in made.rows:
            self._pending[ErrorKey(row.node, row.file, row.position)] = row.records

    def _count(self, records: Sequence[Record], outcomes: Sequence[str]) -> None:
        for record, outcome in zip(records, outcomes, strict=True):
            if outcome == "damage" and len(self._report.damage) < _DAMAGES_NAMED:
                self._report.damage.append(describe_damage(self._store, record))
            if outcome != "waits":  # these are counted in the end
                self._report.outcomes[outcome] += 1

    def _wait(self, end_s: float, most: int) -> bool:
        """Wait until no more than so many of the rows that were read wait.

        :returns: False: they still do, and it makes no sense to go on
        """
        told = False
        while True:
            for one in self._settling.settle():
                self._note(one)
            # A row that waits for no try any more is not solved: nobody publishes it now.
            if len(self._pending.keys() & self._settling.waits.keys()) <= most:
                return True
            if self._store.stat(STOP_KEY) is not None or self._clock() >= end_s:
                return False
            if not told:
                self._tell(f"{sum(self._pending.values()):,} records wait to be published by out_of_sequence")
                told = True
            self._sleep(POLL_S)

    def _note(self, one: Settled) -> None:
        if (records := self._pending.pop(one.key, None)) is None:
            self._report.earlier[one.outcome] += one.records
        else:
            self._report.outcomes[one.outcome] += records


_RANK = {"of_dropped_tables": 0, "was_published": 1, "waits": 2}
"""Of a record with rows of several tables, the outcome with the highest rank counts."""

_STAY = ("still_undecodable", "damage")


def overflow_records(errors: ErrorTable, row: ErrorRow) -> list[Record]:
    """Read the records of an overflow row.

    :raises NotFoundError: its object is not there
    """
    names = ("file", "position", "length", "reason", "table_id", "raw")
    columns = (errors.overflow(row)[name].to_pylist() for name in names)
    return [Record(row.key.node, *values) for values in zip(*columns, strict=True)]


def damage_copy(node: str, file: str) -> str:
    """Return the key of the copy that is kept of a damaged segment."""
    return f"cdc_damaged/{node}/{file}"


def describe_damage(store: ObjectStore, record: Record) -> dict[str, Any]:
    """Describe a damaged part of a segment, which has no bytes to decode; ``copy`` is None if there is none."""
    copy = damage_copy(record.node, record.file)
    place = {"node": record.node, "file": record.file, "position": record.position, "reason": record.reason}
    return {**place, "copy": copy if store.stat(copy) is not None else None}


def why_rows_wait(store: ObjectStore, now_s: float) -> str:
    """Tell why late rows are not published yet, as far as the status of the sync says.

    :param now_s: s since the epoch
    """
    if store.stat(STOP_KEY) is not None:
        return "the sync is stopped: cdcservice start, then cdcservice errors retry again"
    status = read_status(store, "out_of_sequence/queue")
    if status is None or age_s(status, now_s) > STALE_AFTER_S:
        return "the loop out_of_sequence does not run: cdcservice status says more"
    broken = [f"{file} cannot be used: {reason}" for file, reason in status.get("broken", {}).items()]
    if ours := [text for text in broken if text.startswith(LATE_ROWS) and "/errors-" in text]:
        return "; ".join(ours)
    return status.get("error") or "out_of_sequence has not published them yet: run cdcservice errors retry again"
