"""The row after a change, and the complete images that the replica takes, as ``after_image`` says (docs/sync.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows, concatenated
from ringsync.changes.columns import columns_of
from ringsync.changes.identity import TableVersion
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import EXPIRING, ROW, STATIC, TOMBSTONE
from ringsync.cluster.control import ControlAddress, ControlClient
from ringsync.compiled.arrow import Integers, Mask, Places, integers
from ringsync.config import Config
from ringsync.config.sections import ConsistencyLevel
from ringsync.cql.cells import codes
from ringsync.images.after import RowsAfter, rows_after, seen_instead
from ringsync.images.from_changes import row_images_of
from ringsync.images.schema import row_image_schema
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.images.visible import same_keys, visible
from ringsync.ledger.staging import decode_rows
from ringsync.replica.changes import ReplicaState
from ringsync.replica.lookup import previous_images
from ringsync.ring.ranks import RankedRing
from ringsync.schema.table import TableSchema
from ringsync.sources.lookup.read import UnreadRow, read_rows
from ringsync.sources.scan.scan import scan_session
from ringsync.steps.passes.rows_before import Before, Said, alive, removed_rows, rows_before
from ringsync.storage.port import ObjectStore
from ringsync.wiring import cluster_settings, store_of

Mode = Literal["source", "replica", "none"]

_NEVER = np.iinfo(np.int64).max

_FETCHERS = ThreadPoolExecutor(8)
"""Hours of deletions are many small objects: an object store answers many requests at once."""

KEYS_AT_ONCE = 50_000
"""They are read, and their images held in memory, together."""


class UnreadRowsError(RuntimeError):
    """Rows of the source could not be read, after everything was tried."""


class NoReplicaError(UnreadRowsError):
    """Rows that deletions have removed are in the replica only, and it does not have all passes."""


@dataclass(frozen=True)
class AfterReader:
    """How a task finds rows.

    :ivar version: the table's version
    :ivar mode: source of the row after a change
    :ivar ring: ring snapshot whose first rank is asked first
    :ivar control: keeps the limits of reading the cluster
    :ivar replica: what it is now, with all passes before; None: the table has none, or not yet
    :ivar deletions: deletions of partitions and ranges by earlier passes: keys of files, and the greatest
        timestamp in each, µs (None: not known). A row that is older than they are, and comes only now, must not live
        again in the replica
    :ivar deletions_known_from_us: µs: what was written before may be hidden by other deletions, of which the replica
        shows nothing
    :ivar disagreed: no quorum need meet a replica that has the changes, so all of them are asked: maybe only one has
    :ivar one_is_enough: these changes and all that was published lately were on all replicas: each of them shows it
    :ivar element_times: whether the server can tell the times of elements of collections
    :ivar before: whether messages say the row before the change, as far as there is a replica
    :ivar expand: whether rows that deletions of partitions and ranges have removed get messages of their own
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
    element_times: bool = True
    before: bool = False
    expand: bool = False

    @property
    def table(self) -> TableSchema:
        """As it is in this version."""
        return self.version.table


@dataclass(frozen=True)
class After:
    """The rows after changes.

    :ivar images: one for each merged change row, in their order; anything where ``visible`` does not say so
    :ivar visible: whether the row is there
    :ivar open: of which nobody knows: what was read does not show the change, but a replica that has it may be down
    :ivar before: the rows before the changes; None: unknown
    """

    images: pa.RecordBatch
    visible: Mask
    open: Mask
    before: Before | None = None

    def known(self) -> After:
        """Without those that are open."""
        left = ~self.open
        before = self.before and (self.before[0].filter(pa.array(left)), self.before[1][left])
        return After(self.images.filter(pa.array(left)), self.visible[left], self.open[left], before)


