"""``cdcservice inspect``: commit logs and SSTables for people and programs, without a cluster, Spark or Airflow."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.config import ConfigError, load_config
from ringsync.formats.commitlog.names import INDEX_SUFFIX
from ringsync.formats.keystores.lookup import keys_in
from ringsync.formats.keystores.passwords import KeystoreError
from ringsync.images.times import UnrepresentableValueError
from ringsync.images.values import shown_values, values_schema
from ringsync.inspect.commitlog import Inspection
from ringsync.inspect.files import InspectError, find_files, index_path, index_text, read_indexes, replaced, size_of
from ringsync.inspect.history import last_write_us, recorded_schema
from ringsync.inspect.outputs import ArrowFile, CqlLines, JsonLines, Output
from ringsync.inspect.problems import Problems
from ringsync.inspect.sstable import SSTableInspection, Wanted, find_table, shown_rows, shown_schema
from ringsync.inspect.summary import SSTableSummary, sstables_text, summary_text
from ringsync.inspect.tables import Tables, choose_tables
from ringsync.schema.from_cql import parse_schema
from ringsync.schema.table import Schema, SchemaError
from ringsync.steps.application import ExitCode
from ringsync.storage.port import StorageError
from ringsync.wiring import cluster_settings, store_of


def inspect_commitlog(arguments: argparse.Namespace, _console: Console) -> ExitCode:
    problems = Problems()
    with _reporting(problems):
        if arguments.at_us is not None and not arguments.history:
            raise InspectError("--at-time chooses a version of the history: say --history, too")
        _check_output(arguments)
        paths = find_files(arguments.paths, "CommitLog-*.log")
        keys = keys_in(arguments.keystore, os.environ) if arguments.keystore else None
        schema = _schema_of_history(arguments, paths, keys, problems) if arguments.history else _schema(arguments)
        tables = choose_tables(schema, arguments.tables)
        sizes = {path: size_of(path) for path in paths}
        read = [*paths, *map(index_path, paths)]
        with _target(arguments, read) as file, _progress(sizes, arguments.output is None) as progress:
            output = _output(arguments, file, tables, problems)
            inspection = Inspection(tables, output, problems, arguments.ignore_idx, keys, progress)
            inspection.read(paths, arguments.start)
            output.close()
            if arguments.format == "summary":
                file.write(summary_text(inspection.summary, tables.by_id).encode())
    return problems.code


def inspect_sstable(arguments: argparse.Namespace, _console: Console) -> ExitCode:
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
        read = [part for data in found.sizes for part in data.parent.glob(data.name.replace("Data.db", "*"))]
        with _target(arguments, read) as file, _progress(found.sizes, arguments.output is None) as progress:
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


def inspect_idx(arguments: argparse.Namespace, _console: Console) -> ExitCode:
    problems = Problems()
    with _reporting(problems):
        for index in read_indexes(find_files(arguments.paths, f"CommitLog-*{INDEX_SUFFIX}"), problems):
            print(index_text(index) if arguments.format == "text" else json.dumps(index, separators=(",", ":")))
    return problems.code


@contextmanager
def _reporting(problems: Problems) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # The reader of stdout has gone. Without this, Python complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (InspectError, SchemaError, KeystoreError, UnrepresentableValueError, OSError) as error:
        problems.unreadable(str(error))


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.format in ("parquet", "arrow") and arguments.output is None:
        raise InspectError(f"--format {arguments.format} makes a file: say which with --output FILE")
    for option, its_format in (("raw", "jsonl"), ("remaining_ttl", "cql")):
        if getattr(arguments, option) and arguments.format != its_format:
            raise InspectError(f"--{option.replace('_', '-')} is for --format {its_format}")
    if getattr(arguments, "conf", None) and arguments.schema is not None:
        raise InspectError("--conf is for --contact-point and --history: --schema needs none")


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
def _target(arguments: argparse.Namespace, inputs: Iterable[Path]) -> Iterator[BinaryIO]:
    path: Path | None = arguments.output
    read = [
        file for file in (*inputs, arguments.schema, getattr(arguments, "keystore", None)) if file and file.exists()
    ]
    if path is not None and path.exists() and any(path.samefile(file) for file in read):
        raise InspectError(f"--output {path} is a file that is read: it would be replaced. Name another")
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with replaced(path) as file:
            yield file
    except OSError as error:
        raise InspectError(f"--output {path} is not written: {error}") from error


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
