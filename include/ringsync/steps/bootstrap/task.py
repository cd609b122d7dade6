"""The Spark task of a bootstrap: it reads a split, writes its rows as files, and has them committed range by range.

The task's main thread reads and decodes while a second one encodes, compresses and stores: both spend their time in
code that releases the interpreter. Rows come in token order, so a file may end wherever the token changes. The driver
commits what was read up to there, and it is never read again.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from ringsync.cluster.control import ControlAddress, ControlClient, DriverGoneError
from ringsync.compiled.arrow import integers
from ringsync.config import Config
from ringsync.images.queries import snapshot_queries
from ringsync.images.schema import lake_names, row_image_schema
from ringsync.replica.data_files import DataFileWriter, first_row_of_last_token, last_token
from ringsync.replica.delta_log import DataFile
from ringsync.replica.folders import base_folder
from ringsync.ring.tokens import TokenRange
from ringsync.sources.scan.images import ImagePages
from ringsync.sources.scan.scan import Unread
from ringsync.steps.application import task_failure
from ringsync.steps.bootstrap.plan import BootstrapPlan
from ringsync.steps.bootstrap.publish import Outputs
from ringsync.steps.bootstrap.rows_of_split import RowsOfSplit
from ringsync.steps.tables import at_once
from ringsync.storage.port import ObjectStore
from ringsync.streams.files import FileStream, Part, PartWriter
from ringsync.streams.messages import Messages, snapshot_messages
from ringsync.wiring import store_of

BATCHES_AHEAD = 8
"""Pages that may be decoded and not yet written."""

PROGRESS_INTERVAL_S = 1.0


@dataclass(frozen=True)
class TableTask:
    """What the tasks of a run need to know of a table.

    :ivar attempt: number of the bootstrap's attempt; part of the files' names
    :ivar folder: the stream's folder for the rows
    :ivar schema_version: version of the stream's schemas
    """

    plan: BootstrapPlan
    attempt: int
    folder: str
    schema_version: int


@dataclass(frozen=True)
class Piece:
    """A split of a table.

    :ivar name: unique in the attempt
    :ivar split: reads its rows
    """

    table: TableTask
    name: str
    split: RowsOfSplit


@dataclass(frozen=True)
class BootstrapTask:
    """Reads the splits that Spark gives to one task. An error ends a split, and its table; the others are read.

    :ivar control: address of the driver's control server
    """

    config: Config
    control: ControlAddress

    def __call__(self, groups: Iterable[Sequence[Piece]]) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.attemptNumber():
            # A worker has died in between: the next wave reads what is left, not what was committed already.
            return
        store = store_of(self.config)
        for group in groups:
            deque(at_once(partial(self._read, store), group), maxlen=0)

    def _read(self, store: ObjectStore, piece: Piece) -> None:
        # The driver takes back what it has granted to a client that is gone.
        with ControlClient(self.control) as control:
            self._read_with(control, store, piece)

    def _read_with(self, control: ControlClient, store: ObjectStore, piece: Piece) -> None:
        call = partial(control.call, bootstrap=piece.table.plan.bootstrap.id)
        call("began", name=piece.name)
        files = RowFiles(self.config, piece.table, store, piece.name)
        writer = RangeWriter(files, call, piece.name, self.config.scan.commit_interval_s)
        try:
            rows = piece.split.read(self.config, piece.table.plan.scan, store, control)
            write_split(rows, piece.split.most_bytes(self.config), writer, call)
        except DriverGoneError:
            raise
        except Exception as error:
            call("gave_up", name=piece.name, **task_failure(error))
        call("ended", name=piece.name, rows_read=writer.rows_read, rows_committed=writer.rows_committed)


def write_split(
    rows: Iterable[tuple[TokenRange, Iterable[ImagePages | Unread]]],
    most_bytes: float,
    writer: RangeWriter,
    call: Callable[..., object],
) -> None:
    """Give the rows of a split's ranges to the writer. A split that is too large is read in part.

    What cannot be read is reported to the driver.

    :param rows: each range with its rows, in the order of ranges
    :param most_bytes: so many are read
    :param call: calls a handler of the driver for the table
    :raises ClusterError: trying again cannot help, e.g. the table was dropped
    :raises UnrepresentableValueError: the Arrow type cannot hold a value, if the plan says so
    :raises ControlError: the driver did not take a range: another run owns the bootstrap
    :raises DriverGoneError: the driver's process has ended
    """
    size = 0
    with Behind(BATCHES_AHEAD) as behind:
        for part, pages in rows:
            behind.do(writer.begin, part.start)
            for page in pages:
                if isinstance(page, Unread):
                    call("unread", start=page.range.start, end=page.range.end, reason=page.reason)
                    behind.do(writer.skip, page.range.start, page.range.end)
                    continue
                size += page.size
                boundary = first_row_of_last_token(page.rows)
                if size > most_bytes and boundary:
                    behind.do(writer.add, page.rows.slice(0, boundary), page.count, page.size)
                    behind.do(writer.stop, last_token(page.rows) - 1, page.rows.num_rows - boundary)
                    return
                behind.do(writer.add, page.rows, page.count, page.size, page.shown)
            behind.do(writer.reached, part.end)
        behind.do(writer.finish)


class RangeWriter:
    """Collects the rows of adjacent token ranges in files, and has them committed when a token has ended.

    :param call: calls a handler of the driver for the table, as :meth:`ControlClient.call` does; the driver commits
    :param name: the split's name, unique in the attempt
    :param commit_interval_s: longest time between two commits
    :ivar rows_read: rows that were added, or left out; ``rows_committed``: those of them that were committed
    """

    def __init__(
        self,
        files: RowFiles,
        call: Callable[..., object],
        name: str,
        commit_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._call = call
        self._name = name
        self._commit_interval_s = commit_interval_s
        self._clock = clock
        self._start: int | None = None  # up to here everything is committed or left out
        self._reached = 0  # up to here all rows have been added
        self._last: int | None = None  # token of the last row since the start
        self._counts = Counts()  # since the start
        self._committed_at = self._reported_at = clock()
        self.rows_read = self.rows_committed = 0

    def begin(self, token: int) -> None:
        """Note where the range of the next rows starts."""
        if self._start is not None and token != self._reached:
            self.finish()
            self._start = None
        if self._start is None:
            self._start = self._reached = token

    def add(self, batch: pa.RecordBatch, pages: int, size: int, shown: pa.RecordBatch | None = None) -> None:
        """Add the rows of some pages, in token order.

        :param size: bytes of the pages
        :param shown: rows for the stream, of tokens from the last row before this batch on; None: all of the batch
        """
        shown = batch if shown is None else shown
        self._counts.pages += pages
        self._counts.bytes += size
        self.rows_read += batch.num_rows
        if batch.num_rows:
            boundary, token = first_row_of_last_token(batch), last_token(batch)
            shown_boundary = _rows_before(shown, token)
            self._write(batch.slice(0, boundary), shown.slice(0, shown_boundary))
            if self._is_due():
                if self._last is None or self._last < token:
                    self._commit(token - 1)
                elif self._files.are_full:
                    # The partition goes on: the file ends here, but the range ends with the partition.
                    self._files.close()
            batch, shown = batch.slice(boundary), shown.slice(shown_boundary)
        self._write(batch, shown)
        self._report()

    def reached(self, token: int) -> None:
        """Note that all rows up to this token have been added."""
        self._reached = token
        if self._is_due():
            self._commit(token)

    def skip(self, start: int, end: int) -> None:
        """Leave out the tokens in (start, end], which could not be read, with those of their rows that were added."""
        if self._last is not None and self._last > start:
            self._files.discard()
        else:
            self._commit(start)
        self._begin_anew(end)
        self._reached = end

    def stop(self, token: int, rows_left_out: int) -> None:
        """Commit up to this token and read no further.

        :param rows_left_out: rows of the last page that are not added
        """
        self.rows_read += rows_left_out
        self._commit(token)

    def finish(self) -> None:
        """Commit what is complete."""
        if self._start is not None:
            self._commit(self._reached)

    def _is_due(self) -> bool:
        return self._files.are_full or self._clock() - self._committed_at >= self._commit_interval_s

    def _write(self, batch: pa.RecordBatch, shown: pa.RecordBatch) -> None:
        if batch.num_rows or shown.num_rows:
            self._counts.rows += batch.num_rows
            self._counts.cells += self._files.write(batch, shown)
        if batch.num_rows:
            self._last = last_token(batch)

    def _commit(self, token: int) -> None:
        """Have (start, token] committed with everything that has been written."""
        if self._start is None or token <= self._start:
            return
        outputs = self._files.take()
        counts = asdict(self._counts)
        self._call("commit", name=self._name, start=self._start, end=token, outputs=outputs.to_json(), **counts)
        self.rows_committed += self._counts.rows
        self._begin_anew(token)

    def _begin_anew(self, token: int) -> None:
        self._start, self._last = token, None
        self._counts = Counts()
        self._committed_at = self._clock()

    def _report(self) -> None:
        if self._clock() - self._reported_at >= PROGRESS_INTERVAL_S:
            self._reported_at = self._clock()
            token = self._start if self._last is None else self._last
            self._call("progress", name=self._name, start=self._start, token=token, **asdict(self._counts))


def _rows_before(images: pa.RecordBatch, token: int) -> int:
    """Count the images with smaller tokens."""
    return int(np.searchsorted(integers(images["token"]), token))


@dataclass
class Counts:
    """What was read.

    :ivar cells: values that are not null: a collection is one, a static value counts in every row
    :ivar bytes: size of the result pages
    """

    rows: int = 0
    cells: int = 0
    pages: int = 0
    bytes: int = 0


class RowFiles:
    """The files of a range: the rows for the replica, and those of them that a SELECT shows as messages for the stream.

    :param name: the split's name, unique in the attempt
    """

    def __init__(self, config: Config, task: TableTask, store: ObjectStore, name: str) -> None:
        self._task = task
        self._config = config
        self._store = store
        self._stream = FileStream(store, task.plan.topic)
        table = task.plan.scan.table
        names = lake_names(table)
        self._value_columns = [names[column.name] for column in table.value_columns]
        # The end of the name is random: a task that is thought dead must not overwrite another's file.
        self._names = (f"{task.attempt:04d}-{name}-{n:05d}-{uuid.uuid4().hex[:8]}" for n in itertools.count())
        self._name = ""
        self._file: DataFileWriter | None = None
        self._part: PartWriter | None = None
        self._files: list[DataFile] = []
        self._parts: list[Part] = []
        self._hidden = 0

    @property
    def are_full(self) -> bool:
        """Whether one of the open files has its full size."""
        size = max(self._file.size if self._file else 0, self._part.size if self._part else 0)
        return size >= self._config.scan.file_size_mb * 2**20

    def write(self, batch: pa.RecordBatch, shown: pa.RecordBatch) -> int:
        """Append row images to both files.

        :param batch: for the replica
        :param shown: for the stream
        :returns: the number of values in the value columns
        """
        if self._file is None and self._part is None:
            self._name = next(self._names)
        if batch.num_rows:
            self._file = self._file or DataFileWriter(row_image_schema(self._task.plan.scan.table))
            self._file.add(batch)
        if shown.num_rows:
            self._part = self._part or self._stream.open_part(
                self._task.folder, f"part-{self._name}", self._task.schema_version, self._config.stream.codec
            )
            self._part.add(self._messages(shown))
        self._hidden += batch.num_rows - shown.num_rows
        return sum(batch.num_rows - batch.column(name).null_count for name in self._value_columns)

    def close(self) -> None:
        """Put the open files into the store; they count once :meth:`take` has handed them over."""
        table, bootstrap = self._task.plan.scan.table, self._task.plan.bootstrap
        if self._file is not None:
            name = f"part-{bootstrap.id}-{self._name}.zstd.parquet"  # leftovers.py knows this form
            file, data = self._file.finish(name, int(time.time() * 1000))
            self._store.put(f"{base_folder(table.keyspace, table.name)}/{name}", data)
            self._files.append(file)
        if self._part is not None:
            self._parts.append(self._part.finish())
        self._file = self._part = None

    def take(self) -> Outputs:
        """Close the files and hand over all that were closed since the last time."""
        self.close()
        outputs = Outputs(tuple(self._files), tuple(self._parts), self._hidden)
        self._files, self._parts, self._hidden = [], [], 0
        return outputs

    def discard(self) -> None:
        """Forget all rows since the last :meth:`take`; the bootstrap's end removes their files."""
        self._file = self._part = None
        self._files, self._parts, self._hidden = [], [], 0

    def _messages(self, batch: pa.RecordBatch) -> Messages:
        plan, config = self._task.plan, self._config
        wanted = config.sync.source_query
        return snapshot_messages(
            batch,
            plan.scan.table,
            config.server_name,
            config.stream.mapping,
            hostname=config.cassandra.contact_points[0],
            processed_at_ms=plan.scan.now * 1000,
            schema_version=self._task.schema_version,
            queries=snapshot_queries(batch, plan.scan.table, plan.scan.now * 1_000_000) if wanted else None,
        )


class Behind:
    """A second thread that calls functions in order, a limited number behind the first thread.

    After a failure it calls nothing more. The failure is raised at the next :meth:`do` or at the end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a function called after all others; waits while too many are waiting."""
        while self._waiting and (len(self._waiting) >= self._most or self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._call, function, arguments))

    def _call(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._failed:
            return
        try:
            function(*arguments)
        except BaseException:
            self._failed = True
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed |= kind is not None
        self._pool.shutdown(wait=True)
        if kind is None:
            for future in self._waiting:
                future.result()
