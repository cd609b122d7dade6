"""Comparison of source and replica, and the repair: checksums of all token ranges, then the rows of unequal ranges.

Rows are compared by Spark, or, if there are few, in memory (:func:`compare_rows`); both find the same. Rows that differ
are suspects: they may have been written in between. More looks at them tell (:mod:`ringsync.replica.suspects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from ringsync.images.differences import Difference
from ringsync.images.judgement import DIFFERENT
from ringsync.images.live import live_schema
from ringsync.replica.checksum import CHECKSUM_FIELDS, check_boundaries
from ringsync.replica.suspects import digested
from ringsync.replica.table import ReplicaTable, WriteResult, token_condition
from ringsync.schema.table import TableSchema


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    :ivar differing_ranges: token ranges (start, end] whose checksums differ
    :ivar wrong: numbers of the ranges that have differences; ``unjudged``: that have rows which could not be judged;
        ``late``: that have rows which wait as late, and are left out
    :ivar wrong_ranges: the token ranges (start, end] of the first two
    :ivar source_rows: live rows of the source, in all ranges
    :ivar rows: rows of the differing ranges by outcome (:data:`ringsync.images.judgement.OUTCOMES`), each in one
    :ivar differences_by_kind: number of differences by kind, listed or not; a row can have several
    :ivar why_not_judged: why rows could not be judged; empty: all were
    """

    ranges: int
    differing_ranges: tuple[tuple[int, int], ...]
    wrong: frozenset[int]
    unjudged: frozenset[int]
    late: frozenset[int]
    wrong_ranges: tuple[tuple[int, int], ...]
    source_rows: int
    source_cells: int
    replica_rows: int
    replica_cells: int
    rows: Mapping[str, int]
    differences_by_kind: Mapping[str, int]
    differences: tuple[Difference, ...]
    why_not_judged: str = ""

    @property
    def rows_differing(self) -> int:
        """Number of rows that differ."""
        return sum(self.rows[outcome] for outcome in DIFFERENT)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, and all could be judged. Rows that wait as late are left out."""
        return not self.rows_differing and not self.rows["not_judged"]


def differing_ranges(
    source_sums: pa.Table, replica_sums: pa.Table, boundaries: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the token ranges (start, end] whose checksums differ.

    :param source_sums, replica_sums: checksums (:func:`ringsync.replica.checksum.sum_up`)
    :param boundaries: tokens in rising order; range ``i`` is (boundaries[i], boundaries[i + 1]]
    :raises ValueError: the boundaries are not two or more rising tokens
    """
    edges = check_boundaries(boundaries)
    fields = ((source_sums[name].to_numpy(), replica_sums[name].to_numpy()) for name in CHECKSUM_FIELDS)
    differs = np.any([source != replica for source, replica in fields], axis=0)
    return tuple((int(edges[i]), int(edges[i + 1])) for i in np.flatnonzero(differs))


def compare_rows(
    source: Iterable[pa.RecordBatch], replica: Iterable[pa.RecordBatch], table: TableSchema
) -> tuple[int, pa.RecordBatch]:
    """Compare live rows of both sides in memory, without Spark, as :func:`compare_in_spark` does.

    :param source, replica: rows as :func:`ringsync.images.live.shown_rows` yields them, of whole partitions
    :returns: number of equal rows, and the others: ``source`` with its ``digest``, and ``replica``; null: not there
    """
    there, here = (_numbered(side, table) for side in (source, replica))
    pairs = there.select(["key", "copy", "place"]).join(
        here.select(["key", "copy", "place"]), ["key", "copy"], join_type="full outer", right_suffix="_here"
    )
    i, j = pairs["place"].combine_chunks(), pairs["place_here"].combine_chunks()
    digests = there["digest"].take(i)
    differs = pc.invert(pc.fill_null(pc.equal(digests, here["digest"].take(j)), False))
    others = [column.filter(differs) for column in (there["row"].take(i), digests, here["row"].take(j))]
    suspects = pa.table(others, names=["source", "digest", "replica"]).combine_chunks()
    nothing = pa.RecordBatch.from_pylist([], suspects.schema)
    return len(pairs) - len(suspects), next(iter(suspects.to_batches()), nothing)


