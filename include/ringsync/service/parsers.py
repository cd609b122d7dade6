"""Arguments of the commands that show and steer the sync, of ``errors`` and of ``schema``.

Each parser names its code as ``module:function``: ``cli.py`` imports that when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ringsync.cql.identifiers import parse_table_name, printable
from ringsync.terminal import count, goes_only_with, moment, parsed, seconds

SERVICE_CODES = """\
exit codes: 0 done, or all is well; 1 start: a worker cannot use cdc_raw of its nodes, a CDC log cannot be read, or
there was no report in time; stop: tasks have not ended in time, or Airflow could not be told; status: something is
wrong; 3 configuration, connection or rights: nothing was done; 4 interrupted"""

START_TIMEOUT_S = 300.0
"""Seconds that ``start`` waits for the workers by default: Airflow and Spark need a minute or two to start."""

STOP_TIMEOUT_S = 300.0
"""Seconds that ``stop`` waits for the loops by default; a merge of replicas may take longer."""

WAIT_CODES = """\
exit codes: 0 all is published; 1 not in time, or a loop does not run: the last line says what is waited for;
3 configuration, connection or rights; 4 interrupted"""

WAIT_TIMEOUT_S = 1800.0
"""Seconds that ``wait`` waits by default: six times as long as buckets of the default length are open."""


def add_service(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """

    def add(
        name: str, code: str, help: str, about: str, epilog: str = SERVICE_CODES, timeout_s: float = 0.0
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=about, epilog=epilog)
        add_conf(parser)
        if timeout_s:
            about_timeout = "wait so long (default: %(default).0f s)"
            parser.add_argument("--timeout", type=seconds, default=timeout_s, metavar="S", help=about_timeout)
        parser.set_defaults(command=code)
        return parser

    start = add(
        "start",
        "ringsync.service.command:start",
        "follow the commit logs, or the CDC logs of ScyllaDB",
        "Check configuration, cluster, object store, brokers and Airflow, start the sync, and wait until the worker of "
        "each queue has found that it can list, read and delete in cdc_raw of its nodes. The cluster is asked whether "
        "it is ScyllaDB; then its CDC logs are read.",
        timeout_s=START_TIMEOUT_S,
    )
    start.add_argument("--check", action="store_true", help="check only, start nothing")
    start.set_defaults(mistake=goes_only_with(start, "--check", "--conf"))
    add(
        "stop",
        "ringsync.service.command:stop",
        "stop following the logs",
        "Let the loops finish their cycle, and start nothing more.",
        timeout_s=STOP_TIMEOUT_S,
    )
    status = add(
        "status",
        "ringsync.service.status_command:status",
        "lag, backlog and what is wrong",
        "Show how the sync stands: docs/sync.md explains each number.",
    )
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as one JSON object")
    form.add_argument("--prometheus", action="store_true", help="the numbers as Prometheus reads them")
    add(
        "wait",
        "ringsync.service.command:wait",
        "wait until all that was written before now is published",
        "Wait until all that was written before now is in the streams, the replicas and Kafka, while others go on "
        "writing. docs/sync.md says how long that takes, and what it relies on.",
        WAIT_CODES,
        WAIT_TIMEOUT_S,
    )


ALARMS_CODES = """\
exit codes: 0 no alarm is raised now; 1 some are, or nobody watches; 3 configuration, connection or rights"""


