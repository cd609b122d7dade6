"""Tables that are gone. Their waiting rows are removed, so a new table must never be mistaken for one that is gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

GONE_AFTER_S = 60.0
"""A table is gone if two readings of the schema lack it, so far apart: a node may not know a new table yet."""


class AbsentTables:
    """Missed tables: a step has met their ids, but the schema does not have them.

    A table is gone if two readings of the schema lacked it, :data:`GONE_AFTER_S` apart, and both began after it was
    missed, and if the nodes agree then. An earlier reading may be older than the table, and so may a node's schema.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def __contains__(self, table_id: str) -> bool:
        """Tell whether a table was missed, and the last reading of the schema lacked it."""
        return table_id in self._since_s

    def is_due(self, missed: Collection[str]) -> bool:
        """Tell whether it is time to read the schema again for one of the missed tables."""
        now_s = time.monotonic()
        return any(now_s - self._since_s.get(table_id, -math.inf) >= GONE_AFTER_S for table_id in missed)

    def look(
        self, missed: Collection[str], read: Callable[[], Collection[str]], is_sure: Callable[[], bool]
    ) -> frozenset[str]:
        """Read the schema, and return which of the missed tables are gone.

        :param missed: ids; all others are forgotten. If there are none, the schema is not read
        :param read: returns the ids of all tables, also of those whose schema is not supported
        :param is_sure: tells whether a table that was not read is not there: all nodes have the schema that was read
        """
        began_s = time.monotonic()
        there = read() if missed else ()
        ended_s = time.monotonic()
        self._since_s = {table_id: self._since_s.get(table_id, ended_s) for table_id in missed if table_id not in there}
        old = frozenset(table_id for table_id, since_s in self._since_s.items() if began_s - since_s >= GONE_AFTER_S)
        return old if old and is_sure() else frozenset()

    def forget(self, table_ids: Collection[str]) -> None:
        """Forget tables whose rows were removed: if an id is used again, its time begins anew."""
        for table_id in table_ids:
            self._since_s.pop(table_id, None)
