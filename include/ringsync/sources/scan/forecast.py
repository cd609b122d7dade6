"""The forecast of a scan's size from some rows at some places of the ring, before anything is written.

It informs and never fails: if a place cannot be read, the size is :class:`Unknown`.

Murmur3 spreads partitions evenly over the tokens, so the rows per token at some places give the rows per token in all.
Partitions that are much larger than others may be missed: the chance to meet the one with a million rows is small, and
if reading ends inside it, its length stays unknown. So the forecast is a lower bound, as far as chance allows: the
table may have many times more rows. :attr:`Forecast.at_least` says whether such a partition was found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ringsync.cluster.limits import Permits
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import ClusterSettings
from ringsync.cql.codec.decode import decode
from ringsync.cql.types import Native
from ringsync.formats.result_page import page_cells
from ringsync.ring.splits import ReplicaRange
from ringsync.ring.tokens import TokenRange
from ringsync.sources.scan.pages import Pages, Stuck
from ringsync.sources.scan.scan import PreparedScan, ScanQuery, read_some

PLACES = 16
"""Number of places where rows are read."""
PLACE_ROWS = 1000
"""Rows of a place: 16,000 rows give the size of a table of small partitions within about 2 %."""
PLACE_BYTES = 2 * 2**20
"""Bytes of a place: where rows are wide, fewer are read."""
FAT_PLACES = 10
"""How many times as much is read of a partition that is larger, to see its end."""


@dataclass(frozen=True)
class Forecast:
    """The expected size of a scan.

    :ivar rows_low: lower bound with a chance of 95 %, never fewer than the rows seen
    :ivar rows_high: upper bound with a chance of 95 %, if no partition is much larger than those seen; None: unknown,
        see ``at_least``
    :ivar bytes: expected bytes of result pages
    :ivar cells: expected non-null values of non-key columns
    :ivar exact: whether the samples saw every row
    :ivar at_least: whether there are partitions larger than ``FAT_PLACES`` places; their further rows are unknown and
        not in the forecast
    :ivar largest_partition: rows seen of the largest partition
    :ivar sampled_part: share of the tokens whose rows were seen, from 0 to 1
    """

    rows: int
    rows_low: int
    rows_high: int | None
    bytes: int
    cells: int
    exact: bool
    at_least: bool
    largest_partition: int
    sampled_rows: int
    sampled_part: float

    def as_report(self) -> dict[str, Any]:
        """Return the forecast as a JSON object for reports."""
        return {**asdict(self), "bytes_per_row": round(self.bytes / max(1, self.rows), 1)}


@dataclass(frozen=True)
class Sample:
    """The sample of one place. It *counts* whole partitions, and the tokens up to the last one.

    :ivar counted_rows: rows of the counted partitions
    :ivar counted_width: tokens from the place to the last counted partition, or to the end of the range
    :ivar size: bytes of the pages
    :ivar cells: non-null values of non-key columns
    :ivar largest_partition: rows read of its largest partition
    :ivar cut_partition: rows of the partition whose end was wanted but not seen; 0: there is none
    :ivar cut_width: tokens from the place to that partition
    """

    rows: int
    counted_rows: int
    counted_width: int
    partitions: int
    size: int
    cells: int
    largest_partition: int
    cut_partition: int = 0
    cut_width: int = 0


@dataclass(frozen=True)
class Unknown:
    """There is no forecast: a place could not be read.

    :ivar reason: which place, the cause and what may help, as text
    """

    reason: str

    def as_report(self) -> dict[str, Any]:
        """Return the reason as a JSON object for reports."""
        return {"unknown": self.reason}


def sample(
    session: SessionAt,
    query: ScanQuery,
    ranges: Iterable[ReplicaRange],
    settings: ClusterSettings,
    permits: Permits,
    *,
    place_rows: int = PLACE_ROWS,
    whole_first: bool = False,
    beginning_rows: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Forecast | Unknown:
    """Read some rows at some places, spread evenly over the ranges, and extrapolate.

    :param session: result of :func:`ringsync.sources.scan.scan.scan_session`
    :param query: query of the scan; its columns determine bytes and cells
    :param ranges: token ranges of the scan, disjoint, without wrap
    :param settings: settings with the consistency level and page size of the scan
    :param place_rows: rows of a place, if they are narrow
    :param whole_first: whether to read from the begin on first, which a small table does not exceed: then there is one
        place
    :param beginning_rows: see :class:`ringsync.sources.scan.plan.ScanPlan`
    :param sleep: function that waits before a page is requested again, given seconds
    :returns: unknown if a place cannot be read; no further place is tried then
    :raises ClusterError: the user may not read the table
    :raises cassandra.InvalidRequest: the table is gone
    """
    wanted = tuple(ranges)
    width = sum(part.range.width for part in wanted)
    scan = PreparedScan(query, session.statements, {}, beginning_rows)

    def look(part: ReplicaRange, rows: int, fat: int) -> Sample:
        pages = Pages(session, session.statements, part.endpoints, settings, permits, sleep)
        try:
            return _sample(pages, scan, part.range, rows, fat)
        except Stuck as stuck:
            raise Stuck(stuck.absent, f"token range {part.range} {stuck.reason}") from stuck

    try:
        if whole_first and len(places := sample_places(wanted, 1)) == 1 and places[0].range.width == width:
            found = look(places[0], 4 * place_rows, 1)
            if found.counted_width == width:
                return extrapolate([found], width)
        return extrapolate([look(part, place_rows, FAT_PLACES) for part in sample_places(wanted, PLACES)], width)
    except Stuck as stuck:
        return Unknown(stuck.reason)


def sample_places(ranges: Sequence[ReplicaRange], places: int) -> list[ReplicaRange]:
    """Choose ranges whose starts lie evenly over the tokens; each ends where the next begins, or its tokens end.

    Together they have the same tokens as the given ranges, if these are contiguous. So a range may belong to several
    hosts; the first one's are asked.
    """
    parts = sorted(ranges, key=lambda part: part.range)
    total = sum(part.range.width for part in parts)
    offsets = [total * place // places for place in range(places + 1)]
    bounds = sorted({offset for offset in offsets if offset < total})
    chosen: list[ReplicaRange] = []
    before = 0
    for index, part in enumerate(parts):
        inside = [bound for bound in bounds if before <= bound < before + part.range.width]
        for bound in inside:
            length = min(offset for offset in offsets if offset > bound) - bound
            start = part.range.start + bound - before
            end = min(start + length, _contiguous_end(parts, index))
            chosen.append(ReplicaRange(TokenRange(start, end), part.endpoints))
        before += part.range.width
    return chosen


def _contiguous_end(parts: Sequence[ReplicaRange], index: int) -> int:
    while index + 1 < len(parts) and parts[index + 1].range.start == parts[index].range.end:
        index += 1
    return parts[index].range.end


def _sample(pages: Pages, scan: PreparedScan, place: TokenRange, most: int, fat_places: int) -> Sample:
    """Read ``most`` rows at a place, or fewer if they are wide, and further to the end of the last partition if that is
    near."""
    table, roles = scan.query.table, [(column.role, column.column) for column in scan.query.layout]
    token_at = roles.index(("token", None))
    values = {column.name for column in table.value_columns}
    tokens: list[Any] = [np.empty(0, np.int64)]
    size = cells = 0
    for page in read_some(pages, scan, place, most):
        _, columns = page_cells(page, len(roles))
        size += len(page)
        tokens.append(decode(Native("bigint"), columns[token_at]).values.to_numpy(zero_copy_only=False))
        for (role, name), column in zip(roles, columns, strict=True):
            if role == "value" and name in values:
                cells += int(np.count_nonzero(column.lengths >= 0))
        seen = np.concatenate(tokens)
        rows = max(1, min(most, len(seen) * PLACE_BYTES // size))
        ended = pages.ended and scan.beginning_rows is None
        summary = summarise(seen, place, rows, size, cells, ended=ended, one_row=not table.clustering)
        if len(seen) >= (fat_places * rows if summary.cut_partition else rows):
            return summary
    return summarise(np.concatenate(tokens), place, most, size, cells, ended=True, one_row=not table.clustering)


def summarise(
    tokens: Any, place: TokenRange, wanted: int, size: int, cells: int, *, ended: bool, one_row: bool
) -> Sample:
    """Summarise the rows of one place.

    It counts partitions up to the one with row number ``wanted``, and that one wholly. Stopping before or within it
    would leave out large partitions more often than small ones.

    :param tokens: int64, token of each row from the start of the place, ascending
    :param size, cells: as in :class:`Sample`
    :param ended: whether these are all rows of the place; else the last partition may have more
    :param one_row: whether every partition has one row, so that the last one has no more
    """
    distinct, counts = np.unique(tokens, return_counts=True)
    rows, largest = len(tokens), int(counts.max(initial=0))
    if ended:
        return Sample(rows, rows, place.width, len(distinct), size, cells, largest)
    if not rows:
        return Sample(0, 0, 0, 0, size, cells, 0)
    sums = np.cumsum(counts)
    last = min(int(np.searchsorted(sums, wanted)), len(distinct) - 1)
    cut, cut_width = 0, 0
    if last == len(distinct) - 1 and not one_row:
        cut, cut_width = int(counts[-1]), int(distinct[-1]) - place.start
        last -= 1
    counted_rows, counted_width = (int(sums[last]), int(distinct[last]) - place.start) if last >= 0 else (0, 0)
    return Sample(rows, counted_rows, counted_width, last + 1, size, cells, largest, cut, cut_width)


def extrapolate(samples: Sequence[Sample], width: int) -> Forecast:
    """Extrapolate samples to all tokens.

    The rows per token are the counted rows divided by the counted tokens of all samples together (a ratio estimate).
    A partition ends each counted stretch of tokens, so all samples together count one partition too many. The
    samples' deviations from the ratio give the variance, both of the ratio and of the tokens not seen.

    :param width: number of tokens of the whole scan
    """
    if not any(sample.partitions for sample in samples):
        # No sample saw the end of a partition: the rows seen give a lower bound.
        samples = [
            replace(sample, counted_rows=sample.cut_partition, counted_width=sample.cut_width, partitions=1)
            if sample.cut_partition
            else sample
            for sample in samples
        ]
    counted_width = sum(sample.counted_width for sample in samples)
    counted = sum(sample.counted_rows for sample in samples)
    partitions = sum(sample.partitions for sample in samples)
    seen = sum(sample.rows for sample in samples)
    exact = counted_width >= width
    unseen_width = max(0, width - counted_width)
    ratio = counted / counted_width if counted_width else 0.0
    unseen = ratio * unseen_width * (partitions - 1) / max(1, partitions)
    # A partition whose end was not seen is not in the ratio, but its rows seen count.
    fat = sum(sample.cut_partition for sample in samples if sample.counted_rows < sample.rows)
    rows = max(seen, round(counted + fat + unseen))
    margin = unseen
    if unseen and len(samples) > 1:
        squares = sum((sample.counted_rows - ratio * sample.counted_width) ** 2 for sample in samples)
        variance = squares * len(samples) / (len(samples) - 1) / counted_width
        margin = _student_95(len(samples) - 1) * math.sqrt(variance * unseen_width * (1 + unseen_width / counted_width))
    at_least = any(sample.cut_partition for sample in samples)
    return Forecast(
        rows=rows,
        rows_low=max(seen, math.floor(rows - margin)),
        rows_high=None if at_least else math.ceil(rows + margin),
        bytes=round(sum(sample.size for sample in samples) * rows / max(1, seen)),
        cells=round(sum(sample.cells for sample in samples) * rows / max(1, seen)),
        exact=exact,
        at_least=at_least,
        largest_partition=max((sample.largest_partition for sample in samples), default=0),
        sampled_rows=seen,
        sampled_part=min(1.0, counted_width / width) if width else 1.0,
    )


def _student_95(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; within 1 % from 3 degrees on)."""
    z = NormalDist().inv_cdf(0.975)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / degrees + g2 / degrees**2 + g3 / degrees**3