def images_after(reader: AfterReader, merged: ChangeRows) -> After:
    """Find the row after each change, as the reader's mode says.

    Counters are always read from the source: a log says what one replica has counted.

    :param merged: merged change rows of the table
    :raises UnreadRowsError: rows could not be read
    """
    config = reader.config
    table, misfits = reader.table, config.replica.unrepresentable_values
    places = np.flatnonzero(merged.of_row)
    now_s = int(time.time())
    mode: Mode = "source" if table.has_counters else reader.mode
    if mode == "replica" and reader.replica is None:
        mode = "source"
    previous, before = None, None
    if reader.replica is not None and (reader.before or mode == "replica"):
        previous = previous_of(reader.replica, table, merged, row_images_of(merged, table, misfits))
        before = rows_before(previous, merged, table, now_s) if reader.before else None
    undecided = np.zeros(len(places), np.bool_)
    if mode == "none":
        found, visible = row_images_of(merged, table, misfits), _is_left(merged, places)
    elif mode == "replica" and previous is not None:
        under = under_deletions(reader, store_of(config), merged)
        doubtful = _may_be_hidden(reader, under)
        after, believed = _completed(reader, under, previous, np.zeros_like(doubtful))
        found, undecided = _of_changes(after, places), believed[after.of_change[places]]
        visible, asked = alive(found, table, now_s), _with_their_rows(doubtful, merged)[places]
        if asked.any():
            seen, visible[asked], undecided[asked] = _from_source(reader, config, merged, places[asked], now_s)
            found = _combined(found, asked, seen)
    else:
        found, visible, undecided = _from_source(reader, config, merged, places, now_s)
    if len(places) == len(merged):
        return After(found, visible, undecided, before)
    take = np.zeros(len(merged), np.int64)
    shown, waiting = np.zeros((2, len(merged)), np.bool_)
    take[places] = np.arange(len(places))
    shown[places], waiting[places] = visible, undecided
    return After(_taken(found, take, row_image_schema(table)), shown, waiting, before)


def _from_source(
    reader: AfterReader,
    config: Config,
    merged: ChangeRows,
    places: Places,
    now_s: int,
) -> tuple[pa.RecordBatch, Mask, Mask]:
    """Return what the source shows: the rows, whether they are there, and of which that is not known.

    It is merged with the changes: that tells times that no SELECT shows. Where a change does not show, something hides
    it, maybe a deletion that nobody may have told us of: all replicas are asked, and what they show is right. As long
    as one of them is down that may have the change alone nobody knows.
    """
    table, now_us = reader.table, now_s * 1_000_000
    rows = merged.take(places)
    keys = rows.keys
    levels: list[ConsistencyLevel] = ["LOCAL_ONE"] if reader.one_is_enough and not reader.disagreed else []
    seen = read_keys(reader, config, keys, levels, now_s)
    after = rows_after(seen.images, rows, table, live_known_from_us=0, misfits=config.replica.unrepresentable_values)
    images = _of_changes(after, np.arange(len(places)))
    instead = seen_instead(images, seen.images, now_us, table)
    unknown = after.unknown[after.of_change]
    images = _combined(images, unknown, instead.filter(pa.array(unknown)))
    living, there = alive(images, table, now_s), seen.there.copy()
    hidden = ~visible(rows, seen.images, table, now_s)
    if reader.disagreed and table.has_counters:
        hidden |= ~seen.everywhere  # a newer time does not say that a total has what only one replica has counted
    # Messages tell the times of what has ended; a row that is seen all the same lives by something else.
    ended = there & ~hidden & (_with_their_rows(_has_expired(rows, now_s), rows) | ~living)
    images = _combined(images, ended, instead.filter(pa.array(ended)))
    if reader.disagreed:
        decided = (hidden & seen.everywhere) | (_with_their_rows(hidden, rows) & ~hidden)
        shown = instead.filter(pa.array(decided))
    else:
        # Whoever answers at such a level has the change in its log, so it knows what hides it: what was read instead of
        # images that are not certain is right.
        decided = hidden = _with_their_rows(hidden & ~unknown, rows)
        if hidden.any():
            asked = keys.filter(pa.array(hidden))
            again = read_keys(replace(reader, disagreed=True), config, asked, levels, now_s)
            there[hidden] = again.there
            instead = seen_instead(images.filter(pa.array(hidden)), again.images, now_us, table)
        shown = instead
    return _combined(images, decided, shown), there | (living & ~hidden), hidden & ~decided