def add_alarms(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    parser = commands.add_parser(
        "alarms",
        help="what went wrong, and when",
        description="List the alarms that are raised now or were raised in the last days, the oldest first. "
        "docs/runbook.md says what to do about each kind.",
        epilog=ALARMS_CODES,
    )
    add_conf(parser)
    about = "list those of the last so many days (default: %(default)g)"
    parser.add_argument("--days", type=_days, default=1.0, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.set_defaults(command="ringsync.service.alarm_list:alarms")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 3660:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0")
    return days


GAPS_CODES = """\
exit codes: 0 done; list: no gap is open; 1 list: some are; 3 arguments, configuration, connection or rights"""


def add_gaps(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command and its sub-commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    gaps = commands.add_parser(
        "gaps",
        help="what is missing in streams and replicas: list, acknowledge",
        description="A gap is what could not be read: a segment that was removed, an expired part of a CDC log, or a "
        "time in which a table was not followed. cdcservice verify --repair closes it where there is a replica.",
        epilog=GAPS_CODES,
    )
    kinds = gaps.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(gaps))

    def add(name: str, code: str, help: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help, epilog=GAPS_CODES)
        add_conf(parser)
        parser.set_defaults(command=f"ringsync.service.gap_list:{code}")
        return parser

    listed = add("list", "list_gaps", "print the gaps that are open, what is missing in each, and what closes it")
    listed.add_argument("--all", action="store_true", help="also those that were acknowledged")
    listed.add_argument("--json", action="store_true", help="one JSON object per line")
    noted = add("acknowledge", "acknowledge_gaps", "take note of gaps that stay as they are: their alarms clear")
    noted.add_argument("gaps", nargs="+", metavar="GAP", help="as list prints it: gaps/<node>/<segment>.json")
    noted.add_argument("--reason", required=True, metavar="TEXT", help="why: it is kept with the gap")


ERRORS_CODES = """\
exit codes: 0 done; 1 retry: some records are left, and wait, cannot be decoded, or are damage; 3 arguments,
configuration, connection or rights; 4 interrupted"""

LISTED = 100
"""Lines that ``list`` prints by default."""

RETRY_TIMEOUT_S = 300.0
"""Seconds that ``retry`` waits for ``out_of_sequence`` by default."""


def add_errors(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command and its sub-commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    about = "List, look at, try again or give up the records of commit logs that could not be decoded (docs/errors.md)."
    errors = commands.add_parser(
        "errors", help="records that could not be decoded: list, retry, discard", description=about, epilog=ERRORS_CODES
    )
    kinds = errors.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(errors))

    def add(name: str, code: str, help: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help, epilog=ERRORS_CODES)
        add_conf(parser)
        parser.set_defaults(command=f"ringsync.service.errors:{code}")
        return parser

    listed = add("list", "list_errors", "count the records by node, segment and reason, the oldest segments first")
    listed.add_argument(
        "--limit", type=count, default=LISTED, metavar="N", help="print so many lines (default: %(default)s)"
    )
    show = add("show", "show", "print all that is known of one record, with its bytes and what it holds")
    show.add_argument("node", metavar="NODE", help="host id")
    show.add_argument("file", metavar="FILE", help="name of the segment")
    show.add_argument("position", type=int, metavar="POSITION", help="logical position")
    retry = add("retry", "retry", "decode records again, and publish what they hold as late rows")
    retry.add_argument("--file", metavar="F", help="only records of this segment")
    retry.add_argument("--limit", type=count, metavar="N", help="read about so many records (default: all)")
    retry.add_argument(
        "--timeout",
        type=seconds,
        default=RETRY_TIMEOUT_S,
        metavar="S",
        help="wait so long for out_of_sequence to publish (default: %(default).0f s)",
    )
    for parser in (listed, retry):
        parser.add_argument("--node", metavar="N", help="only records of this node (host id)")
        parser.add_argument("--reason", default="", metavar="TEXT", help="only records whose reason contains this")
        parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    give_up = add("discard", "discard_chosen", "delete records, after all that is known of them was put into an object")
    give_up.add_argument("node", nargs="?", metavar="NODE", help="host id")
    give_up.add_argument("file", nargs="?", metavar="FILE", help="name of the segment")
    give_up.add_argument("positions", nargs="*", type=int, metavar="POSITION", help="logical positions")
    give_up.add_argument("--all", action="store_true", help="all records of --file of --node")
    give_up.add_argument("--node", dest="of_node", metavar="N", help="with --all: host id")
    give_up.add_argument("--file", dest="of_file", metavar="F", help="with --all: name of the segment")
    give_up.add_argument("--reason", required=True, metavar="TEXT", help="why: it is kept with the records")
    give_up.add_argument("--yes", action="store_true", help="do not ask")


SCHEMA_CODES = "exit codes: 0 done; 1 done, but a version is damaged; 3 configuration or arguments; 4 interrupted"


def add_schema(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command and its sub-commands to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    schema = commands.add_parser(
        "schema",
        help="show the versions of a table's schema",
        description="Show the versions of a table that ringsync has recorded, and what changed, as CQL.",
        epilog=SCHEMA_CODES,
    )
    kinds = schema.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(schema))

    def add(name: str, code: str, help: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help, epilog=SCHEMA_CODES)
        parser.add_argument("table", type=parsed(_table), metavar="KEYSPACE.TABLE", help="e.g. shop.orders")
        add_conf(parser)
        parser.set_defaults(command=f"ringsync.service.schemas:{code}")
        return parser

    add("history", "history", "list all versions of a table, each with what changed")
    show = add("show", "show", "print the CQL that makes a version of a table (default: the newest)")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--version", type=_number, metavar="N", help="number of the version, as messages name it")
    which.add_argument("--at", type=moment, metavar="TIME", help="the version at this time, e.g. 2026-11-01T12:00Z")
    show.add_argument(
        "--internals",
        action="store_true",
        help="with the table's id and dropped columns, as inspect --schema needs it",
    )
    diff = add("diff", "diff", "print the CQL that turns a version of a table into another (default: the last two)")
    diff.add_argument("first", nargs="?", type=_number, metavar="FROM", help="number of a version")
    diff.add_argument("last", nargs="?", type=_number, metavar="TO", help="number of a version (default: the newest)")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return int(text)


def _table(text: str) -> str:
    return ".".join(printable(name) for name in parse_table_name(text))


LEAVE_CODES = """\
exit codes: 0 ringsync has left, or without --yes: nothing was changed; 1 cdc is still on somewhere, or logs are not
empty: the DAGs stay on; 3 configuration, connection or rights: nothing was changed; 4 interrupted: run it again"""


def add_leave(commands: Any, add_conf: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to cdcservice's parser.

    :param add_conf: function that adds the option ``--conf``
    """
    parser = commands.add_parser(
        "leave",
        help="switch cdc off and stop, so that the cluster needs ringsync no more",
        description="Switch cdc off on all tables that the sync follows, also for prepared statements; wait until what "
        "was logged is published and the logs are empty; switch all DAGs off, and name what is left to remove. Without "
        "--yes it only says what it would do.",
        epilog=LEAVE_CODES,
    )
    add_conf(parser)
    parser.add_argument("--yes", action="store_true", help="do it")
    about = "what becomes of tables with cdc that are not followed"
    parser.add_argument("--others", choices=("keep", "disable"), help=about)
    parser.add_argument("--no-wait", action="store_true", help="what is not published yet is given up")
    about = "wait so long (default: %(default).0f s)"
    parser.add_argument("--timeout", type=seconds, default=WAIT_TIMEOUT_S, metavar="S", help=about)
    parser.set_defaults(command="ringsync.service.leave:leave")
