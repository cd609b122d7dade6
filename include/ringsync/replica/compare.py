"""Comparison of source and replica, and the repair: checksums of all token ranges, then the rows of unequal ranges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from ringsync.images.differences import Difference, row_differences
from ringsync.images.digests import canonical
from ringsync.images.keys import binary_digests, comparable, key_digests
from ringsync.images.schema import lake_names
from ringsync.replica.checksum import CHECKSUM_FIELDS, check_boundaries
from ringsync.replica.table import ReplicaTable, WriteResult, token_condition
from ringsync.schema.table import TableSchema

Outcome = Literal["equal", "different", "missing", "extra", "changed_after"]
OUTCOMES: tuple[Outcome, ...] = ("equal", "different", "missing", "extra", "changed_after")


TokenRanges = Sequence[tuple[int, int]]
"""Ranges (start, end]; none wraps."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    :ivar differing_ranges: token ranges (start, end] whose checksums differ
    :ivar source_rows: live rows of the source, in all ranges
    :ivar rows: rows of the differing ranges by outcome; each row has one outcome
    :ivar differences_by_kind: number of differences by kind, listed or not; a row can have several
    """

    ranges: int
    differing_ranges: tuple[tuple[int, int], ...]
    source_rows: int
    source_cells: int
    replica_rows: int
    replica_cells: int
    rows: Mapping[str, int]
    differences_by_kind: Mapping[str, int]
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, except rows that changed after the moment of the comparison."""
        return not any(self.rows[outcome] for outcome in ("different", "missing", "extra"))


def compare_ranges(
    source_sums: pa.Table,
    replica_sums: pa.Table,
    read_source: Callable[[TokenRanges], DataFrame],
    read_replica: Callable[[TokenRanges], DataFrame],
    boundaries: Sequence[int],
    table: TableSchema,
    *,
    changed_after_us: int,
    limit: int = 1000,
) -> Comparison:
    """Compare live rows of the source with those of the replica, both as of one moment.

    :param source_sums: checksums of the source (:func:`ringsync.replica.checksum.sum_up`)
    :param replica_sums: checksums of the replica
    :param read_source: function that reads the source's live rows (:func:`ringsync.replica.view.as_selected`) of the
        ranges whose checksums differ
    :param read_replica: function that reads the replica's live rows (:func:`ringsync.replica.view.live`) of them
    :param boundaries: tokens in rising order; range ``i`` is (boundaries[i], boundaries[i + 1]]
    :param changed_after_us: µs; a differing source row with a later writetime counts as changed, not as a difference
    :param limit: most differences to list; all are counted
    :raises ValueError: the boundaries are not two or more rising tokens
    """
    edges = check_boundaries(boundaries)
    fields = ((source_sums[name].to_numpy(), replica_sums[name].to_numpy()) for name in CHECKSUM_FIELDS)
    differs = np.any([source != replica for source, replica in fields], axis=0)
    ranges = tuple((int(edges[i]), int(edges[i + 1])) for i in np.flatnonzero(differs))
    rows: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    kinds: Counter[str] = Counter()
    differences: list[Difference] = []
    if ranges:
        joined = _join(read_source(ranges), read_replica(ranges), table, changed_after_us)
        lines = joined.mapInArrow(_naming(table, limit), "outcome string, kind string, number bigint, listed string")
        for line in lines.toArrow().to_pylist():
            if line["listed"] is not None:
                differences.append(Difference(**json.loads(line["listed"])))
            elif line["outcome"] is not None:
                rows[line["outcome"]] += line["number"]
            else:
                kinds[line["kind"]] += line["number"]
    return Comparison(
        ranges=len(edges) - 1,
        differing_ranges=ranges,
        source_rows=pc.sum(source_sums["rows"]).as_py(),
        source_cells=pc.sum(source_sums["cells"]).as_py(),
        replica_rows=pc.sum(replica_sums["rows"]).as_py(),
        replica_cells=pc.sum(replica_sums["cells"]).as_py(),
        rows=dict(rows),
        differences_by_kind=dict(kinds),
        differences=tuple(differences[:limit]),
    )


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
    :param ranges: token ranges (start, end], as :attr:`Comparison.differing_ranges`
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


