"""Tables that are gone. What waits of such a table is removed, so a new table must never be taken for gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

GONE_AFTER_S = 60.0
"""Time between two readings of the schema that show that a table is gone: the node that was asked first may not know a
new table yet."""


class AbsentTables:
    """Tables that somebody misses, and that the schema has lacked since.

    A table is gone if two readings of the schema lacked it, :data:`GONE_AFTER_S` apart, both begun after it was missed.
    An earlier reading may be older than the table.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def __contains__(self, table_id: str) -> bool:
        """Tell whether a table was missed, and lacking, at the last reading."""
        return table_id in self._since_s

    def is_due(self, missed: Collection[str]) -> bool:
        """Tell whether a reading may say something new of missed tables."""
        now_s = time.monotonic()
        return any(now_s - self._since_s.get(table_id, -math.inf) >= GONE_AFTER_S for table_id in missed)

    def look(self, missed: Collection[str], read: Callable[[], Collection[str]]) -> frozenset[str]:
        """Read the schema, and tell which of the missed tables are gone.

        :param missed: ids; all others are forgotten. If there are none, nothing is read
        :param read: reads the ids of all tables, also of those that cannot be understood
        """
        began_s = time.monotonic()
        there = read() if missed else ()
        ended_s = time.monotonic()
        self._since_s = {table_id: self._since_s.get(table_id, ended_s) for table_id in missed if table_id not in there}
        return frozenset(table_id for table_id, since_s in self._since_s.items() if began_s - since_s >= GONE_AFTER_S)

    def forget(self, table_ids: Collection[str]) -> None:
        """Forget tables whose rows are removed: an id can be given again, and then its time begins anew."""
        for table_id in table_ids:
            self._since_s.pop(table_id, None)
