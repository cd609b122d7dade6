"""The comparison of sources and replicas of several tables in Spark's tasks (docs/replica.md).

One job sums up both sides of all tables: a task reads pieces of them, and tells the driver the sums of each as it ends.
If a worker dies, and with it the job, only what had not ended is read again. Another job compares, in memory, the rows
of small tables whose sums differ; what does not fit is left to Spark. An error ends a piece, and its table; the others
are done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import deltalake  # noqa: F401  (several threads of a task need it, and must not find it half imported)
import numpy as np
import pyarrow as pa

from ringsync.cluster.control import ControlAddress, ControlClient, ControlServer, DriverGoneError
from ringsync.cluster.limits import Permits
from ringsync.compiled.arrow import Integers
from ringsync.config import Config
from ringsync.images.live import selected_rows, shown_rows
from ringsync.replica.checksum import CHECKSUM_FIELDS, check_boundaries, partial_checksums, sum_up
from ringsync.replica.compare import compare_rows
from ringsync.replica.lookup import images_between
from ringsync.ring.splits import Split
from ringsync.sources.cassandra_table import read_split
from ringsync.sources.scan.plan import ScanPlan, parted, within
from ringsync.steps.application import Application, TaskFailedError, driver_host, task_failure
from ringsync.steps.replica.kept import FirstLook, Keep
from ringsync.steps.tables import at_once, halved, together
from ringsync.wiring import cluster_limits

if TYPE_CHECKING:
    from ringsync.replica.changes import ReplicaState

ROWS_OF_A_TASK = 100_000
"""About how many of the replica's rows a piece has; whoever reads it opens both tables of the replica."""
CHANGES_OF_A_TASK = 32 << 20
"""About how many bytes of the table of changes a task has in memory."""
SUMS = pa.schema([(name, pa.int64()) for name in ("range", *CHECKSUM_FIELDS)])
"""What a task tells of a piece."""
BYTES_OF_A_SIDE = 128 << 20
"""Most bytes of rows of a side that a task compares in memory: it needs a few times as much."""

Side = Literal["source", "replica"]


@dataclass(frozen=True)
class Sides:
    """Both sides of a table as of one moment.

    :ivar plan: how the source is read
    :ivar seen: the replica's state
    :ivar is_followed: whether the sync keeps the replica in step
    :ivar chosen: numbers of the token ranges that are compared; None: all
    """

    plan: ScanPlan
    seen: ReplicaState
    is_followed: bool
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of one side.

    :ivar number: the table's place among those that are compared
    :ivar place: the piece's place among those of the table
    :ivar plan: without splits
    :ivar part: a split of the source; or the replica, and the tokens (start, end] to read of it
    """

    number: int
    place: int
    plan: ScanPlan
    part: Split | tuple[ReplicaState, int, int]

    @property
    def side(self) -> Side:
        """The side that is read."""
        return "source" if isinstance(self.part, Split) else "replica"

    def rows(self, config: Config, permits: Permits) -> Iterator[pa.RecordBatch]:
        """Read the rows that a SELECT shows.

        :param permits: for the pages of the source
        """
        plan = self.plan
        if isinstance(self.part, Split):
            for batch in read_split(config, plan, self.part, permits):
                yield selected_rows(batch, plan.table, plan.now)
        else:
            yield from shown_rows(images_between(self.part[0], plan.table, *self.part[1:]), plan.table, plan.now)


@dataclass(frozen=True)
class ChecksumTask:
    """Sums up the pieces that Spark gives to one task."""

    config: Config
    control: ControlAddress
    edges: tuple[int, ...]

    def __call__(self, groups: Iterable[Sequence[Piece]]) -> None:
        for group in groups:
            for _ in at_once(self.sum_up, group):
                pass

    def sum_up(self, piece: Piece) -> None:
        """Tell the driver the sums of a piece, or :func:`ringsync.steps.application.task_failure`."""
        with ControlClient(self.control) as driver:
            told: dict[str, Any] = {"table": piece.number, "place": piece.place, "side": piece.side}
            try:
                rows = piece.rows(self.config, driver)
                told["sums"] = partial_checksums(rows, piece.plan.table, np.array(self.edges, np.int64)).to_pydict()
            except DriverGoneError:
                raise
            except Exception as error:
                told["failure"] = task_failure(error)
            driver.call("ended", **told)


@dataclass(frozen=True)
class SmallTable:
    """A small table whose checksums differ.

    :ivar number: its place among those of the job
    :ivar ranges: the token ranges (start, end] that differ, rising
    """

    number: int
    sides: Sides
    ranges: tuple[tuple[int, int], ...]


class TooLargeError(Exception):
    """The rows of a side do not fit into memory, though they are few."""


@dataclass(frozen=True)
class RowsTask:
    """Compares the rows of small tables in memory.

    :ivar folder: where suspects are kept
    :ivar most_bytes: of the rows of a side
    """

    config: Config
    control: ControlAddress
    folder: str
    most_bytes: int

    def __call__(self, groups: Iterable[Sequence[SmallTable]]) -> Iterator[tuple[int, Any]]:
        for group in groups:
            yield from at_once(self._compare, group)

    def _compare(self, small: SmallTable) -> tuple[int, Any]:
        """Return the table's number, and :class:`FirstLook` or what :func:`task_failure` says; None: its rows are too
        large."""
        plan, seen = small.sides.plan, small.sides.seen
        whole = Piece(0, 0, plan, (seen, small.ranges[0][0], small.ranges[-1][1]))
        try:
            with ControlClient(self.control) as permits:
                parts = [Piece(0, 0, plan, split) for split in within(plan, small.ranges).splits]
                source = itertools.chain.from_iterable(part.rows(self.config, permits) for part in parts)
                replica = (inside(rows, small.ranges) for rows in whole.rows(self.config, permits))
                there, here = (at_most(self.most_bytes, side) for side in (source, replica))
                equal, others = compare_rows(there, here, plan.table)
            return small.number, FirstLook(equal, len(others), Keep(self.config, self.folder, plan.now)(others))
        except DriverGoneError:
            raise
        except TooLargeError:
            return small.number, None
        except Exception as error:
            return small.number, task_failure(error)


def inside(rows: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Return the rows whose tokens are in one of these ranges (start, end]: rising, and without overlaps."""
    starts, ends = np.array(ranges, np.int64).T
    tokens = rows["token"].to_numpy(zero_copy_only=False)
    place = np.searchsorted(starts, tokens, side="left") - 1
    return rows.filter(pa.array((place >= 0) & (tokens <= ends[np.maximum(place, 0)])))


