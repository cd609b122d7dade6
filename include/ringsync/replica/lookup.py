"""The newest images of some rows of a replica, read without a JVM: what a pass's change rows are merged with.

delta-rs reads both tables and knows their deletion vectors. The tokens wanted are joined with the table, so that of
other rows only the tokens are read; which of the rows are wanted is then told by their whole keys, batch by batch:
a partition of a million rows need not fit into memory for the sake of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringsync.replica.changes import VERSION, ReplicaState, changes_schema, delta_path
from ringsync.replica.keys import key_digests, partition_digests
from ringsync.schema.row_image import lake_names, row_image_schema
from ringsync.schema.table import TableSchema

Mask = npt.NDArray[np.bool_]

TOKENS_AT_ONCE = 20_000
"""They are written out in a query; a list of 100,000 overflows the stack of delta-rs's parser."""

SESSION = {
    "datafusion.execution.parquet.pushdown_filters": "true",
    # A Spark task has one core.
    "datafusion.execution.target_partitions": "1",
}


@dataclass(frozen=True)
class _Wanted:
    """What is asked for.

    :ivar tokens: sorted, each once
    :ivar keys: digests of the keys of single rows
    :ivar whole: tokens of partitions all of whose rows are wanted
    :ivar partitions: digests of the partitions of those single rows, where a table has static columns
    """

    table: TableSchema
    tokens: npt.NDArray[np.int64]
    keys: pa.Array
    whole: pa.Array
    partitions: pa.Array | None

    def select(self, rows: pa.RecordBatch, keys: pa.Array) -> tuple[Mask, Mask]:
        """Rows that are wanted; and those that are not but show their partition's static cells."""
        own = _is_in(keys, self.keys) | _is_in(rows["token"], self.whole)
        if self.partitions is None:
            return own, np.zeros_like(own)
        among = _is_in(partition_digests(rows, self.table), self.partitions)
        first = lake_names(self.table)[self.table.clustering[0].name]
        alone = ~(_valid(rows[first]) | _valid(pc.struct_field(rows["_x"], [first, "raw"])))
        return own | (among & alone), among & ~own & ~alone


def previous_images(
    state: ReplicaState, table: TableSchema, keys: pa.RecordBatch, partitions: pa.Array | None = None
) -> pa.RecordBatch:
    """The newest images of rows and of whole partitions, each row once, in token order.

    In a table with static columns each partition of ``keys`` also gives its row without clustering, and one other
    row if it has any: all rows of a partition show its static cells, and a new row needs them.

    :param state: :func:`ringsync.replica.changes.replica_state`
    :param keys: the rows wanted; of each batch ``token``, the key columns and ``_x`` are looked at, as
        :func:`ringsync.schema.row_image.row_image_schema` has them
    :param partitions: int64, tokens of partitions all of whose rows are wanted; another partition with the same
        token comes along
    :returns: row images; no row for what the replica does not have; dead rows are there as long as they are kept
    """
    wanted = _wanted(table, keys, partitions)
    newest = _newest_changes(state, table, wanted)
    superseded = key_digests(newest, table) if newest.num_rows else pa.array([], pa.binary())
    found: list[pa.RecordBatch] = []
    witnesses: list[pa.RecordBatch] = []
    for batch in [newest.drop_columns([VERSION])] if newest.num_rows else []:
        _collect(batch, superseded, wanted, found, witnesses)
    for batch in _read(state.base_uri, state.base_version, row_image_schema(table), wanted.tokens, state.options):
        batch_keys = key_digests(batch, table)
        left = pa.array(~_is_in(batch_keys, superseded))
        _collect(batch.filter(left), batch_keys.filter(left), wanted, found, witnesses)
    schema = row_image_schema(table)
    rows = pa.Table.from_batches([*found, *_one_each(witnesses, table)], schema).combine_chunks()
    return _first_batch(rows.take(pc.sort_indices(rows["token"])))


