"""What a bootstrap's scan has missed: rows that were copied old are told again behind the copies.

The scan may have read replicas that lacked a change which had been published before. The replica takes such changes
once more (:func:`ringsync.ledger.passes.first_to_add`). In the stream the copied rows come behind their messages,
and would be the newest there. So each bootstrap owes one pass: where the replica shows a partition otherwise than it
was copied, the deletions and static cells of the changes follow once more, and its rows as the replica has them.
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
from ringsync.changes.schema import ROW
from ringsync.compiled.arrow import Mask, Places
from ringsync.cql.cells import cells_of, codes, raw_values
from ringsync.images.digests import row_digests
from ringsync.images.from_changes import row_images_of
from ringsync.images.keys import key_digests
from ringsync.images.live import live_rows
from ringsync.images.to_changes import has_clustering, image_keys
from ringsync.ledger.passes import Digests, Pass, among, changes_key, digest_halves, pass_bucket, sorted_digests
from ringsync.ledger.staging import decode_rows, encode_rows
from ringsync.replica.lookup import copied_images
from ringsync.schema.table import TableSchema
from ringsync.steps.passes.make import Outputs, PassContext, own_name, write_messages
from ringsync.steps.passes.rows_after import previous_of, whole_partitions
from ringsync.steps.passes.rows_before import Said, alive, places_of
from ringsync.steps.passes.spared_rows import changes_of_nothing
from ringsync.storage.port import NotFoundError
from ringsync.streams.files import FileStream
from ringsync.wiring import store_of

TOLD_AGAIN = "told_again"
"""In the counts of a pass that tells such rows: the number of the bootstrap's ``begin``."""


@dataclass(frozen=True)
class Owed:
    """What is to be told of one bootstrap.

    :ivar copied: the pass of its rows
    :ivar missed: the passes that its scan may not have seen, in their order
    """

    copied: Pass
    missed: tuple[Pass, ...]


def owed(passes: Sequence[Pass], reach_ms: float) -> tuple[Owed, ...]:
    """Of each bootstrap what it owes.

    :param passes: the table's passes, in their order
    :param reach_ms: time before a bootstrap within which a published change may be one that its scan missed, ms
    """
    told = {one.counts.get(TOLD_AGAIN) for one in passes}
    by_number = {one.number: one for one in passes}
    found = []
    for copied in passes:
        if copied.kind == "rows" and copied.begin not in told:
            since_ms = by_number.get(copied.begin, copied).created_at_ms - reach_ms
            before = (one for one in passes if one.number < copied.begin and one.created_at_ms >= since_ms)
            if missed := tuple(one for one in before if one.changes and not one.everywhere):
                found.append(Owed(copied, missed))
    return tuple(found)


