"""Arguments of the commands ``bootstrap``, ``verify`` and ``limits``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from ringsync.cql.identifiers import parse_column_names, parse_table_patterns, printable
from ringsync.ring.tokens import parse_token_range
from ringsync.terminal import count, goes_only_with, parsed

RUN_CODES = """\
exit codes: 0 done; 1 done, with differences or errors; 2 given up, too many errors; 3 fatal: arguments,
configuration, connection or rights; 4 interrupted (the run goes on in Airflow); 5 crashed"""


LIMITS: dict[str, tuple[str, str, float]] = {
    "rows_per_s": ("--rows-per-s", "rows a second", 1),
    "bytes_per_s": ("--megabytes-per-s", "megabytes of result pages a second", 1e6),
    "concurrent_requests": ("--concurrent-requests", "pages on their way at once", 1),
}
"""Fields of :class:`ringsync.cluster.limits.Limits`: option, help, and the size of the unit in units of the field."""


def add_bootstrap(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    bootstrap = commands.add_parser(
        "bootstrap",
        help="make verified replicas of tables",
        description="Start the DAG bootstrap_table: plan, read by token ranges, write replica and stream, verify.",
        epilog=RUN_CODES,
    )
    _common(bootstrap, add_conf)
    bootstrap.add_argument(
        "--mode",
        choices=("token_range", "sstable"),
        help="where the rows are read: SELECTs, or snapshots of the nodes (default: scan.mode)",
    )
    bootstrap.add_argument("--splits", type=count, metavar="N", help="pieces of the ring (default: by estimated size)")
    bootstrap.add_argument(
        "--columns",
        type=parsed(_columns),
        metavar="NAME,…",
        help="copy only these value columns, and the key (default: all)",
    )
    bootstrap.add_argument(
        "--token-range",
        type=parsed(_token_range),
        metavar="START:END",
        help="copy only tokens above START, up to END; --token-range=-5:9 if START is negative",
    )
    bootstrap.add_argument(
        "--where", type=_where, metavar="CQL", help="copy only rows whose key fits, e.g. \"day >= '2026-01-01'\""
    )
    bootstrap.add_argument(
        "--restart", action="store_true", help="begin anew, even if an unfinished bootstrap could be continued"
    )
    bootstrap.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not compare source and replica afterwards"
    )
    bootstrap.add_argument("--enable-cdc", action="store_true", help="ALTER the table, so that the sync follows it")
    bootstrap.add_argument(
        "--cancel", action="store_true", help="end an unfinished bootstrap of the table; its stream goes on"
    )
    bootstrap.add_argument("--dry-run", action="store_true", help="check and plan only, copy nothing")
    cancels_only = goes_only_with(bootstrap, "--cancel", "--table", "--tables-from", "--conf")
    bootstrap.set_defaults(
        command="ringsync.service.runs:bootstrap",
        dag="bootstrap_table",
        mistake=lambda arguments: _names_tables(arguments) or cancels_only(arguments),
        parameters=("mode", "splits", "columns", "token_range", "where", "restart", "verify", "enable_cdc", "dry_run"),
    )


def add_verify(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    verify = commands.add_parser(
        "verify",
        help="compare replicas with their sources",
        description="Start the DAG replica_verify: compare source and replica cell by cell.",
        epilog=RUN_CODES,
    )
    _common(verify, add_conf)
    verify.add_argument("--repair", action="store_true", help="read ranges that differ again, and correct the replica")
    verify.set_defaults(mistake=_names_tables, dag="replica_verify", parameters=("repair",))


def add_limits(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    limits = commands.add_parser(
        "limits",
        help="show or change the limits of reading from the cluster",
        description="Show or change the limits of all runs together. A change takes effect within seconds; other "
        "limits stay as they are.",
        epilog=RUN_CODES,
    )
    add_conf(limits)
    for name, (option, meaning, _) in LIMITS.items():
        kind = _requests if name == "concurrent_requests" else _amount
        limits.add_argument(option, dest=name, type=kind, metavar="N", help=f"{meaning}; none: no limit")
    limits.add_argument("--reset", action="store_true", help="go back to the limits of the configuration")
    limits.set_defaults(command="ringsync.service.limits:limits", mistake=goes_only_with(limits, "--reset", "--conf"))


def _common(parser: argparse.ArgumentParser, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    parser.add_argument(
        "--table",
        action="append",
        type=parsed(_tables),
        metavar="KEYSPACE.TABLE",
        help="e.g. shop.orders, or a pattern with * and ?, e.g. 'shop.*'; several times for several",
    )
    parser.add_argument(
        "--tables-from", metavar="FILE", help="file with one name or pattern a line; # begins a comment"
    )
    add_conf(parser)
    parser.add_argument("--wait", action="store_true", help="follow the run to its end and show its result")
    parser.set_defaults(command="ringsync.service.runs:run_dag")


def _names_tables(arguments: argparse.Namespace) -> str:
    return "" if arguments.table or arguments.tables_from else "the following arguments are required: --table"


def _tables(text: str) -> str:
    return ", ".join(map(str, parse_table_patterns(text)))


def _amount(text: str) -> float:
    """Parse a limit; 0 stands for ``none``."""
    try:
        amount = 0.0 if text == "none" else float(text)
    except ValueError:
        amount = math.nan
    if text != "none" and not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, nor none")
    return amount


def _requests(text: str) -> int:
    return 0 if text == "none" else count(text)


def _columns(text: str) -> str:
    return ",".join(printable(name) for name in parse_column_names(text))


def _where(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: leave the option out to copy all rows")
    return text


def _token_range(text: str) -> str:
    parse_token_range(text)
    return text