def _with_their_rows(chosen: Mask, merged: ChangeRows) -> Mask:
    """Add to the changes that are chosen those of rows that show the static cells of one of them."""
    static = chosen & (merged.kind == STATIC)
    if not static.any():
        return chosen
    (partition,) = codes([merged.partition_key])
    return np.asarray(chosen | (np.isin(partition, partition[static]) & (merged.kind == ROW)))


def _has_expired(rows: ChangeRows, now_s: int) -> Mask:
    """Tell which changes wrote a cell that no SELECT shows any more: nothing hides it."""
    found = np.zeros(len(rows), np.bool_)
    found[rows.cells.row[(rows.cells.kind == EXPIRING) & (rows.cells.local <= now_s)]] = True
    return found


def under_deletions(reader: AfterReader, store: ObjectStore, merged: ChangeRows) -> ChangeRows:
    """Merged change rows, each where it was: without what the deletions hide that were published before them.

    :param merged: merged change rows of the table
    """
    version, table = reader.version, reader.table
    oldest = _written_from(merged).min(initial=_NEVER)
    keys = [key for key, until in reader.deletions if until is None or until >= oldest]

    def read(key: str) -> ChangeRows:
        found = ChangeRows.of(version.from_store(decode_rows(store.get(key))))
        return found.where(np.isin(found.token, merged.token))

    older = [rows for rows in _FETCHERS.map(read, keys) if len(rows)]
    if not older:
        return merged
    both = merge(concatenated([merged, *older]), table)
    # The older deletions were applied by their own passes.
    return merge(concatenated([both.where(both.of_row), merged.where(~merged.of_row)]), table)


def _written_from(merged: ChangeRows) -> Integers:
    """When the oldest was written of what each change row has written, µs; in the far future where it only deletes."""
    found = np.where(merged.liveness.there, merged.liveness.timestamp, _NEVER)
    cells = merged.cells.where(merged.cells.kind != TOMBSTONE)
    np.minimum.at(found, cells.row, cells.timestamp)
    return found


def _may_be_hidden(reader: AfterReader, merged: ChangeRows) -> Mask:
    """Tell which changes write something that deletions may hide of which the replica shows nothing."""
    if reader.table.has_counters:
        return np.zeros(len(merged), np.bool_)  # they are read from the source anyway
    return np.asarray(_written_from(merged) < reader.deletions_known_from_us)


def complete_rows(reader: AfterReader, merged: ChangeRows) -> RowsAfter:
    """Return complete images of all keys that changes touch: what the replica has, merged with them.

    What the replica cannot know for certain is read from the source, at quorum at least.

    :param merged: merged change rows of the table
    :raises UnreadRowsError: rows could not be read
    """
    assert reader.replica is not None
    own = row_images_of(merged, reader.table, reader.config.replica.unrepresentable_values)
    previous = previous_of(reader.replica, reader.table, merged, own)
    return _completed(reader, merged, previous, _may_be_hidden(reader, merged))[0]


def with_before(reader: AfterReader, said: Said, removed: Said | None) -> Said:
    """Return rows that were not changed, with what the replica had of them, if messages say the row before.

    :param removed: of which messages before these say that they are gone
    """
    if reader.replica is None or not reader.before:
        return said
    previous = previous_of(reader.replica, reader.table, said.changes, said.images)
    images, there = rows_before(previous, said.changes, reader.table, int(time.time()))
    if removed is not None:
        there = there & (same_keys(said.changes, removed.changes, reader.table) < 0)
    return replace(said, before=(images, there))