def at_most(size: int, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows.

    :param size: most bytes of all of them
    :raises TooLargeError: they are more
    """
    for batch in rows:
        size -= batch.nbytes
        if size < 0:
            raise TooLargeError
        yield batch


def is_small(sides: Sides, source_rows: int) -> bool:
    """Tell whether the rows of a table are few enough for a task's memory, on both sides: one may have lost its own.

    :param source_rows: rows of the source, by its checksums
    """
    seen = sides.seen
    rows, size = seen.base_rows + seen.changed_rows, seen.base_bytes + seen.changed_bytes
    return max(rows, source_rows) <= ROWS_OF_A_TASK and size <= CHANGES_OF_A_TASK


def compared_rows(
    context: Any, application: Application, run: str, folder: str, tables: Sequence[SmallTable]
) -> dict[int, Any]:
    """Compare the rows of small tables.

    :param context: Spark's
    :param run: unique name among the readers of the cluster
    :param folder: where suspects are kept
    :returns: by the tables' numbers, :class:`FirstLook`, or why a side could not be read
        (:class:`ringsync.steps.application.TaskFailedError`); None: its rows are too large for this
    """
    if not tables:
        return {}
    with ControlServer(host=driver_host(context)) as control:
        control.watch_limits(application.store, run, cluster_limits(application.config))
        task = RowsTask(application.config, control.address, folder, BYTES_OF_A_SIDE)
        sized = [(float(one.sides.seen.base_bytes + one.sides.seen.changed_bytes), one) for one in tables]
        groups = together(sized, context.defaultParallelism, large_first=False)
        found = context.parallelize(groups, len(groups)).mapPartitions(task).collect()
    return {number: TaskFailedError(**result) if isinstance(result, dict) else result for number, result in found}


def checksums(
    context: Any,
    application: Application,
    run: str,
    tables: Sequence[Sides],
    edges: Sequence[int],
    is_over: Callable[[], bool] = lambda: False,
) -> list[tuple[pa.Table, pa.Table] | Exception]:
    """Sum up both sides of some tables by token range. Each piece is read until it has ended, and never again.

    :param context: Spark's
    :param run: unique name among the readers of the cluster
    :param edges: tokens in rising order; range ``i`` is (edges[i], edges[i + 1]]
    :param is_over: whether Spark has ended
    :returns: the sums of source and replica of each table (:func:`ringsync.replica.checksum.sum_up`), or why one of
        them could not be read (:class:`ringsync.steps.application.TaskFailedError`), or the Spark job for it alone
    """
    config, parallelism, bounds = application.config, context.defaultParallelism, check_boundaries(edges)
    least = max(1, parallelism // len(tables))
    sized = [[*pieces(number, sides, edges, least)] for number, sides in enumerate(tables)]
    ended: dict[tuple[int, int], dict[str, Any]] = {}

    def end(message: dict[str, Any]) -> dict[str, Any]:
        ended.setdefault((message["table"], message["place"]), message)
        return {}

    def read(numbers: Sequence[int]) -> list[tuple[pa.Table, pa.Table] | Exception]:
        left = [one for number in numbers for one in sized[number] if (number, one[1].place) not in ended]
        if left:
            groups = together(left, parallelism, large_first=False)
            context.parallelize(groups, len(groups)).foreachPartition(task)
        return [_sums_of([ended[number, piece.place] for _, piece in sized[number]], bounds) for number in numbers]

    with ControlServer(host=driver_host(context), handlers={"ended": end}) as control:
        control.watch_limits(application.store, run, cluster_limits(config))
        task = ChecksumTask(config, control.address, tuple(edges))
        return halved(read, range(len(tables)), is_over)


def _sums_of(told: Sequence[dict[str, Any]], bounds: Integers) -> tuple[pa.Table, pa.Table] | Exception:
    """Add up what was told of all pieces of a table."""
    for message in told:
        if "failure" in message:
            return TaskFailedError(**message["failure"])

    def of(side: Side) -> pa.Table:
        batches = [pa.RecordBatch.from_pydict(one["sums"], SUMS) for one in told if one["side"] == side]
        return sum_up(pa.Table.from_batches(batches, SUMS), bounds)

    return of("source"), of("replica")


def pieces(number: int, sides: Sides, edges: Sequence[int], least: int) -> Iterator[tuple[float, Piece]]:
    """Cut both sides of a table into pieces, each with its approximate size in bytes. The plan of one table among many
    has no small splits: its source is cut as its replica is.

    :param least: least number of pieces of the replica
    """
    plan, seen = replace(sides.plan, splits=()), sides.seen
    chosen = sides.chosen if sides.chosen is not None else tuple(range(len(edges) - 1))
    share = len(chosen) / (len(edges) - 1)
    size, rows = share * (seen.base_bytes + seen.changed_bytes), share * (seen.base_rows + seen.changed_rows)
    parts = [runs_of(part, edges) for part in parts_of(chosen, rows, share * seen.changed_bytes, least)]
    splits = parted(sides.plan, parts).splits
    for place, split in enumerate(splits):
        yield size / len(splits), Piece(number, place, plan, split)
    ranges = [run for runs in parts for run in runs]
    for place, (start, end) in enumerate(ranges, len(splits)):
        yield size / len(ranges), Piece(number, place, plan, (seen, start, end))


def parts_of(chosen: Sequence[int], rows: float, changed_bytes: float, least: int) -> list[Sequence[int]]:
    """Cut some token ranges of a table into parts, each of which a task reads.

    :param chosen: numbers of the ranges, rising
    :param rows, changed_bytes: of these ranges
    :param least: least number of parts
    """
    wanted = int(rows) // ROWS_OF_A_TASK, int(changed_bytes) // CHANGES_OF_A_TASK
    count = min(max(least, *wanted), len(chosen))
    cuts = [len(chosen) * part // count for part in range(count + 1)] if count else []
    return [chosen[start:end] for start, end in itertools.pairwise(cuts)]


def runs_of(chosen: Sequence[int], edges: Sequence[int]) -> list[tuple[int, int]]:
    """Return the tokens (start, end] of ranges, neighbours together.

    :param chosen: numbers of the ranges, rising
    :param edges: tokens in rising order; range ``i`` is (edges[i], edges[i + 1]]
    """
    starts = [number for place, number in enumerate(chosen) if not place or chosen[place - 1] != number - 1]
    ends = [number for place, number in enumerate(chosen, 1) if place == len(chosen) or chosen[place] != number + 1]
    return [(edges[start], edges[end + 1]) for start, end in zip(starts, ends, strict=True)]
