"""The commits of all stages, read block by block: each table gets its own blocks, and waits for no other table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from ringsync.ledger import staging
from ringsync.ledger.table_versions import latest_version
from ringsync.steps.close.agreement import OpenBucket
from ringsync.steps.close.table_state import TableState
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore

SWEEP_EVERY_MS = 6 * 3_600_000
"""Time between two searches for files that failed tries have left; the first is at the beginning of a run."""


class StagedCommits:
    """What is staged and not yet published.

    :ivar homeless: blocks of unknown tables, by table id: the node and the block
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._commits: dict[str, staging.StageCommit] = {}
        self._broken: dict[str, str] = {}
        self._gone: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._since_ms: dict[str, int] = {}
        self._swept_ms: int | None = None
        self.homeless: dict[str, list[tuple[str, staging.Block]]] = defaultdict(list)

    def read(self, tables: Mapping[str, TableState], now_ms: int) -> None:
        """Read new commits and give the tables their blocks; now and then remove files that were never committed."""
        files: list[str] = []
        if self._swept_ms is None or now_ms - self._swept_ms >= SWEEP_EVERY_MS:
            self._swept_ms, files = now_ms, staging.rows_keys(self._store)
        listed = staging.commit_keys(self._store)
        for known in (self._commits, self._broken):
            for key in known.keys() - set(listed):
                del known[key]
        for key in listed:
            if key in self._commits or key in self._broken:
                continue
            try:
                commit = staging.get_commit(self._store, key)
            except NotFoundError:
                continue  # a newer commit replaced it long ago
            except ChecksumError as error:
                self._broken[key] = f"{type(error).__name__}: {error}"
                continue
            self._commits[key] = commit
            for block in commit.blocks:
                self.homeless[block.table_id].append((commit.node, block))
        self._sweep(files)
        self.give(tables, now_ms)

    def give(self, tables: Mapping[str, TableState], now_ms: int) -> None:
        """Give each table its blocks."""
        for table_id in self.homeless.keys() & tables.keys():
            for node, block in self.homeless.pop(table_id):
                tables[table_id].add(node, block)
        self._since_ms = {table_id: self._since_ms.get(table_id, now_ms) for table_id in self.homeless}

    def forget(self, table_id: str, buckets: Iterable[OpenBucket]) -> None:
        """Forget and count the waiting rows of a table that is gone.

        :param buckets: the blocks that the table was given
        :raises TableVersionError: its schema is unknown; nothing is forgotten
        """
        waiting = [block for _, block in self.homeless.get(table_id, ())]
        waiting += [
            block for bucket in buckets for place, (_, block) in bucket.files.items() if place not in bucket.united
        ]
        rows = sum(block.rows for block in waiting)
        if rows:
            version = latest_version(self._store, table_id)
            self._names[table_id] = version.table.full_name if version else table_id
            self._gone[table_id] += rows
            print(
                f"ringsync: warning: {self._names[table_id]} (table id {table_id}) was dropped while {rows} staged "
                "rows of it waited, copies of replicas included: they are not published",
                flush=True,
            )
        self.homeless.pop(table_id, None)

    def retire(self, open_places: Set[staging.Place]) -> None:
        """Forget commits whose blocks are all published.

        :param open_places: places of the other blocks, but for those in ``homeless``
        """
        waiting = open_places | {block.place for blocks in self.homeless.values() for _, block in blocks}
        newest = self._newest()
        for key, commit in sorted(self._commits.items()):
            if any(block.place in waiting for block in commit.blocks):
                continue
            keep = newest[commit.node] == commit.number or not self._may_go(commit)
            if commit.blocks or not keep:
                staging.retire_commit(self._store, commit, keep=keep)
                self._commits[key] = replace(commit, blocks=())
                if not keep:
                    del self._commits[key]

    def _may_go(self, commit: staging.StageCommit) -> bool:
        """Tell whether a commit can be removed: the one before it is gone, or is marked as followed."""
        before = replace(commit, number=commit.number - 1).key
        known = self._commits.get(before)
        if known is None or known.followed:
            return before not in self._broken
        marked = staging.mark_followed(self._store, known)
        if marked is not None:
            self._commits[before] = marked
        return marked is not None

    def _newest(self) -> dict[str, int]:
        newest: dict[str, int] = defaultdict(int)
        for commit in self._commits.values():
            newest[commit.node] = max(newest[commit.node], commit.number)
        return newest

    def _sweep(self, files: Iterable[str]) -> None:
        """Remove files of failed tries, which no commit lists or ever will.

        :param files: keys, listed before the commits were read: a file that was committed since is listed by now
        """
        kept = {key for commit in self._commits.values() for key in commit.files}
        newest, unclear = self._newest(), {staging.node_of(key) for key in self._broken}
        for key in files:
            written_for = staging.commit_of_rows(key)
            if key in kept or written_for is None or written_for[0] in unclear:
                continue
            node, number = written_for
            # A number is never given twice (put_commit): no process can commit this file any more.
            if number <= newest[node]:
                self._store.delete(key)

    def problems(self) -> dict[str, Any]:
        """Return what is wrong, for ``cdcservice status``: commits that cannot be read, rows of unknown tables and
        since when they wait, rows of tables that are gone."""
        gone: Counter[str] = Counter()
        for table_id, rows in self._gone.items():
            gone[self._names[table_id]] += rows  # tables that were dropped, created again and dropped have one name
        return {
            "commits_broken": dict(self._broken),
            "rows_homeless": {
                table_id: sum(block.rows for _, block in blocks) for table_id, blocks in self.homeless.items()
            },
            "homeless_since_ms": dict(self._since_ms),
            "rows_of_dropped_tables": dict(gone),
        }
