"""Rows that deletions of partitions and ranges have spared: they are newer, and may have been published long ago.

A consumer that takes the newest message removes all rows that such a deletion covers. So messages of the rows that are
still there must follow it in the same pass (docs/messages.md). These rows are read from the source, at quorum. If the
source shows rows that the deletion deletes, the replica that has the deletion did not answer: the deletion waits.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, concatenated, without_content
from ringsync.changes.keys.parts import clustering_parts, partition_parts
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import ROW, STATIC
from ringsync.cluster.control import ControlClient
from ringsync.cluster.levels import after_refusal, level_to_ask
from ringsync.cluster.masks import check_pages, wait_until_unmasked
from ringsync.cluster.protocol import SessionAt
from ringsync.cluster.session import GuardrailError
from ringsync.compiled.arrow import Mask, Places, integers
from ringsync.config.sections import ConsistencyLevel
from ringsync.cql.cells import Cells, cells_of, raw_values
from ringsync.cql.identifiers import quote
from ringsync.formats.result_page import Page
from ringsync.images.from_pages import row_images
from ringsync.images.keys import key_digests
from ringsync.images.to_changes import change_rows_of, has_clustering, image_keys
from ringsync.images.visible import same_keys
from ringsync.ledger.passes import Digests, among, digest_halves, first_of_each, sorted_digests
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import BYTES_AT_ONCE, IN_FLIGHT, ROWS_AT_ONCE, has_room
from ringsync.sources.scan.pages import (
    PASSING_ERRORS,
    RETRY_DELAYS_S,
    Asked,
    Pages,
    Request,
    Stuck,
    row_count,
    select_of,
)
from ringsync.sources.scan.scan import scan_query, scan_session, tells_element_times
from ringsync.sources.scan.where import all_of
from ringsync.steps.passes.rows_after import AfterReader, UnreadRowsError, read_keys
from ringsync.steps.passes.rows_before import Said
from ringsync.wiring import cluster_settings

_LONG_AGO = np.iinfo(np.int64).min + 1
"""µs: a write of unknown time may be older than any deletion."""


class UnseenDeletionsError(Exception):
    """The source shows what deletions of partitions or ranges delete, and not all replicas have answered.

    :ivar partition_keys: partition keys of the deletions
    """

    def __init__(self, partition_keys: pa.Array) -> None:
        super().__init__(f"deletions in {len(partition_keys)} partitions are not seen")
        self.partition_keys = partition_keys


@dataclass(frozen=True)
class _Shown:
    """Rows that are there under deletions.

    :ivar deletion: place of a deletion for which each image was read
    :ivar everywhere: mask of the images that all replicas have shown
    """

    images: pa.RecordBatch
    deletion: Places
    everywhere: Mask


@dataclass(frozen=True)
class _Lookup:
    """The rows that one deletion covers.

    :ivar place: place of the deletion
    :ivar levels: consistency levels, tried in turn until one is answered
    """

    place: int
    request: Request
    endpoints: tuple[str, ...]
    levels: tuple[ConsistencyLevel, ...]


def spared_rows(reader: AfterReader, merged: ChangeRows) -> Iterator[Said]:
    """Read the rows that are there under deletions of partitions and ranges, some at a time, however many there are.

    :param merged: merged change rows; rows that they change themselves are left out
    :raises UnreadRowsError: rows could not be read
    :raises GuardrailError: the cluster forbids the level, and all that are as good
    :raises UnseenDeletionsError: at the end: possibly only a replica that did not answer has some deletions, so the
        rows that were yielded are not the ones that these have spared
    """
    deletions = merged.where(~merged.of_row)
    if reader.mode == "none" or not len(deletions):
        return
    table, now_s = reader.table, int(time.time())
    waiting: set[int] = set()
    there = _under(reader, deletions, now_s, waiting) if table.clustering else _rows(reader, deletions, now_s)
    seen, unseen = np.empty((0, 2), np.uint64), [pa.array([], pa.binary())]
    for shown in there:
        images = shown.images
        keys = digest_halves(key_digests(images, table).cast(pa.binary(16)))
        changes = changes_of_nothing(deletions.take(shown.deletion), images, keys, table)
        new = first_of_each(keys) & ~among(keys, seen) & (same_keys(changes, merged, table) < 0)
        seen = sorted_digests(np.concatenate([seen, keys[new]]))
        if new.any():
            spared = np.ones(int(new.sum()), np.bool_)
            yield Said(changes.where(new), images.filter(pa.array(new)), spared, now_s)
        if reader.disagreed and not shown.everywhere.all():
            still = _still_there(images, deletions, merged, table) & ~shown.everywhere
            unseen.append(raw_values(deletions.partition_key.take(shown.deletion[still])))
            waiting.update(shown.deletion[still].tolist())
    if len(partition_keys := pa.concat_arrays(unseen).unique()):
        raise UnseenDeletionsError(partition_keys)


def _still_there(images: pa.RecordBatch, deletions: ChangeRows, merged: ChangeRows, table: TableSchema) -> Mask:
    """Tell which images show more than the deletions leave.

    No read tells when a row's own liveness was written, and a row with newer cells need not have one.

    :param merged: merged change rows; the rows that they change were judged before (:mod:`rows_after`)
    """
    shown = change_rows_of(images, table, unknown_at_us=_LONG_AGO)
    shown = shown.where(same_keys(shown, merged, table) < 0)
    left = merge(concatenated([shown, replace(deletions, node=None)]), table)
    place = same_keys(shown, left, table)
    cells, cells_left = (np.bincount(rows.cells.row, minlength=len(rows)) for rows in (shown, left))
    deleted = (place < 0) | (cells_left[place] < cells) | ((cells == 0) & ~left.liveness.there[place])
    still = np.zeros(len(images), np.bool_)
    still[shown.position[deleted]] = True
    return still


def changes_of_nothing(origins: ChangeRows, images: pa.RecordBatch, keys: Digests, table: TableSchema) -> ChangeRows:
    """Make change rows that change nothing: each has a row's key, and the origin of the change that caused its message.

    Its digest is made of that change's digest and the key's. So it is the same whenever the change is published.

    :param origins: the change of each image
    :param keys: digests of the images' keys
    """
    is_row, (_, clusterings) = has_clustering(images, table), image_keys(images, table)
    return without_content(
        origins,
        kind=np.where(is_row, ROW, STATIC),
        clustering=cells_of(clusterings).without(~is_row),
        digest=origins.digest ^ keys,
    )


def _rows(reader: AfterReader, deletions: ChangeRows, now_s: int) -> Iterator[_Shown]:
    """Read the rows of a table whose partitions are rows."""
    seen = read_keys(reader, deletions.keys, [], now_s)
    partition_keys, _ = image_keys(seen.images, reader.table)
    place = integers(pc.index_in(partition_keys, value_set=raw_values(deletions.partition_key)))
    yield _Shown(seen.images, place, seen.everywhere[place])


def _under(reader: AfterReader, deletions: ChangeRows, now_s: int, waiting: set[int]) -> Iterator[_Shown]:
    """Read the rows that are there under deletions, some at a time.

    :param waiting: places of the deletions whose further rows are not wanted; it may grow meanwhile
    """
    table, session = reader.table, scan_session(cluster_settings(reader.config), now_s)
    wait_until_unmasked(session, table, reader.config.cassandra.username)
    element_times = tells_element_times(session, table)
    query = scan_query(table, times=True, element_times=element_times, server_time=not session.reads_as_of)
    pages: list[Page] = []
    of: list[_Lookup] = []

    def decoded() -> _Shown:
        check_pages(session, table, reader.config.cassandra.username)
        images = row_images(pages, table, query.layout, now_s, reader.misfits)
        counts = [row_count(page) for page in pages]
        everywhere = np.repeat([lookup.levels[0] == "ALL" for lookup in of], counts)
        return _Shown(images, np.repeat([lookup.place for lookup in of], counts), everywhere)

    lookups = list(_lookups(reader, query.select, deletions))
    for lookup, page in _pages(reader, session, lookups, waiting):
        pages.append(page)
        of.append(lookup)
        if sum(map(row_count, pages)) >= ROWS_AT_ONCE or sum(map(len, pages)) >= BYTES_AT_ONCE:
            yield decoded()
            pages, of = [], []
    if pages:
        yield decoded()


def _pages(
    reader: AfterReader, session: SessionAt, lookups: Sequence[_Lookup], waiting_deletions: set[int]
) -> Iterator[tuple[_Lookup, Page]]:
    """Read pages that have rows, each with its lookup, whose first level was answered; some rows may come twice."""
    settings = cluster_settings(reader.config)
    waiting = deque(lookups)
    running: deque[tuple[_Lookup, Pages, Asked | None]] = deque()
    delays = defaultdict[ConsistencyLevel, list[float]](lambda: [*RETRY_DELAYS_S])
    answered = False
    with ControlClient(reader.control) as permits:
        while waiting or running:
            while waiting and len(running) < IN_FLIGHT:
                lookup = waiting[0]
                size = session.sizes[select_of(lookup.request.cql), lookup.request.thorough]
                if running and not (answered and has_room((asked for *_, asked in running), size)):
                    break
                asked_level = level_to_ask(session, reader.table, lookup.levels[0], reader.ring)
                level = replace(settings, consistency_level=asked_level)
                pages = Pages(
                    session, session.statements, lookup.endpoints, level, permits, time.sleep, delays[lookup.levels[0]]
                )
                try:
                    asked = pages.ask(lookup.request, wait=not running)
                    if asked is None:
                        break
                except PASSING_ERRORS:
                    asked = None  # Pages.read asks again
                running.append((waiting.popleft(), pages, asked))
            lookup, pages, asked = running.popleft()
            try:
                for page in pages.read(lookup.request, asked):
                    answered = True
                    if lookup.place in waiting_deletions:
                        break
                    if row_count(page):
                        yield lookup, page
            except Stuck as stuck:
                delays[lookup.levels[0]].clear()  # what was in vain once is not done again
                if len(lookup.levels) == 1:
                    raise UnreadRowsError(f"{reader.table.full_name}: what a deletion has spared {stuck}") from stuck
                waiting.append(replace(lookup, levels=lookup.levels[1:]))
            except GuardrailError as error:
                refused = pages.settings.consistency_level
                after_refusal(session, reader.table, lookup.levels[0], refused, error, reader.ring)
                waiting.append(lookup)  # others of those on their way have been refused, too


def _lookups(reader: AfterReader, select: str, deletions: ChangeRows) -> Iterator[_Lookup]:
    table, ring = reader.table, reader.ring
    parts = partition_parts(deletions.partition_key, table)
    keys = list(zip(*(raw_values(part).to_pylist() for part in parts), strict=True))
    bounds = [_bounds(cells, table) for cells in (deletions.clustering, deletions.range_end)]
    of_keys = [f"{quote(column.name)} = ?" for column in table.partition_key]
    for place, number in enumerate(ring.numbers_of(deletions.token).tolist()):
        conditions, values = _between(table, *(side[place] for side in bounds))
        quorum: tuple[ConsistencyLevel, ...] = ("LOCAL_QUORUM",)
        yield _Lookup(
            place,
            Request(
                f"{select} WHERE {all_of([*of_keys, *conditions])}",
                (*keys[place], *values),
                thorough=True,
                begins_small=True,
            ),
            tuple(host.endpoint for host in ring.hosts[number]),
            ("ALL", *quorum) if reader.disagreed and ring.all_live[number] else quorum,
        )


@dataclass(frozen=True)
class _Bound:
    """One side of a range: values of the first clustering columns. It includes rows that begin with them, or not."""

    values: tuple[bytes | None, ...] = ()
    inclusive: bool = True


def _bounds(cells: Cells, table: TableSchema) -> list[_Bound]:
    """Read the bounds of change rows; those of a partition's deletion include all rows."""
    bounds = [_Bound()] * len(cells)
    there = np.flatnonzero(cells.lengths >= 0)
    of_ranges = cells.take(there)
    counts, parts, _ = clustering_parts(of_ranges, len(table.clustering))
    inclusive = of_ranges.buffer[of_ranges.offsets + of_ranges.lengths - 1] > 0
    values = list(zip(*(raw_values(part).to_pylist() for part in parts), strict=True))
    for place, belongs, count, of_row in zip(there.tolist(), inclusive.tolist(), counts.tolist(), values, strict=True):
        bounds[place] = _Bound(of_row[:count], belongs)
    return bounds


def _between(table: TableSchema, start: _Bound, end: _Bound) -> tuple[list[str], list[bytes]]:
    """Return conditions for the rows of a range, and their parameters.

    If the bounds differ in more than one column, the conditions let through some rows that are not in the range.
    Messages of these rows do no harm.
    """
    conditions: list[str] = []
    values: list[bytes] = []
    shared = 0
    for column, value, other in zip(table.clustering, start.values, end.values, strict=False):
        if value is None or value != other:
            break
        conditions.append(f"{quote(column.name)} = ?")
        values.append(value)
        shared += 1
    for bound, sign in ((start, ">"), (end, "<")):
        value = bound.values[shared] if len(bound.values) > shared else None
        if value is not None:
            column = table.clustering[shared]
            sign = {">": "<", "<": ">"}[sign] if column.descending else sign
            inclusive = bound.inclusive or len(bound.values) > shared + 1
            conditions.append(f"{quote(column.name)} {sign}{'=' * inclusive} ?")
            values.append(value)
    return conditions, values
