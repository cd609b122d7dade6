"""Progress of a scan: the driver writes it to the object store; shown as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ringsync.storage.port import ChecksumError, ObjectStore, get_json

LINE_EVERY_S = 5.0
IDLE_LINE_EVERY_S = 30.0
"""Seconds between two lines without a terminal, with and without news."""


@dataclass(frozen=True)
class Progress:
    """Progress of a bootstrap, with its earlier runs; ``progress/<run>.json`` in the object store.

    :ivar attempt: number of drivers that have worked on it; 0: none yet
    :ivar ranges_failed: ranges that could not be read so far
    :ivar fraction: share of the selected tokens that is read, 0…1; 1 only when all of it is committed
    :ivar estimated_rows: forecast of the rows; None: not known yet
    :ivar rows_before: rows committed by earlier attempts
    :ivar cells: values that are not null
    :ivar rows_per_s: speed of the last moments; None: unknown
    :ivar seconds_left: estimate from the speed of the last moments; None: unknown
    :ivar tables: number of the run's tables; ``tables_done``: those of which all is read
    """

    attempt: int = 0
    ranges_done: int = 0
    ranges_failed: int = 0
    fraction: float = 0.0
    estimated_rows: int | None = None
    rows_before: int = 0
    rows: int = 0
    cells: int = 0
    pages: int = 0
    bytes: int = 0
    rows_per_s: float | None = None
    seconds_left: float | None = None
    tables: int = 1
    tables_done: int = 0

    def __str__(self) -> str:
        """Format as ``42.1 %  12 ranges  1,200,000 rows  85,000 rows/s  0:01:10 left``; empty without attempts."""
        if not self.attempt:
            return ""
        parts = [f"{100 * self.fraction:.1f} %", f"{self.ranges_done:,} ranges", f"{self.rows:,} rows"]
        if self.tables > 1:
            parts.insert(1, f"{self.tables_done:,} of {self.tables:,} tables")
        if self.rows_before:
            parts[-1] += f" ({self.rows_before:,} by earlier runs)"
        if self.fraction < 1 and self.rows_per_s is not None:
            parts.append(f"{self.rows_per_s:,.0f} rows/s")
        if self.fraction < 1 and self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.ranges_failed:
            parts.append(f"{self.ranges_failed:,} failed")
        return "  ".join(parts)


def combined(parts: Sequence[Progress]) -> Progress:
    """Combine the progress of the tables of a run, weighted by their rows."""
    if len(parts) == 1:
        return parts[0]
    weights = [max(1, part.estimated_rows or 1) for part in parts]
    share = sum(part.fraction * weight for part, weight in zip(parts, weights, strict=True)) / max(1, sum(weights))
    done = sum(part.fraction == 1 for part in parts)
    fraction = 1.0 if done == len(parts) else min(share, 0.9999)
    rows_per_s = sum(part.rows_per_s or 0 for part in parts) or None
    return Progress(
        attempt=max((part.attempt for part in parts), default=0),
        ranges_done=sum(part.ranges_done for part in parts),
        ranges_failed=sum(part.ranges_failed for part in parts),
        fraction=fraction,
        estimated_rows=sum(weights),
        rows_before=sum(part.rows_before for part in parts),
        rows=sum(part.rows for part in parts),
        cells=sum(part.cells for part in parts),
        pages=sum(part.pages for part in parts),
        bytes=sum(part.bytes for part in parts),
        rows_per_s=rows_per_s,
        seconds_left=(1 - fraction) * sum(weights) / rows_per_s if rows_per_s else None,
        tables=len(parts),
        tables_done=done,
    )


def read_progress(store: ObjectStore, run: str) -> Progress:
    """Read the present progress of a run; zeros before it has begun, and if its object is damaged."""
    with suppress(ChecksumError, ValueError, TypeError):
        return Progress(**(get_json(store, f"progress/{run}.json") or {}))
    return Progress()


def duration(seconds: float) -> str:
    """Format seconds as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def follow(
    read: Callable[[], Progress],
    stage: Callable[[], str | None],
    console: Console,
    title: str,
    poll_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Progress:
    """Show the progress of a run until it is over: a bar that vanishes at the end, or a line now and then.

    :param read: returns the progress, see :func:`read_progress`
    :param stage: returns the present step of the run, e.g. ``scan``; None: the run is over
    :returns: the last progress read
    """
    started, printed = clock(), ("", "", float("-inf"))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task(title, total=None, numbers="")
        while (current := stage()) is not None:
            progress, now = read(), clock()
            numbers = str(progress)
            total = 1.0 if 0 < progress.fraction < 1 else None  # None: busy, no end in sight
            completed = progress.fraction if total else 0
            bar.update(shown, description=f"{title}  {current}", total=total, completed=completed, numbers=numbers)
            interval = LINE_EVERY_S if numbers != printed[1] else IDLE_LINE_EVERY_S
            if not console.is_terminal and (current != printed[0] or now - printed[2] >= interval):
                line = f"{duration(now - started)}  {title}  {current}  {numbers}".rstrip()
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                printed = current, numbers, now
            sleep(poll_s)
    return read()
