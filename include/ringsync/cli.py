"""Command line ``cdcservice``: starts ringsync's DAGs and follows them, and looks into commit logs.

It answers in a moment. What a parser needs is light; the code of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from ringsync import __version__
from ringsync.inspect.parser import add_inspect
from ringsync.orchestration import config_path
from ringsync.service.parsers import add_alarms, add_errors, add_gaps, add_leave, add_schema, add_service
from ringsync.service.run_parsers import RUN_CODES, add_bootstrap, add_limits, add_verify
from ringsync.terminal import ExitCode, say_error

if TYPE_CHECKING:
    from rich.console import Console

Code = Callable[[argparse.Namespace, "Console"], ExitCode]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 3, fatal: argparse's own 2 means too many errors here."""
        self.print_usage(sys.stderr)
        if message.endswith("--token-range: expected one argument"):
            message += ", such as --token-range=-5:9: a number below 0 alone looks like an option"
        self.exit(ExitCode.FATAL, f"ringsync: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run cdcservice, and return its exit code.

    :param argv: arguments; None: those of the process
    """
    cdcservice = parser()
    arguments = cdcservice.parse_args(argv)
    if mistake := arguments.mistake(arguments):
        cdcservice.error(mistake)
    from rich.console import Console

    try:
        return code_of(arguments.command)(arguments, Console(soft_wrap=True))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        if not type(error).__module__.startswith("ringsync."):
            raise
        say_error(error)
        return ExitCode.FATAL


def code_of(command: str) -> Code:
    """Import the code of a command.

    :param command: ``module:function``
    """
    module, _, function = command.partition(":")
    code: Code = getattr(import_module(module), function)
    return code


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    cdcservice = _Parser(
        prog="cdcservice",
        description="Verified replicas and change streams of Cassandra tables, through Airflow and Spark.",
        epilog=RUN_CODES,
    )
    cdcservice.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = cdcservice.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    add_bootstrap(commands, _conf)
    add_verify(commands, _conf)
    add_limits(commands, _conf)
    # A new command: a function in service/parsers.py that adds its arguments, and one line here. Its code goes into a
    # module of its own, e.g. service/gaps.py, which imports what it likes: the parser only names it, as
    # set_defaults(command="ringsync.service.gaps:gaps"). service/parsers.py itself imports what is light.
    add_service(commands, _conf)
    add_leave(commands, _conf)
    add_alarms(commands, _conf)
    add_errors(commands, _conf)
    add_gaps(commands, _conf)
    add_schema(commands, _conf)
    add_inspect(commands, config_path())
    cdcservice.set_defaults(mistake=lambda arguments: "")
    return cdcservice


def _conf(of_command: argparse.ArgumentParser) -> None:
    of_command.add_argument(
        "--conf",
        default=config_path(),
        metavar="PATH",
        help="ringsync.yaml with the same store that Airflow uses (default: $RINGSYNC_CONFIG, or config/ringsync.yaml)",
    )


if __name__ == "__main__":
    sys.exit(main())