def _wanted(table: TableSchema, keys: pa.RecordBatch, partitions: pa.Array | None) -> _Wanted:
    whole = pa.array([], pa.int64()) if partitions is None else partitions
    tokens = np.union1d(keys["token"].to_numpy(), whole.to_numpy()).astype(np.int64)
    has_static = bool(table.clustering and table.of_kind("static"))
    return _Wanted(
        table,
        tokens,
        key_digests(keys, table),
        whole,
        pc.unique(partition_digests(keys, table)) if has_static else None,
    )


def _newest_changes(state: ReplicaState, table: TableSchema, wanted: _Wanted) -> pa.RecordBatch:
    """Of all rows with these tokens in the table of changes the newest of each key."""
    schema = changes_schema(table)
    batches: list[pa.RecordBatch] = []
    if state.changes_version >= 0:
        batches = list(_read(state.changes_uri, state.changes_version, schema, wanted.tokens, state.options))
    rows = _first_batch(pa.Table.from_batches(batches, schema).combine_chunks())
    if not rows.num_rows:
        return rows
    numbered = pa.table([key_digests(rows, table), rows[VERSION], np.arange(rows.num_rows)], names=["key", "v", "i"])
    order = numbered.sort_by([("key", "ascending"), ("v", "descending")])
    ranked = order["key"].combine_chunks()
    first = np.ones(len(ranked), np.bool_)
    first[1:] = pc.not_equal(ranked[1:], ranked[:-1]).to_numpy(zero_copy_only=False)
    return rows.take(pa.array(np.sort(order["i"].to_numpy()[first])))


def _collect(
    batch: pa.RecordBatch,
    keys: pa.Array,
    wanted: _Wanted,
    found: list[pa.RecordBatch],
    witnesses: list[pa.RecordBatch],
) -> None:
    if not batch.num_rows:
        return
    own, witness = wanted.select(batch, keys)
    if own.any():
        found.append(batch.filter(pa.array(own)))
    if witness.any():
        witnesses += _one_each([batch.filter(pa.array(witness))], wanted.table)


def _one_each(batches: list[pa.RecordBatch], table: TableSchema) -> list[pa.RecordBatch]:
    """The first row of each partition."""
    if not batches:
        return []
    rows = _first_batch(pa.Table.from_batches(batches).combine_chunks())
    numbers = partition_digests(rows, table).dictionary_encode().indices.to_numpy()
    _, first = np.unique(numbers, return_index=True)
    return [rows.take(pa.array(first))]


def _read(
    uri: str, version: int, schema: pa.Schema, tokens: npt.NDArray[np.int64], options: Mapping[str, str]
) -> Iterator[pa.RecordBatch]:
    """All rows with these tokens."""
    from deltalake import DeltaTable, QueryBuilder

    if not len(tokens):
        return
    table = DeltaTable(delta_path(uri), version=version, storage_options=dict(options))
    columns = ", ".join('b."' + name.replace('"', '""') + '"' for name in schema.names)
    for first in range(0, len(tokens), TOKENS_AT_ONCE):
        some = tokens[first : first + TOKENS_AT_ONCE].tolist()
        query = (
            f"SELECT {columns} FROM images b LEFT SEMI JOIN (VALUES {', '.join(f'({one})' for one in some)}) "
            f"AS asked(token) ON b.token = asked.token WHERE b.token BETWEEN {some[0]} AND {some[-1]}"
        )
        for batch in QueryBuilder(SESSION).register("images", table).execute(query):
            yield pa.record_batch(batch).cast(schema)


def _first_batch(rows: pa.Table) -> pa.RecordBatch:
    """A table without chunks as one batch."""
    return next(iter(rows.to_batches()), None) or pa.RecordBatch.from_arrays(
        [pa.nulls(0, field.type) for field in rows.schema], schema=rows.schema
    )


def _is_in(values: pa.Array, among: pa.Array) -> Mask:
    found: Mask = pc.is_in(values, among).to_numpy(zero_copy_only=False)
    return found


def _valid(values: pa.Array) -> Mask:
    found: Mask = pc.is_valid(values).to_numpy(zero_copy_only=False)
    return found
