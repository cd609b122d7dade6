"""Changes that a bootstrap's scan has missed: rows that were copied too old get new messages after the copies.

The scan may have read replicas that lacked a change which had been published before. The replica takes such changes
once more (:func:`ringsync.ledger.passes.first_to_add`). In the stream the copied rows come behind the messages of these
changes, and would be the newest. So each bootstrap owes one pass. If the replica shows a partition otherwise than it
was copied, the pass repeats the deletions and static cells of the changes, and tells the partition's rows as the
replica has them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.schema import OF_PARTITIONS, ROW
from ringsync.compiled.arrow import Mask, Places
from ringsync.cql.cells import cells_of, codes, raw_values
from ringsync.images.digests import row_digests
from ringsync.images.from_changes import row_images_of
from ringsync.images.keys import key_digests
from ringsync.images.live import live_rows
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.ledger.passes import Digests, Pass, among, changes_key, digest_halves, pass_folder, sorted_digests
from ringsync.ledger.staging import decode_rows, encode_rows
from ringsync.replica.lookup import copied_images
from ringsync.schema.table import TableSchema
from ringsync.steps.passes.make import Outputs, PassContext, own_name, write_messages
from ringsync.steps.passes.pieces import pieces, seen
from ringsync.steps.passes.rows_after import previous_of, whole_partitions
from ringsync.steps.passes.rows_before import Said, alive, places_of
from ringsync.steps.passes.spared_rows import changes_of_nothing
from ringsync.streams.files import FileStream
from ringsync.wiring import store_of

TOLD_AGAIN = "told_again"
"""Key in the counts of a pass that repeats missed changes: the number of the bootstrap's ``begin``."""


@dataclass(frozen=True)
class Owed:
    """What one bootstrap owes.

    :ivar copied: the pass of its rows
    :ivar missed: the passes that its scan may not have seen, in their order
    """

    copied: Pass
    missed: tuple[Pass, ...]


def owed(passes: Sequence[Pass], reach_ms: float) -> tuple[Owed, ...]:
    """Find what each bootstrap owes.

    :param passes: the table's passes, in their order
    :param reach_ms: time before a bootstrap within which its scan may have missed a published change, ms
    """
    told = {made.counts.get(TOLD_AGAIN) for made in passes}
    by_number = {made.number: made for made in passes}
    debts = []
    for copied in passes:
        if copied.kind == "rows" and copied.begin not in told:
            since_ms = by_number.get(copied.begin, copied).created_at_ms - reach_ms
            ring = copied.epoch.ring if copied.epoch else ""
            before = (made for made in passes if made.number < copied.begin and made.created_at_ms >= since_ms)
            if missed := tuple(made for made in before if made.changes and not made.is_seen_in(ring)):
                debts.append(Owed(copied, missed))
    return tuple(debts)


