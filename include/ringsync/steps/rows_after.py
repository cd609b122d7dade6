"""The row after a change, and the complete images that the replica takes (DESIGN §5: ``after_image``)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.after import RowsAfter, rows_after, seen_instead
from ringsync.changes.cells import numbers
from ringsync.changes.identity import TableVersion
from ringsync.changes.image_rows import has_clustering, image_keys
from ringsync.changes.images import row_images_of
from ringsync.changes.merge import merge
from ringsync.changes.schema import ROW, STATIC
from ringsync.config import Config, load_config
from ringsync.config.sections import ConsistencyLevel
from ringsync.replica.changes import ReplicaState
from ringsync.replica.keys import key_digests
from ringsync.replica.live_rows import live_rows
from ringsync.replica.lookup import previous_images
from ringsync.ring.ranks import RankedRing
from ringsync.schema.row_image import row_image_schema
from ringsync.schema.table import TableSchema
from ringsync.sources.control import ControlAddress, ControlClient
from ringsync.sources.row_reads import UnreadRow, read_rows
from ringsync.sources.scan import scan_session
from ringsync.state.staging import decode_rows

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]
Mode = Literal["source", "replica", "none"]

KEYS_AT_ONCE = 50_000
"""They are read, and their images held in memory, together."""


class UnreadRowsError(RuntimeError):
    """Rows of the source could not be read, after everything was tried."""


@dataclass(frozen=True)
class AfterReader:
    """How a task finds rows.

    :ivar version: of the table
    :ivar mode: where the row after a change comes from
    :ivar ring: whose first rank is asked first
    :ivar control: keeps the limits of reading the cluster
    :ivar replica: what it is now; None: the table has none
    :ivar disagreed: replicas had different rows, so all of them are asked: maybe only one has a change
    :ivar recent: keys of merged change rows that passes before have published lately
    :ivar element_times: whether the server can tell the times of elements of collections
    """

    config_path: str
    version: TableVersion
    mode: Mode
    ring: RankedRing
    control: ControlAddress
    replica: ReplicaState | None
    disagreed: bool = False
    recent: tuple[str, ...] = ()
    element_times: bool = True

    @property
    def table(self) -> TableSchema:
        """As it is in this version."""
        return self.version.table


@dataclass(frozen=True)
class After:
    """The rows after changes.

    :ivar images: one for each merged change row, in their order; anything where ``visible`` does not say so
    :ivar visible: whether the row is there
    """

    images: pa.RecordBatch
    visible: Mask


def images_after(reader: AfterReader, merged: pa.RecordBatch) -> After:
    """Find the row after each change, as the reader's mode says.

    Counters are always read from the source: a log says what one replica has counted.

    :param merged: merged change rows of the table
    :raises UnreadRowsError: rows could not be read
    """
    config = load_config(reader.config_path)
    table, misfits = reader.table, config.replica.unrepresentable_values
    kinds = numbers(merged["kind"])
    places = np.flatnonzero((kinds == ROW) | (kinds == STATIC))
    own = row_images_of(merged, table, misfits)
    now_s = int(time.time())
    mode: Mode = "source" if any(column.is_counter for column in table.columns) else reader.mode
    if mode == "replica" and reader.replica is None:
        mode = "source"
    if mode == "none":
        found, visible = own, _is_left(merged, places)
    elif mode == "replica":
        found = _of_changes(complete_rows(reader, merged, late=False), places)
        visible = _alive(found, table, now_s)
    else:
        found, visible = _from_source(reader, config, merged, places, now_s)
    if len(places) == merged.num_rows:
        return After(found, visible)
    take = np.zeros(merged.num_rows, np.int64)
    shown = np.zeros(merged.num_rows, np.bool_)
    take[places] = np.arange(len(places))
    shown[places] = visible
    return After(_taken(found, take, row_image_schema(table)), shown)


def _from_source(
    reader: AfterReader,
    config: Config,
    merged: pa.RecordBatch,
    places: Places,
    now_s: int,
) -> tuple[pa.RecordBatch, Mask]:
    """What the source shows, merged with the changes: it may be older than they are on the replica that was asked."""
    table = reader.table
    keys = merged.take(pa.array(places)).select(["token", "partition_key", "clustering"])
    seen, seen_places = _read(reader, config, keys, "LOCAL_ONE", now_s)
    rows = merged.take(pa.array(places))
    after = rows_after(seen, rows, table, live_known_from_us=0, misfits=config.replica.unrepresentable_values)
    doubtful = after.images.filter(pa.array(after.unknown))
    instead = seen_instead(doubtful, seen, now_s * 1_000_000, table)
    found = _of_changes(replace(after, images=_combined(after.images, after.unknown, instead)), np.arange(len(places)))
    visible = _alive(found, table, now_s)
    visible[seen_places] = True
    unseen = visible.copy()
    unseen[seen_places] = False
    visible[unseen] = ~_was_deleted(reader, config, rows, found.filter(pa.array(unseen)), now_s)
    return found, visible


def _was_deleted(reader: AfterReader, config: Config, rows: pa.RecordBatch, unseen: pa.RecordBatch, now_s: int) -> Mask:
    """Which rows that a read did not show are dead by what was published before; others it may have missed.

    :param rows: merged change rows
    :param unseen: images of some of them
    """
    tokens = np.unique(numbers(unseen["token"]))
    if not len(tokens):
        return np.zeros(0, np.bool_)
    store, table = config.open_store(), reader.table
    parts = [reader.version.from_store(decode_rows(store.get(key))) for key in reader.recent]
    of_tokens = [part.filter(pa.array(np.isin(numbers(part["token"]), tokens))) for part in (rows, *parts)]
    every = row_images_of(merge(pa.concat_batches(of_tokens), table), table, config.replica.unrepresentable_values)
    dead = every.filter(pa.array(~_alive(every, table, now_s)))
    found: Mask = pc.is_in(key_digests(unseen, table), value_set=key_digests(dead, table)).to_numpy(
        zero_copy_only=False
    )
    return found


def complete_rows(reader: AfterReader, merged: pa.RecordBatch, *, late: bool) -> RowsAfter:
    """Complete images of all keys that changes touch: what the replica has, merged with them.

    What the replica cannot know for certain is read from the source, at quorum at least: so are all late rows, since
    tombstones may hide them that no SELECT has shown.

    :param merged: merged change rows of the table
    :raises UnreadRowsError: rows could not be read
    """
    assert reader.replica is not None
    config = load_config(reader.config_path)
    table, misfits = reader.table, config.replica.unrepresentable_values
    tokens = np.unique(numbers(merged["token"])[numbers(merged["kind"]) != ROW])
    own = row_images_of(merged, table, misfits)
    previous = previous_images(reader.replica, table, own, pa.array(tokens, pa.int64()))
    known_from = reader.replica.live_known_from_us
    after = rows_after(previous, merged, table, live_known_from_us=known_from, misfits=misfits)
    unknown = np.ones(after.images.num_rows, np.bool_) if late else after.unknown
    if not unknown.any():
        return after
    doubtful = after.images.filter(pa.array(unknown))
    partition_keys, clusterings = image_keys(doubtful, table)
    clusterings = pc.if_else(pa.array(has_clustering(doubtful, table)), clusterings, None)
    names = ["token", "partition_key", "clustering"]
    keys = pa.RecordBatch.from_arrays([doubtful["token"], partition_keys, clusterings], names=names)
    now_s = int(time.time())
    seen, _ = _read(reader, config, keys, "LOCAL_QUORUM", now_s)
    return replace(
        after, images=_combined(after.images, unknown, seen_instead(doubtful, seen, now_s * 1_000_000, table))
    )


def _read(
    reader: AfterReader, config: Config, keys: pa.RecordBatch, level: ConsistencyLevel, now_s: int
) -> tuple[pa.RecordBatch, Places]:
    """Rows of the source; and where the key of each stands.

    Where replicas disagreed all of them are asked, if they are alive; else, and where one does not answer, a quorum.
    So are they for counters: a total is no cell that could be merged with what only one replica has counted, and what
    was published of it long ago is in no later change.

    :param level: the consistency level of what replicas agree on; of a counter, if no quorum answers
    :raises UnreadRowsError: rows could not be read
    """
    images = [pa.RecordBatch.from_pylist([], row_image_schema(reader.table))]
    places = [np.empty(0, np.intp)]
    session = scan_session(config.cluster_settings(), now_s)

    def ask(level: ConsistencyLevel, asked: Places) -> list[UnreadRow]:
        """Read the rows of some keys, and say of which it could not."""
        settings = replace(config.cluster_settings(), consistency_level=level)
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
                )
                images.append(found.images)
                places.append(chosen[found.places])
                unread += [replace(one, place=int(chosen[one.place])) for one in found.unread]
        return unread

    left, levels = np.arange(keys.num_rows), [level]
    if reader.disagreed or any(column.is_counter for column in reader.table.columns):
        everywhere = reader.ring.all_live[reader.ring.numbers_of(numbers(keys["token"]))]
        unread = ask("ALL", left[everywhere])
        left = np.concatenate([left[~everywhere], np.array([one.place for one in unread], np.intp)])
        levels = ["LOCAL_QUORUM"] if reader.disagreed or level == "LOCAL_QUORUM" else ["LOCAL_QUORUM", level]
    for one_level in levels:
        unread = ask(one_level, left)
        left = np.array([one.place for one in unread], np.intp)
    if unread:
        raise UnreadRowsError(f"{len(unread)} rows could not be read, the first: {unread[0].reason}")
    return pa.concat_batches(images), np.concatenate(places)


def _is_left(merged: pa.RecordBatch, places: Places) -> Mask:
    """Of changes without anything that was there before: whether more than a deletion of the row is left."""
    valid = {name: merged[name].is_valid().to_numpy(zero_copy_only=False) for name in ("liveness", "deletion")}
    cells = np.diff(numbers(merged["cells"].offsets)) > 0
    complex_deletions = np.diff(numbers(merged["complex_deletions"].offsets)) > 0
    found: Mask = (valid["liveness"] | cells | complex_deletions | ~valid["deletion"])[places]
    return found


def _alive(images: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    """Which rows are there; of images without clustering: whether a static cell is."""
    rows = live_rows(images, table, now_s)
    alive, static = (rows[name].to_numpy(zero_copy_only=False) for name in ("#alive", "#static"))
    shown: Mask = np.where(has_clustering(images, table), alive, static)
    return shown


def _of_changes(after: RowsAfter, places: Places) -> pa.RecordBatch:
    """The images of these changes, in their order."""
    return after.images.take(pa.array(after.of_change[places]))


def _combined(images: pa.RecordBatch, replaced: Mask, others: pa.RecordBatch) -> pa.RecordBatch:
    """The images with others in the places of those that are replaced."""
    if not replaced.any():
        return images
    order = np.arange(images.num_rows)
    order[replaced] = images.num_rows + np.arange(others.num_rows)
    return pa.Table.from_batches([images, others]).take(pa.array(order)).combine_chunks().to_batches()[0]


def _taken(images: pa.RecordBatch, places: npt.NDArray[np.int64], schema: pa.Schema) -> pa.RecordBatch:
    if images.num_rows:
        return images.take(pa.array(places))
    return pa.RecordBatch.from_arrays([pa.nulls(len(places), field.type) for field in schema], schema=schema)
