"""The log of a node: how far it is staged, what is to be read next, and what cannot be read.

``cdcservice status`` names every problem: a folder that cannot be listed or has no segment, an index without its
segment, a segment that cannot be read, a read that brings nothing. They are tried again after longer and longer pauses.
They do not hold up other segments, and after :data:`PATIENCE_MS` they do not hold up the closing of buckets. No failure
of a node holds up the other nodes of its queue.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringsync.formats.commitlog.names import INDEX_SUFFIX, index_name, is_segment, segment_id, segment_name
from ringsync.ledger.finished_segments import REMEMBERED_S, SegmentIds, finished_segments, fold_finished
from ringsync.ledger.gaps import get_unread
from ringsync.ledger.staging import NOTHING, Bucket, StageCommit, Written, commit_keys, get_commit, together
from ringsync.steps.application import StepError
from ringsync.steps.stage.claims import not_its_own
from ringsync.steps.stage.rights import REMEDY, what_is_refused
from ringsync.steps.stage.stage_task import Staged, StageWork
from ringsync.steps.stage.synced_part import COMPLETE, SyncedPart, synced_part
from ringsync.storage.port import AlreadyExistsError, ObjectStore, StorageError, VersionMismatchError

PATIENCE_MS = 60_000
"""How long apparent damage is read again before it is believed: a mounted folder may show stale pages, and a node may
know of a new column a moment after its writers do."""

FIRST_WAIT_MS, LONGEST_WAIT_MS = 2_000, 60_000
"""A segment that cannot be read, or a node that cannot be staged, is tried again after 2 s, 4 s, 8 s …"""

SCHEMA_WAIT_MS = 3_000
"""So soon at the latest, for a minute, if the schema lacks something of a record."""

UNKNOWN_SYNC_MS = 60_000
"""Taken for the ``commitlog_sync_period`` of a node that does not tell it; Cassandra's default is 10 s."""

SYNC_MARGIN_MS = PATIENCE_MS + 10_000
"""A mounted folder may be stale, a sync may take its time, and clocks may differ."""

SEEN_EVERY_MS = 1_000
"""Least time between two notes of a log's end, which tell later which moments are wholly staged."""


@dataclass
class Doubt:
    """A segment that could not be read as it should.

    :ivar since_ms: time of the first failure
    :ivar again_ms: time of the next try
    :ivar unknown_tables: ids of tables that the schema does not have
    """

    reason: str
    since_ms: int
    again_ms: int
    attempts: int = 1
    unknown_tables: frozenset[str] = frozenset()


