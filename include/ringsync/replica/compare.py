"""Comparison of source and replica, and the repair: checksums of all token ranges, then the rows of unequal ranges.

Rows are compared by Spark, or, if there are few, in memory (:func:`compare_rows`); both find the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ringsync.images.live import live_schema
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


@dataclass(frozen=True)
class Slack:
    """What the source cannot tell, so that it is no difference.

    :ivar expiry_s: so much may expiries differ, s
    :ivar no_element_times: whether it does not tell the times of elements of collections; the replica may know them
    """

    expiry_s: int = 0
    no_element_times: bool = False

    def covers(self, difference: Difference) -> bool:
        """Tell whether it explains a difference."""
        times = (difference.source, difference.replica)
        if difference.kind not in ("writetime", "ttl"):
            return False
        if self.no_element_times and difference.source == "null" and (difference.replica or "").startswith("["):
            return True
        numbers = [int(time) for time in times if time is not None and time.isdecimal()]
        is_close = len(numbers) == len(times) and abs(numbers[0] - numbers[1]) <= self.expiry_s
        return difference.kind == "ttl" and is_close


EXACT = Slack()


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
    slack: Slack = EXACT,
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
    :param slack: what the source cannot tell
    :raises ValueError: the boundaries are not two or more rising tokens
    """
    ranges = differing_ranges(source_sums, replica_sums, boundaries)
    lines: list[pa.RecordBatch] = []
    if ranges:
        joined = _join(read_source(ranges), read_replica(ranges), table, changed_after_us)
        named = joined.mapInArrow(
            _naming(table, limit, slack), "outcome string, kind string, number bigint, listed string"
        )
        lines = named.toArrow().to_batches()
    return comparison(source_sums, replica_sums, ranges, lines, limit)


