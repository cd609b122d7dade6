"""What all commands of ``cdcservice`` need: exit codes, the types of their arguments, a line of output or error.

It is imported before it is known what a command needs, so it imports only what is light.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


class ExitCode(IntEnum):
    """Exit codes of applications and of cdcservice, like dsbulk's (docs/airflow.md)."""

    OK = 0
    COMPLETED_WITH_ERRORS = 1
    TOO_MANY_ERRORS = 2
    FATAL = 3
    INTERRUPTED = 4
    CRASHED = 5


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False)


def say_error(error: object) -> None:
    """Print an error on stderr."""
    print(f"ringsync: error: {error}", file=sys.stderr, flush=True)


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Make the type of an argument: argparse shows the messages of its own errors only."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def goes_only_with(
    parser: argparse.ArgumentParser, option: str, *companions: str
) -> Callable[[argparse.Namespace], str]:
    """Make the check of a command with an option that leaves most others without effect.

    :param option, companions: the option, and those that may stand beside it, e.g. ``--cancel``
    :returns: function that returns what is wrong with the arguments; empty: nothing
    """

    def check(arguments: argparse.Namespace) -> str:
        options = [action for action in parser._actions if action.option_strings and action.dest in arguments]
        given = {one.option_strings[0] for one in options if getattr(arguments, one.dest) != one.default}
        others = sorted(given - {option, *companions})
        return f"{option} does not go with {', '.join(others)}" if option in given and others else ""

    return check


def count(text: str) -> int:
    """Parse a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time to wait, s."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def moment(text: str) -> int:
    """Parse a time, in UTC if it names no zone, to µs since the epoch."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-11-01T12:00Z") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return round(at.timestamp() * 1_000_000)
