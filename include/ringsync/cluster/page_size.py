"""How many rows a page may have, so that no response hurts a node.

A node has all of a response in memory, several times, and a page of the native protocol is limited by rows alone. So
the bytes of a row must be known before a page is requested. All readers of a table in a process share what its pages
have shown (:class:`PageSize`): the first page has one row, and so has the first after a page that failed; the next ones
grow by the bytes that were seen.

What nobody can know is that the next rows are many times wider than all that were read lately: then one response has
as many times more bytes than :data:`PAGE_BYTES`. Large partitions, where that would do harm, are not met unawares
(:mod:`ringsync.sources.scan.beginnings`).
"""

from __future__ import annotations

import math
from collections import defaultdict

PAGE_BYTES = 2**20
"""Wanted size of a page, as of those of ScyllaDB; a wider row is a page by itself."""
STEP = 10
"""A page may have so many times the rows of the largest page that came: the first one has one row."""
MEMORY = 0.9
"""Part of the widest row's size that is remembered after a page of narrower rows."""
LIST_BYTES = 2**24
"""Most bytes of the rows that a request lists, if all are as wide as those of the widest page so far."""

SHRINK = 4
"""Divisor of the rows of a page that did not come: no page has more than the quotient for a while."""
CREEP, LEAST_CREEP = 0.002, 0.0002
"""Growth of this ceiling with each page, at first and after some failures. It is small: if large pages always fail, few
are tried, since each costs a timeout."""
RECOVERY = 1.0005
"""Growth of the growth with each page that came."""


class PageSize:
    """The number of rows that the next page of a SELECT may have.

    It needs no lock: threads that overtake each other make it a little too large or too small for a page.

    :ivar ceiling: most rows that may be asked for again after pages that failed
    """

    def __init__(self) -> None:
        self._most_came = 0
        self._row_bytes = self._widest = 0.0
        self.ceiling = math.inf
        self._creep = CREEP

    @property
    def fitting(self) -> float:
        """Rows that have :data:`PAGE_BYTES`; one, until a row has come."""
        return PAGE_BYTES / (self._row_bytes or PAGE_BYTES)

    def rows(self, most: int) -> int:
        """Return the rows of the next page, at least one.

        :param most: rows that are wanted, or allowed
        """
        return max(1, int(min(most, STEP * self._most_came, self.ceiling, self.fitting)))

    def keys(self, most: int) -> int:
        """Return the keys that the next request may list, at least one: a node reads the rows of all of them into
        memory, whatever the page may have (C: db/SinglePartitionReadCommand queryMemtableAndSSTablesInTimestampOrder).

        :param most: keys that are wanted, or allowed
        """
        return max(1, int(min(self.rows(most), LIST_BYTES / (self._widest or LIST_BYTES))))

    def came(self, rows: int, size: int, keys: int = 0) -> None:
        """Learn from a page.

        :param size: of the page, bytes
        :param keys: keys that the request listed, whether they have rows or not
        """
        self.ceiling *= 1 + self._creep
        self._creep = min(CREEP, self._creep * RECOVERY)
        self._most_came = max(self._most_came, rows, keys)
        if rows:
            self._row_bytes = max(size / rows, MEMORY * self._row_bytes)
            self._widest = max(self._widest, size / rows)

    def failed(self, rows: int) -> None:
        """Learn that a page of so many rows did not come: the next one has one row.

        A page that was short among those that came did not fail because of its rows, and sets no ceiling. Nor do
        further pages that were on their way when one failed.
        """
        if rows > 1 and 0 < self._most_came < STEP * rows:
            self.ceiling = min(self.ceiling, rows / SHRINK)
            self._creep = max(LEAST_CREEP, self._creep / 2)
        self._most_came = 0


PageSizes = defaultdict[tuple[str, bool], PageSize]
"""Sizes by the SELECT's columns and table, and by whether it is of single partitions: what fails in one partition need
not fail in a range of many, and vice versa."""
