"""The reader of a split as row images, in token order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from ringsync.cluster.limits import Permits
from ringsync.cluster.masks import check_pages, wait_until_unmasked
from ringsync.config import Config
from ringsync.formats.result_page import Page
from ringsync.images.from_pages import row_images
from ringsync.ring.splits import ReplicaRange, Split
from ringsync.sources.scan.plan import ScanPlan
from ringsync.sources.scan.scan import Unread, prepare_scan, read_ranges, scan_query, scan_session
from ringsync.wiring import cluster_settings

PAGES_AT_ONCE = 4
BYTES_AT_ONCE = 8 * 2**20
WAIT_S = 1.0
"""Limits of the pages decoded at once, and of the time that they wait for each other; the first one reached counts.
This saves a third of the time if pages come fast. If limits make them rare, each is written when it comes."""


@dataclass(frozen=True)
class ImagePages:
    """Some consecutive result pages, or a part of what SSTables hold.

    :ivar rows: row images of the pages, in token order; there may be none
    :ivar size: size of the pages, bytes
    :ivar shown: of these images, and of some before them, those that a SELECT shows, as it shows them; None: all
    """

    rows: pa.RecordBatch
    count: int
    size: int
    shown: pa.RecordBatch | None = None


def read_images(
    config: Config, plan: ScanPlan, split: Split, permits: Permits
) -> Iterator[tuple[ReplicaRange, Iterator[ImagePages | Unread]]]:
    """Read the pages of each range of a split, in the order of ranges (:func:`ringsync.sources.scan.scan.read_ranges`).

    :param plan: plan with table, moment and consistency; its splits are ignored
    :raises ClusterError: the cluster cannot be reached or refuses us; or columns are masked for us
    :raises UnrepresentableValueError: an Arrow type cannot hold a value, and the plan refuses such values
    """
    settings = replace(cluster_settings(config), consistency_level=plan.consistency_level)
    session = scan_session(settings, plan.now if plan.times else None)
    query = scan_query(
        plan.table,
        times=plan.times,
        element_times=plan.element_times,
        where=plan.selection.where,
        server_time=not session.reads_as_of,
    )
    scan = prepare_scan(session, query, beginning_rows=plan.beginning_rows)
    wait_until_unmasked(session, plan.table, settings.username)

    def images(pages: Sequence[Page]) -> Iterator[ImagePages]:
        if pages:
            check_pages(session, plan.table, settings.username)
            rows = row_images(pages, plan.table, query.layout, plan.now, plan.unrepresentable_values)
            yield ImagePages(rows, len(pages), sum(map(len, pages)))

    for part, pages in read_ranges(session, scan, split.ranges, settings, permits):
        yield part, _decoded(pages, images)


def _decoded(
    pages: Iterator[Page | Unread], images: Callable[[Sequence[Page]], Iterator[ImagePages]]
) -> Iterator[ImagePages | Unread]:
    waiting: list[Page] = []
    since = time.monotonic()
    for page in pages:
        if isinstance(page, Unread):
            yield from images(waiting)
            yield page
            waiting, since = [], time.monotonic()
            continue
        waiting.append(page)
        is_slow = time.monotonic() - since >= WAIT_S
        if is_slow or len(waiting) == PAGES_AT_ONCE or sum(map(len, waiting)) >= BYTES_AT_ONCE:
            yield from images(waiting)
            waiting, since = [], time.monotonic()
    yield from images(waiting)