def differing_ranges(
    source_sums: pa.Table, replica_sums: pa.Table, boundaries: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the token ranges (start, end] whose checksums differ; the arguments are those of :func:`compare_ranges`.

    :raises ValueError: the boundaries are not two or more rising tokens
    """
    edges = check_boundaries(boundaries)
    fields = ((source_sums[name].to_numpy(), replica_sums[name].to_numpy()) for name in CHECKSUM_FIELDS)
    differs = np.any([source != replica for source, replica in fields], axis=0)
    return tuple((int(edges[i]), int(edges[i + 1])) for i in np.flatnonzero(differs))


def comparison(
    source_sums: pa.Table,
    replica_sums: pa.Table,
    ranges: tuple[tuple[int, int], ...],
    lines: Iterable[pa.RecordBatch],
    limit: int,
) -> Comparison:
    """Make the result of a comparison.

    :param ranges: the differing ranges
    :param lines: what was found in them (:func:`compare_rows`)
    :param limit: most differences to list; all are counted
    """
    rows: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    kinds: Counter[str] = Counter()
    differences: list[Difference] = []
    for line in (line for batch in lines for line in batch.to_pylist()):
        if line["listed"] is not None:
            differences.append(Difference(**json.loads(line["listed"])))
        elif line["outcome"] is not None:
            rows[line["outcome"]] += line["number"]
        else:
            kinds[line["kind"]] += line["number"]
    return Comparison(
        ranges=source_sums.num_rows,
        differing_ranges=ranges,
        source_rows=pc.sum(source_sums["rows"]).as_py(),
        source_cells=pc.sum(source_sums["cells"]).as_py(),
        replica_rows=pc.sum(replica_sums["rows"]).as_py(),
        replica_cells=pc.sum(replica_sums["cells"]).as_py(),
        rows=dict(rows),
        differences_by_kind=dict(kinds),
        differences=tuple(differences[:limit]),
    )


def compare_rows(
    source: Iterable[pa.RecordBatch],
    replica: Iterable[pa.RecordBatch],
    table: TableSchema,
    *,
    changed_after_us: int,
    limit: int,
    slack: Slack = EXACT,
) -> pa.RecordBatch:
    """Compare live rows of both sides in memory, without Spark; the meaning is that of :func:`compare_ranges`.

    :param source, replica: rows as :func:`ringsync.images.live.shown_rows` yields them, of whole partitions
    :returns: counts and listed differences, for :func:`comparison`
    """
    there, here = (_numbered(side, table) for side in (source, replica))
    pairs = there.select(["key", "copy", "place"]).join(
        here.select(["key", "copy", "place"]), ["key", "copy"], join_type="full outer", right_suffix="_here"
    )
    i, j = pairs["place"].combine_chunks(), pairs["place_here"].combine_chunks()
    source_digests, replica_digests = there["digest"].take(i), here["digest"].take(j)
    is_equal = pc.fill_null(pc.equal(source_digests, replica_digests), False)
    changed = pc.fill_null(pc.greater(_newest_times(there["row"], table).take(i), changed_after_us), False)
    outcome = pc.case_when(
        pc.make_struct(is_equal, changed, pc.is_null(j), pc.is_null(i)),
        "equal",
        "changed_after",
        "missing",
        "extra",
        "different",
    )
    rows = {"outcome": outcome, "source": there["row"].take(i), "replica": here["row"].take(j)}
    batches = pa.table(rows).combine_chunks().to_batches()
    (lines,) = _naming(table, limit, slack)(iter(batches))
    return lines


def _numbered(rows: Iterable[pa.RecordBatch], table: TableSchema) -> pa.Table:
    """Return ``key``, ``digest`` and ``row`` of rows, their ``place``, and ``copy``, their number in a key."""
    nothing = pa.RecordBatch.from_pylist([], live_schema(table)).drop_columns(["#alive", "#static"])
    batches = [_digested(batch, table) for batch in (nothing, *rows)]
    found = pa.Table.from_batches(batches).combine_chunks()
    order = pc.sort_indices(found.select(["key", "digest"]), [("key", "ascending"), ("digest", "ascending")])
    keys = found["key"].combine_chunks().take(order)
    places = np.arange(len(keys))
    is_first = np.ones(len(keys), np.bool_)
    is_first[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    copies = np.empty(len(keys), np.int64)
    copies[order.to_numpy()] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return found.append_column("copy", pa.array(copies)).append_column("place", pa.array(places))


def _newest_times(rows: pa.ChunkedArray, table: TableSchema) -> pa.Array:
    """Return the greatest writetime of each row, null if it has none."""
    row, names = rows.combine_chunks(), lake_names(table)
    newest: pa.Array = pa.nulls(len(row), pa.int64())
    for column in table.value_columns:
        times = pc.struct_field(row, ["_cells", names[column.name], "writetime"])
        if column.is_multicell:
            flat = pa.table([pc.list_parent_indices(times), pc.list_flatten(times)], names=["row", "time"])
            most = flat.group_by("row").aggregate([("time", "max")])
            found = np.full(len(row), -1, np.int64)
            found[most["row"].to_numpy()] = np.arange(most.num_rows)
            times = most["time_max"].combine_chunks().take(pa.array(found, mask=found < 0))
        newest = pc.max_element_wise(newest, times)
    return newest


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
            yield _digested(batch, table)

    digest = [StructField("key", BinaryType()), StructField("digest", BinaryType())]
    return live_rows.mapInArrow(add, StructType([*digest, StructField("row", live_rows.schema)]))


def _digested(batch: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    batch = comparable(batch, table)
    row = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    return pa.record_batch([key_digests(batch, table), binary_digests(batch), row], names=["key", "digest", "row"])


def _naming(
    table: TableSchema, limit: int, slack: Slack
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
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
                found = [one for one in row_differences(table, source, replica) if not slack.covers(one)]
                if not found:
                    outcomes.update(different=-1, equal=1)
                for difference in found:
                    kinds[difference.kind] += 1
                    if len(listed) < limit:
                        listed.append(json.dumps(asdict(difference)))
        lines: list[dict[str, Any]] = [{"outcome": outcome, "number": n} for outcome, n in outcomes.items()]
        lines += [{"kind": kind, "number": n} for kind, n in kinds.items()]
        lines += [{"listed": difference_json} for difference_json in listed]
        yield pa.RecordBatch.from_pylist(lines, schema=_LINES)

    return name


_LINES = pa.schema([("outcome", pa.string()), ("kind", pa.string()), ("number", pa.int64()), ("listed", pa.string())])
