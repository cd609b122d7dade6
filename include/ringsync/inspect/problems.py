"""Record of what could not be read: a line each on stderr, at most a few of a kind, and the exit code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ringsync.steps.application import ExitCode

LINES_PER_REASON = 5


@dataclass
class Problems:
    """The problems so far.

    :ivar say: function that prints a line for people
    :ivar code: the program's exit code: the worst so far
    """

    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    code: ExitCode = ExitCode.OK
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lost(self, file: str, position: int, length: int, reason: str) -> None:
        """Report a part of a segment that cannot be read, or that the schema does not explain.

        :param position: logical position
        """
        self.code = max(self.code, ExitCode.COMPLETED_WITH_ERRORS)
        self._seen[file, reason] += 1
        if self._seen[file, reason] <= LINES_PER_REASON:
            self.say(f"{file}: position {position}, {length} bytes: {reason}")

    def imperfect(self, text: str) -> None:
        """Report that the output lacks something."""
        self.code = max(self.code, ExitCode.COMPLETED_WITH_ERRORS)
        self.say(text)

    def unreadable(self, text: str) -> None:
        """Report a file of which nothing can be read."""
        self.code = max(self.code, ExitCode.FATAL)
        self.say(f"ringsync: error: {text}")

    def finish(self, file: str) -> None:
        """Print the number of a segment's problems that have no line of their own."""
        for (name, reason), count in self._seen.items():
            if name == file and count > LINES_PER_REASON:
                self.say(f"{file}: {count - LINES_PER_REASON:,} more: {reason}")