def compare_in_spark(
    source: DataFrame, replica: DataFrame, table: TableSchema, keep: Callable[[pa.RecordBatch], Sequence[str]]
) -> tuple[int, int, list[str]]:
    """Compare live rows of both sides. They are joined by the keys' digests, since Spark's own equality takes -0.0 for
    0.0 and cannot compare maps. Copies of one row are numbered, so that a row that is there twice finds no second
    partner.

    :param source: live rows (:func:`ringsync.replica.view.as_selected`)
    :param replica: live rows (:func:`ringsync.replica.view.live`)
    :param keep: function of the tasks that keeps rows as those of :func:`compare_rows`, and returns where
    :returns: number of equal rows, number of the others, and where these are kept
    """
    there, here = (
        _with_digests(side, table).selectExpr("*", "row_number() OVER (PARTITION BY `key` ORDER BY digest) AS copy")
        for side in (source, replica)
    )
    joined = source.sparkSession.sql(
        """
        SELECT is_equal,
            CASE WHEN NOT is_equal THEN source END AS source,
            CASE WHEN NOT is_equal THEN digest END AS digest,
            CASE WHEN NOT is_equal THEN replica END AS replica
        FROM (
            SELECT there.row AS source, there.digest, here.row AS replica,
                coalesce(there.digest = here.digest, false) AS is_equal
            FROM {there} AS there FULL OUTER JOIN {here} AS here
                ON there.`key` = here.`key` AND there.copy = here.copy)
        """,
        there=there,
        here=here,
    )

    def kept(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            others = batch.filter(pc.invert(batch["is_equal"])).drop_columns(["is_equal"])
            places = [*keep(others)] if len(others) else []
            counts = [[number, *(0 for _ in places)] for number in (len(batch) - len(others), len(others))]
            columns = [*(pa.array(count, pa.int64()) for count in counts), pa.array([None, *places], pa.string())]
            yield pa.record_batch(columns, names=["equal", "others", "place"])

    found = joined.mapInArrow(kept, "equal bigint, others bigint, place string").toArrow()
    equal, others = (pc.sum(found[name]).as_py() or 0 for name in ("equal", "others"))
    return equal, others, found["place"].drop_null().to_pylist()


def _numbered(rows: Iterable[pa.RecordBatch], table: TableSchema) -> pa.Table:
    """Return ``key``, ``digest`` and ``row`` of rows, their ``place``, and ``copy``, their number in a key."""
    nothing = pa.RecordBatch.from_pylist([], live_schema(table)).drop_columns(["#alive", "#static"])
    batches = [digested(batch, table) for batch in (nothing, *rows)]
    found = pa.Table.from_batches(batches).combine_chunks()
    order = pc.sort_indices(found.select(["key", "digest"]), [("key", "ascending"), ("digest", "ascending")])
    keys = found["key"].combine_chunks().take(order)
    places = np.arange(len(keys))
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    copies = np.empty(len(keys), np.int64)
    copies[order.to_numpy()] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return found.append_column("copy", pa.array(copies)).append_column("place", pa.array(places))


def repair(
    replica: ReplicaTable,
    source: DataFrame,
    ranges: Sequence[tuple[int, int]],
    *,
    up_to_pass: int,
    properties: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
) -> WriteResult:
    """Replace all rows of these token ranges in the base by the source's, in one commit; then delete their changes.

    Missing rows are added, extra rows removed, and all other rows get the source's values and times. Compare again
    afterwards: an image that a pass added meanwhile was made from rows that are now replaced.

    :param source: newly read row images of the source; rows outside these ranges are ignored
    :param ranges: token ranges (start, end], as :attr:`Comparison.wrong_ranges`
    :param up_to_pass: number of the last pass that the replica had when the source was read
    :param properties: user metadata of the commit, e.g. ``run_id``
    :param check: function that raises if the replica was replaced; called before each commit
    :raises ReplicaMismatchError: the base is not the replica of this table and schema
    """
    check()
    written = replica.replace_ranges(source.where(token_condition(ranges)), ranges, properties=properties)
    check()
    replica.forget_changes(source.sparkSession, ranges, up_to_pass)
    return written


def _with_digests(live_rows: DataFrame, table: TableSchema) -> DataFrame:
    """Return ``key`` (digest of token and key columns), ``digest`` (of everything) and ``row`` for each row."""

    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield digested(batch, table)

    digest = [StructField("key", BinaryType()), StructField("digest", BinaryType())]
    return live_rows.mapInArrow(add, StructType([*digest, StructField("row", live_rows.schema)]))
