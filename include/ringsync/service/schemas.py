"""The commands ``cdcservice schema history``, ``show`` and ``diff``: the versions of a table, as CQL.

They read the object store only: the cluster may be away, and the table dropped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from ringsync.config import load_config
from ringsync.cql.identifiers import parse_table_name, portable_name
from ringsync.ledger.dropped_tables import dropped_of
from ringsync.ledger.table_versions import HistoryEntry, TableVersionError, history_named, names_of_histories
from ringsync.schema.table import SchemaError
from ringsync.schema.to_cql import change_statements, create_statements
from ringsync.steps.application import ExitCode
from ringsync.terminal import say
from ringsync.wiring import store_of


@dataclass(frozen=True)
class _Recorded:
    """The history of a table.

    :ivar entries: the versions that can be read; at least one
    :ivar damaged: what is wrong with the others
    :ivar newest_error: what is wrong with the newest version; None: it can be read
    """

    entries: list[HistoryEntry]
    damaged: list[str]
    newest_error: str | None

    @property
    def code(self) -> ExitCode:
        return ExitCode.COMPLETED_WITH_ERRORS if self.damaged else ExitCode.OK

    @property
    def newest(self) -> HistoryEntry:
        if self.newest_error:
            raise SchemaError(f"the newest version is damaged: {self.newest_error}")
        return self.entries[-1]


def history(arguments: argparse.Namespace, console: Console) -> ExitCode:
    recorded = _recorded(arguments)
    entries = recorded.entries
    last_of = {entry.version.table_id: entry for entry in entries}
    dropped = dropped_of(store_of(load_config(arguments.conf)), *parse_table_name(arguments.table))
    for before, entry in zip([None, *entries], entries, strict=False):
        found = f", found {_text(entry.found_ms * 1000)}" if entry.version.table.since_us else " at the latest"
        say(console, f"version {entry.version.number} since {_text(entry.since_us)}{found}")
        for line in "\n".join(_changes(before, entry)).splitlines():
            say(console, f"    {line}")
        if last_of[entry.version.table_id] is entry and entry.version.table_id in dropped:
            found_ms = dropped[entry.version.table_id]
            say(console, f"dropped, found {_text(found_ms * 1000) if found_ms else 'at a time that cannot be read'}")
    return recorded.code


def show(arguments: argparse.Namespace, console: Console) -> ExitCode:
    recorded = _recorded(arguments)
    if arguments.version is not None:
        chosen = _numbered(recorded, arguments.version, arguments.table)
    elif arguments.at is None:
        chosen = recorded.newest
    else:
        before = [entry for entry in recorded.entries if entry.since_us <= arguments.at]
        if not before:
            begin = _text(recorded.entries[0].since_us)
            raise SchemaError(f"the history of {arguments.table} begins at {begin}, after {_text(arguments.at)}")
        chosen = max(before, key=lambda entry: entry.since_us)
    for statement in create_statements(chosen.version.table, internals=arguments.internals):
        say(console, statement)
    return recorded.code


def diff(arguments: argparse.Namespace, console: Console) -> ExitCode:
    recorded = _recorded(arguments)
    if arguments.first is None:
        first, last = recorded.entries[max(0, len(recorded.entries) - 2)], recorded.newest
    else:
        first = _numbered(recorded, arguments.first, arguments.table)
        last = recorded.newest if arguments.last is None else _numbered(recorded, arguments.last, arguments.table)
    say(console, f"-- {arguments.table}: version {first.version.number} to version {last.version.number}")
    for statement in change_statements(first.version.table, last.version.table):
        say(console, statement)
    return recorded.code


def _changes(before: HistoryEntry | None, entry: HistoryEntry) -> list[str]:
    table = entry.version.table
    if before is None:
        return create_statements(table)
    return change_statements(before.version.table, table) or ["-- the same columns: its messages have another form"]


def _recorded(arguments: argparse.Namespace) -> _Recorded:
    """Read a history, and print to stderr what is damaged of it.

    :raises SchemaError: it has no version that can be read
    """
    store = store_of(load_config(arguments.conf))
    found = list(history_named(store, portable_name(*parse_table_name(arguments.table))))
    entries = [one for one in found if isinstance(one, HistoryEntry)]
    damaged = [str(one) for one in found if isinstance(one, TableVersionError)]
    for text in damaged:
        print(f"ringsync: warning: {text}", file=sys.stderr, flush=True)
    if not entries and damaged:
        raise SchemaError(f"no version of {arguments.table} can be read")
    if not entries:
        known = names_of_histories(store)
        shown = (", ".join(known[:10]) + (", …" if len(known) > 10 else "")) or "none yet"
        raise SchemaError(
            f"{store.url} has no history of {arguments.table}: ringsync records a table when it follows or bootstraps "
            f"it. Recorded are {shown}"
        )
    return _Recorded(entries, damaged, str(found[-1]) if isinstance(found[-1], TableVersionError) else None)


def _numbered(recorded: _Recorded, number: int, table: str) -> HistoryEntry:
    entries = recorded.entries
    for entry in entries:
        if entry.version.number == number:
            return entry
    if recorded.damaged:
        raise SchemaError(f"{table} has no version {number} that can be read")
    first, last = entries[0].version.number, entries[-1].version.number
    raise SchemaError(f"{table} has no version {number}: it has {first} to {last}")


def _text(moment_us: int) -> str:
    return datetime.fromtimestamp(moment_us // 1_000_000, UTC).replace(microsecond=moment_us % 1_000_000).isoformat()
