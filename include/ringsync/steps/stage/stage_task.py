"""The Spark task of ``commitlog_stage``: it decodes a part of a segment, and puts its change rows into buckets."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ringsync.changes.columns import logged_tables
from ringsync.config import Config
from ringsync.formats.commitlog.names import segment_id
from ringsync.formats.commitlog.reader import ERROR_ROWS, read_log
from ringsync.formats.commitlog.segment import Damage, SegmentError, Wanted, read_wanted
from ringsync.formats.keystores.lookup import keys_in
from ringsync.formats.rows.state import REASONS, UNKNOWN_COLUMN
from ringsync.ledger import staging
from ringsync.schema.system_tables import system_tables
from ringsync.schema.table import TableSchema
from ringsync.steps.application import StepError
from ringsync.steps.stage.staged_files import Destination, StagedFiles, StagedTable, Windows
from ringsync.steps.stage.switched_off import SwitchedOff, switched_off
from ringsync.storage.port import ObjectStore, StorageError
from ringsync.wiring import store_of

_ONE_TABLE = b"\x01"
"""A mutation begins with the number of its tables (C: Mutation.MutationSerializer)."""


@dataclass(frozen=True)
class StageWork:
    """A part of a segment.

    :ivar node: host id
    :ivar file: path of the segment
    :ivar wanted: position behind which to read, and last position; None as the latter: a completed segment is read to
        its end
    :ivar commit: number of the node's commit that is to list the result
    """

    node: str
    file: str
    wanted: Wanted
    commit: int


@dataclass(frozen=True)
class Staged:
    """The result of some work: files that count once they are committed.

    :ivar errors: batch of :data:`ringsync.formats.commitlog.reader.ERROR_ROWS`, as Arrow IPC
    :ivar unknown_tables: ids of tables that the schema does not have, or that are held up
    :ivar unknown_columns: some records name a column that its table does not have
    :ivar damage: first thing that cannot be read; empty: nothing
    :ivar stopped: why it was not read as far as it is synced; empty: it was
    :ivar unsure: why it may not end where it seems to, so that it is read again; empty: it does
    :ivar unreadable: why nothing of the segment can be read; empty: it can
    :ivar written: write times of the followed rows; None: unknown, since not all could be decoded
    :ivar switched_off: statements that the log has, after which a table has no cdc
    """

    work: StageWork
    part: staging.LogPart
    read_at_ms: int
    counts: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[staging.Block, ...] = ()
    late: tuple[str, ...] = ()
    errors: bytes = b""
    error_count: int = 0
    unknown_tables: frozenset[str] = frozenset()
    unknown_columns: bool = False
    damage: str = ""
    stopped: str = ""
    unsure: str = ""
    unreadable: str = ""
    written: staging.Written | None = None
    switched_off: frozenset[SwitchedOff] = frozenset()

    @property
    def has_unknown(self) -> bool:
        """Whether some records name a table or a column that the schema does not have."""
        return self.unknown_columns or bool(self.unknown_tables)

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of all files that were written."""
        return (*dict.fromkeys(block.place.key for block in self.blocks), *self.late)


@dataclass(frozen=True)
class StageTask:
    """Decodes and stages the work that Spark gives to one task.

    :ivar logged: all tables of the schema: a mutation may have any
    :ivar kept: the followed tables; rows of all others count as ``not_cdc``
    :ivar gone: ids of dropped tables in ``logged``: their rows are counted
    :ivar left_out: ids of tables in ``kept`` that had no cdc when these parts of a node's log were written, by host id
    :ivar held_up: ids of followed tables of which no version can be read: their rows cannot be staged yet
    :ivar passed_over: ids of tables that are not followed, and cannot be read
    """

    config: Config
    logged: tuple[TableSchema, ...]
    kept: tuple[StagedTable, ...]
    windows: Windows
    gone: frozenset[str] = frozenset()
    left_out: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held_up: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()

    def __call__(self, works: Iterable[StageWork]) -> Iterator[Staged]:
        config = self.config
        store = store_of(config)
        keys = keys_in(config.sync.keystore, os.environ) if config.sync.keystore else None
        for work in works:
            try:
                staged = stage(work, self, store, keys)
            except StorageError:
                raise
            except Exception as error:  # one job reads the segments of all nodes
                traceback.print_exception(error)
                staged = _unreadable(work, f"{Path(work.file).name}: {type(error).__name__}: {error}")
            yield staged