@dataclass
class NodeLog:
    """How far a node's log is staged.

    :ivar folder: the node's ``cdc_raw``; None: unknown
    :ivar number: number of the node's last commit; 0: none
    :ivar ends: logical position by segment id, of segments that are not finished
    :ivar finished: times when segments were finished, by id: nothing more comes of them, though Cassandra may link them
        again after a crash
    :ivar written: write times of the rows of these segments, as far as they are known
    :ivar reached: positions that unfinished segments reached by their index while they were written, if more than
        what is staged of them
    :ivar folded: segments that were finished long ago
    :ivar doubts: segments that could not be read, by id
    :ivar backlog: bytes that are synced and not staged
    :ivar clear_at_ms: all that was synced at this moment is staged, but for what cannot be read
    :ivar whole_at_ms: all that was synced at this moment is staged, without exception
    :ivar sync_ms: so long after a write, at the longest, it is synced
    :ivar is_known: whether it was found out how far the log is staged
    :ivar has_answered: whether the node itself has said where its ``cdc_raw`` is
    :ivar captures: whether the node captures changes, as far as is known
    :ivar may_claim: whether to claim the folder if it has no claim of the node
    :ivar asked_in: interval in which it was asked last
    :ivar token: token of the node's claim to the folder; empty: the folder is not claimed
    :ivar unclaimed: why it is not claimed
    :ivar has_left: whether the node has left the ring
    :ivar is_shared: whether another node claims the folder, too
    :ivar unread: names of segments in the folder that are not staged whole, by id
    :ivar missed: names of segments that were unread, and are in the folder no more
    :ivar error: why the log as a whole cannot be read
    :ivar failure: why the node could not be staged; None: all is well again
    :ivar refused: what this worker may not do there, though the log can be read
    :ivar failures: failures in a row that concern the whole node
    :ivar again_ms: time of the next try
    :ivar rested_ms: time until which only the other nodes of its queue are tried: for as long as its last try took
    """

    node: str
    endpoint: str
    folder: Path | None
    number: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    written: dict[int, Written] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    folded: SegmentIds = field(default_factory=SegmentIds)
    doubts: dict[int, Doubt] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    backlog: int = 0
    clear_at_ms: int = 0
    whole_at_ms: int = 0
    sync_ms: int = UNKNOWN_SYNC_MS
    is_known: bool = False
    has_answered: bool = False
    captures: bool = True
    may_claim: bool = True
    asked_in: Bucket | None = None
    token: str = ""
    unclaimed: str = ""
    has_left: bool = False
    is_shared: bool = False
    unread: dict[int, str] = field(default_factory=dict)
    missed: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    failure: str | None = None
    refused: str | None = None
    failures: int = 0
    again_ms: int = 0
    rested_ms: int = 0
    _seen: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    _segments: dict[int, Path] = field(default_factory=dict)
    _parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _unsure_ms: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def alone(self, clock: Callable[[], int]) -> Iterator[None]:
        """Catch any failure inside, which concerns this node alone, and record it. The pause before the node's next try
        is at least as long as this try, which held up all others.

        :param clock: ms since the epoch
        """
        began_ms = clock()
        try:
            yield
        except Exception as error:
            now_ms = clock()
            self.failures += 1
            self.rested_ms = now_ms + (now_ms - began_ms)
            self.again_ms = max(now_ms + _wait_ms(self.failures), self.rested_ms)
            message = str(error) if isinstance(error, StepError | StorageError) else f"{type(error).__name__}: {error}"
            self.failure = f"it cannot be staged: {message[:2000]}"
            print(f"ringsync: warning: node {self.endpoint}, tried again later: {self.failure}", flush=True)

    def read_progress(self, store: ObjectStore, now_ms: int) -> None:
        """Read how far the log was staged before, and fold segments that were finished long ago into one object.

        :raises StorageError: e.g. the newest commit cannot be read
        """
        self.folded = finished_segments(store, self.node)
        if keys := commit_keys(store, self.node):
            last = get_commit(store, keys[-1])
            self.number, self.ends, self.finished = last.number, dict(last.ends), dict(last.finished)
            self.written, self.reached = dict(last.written), dict(last.reached)
            self.whole_at_ms = last.whole_at_ms
        self.unread = get_unread(store, self.node)
        old = [identity for identity, at in self.finished.items() if at < now_ms - REMEMBERED_S * 1000]
        # Another process may just have done so; the next run looks again.
        with suppress(AlreadyExistsError, VersionMismatchError):
            if old:
                self.folded = fold_finished(store, self.node, old)
                self.finished = {identity: at for identity, at in self.finished.items() if identity not in self.folded}
        self.is_known = True

    def why_unclaimed(self) -> str:
        """Tell why the folder has no claim of the node."""
        if self.has_answered:
            return "it has no claim there, and captures nothing (cdc_enabled: false)"
        return (
            "its claim there is gone, and it does not answer. If it never answers this worker, and the folder is its "
            f"own, remove staging/nodes/{self.node} from the object store: the folder is then claimed again"
        )

    def is_due(self, now_ms: int) -> bool:
        """Tell whether the pause after a failure is over."""
        return self.again_ms <= now_ms

    def served(self, tried: bool, now_ms: int) -> None:
        """Record that nothing has failed. All is well again once something was tried, or nothing waits. Otherwise other
        failing nodes come first.

        :param tried: whether something was read, and either committed or put in doubt
        """
        if tried or (self.error is None and not self._parts):
            self.failures, self.failure = 0, None
        self.again_ms = now_ms

    def new_work(self, now_ms: int, most: int, not_ours: Callable[[Collection[str]], str | None]) -> list[StageWork]:
        """Return what is synced and not staged, the oldest segments first.

        :param most: about how many bytes, and one part at least
        :param not_ours: tells why a folder with files of these names is not read for this node; None: it is
        """
        self._parts, self._segments = {}, {}
        try:
            parts = list(self._synced_parts(now_ms, not_ours))
        except OSError as error:
            self.error = f"cdc_raw cannot be read: {error}: is it mounted, and may this user read there?"
            return []
        self.backlog = sum(part.size for _, part in parts)
        self._remember_end(now_ms)
        work, left = [], most
        for identity, part in parts:
            if left > 0 and (identity not in self.doubts or self.doubts[identity].again_ms <= now_ms):
                work.append(part.work)
                left -= part.size
        return work

    def _synced_parts(
        self, now_ms: int, not_ours: Callable[[Collection[str]], str | None]
    ) -> Iterator[tuple[int, SyncedPart]]:
        """Find the parts that are synced and not staged, with the segment's id.

        :raises OSError: the folder cannot be read
        """
        if self.folder is None:
            self.error = (
                "it does not say where its cdc_raw is: it is down, or cannot be asked here; sync.cdc_raw can name it"
                if self.captures
                else "the node captures nothing (cdc_enabled: false)"
            )
            return
        names = os.listdir(self.folder)
        # A node that has left the ring and ended may leave nothing but segments that were read, and removed.
        if not self.has_left and not any(is_segment(name) for name in names):
            self.error = f"{self.folder} has no segment, though every node has one: is it the node's cdc_raw, mounted?"
            return
        self.error, self.refused = not_ours(names), what_is_refused(self.folder)
        if self.error:
            return
        segments = {identity: name for name in names if (identity := segment_id(name)) is not None}
        for identity in self.doubts.keys() - segments.keys():
            del self.doubts[identity]
        self._unsure_ms = {identity: at for identity, at in self._unsure_ms.items() if identity in segments}
        self._notice(names)
        self._segments = {
            identity: self.folder / (segment_name(name) if name.endswith(INDEX_SUFFIX) else name)
            for identity, name in sorted(segments.items())
        }
        for identity, file in self._segments.items():
            if self.has_finished(identity):
                continue
            start, reached = self.ends.get(identity, 0), self.reached.get(identity, 0)
            try:
                part = synced_part(file, self.node, start, self.number + 1, reached)
            except (OSError, ValueError) as error:
                self._doubt(identity, str(error), now_ms)
                continue
            if part is not None:
                self._parts[identity] = (start, part.end)
                if part.end != COMPLETE:
                    self.reached[identity] = max(part.end, reached)
                yield identity, part

    def _notice(self, names: Collection[str]) -> None:
        """Notice segments with changes that wait to be read, and those of them that have left the folder: also those of
        which only the index is there. Cassandra writes the index of its newest segment again after a wipe."""
        there = {identity: name for name in names if is_segment(name) and (identity := segment_id(name)) is not None}
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        with_index = {identity: segment_name(name) for name in indexes if (identity := segment_id(name)) is not None}
        known = {**with_index, **self.unread}
        self.missed |= {identity: name for identity, name in known.items() if identity not in there}
        self.missed = {
            one: name for one, name in self.missed.items() if one not in there and not self.has_finished(one)
        }
        self.unread = {one: there[one] for one in there if one in with_index and not self.has_finished(one)}

    def has_index(self, segment: str) -> bool:
        """Tell whether the index of a segment is in the folder."""
        return self.folder is not None and (self.folder / index_name(segment)).exists()

    def remove_index(self, segment: str) -> None:
        """Remove the index of a segment that is not in the folder. A failure is named."""
        if self.folder is None or self.error or (self.folder / segment).exists():
            return
        index = self.folder / index_name(segment)
        try:
            index.unlink(missing_ok=True)
        except OSError as error:
            self.refused = self.refused or f"{index} cannot be deleted ({error.strerror or error}): {REMEDY}"

    def has_finished(self, identity: int) -> bool:
        """Tell whether a segment was staged whole: nothing more comes of it."""
        return identity in self.finished or identity in self.folded

    def remove_finished(self) -> None:
        """Remove segments that are staged whole, also those that Cassandra has linked again when it replayed them after
        a crash. A failure is named, and the removal is tried again in the next cycle."""
        for identity, file in self._segments.items():
            if self.has_finished(identity):
                try:
                    # The index goes last: if only it is left, it shows that the segment was read.
                    file.unlink(missing_ok=True)
                    file.with_name(index_name(file.name)).unlink(missing_ok=True)
                except OSError as error:
                    self.refused = self.refused or (
                        f"{file} cannot be deleted ({error.strerror or error}), and the folder fills: "
                        "give the user of this worker the right"
                    )

    def accepts(self, staged: Staged, now_ms: int, doubt: str = "") -> bool:
        """Tell whether the result of reading a segment may be committed; otherwise the segment is read again later.

        :param doubt: why the schema by which it was read may be the wrong one; empty: it is not
        """
        part = staged.part
        reason = staged.unreadable
        if not reason and part.end <= part.start and not part.finished:
            why = f": {staged.stopped}" if staged.stopped else ""
            reason = f"{part.segment}: nothing can be read behind position {part.start}, though more is synced{why}"
        if not reason and doubt:
            reason = f"{part.segment}: {doubt}"
        if reason:
            noted = self._doubt(part.segment_id, reason, now_ms, is_schema=bool(doubt))
            noted.unknown_tables = staged.unknown_tables
            return False
        if staged.unsure:
            until_ms = self._unsure_ms.setdefault(part.segment_id, now_ms) + PATIENCE_MS
            if now_ms < until_ms:
                # Once more is enough: after a crash, all segments that wait are such, and each is decoded in vain.
                self._doubt(part.segment_id, f"{part.segment}: {staged.unsure}", now_ms).again_ms = until_ms
                return False
        if staged.damage or staged.unknown_columns:
            what = staged.damage or "a record names a column that its table does not have in the schema"
            noted = self._doubt(part.segment_id, f"{part.segment}: {what}", now_ms, is_schema=not staged.damage)
            return now_ms - noted.since_ms >= PATIENCE_MS  # and the doubt stays until it is committed
        self.doubts.pop(part.segment_id, None)
        return True

    def _doubt(self, identity: int, reason: str, now_ms: int, *, is_schema: bool = False) -> Doubt:
        """Note that a segment could not be read, and when it is tried again.

        :param is_schema: the schema lacks something, which most often takes a second or two: for a minute the segment
            is tried every few seconds, since all tables of the log wait
        """
        known = self.doubts.get(identity)
        attempts = known.attempts + 1 if known else 1
        since_ms = known.since_ms if known else now_ms
        wait_ms = _wait_ms(attempts)
        if is_schema and now_ms - since_ms < PATIENCE_MS:
            wait_ms = min(wait_ms, SCHEMA_WAIT_MS)
        self.doubts[identity] = Doubt(reason, since_ms, now_ms + wait_ms, attempts)
        return self.doubts[identity]

    def commit_of(self, staged: Sequence[Staged]) -> StageCommit:
        """Return the next commit of the node, with what was read of its log."""
        ends, finished, written = dict(self.ends), dict(self.finished), dict(self.written)
        counts: Counter[str] = Counter()
        for result in staged:
            counts.update(result.counts)
            ends.pop(result.part.segment_id, None)
            before = NOTHING if not result.part.start else written.pop(result.part.segment_id, None)
            if before is not None and result.written is not None:
                written[result.part.segment_id] = together(before, result.written)
            if result.part.finished:
                finished[result.part.segment_id] = result.read_at_ms
            else:
                ends[result.part.segment_id] = result.part.end
        return StageCommit(
            node=self.node,
            number=self.number + 1,
            parts=tuple(result.part for result in staged),
            ends=ends,
            finished=(kept := {identity: at for identity, at in finished.items() if identity not in self.folded}),
            written={identity: times for identity, times in written.items() if identity in ends or identity in kept},
            reached=_ahead(self.reached, ends, finished),
            counts=dict(counts),
            blocks=tuple(block for result in staged for block in result.blocks),
            late=tuple(key for result in staged for key in result.late),
            whole_at_ms=self.whole_at_ms,
        )

    def take(self, commit: StageCommit) -> None:
        """Go on after a commit of the node: ours, or that of a faster process."""
        self.number = commit.number
        self.ends, self.finished, self.written = dict(commit.ends), dict(commit.finished), dict(commit.written)
        self.reached = _ahead({**self.reached, **commit.reached}, self.ends, self.finished)
        self.counts.update(commit.counts)
        for part in commit.parts:
            self.doubts.pop(part.segment_id, None)
            self.backlog = max(0, self.backlog - max(0, part.end - part.start))

    def _remember_end(self, now_ms: int) -> None:
        """Note where the log ends now: once this is staged, so is everything that was synced by now."""
        if self.error is None and (not self._seen or now_ms - self._seen[-1][0] >= SEEN_EVERY_MS):
            newest = max(self._parts, default=0)
            self._seen.append((now_ms, (newest, self._parts[newest][1] if newest else 0)))

    def look_back(self, now_ms: int) -> None:
        """Find up to which moment everything is staged, but for segments that were long in doubt."""
        if self.error is not None or self.failure is not None:
            return
        unstaged = {
            identity: at
            for identity, (_, synced) in self._parts.items()
            if identity not in self.finished and (at := self.ends.get(identity, 0)) < synced
        }
        waiting = [place for place in unstaged.items() if not self._was_long_in_doubt(place[0], now_ms)]
        first = min(waiting, default=(COMPLETE, 0))
        while self._seen and self._seen[0][1] <= first:
            self.clear_at_ms = self._seen.pop(0)[0]
        if len(waiting) == len(unstaged) and not self.doubts:
            self.whole_at_ms = max(self.whole_at_ms, self.clear_at_ms)

    def _was_long_in_doubt(self, identity: int, now_ms: int) -> bool:
        return identity in self.doubts and now_ms - self.doubts[identity].since_ms >= PATIENCE_MS

    def may_have(self, moment_ms: int) -> bool:
        """Tell whether something that was written before a moment may not be staged yet.

        :param moment_ms: ms since the epoch
        """
        return self.whole_at_ms <= moment_ms + self.sync_ms + SYNC_MARGIN_MS

    def missed_tables(self) -> frozenset[str]:
        """Return the ids of unknown tables that hold up some of the log."""
        return frozenset().union(*(doubt.unknown_tables for doubt in self.doubts.values()))

    def status(self) -> dict[str, Any]:
        """Return the status of the node, for ``cdcservice status``."""
        last = max(self.ends, default=max(self.finished, default=None))
        doubts = [self.doubts[identity].reason for identity in sorted(self.doubts)]
        more = f" (and {len(doubts) - 1} other segments)" if len(doubts) > 1 else ""
        other = not_its_own(self.folder, self.counts)
        return {
            "endpoint": self.endpoint,
            "folder": str(self.folder) if self.folder else None,
            "segment": last,
            "position": self.ends.get(last) if last is not None else None,
            "backlog_bytes": self.backlog,
            "clear_at_ms": self.clear_at_ms,
            "records": self.counts["records"],
            "rows": self.counts["rows"],
            "late": self.counts["late"],
            "errors": self.counts["errors"],
            "is_read": self.error is None and self.failure is None,
            "empties": self.error is None and self.failure is None and self.refused is None,
            "refused": self.refused,
            "error": self.error or self.failure or self.refused or (f"{doubts[0]}{more}" if doubts else other),
        }


def _ahead(reached: Mapping[int, int], ends: Mapping[int, int], finished: Collection[int]) -> dict[int, int]:
    """Keep the positions that segments have reached and that are not staged."""
    return {one: at for one, at in reached.items() if at > ends.get(one, 0) and one not in finished}


def _wait_ms(failures: int) -> int:
    return min(LONGEST_WAIT_MS, FIRST_WAIT_MS << min(failures - 1, 10))
