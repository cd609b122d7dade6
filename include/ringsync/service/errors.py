"""The commands ``cdcservice errors list``, ``show``, ``retry`` and ``discard``: records that could not be decoded."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ringsync.cluster.session import connect
from ringsync.config import Config, load_config
from ringsync.ledger.layout import check_layout
from ringsync.service.error_text import damage_text, record_text, report_lines, row_text
from ringsync.service.parsers import LISTED
from ringsync.state.processor_error import ErrorKey, ErrorRow, ErrorTable
from ringsync.steps.application import ExitCode, StepError
from ringsync.steps.errors.discard import discard
from ringsync.steps.errors.records import Record, known_tables
from ringsync.steps.errors.retry import Chosen, Retry, describe_damage, overflow_records
from ringsync.steps.errors.settle import Settling, waiting
from ringsync.storage.port import ObjectStore
from ringsync.terminal import say, say_error
from ringsync.wiring import cluster_settings, store_of


@dataclass(frozen=True)
class _Place:
    """What every command needs: configuration, object store, session and table."""

    config: Config
    store: ObjectStore
    session: Any
    errors: ErrorTable

    @property
    def settling(self) -> Settling:
        return Settling(self.store, self.errors)


def _open(arguments: argparse.Namespace) -> _Place | None:
    """Connect to object store and cluster; None: there is no table yet, so there are no records."""
    config = load_config(arguments.conf)
    store = store_of(config)
    check_layout(store)
    session = connect(cluster_settings(config))
    errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
    return _Place(config, store, session, errors) if errors.is_there() else None


def list_errors(arguments: argparse.Namespace, console: Console) -> ExitCode:
    place = _open(arguments)
    solved = sum(one.records for one in place.settling.settle()) if place else 0
    if place:
        place.errors.forget_solved()
    groups: list[dict[str, Any]] = []
    records = more = 0
    for group in _groups(place, arguments.node, arguments.reason) if place else ():
        records += group["records"]
        if len(groups) < arguments.limit:
            groups.append(group)
        else:
            more += 1
    if arguments.json:
        print(json.dumps({"records": records, "groups": groups, "more_groups": more, "solved_now": solved}, indent=2))
        return ExitCode.OK
    if solved:
        say(console, f"{solved:,} records of earlier retries are published now, and removed")
    if not records:
        say(console, "no records")
        return ExitCode.OK
    for group in groups:
        waits = f", {group['waits']:,} of them wait to be published" if group["waits"] else ""
        say(console, f"{group['node']}  {group['file']}  {group['records']:,} records{waits}: {group['reason']}")
    say(console, f"{records:,} records" + (f"; {more:,} more lines: --limit N" if more else ""))
    return ExitCode.OK


def _groups(place: _Place, node: str | None, reason: str) -> Iterator[dict[str, Any]]:
    """Count by node, segment and reason, one partition at a time."""
    known = waiting(place.store)
    for of_node, file in place.errors.files(node):
        records: Counter[str] = Counter()
        waits: Counter[str] = Counter()
        for row in place.errors.rows(of_node, file):
            if reason.lower() in row.reason.lower():
                records[row.reason] += row.records
                waits[row.reason] += known.get(row.key, 0)
        for text, count in records.most_common():
            yield {"node": of_node, "file": file, "reason": text, "records": count, "waits": waits[text]}


def show(arguments: argparse.Namespace, console: Console) -> ExitCode:
    key = ErrorKey(arguments.node, arguments.file, arguments.position)
    place = _required(arguments, key)
    row, record = _find(place, key)
    for line in row_text(row, waiting(place.store).get(row.key, 0)):
        say(console, line)
    if record is None:
        for one in overflow_records(place.errors, row)[:LISTED]:
            say(console, f"  {one.file} {one.position}, {one.length:,} bytes: {one.reason}")
    elif record.raw is None:
        say(console, damage_text(describe_damage(place.store, record)))
    else:
        for line in record_text(record, known_tables(place.store, place.config, place.session)):
            say(console, line)
    return ExitCode.OK


def _required(arguments: argparse.Namespace, key: object) -> _Place:
    place = _open(arguments)
    if place is None:
        raise StepError(f"there is no record {key}: nothing was ever written to processor_error")
    return place


def _find(place: _Place, key: ErrorKey) -> tuple[ErrorRow, Record | None]:
    """Find a record, in the table or in an object that a row names; None: the row itself stands for many records.

    :raises StepError: there is none
    """
    row = place.errors.row(key)
    if row is not None and row.is_overflow:
        return row, None
    if row is not None:
        raw = place.errors.mutation(row)
        return row, Record(key.node, key.file, key.position, row.length, row.reason, row.table_id, raw)
    for node, file in place.errors.files(key.node):
        for one in place.errors.rows(node, file) if file != key.file else ():
            if not one.is_overflow:
                break  # a segment has no such rows
            for record in overflow_records(place.errors, one):
                if (record.file, record.position) == (key.file, key.position):
                    return one, record
    raise StepError(f"there is no record {key}: cdcservice errors list shows which there are")


def retry(arguments: argparse.Namespace, console: Console) -> ExitCode:
    place = _open(arguments)
    if place is None:
        print("{}") if arguments.json else say(console, "no records")
        return ExitCode.OK
    tables = known_tables(place.store, place.config, place.session)
    tell = (lambda text: None) if arguments.json else (lambda text: say(console, text))
    retry = Retry(place.store, place.errors, tables, place.settling, tell=tell)
    chosen = Chosen(arguments.node, arguments.file, arguments.reason, arguments.limit)
    report = retry.run(chosen, arguments.timeout)
    if arguments.json:
        print(json.dumps(report.document(), indent=2))
    else:
        for line in report_lines(report):
            say(console, line)
    place.errors.forget_solved()
    return ExitCode.COMPLETED_WITH_ERRORS if report.left else ExitCode.OK


def discard_chosen(arguments: argparse.Namespace, console: Console) -> ExitCode:
    if not arguments.reason.strip():
        raise StepError("--reason is empty: say why, it is kept with what is discarded")
    node, file = _partition(arguments)
    place = _required(arguments, f"of {node} {file}")
    keys = [ErrorKey(node, file, position) for position in arguments.positions]
    there = {row.key: row.records for row in place.errors.rows(node, file)} if arguments.all else {}
    for key in keys:
        row = place.errors.row(key)
        if row is None:
            row, _ = _find(place, key)
            raise StepError(
                f"{key} has no row of its own: it is one of {row.records:,} records of {row.key}. Only all of these "
                "can be discarded together; nothing was discarded"
            )
        there[key] = row.records
    if not there:
        raise StepError(f"there is no record of {node} {file}: nothing was discarded")
    if known := there.keys() & waiting(place.store).keys():
        say(console, f"{len(known):,} of them were tried again and wait: their late rows are published all the same")
    if not arguments.yes and not _confirmed(sum(there.values()), console):
        return ExitCode.FATAL
    rows = (row for key in sorted(there) if (row := place.errors.row(key)) is not None)
    done = discard(place.store, place.errors, rows, getpass.getuser(), arguments.reason)
    say(console, f"{done.records:,} records were discarded; what they held is in {', '.join(done.objects)}")
    place.errors.forget_solved()
    return ExitCode.OK


def _partition(arguments: argparse.Namespace) -> tuple[str, str]:
    named, of_all = (arguments.node, arguments.file), (arguments.of_node, arguments.of_file)
    if arguments.all and all(of_all) and not any(named):
        return of_all[0], of_all[1]
    if not arguments.all and all(named) and arguments.positions and not any(of_all):
        return named[0], named[1]
    raise StepError("say which records: NODE FILE POSITION…, or --all --node N --file F")


def _confirmed(records: int, console: Console) -> bool:
    if not sys.stdin.isatty():
        say_error("nothing was discarded: nobody can be asked here, so say --yes")
        return False
    say(console, f"discard {records:,} records? They will never be published [y/N]")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say_error("nothing was discarded")
    return False
