"""Passes in the making: settled change rows become messages, merged change rows for the replica, and digests.

Tasks write files (:func:`make_outputs`). The driver commits a pass that names them (:func:`commit`), and then does what
follows from it (:mod:`ringsync.steps.passes.follow_ups`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.changes.batch import ChangeRows
from ringsync.changes.reconcile.rows import merge
from ringsync.changes.schema import PARTITION_DELETION
from ringsync.compiled.arrow import integers
from ringsync.cql.cells import Cells, raw_values
from ringsync.images.after import without_expired
from ringsync.images.queries import queries
from ringsync.images.visible import same_keys
from ringsync.ledger import passes
from ringsync.ledger.staging import encode_rows
from ringsync.ledger.tries import Try, remove_tries
from ringsync.steps.passes.pieces import divided, seen
from ringsync.steps.passes.rows_after import AfterReader, images_after, rows_removed, with_before
from ringsync.steps.passes.rows_before import Said
from ringsync.steps.passes.spared_rows import UnseenDeletionsError, spared_rows
from ringsync.storage.port import ObjectStore
from ringsync.streams.change_messages import change_messages
from ringsync.streams.files import FileStream, Part, PartWriter

LAG_SAMPLE = 1000
"""About how many rows of a slice have their lag remembered."""


@dataclass(frozen=True)
class PassContext:
    """What all tasks of a pass need to know.

    :ivar attempt: unique name of the attempt to make the pass
    :ivar bootstrap: id of the bootstrap that is going on; empty: none
    :ivar late: whether the rows were late
    :ivar endpoints: addresses of nodes by host id
    :ivar schema_version: version of the stream's schemas
    """

    reader: AfterReader
    topic: str
    number: int
    attempt: str
    bootstrap: str
    late: bool
    endpoints: Mapping[str, str]
    schema_version: int


@dataclass(frozen=True)
class Made:
    """The result for some change rows.

    :ivar outputs: None: there is nothing to publish
    :ivar open: rows that are not published, since their result is unknown while replicas are down
    """

    outputs: Outputs | None
    open: pa.RecordBatch


@dataclass(frozen=True)
class Outputs:
    """Files of a slice.

    :ivar deletions: None: it has none
    :ivar deleted_until_us: their greatest timestamp, µs; None: there are none
    :ivar digests: keys of the files of digests, by bucket
    :ivar lags_ms: time from write to message of some of the rows, ms
    :ivar made_at_ms: time when the messages were made, ms since the epoch
    """

    part: Part
    changes: str
    deletions: str | None
    deleted_until_us: int | None
    digests: Mapping[str, str]
    rows: int
    messages: int
    lags_ms: tuple[int, ...]
    made_at_ms: int


def make_outputs(context: PassContext, store: ObjectStore, rows: Mapping[str, pa.RecordBatch], name: str) -> Made:
    """Make messages of change rows of one table, and write all files of a slice.

    A deletion of a partition or a range comes before the rows that it may cover. It is followed by the rows that it
    removes, if they get messages of their own, and by those that it spares.

    :param rows: change rows that were never published, each once, by the place of their digests: bucket, or LATE
    :param name: the slice's name, unique in the pass
    :raises StreamConflictError: the pass's folder is visible already, without these messages
    """
    try:
        return _outputs(context, store, rows, name)
    except UnseenDeletionsError as unseen:
        # The other rows are made as if these deletions did not exist: whenever they come, they hide older rows.
        every = pa.concat_batches(list(rows.values()))
        in_partitions = pc.is_in(every["partition_key"], unseen.partition_keys).to_numpy(zero_copy_only=False)
        waits = in_partitions & (integers(every["kind"]) >= PARTITION_DELETION)
    others = divided(rows, ~waits)
    made = make_outputs(context, store, others, name) if others else Made(None, every.slice(0, 0))
    return Made(made.outputs, pa.concat_batches([made.open, every.filter(pa.array(waits))]))


def _outputs(context: PassContext, store: ObjectStore, rows: Mapping[str, pa.RecordBatch], name: str) -> Made:
    """Make the outputs without open rows; deletions that are open cannot be left out here.

    :raises UnseenDeletionsError: there are such deletions
    """
    config, table = context.reader.config, context.reader.table
    batch = pa.concat_batches(list(rows.values()))
    every = ChangeRows.of(batch)
    merged = merge(every, table)
    after = images_after(context.reader, merged)
    seen(table, after.images)
    left_open = batch.slice(0, 0)
    if after.open.any():
        place = same_keys(every, merged, table)
        waits = (place >= 0) & after.open[place]
        left_open, rows = batch.filter(pa.array(waits)), divided(rows, ~waits)
        every, merged, after = every.where(~waits), merged.where(~after.open), after.known()
        if not len(every):
            return Made(None, left_open)
    now_ms = int(time.time() * 1000)
    name = own_name(context, name)
    writer = FileStream(store, context.topic).open_part(
        passes.pass_folder(context.number), name, context.schema_version, config.stream.codec
    )
    messages = 0
    changed = Said(merged, after.images, after.visible, after.at_s, after.before)
    removed = rows_removed(context.reader, merged)
    spared = (with_before(context.reader, said, removed) for said in spared_rows(context.reader, merged))
    for said in chain([changed], [removed] if removed else [], spared):
        messages += len(said.changes)
        # What was spared was not written, and what was removed is in the deletion's own query.
        texts = queries(merged, table) if said is changed and config.sync.source_query else None
        write_messages(writer, context, said, now_ms, texts, whole=context.reader.mode != "none")
    # The changes come first: they lead to what is left of a try that is killed (tries.py).
    changes = passes.changes_key(table.table_id, context.number, name)
    stored, deletes = context.reader.version.to_store(merged.to_arrow()), ~merged.of_row
    store.put(changes, encode_rows(stored))
    deletions = passes.deletions_key(table.table_id, context.number, name) if deletes.any() else None
    if deletions:
        store.put(deletions, encode_rows(stored.filter(pa.array(deletes))))
    digests = {}
    for bucket, batch in rows.items():
        digests[bucket] = passes.digests_key(table.table_id, bucket, context.number, name)
        store.put(digests[bucket], passes.encode_digests(batch["digest"]))
    lags = now_ms - every.write_time // 1000
    sample = np.sort(lags)[:: max(1, len(lags) // LAG_SAMPLE)]
    outputs = Outputs(
        part=writer.finish(),
        changes=changes,
        deletions=deletions,
        deleted_until_us=int(merged.deletion.timestamp[deletes].max()) if deletes.any() else None,
        digests=digests,
        rows=len(every),
        messages=messages,
        lags_ms=tuple(sample.tolist()),
        made_at_ms=now_ms,
    )
    return Made(outputs, left_open)


def write_messages(
    writer: PartWriter,
    context: PassContext,
    said: Said,
    now_ms: int,
    texts: pa.Array | None = None,
    *,
    whole: bool = True,
) -> None:
    """Add messages to a part of the stream.

    :param now_ms: time when the messages are made
    :param texts: ``source.query`` of each; None: they have none
    :param whole: whether images are of whole rows. Their messages leave out what had expired when the rows were read,
        as a SELECT did then. What has expired since keeps its end, or the row would have none for consumers
    """
    config, table, images = context.reader.config, context.reader.table, said.images
    if whole:
        images = without_expired(images, table, said.at_s)
    writer.add(
        change_messages(
            said.changes,
            images,
            said.visible,
            table,
            config.server_name,
            config.stream.mapping,
            hostnames=_endpoints(said.changes.node, context.endpoints),
            processed_at_ms=now_ms,
            schema_version=context.schema_version,
            late=context.late,
            queries=texts,
            before=said.before,
        )
    )


def own_name(context: PassContext, name: str) -> str:
    """Make a file name that no other task uses, nor another run of the same task: Spark may start a task anew while a
    first run, to which it has lost the connection, continues with another result.

    :param name: the slice's name
    """
    return f"{context.attempt}-{name}-{secrets.token_hex(8)}"


def commit(
    store: ObjectStore, context: PassContext, outputs: Iterable[Outputs], counts: Mapping[str, int]
) -> passes.Pass | None:
    """Commit a pass.

    :returns: None: another pass has this number. The files are removed, and what is left must be made anew
    """
    files = list(outputs)
    table_id = context.reader.table.table_id
    digests: dict[str, tuple[str, ...]] = {}
    for output in files:
        for bucket, key in output.digests.items():
            digests[bucket] = (*digests.get(bucket, ()), key)
    candidate = passes.Pass(
        number=context.number,
        kind="changes",
        table_id=table_id,
        created_at_ms=int(time.time() * 1000),
        bootstrap=context.bootstrap,
        late=context.late,
        parts=tuple(output.part for output in files),
        changes=tuple(output.changes for output in files),
        deletions=tuple(output.deletions for output in files if output.deletions),
        digests=digests,
        counts={**counts, **{name: sum(getattr(output, name) for output in files) for name in ("rows", "messages")}},
        deleted_until_us=max((at for output in files if (at := output.deleted_until_us) is not None), default=None),
        epoch=context.reader.ring.ring.epoch,
        lag_ms=int(np.median(lags)) if (lags := [lag for output in files for lag in output.lags_ms]) else 0,
    )
    if passes.put_pass(store, candidate):
        return candidate
    remove_tries(store, table_id, [context.topic], [Try.of(output.changes) for output in files])
    return None


def _endpoints(nodes: Cells | None, endpoints: Mapping[str, str]) -> pa.Array:
    """Return the addresses of host ids; unknown ids stay as they are."""
    assert nodes is not None, "staged rows name their node"
    encoded = raw_values(nodes, pa.string()).dictionary_encode()
    names = pa.array([endpoints.get(node, node) for node in encoded.dictionary.to_pylist()], pa.string())
    return names.take(encoded.indices)
