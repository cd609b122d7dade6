"""Tables that have left the plan: they are followed until stream, replica and Kafka have all their passes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Set

from ringsync.config import Config
from ringsync.ledger.followed import end_following, followed_tables, keep_following
from ringsync.ledger.passes import get_pass, mark, pass_folder, pass_numbers
from ringsync.ledger.table_versions import latest_version, lost_version
from ringsync.status import BOOTSTRAPS, forget
from ringsync.steps.close.table_state import TableState
from ringsync.steps.passes.follow_ups import publish_passes
from ringsync.steps.passes.sink_feed import SinkFeed
from ringsync.steps.sync_plan import sync_table
from ringsync.storage.port import ObjectStore
from ringsync.streams.cursor import CursorObject
from ringsync.streams.files import FileStream


class Followed:
    """The followed tables (:mod:`ringsync.ledger.followed`) in a run of ``bucket_close``, as of this interval."""

    def __init__(self, store: ObjectStore, config: Config, feed: SinkFeed) -> None:
        self._store = store
        self._config = config
        self._feed = feed
        self._versions: dict[str, str] = {}
        self._asked: set[str] = set()

    def look(self, planned: Set[str], begun: Iterable[str]) -> Set[str]:
        """Read which tables are to be followed; the following of those that are not planned may end from here on.

        :param planned: ids of the tables in the plan
        :param begun: ids of the tables that this run works on: no other process ends them
        """
        self._versions = followed_tables(self._store)
        for table_id in begun:
            self.begin(table_id)
        self._asked = self._versions.keys() - planned
        return self._versions.keys()

    def begin(self, table_id: str) -> None:
        """Record that a table is followed from here on, before its first pass is made."""
        if table_id not in self._versions:
            self._versions[table_id] = keep_following(self._store, table_id)

    def gone(self, table_id: str) -> TableState | None:
        """Return a table that the schema has lost; None: nothing is left to do.

        :raises TableVersionError: its schema is unknown
        """
        if table_id not in self._versions:
            return None
        version = latest_version(self._store, table_id) or lost_version(self._store, table_id)
        if version is None:
            self._end(table_id)
            return None
        return TableState(sync_table(self._store, self._config, version.table, version), gone=True)

    def publish_gone(self, state: TableState) -> None:
        """Bring the passes of a table that is gone to stream and Kafka, once in an interval, also those that wait for a
        bootstrap that will not end. Its replica stays as it is: rows after changes cannot be read any more.

        :raises StreamDamagedError, StepError: a folder cannot become visible
        :raises BootstrapReplacedError: another bootstrap has begun just now
        :raises TableReplacedError: another table has got the topic just now
        """
        if state.table.table_id in self._asked:
            self._feed.watch(state.table.topic)
            self._end_bootstrap(state.table.table_id)
            forget(self._store, f"{BOOTSTRAPS}{state.table.table_id}")
            publish_passes(self._store, self._config, state.table, self._feed.announce, gone=True)

    def ends(self, state: TableState) -> bool:
        """Tell whether a table has just come to its end: it is not planned, and nothing is left to do. Call this after
        all work on the table; it looks once in an interval.

        :raises CursorError: it is unknown how far Kafka has come
        """
        table_id = state.table.table_id
        if table_id not in self._asked or state.buckets:
            return False
        self._asked.remove(table_id)
        done = state.gone or (state.follow_ups is not None and state.follow_ups.is_done())
        return done and self._kafka_has_all(table_id, state.table.topic) and self._end(table_id)

    def _end_bootstrap(self, table_id: str) -> None:
        numbers = pass_numbers(self._store, table_id)
        last = get_pass(self._store, table_id, numbers[-1]) if numbers else None
        if last is not None and last.bootstrap and last.kind != "cutover":
            mark(self._store, table_id, "cutover", last.bootstrap, int(time.time() * 1000))

    def _end(self, table_id: str) -> bool:
        return end_following(self._store, table_id, self._versions.pop(table_id))

    def _kafka_has_all(self, table_id: str, topic: str) -> bool:
        """Tell whether Kafka, if there is one, has all of a table; later folders may be another table's."""
        if self._feed.status(topic) is None:
            return True
        last = pass_folder(max(pass_numbers(self._store, table_id), default=0))
        cursor = CursorObject(self._store, topic, self._config.kafka_topic(topic)).load()
        return all(folder in cursor for folder in FileStream(self._store, topic).folders() if folder <= last)
