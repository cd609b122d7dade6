"""The Spark data source ``scylla_cdc_log``: what a table's CDC log has, as change rows.

::

    from ringsync.sources.scylla_cdc_log import ScyllaCdcLog

    spark.dataSource.register(ScyllaCdcLog)
    changes = (
        spark.read.format("scylla_cdc_log")
        .option("config", "/etc/ringsync/ringsync.yaml")
        .option("table", "shop.orders")
        .option("from", "2026-11-26T08:00:00Z")
        .load()
    )

============  ========================================================================================
option
============  ========================================================================================
``config``    path of the configuration file, on the driver only; it says how to reach the
              cluster
``table``     ``keyspace.table``: the base table
``from``      write time from which on to read, ISO 8601 with its offset, or ms since the epoch;
              default: all that the log has
``to``        write time before which to read, likewise; default: ``scylla.confidence_ms`` ago, by the
              cluster's clock
``rows``      ``changes`` (default): change rows (:data:`ringsync.changes.schema.CHANGE_ROWS`);
              ``problems``: instead the log rows that cannot be decoded, with their raw bytes
``damage``    ``fail`` (default) if a log row cannot be decoded; ``skip``: leave it out
============  ========================================================================================

The driver reads schema and generations once. The configured limits are divided by the number of tasks. A group of rows
that is not complete is left out; the sync waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ringsync.changes.schema import CHANGE_ROWS
from ringsync.cql.identifiers import parse_table_name
from ringsync.formats.commitlog.reader import ERROR_ROWS
from ringsync.sources.options import OptionError, checked, for_spark, schema_for_spark
from ringsync.wiring import cluster_limits, cluster_settings

if TYPE_CHECKING:
    from ringsync.cluster.generations import Clocks
    from ringsync.config import Config
    from ringsync.scylla.log_schema import LogTable

OPTIONS = ("config", "table", "from", "to", "rows", "damage")
CHOICES = {"rows": ("changes", "problems"), "damage": ("fail", "skip")}

REQUESTS_OF_A_TASK = 8


class LogDamagedError(ValueError):
    """A log row cannot be decoded; the message says which and why."""


@dataclass(frozen=True)
class LogPlan:
    """What is read of a log.

    :ivar ttl_s: time after which the log forgets its rows, s; None: never
    :ivar parts: streams of each request, with the write times ``[start, end)`` in ms
    """

    log: LogTable
    ttl_s: int | None
    clocks: Clocks
    parts: tuple[tuple[tuple[bytes, ...], int, int], ...]


class ScyllaCdcLog(DataSource):  # type: ignore[misc]
    """A CDC log as a Spark DataFrame of change rows; see the module for its options."""

    @classmethod
    def name(cls) -> str:
        return "scylla_cdc_log"

    def schema(self) -> StructType:
        options = checked(self.name(), self.options, OPTIONS, CHOICES)
        is_problems = options.get("rows") == "problems"
        return from_arrow_schema(schema_for_spark(ERROR_ROWS if is_problems else CHANGE_ROWS))

    def reader(self, schema: StructType) -> ScyllaCdcLogReader:
        from ringsync.config import load_config

        options = checked(self.name(), self.options, OPTIONS, CHOICES)
        for name in ("config", "table"):
            if name not in options:
                raise OptionError(f"scylla_cdc_log needs the option {name}: .option({name!r}, …)")
        config = load_config(options["config"])
        return ScyllaCdcLogReader(
            config, plan_log(options, config), options.get("rows") == "problems", options.get("damage") == "skip"
        )


def plan_log(options: dict[str, str], config: Config) -> LogPlan:
    """Find a log, its generations, and what to read of them.

    :raises OptionError: a time is malformed
    :raises ClusterError: the cluster refuses us, or is no Scylla
    :raises SchemaError: there is no such table, or it has no log, or one without values
    """
    from ringsync.cluster.generations import Streams, clocks, has_tablets, read_generation, read_times, vnode_streams
    from ringsync.cluster.node import ask_one
    from ringsync.cluster.schema import read_table
    from ringsync.cluster.scylla import is_scylla, read_cdc_options
    from ringsync.cluster.session import ClusterError, connect
    from ringsync.scylla.generations import intervals
    from ringsync.scylla.log_schema import LOG_SUFFIX, LogTableError, log_table_of
    from ringsync.scylla.progress import OVERLAP_MS
    from ringsync.sources.cdc_log import grouped

    session = connect(cluster_settings(config))
    if not is_scylla(session):
        raise ClusterError("this cluster is no ScyllaDB: its changes are in commit logs (cassandra_commitlog)")
    keyspace, name = parse_table_name(options["table"])
    base, cdc = ask_one(session, lambda node: (read_table(node, keyspace, name), read_cdc_options(node)))
    found = cdc.get(base.table_id)
    log_table = read_table(session, keyspace, name + LOG_SUFFIX)
    log = log_table_of(base, log_table, is_on=found is not None and found.enabled)
    if found and found.delta != "full":
        raise LogTableError(
            f"the log of {keyspace}.{name} has keys only (cdc = {{'delta': 'keys'}}): it does not say what was written"
        )
    streams = Streams((keyspace, name)) if has_tablets(session, keyspace) else vnode_streams(session)
    if (told := clocks(session)) is None:
        raise ClusterError("no node tells its time: try again")
    settled_ms = time.time() * 1000 + told.ahead_ms - told.delay_ms - config.scylla.confidence_ms
    start_ms = _moment_ms(options, "from", 0)
    end_ms = _moment_ms(options, "to", int(settled_ms))
    parts = []
    for one in intervals(read_times(session, streams)):
        last_ms = end_ms if one.end_ms is None else min(end_ms, one.end_ms + OVERLAP_MS)
        if max(start_ms, one.start_ms) < last_ms:
            generation = read_generation(session, streams, one.start_ms)
            if not generation.ranges:
                moment = datetime.fromtimestamp(one.start_ms / 1000, UTC)
                raise ClusterError(
                    f"ScyllaDB describes no streams of its CDC generation of {moment}: what was written from then on "
                    "cannot be read; leave that time out, by the options from and to"
                )
            groups = grouped(generation, None)
            parts += [(group, max(start_ms, one.start_ms), last_ms) for group, _ in groups]
    return LogPlan(log, (found.ttl_s or None) if found else None, told, tuple(parts))


def _moment_ms(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None:
        raise OptionError(
            f"option {name} of scylla_cdc_log is a time with its offset (2026-11-26T08:00:00Z) or ms since the epoch, "
            f"not {text!r}"
        )
    return round(moment.timestamp() * 1000)


@dataclass
class StreamsPartition(InputPartition):  # type: ignore[misc]
    """The input of one task: some requests."""

    parts: tuple[tuple[tuple[bytes, ...], int, int], ...]


class ScyllaCdcLogReader(DataSourceReader):  # type: ignore[misc]
    """A reader that reads some streams in each task."""

    def __init__(self, config: Config, plan: LogPlan, wants_problems: bool, skips_damage: bool) -> None:
        self._config, self._plan = config, plan
        self._wants_problems, self._skips_damage = wants_problems, skips_damage
        self._tasks = max(1, -(-len(plan.parts) // REQUESTS_OF_A_TASK))

    def partitions(self) -> list[StreamsPartition]:
        parts = self._plan.parts
        starts = range(0, len(parts), REQUESTS_OF_A_TASK)
        return [StreamsPartition(parts[start : start + REQUESTS_OF_A_TASK]) for start in starts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without streams Spark invents a partition.
        if not isinstance(partition, StreamsPartition):
            return
        from ringsync.cluster.limits import Limiter
        from ringsync.scylla.log_rows import MOST_BYTES
        from ringsync.sources.cdc_log import LogReader, LogReadError, joined

        # A task cannot ask a driver for permits: it has its share of the limits, as if all tasks ran at once.
        permits = Limiter(cluster_limits(self._config).share(self._tasks))
        reader = LogReader.open(cluster_settings(self._config), permits)
        reads = ((None, reader.begin(self._plan.log, *part)()) for part in partition.parts)
        for _, read in joined(reads):
            if read.is_too_large:
                raise LogReadError(
                    f"{self._plan.log.full_name}: a request brings over {MOST_BYTES:,} bytes: read shorter times, by "
                    "the options from and to"
                )
            ttls_s = [self._plan.ttl_s] if self._plan.ttl_s else []
            found = read.decoded(self._plan.log, ttls_s, clocks=self._plan.clocks)
            if found.errors.num_rows and not (self._wants_problems or self._skips_damage):
                first = found.errors.slice(0, 1).to_pylist()[0]
                raise LogDamagedError(f"{first['file']}: {first['reason']}; damage=skip leaves such rows out")
            chosen = found.errors if self._wants_problems else found.rows
            if chosen.num_rows:
                yield for_spark(chosen)
