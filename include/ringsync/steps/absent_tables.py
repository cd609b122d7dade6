"""Which tables are gone. What waits of such a table is removed, so one that is new must never be taken for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

GONE_AFTER_S = 60.0
"""So far apart are two readings of the schema that tell that a table is gone: the node that was asked first may not
have heard yet of one that has just been created."""


class AbsentTables:
    """Tables that somebody misses, and that the schema has not had since.

    A table is gone that two readings of the schema did not have, :data:`GONE_AFTER_S` apart, both begun after it was
    missed. What was read before may be older than the table, and when it was asked for says nothing.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def __contains__(self, table_id: str) -> bool:
        """Tell whether a table was missed at the last reading, and not there."""
        return table_id in self._since_s

    def is_due(self, missed: Collection[str]) -> bool:
        """Tell whether a reading may tell something new of tables that are missed."""
        now_s = time.monotonic()
        return any(now_s - self._since_s.get(table_id, -math.inf) >= GONE_AFTER_S for table_id in missed)

    def look(self, missed: Collection[str], read: Callable[[], Collection[str]]) -> frozenset[str]:
        """Read the schema, and tell which of the tables that are missed are gone.

        :param missed: ids; of what was missed before, and is not now, nothing is remembered. None: nothing is read
        :param read: reads it, and gives the ids of all tables, also of those that cannot be understood
        """
        began_s = time.monotonic()
        there = read() if missed else ()
        ended_s = time.monotonic()
        self._since_s = {table_id: self._since_s.get(table_id, ended_s) for table_id in missed if table_id not in there}
        return frozenset(table_id for table_id, since_s in self._since_s.items() if began_s - since_s >= GONE_AFTER_S)

    def forget(self, table_ids: Collection[str]) -> None:
        """What waited of these is removed: an id can be given again, and who misses one of them then begins anew."""
        for table_id in table_ids:
            self._since_s.pop(table_id, None)