def stage(work: StageWork, task: StageTask, store: ObjectStore, keys: Callable[[str], bytes] | None) -> Staged:
    """Read a part of a segment and write its rows. A segment that cannot be read is reported, not raised.

    :param keys: returns the keys of encrypted segments, by name
    """
    name, identity = Path(work.file).name, _segment_id(work)
    after, read_at_ms = work.wanted.after, int(time.time() * 1000)
    try:
        with open(work.file, "rb") as file:
            data = read_wanted(file, name, work.wanted)
        log = read_log(data, name, logged_tables(task.logged), work.wanted, key_of=keys)
    except OSError as error:
        return _unreadable(work, f"{work.file} cannot be read: {error.strerror or error}")
    except SegmentError as error:
        return _unreadable(work, str(error))
    to = Destination(work.node, work.commit, f"{identity}-{after}-{secrets.token_hex(4)}")
    left_out = task.left_out.get(work.node, frozenset())
    files = StagedFiles(task.kept, task.windows, store, to, left_out=left_out, held_up=task.held_up, gone=task.gone)
    undecoded: list[pa.RecordBatch] = []
    off: set[SwitchedOff] = set()
    for changes in log.batches:
        files.add(changes.rows)
        off |= switched_off(changes.rows, task.logged)
        undecoded.append(changes.undecoded)
    damages, stopped = _believed(log.damages, log.end, work.wanted.until)
    errors, passed_over = _errors(undecoded, damages, name, task.passed_over)
    counts = {
        "records": log.records,
        "records_passed_over": passed_over,
        "damages": len(damages),
        "of_unknown_tables": (of_unknown := errors.num_rows - errors["table_id"].null_count),
        "errors": errors.num_rows - of_unknown,
        **files.finish(),
    }
    return Staged(
        work,
        staging.LogPart(name, identity, after, max(log.end, after), finished=work.wanted.until is None),
        read_at_ms,
        counts,
        tuple(files.blocks),
        tuple(files.late),
        staging.encode_rows(errors),
        errors.num_rows,
        unknown_tables=files.held_up.union(table_id.hex() for table_id in errors["table_id"].to_pylist() if table_id),
        unknown_columns=REASONS[UNKNOWN_COLUMN] in errors["reason"].to_pylist(),
        damage=damages[0].reason if damages else "",
        stopped=stopped,
        unsure=log.unsure,
        written=None if errors.num_rows or damages else files.written,
        switched_off=frozenset(off),
    )


def _unreadable(work: StageWork, reason: str) -> Staged:
    part = staging.LogPart(Path(work.file).name, _segment_id(work), work.wanted.after, work.wanted.after, False)
    return Staged(work, part, int(time.time() * 1000), unreadable=reason)


def _segment_id(work: StageWork) -> int:
    identity = segment_id(Path(work.file).name)
    if identity is None:
        raise ValueError(f"{work.file} is not named like a commit log segment (CommitLog-7-1700000000000.log)")
    return identity


def _believed(damages: list[Damage], end: int, until: int | None) -> tuple[list[Damage], str]:
    """Return the damages of what was read; and why a segment that is being written was not read as far as it is synced.

    Bytes after that place are read again: the folder may show pages that are older than the index.
    """
    if until is None or end >= until:
        return damages, ""
    behind = [damage.reason for damage in damages if damage.position >= end]
    return [damage for damage in damages if damage.position < end], behind[0] if behind else ""


def _errors(
    undecoded: list[pa.RecordBatch], damages: list[Damage], file: str, not_followed: frozenset[str]
) -> tuple[pa.RecordBatch, int]:
    """Return what could not be decoded, and how many records were passed over: those of Cassandra's own tables, and of
    no other table than one that is not followed."""
    of_cassandra = {bytes.fromhex(table_id) for table_id in system_tables()}
    others = {bytes.fromhex(table_id) for table_id in not_followed}
    records = [record for batch in undecoded if batch.num_rows for record in batch.to_pylist()]
    wanted = [
        record
        for record in records
        if record["table_id"] not in of_cassandra
        and not (record["table_id"] in others and record["raw"].startswith(_ONE_TABLE))
    ]
    described: list[dict[str, Any]] = [{**record, "file": file} for record in wanted]
    described += [
        {"position": damage.position, "length": damage.length, "reason": damage.reason, "file": file}
        for damage in damages
    ]
    return pa.RecordBatch.from_pylist(described, ERROR_ROWS), len(records) - len(wanted)


def check_counts(staged: Staged, node: str) -> None:
    """Check that every decoded row has one outcome.

    :raises StepError: the counts do not reconcile
    """
    counts = staged.counts
    outcomes = sum(counts[name] for name in ("staged", "late", "repeated", "of_dropped_tables", "too_old", "not_cdc"))
    if counts["rows"] != outcomes:
        raise StepError(f"{staged.part.segment} of {node}: {counts['rows']} rows decoded, {outcomes} accounted for")


def keep_damaged(store: ObjectStore, staged: Staged) -> None:
    """Keep a copy of a segment that could not be read whole, before the segment is removed."""
    key = f"cdc_damaged/{staged.work.node}/{staged.part.segment}"
    there = store.stat(key)
    file = Path(staged.work.file)
    if (staged.damage and (there is None or there.size != file.stat().st_size)) or (staged.part.finished and there):
        store.put(key, file.read_bytes())
