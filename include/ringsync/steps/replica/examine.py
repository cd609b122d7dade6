"""The whole comparison of some tables: sums of all token ranges, the rows of those that differ, then further looks at
the rows that differ, until each is judged (docs/replica.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from ringsync.cluster.shared import Shared
from ringsync.config import Config
from ringsync.images.judgement import OUTCOMES
from ringsync.ring.ranks import RankedRing, ranked
from ringsync.ring.tokens import MAX_TOKEN, WHOLE_RING
from ringsync.sources.scan.plan import parted
from ringsync.steps.application import Application, StepError, TaskFailedError, spark_is_gone
from ringsync.steps.replica.caught_up import longest_sync_period_ms, newest_plan
from ringsync.steps.replica.follow_schema import followed_state
from ringsync.steps.replica.kept import FirstLook, Keep, folder_of, tidy
from ringsync.steps.tables import halved
from ringsync.storage import delta_options

if TYPE_CHECKING:
    import pyarrow as pa

    from ringsync.replica.changes import ReplicaState
    from ringsync.replica.compare import Comparison
    from ringsync.steps.replica.checksums import Sides
    from ringsync.steps.replica.looks import Suspected

Ranges = Sequence[tuple[int, int]]


def boundaries(config: Config) -> list[int]:
    """Return the bounds of ``verify.ranges`` equal token ranges over the whole ring."""
    ranges = WHOLE_RING.split(config.verify.ranges)
    return [ranges[0].start, *(token_range.end for token_range in ranges[:-1]), 2**63 - 1]


class Examine:
    """Compares tables. At its end it removes what it has kept in the store.

    :param shared: what is known of the cluster
    :param spark: returns the Spark session
    """

    def __init__(
        self, application: Application, shared: Shared, spark: Callable[[], Any], clock: Callable[[], float]
    ) -> None:
        self._application, self._shared, self._spark, self._clock = application, shared, spark, clock
        self._edges = boundaries(application.config)
        self._folder = folder_of(application.run, int(clock() * 1000))
        self._sync_period_ms: int | None = None
        self._rings: dict[str, RankedRing] = {}

    def __enter__(self) -> Examine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        tidy(self._application.store, self._folder, int(self._clock() * 1000))

    def __call__(self, tables: Sequence[Sides]) -> list[Comparison | Exception]:
        """Compare some tables.

        :returns: of each what was found, or why it cannot be compared
        """
        from ringsync.replica.compare import differing_ranges
        from ringsync.steps.replica.checksums import checksums

        spark, run = self._spark(), f"verify-{self._application.run}"
        is_gone = partial(spark_is_gone, spark.sparkContext)
        sums: list[Any] = checksums(spark.sparkContext, self._application, run, tables, self._edges, is_gone)
        now_s = int(self._clock())
        differing = {
            number: (replace(sides, plan=replace(sides.plan, now=now_s)), ranges)
            for number, (sides, of) in enumerate(zip(tables, sums, strict=True))
            if isinstance(of, tuple) and (ranges := differing_ranges(of[0], of[1], self._edges))
        }
        rows = {number: sum(of[0]["rows"].to_pylist()) for number, of in enumerate(sums) if isinstance(of, tuple)}
        first = self._first_looks(spark, differing, rows)
        suspected = {
            number: self._suspected(differing[number][0], look)
            for number, look in first.items()
            if isinstance(look, FirstLook)
        }
        self._judge(spark.sparkContext, [*suspected.values()])
        return [
            of
            if isinstance(of, Exception)
            else self._concluded(of, differing.get(number), first.get(number), suspected.get(number))
            for number, of in enumerate(sums)
        ]

    def source_images(self, sides: Sides, rows: int, ranges: Ranges, level: str) -> Any:
        """Return the row images of token ranges of the source, as a DataFrame.

        :param rows: number of the source's rows, in all ranges that are compared
        :param ranges: some of them, (start, end]
        :param level: consistency level
        """
        from ringsync.sources.cassandra_table import CassandraTable
        from ringsync.steps.replica.checksums import parts_of, runs_of

        spark, edges = self._spark(), self._edges
        chosen, compared = [edges.index(start) for start, _ in sorted(ranges)], len(sides.chosen or edges[1:])
        parts = parts_of(chosen, rows * len(chosen) / compared, 0, spark.sparkContext.defaultParallelism)
        plan = parted(sides.plan, [runs_of(part, edges) for part in parts])
        spark.dataSource.register(CassandraTable)
        reader = spark.read.format("cassandra_table").option("config", self._application.config_path)
        return reader.option("plan", replace(plan, consistency_level=level).to_json()).load()

    def _first_looks(
        self, spark: Any, tables: dict[int, tuple[Sides, tuple[tuple[int, int], ...]]], rows: dict[int, int]
    ) -> dict[int, FirstLook | Exception]:
        """Compare the rows of ranges that differ: in the memory of tasks if they are few, else by Spark.

        :param rows: number of the source's rows, by table
        """
        from ringsync.steps.replica.checksums import SmallTable, compared_rows, is_small

        context, run = spark.sparkContext, f"verify-{self._application.run}"
        small = [
            SmallTable(number, sides, ranges)
            for number, (sides, ranges) in tables.items()
            if is_small(sides, rows[number])
        ]

        def compared(some: Sequence[SmallTable]) -> Sequence[Any]:
            found = compared_rows(context, self._application, run, self._folder, some)
            return [found[one.number] for one in some]

        # A failure of the job, maybe for want of memory, is none of the table: Spark compares what does not fit.
        looks: dict[int, FirstLook | Exception] = {
            one.number: found
            for one, found in zip(small, halved(compared, small, partial(spark_is_gone, context)), strict=True)
            if isinstance(found, FirstLook | TaskFailedError)
        }
        for number in tables.keys() - looks.keys():
            try:
                looks[number] = self._compared_by_spark(spark, rows[number], *tables[number])
            except Exception as error:
                if spark_is_gone(context):
                    raise
                looks[number] = error
        return looks

    def _compared_by_spark(self, spark: Any, rows: int, sides: Sides, ranges: Ranges) -> FirstLook:
        from pyspark.sql.functions import coalesce, lit

        from ringsync.replica.compare import compare_in_spark
        from ringsync.replica.folders import replica_folder
        from ringsync.replica.session import limit_batch_bytes
        from ringsync.replica.table import ReplicaTable, token_condition
        from ringsync.replica.view import as_selected, live

        plan, seen, table = sides.plan, sides.seen, sides.plan.table
        with_token = {"token": coalesce("token", lit(MAX_TOKEN))}  # as in images_between
        replica = ReplicaTable(self._application.store.uri(replica_folder(table.keyspace, table.name)), table)
        limit_batch_bytes(spark)
        return FirstLook(
            *compare_in_spark(
                as_selected(self.source_images(sides, rows, ranges, plan.consistency_level), table, plan.now),
                # The condition comes first: otherwise all rows would go through the functions in Python.
                live(
                    replica.images_at(spark, seen).where(token_condition(ranges)).withColumns(with_token),
                    table,
                    plan.now,
                ),
                table,
                Keep(self._application.config, self._folder, plan.now),
            )
        )

    def _suspected(self, sides: Sides, look: FirstLook) -> Suspected:
        from ringsync.steps.replica.looks import Found, Suspected

        table = sides.plan.table

        def state() -> ReplicaState:
            store, options = self._application.store, delta_options(**self._application.config.store.model_dump())
            if (now := followed_state(store, table, options)) is None or now.base != sides.seen.base:
                raise StepError(f"the replica of {table.full_name} was replaced meanwhile: verify it again")
            return now

        if table.keyspace not in self._rings:  # its tables share it, also on the way to tasks
            self._rings[table.keyspace] = ranked(self._shared.ring(table.keyspace))
        return Suspected(sides, self._rings[table.keyspace], state, Found(files=look.files))

    def _judge(self, context: Any, tables: Sequence[Suspected]) -> None:
        from ringsync.steps.replica.looks import Looker, judge_all

        if not any(table.found.files for table in tables):
            return
        if self._sync_period_ms is None:
            plan = newest_plan(self._application.store)
            self._sync_period_ms = longest_sync_period_ms(self._shared.session, plan)
        looker = Looker(context, self._application, self._folder, tuple(self._edges))
        judge_all(looker, tables, self._sync_period_ms, self._clock)

    def _concluded(
        self,
        sums: tuple[pa.Table, pa.Table],
        differing: tuple[Sides, tuple[tuple[int, int], ...]] | None,
        look: FirstLook | Exception | None,
        suspected: Suspected | None,
    ) -> Comparison | Exception:
        from ringsync.replica.compare import Comparison
        from ringsync.steps.replica.looks import Found

        if isinstance(look, Exception):
            return look
        if suspected and suspected.failure:
            return suspected.failure
        found = suspected.found if suspected else Found()
        rows: dict[str, int] = {outcome: found.outcomes[outcome] for outcome in OUTCOMES}
        rows["equal"] += look.equal if look else 0
        if look and sum(rows.values()) != look.equal + look.others:
            reason = f"{look.equal} rows were equal at first, {look.others} were not, {rows} is what became of them"
            return StepError(f"the counts of the comparison do not reconcile: {reason}")
        source, replica = sums
        edges = self._edges
        return Comparison(
            ranges=source.num_rows,
            differing_ranges=differing[1] if differing else (),
            wrong=found.wrong,
            unjudged=found.unjudged,
            late=found.late,
            wrong_ranges=tuple((edges[i], edges[i + 1]) for i in sorted(found.wrong | found.unjudged)),
            source_rows=pc.sum(source["rows"]).as_py(),
            source_cells=pc.sum(source["cells"]).as_py(),
            replica_rows=pc.sum(replica["rows"]).as_py(),
            replica_cells=pc.sum(replica["cells"]).as_py(),
            rows=rows,
            differences_by_kind=dict(found.kinds),
            differences=tuple(found.listed),
            why_not_judged=found.why,
        )