def rows_removed(reader: AfterReader, merged: ChangeRows) -> Said | None:
    """Return the rows that deletions of partitions and ranges have removed, and that no change of their own is of.

    :param merged: merged change rows of the table, with their nodes
    :returns: None: there are none
    :raises NoReplicaError: there are such deletions, but no replica that has all passes
    :raises UnreadRowsError: rows could not be read
    """
    table, deleted = reader.table, np.unique(merged.token[~merged.of_row])
    if not reader.expand or not table.clustering or not len(deleted):
        return None
    if reader.replica is None:
        raise NoReplicaError(
            f"{table.full_name}: expand_deletions finds the rows that a deletion has removed in the replica, and there "
            "is none that has all that was published: wait until its bootstrap is complete, bootstrap it, or set "
            f"sync.tables: {{{table.full_name}: {{expand_deletions: false}}}}"
        )
    chosen = merged.where(np.isin(merged.token, deleted))
    own = row_images_of(chosen, table, reader.config.replica.unrepresentable_values)
    previous = previous_of(reader.replica, table, chosen, own)
    after, _ = _completed(reader, chosen, previous, np.zeros(len(chosen), np.bool_))
    return removed_rows(previous, chosen, after, table, int(time.time()))


def previous_of(replica: ReplicaState, table: TableSchema, merged: ChangeRows, own: pa.RecordBatch) -> pa.RecordBatch:
    """Return what a replica has of the rows that changes touch.

    :param merged: merged change rows of the table
    :param own: images of the changes of rows
    """
    return previous_images(replica, table, own, whole_partitions(merged))


def whole_partitions(merged: ChangeRows) -> pa.Array:
    """Return the tokens of partitions of which merged change rows touch any row there may be."""
    return pa.array(np.unique(merged.token[merged.kind != ROW]), pa.int64())


