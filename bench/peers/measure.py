"""Measure reads for bench/scan.py: rows, wall clock, CPU of the client's processes and of the server.

This module needs only the standard library, because peers import it in environments of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

BARRIER_SECONDS = 600
TICKS = os.sysconf("SC_CLK_TCK")

_barrier: Any = None
"""Barrier at which the processes of one read wait for each other; each gets it when it starts."""


@dataclass(frozen=True)
class Work:
    """Counts of one read of a table, or of a part of it.

    :ivar rows: number of rows read
    :ivar written_bytes: size of the written files; 0 if rows are dropped
    """

    rows: int
    written_bytes: int = 0


@dataclass(frozen=True)
class Measurement:
    """One timed read of the whole table.

    :ivar rows: number of rows read
    :ivar seconds: wall clock, without the client's start-up
    :ivar client_seconds: user and system time of all processes of the client
    :ivar server_seconds: user and system time of the Cassandra node meanwhile
    :ivar written_bytes: size of the written files
    """

    rows: int
    seconds: float
    client_seconds: float
    server_seconds: float
    written_bytes: int

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


def cpu_seconds(root: int) -> float:
    """Sum user and system time of a process and all its descendants, including dead ones that were waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # man proc: pid (name) state parent …; fields 14 to 17 are the times, counting from 1
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since
            parents[int(entry)] = int(fields[1])
            ticks[int(entry)] = sum(map(int, fields[11:15]))
    return sum(used for pid, used in ticks.items() if descends(pid, root, parents)) / TICKS


def peak_mb(pid: int) -> float:
    """Read the largest resident memory that a process ever had, without its children."""
    lines = Path("/proc", str(pid), "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root


def timed(read: Callable[[], Work], server: int) -> tuple[Measurement, float]:
    """Measure one call in this process; return also when it began (monotonic clock, the same in all processes).

    :param server: process id of the Cassandra node
    """
    client, node, began = cpu_seconds(os.getpid()), cpu_seconds(server), time.monotonic()
    work = read()
    seconds = time.monotonic() - began
    client, node = cpu_seconds(os.getpid()) - client, cpu_seconds(server) - node
    return Measurement(work.rows, seconds, client, node, work.written_bytes), began


def together(
    prepare: Callable[..., Callable[[], Work]], shares: Sequence[tuple[Any, ...]], server: int, repeats: int
) -> list[Measurement]:
    """Measure reads by several processes that begin at the same moment, each with a share of the table.

    :param prepare: function that connects, warms up and returns the read; called in each process
    :param shares: the arguments of ``prepare``, one tuple per process
    :param server: process id of the Cassandra node
    :param repeats: how often the table is read
    """
    context = get_context("spawn")
    barrier = context.Barrier(len(shares))
    with ProcessPoolExecutor(len(shares), context, initializer=_keep, initargs=(barrier,)) as pool:
        running = [pool.submit(_reads, prepare, share, server, repeats) for share in shares]
        errors = [future.exception() for future in running]
        # The process that failed reports why; the others report only that they waited in vain.
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        by_process = [future.result() for future in running]
    return [_joined(parts) for parts in zip(*by_process, strict=True)]


def _keep(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _reads(
    prepare: Callable[..., Callable[[], Work]], share: tuple[Any, ...], server: int, repeats: int
) -> list[tuple[Measurement, float]]:
    try:
        read = prepare(*share)
        measured = []
        for _ in range(repeats):
            _barrier.wait(BARRIER_SECONDS)
            measured.append(timed(read, server))
        return measured
    except BaseException:
        _barrier.abort()
        raise


def _joined(parts: Sequence[tuple[Measurement, float]]) -> Measurement:
    """Combine the processes' parts of a read: from the first beginning to the last end."""
    began = min(began for _, began in parts)
    return Measurement(
        rows=sum(part.rows for part, _ in parts),
        seconds=max(began + part.seconds for part, began in parts) - began,
        client_seconds=sum(part.client_seconds for part, _ in parts),
        # Every process saw the same server, each for the time of its own part.
        server_seconds=max(part.server_seconds for part, _ in parts),
        written_bytes=sum(part.written_bytes for part, _ in parts),
    )
