"""Arguments of ``cdcservice inspect``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringsync.cql.identifiers import parse_table_name
from ringsync.formats.commitlog.names import parse_position
from ringsync.formats.keystores import KEY_PASSWORD_VARIABLE, PASSWORD_VARIABLE
from ringsync.ring.tokens import WHOLE_RING, parse_token_range
from ringsync.terminal import moment, parsed

FORMATS = ("jsonl", "cql", "parquet", "arrow", "summary")
EXIT_CODES = """\
exit codes: 0 done; 1 done, but something was damaged or could not be decoded: stderr says what; 3 unreadable: no such
file, no commit log or SSTable, wrong schema; 4 interrupted"""

Subparsers = Any


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
    idx.set_defaults(command="ringsync.inspect.command:inspect_idx")


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
        type=moment,
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
    log.set_defaults(command="ringsync.inspect.command:inspect_commitlog", history_conf=history_conf)


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
    sstable.set_defaults(command="ringsync.inspect.command:inspect_sstable")


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


def _contact_point(text: str) -> tuple[str, int | None]:
    """Parse a host, or host and port; an IPv6 address with a port is in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text, ""
    if not host or (port and not port.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST or HOST:PORT")
    return host.strip("[]"), int(port) if port else None
