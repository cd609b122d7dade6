"""The commits of all stages, taken in block by block: each table gets its own, and waits for no other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, Protocol

from ringsync.ledger.staging import (
    Block,
    Place,
    StageCommit,
    commit_keys,
    commit_of_rows,
    get_commit,
    mark_followed,
    node_of,
    retire_commit,
    rows_keys,
)
from ringsync.ledger.table_versions import latest_version
from ringsync.steps.close.agreement import OpenBucket
from ringsync.storage.port import ChecksumError, NotFoundError, ObjectStore

SWEEP_EVERY_MS = 6 * 3_600_000
"""What failed tries have left is looked for when a run begins, and so often again."""


class Taker(Protocol):
    """A table that takes its blocks."""

    def add(self, node: str, block: Block) -> None:
        """Take in a block that a node has staged."""


class StagedCommits:
    """What is staged and not yet published.

    :ivar homeless: blocks of tables that nobody has named yet, by table id: the node and the block
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._commits: dict[str, StageCommit] = {}
        self._broken: dict[str, str] = {}
        self._gone: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._since_ms: dict[str, int] = {}
        self._swept_ms: int | None = None
        self.homeless: dict[str, list[tuple[str, Block]]] = defaultdict(list)

    def read(self, tables: Mapping[str, Taker], now_ms: int) -> None:
        """Take in what was committed since; now and then remove what was staged and never committed.

        :param tables: state of the tables, by id
        :param now_ms: ms since the epoch
        """
        files = self._files(now_ms)
        listed = commit_keys(self._store)
        for known in (self._commits, self._broken):
            for key in known.keys() - set(listed):
                del known[key]
        for key in listed:
            if key in self._commits or key in self._broken:
                continue
            try:
                found = get_commit(self._store, key)
            except NotFoundError:
                continue  # it was replaced by a newer one long ago
            except ChecksumError as error:
                self._broken[key] = f"{type(error).__name__}: {error}"
                continue
            self._commits[key] = found
            for block in found.blocks:
                self.homeless[block.table_id].append((found.node, block))
        self._sweep(files)
        self.give(tables, now_ms)

    def give(self, tables: Mapping[str, Taker], now_ms: int) -> None:
        """Give each table its blocks.

        :param tables: state of the tables, by id
        :param now_ms: ms since the epoch
        """
        for table_id in self.homeless.keys() & tables.keys():
            for node, block in self.homeless.pop(table_id):
                tables[table_id].add(node, block)
        self._since_ms = {table_id: self._since_ms.get(table_id, now_ms) for table_id in self.homeless}

    def forget(self, table_id: str, buckets: Iterable[OpenBucket]) -> None:
        """Count the waiting rows of a table that is gone: they are gone, too.

        :param buckets: what of the table was taken in
        :raises TableVersionError: nobody knows what it was; nothing is forgotten
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

    def retire(self, open_places: Set[Place]) -> None:
        """Forget commits all of whose blocks are published.

        :param open_places: where the others lie, but for those in ``homeless``
        """
        waiting = open_places | {block.place for blocks in self.homeless.values() for _, block in blocks}
        newest = self._newest()
        for key, found in sorted(self._commits.items()):
            if any(block.place in waiting for block in found.blocks):
                continue
            keep = newest[found.node] == found.number or not self._may_go(found)
            if found.blocks or not keep:
                retire_commit(self._store, found, keep=keep)
                self._commits[key] = replace(found, blocks=())
                if not keep:
                    del self._commits[key]

    def _may_go(self, commit: StageCommit) -> bool:
        """Tell whether a commit can be removed: the one before it is gone, or says that it was followed."""
        before = replace(commit, number=commit.number - 1).key
        known = self._commits.get(before)
        if known is None or known.followed:
            return before not in self._broken
        marked = mark_followed(self._store, known)
        if marked is not None:
            self._commits[before] = marked
        return marked is not None

    def _newest(self) -> dict[str, int]:
        """Return the number of the newest commit of each node."""
        newest: dict[str, int] = defaultdict(int)
        for found in self._commits.values():
            newest[found.node] = max(newest[found.node], found.number)
        return newest

    def _files(self, now_ms: int) -> list[str]:
        """Files of blocks, now and then: when they are to be swept."""
        if self._swept_ms is not None and now_ms - self._swept_ms < SWEEP_EVERY_MS:
            return []
        self._swept_ms = now_ms
        return rows_keys(self._store)

    def _sweep(self, files: Iterable[str]) -> None:
        """Remove files that no commit lists, nor ever will: their tries came to nothing, or were killed.

        :param files: keys, as they were before the commits were read: one that was committed since is listed by now
        """
        kept = {key for found in self._commits.values() for key in found.files}
        newest, unclear = self._newest(), {node_of(key) for key in self._broken}
        for key in files:
            written_for = commit_of_rows(key)
            if key in kept or written_for is None or written_for[0] in unclear:
                continue
            node, number = written_for
            # A number that was given once is never given again (put_commit): nobody can commit this file any more.
            if number <= newest[node]:
                self._store.delete(key)

    def problems(self) -> dict[str, Any]:
        """What is wrong, for ``cdcservice status``: commits that cannot be read, rows of tables that nobody has named
        and since when, ms since the epoch, and those of tables that are gone.
        """
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