@dataclass(frozen=True)
class MissedRows:
    """Spark calls it with the files of changes of one bootstrap, the newest first.

    :ivar context: what tasks need; its reader has the replica, with all passes
    :ivar bootstrap: the bootstrap whose rows were copied
    :ivar copied_version: version of the replica's base that holds the copied rows and nothing else, if the table still
        has the columns that it had then; None: they have never become a base
    """

    context: PassContext
    bootstrap: str
    copied_version: int | None

    def __call__(self, several: Iterable[Sequence[str]]) -> Iterator[Outputs]:
        reader = self.context.reader
        config = reader.config
        store = store_of(config)
        for files in several:
            seen = np.empty((0, 2), np.uint64)
            for place, key in enumerate(files):
                try:
                    rows = ChangeRows.of(reader.version.from_store(decode_rows(store.get(key))))
                except NotFoundError:
                    continue  # versions before did not keep changes so long
                said = self.said(rows, seen, int(time.time()))
                if not any(len(one.changes) for one in said):
                    continue
                told = [digest_halves(_key_digests(one.images, reader.table)) for one in said[1:]]
                seen = sorted_digests(np.concatenate([seen, *told]))
                own, now_ms = own_name(self.context, f"{place:04}"), int(time.time() * 1000)
                # It changes nothing; but what is left of a try that is killed is found by such a file (tries.py).
                changes = changes_key(reader.table.table_id, self.context.number, own)
                store.put(changes, encode_rows(reader.version.to_store(rows.take(np.zeros(0, np.intp)).to_arrow())))
                writer = FileStream(store, self.context.topic).open_part(
                    pass_bucket(self.context.number), own, self.context.schema_version, config.stream.codec
                )
                for one in said:
                    write_messages(writer, self.context, config, one, now_ms)
                yield Outputs(
                    part=writer.finish(),
                    changes=changes,
                    deletions=None,
                    deleted_until_us=None,
                    digests={},
                    rows=0,
                    messages=sum(len(one.changes) for one in said),
                    lags_ms=(),
                    made_at_ms=now_ms,
                )

    def said(self, rows: ChangeRows, seen: Digests, now_s: int) -> list[Said]:
        """What is told of partitions that were copied otherwise than the replica shows them: the deletions and static
        cells of these changes, copied rows that are gone, and rows that are there.

        :param rows: merged change rows
        :param seen: sorted digests of the keys of rows that need not be told once more
        :param now_s: seconds since the epoch
        """
        reader = self.context.reader
        table, state = reader.table, reader.replica
        assert state is not None
        own = row_images_of(rows, table, reader.config.replica.unrepresentable_values)
        images = _of_partitions(previous_of(state, table, rows, own), rows, table)
        found = self._copied(rows, own)
        if found is None:
            # Nobody knows what was copied: whatever the changes touch.
            copies, differs, gone = images, np.ones(len(images), np.bool_), ~alive(images, table, now_s)
        else:
            copies = _of_partitions(found, rows, table)
            differs, gone = _differences(images, copies, table, now_s)
        partition, partition_of_copies = (image_keys(one, table)[0] for one in (images, copies))
        wrong = pa.concat_arrays([partition.filter(pa.array(differs)), partition_of_copies.filter(pa.array(gone))])
        if found is None:
            of_rows = rows
        else:
            partitions, wrong_partitions = codes([rows.partition_key, cells_of(wrong)])
            of_rows = rows.where(np.isin(partitions, wrong_partitions))
        if not len(of_rows):
            return []
        deleted = raw_values(of_rows.where(~of_rows.of_row).partition_key)
        there, again = alive(images, table, now_s), pc.is_in(partition, deleted).to_numpy(zero_copy_only=False)
        new, new_copies = (~among(digest_halves(_key_digests(one, table)), seen) for one in (images, copies))
        told = there & (again | (differs & new))
        removed = gone & new_copies & has_clustering(copies, table)
        repeated = of_rows.where(of_rows.kind != ROW)
        return [
            self._again(repeated, images, now_s),
            self._told(copies.filter(pa.array(removed)), of_rows, visible=False),
            self._told(images.filter(pa.array(told)), of_rows, visible=True),
        ]

    def _copied(self, rows: ChangeRows, own: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return what was copied of the rows that changes touch; None: nobody knows."""
        reader = self.context.reader
        if self.copied_version is None or reader.replica is None:
            return None
        return copied_images(reader.replica, reader.table, self.copied_version, own, whole_partitions(rows))

    def _again(self, changes: ChangeRows, images: pa.RecordBatch, now_s: int) -> Said:
        """Return deletions and changes of static cells, with what is static now."""
        table = self.context.reader.table
        place = places_of(raw_values(changes.partition_key), image_keys(images, table)[0])
        static = live_rows(images, table, now_s)["#static"].to_numpy(zero_copy_only=False)
        visible = np.zeros(len(changes), np.bool_)
        visible[place >= 0] = static[place[place >= 0]]
        found = images.take(pa.array(place, mask=place < 0)) if len(images) else _nothing(images, len(changes))
        return Said(self._own(changes), found, visible)

    def _told(self, images: pa.RecordBatch, origins: ChangeRows, *, visible: bool) -> Said:
        """Return rows as they are, or that they are gone.

        :param origins: changes of these partitions
        """
        table = self.context.reader.table
        place = places_of(image_keys(images, table)[0], raw_values(origins.partition_key))
        keys = digest_halves(_key_digests(images, table))
        changes = changes_of_nothing(origins.take(place), images, keys, table)
        return Said(self._own(changes), images, np.full(len(images), visible))

    def _own(self, changes: ChangeRows) -> ChangeRows:
        """Changes under digests that no message had before, not even for another bootstrap: consumers drop repeats."""
        bootstrap = np.frombuffer(hashlib.blake2b(self.bootstrap.encode(), digest_size=16).digest(), np.uint64)
        return replace(changes, digest=changes.digest ^ bootstrap)


def _of_partitions(images: pa.RecordBatch, rows: ChangeRows, table: TableSchema) -> pa.RecordBatch:
    """Return the images of partitions that changes touch: another one may have the same token."""
    return images.filter(pc.is_in(image_keys(images, table)[0], raw_values(rows.partition_key)))


def _differences(images: pa.RecordBatch, copies: pa.RecordBatch, table: TableSchema, now_s: int) -> tuple[Mask, Mask]:
    """Tell which images are shown otherwise than they were copied, and which copies were shown, and are gone."""
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
    """Tell which rows are the same, values and times, as of a moment."""
    digests = zip(*(row_digests(live_rows(one, table, now_s)) for one in (images, others)), strict=True)
    alike: Mask = np.logical_and(*(one == other for one, other in digests))
    return alike


def _key_digests(images: pa.RecordBatch, table: TableSchema) -> pa.Array:
    return key_digests(images, table).cast(pa.binary(16))


def _nothing(images: pa.RecordBatch, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(count, one.type) for one in images.schema], schema=images.schema)
