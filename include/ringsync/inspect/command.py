"""``cdcservice inspect``: commit logs and SSTables for people and programs, without a cluster, Spark or Airflow."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.config import ConfigError, load_config
from ringsync.cql.identifiers import parse_table_name
from ringsync.formats.commitlog.names import INDEX_SUFFIX, parse_position
from ringsync.formats.keystores.lookup import KEY_PASSWORD_VARIABLE, PASSWORD_VARIABLE, keys_in
from ringsync.formats.keystores.passwords import KeystoreError
from ringsync.images.times import UnrepresentableValueError
from ringsync.images.values import shown_values, values_schema
from ringsync.inspect.commitlog import Inspection
from ringsync.inspect.files import InspectError, find_files, index_text, read_indexes, replaced
from ringsync.inspect.history import last_write_us, parse_moment, recorded_schema
from ringsync.inspect.outputs import ArrowFile, CqlLines, JsonLines, Output
from ringsync.inspect.problems import Problems
from ringsync.inspect.sstable import SSTableInspection, Wanted, find_table, shown_rows, shown_schema
from ringsync.inspect.summary import SSTableSummary, sstables_text, summary_text
from ringsync.inspect.tables import Tables, choose_tables
from ringsync.ring.tokens import WHOLE_RING, parse_token_range
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, SchemaError
from ringsync.steps.application import ExitCode
from ringsync.storage.port import StorageError
from ringsync.wiring import cluster_settings, store_of

FORMATS = ("jsonl", "cql", "parquet", "arrow", "summary")
EXIT_CODES = """\
exit codes: 0 done; 1 done, but something was damaged or could not be decoded: stderr says what; 3 unreadable: no such
file, no commit log or SSTable, wrong schema; 4 interrupted"""

Subparsers = Any
T = TypeVar("T")


def add_inspect(commands: Subparsers, history_conf: str) -> None:
    """Add the command and its own sub-commands to cdcservice's parser.

    :param history_conf: path of the configuration that ``--history`` takes without ``--conf``
    """
    inspect = commands.add_parser(
        "inspect",
        help="show what is in commit log segments and SSTables",
        description="Show what is in Cassandra's commit log segments (cdc_raw), the indexes beside them, and SSTables.",
        epilog=EXIT_CODES,
    )
    kinds = inspect.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(inspect))
    _add_commitlog(kinds, history_conf)
    _add_sstable(kinds)
    idx = kinds.add_parser(
        "idx",
        help="show what the _cdc.idx files say",
        description="Show how far each segment is synced, and whether it is completed.",
        epilog=EXIT_CODES,
    )
    idx.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="_cdc.idx files, or folders of them")
    idx.add_argument("--format", choices=("text", "jsonl"), default="text", help="default: text")
    idx.set_defaults(command=_inspect_idx)


def _add_commitlog(kinds: Subparsers, history_conf: str) -> None:
    log = kinds.add_parser(
        "commitlog",
        help="show the change rows in segments",
        description="Show the change rows in commit log segments, of all tables of the schema or of some. The index "
        "beside a segment tells how far it is synced; later changes are not shown.",
        epilog=EXIT_CODES,
    )
    log.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="segments (.log), or folders of them")
    source = log.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="CQL with table ids: what DESCRIBE SCHEMA WITH INTERNALS prints, or schema.cql files of snapshots",
    )
    source.add_argument(
        "--contact-point", type=_contact_point, metavar="HOST[:PORT]", help="read the schema from this cluster instead"
    )
    source.add_argument(
        "--history",
        action="store_true",
        help="take the schema that ringsync recorded, as it was when the segments were written; also of dropped tables",
    )
    log.add_argument(
        "--at-time",
        dest="at_us",
        type=parse_moment,
        metavar="TIME",
        help="with --history: the schema of this time, e.g. 2026-11-01T12:00Z (default: of the segments' last write)",
    )
    log.add_argument(
        "--conf",
        metavar="PATH",
        help="ringsync.yaml: for --contact-point user, password and TLS; for --history the object store "
        "(default: for --contact-point none; for --history $RINGSYNC_CONFIG, or config/ringsync.yaml)",
    )
    log.add_argument(
        "--table",
        dest="tables",
        action="append",
        default=[],
        type=parsed(parse_table_name),
        metavar="KEYSPACE.TABLE",
        help="show only this table; may be given several times (default: all but Cassandra's own)",
    )
    log.add_argument(
        "--from",
        dest="start",
        type=parsed(parse_position),
        metavar="[SEGMENT_ID:]POSITION",
        help="show only what lies behind this logical position",
    )
    log.add_argument(
        "--keystore",
        type=Path,
        metavar="FILE",
        help="for encrypted segments: Cassandra's keystore (JCEKS, PKCS12), with its password in the variable "
        f"{PASSWORD_VARIABLE}, the key's in {KEY_PASSWORD_VARIABLE} if it has another; or a file with the AES key",
    )
    log.add_argument(
        "--ignore-idx", action="store_true", help="read segments to their end, including what was never synced"
    )
    _add_output(log)
    log.set_defaults(command=_inspect_commitlog, history_conf=history_conf)


def _add_sstable(kinds: Subparsers) -> None:
    sstable = kinds.add_parser(
        "sstable",
        help="show the rows in SSTables",
        description="Show the rows of one table in SSTables: one after another as they are, or merged.",
        epilog=EXIT_CODES,
    )
    sstable.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="SSTables (…-Data.db), or folders of them, also of snapshots",
    )
    sstable.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="CQL that has the table (default: the schema.cql of a snapshot; without one the SSTables say it "
        "themselves, all but the names of the key's columns)",
    )
    sstable.add_argument(
        "--table",
        type=parsed(parse_table_name),
        metavar="KEYSPACE.TABLE",
        help="the table, if the folders have several",
    )
    sstable.add_argument("--merge", action="store_true", help="show each row once, as all SSTables together hold it")
    sstable.add_argument(
        "--values",
        action="store_true",
        help="with --merge, parquet and arrow: the columns of the rows that a SELECT shows, without their times",
    )
    part = sstable.add_mutually_exclusive_group()
    part.add_argument("--key", metavar="LITERALS", help="only this partition, e.g. \"'eu', 7\"")
    part.add_argument(
        "--token-range",
        type=parsed(parse_token_range),
        default=WHOLE_RING,
        metavar="START:END",
        help="only tokens above START, up to END; --token-range=-5:9 if START is negative",
    )
    _add_output(sstable)
    sstable.set_defaults(command=_inspect_sstable)


def _add_output(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--format", choices=FORMATS, default="jsonl", help="docs/inspect.md describes each (default: jsonl)"
    )
    kind.add_argument("--raw", action="store_true", help="jsonl: print also the bytes of keys, paths and values")
    kind.add_argument(
        "--remaining-ttl",
        action="store_true",
        help="cql: print what is left of each TTL now, so that expiry stays the same",
    )
    kind.add_argument("--output", type=Path, metavar="FILE", help="write here (default: standard output)")


def _inspect_commitlog(arguments: argparse.Namespace, _console: Console) -> ExitCode:
    problems = Problems()
    with _reporting(problems):
        _check_output(arguments)
        if arguments.at_us is not None and not arguments.history:
            raise InspectError("--at-time chooses a version of the history: say --history, too")
        paths = find_files(arguments.paths, "CommitLog-*.log")
        keys = keys_in(arguments.keystore, os.environ) if arguments.keystore else None
        schema = _schema_of_history(arguments, paths, keys, problems) if arguments.history else _schema(arguments)
        tables = choose_tables(schema, arguments.tables)
        sizes = {path: path.stat().st_size for path in paths}
        with _target(arguments.output) as file, _progress(sizes, arguments.output is None) as progress:
            output = _output(arguments, file, tables, problems)
            inspection = Inspection(tables, output, problems, arguments.ignore_idx, keys, progress)
            inspection.read(paths, arguments.start)
            output.close()
            if arguments.format == "summary":
                file.write(summary_text(inspection.summary, tables.by_id).encode())
    return problems.code


def _inspect_sstable(arguments: argparse.Namespace, _console: Console) -> ExitCode:
    problems = Problems()
    with _reporting(problems):
        _check_output(arguments)
        is_typed = arguments.merge and arguments.format in ("parquet", "arrow")
        if arguments.values and not is_typed:
            raise InspectError("--values makes a typed file: say --merge and --format parquet or arrow, too")
        schema = _schema_of_file(arguments.schema) if arguments.schema else None
        found = find_table(arguments.paths, arguments.table, schema, problems)
        table = found.table
        wanted = Wanted.of_key(arguments.key, table) if arguments.key is not None else Wanted(arguments.token_range)
        tables = Tables({table.table_id: table}, frozenset([table.table_id]), {})
        of_rows, rows_of = (values_schema, shown_values) if arguments.values else (shown_schema, shown_rows)
        with _target(arguments.output) as file, _progress(found.sizes, arguments.output is None) as progress:
            output = _output(arguments, file, tables, problems, of_rows(table) if is_typed else CHANGE_ROWS)
            inspection = SSTableInspection(table, wanted, problems, progress, SSTableSummary(left_out=found.left_out))
            if not arguments.merge:
                batches = inspection.read(found.sources)
            elif is_typed:
                batches = rows_of(inspection.merged(found.sources, with_source=False), table, int(time.time()))
            else:
                batches = (part.rows.to_arrow() for part in inspection.merged(found.sources))
            for batch in batches:
                output.write(batch)
            output.close()
            if arguments.format == "summary":
                file.write(sstables_text(inspection.summary, tables.by_id).encode())
    return problems.code


def _inspect_idx(arguments: argparse.Namespace, _console: Console) -> ExitCode:
    problems = Problems()
    with _reporting(problems):
        for index in read_indexes(find_files(arguments.paths, f"CommitLog-*{INDEX_SUFFIX}"), problems):
            print(index_text(index) if arguments.format == "text" else json.dumps(index, separators=(",", ":")))
    return problems.code


@contextmanager
def _reporting(problems: Problems) -> Iterator[None]:
    try:
        yield
    except (InspectError, SchemaError, KeystoreError, UnrepresentableValueError) as error:
        problems.unreadable(str(error))
    except BrokenPipeError:
        # The reader of stdout has gone. Without this, Python complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.format in ("parquet", "arrow") and arguments.output is None:
        raise InspectError(f"--format {arguments.format} makes a file: say which with --output FILE")


def _schema(arguments: argparse.Namespace) -> Schema:
    if arguments.schema is None:
        return _schema_of_cluster(arguments.contact_point, arguments.conf)
    return _schema_of_file(arguments.schema)


def _schema_of_file(path: Path) -> Schema:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InspectError(f"--schema {path}: {error}") from error
    return parse_schema(text, path.name)


def _schema_of_history(
    arguments: argparse.Namespace, paths: Sequence[Path], keys: Callable[[str], bytes] | None, problems: Problems
) -> Schema:
    try:
        store = store_of(load_config(arguments.conf or arguments.history_conf))
        schema = recorded_schema(store, arguments.at_us, problems)
        if arguments.at_us is not None:
            return schema
        at_us = last_write_us(schema, paths, arguments.start, arguments.ignore_idx, keys, arguments.tables)
        # What is damaged has been told.
        return recorded_schema(store, at_us, Problems(say=lambda text: None))
    except (ConfigError, StorageError) as error:
        raise InspectError(f"--history: {error}") from error


def _schema_of_cluster(contact_point: tuple[str, int | None], conf: str | None) -> Schema:
    from ringsync.cluster.schema import read_tables
    from ringsync.cluster.session import ClusterError, ClusterSettings, close_all, connect

    host, port = contact_point
    settings = cluster_settings(load_config(conf)) if conf else ClusterSettings((host,))
    settings = replace(settings, contact_points=(host,), local_datacenter=None, port=port or settings.port)
    try:
        return read_tables(connect(settings))
    except ClusterError as error:
        raise InspectError(f"--contact-point: {error}") from error
    finally:
        close_all()


def _output(
    arguments: argparse.Namespace,
    file: BinaryIO,
    tables: Tables,
    problems: Problems,
    schema: pa.Schema = CHANGE_ROWS,
) -> Output:
    match arguments.format:
        case "jsonl":
            return JsonLines(file, tables, problems, arguments.raw)
        case "cql":
            return CqlLines(file, tables, problems, arguments.remaining_ttl)
        case "arrow" | "parquet" as kind:
            are_values = getattr(arguments, "values", False)
            return ArrowFile(file, tables, kind == "parquet", schema, are_values=are_values)
    return Output()


@contextmanager
def _target(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with replaced(path) as file:
            yield file
    except OSError as error:
        raise InspectError(f"--output {path}: {error}") from error


@contextmanager
def _progress(sizes: Mapping[Path, int], to_stdout: bool) -> Iterator[Callable[[Path, float], None]]:
    """Show a bar on stderr, unless stderr is no terminal, or the output goes to the same terminal.

    :param sizes: bytes of each file that will be read, in this order
    """
    console = Console(stderr=True)
    hidden = not console.is_terminal or (to_stdout and sys.stdout.isatty())
    with Progress(console=console, transient=True, disable=hidden) as bar:
        shown = bar.add_task("reading", total=sum(sizes.values()))
        before = 0
        done: set[Path] = set()

        def advance(path: Path, fraction: float) -> None:
            nonlocal before
            bar.update(shown, completed=before + sizes[path] * fraction, description=path.name)
            if fraction == 1 and path not in done:
                done.add(path)
                before += sizes[path]

        yield advance


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Make the type of an argument: argparse shows the messages of its own errors only."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _contact_point(text: str) -> tuple[str, int | None]:
    """Parse a host, or host and port; an IPv6 address with a port is in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text, ""
    if not host or (port and not port.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT")
    return host.strip("[]"), int(port) if port else None