def _completed(
    reader: AfterReader, merged: ChangeRows, previous: pa.RecordBatch, doubtful: Mask
) -> tuple[RowsAfter, Mask]:
    """Return the images of all keys that changes touch, and the mask of those for which the log is believed.

    :param previous: the newest images before them
    :param doubtful: mask of the changes for which the source is asked whether something hides them
    """
    assert reader.replica is not None
    config = reader.config
    table, misfits = reader.table, config.replica.unrepresentable_values
    after = rows_after(
        previous,
        merged,
        table,
        live_known_from_us=reader.replica.live_known_from_us,
        misfits=misfits,
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
    seen = read_keys(reader, config, keys, [], now_s)
    images = seen_instead(unknown, seen.images, now_s * 1_000_000, table)
    if reader.disagreed and not table.has_counters:
        open_images = believed[after.unknown] = _undecided(after, merged, seen, table, now_s)
        images = _combined(images, open_images, unknown.filter(pa.array(open_images)))
    return replace(after, images=_combined(after.images, after.unknown, images)), believed


def _undecided(after: RowsAfter, merged: ChangeRows, seen: Seen, table: TableSchema, now_s: int) -> Mask:
    """Tell for which of the images that were read the log is believed.

    A replica that does not answer may be the only one that has the change, and its copies, which come later, count as
    published. No read shows which entry a list has lost: that alone opens nothing.

    :param seen: what was read, in the place of all images that are not certain
    """
    says = after.of_change >= 0
    says[says] = after.unknown[after.of_change[says]]
    changes = np.flatnonzero(says)
    place = np.cumsum(after.unknown)[after.of_change[changes]] - 1  # among the images that were read
    told = _without_list_tombstones(merged.take(changes), table)
    is_open = ~seen.everywhere[place] & ~visible(told, seen.images, table, now_s)
    found = np.zeros(len(seen.everywhere), np.bool_)
    found[place[is_open]] = True
    if table.of_kind("static"):  # all rows of a partition show its static cells
        partition, _ = image_keys(after.images.filter(pa.array(after.unknown)), table)
        found = pc.is_in(partition, partition.filter(pa.array(found))).to_numpy(zero_copy_only=False)
    return found


def _without_list_tombstones(merged: ChangeRows, table: TableSchema) -> ChangeRows:
    lists = [column.number for column in columns_of(table) if column.is_list]
    cells = merged.cells
    return replace(merged, cells=cells.where((cells.kind != TOMBSTONE) | ~np.isin(cells.column, lists)))


@dataclass(frozen=True)
class Seen:
    """What was read.

    :ivar images: images of the rows that exist
    :ivar there: mask of the keys that have them
    :ivar everywhere: mask of the keys whose replicas were all asked and have all answered
    """

    images: pa.RecordBatch
    there: Mask
    everywhere: Mask


def read_keys(
    reader: AfterReader, config: Config, keys: pa.RecordBatch, levels: Sequence[ConsistencyLevel], now_s: int
) -> Seen:
    """Return rows of the source.

    Where replicas disagreed all of them are asked, if they are alive; else, and where one does not answer, a quorum.
    So are they for counters: a total is no cell that could be merged with what only one replica has counted, and what
    was published of it long ago is in no later change.

    :param levels: the consistency levels of what replicas agree on, one after the other until one is answered; where
        all were to be asked they are tried when no quorum answers, too
    :raises UnreadRowsError: rows could not be read
    """
    images = [pa.RecordBatch.from_pylist([], row_image_schema(reader.table))]
    there, everywhere = np.zeros((2, keys.num_rows), np.bool_)
    session = scan_session(cluster_settings(config), now_s)

    def ask(level: ConsistencyLevel, asked: Places) -> list[UnreadRow]:
        """Read the rows of some keys, and say of which it could not."""
        settings = replace(cluster_settings(config), consistency_level=level)
        unread: list[UnreadRow] = []
        with ControlClient(reader.control) as permits:
            for start in range(0, len(asked), KEYS_AT_ONCE):
                chosen = asked[start : start + KEYS_AT_ONCE]
                found = read_rows(
                    session,
                    reader.table,
                    keys.take(pa.array(chosen)),
                    reader.ring,
                    settings,
                    permits,
                    element_times=reader.element_times,
                    misfits=config.replica.unrepresentable_values,
                    of_all=level == levels[-1],
                )
                images.append(found.images)
                there[chosen[found.places]] = True
                unread += [replace(one, place=int(chosen[one.place])) for one in found.unread]
                if unread and level == levels[-1]:
                    break
        return unread

    left, unread = np.arange(keys.num_rows), []
    if not levels or reader.disagreed or reader.table.has_counters:
        levels = ["LOCAL_QUORUM", *levels]
    if reader.disagreed or reader.table.has_counters:
        everywhere = reader.ring.all_live[reader.ring.numbers_of(integers(keys["token"]))]
        unread = ask("ALL", left[everywhere])
        everywhere[[one.place for one in unread]] = False
        left = left[~everywhere]
    for level in levels:
        unread = ask(level, left) if len(left) else []
        left = np.array([one.place for one in unread], np.intp)
    if unread:
        raise UnreadRowsError(f"rows could not be read, the first: {unread[0].reason}")
    return Seen(pa.concat_batches(images), there, everywhere)


def _is_left(merged: ChangeRows, places: Places) -> Mask:
    """Of changes without anything that was there before: whether more than a deletion of the row is left."""
    has_parts = np.zeros(len(merged), np.bool_)
    for parts in (merged.cells, merged.complex_deletions):
        has_parts[parts.row] = True
    return np.asarray((merged.liveness.there | has_parts | ~merged.deletion.there)[places])


def _of_changes(after: RowsAfter, places: Places) -> pa.RecordBatch:
    """Return the images of these changes, in their order."""
    return after.images.take(pa.array(after.of_change[places]))


def _combined(images: pa.RecordBatch, replaced: Mask, others: pa.RecordBatch) -> pa.RecordBatch:
    """Return the images with others in the places of those that are replaced."""
    if not replaced.any():
        return images
    order = np.arange(images.num_rows)
    order[replaced] = images.num_rows + np.arange(others.num_rows)
    return pa.Table.from_batches([images, others]).take(pa.array(order)).combine_chunks().to_batches()[0]


def _taken(images: pa.RecordBatch, places: npt.NDArray[np.int64], schema: pa.Schema) -> pa.RecordBatch:
    if images.num_rows:
        return images.take(pa.array(places))
    return pa.RecordBatch.from_arrays([pa.nulls(len(places), field.type) for field in schema], schema=schema)
