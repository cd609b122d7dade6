"""Run programs of bench/commitlog.py on one core; each prints a line of JSON for each pass."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servers import ServerError, last_lines


@dataclass(frozen=True)
class Pass:
    """One reading of all segments.

    :ivar seconds: wall clock
    :ivar cpu_seconds: user and system time of the process meanwhile
    :ivar mutations: records that were decoded
    :ivar rows: rows, ranges and partition deletions in them
    :ivar cells: cells in these rows
    :ivar written: bytes of files
    """

    seconds: float
    cpu_seconds: float
    mutations: int
    rows: int
    cells: int
    written: int = 0


@dataclass(frozen=True)
class Passes:
    """The results of a program.

    :ivar passes: the passes in the order in which they were made
    :ivar ready_seconds: from the start of the process to the first decoded batch, if the program reports it
    :ivar end_seconds: from the start of the process to its end
    :ivar cpu_seconds: user and system time of the whole process
    :ivar peak_mb: largest resident memory
    """

    passes: tuple[Pass, ...]
    ready_seconds: float | None
    end_seconds: float
    cpu_seconds: float
    peak_mb: float

    @property
    def warm(self) -> Pass:
        """The best pass by CPU time; the first pass counts only if it is the only one."""
        return min(self.passes[1:] or self.passes, key=lambda one: one.cpu_seconds)


@dataclass(frozen=True)
class Finished:
    """What a program has printed and used.

    :ivar lines: the lines of its output
    :ivar began: when it was started, monotonic clock
    :ivar seconds: from the start of the process to its end
    :ivar cpu_seconds: user and system time of the whole process
    :ivar peak_mb: largest resident memory
    """

    lines: list[dict[str, Any]]
    began: float
    seconds: float
    cpu_seconds: float
    peak_mb: float


def on_one_core(command: Sequence[str], core: int, name: str, environment: dict[str, str] | None = None) -> Passes:
    """Run a program until it ends.

    Each line of its output is a JSON object: a pass, or ``first_batch``, a time of the monotonic clock.

    :param core: number of the only core that the program may use
    :param name: the program's name in messages
    :param environment: variables that the program gets beside ours
    :raises ServerError: it fails; with its last lines
    """
    done = run_on_one_core(command, core, name, environment)
    ready = [line["first_batch"] - done.began for line in done.lines if "first_batch" in line]
    passes = tuple(Pass(**line) for line in done.lines if "first_batch" not in line)
    return Passes(passes, min(ready, default=None), done.seconds, done.cpu_seconds, done.peak_mb)


def run_on_one_core(
    command: Sequence[str], core: int, name: str, environment: dict[str, str] | None = None
) -> Finished:
    """Run a program that prints a JSON object in each line, until it ends. The parameters are :func:`on_one_core`'s.

    :raises ServerError: it fails; with its last lines
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=os.environ | (environment or {}),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        _, status, usage = os.wait4(process.pid, 0)
        end = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        printed = output.read()
        if process.returncode != 0:
            raise ServerError(f"{name} failed:\n{last_lines(printed + errors.read(), 40)}")
    lines = [json.loads(line) for line in printed.splitlines()]
    return Finished(lines, began, end, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
