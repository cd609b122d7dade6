"""Rows of which a bootstrap has copied something old: what the replica has of them follows the copies in the stream.

The scan may not have seen what only some replicas had when it was published before. The replica takes the changes of
these passes once more (:func:`ringsync.streams.pass_log.first_to_add`). In the stream the copied rows come behind their
messages, and are the newest there: so those that the replica shows otherwise are told again behind them, in one pass.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ringsync.changes.image_rows import image_keys
from ringsync.changes.images import row_images_of
from ringsync.config import load_config
from ringsync.replica.digests import row_digests
from ringsync.replica.keys import key_digests
from ringsync.replica.live_rows import live_rows
from ringsync.schema.table import TableSchema
from ringsync.state.staging import decode_rows, encode_rows
from ringsync.steps.passes import Outputs, PassContext, own_name, write_messages
from ringsync.steps.rows_after import Mask, previous_of
from ringsync.steps.rows_before import Said, alive, places_of
from ringsync.steps.spared_rows import changes_of_nothing
from ringsync.streams.files import FileStream
from ringsync.streams.pass_log import Digests, changes_key, digest_halves, pass_bucket

TOLD_AGAIN = "told_again"
"""In the counts of a pass that tells such rows: the number of the bootstrap's ``begin``."""


@dataclass(frozen=True)
class MissedRows:
    """Spark calls it with files of merged change rows, each with a name that is unique in the pass.

    :ivar context: its reader has the replica, with all passes
    :ivar bootstrap: whose rows were copied
    :ivar copied_version: of the replica's base: the copied rows, and nothing else
    """

    context: PassContext
    bootstrap: str
    copied_version: int

    def __call__(self, files: Iterable[tuple[str, str]]) -> Iterator[Outputs]:
        reader = self.context.reader
        config = load_config(self.context.config_path)
        store = config.open_store()
        for name, key in files:
            rows = reader.version.from_store(decode_rows(store.get(key)))
            said = self.said(rows, int(time.time()))
            if said is None:
                continue
            own, now_ms = own_name(self.context, name), int(time.time() * 1000)
            # It changes nothing; but what is left of a try that is killed is found by such a file (tries.py).
            changes = changes_key(reader.table.table_id, self.context.number, own)
            store.put(changes, encode_rows(reader.version.to_store(rows.slice(0, 0))))
            writer = FileStream(store, self.context.topic).open_part(
                pass_bucket(self.context.number), own, self.context.schema_version, config.stream.codec
            )
            write_messages(writer, self.context, config, said, now_ms)
            yield Outputs(
                part=writer.finish(),
                changes=changes,
                deletions=None,
                deleted_until_us=None,
                digests={},
                rows=0,
                messages=said.changes.num_rows,
                lags_ms=(),
                made_at_ms=now_ms,
            )

    def said(self, rows: pa.RecordBatch, now_s: int) -> Said | None:
        """The rows that were copied otherwise than the replica shows them, of all that changes touch; None: none.

        :param rows: merged change rows
        :param now_s: seconds since the epoch
        """
        reader = self.context.reader
        table, state = reader.table, reader.replica
        assert state is not None
        own = row_images_of(rows, table, load_config(reader.config_path).replica.unrepresentable_values)
        images = previous_of(state, table, rows, own)
        copied = previous_of(replace(state, base_version=self.copied_version, changes_version=-1), table, rows, own)
        keys = digest_halves(key_digests(images, table).cast(pa.binary(16)))
        before = places_of(key_digests(images, table), key_digests(copied, table))
        # Another partition may have the same token; and of what was not copied the newest message is another.
        origin = places_of(image_keys(images, table)[0], rows["partition_key"])
        chosen = np.flatnonzero((before >= 0) & (origin >= 0))
        copies = copied.take(pa.array(before[chosen]))
        differs = alive(copies, table, now_s) & ~_shown_alike(images.take(pa.array(chosen)), copies, table, now_s)
        chosen = chosen[differs]
        if not len(chosen):
            return None
        images, keys = images.take(pa.array(chosen)), keys[chosen] ^ _digest(self.bootstrap)
        changes = changes_of_nothing(rows.take(pa.array(origin[chosen])), images, keys, table)
        return Said(changes, images, alive(images, table, now_s))


def _shown_alike(images: pa.RecordBatch, others: pa.RecordBatch, table: TableSchema, now_s: int) -> Mask:
    """Which rows are the same, values and times, as of a moment."""
    digests = zip(*(row_digests(live_rows(one, table, now_s)) for one in (images, others)), strict=True)
    alike: Mask = np.logical_and(*(one == other for one, other in digests))
    return alike


def _digest(bootstrap: str) -> Digests:
    """Makes messages of one bootstrap different from those of another: consumers drop repeats."""
    return np.frombuffer(hashlib.blake2b(bootstrap.encode(), digest_size=16).digest(), np.uint64)
