"""The Spark data source ``cassandra_table``: a table's rows as row images, read by token ranges.

::

    from ringsync.sources.cassandra_table import CassandraTable

    spark.dataSource.register(CassandraTable)
    rows = (
        spark.read.format("cassandra_table")
        .option("config", "/etc/ringsync/ringsync.yaml")
        .option("table", "shop.orders")
        .load()
    )

============  ========================================================================================
option
============  ========================================================================================
``config``    path of the configuration file, on the driver only; it says how to reach the
              cluster (no secret is ever an option, since Spark shows options in its UI)
``table``     ``keyspace.table``
``times``     ``true`` (default) or ``false``: whether to read writetimes and expiry
``plan``      a :class:`ringsync.sources.scan.plan.ScanPlan` as JSON, instead of ``table`` and ``times``
============  ========================================================================================

The configured limits are divided by the number of tasks. Every use of a DataFrame reads the table as of the moment when
the DataFrame was loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ringsync.cql.identifiers import parse_table_name
from ringsync.images.schema import row_image_schema
from ringsync.ring.splits import Split
from ringsync.sources.options import OptionError, checked
from ringsync.sources.scan.plan import ScanPlan
from ringsync.wiring import cluster_limits, cluster_settings

# Spark starts a new Python for each step of planning a query: modules that only reading needs are imported later.
if TYPE_CHECKING:
    from ringsync.cluster.limits import Permits
    from ringsync.config import Config

BATCH_ROWS = 10_000
BATCH_BYTES = 64 * 2**20

OPTIONS = ("config", "table", "times", "plan")


class CassandraTable(DataSource):  # type: ignore[misc]
    """A Cassandra table as a Spark DataFrame of row images; see the module for its options."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._plan: ScanPlan | None = None

    @classmethod
    def name(cls) -> str:
        return "cassandra_table"

    def schema(self) -> StructType:
        return from_arrow_schema(row_image_schema(self.plan().table))

    def reader(self, schema: StructType) -> CassandraTableReader:
        from ringsync.config import load_config

        return CassandraTableReader(load_config(self._option("config")), self.plan())

    def plan(self) -> ScanPlan:
        """Return the scan's plan: the option's, else one made at the first call and kept, so that all tasks agree.

        :raises OptionError: an option is missing, unknown or malformed
        :raises ClusterError: as :func:`ringsync.sources.scan.planning.make_scan_plan`
        """
        if self._plan is None:
            checked("cassandra_table", self.options, OPTIONS, {})
            given = self.options.get("plan")
            self._plan = ScanPlan.from_json(given) if given is not None else self._make_plan()
        return self._plan

    def _make_plan(self) -> ScanPlan:
        from ringsync.cluster.session import connect
        from ringsync.config import load_config
        from ringsync.sources.scan.planning import make_scan_plan

        keyspace, table = parse_table_name(self._option("table"))
        times = self.options.get("times", "true").lower()
        if times not in ("true", "false"):
            raise OptionError(f"option times of cassandra_table is true or false, not {times!r}")
        config = load_config(self._option("config"))
        session = connect(cluster_settings(config))
        return make_scan_plan(session, config, keyspace, table, now=int(time.time()), times=times == "true")

    def _option(self, name: str) -> str:
        if name not in self.options:
            raise OptionError(f"cassandra_table needs the option {name}: .option({name!r}, …)")
        return str(self.options[name])


@dataclass
class SplitPartition(InputPartition):  # type: ignore[misc]
    """The input of one task: a split and its index in the plan."""

    index: int
    split: Split


class CassandraTableReader(DataSourceReader):  # type: ignore[misc]
    """A reader that reads each split of a plan in its own task."""

    def __init__(self, config: Config, plan: ScanPlan) -> None:
        self._config = config
        self._splits = plan.splits
        self._tasks = max(1, len(plan.splits))
        # Spark sends the reader to every task, and each task its split.
        self._plan = replace(plan, splits=())

    def partitions(self) -> list[SplitPartition]:
        return [SplitPartition(index, split) for index, split in enumerate(self._splits)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_splits": ()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without splits Spark invents a partition.
        if not isinstance(partition, SplitPartition):
            return
        from ringsync.cluster.limits import Limiter

        # A task cannot ask a driver for permits: it has its share of the limits, as if all tasks ran at once.
        permits = Limiter(cluster_limits(self._config).share(self._tasks))
        yield from bounded(read_split(self._config, self._plan, partition.split, permits))


def read_split(config: Config, plan: ScanPlan, split: Split, permits: Permits) -> Iterator[pa.RecordBatch]:
    """Read the row images of a split, in token order.

    Arguments and errors are those of :func:`ringsync.sources.scan.images.read_images`.

    :raises ClusterError: a range cannot be read
    """
    from ringsync.cluster.session import ClusterError
    from ringsync.sources.scan.images import read_images
    from ringsync.sources.scan.scan import Unread

    for _, pages in read_images(config, plan, split, permits):
        for page in pages:
            if isinstance(page, Unread):
                raise ClusterError(page.reason)
            if page.rows.num_rows:
                yield page.rows


def bounded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Regroup rows into batches of about ``BATCH_ROWS`` rows, or fewer if rows are wide (``BATCH_BYTES``)."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > BATCH_ROWS or size + batch.nbytes > BATCH_BYTES):
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