@dataclass(frozen=True)
class MissedRows:
    """A task that makes the messages that one bootstrap owes, for files of changes, the newest first.

    :ivar context: what tasks need; its reader has the replica, with all passes
    :ivar bootstrap: the bootstrap whose rows were copied
    :ivar copied_version: version of the replica's base that holds the copied rows and nothing else, if the table has
        the same columns as then; None: the copied rows have never become a base
    """

    context: PassContext
    bootstrap: str
    copied_version: int | None

    def __call__(self, several: Iterable[Sequence[str]]) -> Iterator[Outputs]:
        reader = self.context.reader
        config, store = reader.config, store_of(reader.config)
        for files in several:
            told_keys = np.empty((0, 2), np.uint64)
            batches = (reader.version.from_store(decode_rows(store.get(key))) for key in files)
            some = (rows for batch in batches for rows in pieces({"": batch}, reader.table, OF_PARTITIONS))
            for place, piece in enumerate(some):
                rows = ChangeRows.of(piece[""])
                said = self.said(rows, told_keys, int(time.time()))
                if not any(len(part.changes) for part in said):
                    continue
                told = [digest_halves(_key_digests(part.images, reader.table)) for part in said[1:]]
                told_keys = sorted_digests(np.concatenate([told_keys, *told]))
                name, now_ms = own_name(self.context, f"{place:04}"), int(time.time() * 1000)
                # It changes nothing, but leads to what is left of a try that is killed (tries.py).
                changes = changes_key(reader.table.table_id, self.context.number, name)
                store.put(changes, encode_rows(reader.version.to_store(rows.take(np.zeros(0, np.intp)).to_arrow())))
                writer = FileStream(store, self.context.topic).open_part(
                    pass_folder(self.context.number), name, self.context.schema_version, config.stream.codec
                )
                for part in said:
                    write_messages(writer, self.context, part, now_ms)
                yield Outputs(
                    part=writer.finish(),
                    changes=changes,
                    deletions=None,
                    deleted_until_us=None,
                    digests={},
                    rows=0,
                    messages=sum(len(part.changes) for part in said),
                    lags_ms=(),
                    made_at_ms=now_ms,
                )

    def said(self, rows: ChangeRows, told_keys: Digests, now_s: int) -> list[Said]:
        """Find partitions that were copied otherwise than the replica shows them. Return the deletions and static cells
        of their changes, copied rows that are gone, and rows that are there.

        :param told_keys: sorted digests of the keys of rows that are told already
        """
        reader = self.context.reader
        table = reader.table
        touched = row_images_of(rows, table, reader.misfits)
        previous = previous_of(reader, rows, touched)
        seen(table, previous)
        images = _concerned(previous, rows, touched, table)
        copied = self._copied(rows, touched)
        if copied is None:
            # Nobody knows what was copied: all that the changes touch is told.
            copies, differs, gone = images, np.ones(len(images), np.bool_), ~alive(images, table, now_s)
        else:
            copies = _concerned(copied, rows, touched, table)
            differs, gone = _differences(images, copies, table, now_s)
        partition, partition_of_copies = (image_keys(shown, table)[0] for shown in (images, copies))
        wrong = pa.concat_arrays([partition.filter(pa.array(differs)), partition_of_copies.filter(pa.array(gone))])
        of_rows = rows
        if copied is not None:
            partitions, wrong_partitions = codes([rows.partition_key, cells_of(wrong)])
            of_rows = rows.where(np.isin(partitions, wrong_partitions))
        if not len(of_rows):
            return []
        deleted = raw_values(of_rows.where(~of_rows.of_row).partition_key)
        there, again = alive(images, table, now_s), pc.is_in(partition, deleted).to_numpy(zero_copy_only=False)
        new, new_copies = (~among(digest_halves(_key_digests(shown, table)), told_keys) for shown in (images, copies))
        told = there & (again | (differs & new))
        removed = gone & new_copies & has_clustering(copies, table)
        repeated = of_rows.where(of_rows.kind != ROW)
        return [
            self._again(repeated, images, now_s),
            self._told(copies.filter(pa.array(removed)), of_rows, now_s, visible=False),
            self._told(images.filter(pa.array(told)), of_rows, now_s, visible=True),
        ]

    def _copied(self, rows: ChangeRows, touched: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the copies of the rows that changes touch; None: unknown."""
        reader = self.context.reader
        if self.copied_version is None or reader.replica is None:
            return None
        return copied_images(reader.replica, reader.table, self.copied_version, touched, whole_partitions(rows))

    def _again(self, changes: ChangeRows, images: pa.RecordBatch, now_s: int) -> Said:
        """Return deletions and changes of static cells, with the present static cells."""
        table = self.context.reader.table
        place = places_of(raw_values(changes.partition_key), image_keys(images, table)[0])
        static = live_rows(images, table, now_s)["#static"].to_numpy(zero_copy_only=False)
        visible = np.zeros(len(changes), np.bool_)
        visible[place >= 0] = static[place[place >= 0]]
        after = images.take(pa.array(place, mask=place < 0))
        return Said(self._unique(changes), after, visible, now_s)

    def _told(self, images: pa.RecordBatch, origins: ChangeRows, now_s: int, *, visible: bool) -> Said:
        """Return messages of rows that no change made.

        :param origins: changes of the rows' partitions
        :param visible: whether the rows are there; False: they are gone
        """
        table = self.context.reader.table
        place = places_of(image_keys(images, table)[0], raw_values(origins.partition_key))
        keys = digest_halves(_key_digests(images, table))
        changes = changes_of_nothing(origins.take(place), images, keys, table)
        return Said(self._unique(changes), images, np.full(len(images), visible), now_s)

    def _unique(self, changes: ChangeRows) -> ChangeRows:
        """Give changes digests that no message had before, not even for another bootstrap: consumers drop repeats."""
        bootstrap = np.frombuffer(hashlib.blake2b(self.bootstrap.encode(), digest_size=16).digest(), np.uint64)
        return replace(changes, digest=changes.digest ^ bootstrap)


def _concerned(images: pa.RecordBatch, rows: ChangeRows, touched: pa.RecordBatch, table: TableSchema) -> pa.RecordBatch:
    """Keep the images of rows that changes may touch.

    A lookup gives more: partitions that have the same token, and a row of each partition for its static cells, of the
    copies maybe another one than of the replica.

    :param touched: images of the changes of rows
    """
    images = images.filter(pc.is_in(image_keys(images, table)[0], raw_values(rows.partition_key)))
    is_touched = pc.is_in(key_digests(images, table), key_digests(touched, table))
    return images.filter(pc.or_(is_touched, pc.is_in(images["token"], whole_partitions(rows))))


def _differences(images: pa.RecordBatch, copies: pa.RecordBatch, table: TableSchema, now_s: int) -> tuple[Mask, Mask]:
    """Tell which images differ from their copies, and which copied rows were shown and are gone."""
    place: Places = places_of(key_digests(images, table), key_digests(copies, table))
    back: Places = places_of(key_digests(copies, table), key_digests(images, table))
    there, copied = alive(images, table, now_s), alive(copies, table, now_s)
    both = np.flatnonzero(place >= 0)
    differs = np.zeros(len(images), np.bool_)
    alike = _shown_alike(images.take(pa.array(both)), copies.take(pa.array(place[both])), table, now_s)
    differs[both] = (there[both] | copied[place[both]]) & ~alike
    gone = copied.copy()
    gone[back >= 0] &= ~there[back[back >= 0]]
    return differs, gone


def _shown_alike(images: pa.RecordBatch, others: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    digests = zip(*(row_digests(live_rows(rows, table, now_s)) for rows in (images, others)), strict=True)
    alike: Mask = np.logical_and(*(half == other for half, other in digests))
    return alike


def _key_digests(images: pa.RecordBatch, table: TableSchema) -> pa.Array:
    return key_digests(images, table).cast(pa.binary(16))
