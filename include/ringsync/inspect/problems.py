"""What could not be read: a line each on stderr, a few of a kind, and the exit code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ringsync.steps.application import ExitCode

LINES_PER_REASON = 5


def print_line(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)


@dataclass
class Problems:
    """What went wrong so far.

    :ivar say: prints a line for people
    :ivar code: what the program will end with; the worst so far
    """

    say: Callable[[str], None] = print_line
    code: ExitCode = ExitCode.OK
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lost(self, file: str, position: int, length: int, reason: str) -> None:
        """Something of a segment that nobody can read, or that the schema does not explain.

        :param position: logical
        :param length: bytes
        """
        self.code = max(self.code, ExitCode.COMPLETED_WITH_ERRORS)
        self._seen[file, reason] += 1
        if self._seen[file, reason] <= LINES_PER_REASON:
            self.say(f"{file}: position {position}, {length} bytes: {reason}")

    def imperfect(self, text: str) -> None:
        """What is printed is not all that is there."""
        self.code = max(self.code, ExitCode.COMPLETED_WITH_ERRORS)
        self.say(text)

    def unreadable(self, text: str) -> None:
        """A whole file of which nothing can be read."""
        self.code = max(self.code, ExitCode.FATAL)
        self.say(f"ringsync: error: {text}")

    def finish(self, file: str) -> None:
        """Say how much of a segment was not said."""
        for (name, reason), count in self._seen.items():
            if name == file and count > LINES_PER_REASON:
                self.say(f"{file}: {count - LINES_PER_REASON:,} more: {reason}")
