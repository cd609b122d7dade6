"""The row after a change, and the complete images that the replica takes, as ``after_image`` says (docs/sync.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, concatenated
from ringsync.changes.columns import columns_of
from ringsync.changes.identity import TableVersion
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import DELETIONS, EXPIRING, OF_PARTITIONS, ROW, STATIC, TOMBSTONE
from ringsync.cluster.control import ControlAddress, ControlClient
from ringsync.cluster.levels import at_permitted
from ringsync.compiled.arrow import Integers, Mask, Places, integers
from ringsync.config import Config
from ringsync.config.sections import ConsistencyLevel
from ringsync.cql.cells import codes
from ringsync.images.after import RowsAfter, rows_after, seen_instead, without_deleted_livenesses
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.images.visible import same_keys, visible
from ringsync.ledger.staging import decode_rows
from ringsync.replica.changes import CLOCK_SKEW_US, ReplicaState
from ringsync.replica.lookup import previous_images
from ringsync.ring.ranks import RankedRing
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import RowsRead, UnreadRow, read_rows
from ringsync.sources.scan.scan import scan_session, tells_element_times
from ringsync.steps.passes.pieces import seen_partitions
from ringsync.steps.passes.rows_before import Before, Said, alive, removed_rows, rows_before
from ringsync.wiring import cluster_settings, store_of

Mode = Literal["source", "replica", "none"]

_NEVER = np.iinfo(np.int64).max

_FETCHERS = ThreadPoolExecutor(8)
"""Threads that fetch deletions: hours of them are many small objects, and a store answers many requests at once."""

KEYS_AT_ONCE = 50_000
"""Keys that are read together, with their images in memory."""


class UnreadRowsError(RuntimeError):
    """Rows of the source could not be read, after everything was tried."""


@dataclass(frozen=True)
class AfterReader:
    """How a task finds rows.

    :ivar mode: source of the row after a change
    :ivar ring: ring snapshot whose first rank is asked first
    :ivar control: keeps the limits of reading the cluster
    :ivar replica: the replica with all passes before this one; None: the table has none, or it lacks some
    :ivar deletions: files of earlier passes' deletions of partitions and ranges, each with its greatest timestamp, µs
        (None: unknown). A row that is older than they are, and comes only now, must not live again in the replica
    :ivar deletions_known_from_us: µs: deletions that the replica does not show may hide what was written before
    :ivar disagreed: whether possibly only one replica has the changes, or what was published lately, which a quorum may
        miss: all replicas are asked
    :ivar one_is_enough: whether all replicas have these changes and everything published lately: one replica is asked
    :ivar before: whether messages contain the row before the change, if there is a replica
    :ivar expand: whether each row that a deletion of a partition or range has removed gets a message of its own
    """

    config: Config
    version: TableVersion
    mode: Mode
    ring: RankedRing
    control: ControlAddress
    replica: ReplicaState | None
    deletions: tuple[tuple[str, int | None], ...] = ()
    deletions_known_from_us: int = 0
    disagreed: bool = False
    one_is_enough: bool = True
    before: bool = False
    expand: bool = False

    @property
    def table(self) -> TableSchema:
        """The table in this version."""
        return self.version.table

    @property
    def read_whole(self) -> tuple[int, ...]:
        """The kinds of changes whose messages need all rows that the replica has of a partition."""
        if self.replica is not None and (self.mode == "replica" or self.before):
            return OF_PARTITIONS
        return DELETIONS if self.replica is not None and self.expand and self.table.clustering else ()

    @property
    def misfits(self) -> Literal["error", "raw"]:
        """Treatment of values that their Arrow type cannot hold."""
        return self.config.replica.unrepresentable_values


@dataclass(frozen=True)
class After:
    """The rows after changes.

    :ivar images: one for each merged change row, in their order; anything where ``visible`` is false
    :ivar visible: whether the row is there
    :ivar open: whether the result is unknown: the read does not show the change, but a replica that is down may have it
    :ivar at_s: moment at which the rows were read, s since the epoch
    :ivar before: the rows before the changes; None: unknown
    """

    images: pa.RecordBatch
    visible: Mask
    open: Mask
    at_s: int
    before: Before | None = None

    def known(self) -> After:
        """Leave out the open rows."""
        left = ~self.open
        before = self.before and (self.before[0].filter(pa.array(left)), self.before[1][left])
        return After(self.images.filter(pa.array(left)), self.visible[left], self.open[left], self.at_s, before)


def images_after(reader: AfterReader, merged: ChangeRows) -> After:
    """Find the row after each change, as the reader's mode says. Counters are always read from the source.

    :raises UnreadRowsError: rows could not be read
    """
    table, now_s = reader.table, int(time.time())
    places = np.flatnonzero(merged.of_row)
    mode: Mode = "source" if table.has_counters else reader.mode
    if mode == "replica" and reader.replica is None:
        mode = "source"
    previous, before = None, None
    if reader.replica is not None and (reader.before or mode == "replica"):
        previous = previous_of(reader, merged, row_images_of(merged, table, reader.misfits))
        before = rows_before(previous, merged, table, now_s) if reader.before else None
    undecided = np.zeros(len(places), np.bool_)
    if mode == "none":
        images, visible = row_images_of(merged, table, reader.misfits), _is_left(merged, places)
    elif mode == "replica" and previous is not None:
        under = under_deletions(reader, merged)
        doubtful = _may_be_hidden(reader, under)
        after, believed = _completed(reader, under, previous, np.zeros_like(doubtful))
        images = after.images.take(pa.array(after.of_change[places]))
        undecided = believed[after.of_change[places]]
        visible, asked = alive(images, table, now_s), _with_their_rows(doubtful, merged)[places]
        if asked.any():
            seen, visible[asked], undecided[asked] = _from_source(reader, merged, places[asked], now_s)
            images = _combined(images, asked, seen)
    else:
        images, visible, undecided = _from_source(reader, merged, places, now_s)
    if len(places) == len(merged):
        return After(images, visible, undecided, now_s, before)
    take = np.zeros(len(merged), np.int64)
    shown, waiting = np.zeros((2, len(merged)), np.bool_)
    take[places] = np.arange(len(places))
    shown[places], waiting[places] = visible, undecided
    return After(_taken(images, take, row_image_schema(table)), shown, waiting, now_s, before)


def _from_source(
    reader: AfterReader, merged: ChangeRows, places: Places, now_s: int
) -> tuple[pa.RecordBatch, Mask, Mask]:
    """Read the rows from the source: images, whether they are there, and whether that is unknown.

    What was read is merged with the changes: that tells times that no SELECT shows. If a change does not show,
    something hides it, maybe a deletion that we do not know of. Then all replicas are asked, and their answer is right.
    While a replica is down that may be the only one with the change, the result is unknown.
    """
    table, now_us = reader.table, now_s * 1_000_000
    rows = merged.take(places)
    keys = rows.keys
    levels: list[ConsistencyLevel] = ["LOCAL_ONE"] if reader.one_is_enough and not reader.disagreed else []
    seen = read_keys(reader, keys, levels, now_s)
    after = rows_after(seen.images, rows, table, live_known_from_us=0, misfits=reader.misfits)
    images = after.images.take(pa.array(after.of_change))
    instead = seen_instead(images, seen.images, now_us, table)
    unknown = after.unknown[after.of_change]
    images = _combined(images, unknown, instead.filter(pa.array(unknown)))
    living, there = alive(images, table, now_s), seen.there.copy()
    hidden = ~visible(rows, seen.images, table, now_s, exact_expiry=seen.exact_expiry)
    if reader.disagreed and table.has_counters:
        hidden |= ~seen.everywhere  # a newer time does not say that a total has what only one replica has counted
    # Messages tell the times of what has ended. A row that is seen all the same lives by something else.
    ended = there & ~hidden & (_with_their_rows(_has_expired(rows, now_s), rows) | ~living)
    images = _combined(images, ended, instead.filter(pa.array(ended)))
    if reader.disagreed:
        decided = (hidden & seen.everywhere) | (_with_their_rows(hidden, rows) & ~hidden)
        shown = instead.filter(pa.array(decided))
    else:
        # At such a level a replica answers that has the change in its log, so it knows what hides it. What was read
        # instead of uncertain images is right.
        decided = hidden = _with_their_rows(hidden & ~unknown, rows)
        if hidden.any():
            asked = keys.filter(pa.array(hidden))
            again = read_keys(replace(reader, disagreed=True), asked, levels, now_s)
            there[hidden] = again.there
            instead = seen_instead(images.filter(pa.array(hidden)), again.images, now_us, table)
        shown = instead
    return _combined(images, decided, shown), there | (living & ~hidden), hidden & ~decided


def _with_their_rows(chosen: Mask, merged: ChangeRows) -> Mask:
    """Add the changes of rows that show the static cells of a chosen change."""
    static = chosen & (merged.kind == STATIC)
    if not static.any():
        return chosen
    (partition,) = codes([merged.partition_key])
    return np.asarray(chosen | (np.isin(partition, partition[static]) & (merged.kind == ROW)))


def _has_expired(rows: ChangeRows, now_s: int) -> Mask:
    """Tell which changes wrote a cell that has expired: no SELECT shows it, though nothing hides it."""
    expired = np.zeros(len(rows), np.bool_)
    expired[rows.cells.row[(rows.cells.kind == EXPIRING) & (rows.cells.local <= now_s)]] = True
    return expired


def under_deletions(reader: AfterReader, merged: ChangeRows) -> ChangeRows:
    """Reconcile merged change rows, each in its place, with the deletions that were published before them."""
    store, version, table = store_of(reader.config), reader.version, reader.table
    oldest = _written_from(merged).min(initial=_NEVER)
    keys = [key for key, until in reader.deletions if until is None or until >= oldest]

    def read(key: str) -> ChangeRows:
        deletions = ChangeRows.of(version.from_store(decode_rows(store.get(key))))
        return deletions.where(np.isin(deletions.token, merged.token))

    older = [rows for rows in _FETCHERS.map(read, keys) if len(rows)]
    if not older:
        return merged
    both = merge(concatenated([merged, *older]), table)
    # The older deletions were applied by their own passes.
    return merge(concatenated([both.where(both.of_row), merged.where(~merged.of_row)]), table)


def _written_from(merged: ChangeRows) -> Integers:
    """Return the oldest write time in each change row, µs; in the far future if it only deletes."""
    oldest = np.where(merged.liveness.there, merged.liveness.timestamp, _NEVER)
    cells = merged.cells.where(merged.cells.kind != TOMBSTONE)
    np.minimum.at(oldest, cells.row, cells.timestamp)
    return oldest


def _may_be_hidden(reader: AfterReader, merged: ChangeRows) -> Mask:
    """Tell which changes are so old that a deletion which the replica does not show may hide them."""
    if reader.table.has_counters:
        return np.zeros(len(merged), np.bool_)  # they are read from the source anyway
    return np.asarray(_written_from(merged) < reader.deletions_known_from_us)


def complete_rows(reader: AfterReader, merged: ChangeRows) -> RowsAfter:
    """Make complete images of all keys that changes touch: what the replica has, merged with the changes.

    Images of which the replica is not certain are read from the source, at quorum at least.

    :raises UnreadRowsError: rows could not be read
    """
    previous = previous_of(reader, merged, row_images_of(merged, reader.table, reader.misfits))
    return _completed(reader, merged, previous, _may_be_hidden(reader, merged))[0]


def with_before(reader: AfterReader, said: Said, removed: Said | None) -> Said:
    """Add what the replica had of rows that were not changed, if messages say the row before.

    :param removed: rows that earlier messages of the pass call gone
    """
    if reader.replica is None or not reader.before:
        return said
    previous = previous_of(reader, said.changes, said.images)
    images, there = rows_before(previous, said.changes, reader.table, int(time.time()))
    if removed is not None:
        there = there & (same_keys(said.changes, removed.changes, reader.table) < 0)
    return replace(said, before=(images, there))


def rows_removed(reader: AfterReader, merged: ChangeRows) -> Said | None:
    """Find the rows that deletions of partitions and ranges have removed, and that no change of their own touches.

    :param merged: merged change rows, with their nodes
    :returns: None: there are none
    :raises UnreadRowsError: rows could not be read; or there are such deletions, but no replica that has all passes
    """
    table, deleted = reader.table, np.unique(merged.token[~merged.of_row])
    if not reader.expand or not table.clustering or not len(deleted):
        return None
    if reader.replica is None:
        raise UnreadRowsError(
            f"{table.full_name}: expand_deletions finds the rows that a deletion has removed in the replica, and there "
            "is none that has all that was published. If it is being bootstrapped, or has just been altered (then the "
            "DAG replica_merge writes it again), wait; else bootstrap it, or set "
            f"sync.tables: {{{table.full_name}: {{expand_deletions: false}}}}"
        )
    chosen = merged.where(np.isin(merged.token, deleted))
    previous = previous_of(reader, chosen, row_images_of(chosen, table, reader.misfits))
    after, _ = _completed(reader, chosen, previous, np.zeros(len(chosen), np.bool_))
    return removed_rows(previous, chosen, after, table, int(time.time()))


def previous_of(reader: AfterReader, merged: ChangeRows, images: pa.RecordBatch) -> pa.RecordBatch:
    """Return what the replica has of the rows that changes touch.

    :param images: images of the changes of rows
    """
    assert reader.replica is not None
    whole = whole_partitions(merged)
    previous = previous_images(reader.replica, reader.table, images, whole)
    if len(whole):
        seen_partitions(reader.table, whole, previous)
    return previous


def whole_partitions(merged: ChangeRows) -> pa.Array:
    """Return the tokens of partitions in which merged change rows may touch any row."""
    return pa.array(np.unique(merged.token[merged.kind != ROW]), pa.int64())


def _completed(
    reader: AfterReader, merged: ChangeRows, previous: pa.RecordBatch, doubtful: Mask
) -> tuple[RowsAfter, Mask]:
    """Make the images of all keys that changes touch, and the mask of those for which the log is believed.

    :param previous: the newest images before the changes
    :param doubtful: mask of the changes that something may hide, so that the source is asked
    """
    assert reader.replica is not None
    table = reader.table
    after = rows_after(
        previous,
        merged,
        table,
        live_known_from_us=reader.replica.live_known_from_us,
        misfits=reader.misfits,
        doubtful=doubtful,
        deletions_known_from_us=reader.deletions_known_from_us,
    )
    believed = np.zeros(len(after.images), np.bool_)
    if not after.unknown.any():
        return after, believed
    unknown = after.images.filter(pa.array(after.unknown))
    partition_keys, clusterings = image_keys(unknown, table)
    clusterings = pc.if_else(pa.array(has_clustering(unknown, table)), clusterings, None)
    names = ["token", "partition_key", "clustering"]
    keys = pa.RecordBatch.from_arrays([unknown["token"], partition_keys, clusterings], names=names)
    now_s = int(time.time())
    seen = read_keys(reader, keys, [], now_s)
    images = seen_instead(unknown, seen.images, now_s * 1_000_000, table)
    if reader.disagreed and not table.has_counters:
        open_images = believed[after.unknown] = _undecided(after, merged, seen, table, now_s)
        dead_until_us = reader.replica.live_known_from_us - CLOCK_SKEW_US
        logged = without_deleted_livenesses(unknown, table, dead_until_us, seen.there)
        images = _combined(images, open_images, logged.filter(pa.array(open_images)))
    return replace(after, images=_combined(after.images, after.unknown, images)), believed


def _undecided(after: RowsAfter, merged: ChangeRows, seen: Seen, table: TableSchema, now_s: int) -> Mask:
    """Tell for which of the images that were read the log is believed instead.

    A replica that does not answer may be the only one that has the change. The copies of the change that come later
    count as published. No read shows which entry a list has lost, so the loss of an entry alone leaves nothing unknown.

    :param seen: rows that were read, one for each image that is not certain
    """
    says = after.of_change >= 0
    says[says] = after.unknown[after.of_change[says]]
    changes = np.flatnonzero(says)
    place = np.cumsum(after.unknown)[after.of_change[changes]] - 1  # among the images that were read
    told = _without_list_tombstones(merged.take(changes), table)
    is_shown = visible(told, seen.images, table, now_s, exact_expiry=seen.exact_expiry)
    is_open = ~seen.everywhere[place] & ~is_shown
    believed = np.zeros(len(seen.everywhere), np.bool_)
    believed[place[is_open]] = True
    if table.of_kind("static"):  # all rows of a partition show its static cells
        partition, _ = image_keys(after.images.filter(pa.array(after.unknown)), table)
        believed = pc.is_in(partition, partition.filter(pa.array(believed))).to_numpy(zero_copy_only=False)
    return believed


def _without_list_tombstones(merged: ChangeRows, table: TableSchema) -> ChangeRows:
    lists = [column.number for column in columns_of(table) if column.is_list]
    cells = merged.cells
    return replace(merged, cells=cells.where((cells.kind != TOMBSTONE) | ~np.isin(cells.column, lists)))


@dataclass(frozen=True)
class Seen:
    """Rows of the source.

    :ivar images: images of the rows that exist
    :ivar there: mask of the keys that have an image
    :ivar everywhere: mask of the keys whose replicas were all asked and have all answered
    :ivar exact_expiry: whether expiries are exact
    """

    images: pa.RecordBatch
    there: Mask
    everywhere: Mask
    exact_expiry: bool = True


def read_keys(reader: AfterReader, keys: pa.RecordBatch, levels: Sequence[ConsistencyLevel], now_s: int) -> Seen:
    """Read rows of the source.

    Where replicas disagreed, all of them are asked if all are alive; if one does not answer, a quorum is. Counters are
    always read so: a total cannot be merged with increments that only one replica has, and no later change contains
    the increments that were published long ago.

    :param levels: consistency levels for rows on which replicas agree, tried in turn. They are also tried if all
        replicas are to be asked and no quorum answers. In place of one that the cluster forbids (guardrails), another
        is asked that is as good
    :raises UnreadRowsError: rows could not be read
    :raises GuardrailError: the cluster forbids this level, and all that are as good
    """
    images = [pa.RecordBatch.from_pylist([], row_image_schema(reader.table))]
    there, everywhere = np.zeros((2, keys.num_rows), np.bool_)
    settings = cluster_settings(reader.config)
    session = scan_session(settings, now_s)

    def ask(level: ConsistencyLevel, asked: Places) -> list[UnreadRow]:
        """Read the rows of some keys, and return those that could not be read."""
        unread: list[UnreadRow] = []

        def read(permits: ControlClient, chosen: Places, permitted: ConsistencyLevel) -> RowsRead:
            return read_rows(
                session,
                reader.table,
                keys.take(pa.array(chosen)),
                reader.ring,
                replace(settings, consistency_level=permitted),
                permits,
                element_times=tells_element_times(session, reader.table),
                misfits=reader.misfits,
                of_all=level == levels[-1],
            )

        with ControlClient(reader.control) as permits:
            for start in range(0, len(asked), KEYS_AT_ONCE):
                chosen = asked[start : start + KEYS_AT_ONCE]
                rows = at_permitted(session, reader.table, level, reader.ring, partial(read, permits, chosen))
                images.append(rows.images)
                there[chosen[rows.places]] = True
                unread += [replace(row, place=int(chosen[row.place])) for row in rows.unread]
                if unread and level == levels[-1]:
                    break
        return unread

    left, unread = np.arange(keys.num_rows), []
    of_all = reader.disagreed or reader.table.has_counters
    if of_all or not levels:
        levels = ["LOCAL_QUORUM", *levels]
    if of_all:
        everywhere = reader.ring.all_live[reader.ring.numbers_of(integers(keys["token"]))]
        unread = ask("ALL", left[everywhere])
        everywhere[[row.place for row in unread]] = False
        left = left[~everywhere]
    for level in levels:
        unread = ask(level, left) if len(left) else []
        left = np.array([row.place for row in unread], np.intp)
    if unread:
        raise UnreadRowsError(f"rows could not be read, the first: {unread[0].reason}")
    return Seen(pa.concat_batches(images), there, everywhere, session.reads_as_of)


def _is_left(merged: ChangeRows, places: Places) -> Mask:
    """Tell which changes have more than a deletion of the row; nothing was merged with them."""
    has_parts = np.zeros(len(merged), np.bool_)
    for parts in (merged.cells, merged.complex_deletions):
        has_parts[parts.row] = True
    return np.asarray((merged.liveness.there | has_parts | ~merged.deletion.there)[places])


def _combined(images: pa.RecordBatch, replaced: Mask, others: pa.RecordBatch) -> pa.RecordBatch:
    """Put others in the places of the images that are replaced."""
    if not replaced.any():
        return images
    order = np.arange(images.num_rows)
    order[replaced] = images.num_rows + np.arange(others.num_rows)
    return pa.Table.from_batches([images, others]).take(pa.array(order)).combine_chunks().to_batches()[0]


def _taken(images: pa.RecordBatch, places: npt.NDArray[np.int64], schema: pa.Schema) -> pa.RecordBatch:
    if images.num_rows:
        return images.take(pa.array(places))
    return pa.RecordBatch.from_arrays([pa.nulls(len(places), field.type) for field in schema], schema=schema)
