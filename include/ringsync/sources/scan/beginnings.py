"""The beginnings of partitions: what they say about large partitions before these are read.

A page that runs from narrow rows into a partition of wide ones has as many of them as its rows were to be narrow. So
where a table has large partitions, a range is first read with a SELECT of the first rows of each partition. Most
partitions have no more, and are read by that. The others are read again: with the usual pages if their first rows
are as narrow as those around them, else by themselves, with pages that begin with one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringsync.cluster.page_size import PAGE_BYTES
from ringsync.compiled.arrow import Integers, integers
from ringsync.cql.codec.decode import decode
from ringsync.cql.types import Native
from ringsync.formats.result_page import Page, page_cells
from ringsync.images.from_pages import ResultColumn
from ringsync.ring.splits import SizeEstimate
from ringsync.ring.tokens import TokenRange

FIRST_ROWS = 8
"""Most rows of a partition's beginning."""
RESPONSE_BYTES = 32 * 2**20
"""A partition is read by itself if a page of its neighbours' rows might have more bytes of it."""
GAP_ROWS = 500
"""So many rows of whole partitions are not read again because large ones lie on both sides of them."""


def beginning_rows(estimate: SizeEstimate | None, most: int) -> int:
    """Return the most rows of a page of beginnings: if they were of as many partitions, these are expected to have at
    most :data:`RESPONSE_BYTES` in all.

    :param estimate: of the table's size; None: unknown
    :param most: most rows of any page
    """
    mean = estimate.bytes / max(1, estimate.partitions) if estimate else 0
    return min(most, max(FIRST_ROWS, int(RESPONSE_BYTES / max(1, mean))))


@dataclass(frozen=True)
class ReadAgain:
    """A token range with partitions that have more rows than their beginnings.

    :ivar alone: whether its rows are wide: it has one token
    """

    range: TokenRange
    alone: bool


class Beginnings:
    """The reader of pages of beginnings, which come in the order of tokens.

    ``end`` is the token up to which everything was given.

    :param start: token before the first one
    :param page_rows: most rows of a page
    """

    def __init__(self, layout: Sequence[ResultColumn], start: int, page_rows: int) -> None:
        self.end = start
        self._columns, self._token_at = len(layout), layout.index(ResultColumn("token", None))
        self._page_rows = page_rows
        self._last: Page | None = None

    def take(self, page: Page, *, ended: bool) -> Iterator[Page | ReadAgain]:
        """Return the rows of whole partitions, and the ranges that must be read again, in the order of tokens.

        The page's last token waits for the next page, which may have more of it.

        :param ended: whether it is the last page
        """
        if self._last is not None:
            page, self._last = _joined([self._last, page]), None
        rows, columns = page_cells(page, self._columns)
        if not rows:
            return
        tokens = integers(decode(Native("bigint"), columns[self._token_at]).values)
        starts = np.flatnonzero(np.append(True, tokens[1:] != tokens[:-1]))
        bounds = np.append(starts, rows)
        last = columns[-1]
        at = np.append(4, last.offsets + np.maximum(last.lengths, 0))[bounds]  # of each token's first byte
        if not ended:
            self._last, bounds, at = _part(page, at[-2:], rows - starts[-1]), bounds[:-1], at[:-1]
        if len(bounds) > 1:
            yield from self._whole(page, tokens[bounds[:-1]], bounds, at)

    def _whole(self, page: Page, tokens: Integers, bounds: Integers, at: Integers) -> Iterator[Page | ReadAgain]:
        """Return what :meth:`take` does.

        :param tokens: tokens whose rows are all there
        :param bounds, at: row number and byte of the first row of each token, and the ends of the last one
        """
        counts = np.diff(bounds)
        widths = np.diff(at) / counts
        alone = widths * min(self._page_rows, PAGE_BYTES / widths.min()) > RESPONSE_BYTES
        cut = np.flatnonzero(counts >= FIRST_ROWS)
        far = np.flatnonzero(bounds[cut[1:]] - bounds[cut[:-1] + 1] > GAP_ROWS) + 1
        begin = 0
        for run in np.split(cut, far) if len(cut) else ():
            if run[0] > begin:
                yield _part(page, at[[begin, run[0]]], int(bounds[run[0]] - bounds[begin]))
            start = int(tokens[run[0]]) - 1
            for token in tokens[run[alone[run]]].tolist():
                if start < token - 1:
                    yield ReadAgain(TokenRange(start, token - 1), alone=False)
                yield ReadAgain(TokenRange(token - 1, token), alone=True)
                start = token
            if start < tokens[run[-1]]:
                yield ReadAgain(TokenRange(start, int(tokens[run[-1]])), alone=False)
            begin = int(run[-1]) + 1
        if begin < len(tokens):
            yield _part(page, at[[begin, -1]], int(bounds[-1] - bounds[begin]))
        self.end = int(tokens[-1])


def _part(page: Page, place: Integers, rows: int) -> Page:
    """Return a part of a page, given its bytes and its number of rows."""
    first, end = place.tolist()
    return page if end - first == len(page) - 4 else int(rows).to_bytes(4, "big") + page[first:end]


def _joined(pages: Sequence[Page]) -> Page:
    rows = sum(int.from_bytes(page[:4], "big") for page in pages)
    return b"".join([rows.to_bytes(4, "big"), *(page[4:] for page in pages)])
