"""The commands ``cdcservice errors list``, ``show``, ``retry`` and ``discard``: records that could not be decoded."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ringsync.cluster.session import connect
from ringsync.config import Config, load_config
from ringsync.ledger.layout import check_layout
from ringsync.service.command import say, say_error
from ringsync.service.error_text import damage_text, record_text, report_lines, row_text
from ringsync.state.processor_error import ErrorKey, ErrorRow, ErrorTable
from ringsync.steps.application import ExitCode, StepError
from ringsync.steps.errors.discard import discard
from ringsync.steps.errors.records import Record, known_tables
from ringsync.steps.errors.retry import Chosen, Retry, describe_damage, overflow_records
from ringsync.steps.errors.settle import Settling, waiting
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings, store_of

EXIT_CODES = """\
exit codes: 0 done; 1 retry: some records are left, and wait, cannot be decoded, or are damage; 3 arguments,
configuration, connection or rights; 4 interrupted"""

LISTED = 100
"""Lines that ``list`` prints by default."""

RETRY_TIMEOUT_S = 300.0
"""Seconds that ``retry`` waits for ``out_of_sequence`` by default."""


class NoSuchErrorError(StepError):
    """An error: there is no such row in ``processor_error``, or the arguments do not say which."""


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


def add_errors(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command and its sub-commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    about = "List, look at, try again or give up the records of commit logs that could not be decoded (docs/errors.md)."
    errors = commands.add_parser(
        "errors", help="records that could not be decoded: list, retry, discard", description=about, epilog=EXIT_CODES
    )
    kinds = errors.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(errors))

    def add(name: str, run: Callable[..., ExitCode], help: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help, epilog=EXIT_CODES)
        add_conf(parser)
        parser.set_defaults(command=run)
        return parser

    listed = add("list", _list, "count the records by node, segment and reason, the oldest segments first")
    listed.add_argument(
        "--limit", type=_count, default=LISTED, metavar="N", help="print so many lines (default: %(default)s)"
    )
    show = add("show", _show, "print all that is known of one record, with its bytes and what it holds")
    show.add_argument("node", metavar="NODE", help="host id")
    show.add_argument("file", metavar="FILE", help="name of the segment")
    show.add_argument("position", type=int, metavar="POSITION", help="logical position")
    retry = add("retry", _retry, "decode records again, and publish what they hold as late rows")
    retry.add_argument("--file", metavar="F", help="only records of this segment")
    retry.add_argument("--limit", type=_count, metavar="N", help="read about so many records (default: all)")
    retry.add_argument(
        "--timeout",
        type=_seconds,
        default=RETRY_TIMEOUT_S,
        metavar="S",
        help="wait so long for out_of_sequence to publish (default: %(default).0f s)",
    )
    for parser in (listed, retry):
        parser.add_argument("--node", metavar="N", help="only records of this node (host id)")
        parser.add_argument("--reason", default="", metavar="TEXT", help="only records whose reason contains this")
        parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    give_up = add("discard", _discard, "delete records, after all that is known of them was put into an object")
    give_up.add_argument("node", nargs="?", metavar="NODE", help="host id")
    give_up.add_argument("file", nargs="?", metavar="FILE", help="name of the segment")
    give_up.add_argument("positions", nargs="*", type=int, metavar="POSITION", help="logical positions")
    give_up.add_argument("--all", action="store_true", help="all records of --file of --node")
    give_up.add_argument("--node", dest="of_node", metavar="N", help="with --all: host id")
    give_up.add_argument("--file", dest="of_file", metavar="F", help="with --all: name of the segment")
    give_up.add_argument("--reason", required=True, metavar="TEXT", help="why: it is kept with the records")
    give_up.add_argument("--yes", action="store_true", help="do not ask")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def _open(arguments: argparse.Namespace) -> _Place | None:
    """Connect to object store and cluster; None: there is no table yet, so there are no records."""
    config = load_config(arguments.conf)
    store = store_of(config)
    check_layout(store)
    session = connect(cluster_settings(config))
    errors = ErrorTable(session, config.state.keyspace, store, config.sync.max_errors_per_hour)
    return _Place(config, store, session, errors) if errors.is_there() else None


def _list(arguments: argparse.Namespace, console: Console) -> ExitCode:
    place = _open(arguments)
    solved = sum(one.records for one in place.settling.settle()) if place else 0
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


def _show(arguments: argparse.Namespace, console: Console) -> ExitCode:
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
        raise NoSuchErrorError(f"there is no record {key}: nothing was ever written to processor_error")
    return place


def _find(place: _Place, key: ErrorKey) -> tuple[ErrorRow, Record | None]:
    """Find a record, in the table or in an object that a row names; None: the row itself stands for many records.

    :raises NoSuchErrorError: there is none
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
    raise NoSuchErrorError(f"there is no record {key}: cdcservice errors list shows which there are")


def _retry(arguments: argparse.Namespace, console: Console) -> ExitCode:
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
    return ExitCode.COMPLETED_WITH_ERRORS if report.left else ExitCode.OK


def _discard(arguments: argparse.Namespace, console: Console) -> ExitCode:
    if not arguments.reason.strip():
        raise NoSuchErrorError("--reason is empty: say why, it is kept with what is discarded")
    node, file = _partition(arguments)
    place = _required(arguments, f"of {node} {file}")
    keys = [ErrorKey(node, file, position) for position in arguments.positions]
    there = {row.key: row.records for row in place.errors.rows(node, file)} if arguments.all else {}
    for key in keys:
        row = place.errors.row(key)
        if row is None:
            row, _ = _find(place, key)
            raise NoSuchErrorError(
                f"{key} has no row of its own: it is one of {row.records:,} records of {row.key}. Only all of these "
                "can be discarded together; nothing was discarded"
            )
        there[key] = row.records
    if not there:
        raise NoSuchErrorError(f"there is no record of {node} {file}: nothing was discarded")
    if known := there.keys() & waiting(place.store).keys():
        say(console, f"{len(known):,} of them were tried again and wait: their late rows are published all the same")
    if not arguments.yes and not _confirmed(sum(there.values()), console):
        return ExitCode.FATAL
    rows = (row for key in sorted(there) if (row := place.errors.row(key)) is not None)
    done = discard(place.store, place.errors, rows, getpass.getuser(), arguments.reason)
    say(console, f"{done.records:,} records were discarded; what they held is in {', '.join(done.objects)}")
    return ExitCode.OK


def _partition(arguments: argparse.Namespace) -> tuple[str, str]:
    named, of_all = (arguments.node, arguments.file), (arguments.of_node, arguments.of_file)
    if arguments.all and all(of_all) and not any(named):
        return of_all[0], of_all[1]
    if not arguments.all and all(named) and arguments.positions and not any(of_all):
        return named[0], named[1]
    raise NoSuchErrorError("say which records: NODE FILE POSITION…, or --all --node N --file F")


def _confirmed(records: int, console: Console) -> bool:
    if not sys.stdin.isatty():
        say_error("nothing was discarded: nobody can be asked here, so say --yes")
        return False
    say(console, f"discard {records:,} records? They will never be published [y/N]")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say_error("nothing was discarded")
    return False
