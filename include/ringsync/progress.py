"""How far a scan is: read from the object store, shown as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ringsync.storage.port import NotFoundError, ObjectStore

LINE_EVERY_S = 5.0
IDLE_LINE_EVERY_S = 30.0
"""Where there is no terminal: seconds from one line to the next, with and without news."""
WINDOW_S = 20.0
_COUNTS = ("ranges_done", "rows", "cells", "bytes", "pages")


@dataclass(frozen=True)
class Progress:
    """Sums over the partitions of a scan.

    :ivar ranges: token ranges in the plan; 0 before there is a plan
    :ivar ranges_done: read to their end
    :ivar bytes: of result pages read
    :ivar estimated_rows: what the cluster estimates for the table; None where it has no estimate
    """

    ranges: int = 0
    ranges_done: int = 0
    rows: int = 0
    cells: int = 0
    bytes: int = 0
    pages: int = 0
    estimated_rows: int | None = None

    @property
    def fraction(self) -> float:
        """The done part of the ranges, 0…1."""
        return self.ranges_done / self.ranges if self.ranges else 0.0


class ProgressReader:
    """Reads the progress of one run again and again; of a partition only when its object has changed.

    :param run: the run's id: the partitions' objects are ``progress/<run>/<partition>.json``
    """

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store = store
        self._run = run
        self._known: dict[str, tuple[str, dict[str, int]]] = {}
        self._plan: dict[str, int | None] = {}

    def read(self) -> Progress:
        """The progress as of now.

        :raises StorageError: the store cannot be read
        """
        if not self._plan:
            self._plan = self._read_plan()
        for stat in self._store.list(f"progress/{self._run}/"):
            version, _ = self._known.get(stat.key, ("", {}))
            if version != stat.version:
                self._known[stat.key] = stat.version, json.loads(self._store.get(stat.key))
        partitions = [partition for _, partition in self._known.values()]
        sums = {name: sum(partition.get(name, 0) for partition in partitions) for name in _COUNTS}
        ranges = self._plan.get("ranges") or sum(partition.get("ranges", 0) for partition in partitions)
        return Progress(ranges=ranges, estimated_rows=self._plan.get("estimated_rows"), **sums)

    def _read_plan(self) -> dict[str, int | None]:
        try:
            plan = json.loads(self._store.get(f"plans/bootstrap/{self._run}.json"))
        except NotFoundError:
            return {}
        ranges = plan["ranges"]
        return {
            "ranges": len(ranges) if isinstance(ranges, list) else ranges,
            "estimated_rows": plan.get("estimated_rows"),
        }


def read_progress(store: ObjectStore, run: str) -> Progress:
    """The progress of a run as of now; zeros before it has begun.

    :raises StorageError: the store cannot be read
    """
    return ProgressReader(store, run).read()


@dataclass
class Speed:
    """Rows per second over the last moments, and how long the rest takes at the speed since the beginning."""

    samples: deque[tuple[float, Progress]] = field(default_factory=deque)
    first: tuple[float, Progress] | None = None

    def add(self, now: float, progress: Progress) -> None:
        """Take a reading.

        :param now: seconds of a monotonic clock
        """
        if self.first is None and progress.rows + progress.ranges_done > 0:
            self.first = now, progress
        self.samples.append((now, progress))
        while now - self.samples[0][0] > WINDOW_S:
            self.samples.popleft()

    @property
    def rows_per_second(self) -> float | None:
        """None as long as there is nothing to tell from."""
        (start, before), (end, after) = self.samples[0], self.samples[-1]
        return (after.rows - before.rows) / (end - start) if end > start and after.rows > before.rows else None

    @property
    def seconds_left(self) -> float | None:
        """None as long as there is nothing to tell from."""
        if self.first is None:
            return None
        (start, before), (now, after) = self.first, self.samples[-1]
        gained = after.fraction - before.fraction
        return (now - start) * (1 - after.fraction) / gained if gained > 0 else None


def describe(progress: Progress, speed: Speed) -> str:
    """Numbers of a scan in one line, e.g. ``12/96 ranges  1,200,000 rows  85,000 rows/s  0:01:10 left``."""
    if not progress.ranges:
        return ""
    if progress.fraction == 1:
        return f"all {progress.ranges:,} ranges  {progress.rows:,} rows"
    parts = [f"{progress.ranges_done:,}/{progress.ranges:,} ranges", f"{progress.rows:,} rows"]
    if speed.rows_per_second is not None:
        parts.append(f"{speed.rows_per_second:,.0f} rows/s")
    if speed.seconds_left is not None:
        parts.append(f"{duration(speed.seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as ``h:mm:ss``."""
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

    :param read: gives the progress, e.g. :meth:`ProgressReader.read`
    :param stage: gives what the run does now, ``scan`` for example; None when it is over
    :param console: where to show it; a bar if it is a terminal, else lines
    :param title: what the run is about, e.g. the table
    :param poll_s: seconds between two looks
    :returns: the last progress read
    """
    speed, started, printed = Speed(), clock(), ("", "", float("-inf"))
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
            speed.add(now, progress)
            numbers = describe(progress, speed)
            total = progress.ranges if 0 < progress.fraction < 1 else None  # None: busy, no end in sight
            completed = progress.ranges_done if total else 0
            bar.update(shown, description=f"{title}  {current}", total=total, completed=completed, numbers=numbers)
            interval = LINE_EVERY_S if numbers != printed[1] else IDLE_LINE_EVERY_S
            if not console.is_terminal and (current != printed[0] or now - printed[2] >= interval):
                line = f"{duration(now - started)}  {title}  {current}  {numbers}".rstrip()
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                printed = current, numbers, now
            sleep(poll_s)
    return read()