def _join(
    source_live: DataFrame,
    replica_live: DataFrame,
    table: TableSchema,
    changed_after_us: int,
) -> DataFrame:
    """Join both sides by key: each key's outcome, and the rows that are needed to name the differences.

    The join uses the keys' digests, since Spark's own equality takes -0.0 for 0.0 and cannot compare maps. Copies of
    one row are numbered, so that a row that is there twice finds no second partner.
    """
    there, here = (
        _with_digests(side, table).selectExpr("*", "row_number() OVER (PARTITION BY `key` ORDER BY digest) AS copy")
        for side in (source_live, replica_live)
    )
    return source_live.sparkSession.sql(
        f"""
        SELECT outcome,
            CASE WHEN outcome IN ('different', 'missing') THEN source END AS source,
            CASE WHEN outcome IN ('different', 'extra') THEN replica END AS replica
        FROM (
            SELECT there.row AS source, here.row AS replica,
                CASE WHEN there.digest = here.digest THEN 'equal'
                     WHEN coalesce({_newest(table)} > {changed_after_us}L, false) THEN 'changed_after'
                     WHEN here.digest IS NULL THEN 'missing'
                     WHEN there.digest IS NULL THEN 'extra'
                     ELSE 'different' END AS outcome
            FROM {{there}} AS there FULL OUTER JOIN {{here}} AS here
                ON there.`key` = here.`key` AND there.copy = here.copy)
        """,
        there=there,
        here=here,
    )


def _newest(table: TableSchema) -> str:
    """Write the SQL of the greatest writetime of the source's row, null if it has none."""
    names = lake_names(table)
    times = [
        f"array_max({path})" if column.is_multicell else path
        for column in table.value_columns
        for path in [f"there.row._cells.`{names[column.name]}`.writetime"]
    ]
    return f"array_max(array({', '.join(times)}))" if times else "CAST(NULL AS bigint)"


def _with_digests(live_rows: DataFrame, table: TableSchema) -> DataFrame:
    """Return ``key`` (digest of token and key columns), ``digest`` (of everything) and ``row`` for each row."""

    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            batch = comparable(batch, table)
            row = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
            digests = [key_digests(batch, table), binary_digests(batch)]
            yield pa.record_batch([*digests, row], names=["key", "digest", "row"])

    digest = [StructField("key", BinaryType()), StructField("digest", BinaryType())]
    return live_rows.mapInArrow(add, StructType([*digest, StructField("row", live_rows.schema)]))


def _naming(table: TableSchema, limit: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function for mapInArrow that counts outcomes and kinds and lists up to ``limit`` differences."""

    def name(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        outcomes: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        listed: list[str] = []
        for batch in batches:
            outcomes.update(batch["outcome"].to_pylist())
            unequal = batch.filter(pc.is_in(batch["outcome"], pa.array(["different", "missing", "extra"])))
            sides = (canonical(unequal[side]).to_pylist() for side in ("source", "replica"))
            for source, replica in zip(*sides, strict=True):
                for difference in row_differences(table, source, replica):
                    kinds[difference.kind] += 1
                    if len(listed) < limit:
                        listed.append(json.dumps(asdict(difference)))
        lines: list[dict[str, Any]] = [{"outcome": outcome, "number": n} for outcome, n in outcomes.items()]
        lines += [{"kind": kind, "number": n} for kind, n in kinds.items()]
        lines += [{"listed": difference_json} for difference_json in listed]
        yield pa.RecordBatch.from_pylist(lines, schema=_LINES)

    return name


_LINES = pa.schema([("outcome", pa.string()), ("kind", pa.string()), ("number", pa.int64()), ("listed", pa.string())])
